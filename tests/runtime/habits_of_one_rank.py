"""What one rank does alone: torch wants equal synchronised backward passes, and nothing more."""

import time

import torch
import torch.distributed as dist
from habits_of_models import batch, network, sgd, take_step
from torch import nn


def metric_of(rank):
    """A sum over all ranks by the script's own collective; right if it is 3."""
    metric = torch.tensor([rank + 1.0])
    dist.all_reduce(metric)
    return metric.item()


def torch_has_its_buckets(step):
    """torch's wrapper makes its final buckets in the second step, where no rank may be alone."""
    return step > 0


def leaves_a_micro_batch_over(wrap, rank):
    """Rank 0 has one more than rank 1 under no_sync, and drops it; then all reduce a metric."""
    wrapped = wrap(network())
    optimizer, metrics = sgd(wrapped), set()
    for step in wrap.steps():
        optimizer.zero_grad()
        with wrapped.no_sync():
            wrapped(batch(step, rank)).square().mean().backward()
        wrapped(batch(step + 1, rank)).square().mean().backward()
        optimizer.step()
        if rank == 0 and torch_has_its_buckets(step):
            with wrapped.no_sync():
                wrapped(batch(9, rank)).square().mean().backward()
        metrics.add(metric_of(rank))
    return {"model": wrapped, "metrics": sorted(metrics)}


def evaluates_with_gradients_before_a_barrier(wrap, rank):
    wrapped = wrap(network())
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        take_step(wrapped, optimizer, batch(step, rank))
        if torch_has_its_buckets(step):
            if rank == 0:
                wrapped.eval()
                wrapped(batch(step, rank))
                wrapped.train()
            dist.barrier()
    return {"model": wrapped}


def evaluates_with_gradients_before_a_sum(wrap, rank):
    wrapped = wrap(network())
    optimizer, metrics = sgd(wrapped), set()
    for step in wrap.steps():
        take_step(wrapped, optimizer, batch(step, rank))
        if torch_has_its_buckets(step):
            if rank == 0:
                wrapped.eval()
                wrapped(batch(step, rank))
                wrapped.train()
            metrics.add(metric_of(rank))
    return {"model": wrapped, "metrics": sorted(metrics)}


def evaluates_without_gradients(wrap, rank):
    """By turns under no_grad and under inference_mode, for a different number of batches."""
    wrapped = wrap(network())
    optimizer, metrics = sgd(wrapped), set()
    for step in wrap.steps():
        take_step(wrapped, optimizer, batch(step, rank))
        if torch_has_its_buckets(step):
            wrapped.eval()
            with torch.no_grad() if step % 2 else torch.inference_mode():
                for number in range(2 + 3 * rank):
                    wrapped(batch(number, rank))
            wrapped.train()
            metrics.add(metric_of(rank))
    return {"model": wrapped, "metrics": sorted(metrics)}


def looks_at_saliency(wrap, rank):
    """Rank 0 asks for gradients of its input, which no parameter gets."""
    wrapped = wrap(network())
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        take_step(wrapped, optimizer, batch(step, rank))
        if rank == 0 and torch_has_its_buckets(step):
            image = batch(step + 7, rank).requires_grad_()
            torch.autograd.grad(wrapped(image).sum(), image)
    return {"model": wrapped}


