"""Execution traces are read back by Chakra's schema, and say what the prediction says."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given

import gradweave._src.cli as command_line
from gradweave import load_network, load_trace, make_plan, simulate
from gradweave._src.errors import RequestError
from gradweave._src.formats.chakra import MOST_RANKS, encoded, nodes, write_ranks
from gradweave._src.formats.protobuf import varint

# Of et_def.proto: what our files use of the messages, by field numbers.
NODE = {
    1: "id",
    2: "name",
    3: "type",
    4: "ctrl_deps",
    5: "data_deps",
    6: "start_time_micros",
    7: "duration_micros",
    10: "attr",
}
ATTRIBUTE = {1: "name", 9: "int64_val", 27: "bool_val"}
METADATA = {1: "version", 2: "attr"}
COMP_NODE, COMM_COLL_NODE = 4, 7
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = 0, 2, 7
REPEATED = {"ctrl_deps", "data_deps", "attr"}
TEXT = {"name", "version"}

NETWORK = load_network("k80-10gbe")


def read_varint(content: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = content[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return number, at


def fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """As protocol buffers put them; nothing is known of a message here."""
    at = 0
    while at < len(content):
        key, at = read_varint(content, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = read_varint(content, at)
            yield number, value
        else:
            assert kind == 2
            length, at = read_varint(content, at)
            assert at + length <= len(content)
            yield number, content[at : at + length]
            at += length


def message(content: bytes, schema: dict[int, str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for number, value in fields(content):
        name = schema[number]
        if name == "attr":
            found.setdefault(name, []).append(message(value, ATTRIBUTE))
        elif name in REPEATED:
            at, numbers = 0, []
            while at < len(value):
                one, at = read_varint(value, at)
                numbers.append(one)
            found[name] = numbers
        else:
            found[name] = value.decode() if name in TEXT else value
    return found


def stream(content: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(content):
        length, at = read_varint(content, at)
        found.append(content[at : at + length])
        at += length
    return found


def read(content: bytes) -> list[dict]:
    metadata, *rest = stream(content)
    assert message(metadata, METADATA) == {"version": "0.0.4"}
    return [message(one, NODE) for one in rest]


def attributes(node: dict) -> dict[str, int]:
    return {
        attr["name"]: next(value for key, value in attr.items() if key != "name")
        for attr in node["attr"]
    }


def exported(passes: str = "backward", planner: str = "mgwfbp", compression: str | None = None):
    trace = load_trace("googlenet-k80")
    plan = make_plan(
        trace, NETWORK, workers=16, planner=planner, compression=compression, passes=passes
    )
    timeline = simulate(trace, plan, NETWORK, workers=16)
    return trace, plan, timeline


@pytest.mark.parametrize("passes", ["backward", "both"])
@pytest.mark.parametrize("planner", ["mgwfbp", "naive", "wfbp", "single"])
def test_nodes_have_the_times_of_the_prediction_and_wait_for_each_other(
    passes: str, planner: str
) -> None:
    trace, plan, timeline = exported(passes, planner)
    found = read(encoded(nodes(trace, plan, timeline)))
    assert [node["id"] for node in found] == list(range(1, len(found) + 1))
    by_id = {node["id"]: node for node in found}
    computing = [node for node in found if node["type"] == COMP_NODE]
    assert sum(n["duration_micros"] for n in computing) == pytest.approx(
        1e6 * trace.compute_s, abs=len(computing)
    )
    ends = {n["id"]: n["start_time_micros"] + n["duration_micros"] for n in found}
    assert max(ends.values()) == pytest.approx(1e6 * timeline.iteration_s, abs=1)
    for node in found:
        for needed in [*node.get("ctrl_deps", []), *node.get("data_deps", [])]:
            assert needed < node["id"]
        for needed in node.get("data_deps", []):
            assert ends[needed] <= node["start_time_micros"] + 1
            assert by_id[needed]["type"] != node["type"]
    for before, after in pairwise(computing):
        assert after["ctrl_deps"] == [before["id"]]


@pytest.mark.parametrize(
    ("passes", "kinds"),
    [("backward", {ALL_REDUCE}), ("both", {REDUCE_SCATTER, ALL_GATHER})],
)
def test_messages_are_the_plans(passes: str, kinds: set[int]) -> None:
    trace, plan, timeline = exported(passes)
    found = read(encoded(nodes(trace, plan, timeline)))
    sent = [attributes(node) for node in found if node["type"] == COMM_COLL_NODE]
    assert {one["comm_type"] for one in sent} == kinds
    assert len(sent) == len(kinds) * len(plan.buckets)
    assert sum(one["comm_size"] for one in sent) == len(kinds) * trace.nbytes.sum()
    assert not any(one["is_cpu_op"] for one in sent)


def test_rounded_messages_have_fewer_bytes_and_sparse_ones_are_refused() -> None:
    trace, plan, timeline = exported(compression="bf16")
    found = read(encoded(nodes(trace, plan, timeline)))
    sizes = [attributes(n)["comm_size"] for n in found if n["type"] == COMM_COLL_NODE]
    assert sum(sizes) == trace.nbytes.sum() / 2
    with pytest.raises(RequestError, match="Chakra has no such collective"):
        nodes(*exported(compression="gtopk:0.001"))


def test_there_is_a_file_for_each_rank(tmp_path: Path) -> None:
    prefix = str(tmp_path / "job.v1")
    asked = ["simulate", "--trace", "alexnet", "--network", "k80-10gbe", "--planner", "optimal"]
    assert command_line.main([*asked, "--workers", "3", "--chakra", prefix]) == 0
    paths = sorted(tmp_path.iterdir())
    assert [path.name for path in paths] == ["job.v1.0.et", "job.v1.1.et", "job.v1.2.et"]
    assert len({path.read_bytes() for path in paths}) == 1
    assert read(paths[0].read_bytes())


def test_several_jobs_and_too_many_ranks_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["simulate", "--trace", "alexnet", "--network", "k80-10gbe", "--workers", "4,8"]
    assert command_line.main([*asked, "--chakra", str(tmp_path / "x")]) == 2
    assert "--chakra writes one job, and 4 are asked for" in capsys.readouterr().err
    with pytest.raises(RequestError, match="more than 4096"):
        write_ranks(tmp_path / "x", *exported(), workers=MOST_RANKS + 1)
    assert not list(tmp_path.iterdir())


@given(...)
def test_numbers_are_read_as_they_were_written(number: int) -> None:
    wanted = abs(number) % 2**64
    assert read_varint(varint(wanted), 0) == (wanted, len(varint(wanted)))
