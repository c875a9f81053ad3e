"""Collectives run for real: exact on every rank, for every algorithm, and clear when they fail."""

import gc
import os
import time
import weakref

import pytest
import torch
from ranks import on_processes, on_threads

from gradweave.collectives import ALGORITHMS, build
from gradweave.collectives.program import program
from gradweave.collectives.schedule import block_edges
from gradweave.collectives.topology import Topology, flat_topology, topology_of
from gradweave.comm import Communicator
from gradweave.comm.communicator import GIGABIT_ETHERNET
from gradweave.comm.execute import LEAST_SLICE_BYTES, MOST_LANES, lanes_for
from gradweave.comm.native import NATIVE
from gradweave.comm.rounds import execute_by_rounds
from gradweave.comm.worker import CommunicationThread
from gradweave.errors import CollectiveError

WORLDS = [1, 2, 3, 4, 8]
EVERYTHING = [*ALGORITHMS, *((operation, "native") for operation in NATIVE)]


def contribution(rank, elements, dtype=torch.float32):
    return (torch.arange(elements) % 7 + rank).to(dtype)


def expected(operation, ranks, elements, root=0, dtype=torch.float32):
    """What every rank must end with; whole messages, also where a rank owns only a part."""
    if operation == "broadcast":
        return contribution(root, elements, dtype)
    if operation == "all-gather":
        edges = block_edges(elements, ranks).tolist()
        owned = [contribution(rank, elements, dtype) for rank in range(ranks)]
        return torch.cat([owned[r][edges[r] : edges[r + 1]] for r in range(ranks)])
    return sum(contribution(rank, elements, dtype) for rank in range(ranks))


def is_right(operation, message, rank, ranks, root=0):
    wanted = expected(operation, ranks, message.numel(), root, message.dtype)
    if operation == "reduce":
        return rank != root or torch.equal(message, wanted)
    if operation == "reduce-scatter":
        edges = block_edges(message.numel(), ranks).tolist()
        own = slice(edges[rank], edges[rank + 1])
        return torch.equal(message[own], wanted[own])
    return torch.equal(message, wanted)


def wrong_results(group, sizes, dtype=torch.float32, hosts=None):
    ranks, rank = group.size(), group.rank()
    communicator = Communicator(group, topology=topology_of(hosts or [0] * ranks))
    wrong = []
    for operation, name in EVERYTHING:
        roots = {0, ranks - 1} if operation in {"broadcast", "reduce"} else {0}
        for elements in sizes:
            for root in sorted(roots):
                message = contribution(rank, elements, dtype)
                communicator.run(operation, message, collective=name, root=root)
                if not is_right(operation, message, rank, ranks, root):
                    wrong.append((operation, name, elements, root))
    return wrong


@pytest.mark.parametrize("world", WORLDS)
def test_every_collective_is_exact(world):
    """Fewer elements than ranks, uneven, and none at all."""
    sizes = [0, 1, 3, 7, 1025]
    assert on_threads(world, wrong_results, sizes) == [[]] * world


def test_every_collective_is_exact_over_hosts():
    hosts = [0, 0, 1, 1, 2, 2]
    assert on_threads(6, wrong_results, [5, 601], torch.float32, hosts) == [[]] * 6


def test_long_messages_travel_in_lanes():
    """Slices of at least 128 KiB, so that one is added while another travels."""
    elements = 3 * MOST_LANES * LEAST_SLICE_BYTES // 4 + 5
    assert on_threads(3, wrong_results, [elements]) == [[]] * 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32])
def test_any_dtype_that_can_be_summed(dtype):
    assert on_threads(3, only_ours, dtype) == [[]] * 3


def only_ours(group, dtype):
    communicator = Communicator(group, topology=flat_topology(group.size()))
    wrong = []
    for operation, name in ALGORITHMS:
        message = contribution(group.rank(), 50, dtype)
        communicator.run(operation, message, collective=name)
        if not is_right(operation, message, group.rank(), group.size()):
            wrong.append((operation, name))
    return wrong


