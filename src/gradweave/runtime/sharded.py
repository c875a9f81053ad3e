"""Data parallelism that communicates during forward as well as during backward.

Gradients are reduce-scattered while backward goes on, so that each rank has the sums of its shard;
it updates that shard with any optimizer that works element by element; and updated parameters are
all-gathered while the next forward pass goes on, each before the first module that reads it.
Together that is one all-reduce, half of it hidden behind forward, and the optimizer keeps state for
a shard only.
"""

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from gradweave import collectives
from gradweave.comm import Communicator
from gradweave.comm.agree import broadcast_bytes, group_device, ranks_that_differ
from gradweave.comm.communicator import same_ranks, world_group
from gradweave.comm.lanes import LANES, Lanes, Sent
from gradweave.errors import RequestError
from gradweave.measure.alignment import clock_offset_s
from gradweave.measure.spans import SpanRecorder, aligned_timelines
from gradweave.plan import Plan
from gradweave.planning import BOTH_PASSES_COLLECTIVE, OPERATIONS
from gradweave.recipe import Recipe
from gradweave.runtime.arrivals import Arrivals
from gradweave.runtime.buckets import modules_with_sparse_gradients
from gradweave.runtime.candidates import Candidate
from gradweave.runtime.departures import Departures
from gradweave.runtime.explain import explanation
from gradweave.runtime.findings import Findings
from gradweave.runtime.flat import FlatBucket, buckets_up_to, flat_buckets, merged
from gradweave.runtime.given import PlanSource, device_name, given_plan, require_fit
from gradweave.runtime.options import AUTO, Options, is_compiled
from gradweave.runtime.passes import batch_size
from gradweave.runtime.pilot import Pilot
from gradweave.runtime.shards import Shards
from gradweave.timeline import Timeline
from gradweave.words import MIB, Operation

logger = logging.getLogger(__name__)

# Until there is a plan: as torch's own wrapper.
FIRST_BUCKET_BYTES = 25 * MIB
# At exit, for ranks that end a little earlier than others.
DRAINED_WITHIN_S = 10.0


