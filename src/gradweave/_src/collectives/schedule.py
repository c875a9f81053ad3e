"""A collective is data: rounds of transfers between ranks.

The message is cut into ``blocks`` of nearly equal size. In a round, every transfer reads what its
source held *before* the round and adds it to, or puts it in place of, what its target holds. Rounds
are computed when asked for: a ring of 2048 ranks has 8.4 million transfers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

IntArray = NDArray[np.int64]


class Round(NamedTuple):
    """Transfers that may all happen at once; parallel arrays, one entry per transfer."""

    source: IntArray
    target: IntArray
    first: IntArray  # blocks first <= block < last
    last: IntArray
    add: NDArray[np.bool_]  # otherwise the target's block is replaced


def transfers(
    source: ArrayLike, target: ArrayLike, first: ArrayLike, last: ArrayLike, *, add: bool
) -> Round:
    """Return a round whose transfers all add or all replace; scalars stand for all transfers."""
    columns = [
        np.array(column, dtype=np.int64, ndmin=1) for column in (source, target, first, last)
    ]
    # This broadcasts as numpy does, whose own function takes longer than all else in a small round.
    count = next((len(column) for column in columns if len(column) != 1), 1)
    source_, target_, first_, last_ = (
        column if len(column) == count else np.full(count, column) for column in columns
    )
    return Round(source_, target_, first_, last_, np.full(count, add))


def around_the_end(
    source: IntArray, target: IntArray, first: IntArray, count: int, *, blocks: int, add: bool
) -> Round:
    """Send ``count`` blocks from ``first`` on, modulo ``blocks``: past the end in two transfers."""
    last = first + count
    beyond = last > blocks
    return joined(
        [
            transfers(source, target, first, np.minimum(last, blocks), add=add),
            transfers(source[beyond], target[beyond], 0, last[beyond] - blocks, add=add),
        ]
    )


def joined(rounds: list[Round]) -> Round:
    """Return one round with the transfers of several."""
    if len(rounds) == 1:
        return rounds[0]
    return Round(*(np.concatenate(columns) for columns in zip(*rounds, strict=True)))


@dataclass(frozen=True, slots=True)
class Schedule:
    """Rounds of transfers between ``ranks`` of a message cut into ``blocks``."""

    ranks: int
    blocks: int
    rounds: int
    round: Callable[[int], Round]


def nothing(ranks: int, blocks: int = 1) -> Schedule:
    """Return a schedule without transfers, which is all that a single rank needs."""
    return Schedule(ranks, blocks, 0, lambda _: transfers([], [], [], [], add=False))


def then(*parts: Schedule) -> Schedule:
    """Run schedules one after the other, on the same ranks and blocks."""
    _check_alike(parts, "ranks", "blocks")
    ends = np.cumsum([part.rounds for part in parts])

    def round_(number: int) -> Round:
        place = int(np.searchsorted(ends, number, side="right"))
        return parts[place].round(number - int(ends[place]) + parts[place].rounds)

    return Schedule(parts[0].ranks, parts[0].blocks, int(ends[-1]), round_)


def together(*parts: Schedule) -> Schedule:
    """Run schedules at once that share the blocks but touch none of each other's ranks."""
    _check_alike(parts, "ranks", "blocks")
    return Schedule(
        parts[0].ranks,
        parts[0].blocks,
        max(part.rounds for part in parts),
        lambda number: joined([part.round(number) for part in parts if number < part.rounds]),
    )


def beside(*parts: Schedule) -> Schedule:
    """Run schedules at once on the same ranks, each on its own share of the message."""
    _check_alike(parts, "ranks")
    blocks = sum(part.blocks for part in parts)
    edges = np.cumsum([0, *(part.blocks for part in parts)])
    everyone = np.arange(parts[0].ranks)
    placed = [
        on_groups(
            part,
            everyone[None, :],
            np.arange(edges[place], edges[place + 1] + 1)[None, :],
            ranks=part.ranks,
            blocks=blocks,
        )
        for place, part in enumerate(parts)
    ]
    return together(*placed)


def on_groups(
    part: Schedule, members: IntArray, edges: IntArray, *, ranks: int, blocks: int
) -> Schedule:
    """Run the same schedule in several groups of a larger world at once.

    Row g of ``members`` says which rank of the world plays each rank of the part, row g of
    ``edges`` where each block of the part begins and ends among the blocks of the world.
    """

    def round_(number: int) -> Round:
        one = part.round(number)
        return Round(
            members[:, one.source].ravel(),
            members[:, one.target].ravel(),
            edges[:, one.first].ravel(),
            edges[:, one.last].ravel(),
            np.tile(one.add, len(members)),
        )

    return Schedule(ranks, blocks, part.rounds, round_)


def renamed(part: Schedule, names: IntArray) -> Schedule:
    """Return the same schedule with rank r played by ``names[r]``."""
    whole = np.arange(part.blocks + 1)
    return on_groups(part, names[None, :], whole[None, :], ranks=part.ranks, blocks=part.blocks)


def block_by_block(part: Schedule, *, ranks: IntArray, blocks: IntArray) -> Schedule:
    """Return the schedule with rank r played by ``ranks[r]`` and block b called ``blocks[b]``.

    Neighbouring blocks need not stay neighbours, so each is a transfer of its own.
    """

    def round_(number: int) -> Round:
        one = part.round(number)
        length = one.last - one.first
        row = np.repeat(np.arange(len(length)), length)
        within = np.arange(len(row)) - np.repeat(np.cumsum(length) - length, length)
        block = blocks[one.first[row] + within]
        return Round(ranks[one.source[row]], ranks[one.target[row]], block, block + 1, one.add[row])

    return Schedule(part.ranks, part.blocks, part.rounds, round_)


def backwards(part: Schedule, *, add: bool) -> Schedule:
    """Return a schedule with every transfer the other way, the last round first.

    A broadcast becomes a reduce (``add``), a reduce-scatter an all-gather (not ``add``).
    """

    def round_(number: int) -> Round:
        one = part.round(part.rounds - 1 - number)
        return Round(one.target, one.source, one.first, one.last, np.full(len(one.add), add))

    return Schedule(part.ranks, part.blocks, part.rounds, round_)


def block_edges(elements: int, blocks: int) -> IntArray:
    """Return where each block of a message begins, and last where the last one ends."""
    return np.arange(blocks + 1, dtype=np.int64) * elements // blocks


def _check_alike(parts: tuple[Schedule, ...], *fields: str) -> None:
    for field in fields:
        found = {getattr(part, field) for part in parts}
        if len(found) > 1:
            raise ValueError(f"schedules of {sorted(found)} {field} cannot be combined")
