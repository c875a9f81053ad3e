"""Data parallelism that communicates during forward as well as during backward.

Gradients are reduce-scattered while backward goes on, so that each rank has the sums of its shard;
it updates that shard with any optimizer that works element by element; and updated parameters are
all-gathered while the next forward pass goes on, each before the first module that reads it.
Together that is one all-reduce, half of it hidden behind forward, and the optimizer keeps state for
a shard only.
"""

import logging
import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer

from gradweave._src.comm.groups import world_group
from gradweave._src.comm.lanes import lanes_for
from gradweave._src.comm.own_group import MakeSameRanks, OwnGroup
from gradweave._src.comm.small_messages import broadcast_bytes
from gradweave._src.device_order import Order, wait_for
from gradweave._src.errors import CollectiveError, RequestError
from gradweave._src.plan import Plan
from gradweave._src.planning import BOTH_PASSES_COLLECTIVE
from gradweave._src.runtime.driving.driver import Driver
from gradweave._src.runtime.driving.instruments import Instruments
from gradweave._src.runtime.driving.noticeboard import Noticeboard
from gradweave._src.runtime.flat.buckets import buckets_up_to, dense_strides
from gradweave._src.runtime.flat.engine import FlatEngine, check_flat_plan
from gradweave._src.runtime.flat.shards import OwnedPart
from gradweave._src.runtime.reporting.phase_news import PhaseNews
from gradweave._src.runtime.reporting.planning_wrapper import ONE_WORKER, PlanningWrapper
from gradweave._src.runtime.reporting.step_clock import KEPT_STEPS
from gradweave._src.runtime.wrapping.inputs import batch_size
from gradweave._src.runtime.wrapping.options import AUTO, Options, first_collective
from gradweave._src.runtime.wrapping.parameters import modules_with_sparse_gradients
from gradweave._src.runtime.wrapping.plan_cache import PlanCache, open_cache, watching
from gradweave._src.runtime.wrapping.plan_source import PlanSource, given_plan, plan_in, require_fit
from gradweave._src.runtime.wrapping.same_wrapping import (
    WRAPPER,
    SameWrapping,
    describe_options,
    describe_plan,
    describe_presence,
    telling_unknown_names,
)
from gradweave._src.session.session import Session
from gradweave._src.session.slow_ranks import SlowRank
from gradweave._src.session.task import PlanningTask
from gradweave._src.torch_internals import (
    FOR_BACKWARD_CALLBACKS,
    RefusesStateDictFunctions,
    is_compiled,
    require,
)
from gradweave._src.vocabulary import MIB

logger = logging.getLogger(__name__)

# Until there is a plan: as torch's own wrapper.
FIRST_BUCKET_BYTES = 25 * MIB
BASELINE = "the first buckets"


