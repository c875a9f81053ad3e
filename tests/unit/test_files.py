"""Files come back as they were written; anything else is one line with file, field and value."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from msgspec.structs import replace
from mutations import with_value
from strategies import costs, traces

from gradweave import (
    CollectiveCost,
    Compression,
    FormatError,
    Line,
    Network,
    Plan,
    Recipe,
    RequestError,
    Timeline,
    Trace,
    load_network,
    make_plan,
    simulate,
)
from gradweave._src import files, presets
from gradweave._src.documents import KINDS
from gradweave._src.remembered import Remembered
from gradweave._src.results import Losses, Results
from gradweave._src.training_record import Account, Steps

GOLDEN = Path(__file__).parents[1] / "golden"
RING = CollectiveCost(
    operation="all-reduce",
    collective="ring",
    workers=2,
    cost=Line(startup_s=1e-3, s_per_byte=1e-8),
)


def there_and_back(value):
    return files.loads(files.dumps(value), type(value), origin="text")


@given(trace=traces(), cost=costs)
def test_every_value_comes_back_as_it_was(trace, cost):
    entry = CollectiveCost(operation="all-reduce", collective="native", workers=2, cost=cost)
    network = Network(name="drawn", source="drawn", costs=(entry,))
    plan = make_plan(trace, network, workers=2)
    timeline = simulate(trace, plan, network, workers=2)
    for value in (trace, network, plan, timeline):
        assert there_and_back(value) == value


def test_compression_and_links_come_back_too(small_trace):
    network = load_network("blueconnect-48x4-p100-nvlink-100gbib")
    plan = make_plan(
        small_trace,
        network,
        workers=4,
        compression=Compression(method="gtopk", density=0.001),
    )
    assert there_and_back(network) == network
    assert there_and_back(plan) == plan


CURRENT = {
    Trace: 2,
    Network: 4,
    Plan: 3,
    Timeline: 1,
    Results: 2,
    Losses: 2,
    Steps: 1,
    Account: 1,
    Recipe: 4,
    Remembered: 3,
}


@pytest.mark.parametrize("kind", CURRENT)
def test_written_files_stay_readable(kind):
    """These were written once and are never rewritten: users keep such files."""
    path = GOLDEN / f"{kind.__name__.lower()}-{CURRENT[kind]}.json"
    assert files.dumps(files.read(path, kind)) == path.read_text()


def test_people_have_a_word_for_every_kind():
    assert KINDS.keys() == {schema.partition("/")[0] for schema in files.SCHEMAS.values()}


def test_networks_of_version_1_have_no_latency():
    network = files.read(GOLDEN / "network-1.json", Network)
    assert [(entry.beside, entry.latency_s) for entry in network.costs] == [("nothing", 0.0)] * 2
    assert network.costs[0].cost == Line(startup_s=0.0005, s_per_byte=2.5e-09)


def test_losses_of_version_1_have_no_stages():
    losses = files.read(GOLDEN / "losses-1.json", Losses)
    assert [series.label for series in losses.series] == ["torch-ddp", "gtopk:0.001"]
    assert [series.stages for series in losses.series] == [(), ()]


def test_results_of_version_1_have_as_many_workers_as_their_nodes():
    older, newer = (files.read(GOLDEN / f"results-{version}.json", Results) for version in (1, 2))
    assert older.rows == newer.rows[:1]
    assert older.rows[0].workers == 4


def test_plans_of_version_1_are_for_backward():
    plan = files.read(GOLDEN / "plan-1.json", Plan)
    assert plan.passes == "backward"
    assert files.read(GOLDEN / "plan-2.json", Plan) == replace(
        plan, passes="both", buckets=plan.buckets[:1]
    )


def test_recipes_of_version_1_are_completed():
    """They did not say what a step took, and hold plans and networks of older versions."""
    older, newer, newest = (
        files.read(GOLDEN / f"recipe-{version}.json", Recipe) for version in (1, 2, 3)
    )
    assert older == replace(newer, step_s=None)
    assert newer == newest


def test_older_traces_have_no_shapes():
    """Also those that recipes hold."""
    older, newer = (files.read(GOLDEN / f"trace-{version}.json", Trace) for version in (1, 2))
    assert older == _without_shapes(newer)
    old_recipe, recipe = (
        files.read(GOLDEN / f"recipe-{version}.json", Recipe) for version in (3, 4)
    )
    assert old_recipe == replace(recipe, trace=_without_shapes(recipe.trace))


def _without_shapes(trace):
    assert any(tensor.shape is not None for tensor in trace.tensors)
    return replace(trace, tensors=tuple(replace(tensor, shape=None) for tensor in trace.tensors))


def test_older_networks_select_for_nothing():
    network = files.read(GOLDEN / "network-2.json", Network)
    assert network.selection_s_per_element == 0.0
    assert replace(network, selection_s_per_element=6e-10) == files.read(
        GOLDEN / "network-3.json", Network
    )


def test_networks_of_version_3_go_on_as_they_are():
    older, newer = (files.read(GOLDEN / f"network-{version}.json", Network) for version in (3, 4))
    assert older == replace(newer, costs=newer.costs[:2])


def test_plans_of_versions_1_and_2_meant_the_papers_tree_by_gtopk():
    older, newer = (files.read(GOLDEN / f"plan-{version}.json", Plan) for version in (1, 3))
    assert older == replace(newer, buckets=newer.buckets[:2])
    assert [bucket.compression for bucket in newer.buckets] == [
        None,
        Compression(method="gtopk-tree", density=0.001),
        Compression(method="gtopk", density=0.01),
    ]


# A file of the version before, and what it says today.
OLD_AND_NEW = {"topk": "topk", "gtopk": "gtopk-tree", "gtopk-butterfly": "gtopk"}


@pytest.mark.parametrize("old", OLD_AND_NEW)
def test_exchanges_of_older_files_keep_their_meaning(old, small_trace):
    compression = Compression(method=OLD_AND_NEW[old], density=0.001)
    exchange = CollectiveCost(
        operation="all-reduce",
        collective=str(compression),
        workers=2,
        cost=Line(startup_s=1e-3, s_per_byte=1e-9),
    )
    network = Network(name="fitted", source="made up", costs=(RING, exchange))
    plan = make_plan(small_trace, network, workers=2, compression=compression)
    recipe = Recipe(
        workers=2, device="cpu", plan=plan, trace=small_trace, network=network, step_s=5.0
    )
    for value, version in ((plan, 2), (network, 3), (recipe, 2)):
        text = files.dumps(value).replace(f'"{compression.method}', f'"{old}')
        schema = files.SCHEMAS[type(value)]
        older = text.replace(schema, f"{schema.partition('/')[0]}/{version}")
        assert files.loads(older, type(value), origin="text") == value


@pytest.mark.parametrize(
    ("kind", "version", "wrong"),
    [
        (Plan, 2, {"planner": "x", "buckets": [3], "overlap": True, "passes": "backward"}),
        (Plan, 2, {"planner": "x", "buckets": {}, "overlap": True, "passes": "backward"}),
        (Plan, 2, {"planner": "x", "buckets": [{"compression": {"method": []}}]}),
        (Network, 3, {"name": "x", "costs": [None]}),
        (Network, 3, {"name": "x", "costs": [{"collective": 7}]}),
        (Recipe, 2, {"plan": 3, "network": []}),
        (Results, 1, {"command": "x", "rows": [{"nodes": "two", "ranks_per_node": 1}]}),
    ],
)
def test_older_files_that_are_not(kind, version, wrong):
    """An upgrade takes anything; what is wrong is found afterwards, with its place."""
    schema = f"gradweave.{kind.__name__.lower()}/{version}"
    with pytest.raises(FormatError, match=r"^text: "):
        files.loads(json.dumps({"schema": schema, **wrong}), kind, origin="text")


@pytest.mark.parametrize("name", presets.trace_names())
def test_shipped_traces(name):
    trace = presets.load_trace(name)
    assert trace.name == name
    assert trace.origin == ("measured" if name == "googlenet-k80" else "estimated")


@pytest.mark.parametrize("name", presets.network_names())
def test_shipped_networks(name):
    assert presets.load_network(name).name == name


@pytest.fixture
def document(small_trace):
    return json.loads(files.dumps(small_trace))


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        (
            ["schema"],
            "gradweave.trace/3",
            "schema: expected 'gradweave.trace/2', found 'gradweave",
        ),
        (["color"], "red", "Object contains unknown field `color`"),
        (["tensors", 1, "size"], 3, r"tensors[1]: Object contains unknown field `size`"),
        (["tensors", 1, "ready_s"], -1, r"tensors[1]: 'b': ready_s must be a number >= 0, got -1"),
        (["tensors", 1, "ready_s"], float("nan"), r"tensors[1]: 'b': ready_s must be a number >="),
        (["tensors", 1, "ready_s"], 0.5, "ready_s of 'b' is 0.5, earlier than 1.0 of 'c'"),
        (["tensors", 1, "name"], "c", "tensors: 'c' stands twice"),
        (["tensors", 1, "elements"], 0, r"tensors[1]: 'b': elements must be positive, got 0"),
        (["tensors", 1, "elements"], "x", r"tensors[1].elements: Expected `int`, got `str`, the v"),
        (["tensors", 1, "elements"], 1.5, r"tensors[1].elements: Expected `int`, got `float`, the"),
        (["tensors"], [], "tensors must not be empty"),
        (["tensors"], 3, "tensors: Expected `array`, got `int`, the value is 3"),
        (["origin"], "guessed", "origin: Invalid enum value 'guessed'"),
    ],
)
def test_traces_that_are_not(tmp_path, document, path, value, complaint):
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(with_value(document, path, value)))
    with pytest.raises(FormatError) as caught:
        files.read(file, Trace)
    message = str(caught.value)
    assert message.startswith(f"{file}: ")
    assert complaint in message
    assert "\n" not in message


def test_a_missing_field_is_named(document):
    del document["tensors"][2]["forward_s"]
    with pytest.raises(FormatError, match=r"tensors\[2\]: .*missing required field `forward_s`"):
        files.loads(json.dumps(document), Trace, origin="text")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_file(small_trace, share):
    text = files.dumps(small_trace)
    cut = text[: int(len(text.rstrip()) * share)]
    with pytest.raises(FormatError, match=r"text: not complete JSON .* is the file truncated"):
        files.loads(cut, Trace, origin="text")


@pytest.mark.parametrize("text", ["[]", "3", "null", '"gradweave.trace/2"'])
def test_json_that_is_no_document(text):
    with pytest.raises(FormatError, match=r"schema: expected 'gradweave.trace/2', found None"):
        files.loads(text, Trace, origin="text")


def test_a_key_that_stands_twice():
    with pytest.raises(FormatError, match="key 'name' stands twice in one object"):
        files.loads('{"name": "a", "name": "b"}', Trace, origin="text")


def test_a_file_that_is_no_text(tmp_path):
    file = tmp_path / "binary.json"
    file.write_bytes(b"\x80\x81")
    with pytest.raises(FormatError, match="not a text file"):
        files.read(file, Trace)


@pytest.mark.parametrize(
    ("cost", "complaint"),
    [
        (
            {"kind": "line", "startup_s": 1e-3, "s_per_byte": -1e-9},
            r"costs[0].cost: s_per_byte must be a number >= 0, got -1e-09",
        ),
        (
            {"kind": "curve", "nbytes": [1, 2], "measured_s": [2.0, 1.0]},
            r"costs[0].cost: measured_s falls over the last octave",
        ),
        ({"kind": "spline"}, r"costs[0].cost.kind: Invalid value 'spline'"),
    ],
)
def test_networks_that_are_not(cost, complaint):
    entry = {"operation": "all-reduce", "collective": "native", "workers": 2, "cost": cost}
    document = {"schema": "gradweave.network/1", "name": "n", "source": "", "costs": [entry]}
    with pytest.raises(FormatError) as caught:
        files.loads(json.dumps(document), Network, origin="text")
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (Plan, ["overlap"]),
        (Plan, ["buckets", 0, "compression"]),
        (Network, ["links", "topology"]),
        (Network, ["links", "levels", 1, "link", "sum_s_per_byte"]),
        (Network, ["costs"]),
    ],
)
def test_files_have_no_defaults(kind, path):
    document = json.loads((GOLDEN / f"{kind.__name__.lower()}-1.json").read_text())
    *parents, last = path
    place = document
    for key in parents:
        place = place[key]
    del place[last]
    with pytest.raises(FormatError, match=rf"{last} is missing; files have no defaults"):
        files.loads(json.dumps(document), kind, origin="text")


def test_a_link_stays_a_link_and_a_mode_a_mode(tmp_path, small_trace):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.touch(mode=0o600)
    link.symlink_to(target)
    files.write(link, small_trace)
    assert link.is_symlink()
    assert files.read(target, Trace) == small_trace
    assert target.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", [".", "folder", "pipe"])
def test_only_files_are_written_to(tmp_path, small_trace, name):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RequestError, match="is not a file; name one to write to"):
        files.write(tmp_path / name, small_trace)


def test_names_that_cannot_be_written():
    lone_surrogate = json.dumps("\ud800")
    document = (GOLDEN / "trace-2.json").read_text().replace('"layer2.bias"', lone_surrogate)
    with pytest.raises(FormatError, match="is no text that can be written"):
        files.loads(document, Trace, origin="text")
    trace = files.read(GOLDEN / "trace-2.json", Trace)
    with pytest.raises(RequestError, match=r"name must be text that can be written, got '.ud800'"):
        replace(trace, name="\ud800")


def test_numbers_beyond_reason():
    document = (GOLDEN / "trace-2.json").read_text().replace("5120", "1" + "0" * 400)
    with pytest.raises(FormatError, match=r"elements must be positive and at most 1e\+15"):
        files.loads(document, Trace, origin="text")


def test_a_byte_order_mark_is_no_harm(tmp_path, small_trace):
    file = tmp_path / "trace.json"
    file.write_text("\ufeff" + files.dumps(small_trace))
    assert files.read(file, Trace) == small_trace


def test_a_failed_write_leaves_what_was_there(tmp_path, small_trace, monkeypatch):
    file = tmp_path / "trace.json"
    files.write(file, small_trace)
    before = file.read_text()

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        files.write(file, small_trace.with_bytes_per_element(2))
    assert file.read_text() == before
    assert list(tmp_path.iterdir()) == [file]


def test_a_recipe_has_a_text_and_a_dictionary_of_its_own():
    """For checkpoints, which have no files: of any version, and json and pickle take them."""
    recipe = files.read(GOLDEN / "recipe-4.json", Recipe)
    assert recipe.to_text() == files.dumps(recipe)
    for form in (recipe.to_dict(), json.loads(json.dumps(recipe.to_dict()))):
        kept = dict(form)
        assert Recipe.from_dict(form) == recipe
        assert form == kept
    for version in (1, 2, 3, 4):
        path = GOLDEN / f"recipe-{version}.json"
        assert Recipe.from_text(path.read_text()) == files.read(path, Recipe)


def test_what_is_no_recipe_is_one_line():
    recipe = files.read(GOLDEN / "recipe-4.json", Recipe)
    with pytest.raises(FormatError, match=r"^recipe: workers: Expected `int`, got `str`"):
        Recipe.from_dict({**recipe.to_dict(), "workers": "two"})
    with pytest.raises(FormatError, match=r"^recipe: schema: expected 'gradweave.recipe/4', found"):
        Recipe.from_dict({})
    with pytest.raises(FormatError, match=r"^recipe: not complete JSON"):
        Recipe.from_text(recipe.to_text()[:-3])
