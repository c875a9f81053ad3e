"""Planning while the density of sparse gradients falls: the best plan for each density."""

from collections.abc import Callable, Generator
from typing import Any

from gradweave._src.compression import Compression
from gradweave._src.network import Network
from gradweave._src.session.commands import (
    Candidates,
    Command,
    FindCandidates,
    Install,
    StepsTaken,
    TakeSteps,
)
from gradweave._src.session.findings import Stage
from gradweave._src.session.knowledge import Knowledge
from gradweave._src.session.prices import price_compression
from gradweave._src.session.task import LAST_STEP


def warm_up(
    known: Knowledge, network: Network, compression_at: Callable[[int], Compression]
) -> Generator[Command, Any, Network]:
    """Use the best plan for each density, and return the prices for the last one.

    No plan is tried before the last density: it would be chosen for messages many times as large.
    """
    taken: StepsTaken = yield TakeSteps(0)
    while True:
        now = compression_at(taken.next_step)
        priced = yield from price_compression(known, network, now)
        if now == compression_at(LAST_STEP):
            return priced
        found: Candidates = yield FindCandidates(known.trace, priced, now)
        best = found.candidates[0]
        yield Install(best.plan)
        known.note(stage=Stage.WARMING_UP, network=priced, plan=best.plan)
        known.note(predicted=known.predicted(best.plan))
        while compression_at(taken.next_step) == now:
            taken = yield TakeSteps(1)
