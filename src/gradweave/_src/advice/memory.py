"""What a rank keeps for its model, by a simple count that leaves out activations.

Parameters and gradients, what Adam keeps (two float32 for each element), and the buckets that
gradients are copied into, as torch's wrapper has them. Where only part of a gradient travels, or
eight bits of it, the rest is kept in one more float32 for each such element.

Sharded training has its gradients in the buckets alone, and of Adam's state one worker's part, with
the flat shard of parameters that belongs to it.
"""

from math import ceil

from gradweave._src.compression import KEEPS_ERRORS, Compression
from gradweave._src.plan import Plan
from gradweave._src.trace import Trace

FLOAT32_BYTES = 4
ADAM_BYTES = 2 * FLOAT32_BYTES


def memory_bytes(trace: Trace, plan: Plan, *, workers: int) -> int:
    """Return what one rank keeps that carries out this plan."""
    parameters = gradients = buckets = sum(tensor.nbytes for tensor in trace.tensors)
    adam = ADAM_BYTES * sum(tensor.elements for tensor in trace.tensors)
    if plan.passes == "both":
        return parameters + buckets + ceil((adam + parameters) / workers)
    return parameters + gradients + buckets + adam + _residual_bytes(trace, plan)


def _residual_bytes(trace: Trace, plan: Plan) -> int:
    elements = {tensor.name: tensor.elements for tensor in trace.tensors}
    return FLOAT32_BYTES * sum(
        elements[name]
        for bucket in plan.buckets
        if _keeps_the_rest(bucket.compression)
        for name in bucket.tensors
    )


def _keeps_the_rest(compression: Compression | None) -> bool:
    return compression is not None and compression.rounding in {None, *KEEPS_ERRORS}
