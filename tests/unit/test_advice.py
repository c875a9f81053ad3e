"""Advice holds what the planner promises, on paper: laws on all shipped traces."""

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import costs, traces

from gradweave import CollectiveCost, Network, UnknownCost, load_network, load_trace, simulate
from gradweave._src.advice import Advice, advise, faster_with_same_batch
from gradweave._src.advice.job import EQUALLY_FAST, Job
from gradweave._src.advice.ways import WAYS
from gradweave._src.compression import ROUNDING_NAMES
from gradweave._src.costs import Line, Link, flat
from gradweave._src.planning import make_plan
from gradweave._src.presets import network_names, trace_names

pytestmark = pytest.mark.xdist_group("advice")  # what is advised is found once

# By formula on equal links and on tiers, measured curves, fitted lines: with workers they know.
NETWORKS = {
    "k80-10gbe": 16,
    "gtopk-1gbe": 12,
    "blueconnect-2x4-p100-pcie-10gbe": 8,
    "mpi-10gbe-measured": 8,
    "cluster1-16xk80-10gbe": 16,
}
ROUNDED_ERROR = 1 + 1e-9
NOTHING = "nothing"


def named(advice: Advice):
    return {option.name: option for option in advice.options}


def unpriced(advice: Advice):
    return {one.name: one.reason for one in advice.unpriced}


@cache
def advice_on(name, traces):
    """Shipped traces on one network: seconds, once for all laws."""
    network = load_network(name)
    return [
        (trace, advise(trace, network, workers=NETWORKS[name])) for trace in map(load_trace, traces)
    ]


# By formula there are so many more ways to send a message that all traces take seconds.
BY_FORMULA = ("blueconnect-2x4-p100-pcie-10gbe", "gtopk-1gbe", "k80-10gbe")
FEW_TRACES, ALL_TRACES = ("resnet20", "alexnet"), tuple(trace_names())
SOME_TRACES = (*FEW_TRACES, "bert-base", "googlenet-k80", "llama-1b", "resnet50", "vgg16")


@pytest.fixture(
    params=[
        *((name, FEW_TRACES if name in BY_FORMULA else SOME_TRACES) for name in sorted(NETWORKS)),
        *(pytest.param((name, ALL_TRACES), marks=pytest.mark.long) for name in sorted(NETWORKS)),
    ],
    ids=lambda given: f"{given[0]}-{len(given[1])}",
)
def advised(request):
    return advice_on(*request.param)


def test_planned_buckets_are_never_slower_than_torchs(advised):
    for _, advice in advised:
        options = named(advice)
        for torchs in ("torch-ddp", "torch-ddp-tuned"):
            assert options["exact"].step_s <= options[torchs].step_s * ROUNDED_ERROR


@pytest.mark.parametrize(
    "traces", [SOME_TRACES, pytest.param(ALL_TRACES, marks=pytest.mark.long)], ids=len
)
@pytest.mark.parametrize("name", network_names())
def test_tuned_buckets_are_never_slower_than_those_of_torch_as_it_comes(name, traces):
    """On every shipped network, by these two ways alone: all of them would take minutes."""
    network = load_network(name)
    workers = max(network.known_workers, default=8)
    for trace in traces:
        job = Job(load_trace(trace), network, workers=workers)
        default, tuned = WAYS["torch-ddp"](job), WAYS["torch-ddp-tuned"](job)
        assert tuned.step_s <= default.step_s, trace
        assert (tuned.code == default.code) == (tuned.step_s == default.step_s), trace


def test_where_torchs_own_buckets_are_the_best_nothing_is_tuned():
    advice = advise(load_trace("resnet50"), load_network("mpi-10gbe-measured"), workers=8)
    assert (
        named(advice)["torch-ddp-tuned"].code == "torch.nn.parallel.DistributedDataParallel(model)"
    )


