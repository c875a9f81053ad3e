"""How users run forward and backward passes."""

from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from habits_of_models import (
    Branching,
    Checkpointed,
    Convolutional,
    batch,
    network,
    sgd,
    take_step,
    train,
)
from torch import nn
from torch.nn.parallel.distributed import _find_tensors


def accumulates_into_views(wrap, rank):
    wrapped = wrap(network(), gradient_as_bucket_view=True)
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        optimizer.zero_grad(set_to_none=step % 3 == 0)
        with wrapped.no_sync():
            for micro in range((7 * step + 3 * rank) % 3):
                wrapped(batch(10 * step + micro, rank)).square().mean().backward()
        wrapped(batch(10 * step + 9, rank)).square().mean().backward()
        optimizer.step()
    return {"model": wrapped}


def accumulates_in_a_static_graph(wrap, rank):
    wrapped = wrap(network(), static_graph=True)
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        optimizer.zero_grad()
        if step:  # torch wants the first pass of a static graph to be a synchronised one
            with wrapped.no_sync():
                wrapped(batch(step + 500, rank)).square().mean().backward()
        wrapped(batch(step, rank)).square().mean().backward()
        optimizer.step()
    return {"model": wrapped}


def looks_locally_in_a_static_graph(wrap, rank):
    """Before each step, and on one rank only."""
    wrapped = wrap(network(), static_graph=True)
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        if step and rank:
            with wrapped.no_sync():
                wrapped(batch(step + 500, rank))
        take_step(wrapped, optimizer, batch(step, rank))
    return {"model": wrapped}


def forward_before_backward_in_a_static_graph(wrap, rank):
    """The next batch's before this one's; buckets change between them."""
    return forward_before_backward(wrap, rank, wrap(network(), static_graph=True))


def forward_before_backward_of_reentrant_checkpoints(wrap, rank):
    model = Checkpointed(use_reentrant=True)
    return forward_before_backward(wrap, rank, wrap(model, static_graph=True))


def forward_before_backward(wrap, rank, wrapped):
    waiting = None
    for step in wrap.steps():
        following = wrapped(batch(step, rank))
        if waiting is not None:
            wrapped.zero_grad()
            waiting.square().mean().backward()
            for parameter in wrapped.parameters():  # not in place: the next pass needs them
                parameter.data = parameter.data - 0.05 * parameter.grad
        waiting = following
    return {"model": wrapped}


def zeroes_gradients_in_place(wrap, rank):
    wrapped = wrap(network())
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        optimizer.zero_grad(set_to_none=False)
        wrapped(batch(step, rank)).square().mean().backward()
        optimizer.step()
    return {"model": wrapped}


@contextmanager
def synchronised_in_backward(wrapped, losses=()):
    """As Accelerate's trigger_sync_in_backward: decided after forward ran under no_sync."""
    wrapped.require_backward_grad_sync = wrapped.require_forward_param_sync = True
    wrapped.reducer.prepare_for_backward(list(_find_tensors(losses)))
    try:
        yield
    finally:
        wrapped.require_backward_grad_sync = False


def synchronises_after_forward(wrap, rank):
    """Forward passes first, all of them without synchronisation; the last backward has it."""
    wrapped = wrap(network())
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        optimizer.zero_grad()
        with wrapped.no_sync():
            losses = [wrapped(batch(2 * step + n, rank)).square().mean() for n in range(2)]
            losses[0].backward()
            with synchronised_in_backward(wrapped):
                losses[1].backward()
        optimizer.step()
    return {"model": wrapped}


def synchronises_twice_after_forward(wrap, rank, *, looks=0):
    """Some time later both backward passes are synchronised; one rank looks between them."""
    wrapped = wrap(network())
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        optimizer.zero_grad()
        with wrapped.no_sync():
            losses = [wrapped(batch(2 * step + n, rank)).square().mean() for n in range(2)]
            with synchronised_in_backward(wrapped) if step > 5 else nullcontext():
                losses[0].backward()
            if rank == looks and step > 5:
                wrapped(batch(step + 900, rank))
            with synchronised_in_backward(wrapped):
                losses[1].backward()
        optimizer.step()
    return {"model": wrapped}


