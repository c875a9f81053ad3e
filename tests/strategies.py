"""Random traces and costs, and the plans and times that brute force finds for them."""

from collections.abc import Iterator
from itertools import accumulate, combinations, pairwise

import numpy as np
from hypothesis import strategies as st

from gradweave import Tensor, Trace
from gradweave.costs import Cost, Curve, Line

MOST_TENSORS = 12

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


def end_of_communication_s(trace: Trace, lengths: list[int], cost: Cost) -> float:
    """Since backward began; written anew so that it shares nothing with what it checks."""
    end_s, first = 0.0, 0
    for length in lengths:
        members = trace.tensors[first : first + length]
        nbytes = np.array([float(sum(tensor.nbytes for tensor in members))])
        end_s = max(end_s, members[-1].ready_s) + float(cost.seconds(nbytes)[0])
        first += length
    return end_s
