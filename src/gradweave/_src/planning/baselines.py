"""These planners merge without looking at the network: per tensor, all in one, or by size."""

from collections.abc import Iterator, Sequence
from itertools import chain, repeat

from gradweave._src.costs import Cost
from gradweave._src.trace import Trace
from gradweave._src.vocabulary import MIB

# torch's DistributedDataParallel closes its first bucket at 1 MiB, so that something leaves early,
# and all others at 25 MiB (dist._DEFAULT_FIRST_BUCKET_BYTES and bucket_cap_mb).
TORCH_FIRST_BYTES, TORCH_BYTES = 1 * MIB, 25 * MIB

# Values of `bucket_cap_mb` that a patient user would try; the one predicted best is a candidate.
UNIFORM_MIB = (0.5, 1, 2, 4, 6, 8, 12, 16, 25, 35, 50, 75, 100)

# torch._inductor.fx_passes.bucketing.bucket_cap_mb_by_bucket_idx_default, the same for each bucket.
INDUCTOR_BYTES = 2000 * MIB


def one_per_tensor(trace: Trace, cost: Cost) -> list[int]:
    del cost
    return [1] * len(trace.tensors)


def all_in_one(trace: Trace, cost: Cost) -> list[int]:
    del cost
    return [len(trace.tensors)]


def torch_default(trace: Trace, cost: Cost) -> list[int]:
    del cost
    return closed_at([tensor.nbytes for tensor in trace.tensors], torch_caps())


def at_least(trace: Trace, nbytes: int) -> list[int]:
    return closed_at([tensor.nbytes for tensor in trace.tensors], repeat(nbytes))


def inductor(trace: Trace, nbytes: int = INDUCTOR_BYTES) -> list[int]:
    """Merge as torch's compiler does where ``config.bucket_all_reduces_fx`` is ``all``.

    The rule is a plain cap on sizes (torch 2.13, ``bucket_all_reduce`` and
    ``greedy_bucket_collective_by_mb`` in ``_inductor/fx_passes/bucketing.py``): neighbours of one
    type join as long as all of them hold at most the cap. It looks neither at the network nor at
    when gradients are ready.

    The compiler's other rule, ``_bucket_size_fusion`` in ``ddp_fusion.py`` for wrappers with a
    reducer in Python, is that of ``torch_default``, to the byte.
    """
    lengths: list[int] = []
    held, width = 0, None
    for tensor in trace.tensors:
        if tensor.bytes_per_element != width or held + tensor.nbytes > nbytes:
            lengths.append(0)
            held, width = 0, tensor.bytes_per_element
        lengths[-1] += 1
        held += tensor.nbytes
    return lengths


def torch_caps() -> Iterator[int]:
    return chain([TORCH_FIRST_BYTES], repeat(TORCH_BYTES))


def closed_at(sizes: Sequence[int], caps: Iterator[int]) -> list[int]:
    """Return the lengths of buckets that close when they hold at least their cap, as torch's do."""
    lengths, length, held, cap = [], 0, 0, next(caps)
    for size in sizes:
        length += 1
        held += size
        if held >= cap:
            lengths.append(length)
            length, held, cap = 0, 0, next(caps)
    return [*lengths, length] if length else lengths