class ShardedDataParallel(PlanningWrapper, RefusesStateDictFunctions, nn.Module):
    """Wrap a model for data-parallel training in which each rank updates a shard of each parameter.

    Gradients are reduce-scattered during backward, and parameters all-gathered during the next
    forward. Use it where messages are to hide behind both passes, or where optimizer state must be
    shared out; docs/sharded.md says when that pays. Wrap the model, then make the optimizer from
    ``wrapper.parameters()`` (``named_parameters()`` for groups); everything else is as with
    DistributedDataParallel. The model's own parameters are complete, and the same on all ranks,
    wherever a module reads them and in ``state_dict()``; to read them elsewhere call
    ``synchronise()`` first.

    It plans for both passes as DistributedDataParallel does for one, while training goes on; that
    needs optimizers of torch's, for what they know of an element moves with it.

    Args:
        module: the model.
        planner: the planner whose plan is tried first; `gradweave list planners` has them.
        plan: a Plan or Recipe, or a file of one: nothing is recorded or tried. With one for the
            backward pass alone nothing is sharded: gradients are all-reduced.
        cache: a folder for the plans that are found, with which the next run begins, as
            DistributedDataParallel has it (default: GRADWEAVE_CACHE; empty: none).
        collective: "auto", or one name for all buckets: "ring", "halving-doubling", "native".
        process_group: the ranks that train together (default: all).
        broadcast_buffers: whether rank 0's buffers go to all before each forward pass.
        record_steps: how many steps are recorded, after two for warming up; at least 1.
        trial_steps: how many steps a plan is timed for in each of its turns; 0 trusts the
            prediction.
        replan_when: plan again when the median of 20 steps differs by more than this share from the
            time when the plan was chosen, such as 0.25 for 25 %; above 0 (default: never, except
            with ``cache``).
        timeline: note when each message travelled, for ``timelines()``.
        make_group: makes another process group of the same ranks; it is called once for each thread
            that sends messages, and as often for those beside the training.
        elementwise: your own optimizer classes that update each element independently; others than
            torch's cause a warning, for a shard is a flat part of a parameter.
        updates_by_bucket: update and send one bucket after the other, the one that forward needs
            first, so that it travels while others are updated. That is for ranks whose cores idle
            meanwhile.

    Raises:
        RequestError: if an option means nothing, options differ between ranks, or the model cannot
            be sharded; one line, on all ranks.
        PlanMismatch: if the given plan is not one for this model.
        CollectiveError: here, in backward or in the next forward, if another rank is gone, is
            silent or disagrees.

    Examples:
        >>> model = gradweave.ShardedDataParallel(model)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model(batch).sum().backward()
        >>> optimizer.step()
    """

    _baseline = BASELINE

    @telling_unknown_names
    def __init__(
        self,
        module: nn.Module,
        *,
        planner: str = "optimal",
        plan: PlanSource | None = None,
        cache: str | os.PathLike[str] | None = None,
        collective: str = AUTO,
        process_group: dist.ProcessGroup | None = None,
        broadcast_buffers: bool = True,
        record_steps: int = 5,
        trial_steps: int = 4,
        replan_when: float | None = None,
        timeline: bool = False,
        make_group: Callable[[], dist.ProcessGroup] | None = None,
        elementwise: Collection[type[Optimizer]] = (),
        updates_by_bucket: bool = False,
    ) -> None:
        super().__init__()
        self.module, self.broadcast_buffers = module, broadcast_buffers
        self.process_group = group = process_group or world_group()
        self.require_backward_grad_sync = True
        self._trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        wrapping = SameWrapping(group)
        with wrapping.refusals_told():
            require(FOR_BACKWARD_CALLBACKS)
            options = Options(
                planner=planner,
                collective=collective,
                record_steps=record_steps,
                trial_steps=trial_steps,
                replan_when=replan_when,
                timeline=timeline,
                cache=cache,
            )
            _check_model(module, self._trained)
            self._device = next(iter(self._trained.values())).device
            given = given_plan(plan, workers=group.size(), device=self._device, options=options)
        # What each rank does by itself, such as updates bucket by bucket, may differ.
        wrapping.require_same(
            {
                WRAPPER: "ShardedDataParallel",
                "plan": describe_plan(plan, given),
                **describe_options(options),
                "make_group": describe_presence(make_group),
                "broadcast_buffers": repr(broadcast_buffers),
                **_describe_parameters(self._trained),
            }
        )
        clock = self._begin_timing(self._device, timeline=timeline)
        self._plan_cache = None
        if plan is None and group.size() > 1:
            self._plan_cache = self._open_cache(options)
        if self._plan_cache is not None:
            given = self._plan_cache.recalled(group)
        is_remembered = given is not None and self._plan_cache is not None
        task = _task(options, group.size(), is_remembered=is_remembered)
        first = plan_in(given) or _first_plan(self._trained, options)
        require_fit(first, self._trained)
        self._why_unplanned = ONE_WORKER if group.size() == 1 else None
        self._session = None
        if self._why_unplanned is None:
            self._session = Session(
                task, given=given, is_remembered=is_remembered, speaks=group.rank() == 0
            )
        is_fixed = given is not None and task.replan_when is None
        will_plan = self._session is not None and not is_fixed
        with ExitStack() as opened:  # and closed again where something fails
            self._engine = FlatEngine(
                module,
                self._trained,
                group,
                make_group=make_group,
                first_plan=first,
                clock=clock,
                recorder=self._recorder,
                # Nothing may keep the wrapper: it has to go before its group.
                on_step_over=partial(_call_on_live, weakref.WeakMethod(self._end_step)),
                elementwise=elementwise,
                updates_by_bucket=updates_by_bucket,
            )
            opened.callback(self._engine.close)
            lanes = lanes_for(self._device) if will_plan else 0
            own_groups = [_opened_group(opened, group, make_group) for _ in range(lanes)]
            self._driver: Driver | None = None
            board = None if wrapping.store is None else Noticeboard(group, wrapping.store)
            self._news = None if board is None else PhaseNews(board, clock)
            if self._session is not None and will_plan and board is not None:
                instruments = Instruments(
                    module,
                    self._trained,
                    board,
                    own_groups,
                    on_recording=self._engine.record,
                )
                self._driver = Driver(self._session, self._engine, instruments, board)
                opened.callback(self._driver.close)
            clock.stage_begins(str(self.findings().stage))
            closing = weakref.finalize(self, opened.pop_all().close)
        # Not at exit: a thread that waits for a dead peer would keep the script from ending.
        closing.atexit = False

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass, whose modules wait for parameters that are on their way."""
        is_synchronised = torch.is_grad_enabled() and self.require_backward_grad_sync
        is_planning = self._driver is not None
        is_timed = not self._is_captured(is_planning=is_planning)
        if self._news is not None and is_timed:
            self._news.forward_begins()
        self._engine.begin_forward(is_synchronised=is_synchronised, is_timed=is_timed)
        if self._driver is not None and torch.is_grad_enabled() and is_timed:
            self._driver.forward_begins(lambda: batch_size((inputs, kwargs)))
        if is_synchronised and self.broadcast_buffers:
            self._broadcast_buffers()
        output = self._engine.call(*inputs, **kwargs)
        self._engine.end_forward(is_synchronised=is_synchronised, is_timed=is_timed)
        return output

    def _broadcast_buffers(self) -> None:
        try:
            broadcast_bytes(list(self.module.buffers()), self.process_group)
        except Exception as error:
            assert self._clock is not None, "a sharded wrapper is not copied"
            where = f"rank {self.process_group.rank()}, step {self._clock.begun}, buffers"
            logger.error("%s: %s", where, error)  # noqa: TRY400 it is raised, too
            raise CollectiveError(f"{where}: {error}") from error

    def _end_step(self) -> None:
        """Take a step of planning after all shards were stepped, where ranks come alike."""
        if self._driver is not None and not self._is_captured(is_planning=True):
            self._driver.step_over()
            found = self.findings()
            if self._plan_cache is not None:
                self._plan_cache.keep(found)
            if self._clock is not None:
                self._clock.stage_begins(str(found.stage))
            if self._driver.is_over:
                self._driver = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only add up gradients in this block; the next pass outside of it sends their sum."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def join(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise RequestError: a rank without data would still have to update its shards."""
        del args, kwargs
        raise RequestError(
            "ShardedDataParallel has no join(): every rank updates its shard in every step; give "
            "all ranks as many batches, or wrap the model with DistributedDataParallel"
        )

    def join_hook(self, **kwargs: Any) -> NoReturn:
        """Raise RequestError, as ``join`` does, where torch.distributed.algorithms.Join asks."""
        self.join(**kwargs)

    def slow_ranks(self, *, steps: int = KEPT_STEPS) -> tuple[SlowRank, ...]:
        """Return the ranks that let all others wait, the worst first.

        It waits for parameters that are on their way, and then does what that of
        DistributedDataParallel does: call it on every rank, between two steps.

        Raises:
            RequestError: if ``steps`` is not between 20 and 64, a rank has timed fewer than 20, or
                other ranks do not call it.
        """
        self.synchronise()
        return super().slow_ranks(steps=steps)

    def synchronise(self) -> None:
        """Wait until the model's parameters are complete on this rank."""
        self._engine.synchronise()

    def gather(self) -> None:
        """Begin to send updated parameters to all ranks; it happens by itself where it is due.

        That is after each step of an optimizer of torch's, or else when the model is called.
        """
        self._engine.gather()

    def named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,  # noqa: FBT001, FBT002 torch's signature
        remove_duplicate: bool = True,  # noqa: FBT001, FBT002
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and this rank's shards.

        A shard is a flat part of a parameter, and may be empty; parameters that were frozen when
        the model was wrapped are whole.
        """
        found = super().named_parameters(prefix, recurse, remove_duplicate)
        shards = self._engine.shards.by_name
        shard_of = {full: shards[name] for name, full in self._trained.items()}
        for name, parameter in found:
            yield name, shard_of.get(parameter, parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 torch's signature
        """Zero the gradients of all shards, and drop what passes under no_sync() have added up."""
        super().zero_grad(set_to_none)
        self._engine.forget_gradients()

    def requires_grad_(self, requires_grad: bool = True) -> Self:  # noqa: FBT001, FBT002
        """Freeze or unfreeze all parameters of the model; optimizers skip frozen ones."""
        self.module.requires_grad_(requires_grad)
        return self

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip as torch.nn.utils.clip_grad_norm_ does, by the norm over all ranks' shards.

        Call it on every rank. It returns the norm before clipping, in float64.
        """
        norm = torch.nn.utils.get_total_norm(self._engine.shards.counted_gradients(), norm_type)
        norm = norm.to(self._device, torch.float64)  # alike without any
        options = dist.AllreduceOptions()
        is_largest = norm_type == float("inf")
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM)
        norm = norm if is_largest else norm**norm_type
        wait_for(self.process_group.allreduce([norm], options), Order.NORM_AFTER_SUM)
        norm = norm if is_largest else norm ** (1 / norm_type)
        torch.nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, norm)
        return norm

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the whole model, the same on every rank.

        Its names are those that DistributedDataParallel uses.
        """
        self.synchronise()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the state dict of a whole model; every rank must be given the same.

        Raises:
            RequestError: if ``assign`` is True.
        """
        if kwargs.get("assign"):
            raise RequestError("parameters lie in buckets; load with assign=False")
        self.synchronise()
        return super().load_state_dict(*args, **kwargs)

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state as if it held the whole model.

        Call it on every rank: it communicates.
        """
        return self._engine.whole_state(optimizer)

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Give the optimizer this rank's part of what ``optimizer_state_dict`` returned.

        Call it on every rank.
        """
        self._engine.load_whole_state(optimizer, state)

    @property
    def _runtime(self) -> str:
        return "sharded"

    def _messages(self) -> int | None:
        return len(self._engine.plan.buckets)

    def _present_plan(self, order: tuple[str, ...]) -> Plan:
        del order
        return self._engine.plan

    def owned(self, name: str) -> OwnedPart | None:
        """Return which elements of the parameter this rank updates.

        It is None if no gradient of that name travels. It may change when the plan does.
        """
        return self._engine.shards.owned(name) if name in self._trained else None

    def register_optimizer(self, optimizer: Optimizer) -> None:
        """Move this optimizer's state with its elements when the plan changes.

        Call it on every rank after the optimizer was given a state from elsewhere. Optimizers of
        torch's that have taken a step are registered already.
        """
        self._engine.know(optimizer)

    def _open_cache(self, options: Options) -> PlanCache | None:
        return open_cache(
            options,
            _task(options, self.process_group.size()),
            self._trained,
            self.process_group,
            device=self._device,
            check=partial(check_flat_plan, parameters=self._trained),
            torch_flags={},
        )

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        raise RequestError(
            "the model's parameters lie in buckets; move it or change its type before wrapping it"
        )