def synchronises_twice_while_another_rank_looks(wrap, rank):
    return synchronises_twice_after_forward(wrap, rank, looks=1)


def synchronises_branches_after_forward(wrap, rank):
    wrapped = wrap(Branching(), find_unused_parameters=True)
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        optimizer.zero_grad()
        with wrapped.no_sync():
            loss = wrapped(batch(step, rank), (5 * step + 3 * rank) % 4).square().mean()
            with synchronised_in_backward(wrapped, loss):
                loss.backward()
        optimizer.step()
    return {"model": wrapped}


def sets_the_flag_itself(wrap, rank):
    """Accumulates without no_sync(), by the attribute that it sets."""
    wrapped = wrap(network())
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        wrapped.require_backward_grad_sync = step % 2 == 1
        wrapped(batch(step, rank)).square().mean().backward()
        if step % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    wrapped.require_backward_grad_sync = True
    return {"model": wrapped}


def backward_alone_under_no_sync(wrap, rank):
    """Which changes nothing: synchronisation was decided in forward."""
    wrapped = wrap(network())
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        optimizer.zero_grad()
        loss = wrapped(batch(step, rank)).square().mean()
        with wrapped.no_sync():
            loss.backward()
        optimizer.step()
    return {"model": wrapped}


class ManuallyOptimized(nn.Module):
    """A module in Lightning's manner: its ``training_step`` runs as forward of the wrapper."""

    def __init__(self, parts):
        super().__init__()
        self.parts = nn.ModuleDict(parts)

    def forward(self, value):
        raise AssertionError("the wrapper's forward is redirected")


def in_lightnings_manner(wrapped, training_step, *inputs):
    """Run ``training_step`` through the wrapper, as Lightning's forward redirection does."""
    module = wrapped.module
    forward = module.forward

    def redirected(*arguments):
        module.forward = forward
        training_step(*arguments)
        wrapped.require_backward_grad_sync = False  # synchronisation is over when forward returns

    module.forward = redirected
    wrapped(*inputs)
    wrapped.require_backward_grad_sync = True


def manual_backward(wrapped, loss):
    """As Lightning's strategy prepares a backward pass inside the wrapper's forward."""
    wrapped.require_forward_param_sync = True
    finds_unused = wrapped.find_unused_parameters and not wrapped.static_graph
    wrapped.reducer._rebuild_buckets()
    wrapped.reducer.prepare_for_backward(list(_find_tensors(loss)) if finds_unused else [])
    loss.backward()


def backward_inside_forward(wrap, rank):
    wrapped = wrap(ManuallyOptimized({"net": network()}))
    optimizer = sgd(wrapped)

    def training_step(value):
        optimizer.zero_grad()
        manual_backward(wrapped, wrapped.module.parts["net"](value).square().mean())
        optimizer.step()

    for step in wrap.steps():
        in_lightnings_manner(wrapped, training_step, batch(step, rank))
    return {"model": wrapped}


def two_backward_passes_inside_forward(wrap, rank):
    wrapped = wrap(ManuallyOptimized({"net": network()}))
    optimizer = sgd(wrapped)

    def training_step(value):
        for part in (value, 2 * value):
            optimizer.zero_grad()
            manual_backward(wrapped, wrapped.module.parts["net"](part).square().mean())
            optimizer.step()

    for step in wrap.steps():
        in_lightnings_manner(wrapped, training_step, batch(step, rank))
    return {"model": wrapped}