class Potential(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = network(outputs=1)

    def forward(self, positions):
        return self.network(positions).sum()


def energy_and_forces(wrapped, positions):
    positions.requires_grad_()
    energy = wrapped(positions)
    (forces,) = torch.autograd.grad(-energy, positions, create_graph=wrapped.training)
    return energy, forces


def validates_forces(wrap, rank):
    """Forces are gradients of the energy, in validation too, where ranks have other batches."""
    wrapped = wrap(Potential())
    optimizer, metrics = torch.optim.Adam(wrapped.parameters(), lr=1e-3), set()
    for step in wrap.steps():
        optimizer.zero_grad()
        energy, forces = energy_and_forces(wrapped, batch(step, rank))
        (energy.square() / 64 + forces.square().mean()).backward()
        optimizer.step()
        if torch_has_its_buckets(step):
            wrapped.eval()
            for number in range(2 + rank):
                energy_and_forces(wrapped, batch(number, rank))
            wrapped.train()
            metrics.add(metric_of(rank))
    return {"model": wrapped, "metrics": sorted(metrics)}


def extra_forward(wrap, rank):
    """Rank 0 alone calls the model once more, for a number it logs."""
    wrapped = wrap(network())
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        if rank == 0 and step > 1:
            wrapped(batch(step + 77, rank))
        take_step(wrapped, optimizer, batch(step, rank))
    return {"model": wrapped}


def accumulates_unevenly(wrap, rank):
    """The number of micro-batches differs between ranks and steps; sometimes there is none."""
    wrapped = wrap(network())
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        optimizer.zero_grad()
        with wrapped.no_sync():
            for micro in range((7 * step + 3 * rank) % 4):
                wrapped(batch(10 * step + micro, rank)).square().mean().backward()
        wrapped(batch(10 * step + 9, rank)).square().mean().backward()
        optimizer.step()
    return {"model": wrapped}


def calls_the_model_on_one_rank_for_a_while(wrap, rank):
    """Under no_sync rank 1 trains alone, in every stage, and then comes back."""
    wrapped = wrap(network())
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        if step % 16 == 8 and rank == 1:
            with wrapped.no_sync():
                for micro in range(6):
                    wrapped(batch(10 * step + micro, rank)).square().mean().backward()
        take_step(wrapped, optimizer, batch(step, rank))
    return {"model": wrapped}


def measures_gradients_of_the_bare_module(wrap, rank):
    """Rank 0 looks at gradients without the wrapper, and throws them away."""
    wrapped = wrap(network())
    optimizer, norms = sgd(wrapped), []
    for step in wrap.steps():
        take_step(wrapped, optimizer, batch(step, rank))
        if rank == 0 and torch_has_its_buckets(step):
            optimizer.zero_grad()
            wrapped.module(batch(step + 3, rank)).square().mean().backward()
            norms.append(nn.utils.get_total_norm([p.grad for p in wrapped.parameters()]))
            optimizer.zero_grad()
    return {"model": wrapped, "norms": norms}


class OutOfMemory(Exception):
    """As an accelerator would raise it."""


class Fails(nn.Module):
    """Raises in forward when told to, after some layers have run."""

    def __init__(self):
        super().__init__()
        self.first, self.second = network(outputs=6), network(seed=1)
        self.failure = None

    def forward(self, value):
        value = self.first(value)
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        return self.second(value)


def tries_a_failed_batch_again(wrap, rank):
    """Rank 0 runs out of memory now and then, and takes half of the batch instead."""
    wrapped = wrap(Fails())
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        if rank == 0 and step % 7 == 3:
            wrapped.module.failure = OutOfMemory()
        optimizer.zero_grad()
        try:
            loss = wrapped(batch(step, rank)).square().mean()
        except OutOfMemory:
            loss = wrapped(batch(step, rank)[:2]).square().mean()
        loss.backward()
        optimizer.step()
    return {"model": wrapped}


def dawdles(wrap, rank):
    """Rank 1 waits for its data now and then, and rank 0 for its disk."""
    wrapped = wrap(network())
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        if step % 12 == 6 * rank:
            time.sleep(0.01)
        take_step(wrapped, optimizer, batch(step, rank))
    return {"model": wrapped}


def infinite_gradient(wrap, rank):
    """A GradScaler skips the step on all ranks, since the sum is infinite on all of them."""
    wrapped = wrap(network().float())
    optimizer = sgd(wrapped)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=7)
    for step in wrap.steps():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = wrapped(batch(step, rank).float()).float().square().mean()
        if step % 20 == 11 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return {"model": wrapped, "scale": scaler.get_scale()}


HABITS = [
    leaves_a_micro_batch_over,
    evaluates_with_gradients_before_a_barrier,
    evaluates_with_gradients_before_a_sum,
    evaluates_without_gradients,
    looks_at_saliency,
    validates_forces,
    extra_forward,
    accumulates_unevenly,
    calls_the_model_on_one_rank_for_a_while,
    measures_gradients_of_the_bare_module,
    tries_a_failed_batch_again,
    dawdles,
    infinite_gradient,
]
