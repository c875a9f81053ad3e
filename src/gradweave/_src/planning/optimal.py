"""The exact optimum: the merging that ends communication earliest, for any cost.

Let tensor j be ready at r_j and S_j be the bytes of the first j tensors. The first j tensors can
have left no earlier than

    F(j) = min over i < j of  max(F(i), r_j) + cost(S_j - S_i),    F(0) = 0,

because what follows them depends on them only through the time at which they have left, and never
gains from a later one. docs/merging.md proves this and the steps below.

Among plans that end within ``tolerance`` of F(L) we take one with the fewest messages, and of those
one that ends earliest: start-up costs vary in reality, and a message not sent cannot be late.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate

import numpy as np

from gradweave._src.costs import Cost, Line
from gradweave._src.costs.cost import FloatArray
from gradweave._src.trace import Trace

DEFAULT_TOLERANCE = 0.01

# Deadlines are met up to this fraction: sums of thousands of terms are not exact.
ROUNDING = 1e-10

# Each bisection halves what is left of the tolerance.
BISECTIONS = 40

# Rows of the cost matrix are kept for the second and third pass up to this size, which is enough
# for 5,000 tensors.
CACHE_BYTES = 10**8


def optimal(trace: Trace, cost: Cost, *, tolerance: float = DEFAULT_TOLERANCE) -> list[int]:
    if isinstance(cost, Line):
        return optimal_for_line(trace, cost, tolerance=tolerance)
    return optimal_for_any_cost(trace, cost, tolerance=tolerance)


def optimal_for_line(trace: Trace, line: Line, *, tolerance: float) -> list[int]:
    """Return the best merging where a message costs a line.

    It takes O(L) for the optimum, and O(messages log L) for each deadline tried.
    """
    ready_s = [tensor.ready_s for tensor in trace.tensors]
    before_bytes = [0, *accumulate(tensor.nbytes for tensor in trace.tensors)]
    optimum_s = _earliest_end_for_line(ready_s, before_bytes, line)

    late_s = optimum_s * (1 + tolerance + ROUNDING)
    fewest = _fewest_by_deadline(ready_s, before_bytes, line, late_s)
    assert fewest is not None, "the optimum meets its own deadline"
    early_s = optimum_s
    for _ in range(BISECTIONS):
        middle_s = (early_s + late_s) / 2
        lengths = _fewest_by_deadline(ready_s, before_bytes, line, middle_s)
        if lengths is not None and len(lengths) == len(fewest):
            fewest, late_s = lengths, middle_s
        else:
            early_s = middle_s
    return fewest


def _earliest_end_for_line(ready_s: list[float], before_bytes: list[int], line: Line) -> float:
    """Return F(L), which takes O(L).

    F grows with j, so the i with F(i) <= r_j are a prefix; of these the last is best, for it leaves
    the fewest bytes. Of the others the best has the least F(i) - b S_i, whatever j is, and a queue
    of candidates in which that key increases yields it: its head leaves when the prefix has passed
    it, its tail when a newer one has a smaller key.
    """
    a, b = line.startup_s, line.s_per_byte
    end_s = [0.0]
    key = [0.0]
    last_free = 0
    waiting: deque[int] = deque()
    for j, ready in enumerate(ready_s, start=1):
        while last_free + 1 < j and end_s[last_free + 1] <= ready:
            last_free += 1
        while waiting and waiting[0] <= last_free:
            waiting.popleft()
        best = ready - b * before_bytes[last_free]
        if waiting:
            best = min(best, key[waiting[0]])
        end_s.append(best + a + b * before_bytes[j])
        key.append(end_s[j] - b * before_bytes[j])
        while waiting and key[waiting[-1]] >= key[j]:
            waiting.pop()
        waiting.append(j)
    return end_s[-1]


def _fewest_by_deadline(
    ready_s: list[float], before_bytes: list[int], line: Line, deadline_s: float
) -> list[int] | None:
    """Return the fewest messages that all leave by the deadline; None where no plan makes it.

    From the back, each message takes in as many tensors as its own deadline allows. That is safe:
    moving tensors from the messages before it into this one brings their deadline forward by
    exactly the bytes they no longer send.
    """
    lengths = []
    last = len(ready_s)
    while last > 0:
        room_s = deadline_s - line.startup_s - ready_s[last - 1]
        if room_s < 0:
            return None
        first = 0
        if line.s_per_byte > 0:
            least_before = before_bytes[last] - room_s / line.s_per_byte
            first = bisect_left(before_bytes, least_before, hi=last)
        if first == last:
            return None
        deadline_s -= line.startup_s + line.s_per_byte * (before_bytes[last] - before_bytes[first])
        lengths.append(last - first)
        last = first
    return lengths[::-1]


# Latest[i]: the first i tensors may end as late as this and the rest still meets the deadline.
Latest = dict[int, float]
CostRow = Callable[[int], FloatArray]


def optimal_for_any_cost(trace: Trace, cost: Cost, *, tolerance: float) -> list[int]:
    """Return the best merging for any cost of a message.

    It takes O(L^2) for the optimum, and at most O(L^2) more for each message that the plan has.
    """
    ready_s = trace.ready_s
    before_bytes = np.concatenate([[0.0], np.cumsum(trace.nbytes)])

    @lru_cache(maxsize=max(1, CACHE_BYTES // (4 * len(before_bytes))))
    def cost_row(j: int) -> FloatArray:
        """Return the cost of one message with tensors i..j, for every i < j."""
        return cost.seconds(before_bytes[j] - before_bytes[:j])

    end_s = _earliest_ends(ready_s, cost_row)
    deadline_s = float(end_s[-1]) * (1 + tolerance + ROUNDING)
    layers = _latest_ends_by_count(ready_s, cost_row, end_s, deadline_s)
    return _earliest_within(ready_s, cost_row, layers)


def _earliest_ends(ready_s: FloatArray, cost_row: CostRow) -> FloatArray:
    """Return F(0) to F(L)."""
    end_s = np.zeros(len(ready_s) + 1)
    for j in range(1, len(end_s)):
        end_s[j] = (np.maximum(end_s[:j], ready_s[j - 1]) + cost_row(j)).min()
    return end_s


def _latest_ends_by_count(
    ready_s: FloatArray, cost_row: CostRow, end_s: FloatArray, deadline_s: float
) -> list[Latest]:
    """Return when prefixes must end, a layer for each message from the back, up to the front.

    A prefix stays in a layer only if it can end early enough, F(i) <= Latest[i]. On measured curves
    the layers are narrow, and all of them together cost about what F did; in the worst case each
    costs O(L^2).
    """
    layers: list[Latest] = [{len(ready_s): deadline_s}]
    slack_s = ROUNDING * deadline_s
    while 0 not in layers[-1]:
        latest = np.full(len(end_s), -np.inf)
        for j, by_s in layers[-1].items():
            starts_s = by_s - cost_row(j)
            starts_s[starts_s < ready_s[j - 1] - slack_s] = -np.inf
            np.maximum(latest[:j], starts_s, out=latest[:j])
        feasible = np.flatnonzero(latest >= end_s - slack_s)
        assert feasible.size, "the optimum meets its own deadline"
        layers.append({int(i): float(latest[i]) for i in feasible})
    return layers


def _earliest_within(ready_s: FloatArray, cost_row: CostRow, layers: list[Latest]) -> list[int]:
    """Return a plan that ends earliest of those that take one step per layer, from the front."""
    ends_s: dict[int, float] = {0: 0.0}
    steps: list[dict[int, int]] = []
    for layer in reversed(layers[:-1]):
        starts = np.fromiter(ends_s, dtype=np.intp)
        starts_s = np.fromiter(ends_s.values(), dtype=np.float64)
        reached, came_from = {}, {}
        for j in layer:
            usable = starts < j
            if not usable.any():
                continue
            i, i_s = starts[usable], starts_s[usable]
            candidates_s = np.maximum(i_s, ready_s[j - 1]) + cost_row(j)[i]
            best = int(candidates_s.argmin())
            reached[j], came_from[j] = float(candidates_s[best]), int(i[best])
        ends_s = reached
        steps.append(came_from)
    lengths, j = [], len(ready_s)
    for came_from in reversed(steps):
        lengths.append(j - came_from[j])
        j = came_from[j]
    return lengths[::-1]