def two_optimizers_inside_forward(wrap, rank):
    """A GAN in Lightning: each pass uses a part of the parameters, and no wrapper of its own."""
    parts = {"generator": network(inputs=3, outputs=6), "critic": network(outputs=1, seed=1)}
    wrapped = wrap(ManuallyOptimized(parts), find_unused_parameters=True)
    optimizers = {name: sgd(part, lr=0.01) for name, part in parts.items()}

    def training_step(real, noise):
        fake = parts["generator"](noise)
        optimizers["generator"].zero_grad()
        parts["critic"].requires_grad_(requires_grad=False)
        manual_backward(wrapped, -parts["critic"](fake).tanh().mean())
        parts["critic"].requires_grad_(requires_grad=True)
        optimizers["generator"].step()
        optimizers["critic"].zero_grad()
        judged = parts["critic"](fake.detach()).tanh().mean() - parts["critic"](real).tanh().mean()
        manual_backward(wrapped, judged)
        optimizers["critic"].step()

    for step in wrap.steps():
        in_lightnings_manner(
            wrapped, training_step, batch(step, rank), batch(step + 500, rank, (4, 3))
        )
    return {"model": wrapped}


def keeps_the_graph_for_a_second_loss(wrap, rank):
    """torch synchronises the first backward pass of the two; what the second adds stays local."""
    wrapped = wrap(network())
    optimizer = sgd(wrapped, momentum=0.0)
    for step in wrap.steps():
        optimizer.zero_grad()
        output = wrapped(batch(step, rank))
        output.square().mean().backward(retain_graph=True)
        output.abs().mean().backward()
        optimizer.step()
    return {"model": wrapped}


def keeps_the_graph_under_no_sync(wrap, rank):
    wrapped = wrap(network())
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        optimizer.zero_grad()
        with wrapped.no_sync():
            loss = wrapped(batch(step, rank)).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
        wrapped(batch(step, rank)).square().mean().backward()
        optimizer.step()
    return {"model": wrapped}


def several_forwards_before_one_backward(wrap, rank):
    wrapped = wrap(network())
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        optimizer.zero_grad()
        one, other = (wrapped(batch(2 * step + n, rank)) for n in range(2))
        torch.autograd.backward([one.square().mean(), other.abs().mean()])
        optimizer.step()
    return {"model": wrapped}


def skips_losses(wrap, rank):
    """Such as those that are not finite, on all ranks."""
    wrapped = wrap(network())
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        optimizer.zero_grad()
        loss = wrapped(batch(step, rank)).square().mean()
        if step % 6 == 2:
            continue
        loss.backward()
        optimizer.step()
    return {"model": wrapped}


def looks_without_gradients_before_backward(wrap, rank):
    wrapped = wrap(network())
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        optimizer.zero_grad()
        loss = wrapped(batch(step, rank)).square().mean()
        with torch.no_grad():
            wrapped(batch(step + 1, rank))
        loss.backward()
        optimizer.step()
    return {"model": wrapped}


