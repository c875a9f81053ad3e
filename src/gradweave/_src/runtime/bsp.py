"""Bulk-synchronous SGD in the three loops of the Linear Pipeline paper, with any collective.

``bsp-reduce-broadcast``  gradients are reduced to the root, which updates; weights are broadcast.
``bsp-allreduce``         gradients are all-reduced, and every rank updates; since roundings differ
                          between devices, weights are broadcast every few iterations.
``bsp-overlap``           layer by layer: gradients are reduced while backward goes on, the root
                          updates, and weights are broadcast while the next forward goes on.

Gradients are means over the ranks. Buffers, such as running means, stay each rank's own.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer

from gradweave._src.comm.communicator import Communicator
from gradweave._src.comm.groups import same_ranks, world_group
from gradweave._src.comm.worker import CommunicationThread, Done
from gradweave._src.errors import RequestError
from gradweave._src.planning.bsp import COLLECTIVES
from gradweave._src.runtime.flat.arrivals import Arrivals
from gradweave._src.runtime.flat.buckets import (
    FlatBucket,
    buckets_by_module,
    buckets_up_to,
    flat_buckets,
)
from gradweave._src.runtime.flat.departures import Departures
from gradweave._src.vocabulary import Operation, alternatives

ROOT = 0


class BspLoop:
    """What the three loops have in common; make one of them, not this.

    Call ``step`` on every rank with a function that computes the loss, ``synchronise`` before
    parameters are read elsewhere (for evaluation or a checkpoint), and ``close`` at the end. Where
    the root alone updates, its optimizer alone has state.

    Args:
        model: the model to train; parameters that are frozen now stay out of all messages.
        optimizer: any of torch's; None keeps the weights, for measuring.
        collective: by which messages travel: "linear-pipeline", "mst", "exchange" or "native".
        group: the ranks that train together (default: all).

    Raises:
        RequestError: if no collective has that name, or no parameter requires a gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        *,
        collective: str = "linear-pipeline",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if collective not in COLLECTIVES:
            known = alternatives(collective, COLLECTIVES)
            raise RequestError(f"no collective {collective!r}{known}")
        self.model, self.optimizer, self.collective = model, optimizer, collective
        self.group = group or world_group()
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not parameters:
            raise RequestError("the model has no parameter that requires a gradient")
        self._buckets = self._lay_out(parameters)
        self._departures = Departures(
            self._buckets,
            ranks=self.group.size(),
            begin=_nothing,
            send=self._send,
            finish=_nothing,
            added_up=_nothing,
            is_discarded=_never,
        )
        self._communicator = Communicator(self.group)
        for bucket in self._buckets:
            self._run("broadcast", bucket.values, collective="native")

    def step(self, compute_loss: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run one iteration, and return the loss of this rank."""
        self._departures.require_ended()
        loss = compute_loss()
        loss.backward()  # type: ignore[no-untyped-call]
        self._join()
        return loss.detach()

    def synchronise(self) -> None:
        """Wait until this rank has the weights of the last update."""

    def close(self) -> None:
        """Wait for the last update, and take all hooks off the model."""
        self.synchronise()
        self._departures.close()

    def _lay_out(self, parameters: Mapping[str, nn.Parameter]) -> list[FlatBucket]:
        """Return the buckets; here everything travels in one message."""
        most_bytes = sum(parameter.nbytes for parameter in parameters.values())
        plan = buckets_up_to(parameters, most_bytes, planner="single", collective=self.collective)
        return flat_buckets(plan, parameters)

    def _send(self, number: int) -> None:
        """Take a bucket of complete gradients while backward goes on. Here nothing leaves yet."""

    def _join(self) -> None:
        """Communicate and update, when backward has ended."""
        raise NotImplementedError

    def _update(self) -> None:
        if self.optimizer is None:
            return
        with ExitStack() as lent:
            for bucket in self._buckets:
                lent.enter_context(bucket.lent_gradients())
            self.optimizer.step()

    def _run(
        self, operation: Operation, message: torch.Tensor, *, collective: str | None = None
    ) -> None:
        by = collective or self.collective
        self._communicator.run(operation, message, collective=by, root=ROOT)


class ReduceBroadcast(BspLoop):
    """A loop that reduces gradients to rank 0, which updates and broadcasts the weights.

    Use it to measure what a central update costs.

    Args:
        model: the model to train; parameters that are frozen now stay out of all messages.
        optimizer: any of torch's; None keeps the weights, for measuring.
        collective: by which messages travel: "linear-pipeline", "mst", "exchange" or "native".
        group: the ranks that train together (default: all).

    Raises:
        RequestError: if no collective has that name, or no parameter requires a gradient.

    Examples:
        >>> loop = gradweave.bsp.ReduceBroadcast(model, optimizer, collective="mst")
        >>> loss = loop.step(lambda: model(batch).square().mean())
        >>> loop.close()
    """

    def _join(self) -> None:
        for bucket in self._buckets:
            self._run("reduce", bucket.gradients)
        if self.group.rank() == ROOT:
            self._update()
        for bucket in self._buckets:
            self._run("broadcast", bucket.values)


class AllReduce(BspLoop):
    """A loop that all-reduces gradients, after which every rank updates by itself.

    Args:
        model: the model to train; parameters that are frozen now stay out of all messages.
        optimizer: any of torch's; None keeps the weights, for measuring.
        collective: by which messages travel: "linear-pipeline", "mst", "exchange" or "native".
        group: the ranks that train together (default: all).
        broadcast_every: after so many iterations the weights of rank 0 go to all others, for
            roundings may differ between devices; 0 means never.

    Raises:
        RequestError: if no collective has that name, no parameter requires a gradient, or
            ``broadcast_every`` is negative.

    Examples:
        >>> loop = gradweave.bsp.AllReduce(model, optimizer, broadcast_every=10)
        >>> loss = loop.step(lambda: model(batch).square().mean())
        >>> loop.close()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        *,
        collective: str = "linear-pipeline",
        group: dist.ProcessGroup | None = None,
        broadcast_every: int = 5,
    ) -> None:
        if broadcast_every < 0:
            raise RequestError(f"broadcast_every must not be negative, got {broadcast_every}")
        super().__init__(model, optimizer, collective=collective, group=group)
        self._every, self._iterations = broadcast_every, 0

    def _join(self) -> None:
        for bucket in self._buckets:
            self._run("all-reduce", bucket.gradients)
        self._update()
        self._iterations += 1
        if self._every and self._iterations % self._every == 0:
            for bucket in self._buckets:
                self._run("broadcast", bucket.values)


