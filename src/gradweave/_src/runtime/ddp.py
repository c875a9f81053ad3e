"""A drop-in DistributedDataParallel that finds its own buckets while the model trains."""

import inspect
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.distributed.algorithms.join import JoinHook
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave._src.clocks import clock_for
from gradweave._src.comm.own_group import OwnGroup
from gradweave._src.compression import EXACT, SPARSE, Compression
from gradweave._src.errors import PlanMismatch, RequestError
from gradweave._src.measure.alignment import clock_offset_s
from gradweave._src.measure.spans import SpanRecorder
from gradweave._src.plan import Plan
from gradweave._src.recipe import Recipe
from gradweave._src.runtime.driver import Driver
from gradweave._src.runtime.failed_passes import log_failed_pass_at_exit
from gradweave._src.runtime.instruments import Instruments
from gradweave._src.runtime.metrics import LiveNumbers
from gradweave._src.runtime.noticeboard import Noticeboard
from gradweave._src.runtime.options import (
    AUTO,
    COMPILED,
    STATIC_INSIDE_FORWARD,
    Options,
    check_caps,
    check_plan,
    check_whole_model,
    first_collective,
    is_whole,
    needs_own_group,
    rival_collectives,
    why_unplannable,
)
from gradweave._src.runtime.parameters import check_compressible, planned_parameters
from gradweave._src.runtime.phase_news import PhaseNews
from gradweave._src.runtime.plan_cache import (
    PlanCache,
    agreed_recipe,
    check_recipe,
    open_cache,
    watching,
)
from gradweave._src.runtime.plan_source import (
    PlanSource,
    device_name,
    given_plan,
    plan_in,
    require_fit,
)
from gradweave._src.runtime.planned import Captures, Planned
from gradweave._src.runtime.precision import (
    check_roundable,
    check_ways,
    rounded_ways,
    sparse_settings,
)
from gradweave._src.runtime.reducer_engine import ReducerEngine
from gradweave._src.runtime.same_wrapping import (
    WRAPPER,
    SameWrapping,
    given_said,
    options_said,
    plan_said,
    torch_options_said,
)
from gradweave._src.runtime.step_clock import LastGradient, StepClock
from gradweave._src.runtime.tensors import batch_size
from gradweave._src.runtime.transports import SettlingJoinHook, Transports
from gradweave._src.session.commands import SimpleBuckets
from gradweave._src.session.kept_run import unplanned
from gradweave._src.session.session import Session
from gradweave._src.session.task import LAST_STEP, PlanningTask
from gradweave._src.sparse.settings import Sparse, settings_of
from gradweave._src.sparse.training import SparseTraining
from gradweave._src.torch_internals import (
    awaits_first_static_pass,
    is_compiled,
    is_in_join,
    torch_caps_bytes,
)
from gradweave._src.travel import Travel, parse_travel

logger = logging.getLogger(__name__)


