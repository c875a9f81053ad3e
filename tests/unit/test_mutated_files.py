"""Files that somebody, or a disk, has changed: a value, or one line that says what is wrong."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import LONG, NAMES, NESTED, SURROGATE, mutated_bytes, mutated_documents

from gradweave import (
    FormatError,
    Network,
    Plan,
    Recipe,
    RequestError,
    Trace,
    load_network,
    load_trace,
    make_plan,
    simulate,
)
from gradweave._src import files
from gradweave._src.advice import advise
from gradweave._src.checks import first_twice
from gradweave._src.errors import GradweaveError

GOLDEN = Path(__file__).parents[1] / "golden"
KINDS = {kind.__name__.lower(): kind for kind in files.SCHEMAS}
FORMATS = [
    path for path in sorted(GOLDEN.glob("*-*.json")) if path.stem.rpartition("-")[0] in KINDS
]
# What a line may be long, whatever was in the file.
LONGEST_LINE = 1000

everyone = pytest.mark.parametrize("path", FORMATS, ids=lambda path: path.stem)


def kind_of(path):
    return KINDS[path.stem.rpartition("-")[0]]


def is_one_line(error):
    said = str(error)
    return said.isprintable() and len(said) <= LONGEST_LINE


def use(value):
    """As the command line, a page and a notebook do; errors of ours are one line."""
    network, trace = load_network("k80-10gbe"), load_trace("alexnet")
    match value:
        case Trace():
            for planner in ("optimal", "mgwfbp", "ddp"):
                plan = make_plan(value, network, workers=4, planner=planner)
                simulate(value, plan, network, workers=4)
            advise(value, network, workers=4)
            value.rescaled(parameter_scale=1e5, backward_s=1e3)
        case Network():
            workers = value.known_workers[0] if value.known_workers else 4
            for planner in ("optimal", "mgwfbp", "ddp"):
                plan = make_plan(trace, value, workers=workers, planner=planner)
                simulate(trace, plan, value, workers=workers)
            advise(trace, value, workers=workers)
        case Plan():
            simulate(trace, value, network, workers=4)


def complaint(call, kind=GradweaveError):
    """What it raises of this kind, as text; empty where nothing."""
    try:
        call()
    except kind as error:
        return str(error)
    return ""


def check(text, kind):
    """Whether it is still a value."""
    said = complaint(lambda: files.loads(text, kind, origin="text"), FormatError)
    if said:
        assert is_one_line(said), said
        return False
    value = files.loads(text, kind, origin="text")
    assert files.loads(files.dumps(value), kind, origin="again") == value
    files.dumps(value).encode()
    repr(value)
    if hasattr(value, "_repr_html_"):
        value.rows()
        assert value._repr_html_().isprintable()
    assert "\n" not in complaint(lambda: use(value))
    return True


def check_documents(path, *, count, seed):
    kind, text = kind_of(path), path.read_text()
    kept = [check(one, kind) for one in mutated_documents(text, count=count, seed=seed)]
    assert any(kept), "nothing is tried beyond reading"
    assert not all(kept)


def check_bytes(path, file, *, count, seed):
    for content in mutated_bytes(path.read_bytes(), count=count, seed=seed):
        file.write_bytes(content)
        said = complaint(lambda: files.read(file, kind_of(path)), FormatError)
        assert not said or said.startswith(f"{file}: ")
        assert is_one_line(said)


@everyone
def test_a_changed_field_is_a_value_or_a_line(path):
    check_documents(path, count=60, seed=1)


@everyone
def test_changed_bytes_are_a_value_or_a_line(path, tmp_path):
    check_bytes(path, tmp_path / "file.json", count=60, seed=1)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
@everyone
def test_many_changes_are_values_or_lines(path, seed, tmp_path):
    check_documents(path, count=2000, seed=100 + seed)
    check_bytes(path, tmp_path / "file.json", count=2000, seed=100 + seed)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(SURROGATE),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@settings(max_examples=50)
@given(
    kind=st.sampled_from(list(files.SCHEMAS)),
    document=st.dictionaries(st.text() | st.sampled_from(["name", "tensors"]), anything),
)
def test_any_document_is_a_value_or_a_line(kind, document):
    check(json.dumps({**document, "schema": files.SCHEMAS[kind]}), kind)


@given(text=st.text())
def test_any_text_is_a_value_or_a_line(text):
    check(text, Trace)


@pytest.mark.parametrize("begin", ["[", '{"a":', '{"tensors":['])
def test_what_is_deep_is_a_line(begin):
    with pytest.raises(FormatError) as caught:
        files.loads(begin * NESTED, Trace, origin="text")
    assert is_one_line(caught.value)


def test_numbers_with_too_many_digits_are_a_line():
    with pytest.raises(FormatError) as caught:
        files.loads('{"schema": ' + "9" * 100_000 + "}", Trace, origin="text")
    assert is_one_line(caught.value)


def test_shapes_of_many_dimensions_are_not_multiplied():
    text = (GOLDEN / "trace-2.json").read_text()
    document = json.loads(text)
    document["tensors"][0]["shape"] = [10**15] * 100_000
    with pytest.raises(FormatError, match="shape must have at most 64 dimensions, got 100000"):
        files.loads(json.dumps(document), Trace, origin="text")


class Counted:
    """A name that counts how often it is compared."""

    comparisons = 0

    def __init__(self, number):
        self.number = number

    def __hash__(self):
        return hash(self.number)

    def __eq__(self, other):
        Counted.comparisons += 1
        return self.number == other.number


def test_what_stands_twice_is_found_in_one_go():
    count = 10_000
    names = [Counted(number) for number in range(count)]
    assert first_twice([*names, Counted(count - 1)]).number == count - 1
    assert first_twice(names) is None
    assert Counted.comparisons < 10 * count
    keys = ", ".join(f'"{number}": 0' for number in (*range(100_000), 99_999))
    with pytest.raises(FormatError, match="key '99999' stands twice in one object"):
        files.loads(f"{{{keys}}}", Trace, origin="text")


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("path", [["origin"], ["schema"], ["tensors", 0, "elements"], ["tensors"]])
def test_what_was_found_is_shown_safely_and_shortly(name, path):
    document = json.loads((GOLDEN / "trace-2.json").read_text())
    *parents, last = path
    place = document
    for key in parents:
        place = place[key]
    place[last] = name
    with pytest.raises(FormatError) as caught:
        files.loads(json.dumps(document), Trace, origin="text")
    assert is_one_line(caught.value)


def test_unknown_fields_are_shown_safely():
    document = json.loads((GOLDEN / "trace-2.json").read_text())
    with pytest.raises(FormatError, match=r"unknown field `a\\x1b\[2Jb\\nc`$"):
        files.loads(json.dumps({**document, "a\x1b[2Jb\nc": 1}), Trace, origin="text")


@pytest.mark.parametrize("place", ["key", "value", "field"])
def test_half_a_character_is_a_line(place):
    document = json.loads((GOLDEN / "plan-3.json").read_text())
    match place:
        case "key":
            document[SURROGATE] = 1
        case "value":
            document["planner"] = SURROGATE
        case "field":
            document["buckets"][0]["tensors"][0] = SURROGATE
    with pytest.raises(FormatError, match=r"^text: 'a\\ud800b' is no text that can be written$"):
        files.loads(json.dumps(document), Plan, origin="text")
    with pytest.raises(FormatError, match="is no text that can be written"):
        Recipe.from_dict({"schema": files.SCHEMAS[Recipe], "device": SURROGATE})


def test_values_that_cannot_be_made_are_a_request():
    """Also where a value is made of another: the command line says so in a line."""
    trace = load_trace("alexnet").rescaled(parameter_scale=1e6)
    with pytest.raises(RequestError, match=r"elements must be positive and at most 1e\+15"):
        trace.rescaled(parameter_scale=1e6)


def test_long_names_are_not_said_whole():
    trace = load_trace("alexnet")
    text = files.dumps(trace).replace(trace.tensors[0].name, "n" * LONG)
    text = text.replace(f'"elements": {trace.tensors[0].elements}', '"elements": -1', 1)
    with pytest.raises(FormatError, match="elements must be positive, got -1") as caught:
        files.loads(text, Trace, origin="text")
    assert is_one_line(caught.value)
