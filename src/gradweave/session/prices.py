"""Finding out what messages cost: those of the training tell, and a few beside it.

Parts of a session: generators that yield commands, are sent replies and return what they found.
"""

from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from gradweave.compression import Compression
from gradweave.costs import Cost
from gradweave.network import Network
from gradweave.planning import OPERATIONS
from gradweave.session.commands import (
    Candidates,
    Command,
    CompressionPrice,
    FindCandidates,
    Install,
    PriceCompression,
    Probe,
    Probed,
    StepsTaken,
    TakeSteps,
)
from gradweave.session.compression import with_compression_price
from gradweave.session.findings import Stage
from gradweave.session.knowledge import Knowledge
from gradweave.session.learning import probe_takes_s, sizes_to_probe
from gradweave.session.task import LAST_STEP
from gradweave.vocabulary import Way

# Messages beside training may lengthen it by this share of the time since its first step, and by no
# more than so many seconds.
PROBED_SHARE, MOST_PROBED_S = 0.02, 2.0
# A start-up so dear beside backward makes other collectives than the first worth a look.
DEAR_STARTUP = 0.05

Part = Generator[Command, Any, Network]


def learn_prices(known: Knowledge) -> Part:
    """What messages cost, as training's own tell, and a few beside it where they do not."""
    task = known.task
    is_sparse = task.compression_at is not None
    sizes = sizes_to_probe(known.samples, is_sparse=is_sparse)
    if is_sparse or _may_probe(known, sizes, ways=1):
        yield from _probed(known, (task.collective,), sizes)
    is_dear = _startup_s(known) > DEAR_STARTUP * known.trace.backward_s
    if is_dear and _may_probe(known, sizes, ways=len(task.rivals)):
        yield from _probed(known, task.rivals, sizes)
    return known.learnt_network()


def warm_up(
    known: Knowledge, network: Network, compression_at: Callable[[int], Compression]
) -> Part:
    """Until the last density has come, by the best plan for each; then the prices for that.

    What is tried before would be chosen for messages that are many times as large.
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


def price_compression(known: Knowledge, network: Network, compression: Compression) -> Part:
    """Return the network with what this compression costs on it."""
    price: CompressionPrice = yield PriceCompression(compression)
    return with_compression_price(
        network,
        compression,
        selection_s_per_element=price.selection_s_per_element,
        exchange=price.exchange,
        workers=known.task.workers,
    )


def _startup_s(known: Knowledge) -> float:
    return float(_cost(known).seconds(np.zeros(1))[0])


def _may_probe(known: Knowledge, sizes: tuple[int, ...], *, ways: int) -> bool:
    """Whether that would not lengthen training by too much."""
    return ways * probe_takes_s(_cost(known), sizes) <= _allowed_s(known)


def _allowed_s(known: Knowledge) -> float:
    return min(MOST_PROBED_S, PROBED_SHARE * known.findings.elapsed_s)


def _probed(
    known: Knowledge, collectives: tuple[str, ...], sizes: tuple[int, ...]
) -> Generator[Command, Any, None]:
    operations = OPERATIONS[known.task.passes]
    ways = tuple(Way(operation, by) for by in collectives for operation in operations)
    if ways and sizes:
        probed: Probed = yield Probe(ways, sizes, _allowed_s(known))
        known.samples += probed.samples


def _cost(known: Knowledge) -> Cost:
    """Of messages without a plan."""
    task = known.task
    operation, *_ = OPERATIONS[task.passes]
    return known.learnt_network().cost(operation, task.collective, workers=task.workers)
