"""The page as text: complete, small, and with nothing in it that could load or run."""

import base64
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser

import pytest
from msgspec.structs import replace
from report_cases import (
    HOSTILE,
    RUNTIMES,
    drawn_trace,
    measured_network,
    write_losses,
    write_run,
)

from gradweave._src.advice import advise
from gradweave._src.compression import WIRE_SHARES
from gradweave._src.report.folders import read_folders
from gradweave._src.report.page import make_page
from gradweave._src.report.runtimes import is_lossy
from gradweave._src.report.sentences import about_lossy

LOADING = {"src", "href", "xlink:href", "srcset", "data", "action", "poster"}


class Elements(HTMLParser):
    """Tags with their attributes, and what scripts and styles hold."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.blocks: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] in {"script", "style"}:
            self.blocks.append((self.tags[-1][0], data))
        self.words.append(data)


def data_of(page: str):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_nothing_is_loaded(small_page):
    elements = Elements(small_page)
    for _, attributes in elements.tags:
        for name in LOADING & set(attributes):
            assert str(attributes[name]).startswith(("#", "data:")), attributes
    assert not {tag for tag, _ in elements.tags} & {"iframe", "object", "embed", "img", "base"}
    for kind, text in elements.blocks:
        assert "@import" not in text
        assert "url(" not in text
        if kind == "script":
            assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|import)\s*\(", text)


def test_the_policy_forbids_requests_and_foreign_scripts(small_page):
    (policy,) = [
        str(attributes["content"])
        for tag, attributes in Elements(small_page).tags
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    (script,) = re.findall(r"<script>(.*?)</script>", small_page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy


def test_hostile_text_stays_text(hostile_page):
    elements = Elements(hostile_page)
    tags = [tag for tag, _ in elements.tags]
    assert "img" not in tags
    assert tags.count("script") == 2
    assert not any(name.startswith("on") for _, attributes in elements.tags for name in attributes)
    assert data_of(hostile_page)["runs"][0]["tensors"]["names"][3] == f"{HOSTILE} 3"
    assert " ".join(elements.words).count(HOSTILE) >= 5


def test_what_is_on_it(small_page):
    words = " ".join(Elements(small_page).words)
    for text in (*RUNTIMES, "small", "What if…", "gtopk:0.001", "ring, by formula"):
        assert text in words
    assert "optimal was the fastest" in words or "mgwfbp was the fastest" in words
    figures = re.findall(r'<p class="see">([^<]+)</p>', small_page)
    assert len(figures) == 10
    assert all(sentence.endswith(".") and sentence.count(". ") == 0 for sentence in figures)


def test_it_advises_as_the_command_line_does(small_run, small_page):
    (folder,) = read_folders([small_run])
    advice = advise(folder.run.trace, folder.run.network, workers=folder.workers)
    words = " ".join(Elements(small_page).words)
    for option in advice.options:
        assert option.changes in words
        assert option.code in words
    assert {one.name for one in advice.unpriced} == {"half-the-workers", "twice-the-workers"}
    assert all(one.reason in words for one in advice.unpriced)
    assert advice.why in words


def test_what_may_be_rounded_on_the_wire(small_page, tmp_path):
    data = data_of(small_page)
    assert data["wires"] == {"as it is": 1, "bf16": 0.5, "int8": WIRE_SHARES["int8"]}
    assert data["runs"][0]["is_compressible"]
    narrow = drawn_trace(6).with_bytes_per_element(2)
    path = write_run(tmp_path / "run", narrow, measured_network(), runtimes={"single": "single"})
    (run,) = data_of(make_page(read_folders([path])))["runs"]
    assert not run["is_compressible"]


@pytest.mark.long
def test_a_large_model_is_a_small_file(large_page):
    assert len(large_page.encode()) < 6_000_000


def test_spans_and_buckets_are_those_of_the_run(small_run, small_page):
    (folder,) = read_folders([small_run])
    (run,) = data_of(small_page)["runs"]
    assert [runtime["name"] for runtime in run["runtimes"]] == list(RUNTIMES)
    for runtime in run["runtimes"]:
        plan = folder.run.plans[runtime["name"]]
        assert [count for _, count in runtime["buckets"]] == list(plan.lengths)
        for kind, timelines in (
            ("measured", {name: ranks[0] for name, ranks in folder.run.measured.items()}),
            ("predicted", folder.run.predicted),
        ):
            spans = timelines[runtime["name"]].spans
            sent = [span for span in spans if span.lane == "communication"]
            assert [m[:3] for m in runtime[kind]["messages"]] == [
                [round(s.start_s, 9), round(s.end_s, 9), s.nbytes] for s in sent
            ]


def test_buckets_of_tensors_that_are_not_neighbours(tmp_path):
    """torch may fill buckets in another order than backward's."""
    path = write_run(
        tmp_path / "run", drawn_trace(6), measured_network(), runtimes={"single": "single"}
    )
    (folder,) = read_folders([path])
    names = [tensor.name for tensor in folder.run.trace.tensors]
    (timeline, _) = folder.run.measured["single"]
    *compute, message = timeline.spans
    shuffled = replace(message, tensors=(names[4], names[0], names[1], names[5]))
    folder.run.measured["single"] = (replace(timeline, spans=(*compute, shuffled)),)
    (runtime,) = data_of(make_page([folder]))["runs"][0]["runtimes"]
    assert runtime["measured"]["messages"][0][4] == [0, 2, 4, 2]