def _call_on_live(method: "weakref.WeakMethod[Callable[[], None]]") -> None:
    live = method()
    if live is None:
        raise RequestError("the wrapper is gone, and its shards are stepped; keep it")
    live()


def _opened_group(
    opened: ExitStack, group: dist.ProcessGroup, make_group: MakeSameRanks | None
) -> OwnGroup:
    made = OwnGroup(group, make_group)
    opened.callback(made.close)
    return made


def _task(options: Options, workers: int, *, is_remembered: bool = False) -> PlanningTask:
    return PlanningTask(
        workers=workers,
        planner=options.planner,
        passes="both",
        collective=first_collective(options, BOTH_PASSES_COLLECTIVE),
        record_steps=options.record_steps,
        trial_steps=options.trial_steps,
        **watching(options, is_remembered=is_remembered),
        baseline=BASELINE,
        baseline_caps_bytes=(FIRST_BUCKET_BYTES, FIRST_BUCKET_BYTES),
    )


def _first_plan(parameters: Mapping[str, nn.Parameter], options: Options) -> Plan:
    by = first_collective(options, BOTH_PASSES_COLLECTIVE)
    return buckets_up_to(parameters, FIRST_BUCKET_BYTES, planner="first buckets", collective=by)


def _describe_parameters(parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Return what must be alike on all ranks for flat buckets to be alike."""
    return {
        f"parameter {name!r}": f"{tuple(p.shape)} with strides {dense_strides(p)}, {p.dtype}"
        for name, p in parameters.items()
    }


def _check_model(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    if not parameters:
        raise RequestError("the model has no parameter that requires a gradient")
    if is_compiled(module):
        raise RequestError("a compiled model may not wait for its parameters; wrap it uncompiled")
    for name in modules_with_sparse_gradients(module):
        raise RequestError(
            f"{name!r} has sparse gradients, which have no place in a bucket; use sparse=False"
        )
