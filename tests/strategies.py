"""Random traces and costs, and the plans and times that brute force finds for them."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, combinations, pairwise

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gradweave import Tensor, Trace
from gradweave._src.costs import Cost, Curve, Line

MOST_TENSORS = 12


def examples(count: int) -> settings:
    """Draw so many examples in the short run, and as many times more in the long one as others."""
    profile = settings.get_profile("short")
    return settings(max_examples=count * settings().max_examples // profile.max_examples)


seconds = st.floats(min_value=0, max_value=10)


def _trace(sizes: list[int], gaps_s: list[float]) -> Trace:
    ready_s = accumulate(gaps_s)
    tensors = tuple(
        Tensor(name=f"t{i}", elements=size, bytes_per_element=1, ready_s=ready, forward_s=0.1)
        for i, (size, ready) in enumerate(zip(sizes, ready_s, strict=True))
    )
    return Trace(name="drawn", origin="estimated", source="drawn", batch_size=1, tensors=tensors)


@st.composite
def traces(draw: st.DrawFn, *, most: int = MOST_TENSORS) -> Trace:
    """Equal and single-element tensors and equal ready times are likely, not just possible."""
    count = draw(st.integers(1, most))
    sizes = draw(st.lists(st.sampled_from([1, 2, 50, 1000]), min_size=count, max_size=count))
    gap = st.one_of(st.just(0.0), st.sampled_from([0.5, 1.0]), st.floats(0, 3))
    return _trace(sizes, draw(st.lists(gap, min_size=count, max_size=count)))


lines = st.builds(
    Line,
    startup_s=st.one_of(st.sampled_from([0.0, 0.5, 1.0]), seconds),
    s_per_byte=st.one_of(st.sampled_from([0.0, 0.001]), st.floats(0, 0.1)),
)


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    """Anything a measurement might show: jumps, and small messages dearer than larger ones."""
    nbytes = sorted(draw(st.sets(st.integers(1, 5000), min_size=2, max_size=6)))
    measured = st.lists(st.floats(0.01, 10), min_size=len(nbytes) - 1, max_size=len(nbytes) - 1)
    before = draw(measured)
    # The last point is the dearest, so that the slope beyond it is not negative.
    return Curve(nbytes=tuple(nbytes), measured_s=(*before, max(before) + draw(seconds)))


costs = st.one_of(lines, curves())


def all_mergings(tensors: int) -> Iterator[list[int]]:
    """All 2^(L-1) ways to cut so many tensors into messages."""
    for count in range(tensors):
        for cuts in combinations(range(1, tensors), count):
            yield [end - start for start, end in pairwise((0, *cuts, tensors))]


@lru_cache(maxsize=1000)
def _price_s(cost: Cost, nbytes: int) -> float:
    return float(cost.seconds(np.array([float(nbytes)]))[0])


def end_of_communication_s(trace: Trace, lengths: list[int], cost: Cost) -> float:
    """Since backward began; written anew so that it shares nothing with what it checks."""
    end_s, first = 0.0, 0
    for length in lengths:
        members = trace.tensors[first : first + length]
        nbytes = sum(tensor.nbytes for tensor in members)
        end_s = max(end_s, members[-1].ready_s) + _price_s(cost, nbytes)
        first += length
    return end_s


@st.composite
def traces_of_two_passes(draw: st.DrawFn, *, most: int = 10) -> Trace:
    """With a forward pass whose times differ; many tensors take none of it."""
    trace = draw(traces(most=most))
    share = st.one_of(st.just(0.0), st.sampled_from([0.5, 1.0]), st.floats(0, 3))
    count = len(trace.tensors)
    shares_s = draw(st.lists(share, min_size=count, max_size=count))
    shares_s[draw(st.integers(0, count - 1))] += 0.125  # something is computed
    return replace(
        trace,
        tensors=tuple(
            replace(tensor, forward_s=share_s)
            for tensor, share_s in zip(trace.tensors, shares_s, strict=True)
        ),
    )


def iteration_of_both_s(
    trace: Trace, lengths: list[int], reduce_scatter: Cost, all_gather: Cost
) -> float:
    """In steady state, event by event; written anew so that it shares nothing with what it checks.

    Buckets are gathered in the order in which forward needs them, then forward and backward run,
    and what was scattered last ends the iteration.
    """
    ends = list(accumulate(lengths))
    buckets = [trace.tensors[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    gathered_s = now_s = 0.0
    for bucket in reversed(buckets):
        gathered_s += _price_s(all_gather, sum(tensor.nbytes for tensor in bucket))
        now_s = max(now_s, gathered_s) + sum(tensor.forward_s for tensor in bucket)
    sent_s = now_s + end_of_communication_s(trace, lengths, reduce_scatter)
    return max(sent_s, now_s + trace.backward_s)
