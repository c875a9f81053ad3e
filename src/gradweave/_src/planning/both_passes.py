"""The exact optimum over both passes: gradients beside backward, parameters beside forward.

A bucket is reduce-scattered once its last gradient is ready, and all-gathered at the beginning of
the next iteration, in the order in which forward needs the buckets: the last one of backward first.
Let tensor j be ready at r_j after backward began, s_j be what forward computes before it needs j,
and S_j the bytes of the first j tensors. If the first i tensors are merged somehow, and i+1..j are
one more bucket, then

    tail(j)  = max(tail(i),  r_j) + reduce_scatter(S_j - S_i),
    stall(j) = max(stall(i), -s_j) + all_gather(S_j - S_i),

because the all-gathers are the same queue read backwards: that of bucket k has arrived when those
of k and of all buckets behind it are done, and forward waits for it where that is later than s. In
steady state an iteration takes forward + tail(L) + stall(L). Both grow with what they come from, so
of two mergings of the same prefix, one with neither the shorter tail nor the shorter stall can be
forgotten. What is left, the Pareto front of each prefix, holds an optimal plan. docs/both-passes.md
proves this, and that the search may leave out what it leaves out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradweave._src.costs import Cost
from gradweave._src.costs.cost import FloatArray
from gradweave._src.planning.optimal import DEFAULT_TOLERANCE, ROUNDING
from gradweave._src.trace import Trace

IntArray = NDArray[np.int64]

# So many buckets are looked at in one go.
AT_ONCE = 2**18


def optimal_for_both(
    trace: Trace, reduce_scatter: Cost, all_gather: Cost, *, tolerance: float = DEFAULT_TOLERANCE
) -> list[int]:
    """Return a merging within ``tolerance`` of the shortest iteration, with few messages.

    No plan within a quarter of the tolerance has fewer. With tolerance 0 the iteration is the
    shortest there is, and no other such plan has fewer messages.
    """
    problem = _Problem(trace, reduce_scatter, all_gather)
    # A quarter of the tolerance ends the first search early, another is lost to the grid of times,
    # and half of it allows for more merging.
    short_s = problem.forward_s + _short_s(problem, tolerance / 4)
    deadline_s = short_s * (1 + tolerance / 2 + ROUNDING) - problem.forward_s
    most = 1
    while (lengths := _fewest(problem, deadline_s, most, tolerance / 4)) is None:
        assert most < problem.tensors, "no plan meets a deadline that one was found to meet"
        most *= 2
    return lengths


@dataclass(frozen=True, slots=True)
class _Labels:
    """Mergings of prefixes, one in each place of the arrays."""

    prefix: IntArray  # how many tensors are merged
    tail_s: FloatArray
    stall_s: FloatArray
    parent: IntArray  # the place, in the layer before, of the label that this one extends

    def __len__(self) -> int:
        return len(self.prefix)

    def __getitem__(self, places: IntArray | NDArray[np.bool_]) -> "_Labels":
        return _Labels(
            self.prefix[places], self.tail_s[places], self.stall_s[places], self.parent[places]
        )

    @property
    def total_s(self) -> FloatArray:
        """What the iteration takes beyond forward, where all tensors are merged."""
        return self.tail_s + self.stall_s


def _joined(parts: Sequence[_Labels]) -> _Labels:
    return _Labels(
        np.concatenate([part.prefix for part in parts]),
        np.concatenate([part.tail_s for part in parts]),
        np.concatenate([part.stall_s for part in parts]),
        np.concatenate([part.parent for part in parts]),
    )


@dataclass(frozen=True, slots=True)
class _Outlook:
    """What may still come behind each prefix."""

    tail_s: FloatArray  # at least so much will be added to the tail
    stall_s: FloatArray
    both_s: FloatArray  # to tail and stall together
    # A tail or stall of at most this makes no difference to any plan: what follows waits anyway.
    idle_tail_s: FloatArray
    idle_stall_s: FloatArray


class _Buckets(NamedTuple):
    """What buckets cost: a row for each prefix that they follow, a column for each last tensor."""

    behind: slice  # of all prefixes
    exists: NDArray[np.bool_]  # whether the last tensor is behind the prefix at all
    scatter_s: FloatArray
    gather_s: FloatArray


class _Problem:
    """The numbers of one trace and its costs. Totals leave forward out: all plans have it."""

    def __init__(self, trace: Trace, reduce_scatter: Cost, all_gather: Cost) -> None:
        self._reduce_scatter, self._all_gather = reduce_scatter, all_gather
        self.tensors = len(trace.tensors)
        self.forward_s = trace.forward_s
        self._ready_s = trace.ready_s
        shares_s = np.array([tensor.forward_s for tensor in trace.tensors])
        # -s: minus what forward computes before it needs the tensor; the last tensor's is 0.
        self._due_s = np.append(-np.cumsum(shares_s[:0:-1])[::-1], 0.0)
        self._before_bytes = np.concatenate([[0.0], np.cumsum(trace.nbytes)])
        self.least_tail_s, self.least_stall_s = self._least_s()

    @property
    def start(self) -> _Labels:
        """The label of the empty prefix: nothing is merged, and nothing waits."""
        nothing = np.zeros(1, dtype=np.int64)
        return _Labels(nothing, np.zeros(1), self._due_s[:1], nothing)

    def extended(self, labels: _Labels, places: IntArray, last: IntArray) -> _Labels:
        """Return the labels at ``places``, each extended by one bucket up to tensor ``last``."""
        came_from = labels[places]
        scatter_s, gather_s = self._costs_s(came_from.prefix, last)
        return _Labels(
            last,
            np.maximum(came_from.tail_s, self._ready_s[last - 1]) + scatter_s,
            np.maximum(came_from.stall_s, self._due_s[last - 1]) + gather_s,
            places,
        )

    def extended_to(self, labels: _Labels, last: int) -> _Labels:
        """Return all labels, each extended by one bucket up to tensor ``last``."""
        return self.extended(labels, np.arange(len(labels)), np.full(len(labels), last))

    def at_least_s(self, labels: _Labels, outlook: _Outlook) -> FloatArray:
        """Return the least total that each label can come to, however it goes on."""
        after = labels.prefix
        tail_s = np.maximum(labels.tail_s + outlook.tail_s[after], self.least_tail_s)
        stall_s = np.maximum(labels.stall_s + outlook.stall_s[after], self.least_stall_s)
        together_s: FloatArray = labels.total_s + outlook.both_s[after]
        return np.asarray(np.maximum(tail_s + stall_s, together_s))

    def nothing_left(self) -> _Outlook:
        """Return the outlook of prefixes that get no further message: only whole plans can end."""
        arrays = np.full((5, self.tensors + 1), np.inf)
        arrays[:, -1] = 0.0, 0.0, 0.0, self.least_tail_s, self.least_stall_s
        return _Outlook(*arrays)

    def outlook(self) -> _Outlook:
        """Return the outlook for any number of further messages."""
        new = self.nothing_left()
        for last in range(self.tensors, 0, -1):
            scatter_s, gather_s = self._costs_s(np.arange(last), np.full(last, last))
            ready_s, due_s = self._ready_s[last - 1], self._due_s[last - 1]
            for array, found_s in (
                (new.tail_s, new.tail_s[last] + scatter_s),
                (new.stall_s, new.stall_s[last] + gather_s),
                (new.both_s, new.both_s[last] + (scatter_s + gather_s)),
                (new.idle_tail_s, np.maximum(ready_s, new.idle_tail_s[last] - scatter_s)),
                (new.idle_stall_s, np.maximum(due_s, new.idle_stall_s[last] - gather_s)),
            ):
                np.minimum(array[:last], found_s, out=array[:last])
        return new

    def one_more(self, later: _Outlook) -> _Outlook:
        """Return the outlook for one message more than ``later`` has.

        It takes all prefixes at once, for none depends on what is found for another.
        """
        new = self.nothing_left()
        for one in self._buckets():
            for array, found_s in (
                (new.tail_s, later.tail_s[1:] + one.scatter_s),
                (new.stall_s, later.stall_s[1:] + one.gather_s),
                (new.both_s, later.both_s[1:] + (one.scatter_s + one.gather_s)),
                (new.idle_tail_s, np.maximum(self._ready_s, later.idle_tail_s[1:] - one.scatter_s)),
                (new.idle_stall_s, np.maximum(self._due_s, later.idle_stall_s[1:] - one.gather_s)),
            ):
                array[one.behind] = found_s.min(axis=1, where=one.exists, initial=np.inf)
        return new

    def _buckets(self) -> Iterator[_Buckets]:
        """Yield all buckets there are, as many at a time as may be looked at in one go."""
        rows = max(1, AT_ONCE // self.tensors)
        if rows >= self.tensors:
            yield self._all_buckets
            return
        for first in range(0, self.tensors, rows):
            yield self._buckets_behind(first, min(first + rows, self.tensors))

    @cached_property
    def _all_buckets(self) -> _Buckets:
        return self._buckets_behind(0, self.tensors)

    def _buckets_behind(self, begin: int, end: int) -> _Buckets:
        """Return all buckets whose first tensor follows one of these prefixes."""
        first, last = np.arange(begin, end)[:, None], np.arange(1, self.tensors + 1)[None, :]
        exists = first < last
        costs_s = np.zeros((2, *exists.shape))
        row, column = np.nonzero(exists)
        costs_s[:, row, column] = self._costs_s(row + begin, column + 1)
        return _Buckets(slice(begin, end), exists, *costs_s)

    def _costs_s(self, first: IntArray, last: IntArray) -> tuple[FloatArray, FloatArray]:
        """Return the costs of buckets that hold the tensors behind ``first`` up to ``last``."""
        nbytes = self._before_bytes[last] - self._before_bytes[first]
        return self._reduce_scatter.seconds(nbytes), self._all_gather.seconds(nbytes)

    def _least_s(self) -> tuple[float, float]:
        """Return the shortest tail and the shortest stall of any plan, each by itself."""
        every = np.arange(self.tensors + 1)
        tail_s, stall_s = np.zeros(len(every)), np.full(len(every), self._due_s[0])
        for last in range(1, self.tensors + 1):
            grown = self.extended_to(_Labels(every[:last], tail_s, stall_s, every), last)
            tail_s[last], stall_s[last] = grown.tail_s.min(), grown.stall_s.min()
        return float(tail_s[-1]), float(stall_s[-1])


def _short_s(problem: _Problem, tolerance: float) -> float:
    """Return the least total of all plans, or one so near, from the fronts of all prefixes."""
    outlook = problem.outlook()
    known_s = _promising_s(problem, outlook)
    if known_s <= (problem.least_tail_s + problem.least_stall_s) * (1 + ROUNDING):
        return known_s
    wanted_s = (problem.forward_s + known_s) * (1 - tolerance) - problem.forward_s
    grid_s = (problem.forward_s + known_s) * ROUNDING / (2 * problem.tensors)
    known = newest = problem.start
    for last in range(1, problem.tensors + 1):
        grown = problem.extended_to(known, last)
        better = problem.at_least_s(grown, outlook) < wanted_s
        newest = _front(grown[better], outlook, grid_s)
        known = _joined([known, newest])
    return float(newest.total_s.min(initial=known_s))


def _promising_s(problem: _Problem, outlook: _Outlook) -> float:
    """Return the total of a plan that is seldom bad: each prefix by its most promising merging."""
    known = newest = problem.start
    for last in range(1, problem.tensors + 1):
        grown = problem.extended_to(known, last)
        # Of equally promising mergings, the one whose own total is the least.
        order = np.lexsort((grown.total_s, problem.at_least_s(grown, outlook)))
        newest = grown[order[:1]]
        known = _joined([known, newest])
    return float(newest.total_s[0])


def _fewest(problem: _Problem, deadline_s: float, most: int, tolerance: float) -> list[int] | None:
    """Return the lengths of the fewest buckets that meet the deadline; None if over ``most``.

    The search goes layer by layer, with one more message in each, and is narrowed by how many
    messages are left. A merging is left out where one that is as good has no more messages.
    """
    grid = max(ROUNDING / problem.tensors, tolerance / most)
    grid_s = (problem.forward_s + deadline_s) * grid / 4
    outlooks = [problem.nothing_left()]
    for _ in range(most - 1):
        outlooks.append(problem.one_more(outlooks[-1]))
    known = problem.start
    layers = [known]
    while problem.tensors not in layers[-1].prefix:
        if not outlooks or not len(layers[-1]):
            return None
        outlook = outlooks.pop()
        grown = [
            labels[problem.at_least_s(labels, outlook) <= deadline_s]
            for labels in _one_more(problem, layers[-1])
        ]
        layers.append(_front(_joined(grown), outlook, grid_s, beside=known))
        known = _joined([known, layers[-1]])
    complete = np.flatnonzero(layers[-1].prefix == problem.tensors)
    place = int(complete[layers[-1][complete].total_s.argmin()])
    lengths = []
    for layer, before in zip(layers[:0:-1], layers[-2::-1], strict=True):
        parent = int(layer.parent[place])
        lengths.append(int(layer.prefix[place] - before.prefix[parent]))
        place = parent
    return lengths[::-1]


def _one_more(problem: _Problem, layer: _Labels) -> Iterator[_Labels]:
    """Yield every merging of a layer with every bucket that may follow it, some at a time."""
    rows = max(1, AT_ONCE // problem.tensors)
    ends = np.arange(1, problem.tensors + 1)
    for first in range(0, len(layer), rows):
        row, column = np.nonzero(ends > layer.prefix[first : first + rows, None])
        yield problem.extended(layer, row + first, ends[column])


def _front(
    labels: _Labels, outlook: _Outlook, grid_s: float, *, beside: _Labels | None = None
) -> _Labels:
    """Leave out labels if another of the same prefix, or of ``beside``, is at least as good.

    Times are compared on a grid, because sums of the same numbers in another order may differ. Each
    bucket of a plan may lose two steps of the grid, one in the tail and one in the stall.
    """
    if not len(labels):
        return labels
    labels = replace(
        labels,
        tail_s=np.maximum(labels.tail_s, outlook.idle_tail_s[labels.prefix]),
        stall_s=np.maximum(labels.stall_s, outlook.idle_stall_s[labels.prefix]),
    )
    older = 0 if beside is None else len(beside)
    both = labels if beside is None else _joined([beside, labels])
    tail, stall = (
        np.floor((times_s - times_s.min()) / grid_s).astype(np.int64)
        for times_s in (both.tail_s, both.stall_s)
    )
    # By prefix, then tail, then stall; the sort is stable, so of equals the first stays first.
    order = np.lexsort((stall, tail, both.prefix))
    # Each prefix lies below all before it, so that its minimum begins anew.
    level = stall[order] - both.prefix[order] * (stall.max() + 1)
    stays = np.append(True, level[1:] < np.minimum.accumulate(level)[:-1])
    places = np.sort(order[stays])
    return both[places[places >= older]]
