"""Rounded sums: the same bits on every rank, near the exact sum, and nothing lost unseen."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from needs import missing
from ranks import on_processes, on_threads

from gradweave._src.collectives import ALGORITHMS, sums_copies
from gradweave._src.collectives.topology import flat_topology, topology_of
from gradweave._src.comm.communicator import Communicator
from gradweave._src.comm.rounded_slices import RoundingMemory
from gradweave._src.comm.rounding import WIRE_FORMATS, eight_bits
from gradweave._src.comm.slices import LEAST_SLICE_BYTES
from gradweave._src.compression import ELEMENTS_PER_SCALE, WIRE_SHARES
from gradweave._src.errors import RequestError

pytestmark = pytest.mark.usefixtures("compiled_kernels")

SCHEDULES = [name for operation, name in ALGORITHMS if operation == "all-reduce"]
# Of what a number is at most, or of the largest in its group: half of the last place that is kept.
HALF_LAST_PLACE = {"bf16": 2**-8, "fp16": 2**-11, "int8": 1 / 254}
FINITE = arrays.arrays(
    np.float32,
    st.integers(0, 3 * ELEMENTS_PER_SCALE + 5),
    elements=st.floats(-(2.0**100), 2.0**100, width=32),
)


def encoded(name, values, dropped=None):
    message = torch.empty(WIRE_FORMATS[name].nbytes(values.numel()), dtype=torch.uint8)
    WIRE_FORMATS[name].encode(values, message, dropped=dropped)
    return message


def decoded(name, message, elements):
    values = torch.empty(elements)
    WIRE_FORMATS[name].decode(message, values)
    return values


def gradients(rank, elements, scale=1.0):
    generator = torch.Generator().manual_seed(rank)
    return scale * torch.randn(elements, generator=generator)


@pytest.mark.parametrize("name", WIRE_FORMATS)
@given(values=FINITE.map(torch.from_numpy))
@settings(max_examples=60)
def test_rounding_is_off_by_half_of_the_last_place_at_most(name, values):
    if name == "fp16":
        values = values.clamp(-6e4, 6e4)
    result = decoded(name, encoded(name, values), values.numel()).double()
    largest = values.double().abs()
    if name == "int8":
        for start in range(0, values.numel(), ELEMENTS_PER_SCALE):
            group = largest[start : start + ELEMENTS_PER_SCALE]
            group.fill_(float(group.max()))
    smallest = {"fp16": 2.0**-25, "bf16": 2.0**-134, "int8": 1e-36}[name]
    bound = HALF_LAST_PLACE[name] * largest * (1 + 1e-5) + smallest
    assert torch.all((result - values.double()).abs() <= bound)


@pytest.mark.parametrize("name", WIRE_FORMATS)
@given(values=FINITE.map(torch.from_numpy))
@settings(max_examples=60)
def test_what_is_sent_and_what_is_dropped_are_all_there_was(name, values):
    if name == "fp16":
        values = values.clamp(-6e4, 6e4)
    dropped = torch.zeros_like(values)
    message = encoded(name, values, dropped)
    result = decoded(name, message, values.numel())
    # Adding up in float32 rounds once more, by a half of the last of 24 bits.
    assert torch.allclose(result + dropped, values, rtol=2**-23, atol=1e-44)


@pytest.mark.parametrize("values", [[torch.inf], [1.0, torch.nan], [-torch.inf, 2.0]])
@pytest.mark.parametrize("name", WIRE_FORMATS)
def test_what_is_not_finite_stays_so(name, values):
    """A loss scaler must see it on every rank, and nothing of it may be carried over for 8 bits."""
    dropped = torch.zeros(len(values))
    message = encoded(name, torch.tensor(values), dropped if name == "int8" else None)
    assert not torch.isfinite(decoded(name, message, len(values))).all()
    assert torch.isfinite(dropped).all()


@pytest.mark.parametrize("elements", [1, 5, 255, 256, 257, 1000, 10_003])
def test_torch_and_compiled_loops_make_the_same_bits(elements, monkeypatch):
    if find_spec("numba") is None:
        missing("numba is not installed")
    values = gradients(0, elements) * torch.logspace(-44, 30, elements)
    if elements > ELEMENTS_PER_SCALE:
        values[3], values[-1] = torch.inf, torch.nan

    def made():
        dropped, added = torch.ones(elements), values.clone()
        message = encoded("int8", values, dropped)
        WIRE_FORMATS["int8"].add(message, added)
        used = message[: 4 * -(-elements // ELEMENTS_PER_SCALE) + elements]
        return used, dropped, added, decoded("int8", message, elements)

    compiled = made()
    monkeypatch.setattr(eight_bits, "_kernels", lambda _: None)
    for one, other in zip(compiled, made(), strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def test_without_numba_a_line_says_what_to_install(monkeypatch, caplog):
    monkeypatch.setattr(eight_bits, "find_spec", lambda _: None)
    eight_bits._kernels.cache_clear()
    for _ in range(2):
        assert eight_bits._kernels("cpu") is None
    eight_bits._kernels.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        "8-bit messages are rounded by torch, which takes longer: pip install 'gradweave[sparse]'"
    ]


@pytest.mark.parametrize("name", WIRE_FORMATS)
def test_bytes_on_the_wire_are_what_costs_say(name):
    elements = 100 * ELEMENTS_PER_SCALE
    assert WIRE_FORMATS[name].nbytes(elements) == WIRE_SHARES[name] * 4 * elements


def sums(group, names, sizes, hosts=None):
    """For each way: the sum's bits, and how far it is from the exact one, in its bound."""
    ranks = group.size()
    communicator = Communicator(group, topology=topology_of(hosts or [0] * ranks))
    found = []
    for elements in sizes:
        everyone = torch.stack([gradients(rank, elements).double() for rank in range(ranks)])
        exact, of_each = everyone.sum(0), everyone.abs().sum(0)
        for name in names:
            message = gradients(group.rank(), elements)
            communicator.run("all-reduce", message, collective=name)
            largest = of_each.max().expand(elements) if name.endswith("int8") else of_each
            off = ((message.double() - exact).abs() / largest).max().item()
            # Sums are rounded once for each rank, by algorithms that make copies twice as often.
            roundings = 2 * ranks if name.startswith("recursive-doubling") else ranks
            bound = (1 + HALF_LAST_PLACE[name.partition("+")[2]]) ** roundings - 1 + 1e-6
            found.append((name, elements, message.numpy().tobytes(), off <= bound))
    return found


