"""Which gradients of a model travel, and whether they can be sparsified."""

from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradweave._src.errors import RequestError
from gradweave._src.torch_internals import uncompiled_name


def planned_parameters(ddp: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """Return the parameters whose gradients travel, by names as if nothing were compiled."""
    return {
        uncompiled_name(name): parameter
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ddp.parameters_to_ignore
    }


def modules_with_sparse_gradients(module: nn.Module) -> Iterator[str]:
    """Yield names of modules with sparse gradients, whose content is known only in each step."""
    for name, part in module.named_modules():
        is_sparse = isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
        if is_sparse and part.weight.requires_grad:
            yield name or type(part).__name__


def check_compressible(module: nn.Module, *, skips_unused: bool) -> None:
    """Refuse gradients that cannot be selected from, before anything is built."""
    if skips_unused:
        raise RequestError(
            "residuals travel in every step, also those of unused parameters; leave out "
            "skip_all_reduce_unused_params, or leave out compression"
        )
    for name, parameter in module.named_parameters():
        if parameter.is_complex():
            raise RequestError(
                f"{name!r} is complex, and the largest are selected of real numbers; leave out "
                "compression"
            )
    for name in modules_with_sparse_gradients(module):
        raise RequestError(
            f"{name!r} has sparse gradients, which travel by themselves; use sparse=False there, "
            "or leave out compression"
        )
