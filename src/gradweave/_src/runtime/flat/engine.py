"""Gradients that leave beside backward, and parameters that come back beside the next forward."""

import atexit
import logging
import sys
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from threading import Thread

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.optim.optimizer import Optimizer

from gradweave._src import collectives
from gradweave._src.clocks import clock_for
from gradweave._src.comm.communicator import Communicator
from gradweave._src.comm.groups import same_ranks
from gradweave._src.comm.lanes import Lanes, Sent, lanes_for
from gradweave._src.comm.own_group import MakeSameRanks
from gradweave._src.comm.small_messages import broadcast_bytes
from gradweave._src.device_order import Order, is_capturing, wait_for
from gradweave._src.errors import PlanMismatch, RequestError
from gradweave._src.measure.spans import SpanRecorder
from gradweave._src.plan import Plan
from gradweave._src.planning import OPERATIONS
from gradweave._src.runtime.driving.message_log import MessageLog
from gradweave._src.runtime.flat.arrivals import Arrivals
from gradweave._src.runtime.flat.buckets import FlatBucket, buckets_without_memory
from gradweave._src.runtime.flat.departures import Departures
from gradweave._src.runtime.flat.elementwise import (
    knows_parameters_by_themselves,
    require_elementwise,
)
from gradweave._src.runtime.flat.marked_shards import mark_shards
from gradweave._src.runtime.flat.shards import Shards
from gradweave._src.runtime.reporting.step_clock import StepClock
from gradweave._src.session.commands import SimpleBuckets
from gradweave._src.step_hooks import update, watch_steps
from gradweave._src.torch_internals import named_range, watch_clipping
from gradweave._src.vocabulary import Operation, alternatives

logger = logging.getLogger(__name__)

# How long a rank that ends waits for its last messages to leave.
SENT_WITHIN_S = 10.0
# The same after an error: torch's C++ aborts where Python ends a thread that is still sending.
SENT_WITHIN_S_OF_FAILURE = 1.0