class Overlap(BspLoop):
    """A loop that reduces layer by layer beside backward, and broadcasts beside the next forward.

    Each module that has parameters sends a message of its own, on a thread and a process group that
    nothing else uses.

    Args:
        model: the model to train; parameters that are frozen now stay out of all messages.
        optimizer: any of torch's; None keeps the weights, for measuring.
        collective: by which messages travel: "linear-pipeline", "mst", "exchange" or "native".
        group: the ranks that train together (default: all).
        make_group: a function that makes another process group of the same ranks, for the thread
            (default: one of the same backend).

    Raises:
        RequestError: if no collective has that name, or no parameter requires a gradient.

    Examples:
        >>> loop = gradweave.bsp.Overlap(model, optimizer)
        >>> loss = loop.step(lambda: model(batch).square().mean())
        >>> loop.synchronise()  # before anything else reads the parameters
        >>> loop.close()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        *,
        collective: str = "linear-pipeline",
        group: dist.ProcessGroup | None = None,
        make_group: Callable[[], dist.ProcessGroup] | None = None,
    ) -> None:
        super().__init__(model, optimizer, collective=collective, group=group)
        own_group = make_group() if make_group else same_ranks(self.group)
        self._thread = CommunicationThread(Communicator(own_group))
        self._arrivals = Arrivals(self.model, (p for b in self._buckets for p in b.parameters))
        self._sent: list[Done] = []

    def step(self, compute_loss: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run one iteration, and return the loss of this rank; weights arrive while it runs."""

        def forward() -> torch.Tensor:
            with self._arrivals.noting():
                return compute_loss()

        return super().step(forward)

    def synchronise(self) -> None:
        """Wait until this rank has the weights of the last update."""
        self._arrivals.wait_for_all()
        self._wait_for_sent()

    def close(self) -> None:
        """Wait for the last update, take all hooks off the model, and end the thread."""
        super().close()
        self._arrivals.close()
        self._thread.close()

    def _lay_out(self, parameters: Mapping[str, nn.Parameter]) -> list[FlatBucket]:
        return flat_buckets(buckets_by_module(parameters, collective=self.collective), parameters)

    def _send(self, number: int) -> None:
        self._submit("reduce", self._buckets[number].gradients)

    def _join(self) -> None:
        self._wait_for_sent()
        if self.group.rank() == ROOT:
            self._update()
        for bucket in reversed(self._buckets):  # what forward reads first comes first
            sent = self._submit("broadcast", bucket.values)
            if self.group.rank() != ROOT:
                self._arrivals.expect(bucket.parameters, sent)

    def _submit(self, operation: Operation, message: torch.Tensor) -> Done:
        sent = self._thread.submit(operation, message, collective=self.collective, root=ROOT)
        self._sent.append(sent)
        return sent

    def _wait_for_sent(self) -> None:
        """Wait for all that was sent; the root's broadcasts, which follow reduces, are in it."""
        sent, self._sent = self._sent, []
        for one in sent:
            one.wait()


LOOPS: Mapping[str, type[BspLoop]] = {
    "bsp-reduce-broadcast": ReduceBroadcast,
    "bsp-allreduce": AllReduce,
    "bsp-overlap": Overlap,
}


def _nothing(*_: object) -> None:
    pass


def _never(parameter: nn.Parameter) -> bool:
    del parameter
    return False
