"""A drop-in DistributedDataParallel that finds its own buckets while the model trains."""

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.distributed import Reducer, Store  # type: ignore[attr-defined]
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave._src.comm.communicator import host_topology
from gradweave._src.comm.groups import leave_token
from gradweave._src.comm.own_group import MakeSameRanks, OwnGroup
from gradweave._src.compression import EXACT, SPARSE, Compression
from gradweave._src.device_order import is_capturing
from gradweave._src.errors import PlanMismatch, RequestError
from gradweave._src.plan import Plan
from gradweave._src.recipe import Recipe
from gradweave._src.runtime.driving.driver import Driver
from gradweave._src.runtime.driving.instruments import Instruments
from gradweave._src.runtime.driving.noticeboard import Noticeboard
from gradweave._src.runtime.reducer.engine import ReducerEngine
from gradweave._src.runtime.reducer.failed_passes import log_failed_pass_at_exit
from gradweave._src.runtime.reducer.transports import SettlingJoinHook, Transports
from gradweave._src.runtime.reporting.phase_news import PhaseNews
from gradweave._src.runtime.reporting.planning_wrapper import ONE_WORKER, PlanningWrapper
from gradweave._src.runtime.reporting.step_clock import LastGradient
from gradweave._src.runtime.wrapping.inputs import batch_size
from gradweave._src.runtime.wrapping.options import (
    AUTO,
    COMPILED,
    STATIC_INSIDE_FORWARD,
    Options,
    check_caps,
    check_names,
    check_plan,
    check_whole_model,
    first_collective,
    is_whole,
    needs_own_group,
    rival_collectives,
    why_unplannable,
)
from gradweave._src.runtime.wrapping.parameters import check_compressible, planned_parameters
from gradweave._src.runtime.wrapping.plan_cache import (
    PlanCache,
    agreed_recipe,
    check_recipe,
    open_cache,
    watching,
)
from gradweave._src.runtime.wrapping.plan_source import (
    PlanSource,
    check_backward_alone,
    device_name,
    given_for_backward,
    plan_in,
    require_fit,
)
from gradweave._src.runtime.wrapping.precision import (
    check_roundable,
    check_ways,
    rounded_ways,
    sparse_settings,
)
from gradweave._src.runtime.wrapping.same_wrapping import (
    WRAPPER,
    SameWrapping,
    describe_options,
    describe_plan,
    describe_presence,
    describe_torch_options,
)
from gradweave._src.runtime.wrapping.torch_arguments import (
    asked_group,
    check_positions,
    known_options,
    torch_names,
)
from gradweave._src.session.commands import SimpleBuckets
from gradweave._src.session.findings import Stage
from gradweave._src.session.saved_run import unplanned
from gradweave._src.session.session import Session
from gradweave._src.session.task import LAST_STEP, TORCHS_BUCKETS, PlanningTask
from gradweave._src.sparse.settings import GTopK, TopK, settings_of
from gradweave._src.sparse.training import SparseTraining
from gradweave._src.torch_internals import (
    awaits_first_static_pass,
    is_compiled,
    is_in_backward,
    is_in_forward,
    is_in_join,
    keeps_declared_order,
    sees_first_static_pass,
    torch_caps_bytes,
)
from gradweave._src.travel import Travel, parse_travel

logger = logging.getLogger(__name__)

REPLACED = "the process group was replaced"  # a reason why nothing is planned


