"""The page as text: complete, small, and with nothing in it that could load or run."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest
from msgspec.structs import replace
from report_cases import HOSTILE, RUNTIMES, drawn_trace, measured_network, write_run

from gradweave.advice import advise
from gradweave.compression import WIRE_SHARES
from gradweave.costs import Line
from gradweave.network import CollectiveCost, Network
from gradweave.report.document import ring_link
from gradweave.report.folders import read_folders
from gradweave.report.page import make_page

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
    assert len(figures) == 9
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


@pytest.mark.parametrize("workers", [2, 4, 7])
def test_a_network_without_links_gets_those_of_a_ring_that_costs_the_same(workers):
    line = Line(startup_s=0.012, s_per_byte=1.5e-8)
    entry = CollectiveCost(operation="all-reduce", collective="native", workers=workers, cost=line)
    network = Network(name="lines", source="made up", costs=(entry,))
    link = ring_link(network, workers).link
    assert 2 * (workers - 1) * link.latency_s == pytest.approx(line.startup_s)
    assert 2 * (workers - 1) / workers * link.s_per_byte == pytest.approx(line.s_per_byte)


def test_a_network_without_links_is_drawn_too(tmp_path):
    network = replace(measured_network(), links=None)
    path = write_run(tmp_path / "run", drawn_trace(5), network)
    assert "worked out from all-reduce by native" in make_page(read_folders([path]))
