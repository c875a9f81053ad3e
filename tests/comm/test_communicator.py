"""Collectives run for real: exact on every rank, for every algorithm, and clear when they fail."""

import gc
import os
import time
import weakref
from datetime import timedelta
from functools import partial

import pytest
import torch
from ranks import on_processes, on_threads

from gradweave._src.collectives import ALGORITHMS, build, halving, ring
from gradweave._src.collectives.program import program
from gradweave._src.collectives.schedule import Schedule, block_edges, transfers
from gradweave._src.collectives.topology import Topology, flat_topology, topology_of
from gradweave._src.comm.channel import Call
from gradweave._src.comm.communicator import Communicator
from gradweave._src.comm.execute import MOST_AT_ONCE, POSTED_AHEAD, execute
from gradweave._src.comm.native import NATIVE
from gradweave._src.comm.rounds import execute_by_rounds
from gradweave._src.comm.slices import LEAST_SLICE_BYTES, MOST_SLICE_BYTES, Scratch, cut, slices_for
from gradweave._src.comm.worker import CommunicationThread
from gradweave._src.costs import GIGABIT_ETHERNET, Link
from gradweave._src.errors import CollectiveError, RequestError

long = partial(pytest.param, marks=pytest.mark.long)
SLOW = Link(latency_s=1.0, s_per_byte=1.0)
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


@pytest.mark.parametrize("world", [1, 2, 3, *map(long, (4, 8))])
def test_every_collective_is_exact(world):
    """Fewer elements than ranks, uneven, and none at all."""
    sizes = sorted({0, 1, world - 1, 1025})
    assert on_threads(world, wrong_results, sizes) == [[]] * world


@pytest.mark.parametrize("elements", [long(5), 601])
def test_every_collective_is_exact_over_hosts(elements):
    hosts = [0, 0, 1, 1, 2, 2]
    assert on_threads(6, wrong_results, [elements], torch.float32, hosts) == [[]] * 6


@pytest.mark.parametrize("world", [3, *map(long, (2, 4, 5))])
def test_long_messages_travel_in_slices(world):
    """Several for every algorithm, also where ranks differ in how many blocks they handle."""
    elements = 3 * world * LEAST_SLICE_BYTES // 4 + 5
    assert on_threads(world, wrong_results, [elements]) == [[]] * world


@pytest.mark.long
def test_there_are_more_slices_than_travel_at_once():
    elements = 3 * (MOST_AT_ONCE + 2) * MOST_SLICE_BYTES // 4
    assert on_threads(3, ring_only, elements) == [True] * 3


def ring_only(group, elements):
    communicator = Communicator(group, topology=flat_topology(group.size()))
    message = contribution(group.rank(), elements)
    communicator.run("all-reduce", message, collective="ring")
    scratch_bytes = sum(buffer.nbytes for buffer in communicator._scratch.free)
    bounded = scratch_bytes <= MOST_AT_ONCE * (POSTED_AHEAD + 1) * (MOST_SLICE_BYTES + 8)
    return bounded and is_right("all-reduce", message, group.rank(), group.size())


def legal_but_tricky(group):
    """Two swap a block, and everyone adds everyone's: posts must not wait for each other."""
    ranks, rank = group.size(), group.rank()
    others = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    direct = Schedule(ranks, 1, 1, lambda _: transfers(*zip(*others, strict=True), 0, 1, add=True))
    swap = Schedule(ranks, 1, 1, lambda _: transfers([0, 1], [1, 0], 0, 1, add=False))
    messages = []
    for number, schedule in enumerate((direct, swap)):
        message = contribution(rank, 7)
        call = Call(group, "made by hand", "made by hand", number)
        steps = program(schedule, rank)
        execute(steps, cut(message, steps, scratch=Scratch()), call)
        messages.append(message)
    swapped = contribution({0: 1, 1: 0}.get(rank, rank), 7)
    return is_right("all-reduce", messages[0], rank, ranks) and torch.equal(messages[1], swapped)


@pytest.mark.parametrize("world", [2, 6])
def test_schedules_that_send_what_they_overwrite(world):
    assert on_threads(world, legal_but_tricky) == [True] * world


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
    steps = program(ring.all_reduce(2), 0)

    def slices(block_bytes):
        return slices_for(2 * block_bytes, steps, owned=True)

    assert slices(1) == 1
    assert slices(2 * LEAST_SLICE_BYTES) == 2
    assert slices(MOST_AT_ONCE * MOST_SLICE_BYTES) == MOST_AT_ONCE
    assert slices(100 * MOST_SLICE_BYTES) == 100
    many_blocks = program(halving.reduce_scatter(4), 0)
    assert slices_for(4 * 10**6, many_blocks, owned=True) == 1


@pytest.mark.parametrize("ranks", [2, 3, 9])
@pytest.mark.parametrize(("operation", "name"), ALGORITHMS)
def test_all_ranks_cut_messages_alike(operation, name, ranks):
    """Also where some have far more to send than others, as a parameter server has."""
    schedule = build(
        operation,
        name,
        topology=flat_topology(ranks),
        nbytes=10**6,
        link=GIGABIT_ETHERNET,
    )
    programs = [program(schedule, rank) for rank in range(ranks)]
    assert {one.most_steps for one in programs} == {max(len(one.steps) for one in programs)}
    for nbytes in (10**5, 10**9, 10**12):
        assert len({slices_for(nbytes, one, owned=False) for one in programs}) == 1