@pytest.mark.parametrize(
    "world", [2, 3, *(pytest.param(world, marks=pytest.mark.long) for world in (4, 5, 8))]
)
@pytest.mark.parametrize("rounding", WIRE_FORMATS)
def test_every_rank_has_the_same_bits_and_they_are_near(world, rounding):
    names = [f"{schedule}+{rounding}" for schedule in SCHEDULES]
    first, *others = on_threads(world, sums, names, [1, 7, 1025])
    assert all(one == first for one in others)
    assert all(is_near for *_, is_near in first)


def test_every_rank_has_the_same_bits_over_hosts():
    names = [f"blueconnect+{rounding}" for rounding in WIRE_FORMATS]
    first, *others = on_threads(6, sums, names, [1025], [0, 0, 1, 1, 2, 2])
    assert all(one == first for one in others)
    assert all(is_near for *_, is_near in first)


def test_long_messages_travel_in_slices():
    elements = 4 * LEAST_SLICE_BYTES // 4 * 4 + 3
    first, *others = on_threads(3, sums, ["ring+bf16", "ring+int8"], [elements])
    assert all(one == first for one in others)
    assert all(is_near for *_, is_near in first)


def kept(group, name, elements, hosts=None):
    """Sums of several steps, and what is carried over in the end, with what was put in."""
    communicator = Communicator(group, topology=topology_of(hosts or [0] * group.size()))
    carried, applied = torch.zeros(elements), torch.zeros(elements, dtype=torch.float64)
    given_ = torch.zeros(elements, dtype=torch.float64)
    for step in range(5):
        gradient = gradients(10 * step + group.rank(), elements)
        given_ += gradient
        message = gradient + carried
        carried = torch.zeros(elements)
        communicator.run("all-reduce", message, collective=name, dropped=carried)
        applied += message
    return applied, carried.double(), given_


def adds_up(found):
    applied = found[0][0]
    everything = sum(given_ for *_, given_ in found)
    carried = sum(kept_ for _, kept_, _ in found)
    assert torch.allclose(applied + carried, everything, atol=1e-4)
    assert not torch.allclose(applied, everything, atol=1e-4)


@pytest.mark.parametrize("world", [2, 3, 4, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_applied_and_what_is_kept_are_all_gradients(world, schedule):
    """By every algorithm whose sums are made once; the others are refused."""
    if sums_copies(schedule, flat_topology(world)):
        assert schedule in {"recursive-doubling", "exchange"}
        return
    adds_up(on_threads(world, kept, f"{schedule}+int8", 1000))


@pytest.mark.parametrize("schedule", ["blueconnect", "two-level"])
def test_nothing_is_lost_over_hosts(schedule):
    adds_up(on_threads(6, kept, f"{schedule}+int8", 1000, [0, 0, 1, 1, 2, 2]))


def refused(group, operation, name, message, *, keeps=False):
    dropped = torch.zeros_like(message) if keeps else None
    try:
        Communicator(group).run(operation, message, collective=name, dropped=dropped)
    except RequestError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("operation", "name", "message", "options", "complaint"),
    [
        ("all-reduce", "native+bf16", torch.zeros(4), {}, "only all-reduces by schedules of ours"),
        ("broadcast", "mst+bf16", torch.zeros(4), {}, "only all-reduces by schedules of ours"),
        ("all-reduce", "ring+bf16", torch.zeros(4).double(), {}, "only float32 is rounded, got"),
        ("all-reduce", "ring+int4", torch.zeros(4), {}, "no compression 'int4', did you mean int8"),
        ("all-reduce", "ring+topk:0.1", torch.zeros(4), {}, "topk:0.1 has an exchange of its own"),
        (
            "all-reduce",
            "recursive-doubling+int8",
            torch.zeros(4),
            {"keeps": True},
            "several ranks make the same sums, so what is dropped would count twice",
        ),
    ],
)
def test_what_cannot_be_rounded_is_refused(operation, name, message, options, complaint):
    def run(group):
        return refused(group, operation, name, message.clone(), **options)

    assert all(complaint in said for said in on_threads(2, run))


def test_memory_is_kept_between_messages():
    memory = RoundingMemory()

    def run(group):
        communicator = Communicator(group)
        communicator._rounding_memory = memory if group.rank() == 0 else RoundingMemory()
        counts = []
        for _ in range(3):
            communicator.run("all-reduce", torch.ones(300_000), collective="ring+int8")
            counts.append((len(memory.sent.free), len(memory.arriving.free)))
        return counts

    first, second, third = on_threads(2, run)[0]
    assert first == second == third


def on_two_processes(group):
    return [found[-1] for found in sums(group, ["ring+bf16", "ring+int8"], [70_001])]


def test_processes_can_do_it_too(tmp_path):
    assert on_processes(2, on_two_processes, scratch=tmp_path) == [[True, True]] * 2