def gradient_penalty(wrap, rank):
    wrapped = wrap(network(outputs=1))
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=1e-3)
    for step in wrap.steps():
        optimizer.zero_grad()
        fake, real = batch(step, rank), batch(step + 5000, rank)
        between = ((fake + real) / 2).requires_grad_()
        of_fake, of_between = wrapped(fake), wrapped(between)
        (slope,) = torch.autograd.grad(of_between.sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        (of_fake.mean() - wrapped(real).mean() + 10 * penalty).backward()
        optimizer.step()
    return {"model": wrapped}


def adversarial(wrap, rank, *, freezes=False):
    generator, critic = wrap(network(inputs=3, outputs=6)), wrap(network(outputs=1, seed=1))
    of_generator, of_critic = (
        torch.optim.Adam(each.parameters(), lr=1e-3) for each in (generator, critic)
    )
    for step in wrap.steps():
        real, noise = batch(step, rank), batch(step + 5000, rank, (4, 3))
        if freezes:
            critic.requires_grad_(requires_grad=True)
            generator.requires_grad_(requires_grad=False)
        of_critic.zero_grad()
        with torch.set_grad_enabled(freezes):
            fake = generator(noise)
        (critic(fake).exp().mean() - critic(real).mean()).backward()
        of_critic.step()
        if freezes:
            critic.requires_grad_(requires_grad=False)
            generator.requires_grad_(requires_grad=True)
        of_generator.zero_grad()
        (-critic(generator(noise)).mean()).backward()
        of_generator.step()
    return {"generator": generator, "critic": critic}


def adversarial_with_freezing(wrap, rank):
    """Each is frozen while the other trains."""
    return adversarial(wrap, rank, freezes=True)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = network(outputs=6)
        self.one, self.other = network(20, seed=1), network(9, seed=2)

    def forward(self, value, *, is_swapped):
        value = self.trunk(value)
        heads = (self.other, self.one) if is_swapped else (self.one, self.other)
        first = heads[0](value)
        return first + heads[1](value)


def order_of_heads_changes(wrap, rank):
    """It is the same while gradients are recorded, and another in most steps afterwards."""
    wrapped = wrap(TwoHeads())
    optimizer, is_changing = sgd(wrapped), False
    for step in wrap.steps():
        is_changing = is_changing or wrap.begins("trying") or wrap.begins("settled")
        optimizer.zero_grad()
        is_swapped = is_changing and step % 5 > 0
        wrapped(batch(step, rank), is_swapped=is_swapped).square().mean().backward()
        optimizer.step()
    return {"model": wrapped}


def order_of_heads_differs_from_the_first_step_on(wrap, rank):
    wrapped = wrap(TwoHeads())
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        optimizer.zero_grad()
        is_swapped = (step + rank) % 2 == 0
        wrapped(batch(step, rank), is_swapped=is_swapped).square().mean().backward()
        optimizer.step()
    return {"model": wrapped}


def unfreezes_a_layer(wrap, rank, *, stage="recording"):
    """Frozen when it was wrapped, so torch never synchronises it: each rank has its own."""
    model = network(12, 4)
    model[0].requires_grad_(requires_grad=False)
    wrapped = wrap(model)
    optimizer = sgd(wrapped, lr=0.01)
    for step in wrap.steps():
        if wrap.begins(stage):
            model.requires_grad_(requires_grad=True)
        take_step(wrapped, optimizer, batch(step, rank))
    return {"model": wrapped}


def unfreezes_a_layer_while_plans_are_tried(wrap, rank):
    return unfreezes_a_layer(wrap, rank, stage="trying")


def freezes_layers_for_a_while(wrap, rank):
    wrapped = wrap(network(12, 4), find_unused_parameters=True)
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        wrapped.module[0].requires_grad_(requires_grad=step // 29 % 2 == 0)
        wrapped.module[2].requires_grad_(requires_grad=step // 13 % 2 == 0)
        take_step(wrapped, optimizer, batch(step, rank))
    return {"model": wrapped}


def two_wrappers_in_turn(wrap, rank):
    wrapped = [wrap(network()), wrap(Convolutional())]
    optimizers = [sgd(each) for each in wrapped]
    for step in wrap.steps():
        take_step(wrapped[0], optimizers[0], batch(step, rank))
        take_step(wrapped[1], optimizers[1], batch(step, rank, (4, 2, 6, 6)))
    return {"models": wrapped}


def two_wrappers_share_parameters(wrap, rank):
    """Two heads on one trunk, each wrapped with it, trained in turn."""
    trunk = network(outputs=6)
    wrapped = [wrap(nn.Sequential(trunk, network(seed=seed))) for seed in (1, 2)]
    optimizers = [sgd(each) for each in wrapped]
    for step in wrap.steps():
        take_step(wrapped[step % 2], optimizers[step % 2], batch(step, rank))
    return {"models": wrapped}


def wrappers_one_inside_the_other_step(wrap, rank):
    """Both forward passes, then both backward passes."""
    first, second = wrap(network(outputs=6)), wrap(network(seed=1))
    optimizers = [sgd(first), sgd(second)]
    for step in wrap.steps():
        for optimizer in optimizers:
            optimizer.zero_grad()
        second(first(batch(step, rank))).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return {"models": [first, second]}


def optimizer_with_a_closure(wrap, rank):
    """LBFGS runs as many passes in a step as it likes, the same on all ranks."""
    wrapped = wrap(network())
    optimizer = torch.optim.LBFGS(wrapped.parameters(), lr=0.05, max_iter=3)
    value = batch(0, rank)

    def closure():
        optimizer.zero_grad()
        loss = wrapped(value).square().mean()
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean

    for step in wrap.steps():
        value = batch(step, rank)
        optimizer.step(closure)
    return {"model": wrapped}


def sharpness_aware(wrap, rank):
    """Two passes in each step: the first, without synchronisation, moves the weights."""
    wrapped = wrap(network())
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        optimizer.zero_grad()
        with wrapped.no_sync():
            wrapped(batch(step, rank)).square().mean().backward()
        moved = [0.01 * parameter.grad for parameter in wrapped.parameters()]
        with torch.no_grad():
            torch._foreach_add_(list(wrapped.parameters()), moved)
        optimizer.zero_grad()
        wrapped(batch(step, rank)).square().mean().backward()
        with torch.no_grad():
            torch._foreach_sub_(list(wrapped.parameters()), moved)
        optimizer.step()
    return {"model": wrapped}


def trains_locally_for_a_while(wrap, rank):
    """Local SGD: steps under no_sync, and now and then the mean of all weights."""
    wrapped = wrap(network())
    optimizer = sgd(wrapped, momentum=0.0)
    for step in wrap.steps():
        if step % 2 == 0:
            take_step(wrapped, optimizer, batch(step, rank))
            continue
        with wrapped.no_sync():
            take_step(wrapped, optimizer, batch(step, rank))
        if step % 4 == 3:
            for parameter in wrapped.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= 2
    return {"model": wrapped}


def differentiates_without_backward(wrap, rank):
    """By autograd.grad, for which torch's wrapper synchronises nothing."""
    wrapped = wrap(network())
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        if step > 40:
            break
        loss = wrapped(batch(step, rank)).square().mean()
        parameters = list(wrapped.parameters())
        for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = grad
        optimizer.step()
    return {"model": wrapped}


def looks_for_anomalies(wrap, rank):
    with torch.autograd.set_detect_anomaly(mode=True):
        return train(wrap, rank, wrap(network()))


HABITS = [
    accumulates_into_views,
    accumulates_in_a_static_graph,
    looks_locally_in_a_static_graph,
    forward_before_backward_in_a_static_graph,
    forward_before_backward_of_reentrant_checkpoints,
    zeroes_gradients_in_place,
    synchronises_after_forward,
    synchronises_twice_after_forward,
    synchronises_twice_while_another_rank_looks,
    synchronises_branches_after_forward,
    sets_the_flag_itself,
    backward_alone_under_no_sync,
    backward_inside_forward,
    two_backward_passes_inside_forward,
    two_optimizers_inside_forward,
    keeps_the_graph_for_a_second_loss,
    keeps_the_graph_under_no_sync,
    several_forwards_before_one_backward,
    skips_losses,
    looks_without_gradients_before_backward,
    gradient_penalty,
    adversarial,
    adversarial_with_freezing,
    order_of_heads_changes,
    order_of_heads_differs_from_the_first_step_on,
    unfreezes_a_layer,
    unfreezes_a_layer_while_plans_are_tried,
    freezes_layers_for_a_while,
    two_wrappers_in_turn,
    two_wrappers_share_parameters,
    wrappers_one_inside_the_other_step,
    optimizer_with_a_closure,
    sharpness_aware,
    trains_locally_for_a_while,
    differentiates_without_backward,
    looks_for_anomalies,
]