class DistributedDataParallel(PlanningWrapper, TorchDDP):
    """torch's wrapper, whose buckets are planned for this model on this network.

    Use it in the place of ``torch.nn.parallel.DistributedDataParallel``; docs/runtime.md has all of
    it. It begins with torch's own buckets, notes when gradients are ready and what messages cost,
    and tries plans that promise to be faster for a few steps each. What is not faster than torch's
    own buckets is not kept. Gradients are the same as torch's, up to the order of summation.

    Args:
        module: the model, as torch's wrapper takes it.
        *torch_arguments: what torch's wrapper takes by position.
        planner: the planner whose plan is tried first; `gradweave list planners` has them.
        plan: a Plan or Recipe, or a file of one: nothing is recorded and nothing is tried.
        cache: a folder for the plans that are found: the next run of the same model on as many
            workers begins with its plan, and plans again when steps take longer by ``replan_when``
            (default here: 0.25, in the first 60). Rank 0 alone reads, writes and decides. The
            default is the environment's GRADWEAVE_CACHE; an empty text means none, even so. With
            ``plan`` it is left alone.
        collective: "auto" (each bucket takes what was learnt to be fastest), or one name for all
            buckets, such as "native" or "ring"; `gradweave list collectives` has them.
        compression: GTopK(0.001), TopK(0.001) or a text such as "gtopk:0.001": each bucket sends
            only this share of its elements, the largest, and the rest is added to the next
            gradients. To round instead, use ``precision``.
        grad_scaler: the GradScaler of the training loop, needed only with compression: when it
            changes the loss scale, elements that were kept back are rescaled.
        precision: what planning may change about results. "exact": only the order in which numbers
            are summed. "rounded": messages may travel as bf16 or 8-bit integers where that is
            faster. "sparse": only the largest elements may travel where that is faster. "bf16",
            "fp16", "int8": every message is rounded to this format. Sums are made in float32, and
            what 8 bits drop is carried over to the next step.
        record_steps: how many steps are recorded, after two for warming up; at least 1.
        trial_steps: how many steps a plan is timed for in each of its turns; 0 trusts the
            prediction.
        replan_when: plan again when the median of 20 steps differs by more than this share from the
            time when the plan was chosen, such as 0.25 for 25 %; above 0 (default: never, except
            with ``cache``).
        timeline: note when each bucket was ready and done, for ``timeline()``.
        make_group: makes another process group of the same ranks, where messages beside the
            training or collectives of ours need one (default: one that goes with the wrapper).
        **torch_options: everything else is torch's own.

    Raises:
        RequestError: if an option means nothing, options differ between ranks, or a model cannot be
            compressed or rounded as asked for; one line, on all ranks.
        PlanMismatch: if the given plan is not one for this model.
        CollectiveError: here, in backward or in the next forward, if another rank is gone, is
            silent or disagrees.

    Examples:
        >>> model = gradweave.DistributedDataParallel(model, cache="plans")
        >>> model(batch).sum().backward()
        >>> print(model.explain())  # on one worker; on several, ask after some hundred steps
        Torch's own buckets stay: one worker sends no messages.
    """

    _baseline = TORCHS_BUCKETS
    # While a pass is being ended: who asks for the reducer then must not end it again.
    _is_ending = False
    # Whether the last pass was counted already, by whoever asked for the reducer within the step.
    _is_counted = False
    _is_in_torchs_forward = False
    _has_users_hook = False

    def __init__(
        self,
        module: nn.Module,
        *torch_arguments: Any,
        planner: str = "optimal",
        plan: PlanSource | None = None,
        cache: str | os.PathLike[str] | None = None,
        collective: str = "auto",
        compression: GTopK | TopK | Compression | str | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        precision: str = "exact",
        record_steps: int = 5,
        trial_steps: int = 4,
        replan_when: float | None = None,
        timeline: bool = False,
        make_group: Callable[[], dist.ProcessGroup] | None = None,
        **torch_options: Any,
    ) -> None:
        by_position = dict(zip(torch_names(), torch_arguments, strict=False))
        given_twice = by_position.keys() & torch_options.keys()
        torch_options |= by_position
        group = asked_group(torch_options)
        wrapping = SameWrapping(group)
        with wrapping.refusals_told():
            check_positions(torch_arguments, given_twice)
            check_names(
                "DistributedDataParallel", torch_options, known_options(DistributedDataParallel)
            )
            options = Options(
                planner=planner,
                collective=collective,
                compression=None if compression is None else settings_of(compression),
                precision=precision,
                record_steps=record_steps,
                trial_steps=trial_steps,
                replan_when=replan_when,
                timeline=timeline,
                cache=cache,
            )
            sparse = sparse_settings(options)
            options = replace(options, compression=sparse)
            check_caps(torch_options)
            if sparse is not None:
                skips = torch_options.get("skip_all_reduce_unused_params", False)
                check_compressible(module, skips_unused=skips)
            if is_whole(sparse):
                check_whole_model(plan)
            given = given_for_backward(plan, module, group, options)
        # Before anything is sent: ranks with other options would send other messages, or none.
        wrapping.require_same(
            {
                WRAPPER: "DistributedDataParallel",
                "plan": describe_plan(plan, given),
                **describe_options(options),
                "grad_scaler": describe_presence(grad_scaler),
                "make_group": describe_presence(make_group),
                **describe_torch_options(torch_options),
            }
        )
        super().__init__(module, **torch_options)
        self._options = options
        self._trained = planned_parameters(self)
        check_roundable(options, module, self._trained, torch_options)
        self._begin_timing(self.device, timeline=timeline)
        can_tell_others = wrapping.store is not None
        why_never = why_unplannable(module, self._trained, torch_options)
        self._is_plannable = why_never is None  # in any group
        self._why_unplanned = self._why_not(why_never, can_tell_others=can_tell_others)
        self._lacks_plan = plan is not None and self._why_unplanned == ONE_WORKER
        self._plan_cache = None
        if self._why_unplanned is not None:
            given = None
        elif (made := plan_in(given)) is not None:
            require_fit(made, self._trained)
        elif plan is None and not is_whole(sparse):
            self._plan_cache = self._open_cache()
        if self._plan_cache is not None:
            given = self._plan_cache.recalled(self.process_group)
        is_remembered = given is not None and self._plan_cache is not None
        with ExitStack() as opened:  # and closed again where something is refused
            self._begin(
                opened,
                given,
                grad_scaler,
                make_group,
                wrapping.store,
                is_remembered=is_remembered,
            )
            closing = weakref.finalize(self, opened.pop_all().close)
        # Not at exit: a thread that waits for a dead peer would keep the script from ending.
        closing.atexit = False

    def _begin(
        self,
        opened: ExitStack,
        given: Plan | Recipe | None,
        grad_scaler: torch.amp.GradScaler | None,
        make_group: MakeSameRanks | None,
        store: Store | None,
        *,
        is_remembered: bool,
    ) -> None:
        """Create groups, threads and hooks, each of them opened before what uses it.

        All ranks call this at the same point, so it may communicate; later calls may not assume
        that.
        """
        options, group, clock = self._options, self.process_group, self._clock
        assert clock is not None, "only copies have none"
        task = self._task(is_remembered=is_remembered)
        self._is_fixed = given is not None and task.replan_when is None  # on all ranks alike
        will_plan = self._why_unplanned is None and group.size() > 1 and not self._is_fixed
        plan = plan_in(given)
        sending = None
        if needs_own_group(options, plan):
            backend = None if options.compression is None else "gloo"
            check_ways(options, plan, host_topology(group))
            sending = OwnGroup(group, make_group, backend=backend)
            opened.callback(sending.close)
            sending.thread()  # started here, where all ranks come alike
        probing = OwnGroup(group, make_group) if will_plan else None
        if probing is not None:
            opened.callback(probing.close)
        self._topology = None if probing is None else probing.topology
        self._sparse = None
        if options.compression is not None:  # for life: residuals stay with other buckets
            assert sending is not None
            self._sparse = SparseTraining(
                options.compression,
                self._trained,
                sending.group,
                grad_scaler=grad_scaler,
                may_be_idle=partial(is_in_join, weakref.ref(self)),
            )
        transports = Transports(
            group,
            options=options,
            own_group=sending or probing,
            step=lambda: clock.begun,
            recorder=self._recorder,
            sparse=self._sparse,
            names={parameter: name for name, parameter in self._trained.items()},
            finds_unused=self.find_unused_parameters,
        )
        self._engine: ReducerEngine | None
        self._engine = engine = ReducerEngine(self, self._trained, transports)
        if plan is not None or is_whole(options.compression):
            self._engine.install(plan or SimpleBuckets.ONE)
        else:
            self._engine.register_sender()
        self._session = None
        if self._why_unplanned is None:
            if probing is not None:
                task = replace(
                    task,
                    rivals=rival_collectives(options, probing.topology),
                    roundings=rounded_ways(options, probing.topology),
                )
            self._session = Session(
                task, given=given, is_remembered=is_remembered, speaks=group.rank() == 0
            )
        self._driver = None
        board = None if store is None else Noticeboard(group, store)
        self._news = None if board is None else PhaseNews(board, clock)
        if self._session is not None and probing is not None:
            assert board is not None, "nothing is planned without"
            instruments = Instruments(
                self.module,
                self._trained,
                board,
                [probing],
                keeps_declared_order=keeps_declared_order(self),
                sparse=self._sparse,
                sending=sending,
                keeps_own_groups=lambda: sending is None and engine.uses_own_group,
            )
            self._driver = Driver(self._session, self._engine, instruments, board)
            opened.callback(self._driver.close)
        log_failed_pass_at_exit(
            self,
            weakref.WeakMethod(self._steps_begun),
            weakref.WeakMethod(self._steps_without_hook),
        )
        self._last_gradient = LastGradient(clock)
        opened.callback(self._last_gradient.close)
        self._note_findings()

    def _why_not(self, why: str | None, *, can_tell_others: bool) -> str | None:
        """Say why torch's own buckets stay: as ``why`` says, or for this group's sake; or None."""
        compression = self._options.compression
        if why is not None and is_whole(compression):
            raise RequestError(
                f"whole_model wants one bucket, and torch's own must stay: {why}; leave out one of "
                "them"
            )
        group = self.process_group
        if why is None and group.size() == 1 and not is_whole(compression):
            return ONE_WORKER
        if why is None and group.size() > 1 and not can_tell_others:
            why = f"ranks of a {group.name()} group cannot be told of plans through its store"
        if why is not None and self.process_group.size() > 1:
            logger.warning("keeping %s: %s", self._baseline, why)
        return why

    def _open_cache(self) -> PlanCache | None:
        return open_cache(
            self._options,
            self._task(),
            self._trained,
            self.process_group,
            device=self.device,
            check=partial(check_plan, options=self._options),
            torch_flags={
                "find_unused_parameters": self.find_unused_parameters,
                "static_graph": self.static_graph,
                "gradient_as_bucket_view": self.gradient_as_bucket_view,
            },
        )

    def _task(self, *, is_remembered: bool = False) -> PlanningTask:
        options, compression = self._options, self._options.compression
        return PlanningTask(
            workers=self.process_group.size(),
            planner=options.planner,
            collective=first_collective(options, "native"),
            record_steps=options.record_steps,
            trial_steps=options.trial_steps,
            **watching(options, is_remembered=is_remembered),
            baseline=self._baseline,
            baseline_caps_bytes=torch_caps_bytes(self),
            keeps_declared_order=keeps_declared_order(self),
            compression_at=None if compression is None else compression.compression_at,
            mixes_dense=options.precision == SPARSE,
            is_whole_model=is_whole(compression),
        )

    def adopt(self, recipe: Recipe | str | None) -> bool:
        """Begin with the recipe of an earlier run, and return whether it was accepted.

        Call it on every rank before the first step; rank 0's recipe counts. It is for checkpoints
        that are loaded after the model was wrapped. A recipe for another model, number of workers
        or device is refused with one warning on rank 0, and planning goes on. ShardedDataParallel
        has no such method: give it ``plan`` when it is made.

        Args:
            recipe: what ``recipe()`` returned, or its ``to_text()``; None or an empty text if this
                rank has none.
        """
        text = recipe.to_text() if isinstance(recipe, Recipe) else recipe or ""
        if self.process_group.size() == 1:
            return False
        adopted, why = agreed_recipe(self.process_group, text, self._adoptable)
        if why and self.process_group.rank() == 0:
            logger.warning("leaving a recipe alone: %s", why)
        if adopted is None:
            return False
        assert self._session is not None, "it plans"
        assert self._engine is not None, "this is no copy"
        task = self._session.task
        self._session.adopt(adopted, replace(task, **watching(self._options, is_remembered=True)))
        self._engine.install(adopted.plan)
        self._note_findings()
        return True

    def _adoptable(self, text: str) -> Recipe:
        """Return the recipe, or raise for whatever reason it cannot be adopted on this rank."""
        recipe = Recipe.from_text(text)
        if self._driver is None or self._topology is None:
            raise RequestError(self._why_unplanned or "nothing is being planned")
        found = self.findings()
        if self._driver.has_begun:
            raise RequestError("steps have been taken; give it before the first")
        if found.plan is not None or found.is_whole:
            raise RequestError("how messages travel is settled")
        why = recipe.why_not(workers=self.process_group.size(), device=device_name(self.device))
        if why is not None:
            raise PlanMismatch(why)
        check_recipe(recipe, self._driver.session.task, check=self._check_adoptable)
        check_ways(self._options, recipe.plan, self._topology)
        return recipe

    def _check_adoptable(self, plan: Plan) -> None:
        """Raise where this wrapper cannot carry it out."""
        check_plan(plan, self._options)
        check_backward_alone(plan)
        plan.check_fits({name: parameter.numel() for name, parameter in self._trained.items()})

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass, as torch's wrapper does."""
        if self._engine is not None and self._engine.sender is not None:
            self._engine.sender.raise_failure()
        if self._is_captured(is_planning=self._driver is not None):
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        if self._driver is not None:
            self._between_steps((inputs, kwargs), is_compiling=torch.compiler.is_compiling())
        is_synchronised = torch.is_grad_enabled() and self.require_backward_grad_sync
        recorder, clock = self._recorder if is_synchronised else None, self._clock
        if clock is not None:
            clock.begun += is_synchronised
        if clock is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        if self._news is not None:
            self._news.forward_begins()
        if clock.misses_end and self._engine is not None and self._last_gradient is not None:
            self._engine.look_again(self._last_gradient)
        clock.forward_begins(is_synchronised=is_synchronised)
        if recorder is not None:
            recorder.begin()
        self.__dict__["_is_in_torchs_forward"] = True  # nn.Module's own way to set takes longer
        try:
            output = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            self.__dict__["_is_in_torchs_forward"] = False
        if recorder is not None:
            recorder.backward()
        clock.forward_ends()
        return output

    def _post_forward(self, output: Any) -> Any:
        """Finish a forward pass as torch does; buckets may change before its backward pass.

        They do not while a settled plan is only watched: who plans again first records some steps.
        """
        may_change = not torch.compiler.is_compiling() and self._is_planning()
        if not (may_change and self.static_graph and torch.is_grad_enabled()):
            return super()._post_forward(output)  # type: ignore[no-untyped-call]
        with sees_first_static_pass(self):
            return super()._post_forward(output)  # type: ignore[no-untyped-call]

    def _is_planning(self) -> bool:
        session = self._session
        is_settled = session is None or session.findings.stage is Stage.SETTLED
        return self._driver is not None and not is_settled

    def _steps_begun(self) -> int:
        return 0 if self._clock is None else self._clock.begun

    def _steps_without_hook(self) -> int | None:
        """Return how many steps there were; None where a hook of ours counts them."""
        return None if self._has_own_hook else self._steps_begun()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _between_steps(self, inputs: tuple[Any, ...], *, is_compiling: bool) -> None:
        """Do planning's work before a forward pass, while there is any."""
        if not torch.is_grad_enabled() or self._driver is None:
            return
        if is_compiling or is_compiled(self.module):
            self._driver.fail(COMPILED)  # perhaps on this rank only
        # A static graph's reducer wants its first pass to be a synchronised one.
        if self.require_backward_grad_sync or not self.static_graph:
            self._end_step()
        if self._driver is not None:
            self._driver.forward_begins(lambda: batch_size(inputs))

    def _end_step(self, *, is_in_step: bool = False) -> None:
        """Tell the driver of a pass that is over, if one is, and of the step, if it is over."""
        driver, engine = self._driver, self._engine
        if driver is None or engine is None or self._is_ending:
            return
        self._is_ending = True  # whoever asks for the reducer meanwhile asks for no more
        try:
            is_over, is_counted = engine.has_reduced(), self._is_counted
            if not is_over and (is_in_step or not is_counted):
                return
            if is_over and awaits_first_static_pass(self):
                driver.fail(STATIC_INSIDE_FORWARD)
            self._is_counted = is_in_step
            if is_in_step:
                driver.pass_over()
            else:
                driver.step_over(is_counted=not is_over)
        finally:
            self._is_ending = False
        if self._plan_cache is not None:
            self._plan_cache.keep(self.findings())
        self._note_findings()
        if driver.is_over:
            self._driver = None

    @property
    def reducer(self) -> Reducer:
        """torch's reducer, with the buckets of the next pass.

        Whoever decides after forward that backward is to be synchronised asks it to prepare: so a
        pass before that, in the same step, is over here, and is counted as other ranks count it.
        """
        if not torch.compiler.is_compiling() and self.__dict__.get("_driver") is not None:
            self._count_pass()
        try:
            reducer: Reducer = self.__dict__["reducer"]
        except KeyError:
            raise AttributeError("torch has not made its reducer") from None
        return reducer

    @reducer.setter
    def reducer(self, reducer: Reducer) -> None:
        self.__dict__["reducer"] = reducer

    @reducer.deleter
    def reducer(self) -> None:
        del self.__dict__["reducer"]

    def _count_pass(self) -> None:
        if self._is_in_torchs_forward:  # which asks often, and the last pass was counted before
            return
        is_between = torch.is_grad_enabled() and not is_in_backward() and not is_in_forward(self)
        may_begin = self.require_backward_grad_sync or not self.static_graph
        if is_between and may_begin and not is_capturing(self._device):
            self._end_step(is_in_step=True)

    def _note_findings(self) -> None:
        """Tell the clock which stage this is, and where it is to look for the end of backward."""
        found = self.findings()
        if self._clock is not None:
            self._clock.stage_begins(str(found.stage))
        name = next(iter(self._trained), None)  # used first in forward, as a rule
        if found.trace is not None:
            name = found.trace.tensors[-1].name
        elif found.plan is not None:
            name = found.plan.buckets[-1].tensors[-1]
        if name is not None and self._last_gradient is not None:
            self._last_gradient.expect(self._trained[name])

    def _stop_planning(self, why: str) -> None:
        """End planning, at a point that all ranks come to alike."""
        self._end_step()  # so that all have been told the same
        if self._driver is not None:
            self._driver.stop(why)
            self._driver = None
            self._note_findings()

    def _drop_own_hook(self, why: str) -> None:
        """Go back to torch's buckets from a plan that needs a hook and that no user asked for.

        Call it at a point that all ranks come to alike.
        """
        options, engine, session = self._options, self._engine, self._session
        is_asked_for = options.rounding or options.compression or options.timeline
        if engine is None or session is None or engine.sender is None or is_asked_for:
            return
        if options.collective == AUTO and not session.findings.is_given:
            session.drop_plan(why)
            engine.install(SimpleBuckets.ORIGINAL)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return torch's hook for ranks that have run out of data, and end planning."""
        divides_by_all = kwargs.get("divide_by_initial_world_size", True)
        if self._options.precision != EXACT and not divides_by_all:
            raise RequestError(
                f"with precision={self._options.precision!r} gradients are divided by the number "
                "of all workers; leave out divide_by_initial_world_size=False"
            )
        why = "planning ends where join() begins"
        self._stop_planning(why)
        if not divides_by_all:
            self._drop_own_hook(why)
        if self._has_own_hook and not divides_by_all:
            raise RequestError(
                "with collective, compression or timeline gradients are divided by the "
                "number of all workers; leave out divide_by_initial_world_size=False"
            )
        hook: JoinHook = super().join_hook(**kwargs)  # type: ignore[no-untyped-call]
        return hook if self._sparse is None else SettlingJoinHook(hook, self._sparse)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register a hook of the user's, which ends planning: it may keep state for each bucket."""
        if "_options" in self.__dict__:  # otherwise it is torch itself, for its mixed precision
            self._leave_hook_to_user()
        super().register_comm_hook(state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Register one of torch's hooks in C++, which ends planning as any other hook does."""
        self._leave_hook_to_user()
        super()._register_builtin_comm_hook(comm_hook_type)  # type: ignore[no-untyped-call]

    def _leave_hook_to_user(self) -> None:
        if self._asks_for_hook:
            raise RequestError(
                "there is one hook per wrapper, and collective, compression, precision or "
                "timeline need it; leave them out"
            )
        why = "there is a communication hook"
        self._stop_planning(why)
        self._drop_own_hook(why)
        self._has_users_hook = True

    @property
    def _has_own_hook(self) -> bool:
        return self._engine is not None and self._engine.sender is not None

    @property
    def _asks_for_hook(self) -> bool:
        options = self._options
        is_named, is_exact = options.collective != AUTO, options.precision == EXACT
        return bool(options.compression or options.timeline or is_named or not is_exact)

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Go on with other ranks, as torch's wrapper does, and end planning.

        Some ranks may have failed in the last pass, and nobody can be asked how far the others have
        come. So what all do now follows from what they were given: with a plan that never changes
        they keep it, and otherwise all begin as new wrappers do, with torch's buckets.
        """
        session, driver = self._session, self._driver
        self._require_replaceable_group()
        self._driver = self._news = None  # they would ask and tell ranks of the group before
        try:
            super()._update_process_group(new_process_group)  # type: ignore[no-untyped-call]
            if self._engine is not None and self._is_plannable:
                self._begin_again(self._engine)
        finally:
            if driver is not None:
                driver.close()
        if session is not None:
            if not self._is_fixed and (not session.is_over or session.findings.plan is not None):
                session.drop_plan(REPLACED)
            self._note_findings()
        elif self._why_unplanned == ONE_WORKER:
            self._why_unplanned = REPLACED
        leave_token(self.process_group)

    def _require_replaceable_group(self) -> None:
        engine = self._engine
        if self._asks_for_hook or (self._is_fixed and self._has_own_hook):
            why = "collective, compression, precision or timeline, or a plan that needs a hook,"
        elif self.static_graph and self._is_plannable:
            why = "static_graph"  # torch learns about the graph in one first pass only
        elif self._has_users_hook and engine is not None and engine.plan is not None:
            why = "a hook of yours on a plan's buckets"  # it would be lost with them
        elif self._lacks_plan:
            why = "a plan that was left out, because there was one worker,"
        else:
            return
        raise RequestError(f"with {why} ranks stay the same; wrap the model again")

    def _begin_again(self, engine: ReducerEngine) -> None:
        """Send what ranks of another group send first."""
        if self._is_fixed:
            engine.install_again()
        elif self._has_users_hook:  # which belongs to the reducer that there is
            engine.leave_to_torch()
        else:
            engine.start_anew()

    @property
    def _runtime(self) -> str:
        precision = self._options.precision
        return "gradweave" if precision == EXACT else f"gradweave:{precision}"

    def _messages(self) -> int | None:
        return None if self._engine is None else self._engine.messages

    def _present_plan(self, order: tuple[str, ...]) -> Plan:
        engine, compression = self._engine, self._options.compression
        assert engine is not None, "a copy has no clock, and is asked for no plan"
        if engine.plan is not None:
            return engine.plan
        names: Sequence[Sequence[str]] | None = engine.buckets(order)
        if names is None and self._recorder is not None:
            names = [m.tensors for step in self._recorder.messages()[-1:] for m in step]
        if not names:
            raise RequestError(
                "which gradients torch sends together is not known; wrap the model with "
                "timeline=True, and save the run after some steps"
            )
        way = parse_travel(first_collective(self._options, "native"))
        if compression is not None:
            way = Travel(way.collective, compression.compression_at(LAST_STEP))
        return unplanned(names, way)

    @property
    def is_sparsified(self) -> bool:
        """Whether only the largest elements of gradients travel."""
        return self._sparse is not None

    def sparse_state_dict(self) -> dict[str, Any]:
        """Return what this rank has kept back: residuals, velocities and the warm-up's step.

        Call it on every rank after ``optimizer.step()``.

        Raises:
            RequestError: if the wrapper has no compression.
        """
        return self._sparsified().state_dict()

    def load_sparse_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what ``sparse_state_dict`` returned on this rank.

        Call it on every rank, between two steps.

        Raises:
            RequestError: if the wrapper has no compression, or the state is another model's, rank's
                or number of workers'.
        """
        self._sparsified().load_state_dict(state)

    def _sparsified(self) -> SparseTraining:
        if self._sparse is None:
            raise RequestError("nothing is sparsified; wrap the model with compression=GTopK(…)")
        return self._sparse

    def __getstate__(self) -> dict[str, Any]:
        """Leave threads and groups here: a copy has torch's own buckets and does not plan."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        if self._sparse is not None:
            logger.warning("the copy of a sparsified wrapper sends all of its gradients")
        elif self._options.precision != EXACT:
            logger.warning("the copy of a wrapper that rounds sends gradients as they are")
        gone = ("_session", "_driver", "_engine", "_sparse", "_recorder", "_plan_cache", "_clock")
        state |= dict.fromkeys((*gone, "_last_gradient", "_numbers", "_news", "_captures"))
        state |= {"_options": Options(), "_comm_hooks": [], "_why_unplanned": "this is a copy"}
        state |= {"_is_plannable": False, "_lacks_plan": False}
        if self._engine is not None:
            state["bucket_bytes_cap"] = self._engine.torch_cap_bytes
        return state
