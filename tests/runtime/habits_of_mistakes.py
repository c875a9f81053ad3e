"""What torch's wrapper refuses: ours does at the same step, in torch's words."""

import torch
from habits_of_models import IMAGES, Checkpointed, Convolutional, batch, network, sgd, take_step
from torch import nn

# Of a message, what says what it is about; the rest names buckets, which are planned.
GIST = 60


def told(failure):
    return [type(failure).__name__, str(failure)[:GIST]]


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = network(outputs=6), network(seed=1)
        self.skipped = nn.Linear(6, 2).double()

    def forward(self, value, *, skips):
        value = self.first(value)
        result = self.second(value)
        return result if skips else result + self.skipped(value)


def leaves_a_layer_out(wrap, rank, *, stage, later):
    """So many steps after that stage was seen, without find_unused_parameters.

    Says how many steps later that was told, and how.
    """
    wrapped = wrap(Skipping())
    optimizer, skips_at = sgd(wrapped), None
    for step in wrap.steps():
        if wrap.begins(stage):
            skips_at = step + later
        optimizer.zero_grad()
        try:
            loss = wrapped(batch(step, rank), skips=step == skips_at).square().mean()
        except RuntimeError as failure:
            return [step - skips_at, *told(failure)]
        loss.backward()
        optimizer.step()
    return ["nothing was told"]


def shares_a_layer_between_reentrant_checkpoints(wrap, rank):
    wrapped = wrap(Checkpointed(use_reentrant=True))
    try:
        take_step(wrapped, sgd(wrapped), batch(0, rank))
    except RuntimeError as failure:
        return {"told": told(failure)}
    return {"told": None}


def differentiates_some_parameters(wrap, rank):
    """By backward(inputs=…), while plans are recorded; the others' gradients never come."""
    wrapped = wrap(network())
    optimizer, known = sgd(wrapped), None
    for step in wrap.steps():
        optimizer.zero_grad()
        try:
            loss = wrapped(batch(step, rank)).square().mean()
        except RuntimeError as failure:
            known = [step, *told(failure)]
            break
        inputs = [wrapped.module[0].weight] if step == 10 else None
        loss.backward(inputs=inputs)
        optimizer.step()
    return {"told": known}


def fails_in_backward(wrap, rank):
    """On all ranks, in a hook of the user's; it is caught, and the next batch is tried."""
    wrapped = wrap(network())
    optimizer, known = sgd(wrapped), []

    def failing(_, grads, outputs):
        raise ValueError("the user's hook has failed")

    for step in wrap.steps():
        if step == 10:
            handle = wrapped.module[2].register_full_backward_hook(failing)
        if step == 11:
            handle.remove()
        try:
            take_step(wrapped, optimizer, batch(step, rank))
        except (ValueError, RuntimeError) as failure:
            known.append([step, *told(failure)])
        if len(known) == 2:
            break
    return {"told": known}


def optimizer_in_backward(wrap, rank, *, before_wrapping=False):
    """Which wants an accelerator, and says so."""
    from torch.distributed.optim import _apply_optimizer_in_backward  # noqa: PLC0415 warns

    model = network()
    wrapped = None if before_wrapping else wrap(model)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.05})
    try:
        wrapped = wrapped or wrap(model)
        wrapped(batch(0, rank)).square().mean().backward()
    except RuntimeError as failure:
        return {"told": told(failure)}
    return {"told": None}


def optimizer_in_backward_before_wrapping(wrap, rank):
    return optimizer_in_backward(wrap, rank, before_wrapping=True)


def synchronises_batch_norm(wrap, rank):
    """Which wants an accelerator, too."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Convolutional())
    try:
        wrap(model)(batch(0, rank, IMAGES))
    except ValueError as failure:
        return {"told": told(failure)}
    return {"told": None}


def wraps_nothing_to_train(wrap, rank):
    try:
        wrap(network().requires_grad_(requires_grad=False))
    except RuntimeError as failure:
        return {"told": told(failure)}
    return {"told": None}


def wraps_other_shapes_on_one_rank(wrap, rank):
    try:
        wrap(network(12 + rank))
    except RuntimeError as failure:
        return {"told": told(failure)[:1]}
    return {"told": None}


HABITS = [
    shares_a_layer_between_reentrant_checkpoints,
    differentiates_some_parameters,
    fails_in_backward,
    optimizer_in_backward,
    optimizer_in_backward_before_wrapping,
    synchronises_batch_norm,
    wraps_nothing_to_train,
    wraps_other_shapes_on_one_rank,
]
