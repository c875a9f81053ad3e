"""Finding out what messages cost: those of the training tell, and a few beside it.

Parts of a session: generators that yield commands, are sent replies and return what they found.
"""

from collections.abc import Generator
from itertools import accumulate
from typing import Any

import numpy as np

from gradweave._src.compression import Compression
from gradweave._src.network import Network
from gradweave._src.planning import OPERATIONS
from gradweave._src.session.commands import (
    Command,
    CompressionPrice,
    PriceCompression,
    Probe,
    Probed,
)
from gradweave._src.session.compression_worth import with_compression_price
from gradweave._src.session.knowledge import Knowledge
from gradweave._src.session.learning import MESSAGES_PER_PROBE, probe_takes_s, sizes_to_probe
from gradweave._src.vocabulary import Way

# Messages beside training may lengthen it by this share of the time since its first step, and by no
# more than so many seconds, all of them together.
PROBED_SHARE, MOST_PROBED_S = 0.02, 2.0
# They also have no more bytes than so many steps send, so that planning for a small model costs
# little.
PROBED_STEPS = 10
# Sizes that tell a start-up from bytes, where training's own messages tell neither.
NEEDED_SIZES = 2
# Other collectives than the first are probed, too, if a start-up takes more than this share of
# backward.
DEAR_STARTUP = 0.05


def learn_prices(known: Knowledge) -> Generator[Command, Any, Network]:
    """Learn what messages cost from training's own, and from a few beside it where needed."""
    yield from _probed(known, known.task.collective)
    if _startup_s(known) > DEAR_STARTUP * known.trace.backward_s:
        for rival in known.task.rivals:
            yield from _probed(known, rival)
    return known.learnt_network()


def price_compression(
    known: Knowledge, network: Network, compression: Compression
) -> Generator[Command, Any, Network]:
    """Return the network with what this compression costs on it."""
    price: CompressionPrice = yield PriceCompression(compression)
    return with_compression_price(
        network,
        compression,
        selection_s_per_element=price.selection_s_per_element,
        exchange=price.exchange,
        workers=known.task.workers,
    )


def _probed(known: Knowledge, collective: str) -> Generator[Command, Any, None]:
    """Send messages by this collective, of sizes that training does not send, as time allows.

    Where training's own messages are sparse, nothing else tells what dense ones cost, so the
    smaller sizes are sent once in any case.
    """
    is_sparse = known.task.compression_at is not None
    sizes = sizes_to_probe(
        known.samples, collective, is_sparse=is_sparse, model_bytes=known.model_bytes
    )
    ways = tuple(Way(operation, collective) for operation in OPERATIONS[known.task.passes])
    allowed_s = min(MOST_PROBED_S, PROBED_SHARE * known.findings.elapsed_s) - known.probed_s
    allowed_bytes = PROBED_STEPS * known.model_bytes - known.probed_bytes
    each_bytes = accumulate(len(ways) * MESSAGES_PER_PROBE * size for size in sizes)
    required_sizes = sum(nbytes <= allowed_bytes for nbytes in each_bytes)
    if is_sparse:
        required_sizes = max(1, min(required_sizes, NEEDED_SIZES))
    else:
        each_s = accumulate(len(ways) * probe_takes_s(known.samples, size) for size in sizes)
        required_sizes = min(required_sizes, sum(taken_s <= allowed_s for taken_s in each_s))
        sizes = sizes[:required_sizes]
    if sizes:
        probed: Probed = yield Probe(
            ways,
            sizes,
            required_sizes=required_sizes,
            within_s=max(0.0, allowed_s),
            within_bytes=max(0, allowed_bytes),
        )
        known.samples += probed.samples
        known.probed_s += probed.taken_s
        known.probed_bytes += probed.sent_bytes


def _startup_s(known: Knowledge) -> float:
    """Return the start-up of a message by the collective that is used without a plan."""
    task = known.task
    operation, *_ = OPERATIONS[task.passes]
    cost = known.learnt_network().cost(operation, task.collective, workers=task.workers)
    return float(cost.seconds(np.zeros(1))[0])