class DistributedDataParallel(Planned, TorchDDP):
    """torch's wrapper, whose buckets are planned for this model on this network.

    Use it in the place of ``torch.nn.parallel.DistributedDataParallel``; docs/runtime.md has all of
    it. It begins with torch's own buckets, notes when gradients are ready and what messages cost,
    and tries plans that promise to be faster for a few steps each. What is not faster than torch's
    own buckets is not kept. Gradients are the same as torch's, up to the order of summation.

    Args:
        module: the model, as torch's wrapper takes it.
        *torch_arguments: what torch's wrapper takes by position.
        planner: which plan to try first, as `gradweave plan --planner`.
        plan: a Plan or Recipe, or a file of one: nothing is recorded and nothing is tried.
        cache: a folder for the plans that are found: the next run of the same model on as many
            workers begins with its plan, and plans again when steps take longer by ``replan_when``
            (default here: 0.25, in the first 60). Rank 0 alone reads, writes and decides. The
            default is the environment's GRADWEAVE_CACHE; an empty text means none, even so. With
            ``plan`` it is left alone.
        collective: "auto", or how every bucket travels, as `gradweave bench collectives` names it.
        compression: GTopK(0.001) or TopK(0.001), or a text, "gtopk:0.001": only the largest travel.
        grad_scaler: with compression, the one whose scale the residuals follow.
        precision: what planning may change. "exact" (the default) is nothing but the order of sums;
            "rounded" is also what messages are rounded to, bf16 or 8 bits, each where it is faster;
            "sparse" is GTopK(…) where that is faster. "bf16", "fp16" or "int8" are for all
            messages. Sums are made in float32; what 8 bits drop is carried over to the next step.
        record_steps: how many steps are recorded, after two for warming up.
        trial_steps: how many steps a plan is timed for in each of its turns; 0 trusts the
            prediction.
        replan_when: plan again when steps take another time than when the plan was chosen, by this
            share.
        timeline: note when each bucket was ready and done, for ``timeline()``.
        make_group: makes another process group of the same ranks, where messages beside the
            training or collectives of ours need one (default: one that goes with the wrapper).
        **torch_options: everything else is torch's own.

    Raises:
        RequestError: if an option means nothing, options differ between ranks, or a model cannot be
            compressed or rounded as asked for; one line, on all ranks.
        PlanMismatch: if the given plan is not one for this model.

    Examples:
        >>> model = gradweave.DistributedDataParallel(model, cache="plans")
        >>> model(batch).sum().backward()
        >>> str(model.findings().stage)
        'settled'
    """

    _baseline = "torch's own buckets"

    def __init__(
        self,
        module: nn.Module,
        *torch_arguments: Any,
        planner: str = "optimal",
        plan: PlanSource | None = None,
        cache: str | os.PathLike[str] | None = None,
        collective: str = "auto",
        compression: Sparse | Compression | str | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        precision: str = "exact",
        record_steps: int = 5,
        trial_steps: int = 4,
        replan_when: float | None = None,
        timeline: bool = False,
        make_group: Callable[[], dist.ProcessGroup] | None = None,
        **torch_options: Any,
    ) -> None:
        torch_options |= _named(torch_arguments)
        group = _asked_group(torch_options)
        wrapping = SameWrapping(group)
        with wrapping.refusals_told():
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
            given = _given(plan, module, group, options)
        # First: whoever comes to anything else with other options waits for others, or alone.
        wrapping.require_same(
            {
                WRAPPER: "DistributedDataParallel",
                "plan": plan_said(plan, given),
                **options_said(options),
                "grad_scaler": given_said(grad_scaler),
                "make_group": given_said(make_group),
                **torch_options_said(torch_options),
            }
        )
        super().__init__(module, **torch_options)
        self._options = options
        self._planned = planned_parameters(self)
        check_roundable(options, module, self._planned, torch_options)
        self._device = self.device
        self._clock = StepClock(clock_for(self.device))
        self._captures: Captures | None = Captures(self.device, self._clock)
        self._recorder, self._clock_offset_s = None, 0.0
        if timeline:
            self._clock_offset_s = clock_offset_s(self.process_group)
            names = {p: name for name, p in self._planned.items()}
            self._recorder = SpanRecorder(names, clock=clock_for(self.device))
        self._numbers = LiveNumbers(self._clock, self._recorder)
        self._why_unplanned = self._why_not(torch_options)
        self._plan_cache = None
        if self._why_unplanned is not None:
            given = None
        elif (made := plan_in(given)) is not None:
            require_fit(made, self._planned)
        elif plan is None and not is_whole(sparse):
            self._plan_cache = self._open_cache()
        if self._plan_cache is not None:
            given = self._plan_cache.recalled(self.process_group)
        is_remembered = given is not None and self._plan_cache is not None
        self._begin(given, grad_scaler, make_group, is_remembered=is_remembered)

    def _begin(
        self,
        given: Plan | Recipe | None,
        grad_scaler: torch.amp.GradScaler | None,
        make_group: Callable[[], dist.ProcessGroup] | None,
        *,
        is_remembered: bool,
    ) -> None:
        """Open what is ours: all ranks come here alike, and later on need not."""
        options, group, clock = self._options, self.process_group, self._clock
        assert clock is not None, "only copies have none"
        task = self._task(is_remembered=is_remembered)
        plans = self._why_unplanned is None and group.size() > 1
        plans = plans and (given is None or task.replan_when is not None)
        plan = plan_in(given)
        messages = None
        if needs_own_group(options, plan):
            backend = None if options.compression is None else "gloo"
            messages = OwnGroup(group, make_group, backend=backend)
            messages.thread()
            check_ways(options, plan, messages.topology)
        probing = OwnGroup(group, make_group) if plans else None
        self._topology = None if probing is None else probing.topology
        self._sparse = None
        if options.compression is not None:  # for life: residuals stay with other buckets
            assert messages is not None
            self._sparse = SparseTraining(
                options.compression,
                self._planned,
                messages.group,
                grad_scaler=grad_scaler,
                may_be_idle=partial(is_in_join, weakref.ref(self)),
            )
        transports = Transports(
            group,
            options=options,
            own_group=messages or probing,
            step=lambda: clock.begun,
            recorder=self._recorder,
            sparse=self._sparse,
            names={parameter: name for name, parameter in self._planned.items()},
            finds_unused=self.find_unused_parameters,
        )
        self._engine: ReducerEngine | None
        self._engine = engine = ReducerEngine(self, self._planned, transports)
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
        board = Noticeboard(group) if self._can_tell_others else None
        self._news = None if board is None else PhaseNews(board, clock)
        if self._session is not None and probing is not None:
            assert board is not None, "nothing is planned without"
            instruments = Instruments(
                self.module,
                self._planned,
                board,
                [probing],
                keeps_declared_order=self._keeps_declared_order,
                sparse=self._sparse,
                sending=messages,
                keeps_own_groups=lambda: messages is None and engine.uses_own_group,
            )
            self._driver = Driver(self._session, self._engine, instruments, board)
        log_failed_pass_at_exit(
            self,
            weakref.WeakMethod(self._steps_begun),
            weakref.WeakMethod(self._steps_without_hook),
        )
        self._last_gradient = LastGradient(clock)
        self._note_findings()
        closing = weakref.finalize(
            self, _close, self._last_gradient, self._driver, messages, probing
        )
        # Not at exit: a thread that waits for a dead peer would keep the script from ending.
        closing.atexit = False

    @property
    def _can_tell_others(self) -> bool:
        return self.process_group.size() > 1 and Noticeboard.can_be_made(self.process_group)

    @property
    def _keeps_declared_order(self) -> bool:
        return self.find_unused_parameters and not self.static_graph

    def _why_not(self, torch_options: Mapping[str, Any]) -> str | None:
        """Say why torch's own buckets stay; None where they need not."""
        compression = self._options.compression
        why = why_unplannable(self.module, self._planned, torch_options)
        if why is not None and is_whole(compression):
            raise RequestError(
                f"whole_model wants one bucket, and torch's own must stay: {why}; leave out one of "
                "them"
            )
        group = self.process_group
        if why is None and group.size() == 1 and not is_whole(compression):
            return "one worker sends no messages"
        if why is None and group.size() > 1 and not self._can_tell_others:
            why = f"ranks of a {group.name()} group cannot be told of plans through its store"
        if why is not None and self.process_group.size() > 1:
            logger.warning("keeping %s: %s", self._baseline, why)
        return why

    def _open_cache(self) -> PlanCache | None:
        return open_cache(
            self._options,
            self._task(),
            self._planned,
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
            keeps_declared_order=self._keeps_declared_order,
            compression_at=None if compression is None else compression.compression_at,
            mixes_dense=options.precision == SPARSE,
            is_whole_model=is_whole(compression),
        )

    def adopt(self, recipe: Recipe | str | None) -> bool:
        """Begin with what an earlier run has chosen, as if it had been remembered; say whether.

        It is for checkpoints that are loaded when the model is wrapped already: call it before the
        first step, on every rank. Rank 0's recipe counts, or its text. Where it will not do, one
        line in its log says why, and planning goes on as if there were none.
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
        _check_passes(plan)
        plan.check_fits({name: parameter.numel() for name, parameter in self._planned.items()})

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass, as torch's wrapper does."""
        if self._engine is not None and self._engine.sender is not None:
            self._engine.sender.raise_failure()
        is_planning = self._driver is not None
        if self._captures is not None and self._captures.has_begun(is_planning=is_planning):
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
        output = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        if recorder is not None:
            recorder.backward()
        clock.forward_ends()
        return output

    def _steps_begun(self) -> int:
        return 0 if self._clock is None else self._clock.begun

    def _steps_without_hook(self) -> int | None:
        """Return how many steps there were; None where a hook of ours counts them."""
        has_hook = self._engine is not None and self._engine.sender is not None
        return None if has_hook else self._steps_begun()

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

    def _end_step(self) -> None:
        driver = self._driver
        if driver is not None and self._engine is not None and self._engine.step_is_over():
            if awaits_first_static_pass(self):
                driver.fail(STATIC_INSIDE_FORWARD)
            driver.step_over()
            if self._plan_cache is not None:
                self._plan_cache.keep(self.findings())
            self._note_findings()
            if driver.is_over:
                self._driver = None

    def _note_findings(self) -> None:
        """Tell the clock which stage this is, and where it is to look for the end of backward."""
        found = self.findings()
        if self._clock is not None:
            self._clock.stage_begins(str(found.stage))
        name = next(iter(self._planned), None)  # used first in forward, as a rule
        if found.trace is not None:
            name = found.trace.tensors[-1].name
        elif found.plan is not None:
            name = found.plan.buckets[-1].tensors[-1]
        if name is not None and self._last_gradient is not None:
            self._last_gradient.expect(self._planned[name])

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
        has_hook = self._engine is not None and self._engine.sender is not None
        if has_hook and not divides_by_all:
            raise RequestError(
                "with collective, compression or timeline gradients are divided by the "
                "number of all workers; leave out divide_by_initial_world_size=False"
            )
        hook: JoinHook = super().join_hook(**kwargs)  # type: ignore[no-untyped-call]
        return hook if self._sparse is None else SettlingJoinHook(hook, self._sparse)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register a hook of the user's, which ends planning: it may keep state for each bucket."""
        if "_options" in self.__dict__:  # otherwise it is torch itself, for its mixed precision
            options = self._options
            named = options.collective != AUTO
            is_exact = options.precision == EXACT
            if options.compression or options.timeline or named or not is_exact:
                raise RequestError(
                    "there is one hook per wrapper, and collective, compression, precision or "
                    "timeline need it; leave them out"
                )
            why = "there is a communication hook"
            self._stop_planning(why)
            self._drop_own_hook(why)
        super().register_comm_hook(state, hook)

    @property
    def _runtime(self) -> str:
        precision = self._options.precision
        return "gradweave" if precision == EXACT else f"gradweave:{precision}"

    def _trained(self) -> dict[str, nn.Parameter]:
        return self._planned

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
        """Return residuals, velocities and schedule position of this rank, after a step."""
        return self._sparsified().state_dict()

    def load_sparse_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``sparse_state_dict`` returned, between two steps, on every rank."""
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
        if self._engine is not None:
            state["bucket_bytes_cap"] = self._engine.torch_cap_bytes
        return state


def _close(
    last_gradient: LastGradient,
    driver: Driver | None,
    messages: OwnGroup | None,
    probing: OwnGroup | None,
) -> None:
    """Close everything, each thing before what it uses."""
    last_gradient.close()
    if driver is not None:
        driver.close()
    for own_group in (messages, probing):
        if own_group is not None:
            own_group.close()


def _asked_group(torch_options: Mapping[str, Any]) -> dist.ProcessGroup | None:
    """Return the group that torch's wrapper will have; None where torch will refuse to wrap."""
    group, mesh = torch_options.get("process_group"), torch_options.get("device_mesh")
    if group is None and isinstance(mesh, DeviceMesh):
        group = mesh.get_group(0)
    elif group is None and dist.is_initialized():
        group = dist.group.WORLD
    return group if isinstance(group, dist.ProcessGroup) else None


def _given(
    source: PlanSource | None,
    module: nn.Module,
    group: dist.ProcessGroup | None,
    options: Options,
) -> Plan | Recipe | None:
    """Return the plan that the user gives; None for one worker, which sends no messages."""
    if source is None or group is None or group.size() == 1:
        return None
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    given = given_plan(source, workers=group.size(), device=device, options=options)
    plan = plan_in(given)
    if plan is not None:
        _check_passes(plan)
    return given


def _check_passes(plan: Plan) -> None:
    if plan.passes == "both":
        raise RequestError(
            "the plan is one for both passes; wrap the model with ShardedDataParallel, or plan for "
            "backward"
        )


def _named(torch_arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Return the arguments that were given to torch by position, by their names."""
    for found in torch_arguments:
        if isinstance(found, Plan | Recipe):
            raise RequestError(
                f"behind the model stand torch's own arguments; write plan= before the "
                f"{type(found).__name__}"
            )
    names = list(inspect.signature(TorchDDP.__init__).parameters)[2:]
    if len(torch_arguments) > len(names):
        raise TypeError(f"DistributedDataParallel takes at most {len(names) + 1} arguments")
    return dict(zip(names, torch_arguments, strict=False))