def test_rounding_is_never_slower_than_exact_or_one_format_alone(advised):
    for _, advice in advised:
        options = named(advice)
        for other in ("exact", "bf16", "int8"):
            if "rounded" in options:
                assert options["rounded"].step_s <= options[other].step_s * ROUNDED_ERROR


def test_accumulated_steps_compute_as_often_and_send_once(advised):
    for trace, advice in advised:
        options = named(advice)
        for passes in (2, 4, 8):
            one, exact = options[f"accumulate:{passes}"], options["exact"]
            assert one.accumulation == passes
            assert one.compute_s == pytest.approx(passes * trace.compute_s)
            assert one.exposed_s == exact.exposed_s
            assert one.step_s == pytest.approx(one.compute_s + one.exposed_s)
            assert one.samples_per_s >= exact.samples_per_s / ROUNDED_ERROR


def test_samples_per_second_are_comparable(advised):
    for trace, advice in advised:
        for one in advice.options:
            batch = trace.batch_size * one.workers * one.accumulation
            assert one.samples_per_s == pytest.approx(batch / one.step_s)
        assert named(advice)["torch-ddp"].gain == 1


def test_the_fastest_come_first_and_of_equals_what_changes_least(advised):
    for _, advice in advised:
        for before, after in pairwise(advice.options):
            assert after.samples_per_s * (1 - EQUALLY_FAST) <= before.samples_per_s
            if before.changes != NOTHING and after.changes == NOTHING:
                assert after.samples_per_s < before.samples_per_s
        assert advice.why.startswith(f"{advice.options[0].name} is first: ")
        assert "\n" not in advice.why


def test_every_way_is_there_with_a_price_or_a_reason(advised):
    for _, advice in advised:
        assert sorted([*named(advice), *unpriced(advice)]) == sorted(WAYS)
        assert all(reason and "\n" not in reason for reason in unpriced(advice).values())


def test_memory_follows_what_is_kept(advised):
    for trace, advice in advised:
        options = named(advice)
        elements = sum(tensor.elements for tensor in trace.tensors)
        plain = options["torch-ddp"].memory_bytes
        assert plain == 3 * trace.nbytes.sum() + 8 * elements
        for name in ("int8", "sparse"):
            if name in options:
                assert options[name].memory_bytes == plain + 4 * elements
        if "bf16" in options:
            assert options["bf16"].memory_bytes == plain
        if "both-passes" in options:
            assert options["both-passes"].memory_bytes < plain


@pytest.mark.parametrize("network", sorted(NETWORKS))
def test_one_worker_pays_for_nothing(network):
    trace = load_trace("resnet50")
    advice = advise(trace, load_network(network), workers=1)
    for one in advice.options:
        if one.workers == 1:
            assert one.exposed_s == 0
            assert one.step_s == pytest.approx(one.accumulation * trace.compute_s)
    alone = [one.name for one in advice.options if one.workers == 1]
    assert alone[0] == "torch-ddp"
    assert unpriced(advice)["half-the-workers"] == "one worker cannot be halved"
    assert "one worker sends nothing" in advice.why


def test_other_numbers_of_workers_are_those_of_the_network():
    fitted = advise(load_trace("vgg16"), load_network("v100-10gbe-fits"), workers=16)
    assert named(fitted)["half-the-workers"].workers == 8
    assert "not for 32" in unpriced(fitted)["twice-the-workers"]
    linked = advise(load_trace("vgg16"), load_network("k80-10gbe"), workers=16)
    assert named(linked)["twice-the-workers"].workers == 32


def test_a_network_that_knows_nothing_of_so_many_workers_is_refused():
    with pytest.raises(UnknownCost, match="for 16 workers, not for 7"):
        advise(load_trace("vgg16"), load_network("cluster1-16xk80-10gbe"), workers=7)


def test_tiers_are_used_where_there_are_some():
    """By the wrapper itself: no argument asks for it."""
    trace, network = load_trace("bert-base"), load_network("blueconnect-2x4-p100-pcie-10gbe")
    exact = named(advise(trace, network, workers=8))["exact"]
    ring = make_plan(trace, network, workers=8, collective="ring", planner="optimal:0")
    assert exact.step_s < simulate(trace, ring, network, workers=8).iteration_s
    assert exact.code == "gradweave.DistributedDataParallel(model)"