class ShardedDataParallel(nn.Module):
    """A wrapper whose ``parameters()`` are this rank's shards of the model's.

    Wrap the model, then make the optimizer from ``wrapper.parameters()`` (``named_parameters()``
    for groups); everything else is as with DistributedDataParallel. The model's own parameters are
    complete, and the same on all ranks, wherever a module reads them and in ``state_dict()``; to
    read them elsewhere call ``synchronise()`` first.

    It plans for both passes as DistributedDataParallel does for one, while training goes on; that
    needs optimizers of torch's, for what they know of an element moves with it.

    ``planner``           which plan to try first, as `gradweave plan --planner`.
    ``plan``              a Plan or Recipe, or a file of one: nothing is recorded or tried. With one
                          for the backward pass alone nothing is sharded: gradients are all-reduced.
    ``collective``        "auto", or how every bucket travels: "ring", "halving-doubling", "native".
    ``process_group``     the ranks that train together (default: all).
    ``broadcast_buffers`` rank 0's buffers for all, before each forward pass.
    ``record_steps``      how many steps are recorded at least, after two for warming up.
    ``trial_steps``       how many steps each candidate is timed for; 0 trusts the prediction.
    ``replan_when``       plan again when steps take another time by this share.
    ``timeline``          note when each message travelled, for ``timelines()``.
    ``make_group``        makes another process group of the same ranks; it is called once for each
                          thread that sends messages, and as often for calibration.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        planner: str = "optimal",
        plan: PlanSource | None = None,
        collective: str = AUTO,
        process_group: dist.ProcessGroup | None = None,
        broadcast_buffers: bool = True,
        record_steps: int = 5,
        trial_steps: int = 5,
        replan_when: float | None = None,
        timeline: bool = False,
        make_group: Callable[[], dist.ProcessGroup] | None = None,
    ) -> None:
        super().__init__()
        options = Options(
            planner=planner,
            collective=collective,
            record_steps=record_steps,
            trial_steps=trial_steps,
            replan_when=replan_when,
        )
        self.module, self.broadcast_buffers = module, broadcast_buffers
        self.process_group = process_group or world_group()
        self.require_backward_grad_sync = True
        self._full = {name: p for name, p in module.named_parameters() if p.requires_grad}
        _check_model(module, self._full, self.process_group)
        make = make_group or partial(same_ranks, self.process_group)
        self._lanes = Lanes([Communicator(make()) for _ in range(LANES)])
        # Not at exit: a thread that waits for a dead peer would keep the script from ending.
        weakref.finalize(self, self._lanes.close).atexit = False
        # But what others wait for is sent: the last step's parameters are on their way.
        weakref.finalize(self, self._lanes.drain, DRAINED_WITHIN_S)
        self._arrivals = Arrivals(module, self._full.values())
        weakref.finalize(self, self._arrivals.close).atexit = False
        group = self.process_group
        self._shards = Shards(self._full, rank=group.rank(), ranks=group.size())
        self._step = 0
        self._recorder: SpanRecorder | None = None
        if timeline:
            self._clock_offset_s = clock_offset_s(self.process_group)
            self._recorder = SpanRecorder({p: name for name, p in self._full.items()})
        self._buckets: list[FlatBucket] = []
        self._departures: Departures | None = None
        self._close_departures: Callable[[], object] | None = None
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._pilot: Pilot | None = None
        device = next(iter(self._full.values())).device
        given = given_plan(plan, workers=group.size(), device=device)
        first = _first_plan(self._full, options)
        asked = given.plan if isinstance(given, Recipe) else given
        self._lay_out(asked or first)
        for bucket in self._buckets:
            self._send_and_wait("broadcast", bucket.values, "native")
        frozen = [p for p in module.parameters() if not p.requires_grad]
        broadcast_bytes([*frozen, *module.buffers()], self.process_group)
        self._is_stale = False  # shards may have been updated, and nothing was gathered yet
        self._unstepped: set[nn.Parameter] = set()
        self._was_stepped = False  # by an optimizer that is known, since the last pass
        if group.size() > 1:
            self._pilot = self._new_pilot(options, make, given, first)
            weakref.finalize(self, self._pilot.close).atexit = False
        after_step = register_optimizer_step_post_hook(partial(_stepped, weakref.ref(self)))
        weakref.finalize(self, after_step.remove)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self._departures_now.require_ended()
        if self._is_stale:
            self.gather()
        is_synced = torch.is_grad_enabled() and self.require_backward_grad_sync
        if torch.is_grad_enabled():
            if self._pilot is not None and self._is_between_steps():
                self._was_stepped = False
                self._pilot.step(batch_size(inputs))
            self._departures_now.is_synchronised = is_synced
        if len(self._buckets) == 1:
            self._arrivals.wait_for_all()  # no module could begin without, and recordings are clean
        if self._pilot is not None and is_synced:
            self._pilot.begin_pass()
        if self._recorder is not None and is_synced:
            self._recorder.begin()
        if self.broadcast_buffers and is_synced:
            broadcast_bytes(list(self.module.buffers()), self.process_group)
        with self._arrivals.noting():
            output = self.module(*inputs, **kwargs)
        if self._recorder is not None and is_synced:
            self._recorder.backward()
        return output

    def _is_between_steps(self) -> bool:
        """Whether buckets may change: no gradient waits to be used, and optimizers are known."""
        return self._was_stepped and all(shard.grad is None for shard in self._unstepped)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of the passes inside are added up here, and travel with the next one's."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def findings(self) -> Findings:
        """What planning has found out so far."""
        return Findings() if self._pilot is None else self._pilot.found

    def explain(self) -> str:
        """What was measured, what was tried, what was chosen, what it gains."""
        found = None if self._pilot is None else self._pilot.found
        alone = "one worker sends no messages"
        return explanation(found, alone, workers=self.process_group.size())

    def recipe(self) -> Recipe:
        """What a restart can be given as ``plan``."""
        device = next(iter(self._full.values())).device
        return self.findings().recipe(
            workers=self.process_group.size(), device=device_name(device), why_not=self.explain()
        )

    def synchronise(self) -> None:
        """Until the model's parameters are complete on this rank."""
        if self._is_stale:
            self.gather()
        self._arrivals.wait_for_all()

    def named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,  # noqa: FBT001, FBT002 torch's signature
        remove_duplicate: bool = True,  # noqa: FBT001, FBT002
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's shards, flat, some without elements; frozen parameters as they are."""
        found = super().named_parameters(prefix, recurse, remove_duplicate)
        shard_of = {full: self._shards.by_name[name] for name, full in self._full.items()}
        for name, parameter in found:
            yield name, shard_of.get(parameter, parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 torch's signature
        """Also forgets what passes under ``no_sync`` have added up, which no optimizer sees."""
        super().zero_grad(set_to_none)
        self._departures_now.forget()

    def requires_grad_(self, requires_grad: bool = True) -> Self:  # noqa: FBT001, FBT002
        del requires_grad
        raise RequestError("buckets are laid out; freeze parameters before wrapping the model")

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """As torch.nn.utils.clip_grad_norm_, by the norm over all ranks' shards."""
        norm = torch.nn.utils.get_total_norm(self._shards.counted_gradients(), norm_type)
        norm = norm.to(group_device(self.process_group), torch.float64)  # alike without any
        options = dist.AllreduceOptions()
        is_largest = norm_type == float("inf")
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM)
        norm = norm if is_largest else norm**norm_type
        self.process_group.allreduce([norm], options).wait()
        norm = norm if is_largest else norm ** (1 / norm_type)
        torch.nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, norm)
        return norm

    def timelines(self) -> list[Timeline]:
        """The last step on every rank, on one clock. Call it on every rank, between two steps.

        Parameters are gathered from the end of the step before, which is where forward begins here.
        """
        if self._recorder is None:
            raise RequestError("nothing was noted; wrap the model with timeline=True")
        return aligned_timelines(self._recorder, self.process_group, self._clock_offset_s)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The whole model's, with the names of DistributedDataParallel's.

        Rank 0 may ask alone where each step updates all shards with one optimizer of torch's.
        """
        self.synchronise()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the same on every rank."""
        if kwargs.get("assign"):
            raise RequestError("parameters lie in buckets; load with assign=False")
        self.synchronise()
        return super().load_state_dict(*args, **kwargs)

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Of all shards together, as if the whole model had been optimized here.

        Call it on every rank. It can be loaded with any number of ranks and any plan, and without
        this wrapper.
        """
        self.synchronise()
        return self._shards.whole_state(optimizer, self._gather_flat)

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """This rank's part of it."""
        self._know(optimizer)
        self._shards.load_whole_state(optimizer, state)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        raise RequestError(
            "the model's parameters lie in buckets; move it or change its type before wrapping it"
        )

    @property
    def _departures_now(self) -> Departures:
        assert self._departures is not None
        return self._departures

    def _new_pilot(
        self,
        options: Options,
        make_group: Callable[[], dist.ProcessGroup],
        given: Plan | Recipe | None,
        first: Plan,
    ) -> Pilot:
        # The pilot must not keep the wrapper alive: it has to die before its process group.
        wrapper = weakref.ref(self)

        def adopt(what: Candidate | Literal["one bucket", "torch's own"]) -> None:
            live = wrapper()
            if live is None:
                return
            if isinstance(what, Candidate):
                live._adopt(what.plan)  # noqa: SLF001
            elif what == "one bucket":
                live._adopt(merged(first))  # noqa: SLF001
            else:
                live._adopt(first)  # noqa: SLF001

        return Pilot(
            options,
            module=self.module,
            parameters=self._full,
            group=self.process_group,
            make_group=make_group,
            adopt=adopt,
            keeps_declared_order=False,
            torch_cap_mb=None,
            given=given,
            passes="both",
        )

    def _adopt(self, plan: Plan) -> None:
        """Another plan, with everything that optimizers know."""
        if plan == self.plan:
            return
        self.synchronise()
        with self._shards.moving(self._known_optimizers(), self._gather_flat):
            self._lay_out(plan)

    def _lay_out(self, plan: Plan) -> None:
        """Other buckets from now on, between two steps."""
        _check_plan(plan)
        require_fit(plan, self._full, self.process_group)
        if self._close_departures is not None:
            self._close_departures()  # which also lets go of the old buckets
        self.plan = plan
        self._buckets = flat_buckets(plan, self._full)
        self._shards.lay_out(self._buckets)
        self._sent: list[Sent] = []
        wrapper = weakref.ref(self)  # parameters must not keep their wrapper alive
        self._departures = Departures(
            self._buckets,
            ranks=self.process_group.size(),
            begin=self._shards.keep_gradients,
            send=lambda number: _alive(wrapper)._send(number),  # noqa: SLF001
            finish=lambda: _alive(wrapper)._finish(),  # noqa: SLF001
        )
        closing = weakref.finalize(self, self._departures.close)
        closing.atexit = False
        self._close_departures = closing

    def _send(self, number: int) -> None:
        is_sharded = self._buckets[number].passes == "both"
        self._sent.append(self._submit("reduce-scatter" if is_sharded else "all-reduce", number))

    def _finish(self) -> None:
        """Backward has ended; so must the reduce-scatters, for the optimizer comes next."""
        if self._recorder is not None:
            self._recorder.ready()
        self._step += 1
        sent, self._sent = self._sent, []
        for message in sent:
            message.wait()
        self._shards.give_gradients()
        shards = set(self._shards.by_name.values())
        known = (self._shards.of(optimizer) for optimizer in self._known_optimizers())
        self._unstepped, self._was_stepped = shards, False
        # Who is not updated by an optimizer of torch's may be updated by anything.
        self._is_stale = bool(shards.difference(*known))

    def _stepped(self, optimizer: Optimizer) -> None:
        updated = self._shards.of(optimizer)
        if not updated:  # another model's, and perhaps on another thread
            return
        self._know(optimizer)
        self._unstepped -= updated
        self._is_stale = self._was_stepped = True
        if not self._unstepped:
            self.gather()

    def _know(self, optimizer: Optimizer) -> None:
        if all(known is not optimizer for known in self._known_optimizers()):
            self._optimizers.append(weakref.ref(optimizer))

    def _known_optimizers(self) -> list[Optimizer]:
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    def gather(self) -> None:
        """Begin to send updated parameters to all ranks; it happens by itself where it is due.

        After each step of an optimizer of torch's, or else when the model is called.
        """
        # After another update without a pass: two messages of one bucket would mix on two threads.
        self._arrivals.wait_for_all()
        self._is_stale = False
        # What forward reads first comes first: the other end of backward's order.
        for number in reversed(range(len(self._buckets))):
            bucket = self._buckets[number]
            # Older graphs must not be used with the new values: torch then says so.
            torch.autograd.graph.increment_version(bucket.parameters)
            if bucket.passes == "both":
                self._arrivals.expect(bucket.parameters, self._submit("all-gather", number))

    def _gather_flat(self, flat: torch.Tensor, collective: str) -> None:
        self._send_and_wait("all-gather", flat, collective)

    def _send_and_wait(self, operation: Operation, flat: torch.Tensor, collective: str) -> None:
        self._lanes.submit(operation, flat, collective=collective).wait()

    def _submit(self, operation: Operation, number: int) -> Sent:
        bucket = self._buckets[number]
        flat = bucket.values if operation == "all-gather" else bucket.gradients
        step = self._step if operation == "all-gather" else self._step + 1
        where = (
            f"rank {self.process_group.rank()}, step {step}, bucket {number + 1} of "
            f"{len(self._buckets)}"
        )
        # The thread must not be the last to have the wrapper, whose end it would wait for itself.
        recorder = self._recorder

        def note(began_s: float) -> None:
            if recorder is not None:
                recorder.done(began_s, bucket.parameters, flat.nbytes, operation=operation)

        sent = self._lanes.submit(operation, flat, collective=bucket.collective, on_end=note)
        return Sent(sent, where)


