"""Workers that are not equally fast: every message waits for the slowest of them."""

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from gradweave._src.checks import require_not_negative
from gradweave._src.trace import Trace

# Workers are drawn in parts of this size, so that memory does not grow with their number.
WORKERS_AT_ONCE = 1024


class Jitter(Struct, frozen=True, kw_only=True):
    """How workers differ from the trace, anew in each iteration."""

    spread: float = 0.0  # standard deviation of each tensor's time, as a share of it
    stragglers: int = 0  # so many workers, drawn anew, take ``slowdown`` times as long
    slowdown: float = 1.5

    def __post_init__(self) -> None:
        require_not_negative(self, "spread", "slowdown")
        if self.slowdown < 1:
            raise ValueError(f"slowdown must be at least 1, got {self.slowdown}")
        if self.stragglers < 0:
            raise ValueError(f"stragglers must be at least 0, got {self.stragglers}")


def slowest(trace: Trace, jitter: Jitter, *, workers: int, random: np.random.Generator) -> Trace:
    """Return one iteration as a collective sees it: each tensor ready when all workers have it.

    Times are drawn log-normal, so that none is negative, with the trace's as their mean.
    """
    tensors = len(trace.tensors)
    is_straggler = np.zeros(workers, dtype=bool)
    is_straggler[random.permutation(workers)[: jitter.stragglers]] = True
    if jitter.spread == 0:
        is_straggler = np.unique(is_straggler)  # all stragglers are alike, and so are all others
    forward_s = np.array([tensor.forward_s for tensor in reversed(trace.tensors)])
    parts_s = np.concatenate([forward_s, np.diff(trace.ready_s, prepend=0.0)])
    variance = np.log1p(jitter.spread**2)
    clocks_s = np.zeros(2 * tensors)
    for some in np.array_split(is_straggler, -(-len(is_straggler) // WORKERS_AT_ONCE)):
        noise = random.normal(-variance / 2, np.sqrt(variance), size=(len(some), 2 * tensors))
        factors = np.exp(noise) * np.where(some, jitter.slowdown, 1.0)[:, None]
        clocks_s = np.maximum(clocks_s, np.cumsum(factors * parts_s, axis=1).max(axis=0))
    forward_end_s, ready_s = clocks_s[tensors - 1], clocks_s[tensors:]
    shares_s = np.diff(clocks_s[:tensors], prepend=0.0)[::-1]
    changed = zip(trace.tensors, ready_s - forward_end_s, shares_s, strict=True)
    return replace(
        trace,
        tensors=tuple(
            replace(tensor, ready_s=float(ready), forward_s=float(share))
            for tensor, ready, share in changed
        ),
    )