class FlatEngine:
    """Carries out plans for both passes on flat buckets; others decide on the plans.

    All ranks make it together. Each is to call ``begin_forward`` and ``end_forward`` around the
    module, and to step ``shards`` by optimizers; the rest happens by itself:

    - Hooks take gradients over into buckets, which are reduce-scattered in the plan's order.
    - Updated parameters are gathered, and modules wait for those that they are about to read.
    - When the optimizers have stepped all shards, the step is over and ``on_step_over`` is called.
      Another plan may be installed there and nowhere else, because all ranks come there alike,
      whatever they do in forward.

    Args:
        module: the model.
        parameters: those whose gradients travel, by name.
        group: the ranks that train together.
        make_group: makes another process group of the same ranks, for each thread that sends;
            without it the engine makes groups of its own, which go with it.
        first_plan: what is carried out until another plan is installed.
        clock: is told where phases of a step begin.
        recorder: notes when each message travelled.
        on_step_over: is called between two steps.
        elementwise: classes of optimizers that the user knows to update each element by itself.
        updates_by_bucket: whether buckets travel while others are updated, where optimizers allow.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        *,
        make_group: MakeSameRanks | None,
        first_plan: Plan,
        clock: StepClock,
        recorder: SpanRecorder | None,
        on_step_over: Callable[[], None],
        elementwise: Collection[type[Optimizer]] = (),
        updates_by_bucket: bool = False,
    ) -> None:
        first_plan = _with_empty(first_plan, parameters)
        check_flat_plan(first_plan, parameters)
        self._first_plan = self.plan = first_plan
        self.passes = 0  # synchronised backward passes that are over
        self.message_log: MessageLog | None = None  # while messages are noted
        self._is_recorded = False
        # Weakly: a module may know its wrapper, whose end closes this.
        self._module = weakref.ref(module)
        self.parameters, self.group = dict(parameters), group
        self._device = next(iter(parameters.values())).device
        self._clock, self._recorder, self._on_step_over = clock, recorder, on_step_over
        self._elementwise = elementwise
        self._frozen = {name: p for name, p in module.named_parameters() if name not in parameters}
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._unmark_each: list[Callable[[], None]] = []
        self._is_stale = False  # shards may have been updated, and nothing was gathered yet
        # Parameters by what optimizers do to their shards, and not by which optimizer holds them:
        # one that was replaced may live on on some ranks, and all must count steps alike.
        self._held: set[nn.Parameter] = set()  # updated in the last step that updated any
        self._stepped: set[nn.Parameter] = set()  # updated since the last backward pass
        self._unstepped: set[nn.Parameter] = set()  # to be updated before this step is over
        self._was_gathered = False  # whether this step's updates were sent already, by bucket
        self._sent: list[Sent] = []
        self._buckets: list[FlatBucket] = []
        self._departures: Departures
        self.shards = Shards(parameters, rank=group.rank(), ranks=group.size())
        with ExitStack() as opened:  # and closed again, from the last to the first
            make = make_group or partial(same_ranks, group)
            lanes = lanes_for(self._device)
            self._lanes = Lanes([Communicator(make()) for _ in range(lanes)])
            opened.callback(self._end_threads)
            atexit.register(self._finish_sending)
            opened.callback(atexit.unregister, self._finish_sending)
            self._arrivals = Arrivals(module, parameters.values(), waits=clock.waits)
            opened.callback(self._arrivals.close)
            self._lay_out(first_plan, buckets_without_memory(first_plan, parameters))
            opened.callback(self._take_no_more_gradients)
            self._make_equal(module)
            by_bucket = self._update_and_gather if updates_by_bucket else None
            opened.callback(
                watch_steps(self._before_step, self._after_step, update_first=by_bucket)
            )
            opened.callback(watch_clipping(self._check_clipped))
            opened.callback(self._end_marks)
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Remove all hooks, end all threads, and with them the groups that were made here.

        Whoever drops the last reference closes, and that may be Python's garbage collection on a
        thread that is to be ended.
        """
        if self._lanes.include_this_thread():
            Thread(target=self._opened.close, name="gradweave closing").start()
        else:
            self._opened.close()

    def _end_threads(self) -> None:
        if not self._lanes.close(SENT_WITHIN_S):
            logger.warning(
                "rank %d: messages of the dropped wrapper are still under way after %.0f s; their "
                "threads and process groups stay",
                self.group.rank(),
                SENT_WITHIN_S,
            )

    def begin_forward(self, *, is_synchronised: bool, is_timed: bool = True) -> None:
        """Prepare for a call of the model, whose gradients travel if it ``is_synchronised``."""
        self._departures.require_ended()
        if torch.is_grad_enabled() and is_timed:
            self._clock.begun += is_synchronised
            self._clock.forward_begins(is_synchronised=is_synchronised)
        for name, parameter in self._frozen.items():
            if is_synchronised and parameter.requires_grad:
                raise RequestError(
                    f"{name!r} was frozen when the model was wrapped and has no place in a bucket; "
                    "unfreeze it before wrapping, and freeze it afterwards"
                )
        if self._is_stale:
            self.gather()
        if torch.is_grad_enabled():
            self._departures.is_synchronised = is_synchronised
        if len(self._buckets) == 1 or self._is_recorded:
            self._arrivals.wait_for_all()
        if self._recorder is not None and is_synchronised and is_timed:
            self._recorder.begin()

    def call(self, *inputs: object, **kwargs: object) -> object:
        """Call the module, whose parameters arrive meanwhile."""
        with self._arrivals.noting():
            module = self._module()
            assert module is not None, "the wrapper has it"
            return module(*inputs, **kwargs)

    def end_forward(self, *, is_synchronised: bool, is_timed: bool = True) -> None:
        if self._recorder is not None and is_synchronised and is_timed:
            self._recorder.backward()
        if torch.is_grad_enabled():
            self._clock.forward_ends()

    def install(
        self,
        buckets: Plan | SimpleBuckets,
        order: tuple[str, ...] = (),
        *,
        notes_messages: bool = False,
    ) -> None:
        """Lay out another plan, with all that optimizers know of an element.

        Only while ``on_step_over`` runs, and on all ranks: they send each other what has to move.
        """
        del order  # what the wrapper began with does not follow it here
        self.message_log = MessageLog(clock_for(self._device)) if notes_messages else None
        plan = self._plan_of(buckets)
        if (plan.buckets, plan.passes) == (self.plan.buckets, self.plan.passes):
            self.plan = plan  # perhaps by another planner
            return
        check_flat_plan(plan, self.parameters)
        self.synchronise()
        new = buckets_without_memory(plan, self.parameters)
        with self.shards.moving(self._optimizers_of_all_ranks(), self._gather_flat, to=new):
            self._take_no_more_gradients()
            # Drop the last references to the old buckets: their memory goes as new ones are filled.
            del self._departures
            self._buckets = []
            self._lay_out(plan, new)

    def stop_noting(self) -> None:
        self.message_log = None

    def record(self, is_recorded: bool) -> None:  # noqa: FBT001 as a callback takes it
        """Have modules wait for nothing while it is recorded when each of them is called."""
        self._is_recorded = is_recorded

    def _plan_of(self, buckets: Plan | SimpleBuckets) -> Plan:
        if isinstance(buckets, Plan):
            return _with_empty(buckets, self.parameters)
        assert buckets is SimpleBuckets.ORIGINAL
        return self._first_plan

    def synchronise(self) -> None:
        """Wait until the model's parameters are complete on this rank."""
        if self._is_stale:
            self.gather()
        self._arrivals.wait_for_all()

    def gather(self, update_first: Callable[[FlatBucket], None] | None = None) -> None:
        """Begin to send updated parameters to all ranks, in the order in which forward needs them.

        Each bucket is given to ``update_first`` before it is sent. It happens by itself after each
        step of an optimizer of torch's, or else when the model is called.
        """
        # There may have been two updates in a row: two messages of one bucket would mix.
        self._arrivals.wait_for_all()
        for number in reversed(range(len(self._buckets))):
            bucket = self._buckets[number]
            if update_first is not None:
                update_first(bucket)
            # So that torch refuses a backward pass through graphs of the old values.
            torch.autograd.graph.increment_version(bucket.parameters)
            if bucket.passes == "both":
                self._arrivals.expect(bucket.parameters, self._submit("all-gather", number))
        self._is_stale = False

    def forget_gradients(self) -> None:
        """Forget gradients that passes without synchronisation have added up."""
        self._departures.forget()

    def whole_state(self, optimizer: Optimizer) -> dict[str, object]:
        """Return the optimizer's state dict as if it had all elements; call it on every rank."""
        self.synchronise()
        return self.shards.whole_state(optimizer, self._gather_flat)

    def load_whole_state(self, optimizer: Optimizer, state: Mapping[str, object]) -> None:
        """Give the optimizer this rank's part of what ``whole_state`` returned."""
        self.know(optimizer)
        self.shards.load_whole_state(optimizer, state)

    def _lay_out(self, plan: Plan, buckets: list[FlatBucket]) -> None:
        self.plan = plan
        for bucket in buckets:
            bucket.take_parameters()
            self.shards.lay_out(bucket)
        for bucket in buckets:
            bucket.make_room_for_gradients()
        self._buckets = buckets
        self._departures = Departures(
            self._buckets,
            ranks=self.group.size(),
            begin=self.shards.keep_gradients,
            send=self._send,
            finish=self._finish_pass,
            added_up=self.shards.note_added_up,
            is_discarded=self.shards.is_discarded,
        )

    def _take_no_more_gradients(self) -> None:
        self._departures.close()  # whose hooks would keep the buckets

    def _make_equal(self, module: nn.Module) -> None:
        """Give all ranks rank 0's parameters and buffers."""
        for bucket in self._buckets:
            self._send_and_wait("broadcast", bucket.values, "native")
        frozen = [p for p in module.parameters() if not p.requires_grad]
        broadcast_bytes([*frozen, *module.buffers()], self.group)

    def _send(self, number: int) -> None:
        is_sharded = self._buckets[number].passes == "both"
        with named_range("gradweave: bucket %d leaves", number + 1):
            sent = self._submit("reduce-scatter" if is_sharded else "all-reduce", number)
        self._sent.append(sent)

    def _finish_pass(self) -> None:
        """Wait for the reduce-scatters at the end of backward, for the optimizer comes next."""
        if self._recorder is not None and not is_capturing(self._device):
            self._recorder.ready()
        self._clock.gradients_ready()
        self.passes += 1
        sent, self._sent = self._sent, []
        for message in sent:
            message.wait()
        self._clock.messages_done()
        self.shards.give_gradients()
        every = set(self.shards.by_name.values())
        if self._stepped:
            self._held, self._stepped = self._stepped, set()
        # Before the first step nobody knows which parameters optimizers hold: expect all of them.
        self._unstepped = set(self._held or every)
        self._was_gathered = False
        # What none of torch's optimizers updates may be updated by other code at any time.
        self._is_stale = self._held != every

    def _before_step(self, optimizer: Optimizer) -> None:
        if optimizer in self._checked:
            return
        held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in self.parameters.items():
            if parameter in held:
                raise RequestError(
                    f"the optimizer holds the model's own {name!r}, whose gradient goes to shards; "
                    "make it from the wrapper's parameters(), after wrapping"
                )
        if self.shards.of(optimizer):
            require_elementwise(optimizer, self._elementwise)
        self._checked.add(optimizer)

    def _update_and_gather(self, optimizer: Optimizer) -> Collection[nn.Parameter]:
        """Update bucket after bucket, each of which travels while the next one is updated.

        Messages are those of ``gather``, in its order, so ranks need not all come here.
        """
        every = set(self.shards.by_name.values())
        may_hide = self._sends_to_others and len(self._buckets) > 1
        is_of_all = self.shards.of(optimizer) == every
        if not (may_hide and is_of_all and knows_parameters_by_themselves(optimizer)):
            return ()
        self.gather(lambda bucket: update(optimizer, self.shards.in_bucket(bucket)))
        self._was_gathered = True
        return every

    @property
    def _sends_to_others(self) -> bool:
        """Whether parameters have to travel; otherwise every rank has every gradient."""
        return self.plan.passes == "both" and self.group.size() > 1

    def _check_clipped(self, gradients: Sequence[torch.Tensor]) -> None:
        if not self._sends_to_others:
            return
        clipped = {id(gradient) for gradient in gradients}
        if any(id(shard.grad) in clipped for shard in self.shards.by_name.values()):
            raise RequestError(
                "torch's clip_grad_norm_ knows the norm of this rank's shards only; clip by the "
                "wrapper's clip_grad_norm_"
            )

    def _after_step(self, optimizer: Optimizer) -> None:
        updated = self.shards.of(optimizer)
        if not updated:  # another model's, and perhaps on another thread
            return
        self.know(optimizer)
        is_first = bool(self._unstepped)
        self._unstepped -= updated
        self._stepped |= updated
        was_gathered, self._was_gathered = self._was_gathered, False
        self._is_stale = not was_gathered
        if self._unstepped:
            return
        if not was_gathered:
            self.gather()
        if is_first:
            self._on_step_over()

    def know(self, optimizer: Optimizer) -> None:
        """Let what the optimizer keeps for elements move with them from now on."""
        if all(known is not optimizer for known in self._known_optimizers()):
            self._optimizers.append(weakref.ref(optimizer))
            self._unmark_each.append(mark_shards(optimizer, self.shards))

    def _end_marks(self) -> None:
        for unmark in self._unmark_each:
            unmark()

    def _known_optimizers(self) -> list[Optimizer]:
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    def _optimizers_of_all_ranks(self) -> list[Optimizer]:
        """Return the optimizers that are still there on every rank.

        A rank may drop one at any time, but state is moved by messages that all ranks must send.
        """
        # The list is alike on all ranks, because they step and load optimizers alike.
        known = [ref() for ref in self._optimizers]
        if not known:
            return []
        there = torch.tensor([float(one is not None) for one in known], device=self._device)
        self._send_and_wait("all-reduce", there, "native")
        is_everywhere = (there > self.group.size() - 0.5).tolist()
        return [
            one for one, is_ in zip(known, is_everywhere, strict=True) if one is not None and is_
        ]

    def _gather_flat(self, flat: torch.Tensor, collective: str) -> None:
        self._send_and_wait("all-gather", flat, collective)

    def _send_and_wait(self, operation: Operation, flat: torch.Tensor, collective: str) -> None:
        sent = self._lanes.submit(operation, flat, collective=collective)
        wait_for(sent, Order.STATE_AFTER_GATHER)

    def _submit(self, operation: Operation, number: int) -> Sent:
        bucket = self._buckets[number]
        flat = bucket.values if operation == "all-gather" else bucket.gradients
        step = self.passes if operation == "all-gather" else self.passes + 1
        where = (
            f"rank {self.group.rank()}, step {step}, bucket {number + 1} of {len(self._buckets)}"
        )
        # Callbacks keep no engine alive: a thread that sends and drops it last would join itself.
        recorder, log = self._recorder, self.message_log

        def on_begin() -> Callable[[], None]:
            began = None if recorder is None else recorder.mark()
            ready = None if log is None else log.clock.mark()

            def on_end() -> None:
                if recorder is not None and began is not None:
                    recorder.done(began, bucket.parameters, flat.nbytes, operation=operation)
                if log is not None:
                    by = bucket.collective
                    log.done(ready, operation=operation, collective=by, nbytes=flat.nbytes)

            return on_end

        # A graph that is captured now is replayed later, any number of times.
        is_noted = (recorder or log) and not is_capturing(flat.device)
        sent = self._lanes.submit(
            operation,
            flat,
            collective=bucket.collective,
            on_begin=on_begin if is_noted else None,
        )
        is_gathered = operation == "all-gather"
        order = Order.MODULE_AFTER_PARAMETERS if is_gathered else Order.OPTIMIZER_AFTER_GRADIENTS
        return Sent(sent, where, order)

    def _finish_sending(self) -> None:
        """Wait at exit until the last parameters are sent, not so long where the script has failed.

        Threads are not ended here: one that waits for a stalled peer would keep the script.
        """
        has_failed = hasattr(sys, "last_type")  # where Python notes what ends a script
        self._lanes.drain(SENT_WITHIN_S_OF_FAILURE if has_failed else SENT_WITHIN_S)