def by_rounds(group):
    """The path that NCCL would take."""
    ranks, rank = group.size(), group.rank()
    wrong = []
    for operation, name in ALGORITHMS:
        schedule = build(
            operation, name, topology=flat_topology(ranks), nbytes=92, link=GIGABIT_ETHERNET
        )
        message = contribution(rank, 23)
        steps = program(schedule, rank)
        (whole,) = cut(message, steps, scratch=Scratch())
        execute_by_rounds(steps, whole, Call(group, name, name, 0))
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


@pytest.mark.parametrize("world", [long(4), 6])
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
    assert all(
        "expected auto, or 1 of halving-doubling, native, pat, ring" in c for c in complaints
    )


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
    if odd and what == "links":
        communicator = Communicator(group, topology=flat_topology(2), link=SLOW)
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
        ("links", "all-reduce by ring, torch.float32, 4 elements, root 0"),
    ],
)
def test_ranks_that_disagree_are_told_so(what, rank_1_has):
    for complaint in on_threads(2, differing, what):
        assert complaint.startswith("ranks disagree on what to do: rank 0 has all-reduce by ring, ")
        assert f"rank 1 has {rank_1_has}, layout" in complaint


def parting_later(group):
    """Both kinds have been seen before; now one rank runs the first and one the second."""
    communicator = Communicator(group, topology=flat_topology(2))
    kinds = [torch.ones(4), torch.ones(4, dtype=torch.int32)]
    for message in kinds:
        communicator.run("all-reduce", message, collective="ring")
    mine = kinds[group.rank()].clone()
    try:
        communicator.run("all-reduce", mine, collective="ring")
    except CollectiveError as error:
        return str(error), mine.tolist()


def test_ranks_that_part_later_take_nothing_from_each_other():
    """Two seconds, the group's time-out here: tags differ, so nothing arrives."""
    for said, left in on_threads(2, parting_later, timeout=timedelta(seconds=2)):
        assert said.startswith("all-reduce by ring on rank ")
        assert left == [2, 2, 2, 2]


def test_messages_must_be_flat():
    def not_flat(group):
        with pytest.raises(ValueError, match="must be flat and contiguous"):
            Communicator(group, topology=flat_topology(1)).run(
                "all-reduce", torch.ones(2, 2), collective="ring"
            )

    on_threads(1, not_flat)


def one_rank_leaves(group, directory, how, collective):
    """Rank 2 takes part once, then dies or falls silent; the others write down what they say."""
    communicator = Communicator(group, topology=flat_topology(group.size()))
    message = torch.ones(100_000)
    communicator.run("all-reduce", message, collective=collective)
    if group.rank() == 2:
        if how == "dies":
            os._exit(3)
    else:
        with pytest.raises(CollectiveError) as caught:
            communicator.run("all-reduce", message, collective=collective)
        (directory / f"{group.rank()}").write_text(str(caught.value))
    while len(list(directory.iterdir())) < 2:  # who ends before would be blamed by the other one
        time.sleep(0.01)


def assert_rank_2_is_blamed(directory, collective):
    texts = {file.name: file.read_text() for file in directory.iterdir()}
    for rank, text in texts.items():
        assert text.startswith(f"all-reduce by {collective} on rank {rank}: round ")
        assert "ing from rank" in text or "ing to rank" in text
    assert any("rank 2 failed" in text for text in texts.values())


@pytest.fixture
def said(tmp_path):
    (tmp_path / "said").mkdir()
    return tmp_path / "said"


@pytest.mark.parametrize("collective", ["ring", "recursive-doubling"])
def test_a_rank_that_falls_silent_is_named(collective, tmp_path, said):
    """The group's time-out must pass; it is also that of connecting, and of what arrives."""
    given = (said, "stalls", collective)
    on_processes(3, one_rank_leaves, *given, scratch=tmp_path, timeout=timedelta(seconds=2))
    assert_rank_2_is_blamed(said, collective)


@pytest.mark.parametrize("collective", ["ring", "recursive-doubling"])
def test_a_rank_that_dies_is_named(collective, tmp_path, said):
    with pytest.raises(AssertionError, match="rank 2 died"):
        on_processes(3, one_rank_leaves, said, "dies", collective, scratch=tmp_path)
    assert_rank_2_is_blamed(said, collective)


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


def used_after_closing(group):
    worker = CommunicationThread(Communicator(group, topology=flat_topology(group.size())))
    worker.close()
    try:
        worker.submit("all-reduce", torch.ones(3), collective="ring")
    except CollectiveError as error:
        return str(error)


def test_a_closed_thread_takes_nothing():
    assert on_threads(1, used_after_closing) == [
        "the communication thread is closed; nothing can be submitted"
    ]


def misspelt_alone(group):
    communicator = Communicator(group, topology=flat_topology(1))
    with pytest.raises(RequestError, match="no all-reduce by 'rign'"):
        communicator.run("all-reduce", torch.ones(3), collective="rign")


def test_a_misspelt_name_is_found_on_one_rank_too():
    on_threads(1, misspelt_alone)


def parameter(group):
    weight = torch.nn.Parameter(torch.ones(4))
    Communicator(group, topology=flat_topology(2)).run(
        "all-reduce", weight.view(-1), collective="ring"
    )
    return weight.tolist()


def test_parameters_can_travel():
    assert on_threads(2, parameter) == [[2.0] * 4] * 2


def default_topology(group):
    return Communicator(group).topology


def test_ranks_of_one_machine_are_one_host():
    assert on_threads(3, default_topology) == [flat_topology(3)] * 3