def test_phases_and_compression_are_named(odd_page):
    served, thinned = data_of(odd_page)["runs"][0]["runtimes"]
    assert [m[3] for m in served["predicted"]["messages"]] == ["push 1", "pull 1"]
    assert thinned["ways"] == ["gtopk:0.001"]
    assert "only the largest gradients of all workers" in odd_page


def test_several_runs_make_one_page(small_run, hostile_run):
    page = make_page(read_folders([small_run, hostile_run]))
    assert [run["name"] for run in data_of(page)["runs"]] == ["small", hostile_run.name]
    assert 'id="run-2"' in page


def test_ours_is_named_first_and_what_changes_the_training_stands_apart(trained_run, trained_page):
    (folder,) = read_folders([trained_run])
    rows = {row.runtime: row for row in folder.run.results.rows}
    assert rows["gtopk"].iteration_s < rows["gradweave"].iteration_s, "the case shows nothing"
    (said,) = re.findall(r'<p class="headline">([^<]+)</p>', trained_page)
    assert said.startswith(f"gradweave took {1e3 * rows['gradweave'].iteration_s:,.1f} ms")
    assert "times as fast as torch-ddp" in said
    assert "gtopk" not in said
    (apart,) = re.findall(r'<p class="lossy">([^<]+)</p>', trained_page)
    assert apart.startswith("Apart, because it changes what is learnt: gtopk, ")
    assert "whose loss is not known here" in apart
    names = [runtime["name"] for runtime in data_of(trained_page)["runs"][0]["runtimes"]]
    assert names == ["gradweave", "torch-ddp", "gtopk"]
    panels = re.findall(r"<h4>([^<]+)", trained_page)
    assert [name.strip() for name in panels] == [*names, *names]