def test_gradients_of_two_bytes_are_not_rounded():
    advice = advise(load_trace("llama-1b"), load_network("k80-10gbe"), workers=4)
    reasons = unpriced(advice)
    assert {"rounded", "bf16", "int8"} <= set(reasons)
    assert "sparse" not in reasons
    assert "4 bytes only" in reasons["bf16"]


def test_it_says_what_decides(small_trace):
    def why(latency_s, s_per_byte):
        links = flat(Link(latency_s=latency_s, s_per_byte=s_per_byte))
        network = Network(name="drawn", source="drawn", links=links)
        return advise(small_trace, network, workers=4).why

    assert "bytes, not start-ups, decide: 0 MB take" in why(0.0, 0.01)
    assert "start-ups decide: " in why(1.0, 1e-9)
    assert "nothing to gain on the network: backward hides all but" in why(1e-6, 1e-9)
    merged = advise(load_trace("googlenet-k80"), load_network("v100-10gbe-fits"), workers=16)
    assert merged.why.startswith("exact is first: buckets decide: backward hides all but ")


@given(trace=traces(most=6), cost=costs)
@settings(max_examples=60)
def test_whatever_was_measured_the_laws_hold(trace, cost):
    entry = CollectiveCost(operation="all-reduce", collective="native", workers=4, cost=cost)
    network = Network(name="drawn", source="drawn", costs=(entry,))
    advice = advise(trace.with_bytes_per_element(4), network, workers=4)
    options = named(advice)
    for other in ("torch-ddp", "torch-ddp-tuned"):
        assert options["exact"].step_s <= options[other].step_s * ROUNDED_ERROR
    for other in ("exact", *set(ROUNDING_NAMES) & set(options)):
        assert options["rounded"].step_s <= options[other].step_s * ROUNDED_ERROR


def test_a_collective_that_a_wrapper_must_be_told_is_advised():
    """Also where nothing would be rounded then, as it takes longer here."""
    s_per_byte = {"native": 2e-8, "double-tree": 4e-9, "ring+bf16": 1e-6, "ring+int8": 1e-6}
    entries = [
        CollectiveCost(
            operation="all-reduce",
            collective=name,
            workers=8,
            cost=Line(startup_s=1e-4, s_per_byte=taken_s),
        )
        for name, taken_s in s_per_byte.items()
    ]
    network = Network(name="drawn", source="drawn", costs=tuple(entries))
    trace = load_trace("resnet50")
    now_s = simulate(trace, make_plan(trace, network, workers=8), network, workers=8).iteration_s
    (best, *_) = faster_with_same_batch(trace, network, workers=8, than_s=now_s)
    assert 'collective="double-tree"' in best.code


@given(trace=traces(most=6), than_s=st.floats(0.1, 50), passes=st.integers(1, 4))
@settings(max_examples=30)
def test_what_is_faster_with_the_same_batch(trace, than_s, passes):
    entry = CollectiveCost(
        operation="all-reduce",
        collective="native",
        workers=4,
        cost=Line(startup_s=0.1, s_per_byte=0.01),
    )
    network = Network(name="drawn", source="drawn", costs=(entry,))
    found = faster_with_same_batch(
        trace.with_bytes_per_element(4), network, workers=4, than_s=than_s, passes=passes
    )
    assert len({one.changes for one in found}) == len(found)
    for one in found:
        assert (one.workers, one.accumulation) == (4, passes)
        assert passes * trace.compute_s <= one.step_s * (1 + 1e-9)
        assert one.step_s < than_s
        assert one.gain == pytest.approx(than_s / one.step_s)
        samples = 4 * trace.batch_size * passes
        assert one.samples_per_s == pytest.approx(samples / one.step_s)
