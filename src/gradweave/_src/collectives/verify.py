"""Proving a schedule without a network: who contributed to what every rank ends with.

A block's content is how often it contains each rank's contribution. Adding adds these counts,
replacing copies them. One more count stands for what a rank holds before it was given anything.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradweave._src.collectives.schedule import Round, Schedule
from gradweave._src.vocabulary import Operation

# counts[rank, block, contributor]; the last contributor is unset memory.
Counts = NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class Goal:
    """What ranks begin with, and what they must end with where ``required``."""

    begin: Counts
    end: Counts
    required: NDArray[np.bool_]  # [rank, block]


def goal(operation: Operation, *, ranks: int, blocks: int, root: int = 0) -> Goal:
    """Return an operation's goal; of reduce-scatter and all-gather, block b belongs to rank b."""
    own = _contents(np.arange(ranks)[:, None], ranks, blocks)
    unset = _contents(np.full((ranks, 1), ranks), ranks, blocks)
    everything = np.zeros((ranks, blocks, ranks + 1), dtype=np.int16)
    everything[:, :, :ranks] = 1
    everywhere = np.ones((ranks, blocks), dtype=bool)
    at_root = np.arange(ranks)[:, None] == np.full((1, blocks), root)
    at_owner = np.arange(ranks)[:, None] == np.arange(blocks)[None, :]
    match operation:
        case "all-reduce":
            return Goal(own, everything, everywhere)
        case "reduce":
            return Goal(own, everything, at_root)
        case "reduce-scatter":
            return Goal(own, everything, at_owner)
        case "broadcast":
            from_root = _contents(np.full((ranks, 1), root), ranks, blocks)
            return Goal(np.where(at_root[:, :, None], own, unset), from_root, everywhere)
        case "all-gather":
            from_owner = _contents(np.arange(blocks)[None, :], ranks, blocks)
            return Goal(np.where(at_owner[:, :, None], own, unset), from_owner, everywhere)


def _contents(contributor: NDArray[np.int64], ranks: int, blocks: int) -> Counts:
    """Return counts where each block holds one contribution: of the rank at [rank, block]."""
    held = np.broadcast_to(contributor, (ranks, blocks))
    contents: Counts = (held[:, :, None] == np.arange(ranks + 1)).astype(np.int16)
    return contents


def find_violation(schedule: Schedule, operation: Operation, *, root: int = 0) -> str | None:
    """Return the first thing that goes wrong, in words; None for a correct schedule."""
    wanted = goal(operation, ranks=schedule.ranks, blocks=schedule.blocks, root=root)
    counts = wanted.begin.copy()
    for number in range(schedule.rounds):
        one = schedule.round(number)
        problem = _misplaced(schedule, one) or _conflict(one) or _apply(counts, one)
        if problem:
            return f"round {number}: {problem}"
    return _shortfall(counts, wanted)


def _misplaced(schedule: Schedule, one: Round) -> str | None:
    """Name a rank or block that does not exist, which an array index might take for another."""
    for source, target, first, last, _ in _rows(one):
        for rank in (source, target):
            if not 0 <= rank < schedule.ranks:
                return f"there is no rank {rank} among {schedule.ranks}"
        if not 0 <= first < last <= schedule.blocks:
            return f"there are no blocks {first} to {last} among {schedule.blocks}"
    return None


def _apply(counts: Counts, one: Round) -> str | None:
    """Change ``counts`` as the round says; return in words what no correct round would do."""
    sending = np.unique(one.source)
    before = dict(zip(sending.tolist(), counts[sending], strict=True))
    for source, target, first, last, add in _rows(one):
        if source == target:
            return f"rank {source} sends to itself"
        sent = before[source][first:last]
        if not add:
            counts[target, first:last] = sent
            continue
        counts[target, first:last] += sent
        if (counts[target, first:last] > 1).any():
            block, whose = np.argwhere(counts[target, first:last] > 1)[0]
            return (
                f"rank {target} adds block {first + block} of rank {source}, which brings the "
                f"contribution of rank {whose} a second time"
            )
    return None


def _conflict(one: Round) -> str | None:
    """Say where two transfers write one place and do not both add: the later one would win."""
    written: dict[tuple[int, int], bool] = {}
    for _, target, first, last, add in _rows(one):
        for block in range(first, last):
            place = (target, block)
            if place in written and not (add and written[place]):
                return f"two transfers write block {block} of rank {target}"
            written[place] = add
    return None


def _rows(one: Round) -> Iterable[tuple[int, int, int, int, bool]]:
    """Return the transfers one by one, in Python's own numbers, which are quicker to compare."""
    return zip(*(column.tolist() for column in one), strict=True)


def _shortfall(counts: Counts, wanted: Goal) -> str | None:
    wrong = (counts != wanted.end).any(axis=2) & wanted.required
    if not wrong.any():
        return None
    rank, block = np.argwhere(wrong)[0]
    problem = _difference(counts[rank, block], wanted.end[rank, block])
    return f"after the last round: block {block} of rank {rank} {problem}"


def _difference(has: Counts, needs: Counts) -> str:
    if has[-1]:
        return "holds memory that nobody set"
    whose = int(np.flatnonzero(has != needs)[0])
    if has[whose] < needs[whose]:
        return f"lacks the contribution of rank {whose}"
    return f"holds the contribution of rank {whose} {has[whose]} times instead of {needs[whose]}"
