"""A script that fails in its third step: ``python failing.py WHERE``.

WHERE is backward, hooked (the same, where a hook of ours sends buckets), forward (of the model),
buffers (where they travel) or elsewhere.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn

from gradweave import DistributedDataParallel


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, fails):
        ctx.fails = fails
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            raise ArithmeticError("on purpose")
        return gradient, None


class Model(nn.Module):
    """Which fails in backward between its two layers, where it is told to."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, value, *, fails=False, fails_now=False):
        if fails_now:
            raise ArithmeticError("on purpose")
        return self.last(Failing.apply(self.first(value), fails))


class Unreachable(DistributedDataParallel):
    """Whose buffers do not arrive, where it is told so: torch asks for that in each forward."""

    is_unreachable = False

    def will_sync_module_buffers(self):
        if self.is_unreachable:
            raise ArithmeticError("on purpose")
        return super().will_sync_module_buffers()


def main(where):
    options = {"precision": "bf16"} if where == "hooked" else {}
    wrapped = Unreachable(Model(), **options)
    for step in range(1, 4):
        with wrapped.no_sync():
            wrapped(torch.ones(1, 2)).sum().backward()
        fails = {"fails": step == 3 and where in {"backward", "hooked"}}
        fails["fails_now"] = step == 3 and where == "forward"
        wrapped.is_unreachable = step == 3 and where == "buffers"
        wrapped(torch.ones(1, 2), **fails).sum().backward()
    raise ArithmeticError("on purpose")


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    main(sys.argv[1])