def test_what_a_lossy_runtime_has_learnt(trained_run, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(trained_run, path)
    write_losses(path, label="gtopk:0.001")
    (folder,) = read_folders([path])
    dense, thinned = folder.losses.series
    said = about_lossy(folder)
    assert f"whose loss after 180 steps is {thinned.losses[-1]:.4f}" in said
    assert f"beside {dense.losses[-1]:.4f} of dense" in said


LOSSY = "rounded bf16 fp16 int8 topk:0.01 gtopk gtopk-tree powersgd:2 torch-fp16 torch-bf16-tuned"
EXACT = "gradweave gradweave:exact torch-ddp torch-ddp-tuned zero fsdp2:single sharded optimal:0.05"


def test_who_changes_the_training():
    assert all(map(is_lossy, [*LOSSY.split(), "gradweave:rounded"]))
    assert not any(map(is_lossy, [*EXACT.split(), "bsp-overlap:ring", "a stranger"]))


def test_a_plan_that_makes_messages_smaller_changes_the_training(odd_run):
    (folder,) = read_folders([odd_run])
    assert is_lossy("somebody's", folder.run.plans["gtopk"])
    assert not is_lossy("somebody's", folder.run.plans["parameter-server:1"])


def test_names_that_are_used_are_explained(small_page, trained_page):
    def explained_on(page):
        return re.findall(r"<dt>([^<]+)</dt>", page)

    assert explained_on(small_page) == [*RUNTIMES, "ddp"]
    planners = ["ddp", "wfbp", "single", "mgwfbp", "optimal"]
    assert explained_on(trained_page) == ["gradweave", "torch-ddp", "gtopk", *planners]


def test_phases_of_planning_are_marked_on_curves(trained_page, small_page):
    words = " ".join(Elements(trained_page).words)
    for phase in ("planning", "trying", "settled"):
        assert f">{phase}</text>" in trained_page
        assert f">{phase}</text>" not in small_page
    assert "gradweave: settled after 30 steps" in trained_page
    assert "How long each step took" in words
    assert "gradweave: step 31 took 200.0 ms" in trained_page
    assert "How long each step took" not in " ".join(Elements(small_page).words)


def without(folder, *, measured=(), predicted=(), plans=()):
    run = folder.run
    changed = replace(
        run,
        measured={name: one for name, one in run.measured.items() if name not in measured},
        predicted={name: one for name, one in run.predicted.items() if name not in predicted},
        plans={name: one for name, one in run.plans.items() if name not in plans},
    )
    return replace(folder, run=changed)


def test_what_a_run_lacks_is_said(trained_run):
    """A folder of a training may lack what a benchmark's has."""
    (folder,) = read_folders([trained_run])
    bare = without(
        folder,
        measured=["torch-ddp", "gtopk"],
        predicted=["gradweave", "gtopk"],
        plans=["gradweave", "gtopk"],
    )
    page = make_page([bare])
    ours, torchs, thinned = data_of(page)["runs"][0]["runtimes"]
    assert (ours["predicted"], torchs["measured"]) == (None, None)
    assert (thinned["measured"], thinned["predicted"], thinned["buckets"]) == (None, None, [])
    sent = [m[4] for m in ours["measured"]["messages"]]
    assert ours["buckets"] == sent
    assert ours["ways"] == ["native"] * len(sent)
    assert page.count('<div class="gantt"></div>') == 2 + 1
    for missing in ("measured", "predicted", "measured or predicted"):
        assert f"No timeline was {missing}." in page


def test_nodes_and_predictions_may_be_unknown(trained_run):
    (folder,) = read_folders([trained_run])
    rows = tuple(
        replace(
            row,
            rate=None,
            nodes=None,
            ranks_per_node=None,
            predicted_s=None,
            prediction_error=None,
            compute_s=None,
            exposed_s=None,
            speedup=None,
        )
        for row in folder.run.results.rows
    )
    results = replace(folder.run.results, rows=rows)
    page = make_page([replace(folder, run=replace(folder.run, results=results))])
    assert "4 workers. Network lab" in page
    assert "waiting for the network (" not in page
    assert "ms were predicted" not in page
    assert "speed-up" not in page.split("<script")[0]


def test_ranks_are_strips_on_one_clock(small_run, small_page):
    (folder,) = read_folders([small_run])
    (run,) = data_of(small_page)["runs"]
    for runtime in run["runtimes"]:
        timelines = folder.run.measured[runtime["name"]]
        assert len(runtime["ranks"]) == len(timelines) == 2
        for strips, timeline in zip(runtime["ranks"], timelines, strict=True):
            for lane, strip in zip(("forward", "backward", "communication"), strips, strict=True):
                spans = [span for span in timeline.spans if span.lane == lane]
                assert strip[0] == pytest.approx(min(span.start_s for span in spans))
                assert strip[-1] == pytest.approx(max(span.end_s for span in spans))
                assert strip == sorted(strip)


def test_one_rank_alone_has_no_strip(trained_run):
    (folder,) = read_folders([trained_run])
    alone = {name: ranks[:1] for name, ranks in folder.run.measured.items()}
    page = make_page([replace(folder, run=replace(folder.run, measured=alone))])
    assert all(runtime["ranks"] == [] for runtime in data_of(page)["runs"][0]["runtimes"])


def test_a_network_without_links_is_drawn_too(tmp_path):
    network = replace(measured_network(), links=None)
    path = write_run(tmp_path / "run", drawn_trace(5), network)
    page = make_page(read_folders([path]))
    assert 'id="what-if"' in page
    assert "ring, by formula" not in page


def test_without_a_price_nothing_is_asked(tmp_path):
    """Nobody knows what messages cost among the workers of this run."""
    path = write_run(tmp_path / "run", drawn_trace(5), measured_network())
    (folder,) = read_folders([path])
    entries = tuple(replace(entry, workers=3) for entry in folder.run.network.costs)
    network = replace(folder.run.network, costs=entries, links=None)
    page = make_page([replace(folder, run=replace(folder.run, network=network))])
    assert "What happens with more workers" not in page
    assert "What a message costs" not in page
    assert data_of(page)["runs"][0]["price"] is None
    assert 'id="what-if"' not in page
