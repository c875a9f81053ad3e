"""Which optimizers update each element of a parameter by itself, and so can update flat parts."""

import logging
from collections.abc import Collection
from inspect import unwrap

from torch import optim
from torch.optim.optimizer import Optimizer

from gradweave._src.errors import RequestError

logger = logging.getLogger(__name__)

ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adagrad,
    optim.Adadelta,
    optim.RMSprop,
    optim.Rprop,
    optim.ASGD,
)
# They need norms of whole tensors, matrices, several passes a step, or sparse gradients.
NOT_ELEMENTWISE = tuple(
    getattr(optim, name)
    for name in ("Adafactor", "Muon", "LBFGS", "SparseAdam")
    if hasattr(optim, name)
)


def require_elementwise(optimizer: Optimizer, trusted: Collection[type[Optimizer]]) -> None:
    """Raise RequestError if the optimizer does not update each element by itself.

    Warn where nobody knows. ``trusted`` are classes of which the user says that they do.
    """
    kind = type(optimizer)
    if isinstance(optimizer, tuple(trusted)):
        return
    if isinstance(optimizer, NOT_ELEMENTWISE):
        raise RequestError(
            f"{kind.__name__} does not update each element by itself, and shards are flat parts of "
            "parameters; use another optimizer, such as AdamW, or DistributedDataParallel"
        )
    # A class derived from one of torch's may override step; torch wraps that function.
    steps = {unwrap(known.step) for known in ELEMENTWISE}
    if unwrap(kind.step) not in steps:
        logger.warning(
            "shards are flat parts of parameters: %s must update each element by itself, without "
            "norms or shapes of whole tensors; if it does, wrap the model with elementwise=[%s]",
            kind.__name__,
            kind.__name__,
        )


def knows_parameters_by_themselves(optimizer: Optimizer) -> bool:
    """Return whether parameters that are updated one after the other get the same as all at once.

    So it is for torch's own classes, which keep a state for each parameter and count its steps
    there; a class derived from one may count its own.
    """
    return type(optimizer) in ELEMENTWISE and not optimizer.defaults.get("differentiable")
