"""What a schedule costs on given links: clocks for every port and block, round by round.

A transfer starts when its source has the blocks and both ports are done with what came before; what
goes from one rank to another in a round is one message, which waits for all its blocks. It takes
the latency of the outermost tier it crosses, and then as long as the most loaded link on its way
needs for all that crosses that link in this round, in this direction: flows that share a link share
its bandwidth. (Transfers of different rounds wait for each other at ports, not at uplinks.) Links
are full duplex. A rank adds what it has received before it receives more, and adds what several
ranks send it in one round one after the other, as the papers count it.
"""

from math import prod

import numpy as np

from gradweave._src.collectives.schedule import IntArray, Round, Schedule, block_edges
from gradweave._src.costs import Links
from gradweave._src.costs.cost import FloatArray
from gradweave._src.errors import RequestError


def simulate_schedule(schedule: Schedule, links: Links, *, nbytes: int) -> float:
    """Return the seconds until the last rank is done.

    Ranks are numbered with the innermost tier fastest.
    """
    factors = links.factors(schedule.ranks)
    if factors is None:
        raise RequestError(f"{schedule.ranks} ranks do not fill the tiers of these links evenly")
    edges = block_edges(nbytes, schedule.blocks)
    ready_s = np.zeros((schedule.ranks, schedule.blocks))
    sending_s, receiving_s = np.zeros(schedule.ranks), np.zeros(schedule.ranks)
    adding_s_per_byte = max(level.link.sum_s_per_byte for level in links.levels)
    for number in range(schedule.rounds):
        one = schedule.round(number)
        size = (edges[one.last] - edges[one.first]).astype(np.float64)
        taken_s = _latency_s(one, links, factors) + _transfer_s(one, size, links, factors)
        begin_s = np.maximum(sending_s[one.source], receiving_s[one.target])
        begin_s = np.maximum(begin_s, _messages_ready_s(ready_s, one))
        end_s = begin_s + taken_s
        np.maximum.at(sending_s, one.source, end_s)
        added_s = end_s + _added_bytes(one, size, schedule.ranks) * adding_s_per_byte
        np.maximum.at(receiving_s, one.target, added_s)
        _mark_ready(ready_s, one, added_s)
    return float(ready_s.max(initial=0.0))


def bytes_across_tier(schedule: Schedule, group: int, *, nbytes: int) -> IntArray:
    """Return the bytes that leave each group of so many neighbours: its uplink's traffic."""
    edges = block_edges(nbytes, schedule.blocks)
    left = np.zeros(schedule.ranks // group, dtype=np.int64)
    for number in range(schedule.rounds):
        one = schedule.round(number)
        size = edges[one.last] - edges[one.first]
        crosses = one.source // group != one.target // group
        np.add.at(left, one.source[crosses] // group, size[crosses])
    return left


def _latency_s(one: Round, links: Links, factors: tuple[int, ...]) -> FloatArray:
    latency_s = np.full(len(one.source), links.levels[0].link.latency_s)
    for tier in range(1, len(factors)):
        below = prod(factors[:tier])
        crosses = one.source // below != one.target // below
        latency_s[crosses] = links.levels[tier].link.latency_s
    return latency_s


def _transfer_s(one: Round, size: FloatArray, links: Links, factors: tuple[int, ...]) -> FloatArray:
    """Return how long the most loaded link on each transfer's way is busy in this round."""
    ranks = prod(factors)
    slowest_s = np.zeros(len(size))
    for tier, level in enumerate(links.levels):
        below = prod(factors[:tier])
        crosses = one.source // below != one.target // below
        if links.topology == "torus" and tier > 0:
            # Every node has a link in each dimension, and uses that of the tier it crosses.
            beyond = below * factors[tier]
            crosses &= one.source // beyond == one.target // beyond
            below = factors[0]
        crossing = np.where(crosses, size, 0.0)
        for end in (one.source, one.target):
            group = end // below
            load = np.bincount(group, crossing, minlength=ranks)
            busy_s = load[group] * level.link.s_per_byte
            slowest_s = np.where(crosses, np.maximum(slowest_s, busy_s), slowest_s)
    return slowest_s


def _added_bytes(one: Round, size: FloatArray, ranks: int) -> FloatArray:
    """Return the bytes that each transfer's target has to add in this round; 0 if it replaces."""
    load = np.bincount(one.target[one.add], size[one.add], minlength=ranks)
    return np.where(one.add, load[one.target], 0.0)


def _messages_ready_s(ready_s: FloatArray, one: Round) -> FloatArray:
    """Return when each source has all that goes to the same target."""
    blocks_s = _sources_ready_s(ready_s, one)
    if np.bincount(one.source, minlength=1).max() <= 1:
        return blocks_s  # no rank sends two transfers, so no message has several
    pairs, message = np.unique(one.source * len(ready_s) + one.target, return_inverse=True)
    if len(pairs) == len(blocks_s):
        return blocks_s
    together_s = np.zeros(len(pairs))
    np.maximum.at(together_s, message, blocks_s)
    return np.asarray(together_s[message])


def _sources_ready_s(ready_s: FloatArray, one: Round) -> FloatArray:
    if (one.last - one.first == 1).all():
        return np.asarray(ready_s[one.source, one.first])
    return np.array(
        [
            ready_s[source, first:last].max(initial=0.0)
            for source, first, last in zip(one.source, one.first, one.last, strict=True)
        ]
    )


def _mark_ready(ready_s: FloatArray, one: Round, at_s: FloatArray) -> None:
    if (one.last - one.first == 1).all():
        # numpy is several times as fast with one index as with two.
        np.maximum.at(ready_s.reshape(-1), one.target * ready_s.shape[1] + one.first, at_s)
        return
    for target, first, last, ready in zip(one.target, one.first, one.last, at_s, strict=True):
        np.maximum(ready_s[target, first:last], ready, out=ready_s[target, first:last])