def _with_empty(plan: Plan, parameters: Mapping[str, nn.Parameter]) -> Plan:
    """Give parameters without elements, which are in no plan, a place in the last bucket."""
    planned = {name for bucket in plan.buckets for name in bucket.tensors}
    empty = [n for n, parameter in parameters.items() if not parameter.numel() and n not in planned]
    if not empty:
        return plan
    *others, last = plan.buckets
    return replace(plan, buckets=(*others, replace(last, tensors=(*last.tensors, *empty))))


def check_flat_plan(plan: Plan, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise unless the plan is one for these parameters, and its messages can be sent."""
    whole = _with_empty(plan, parameters)
    if {name for bucket in whole.buckets for name in bucket.tensors} != set(parameters):
        raise PlanMismatch("the plan has other tensors than the model; plan for this model")
    _check_ways(plan)
    for bucket in plan.buckets:
        if bucket.compression is not None:
            raise RequestError(f"the plan sends {bucket.compression}; sharded training is dense")


def _check_ways(plan: Plan) -> None:
    operations: Sequence[Operation] = OPERATIONS[plan.passes]
    by = [bucket.collective for bucket in plan.buckets]
    ways = collectives.ways(operations, by)
    for collective in by:
        if not all((operation, collective) in ways for operation in operations):
            known = alternatives(collective, ["native", *collectives.names(operations[0])])
            raise RequestError(f"no {' and '.join(operations)} by {collective!r}{known}")