def test_slices_are_large_enough_to_pay():
    def lanes(block_bytes):
        steps = program(
            build(
                "all-reduce",
                "ring",
                topology=flat_topology(2),
                nbytes=1,
                link=GIGABIT_ETHERNET,
            ),
            0,
        )
        return lanes_for(torch.empty(2 * block_bytes, dtype=torch.uint8), steps, owned=False)

    assert lanes(1) == 1
    assert lanes(2 * LEAST_SLICE_BYTES) == 2
    assert lanes(100 * LEAST_SLICE_BYTES) == MOST_LANES


def by_rounds(group):
    """The path that NCCL would take."""
    ranks, rank = group.size(), group.rank()
    wrong = []
    for operation, name in ALGORITHMS:
        schedule = build(
            operation, name, topology=flat_topology(ranks), nbytes=92, link=GIGABIT_ETHERNET
        )
        message = contribution(rank, 23)
        execute_by_rounds(program(schedule, rank), message, group)
        if not is_right(operation, message, rank, ranks):
            wrong.append((operation, name))
    return wrong


@pytest.mark.parametrize("world", [2, 3])
def test_round_by_round_gives_the_same(world, tmp_path):
    assert on_processes(world, by_rounds, scratch=tmp_path) == [[]] * world


def mixed_tiers(group):
    topology = Topology(tuple(range(group.size())), (2, group.size() // 2))
    communicator = Communicator(group, topology=topology)
    right = []
    for tiers in ("native/native", "native/ring", "halving-doubling/native", "auto"):
        for elements in (1, 10, 1001):
            message = contribution(group.rank(), elements)
            communicator.run("all-reduce", message, collective=f"blueconnect:{tiers}")
            right.append(is_right("all-reduce", message, group.rank(), group.size()))
    return all(right)


@pytest.mark.parametrize("world", [4, 6])
def test_blueconnect_mixes_ours_and_the_backends(world, tmp_path):
    assert on_processes(world, mixed_tiers, scratch=tmp_path) == [True] * world


def too_many_tiers(group):
    communicator = Communicator(group, topology=Topology((0, 1), (2,)))
    try:
        communicator.run("all-reduce", torch.ones(3), collective="blueconnect:native/ring")
    except ValueError as error:
        return str(error)


def test_tiers_that_the_topology_has_not(tmp_path):
    complaints = on_processes(2, too_many_tiers, scratch=tmp_path)
    assert complaints == ["blueconnect:native/ring names 2 tiers, the topology has 1: (2,)"] * 2


def bits_after_all_reduce(group, name):
    torch.manual_seed(group.rank())
    message = torch.randn(1000)
    Communicator(group, topology=flat_topology(group.size())).run(
        "all-reduce", message, collective=name
    )
    return message.tolist()


@pytest.mark.parametrize("name", [name for op, name in ALGORITHMS if op == "all-reduce"])
def test_all_ranks_end_with_the_same_bits(name):
    """Also where sums are rounded: replicas of a model must not drift apart."""
    results = on_threads(5, bits_after_all_reduce, name)
    assert all(result == results[0] for result in results)


def differing(group, what):
    communicator = Communicator(group, topology=flat_topology(2))
    odd = group.rank() == 1
    message = torch.ones(5 if odd and what == "sizes" else 4)
    if odd and what == "dtypes":
        message = message.double()
    collective = "mst" if odd and what == "algorithms" else "ring"
    try:
        communicator.run("all-reduce", message, collective=collective)
    except CollectiveError as error:
        return str(error)


@pytest.mark.parametrize(
    ("what", "rank_1_has"),
    [
        ("sizes", "all-reduce by ring, torch.float32, 5 elements, root 0"),
        ("dtypes", "all-reduce by ring, torch.float64, 4 elements, root 0"),
        ("algorithms", "all-reduce by mst, torch.float32, 4 elements, root 0"),
    ],
)
def test_ranks_that_disagree_are_told_so(what, rank_1_has):
    complaint = (
        "ranks disagree on what to do: rank 0 has all-reduce by ring, torch.float32, 4 elements, "
        f"root 0; rank 1 has {rank_1_has}; call it alike on every rank"
    )
    assert on_threads(2, differing, what) == [complaint] * 2


def test_messages_must_be_flat():
    def not_flat(group):
        with pytest.raises(ValueError, match="must be flat and contiguous"):
            Communicator(group, topology=flat_topology(1)).run(
                "all-reduce", torch.ones(2, 2), collective="ring"
            )

    on_threads(1, not_flat)


def one_rank_leaves(group, how, collective):
    """Rank 2 takes part once, then dies or falls silent; what do the others say, and how soon?"""
    communicator = Communicator(group, topology=flat_topology(group.size()))
    message = torch.ones(100_000)
    communicator.run("all-reduce", message, collective=collective)
    if group.rank() == 2:
        if how == "dies":
            os._exit(3)
        time.sleep(6)
        return None
    started_s = time.monotonic()
    try:
        communicator.run("all-reduce", message, collective=collective)
    except CollectiveError as error:
        return str(error), time.monotonic() - started_s


@pytest.mark.parametrize("collective", ["ring", "recursive-doubling"])
def test_a_rank_that_falls_silent_is_named(collective, tmp_path):
    """Six seconds, because the group's time-out of five must pass."""
    results = on_processes(3, one_rank_leaves, "stalls", collective, scratch=tmp_path)
    assert results[2] is None
    for rank in (0, 1):
        message, taken_s = results[rank]
        assert message.startswith(f"all-reduce by {collective} on rank {rank}: round ")
        assert "ing from rank" in message or "ing to rank" in message
        assert taken_s < 8
    assert any("rank 2 failed" in message for message, _ in results[:2])


def survivors(group, directory, collective):
    outcome = one_rank_leaves(group, "dies", collective)
    (directory / f"{group.rank()}").write_text(outcome[0])


def test_a_rank_that_dies_is_named(tmp_path):
    (tmp_path / "said").mkdir()
    with pytest.raises(AssertionError, match="rank 2 died"):
        on_processes(3, survivors, tmp_path / "said", "ring", scratch=tmp_path)
    deadline_s = time.monotonic() + 10
    while len(list((tmp_path / "said").iterdir())) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.05)
    said = {file.name: file.read_text() for file in (tmp_path / "said").iterdir()}
    for rank, text in said.items():
        assert text.startswith(f"all-reduce by ring on rank {rank}: round ")


def submitted(group):
    worker = CommunicationThread(Communicator(group, topology=flat_topology(group.size())))
    messages = [contribution(group.rank(), elements) for elements in (5, 1, 300, 17)]
    futures = [
        worker.submit("all-reduce", message, collective=name)
        for message, name in zip(messages, ["ring", "native", "mst", "double-tree"], strict=True)
    ]
    results = [future.wait() for future in futures]
    worker.close()
    return [
        result is message and is_right("all-reduce", message, group.rank(), group.size())
        for result, message in zip(results, messages, strict=True)
    ]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_communication_thread_keeps_the_order(world):
    assert on_threads(world, submitted) == [[True] * 4] * world


def failing(group):
    worker = CommunicationThread(Communicator(group, topology=flat_topology(group.size())))
    said = []
    for name in ("ring", "no such thing", "ring"):
        try:
            worker.submit("all-reduce", torch.ones(3), collective=name).wait()
            said.append("fine")
        except CollectiveError as error:
            said.append("no such thing" in str(error))
    worker.close()
    return said


def test_after_a_failure_all_later_messages_fail():
    """Ranks may be out of step then; going on would mix up messages."""
    assert on_threads(2, failing) == [["fine", True, True]] * 2


def outlives_its_last_use(group):
    communicator = Communicator(group, topology=flat_topology(group.size()))
    communicator.run("all-reduce", torch.ones(8), collective="ring")
    alive = weakref.ref(communicator)
    del communicator
    return alive() is not None


def test_a_communicator_goes_with_its_last_reference():
    """Without a garbage collection: it holds a group, and must be gone before the group is."""
    gc.disable()
    try:
        assert on_threads(2, outlives_its_last_use) == [False, False]
    finally:
        gc.enable()


def default_topology(group):
    return Communicator(group).topology


def test_ranks_of_one_machine_are_one_host():
    assert on_threads(3, default_topology) == [flat_topology(3)] * 3
