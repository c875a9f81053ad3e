"""Merging, collective and wire format decided together.

A message that may travel in several ways costs what the cheapest of them costs it. That is a cost
like any other, so the exact planner for any cost finds the best of all plans that merge the
gradients somehow and send each message in some way: for given buckets, no choice of ways makes any
of them leave earlier than its cheapest does. docs/merging.md says it in full.

Two things are not in that cost. One is a way's latency, which only delays the end of the last
messages: so the plan misses the best one by at most the largest difference of latencies. The other
is a handicap, the share by which a way must be cheaper to be taken in real steps.
"""

import numpy as np
from msgspec.structs import replace

from gradweave._src.costs import Cheapest, Cost, Times
from gradweave._src.errors import RequestError
from gradweave._src.network import Network
from gradweave._src.plan import Plan, merge
from gradweave._src.planning import at_share, find_planner, priced_share
from gradweave._src.trace import Trace
from gradweave._src.travel import Travel


def plan_among(
    trace: Trace,
    network: Network,
    travels: tuple[Travel, ...],
    *,
    workers: int,
    planner: str = "optimal",
    handicap: float = 0.0,
) -> Plan:
    """Merge for the best of these ways, and send each message in the one that is best for it.

    All but the first must be cheaper by the share ``handicap``. Compressed ways are left out where
    they have no price for gradients as wide as these.
    """
    shares = {one: share for one in travels if (share := _share(trace, one)) is not None}
    usable = list(shares)
    if not usable:
        priced_share(trace, travels[0].compression)  # says why
    known = [
        network.cost("all-reduce", one.collective, workers=workers, compression=one.compression)
        for one in usable
    ]
    costs = [at_share(cost, shares[way]) for way, cost in zip(usable, known, strict=True)]
    first, *others = costs
    compared: list[Cost] = [first, *(Times(1 / (1 - handicap), cost) for cost in others)]
    cost = first if not others else Cheapest(tuple(compared))
    merged = merge(
        trace,
        find_planner(planner)(trace, cost),
        planner=planner,
        collective=usable[0].collective,
    )
    nbytes = merged.bucket_bytes(trace)
    best = np.argmin([one.seconds(nbytes) for one in compared], axis=0)
    buckets = tuple(
        replace(bucket, collective=usable[way].collective, compression=usable[way].compression)
        for bucket, way in zip(merged.buckets, best, strict=True)
    )
    return replace(merged, buckets=buckets)


def _share(trace: Trace, travel: Travel) -> float | None:
    """Return a way's ``priced_share``; None where these gradients have no price in this way."""
    try:
        return priced_share(trace, travel.compression)
    except RequestError:
        return None