def _stepped(
    wrapper: "weakref.ref[ShardedDataParallel]",
    optimizer: Optimizer,
    args: object,
    kwargs: object,
) -> None:
    del args, kwargs
    live = wrapper()
    if live is not None:
        live._stepped(optimizer)  # noqa: SLF001


def _alive(wrapper: "weakref.ref[ShardedDataParallel]") -> ShardedDataParallel:
    live = wrapper()
    if live is None:
        raise RequestError("the wrapper is gone, and backward runs through its model; keep it")
    return live


def _first_plan(parameters: Mapping[str, nn.Parameter], options: Options) -> Plan:
    by = BOTH_PASSES_COLLECTIVE if options.collective == AUTO else options.collective
    return buckets_up_to(parameters, FIRST_BUCKET_BYTES, planner="torch's sizes", collective=by)


def _check_plan(plan: Plan) -> None:
    """That its messages can be sent, and are what will be sent."""
    ways = collectives.ways(OPERATIONS[plan.passes], [b.collective for b in plan.buckets])
    for bucket in plan.buckets:
        if not all((operation, bucket.collective) in ways for operation in OPERATIONS[plan.passes]):
            known = ", ".join(["native", *collectives.names(OPERATIONS[plan.passes][0])])
            raise RequestError(
                f"no {' and '.join(OPERATIONS[plan.passes])} by {bucket.collective!r}; there are "
                f"{known}"
            )
        if bucket.compression is not None:
            raise RequestError(f"the plan sends {bucket.compression}; sharded training is dense")


def _check_model(
    module: nn.Module, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup
) -> None:
    if not parameters:
        raise RequestError("the model has no parameter that requires a gradient")
    if is_compiled(module):
        raise RequestError("a compiled model may not wait for its parameters; wrap it uncompiled")
    for name in modules_with_sparse_gradients(module):
        raise RequestError(
            f"{name!r} has sparse gradients, which have no place in a bucket; use sparse=False"
        )
    described = "\n".join(f"{n} {tuple(p.shape)} {p.dtype}" for n, p in parameters.items())
    if different := ranks_that_differ(group, described, device=group_device(group)):
        raise RequestError(
            f"ranks {different} have other parameters than rank 0; build the same model everywhere"
        )
