"""torch's own wrapper, watched: what it takes, where the time goes, and a run to keep of it."""

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct
from msgspec.structs import replace
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave._src.clocks import clock_for
from gradweave._src.comm.groups import leave_token
from gradweave._src.device_order import is_capturing
from gradweave._src.errors import RequestError
from gradweave._src.measure import spans
from gradweave._src.measure.alignment import clock_offset_s
from gradweave._src.measure.backward import slowest_rank, trace_of
from gradweave._src.measure.spans import SpanRecorder, aligned_timelines
from gradweave._src.network import Network
from gradweave._src.plan import Plan
from gradweave._src.runtime.driving.survey import RankSurvey, Survey
from gradweave._src.runtime.reporting.all_ranks import require_all_ranks
from gradweave._src.runtime.reporting.metrics import LiveNumbers, Metrics
from gradweave._src.runtime.reporting.planning_wrapper import PlanningWrapper
from gradweave._src.runtime.reporting.saving import (
    Folder,
    gather_notes,
    rank_notes,
    script_name,
    tensors_of,
    write_on_rank_0,
)
from gradweave._src.runtime.reporting.step_clock import LastGradient, StepClock
from gradweave._src.runtime.wrapping.inputs import batch_size
from gradweave._src.runtime.wrapping.parameters import (
    modules_with_sparse_gradients,
    planned_parameters,
)
from gradweave._src.session.explain import explanation
from gradweave._src.session.findings import Findings, Stage
from gradweave._src.session.learning import MessageTimes
from gradweave._src.session.saved_run import (
    RankNotes,
    StepLosses,
    Training,
    network_from,
    predicted_of,
    unplanned,
)
from gradweave._src.session.task import TORCHS_BUCKETS
from gradweave._src.timeline import Timeline
from gradweave._src.torch_internals import (
    FOR_BACKWARD_CALLBACKS,
    has_comm_hook,
    has_reduced_since,
    is_compiled,
    noted_gradients,
    require,
)
from gradweave._src.trace import Trace
from gradweave._src.travel import Travel

logger = logging.getLogger(__name__)

RECORD_STEPS = 5
# The last steps whose messages are kept, to tell what the network costs.
RECORDED_STEPS = 16
NATIVE = Travel("native")


def watch(ddp: TorchDDP) -> "Watched":
    """Note what torch's own wrapper does, for ``metrics()``, ``timelines()`` and ``save_run()``.

    Use it to compare a training as it is with one of ours. Call it on every rank, before the first
    backward pass. Buckets travel as they do without it and weights stay the same bits; a hook in
    Python notes when each of them was ready and done, and for a few steps it is recorded when
    gradients are ready.

    Args:
        ddp: a model in torch.nn.parallel.DistributedDataParallel, without a communication hook.

    Raises:
        RequestError: if it is not torch's own wrapper, or has a hook already.

    Examples:
        >>> ddp = torch.nn.parallel.DistributedDataParallel(model)
        >>> watched = gradweave.watch(ddp)
        >>> for _ in range(8):
        ...     ddp(batch).sum().backward()
        >>> watched.save_run("runs/torch")
    """
    return Watched(ddp)


class Watched:
    """What is known of a training by torch's wrapper; ``watch`` returns it.

    It does not keep the wrapper alive, and tells of it as the wrappers of Gradweave tell of
    themselves.
    """

    def __init__(self, ddp: TorchDDP) -> None:
        _check(ddp)
        self._ddp = weakref.ref(ddp)
        leave_token(self._group)
        self._parameters = planned_parameters(ddp)
        self._model = type(ddp.module).__name__
        self._clock = StepClock(clock_for(ddp.device))
        names = {parameter: name for name, parameter in self._parameters.items()}
        clock = clock_for(ddp.device)
        self._recorder = SpanRecorder(names, kept_steps=RECORDED_STEPS, clock=clock)
        self._numbers = LiveNumbers(self._clock, self._recorder)
        self._reduced: list[int] = []  # what torch says of the last pass that was averaged
        self._survey: Survey | None = Survey(
            ddp.module,
            self._parameters,
            steps=RECORD_STEPS,
            keeps_declared_order=False,
            close=lambda: None,
        )
        self._recorded: RankSurvey | None = None
        self._clock.stage_begins(str(Stage.RECORDING))
        self._last_gradient = LastGradient(self._clock)
        self._last_gradient.expect(next(iter(self._parameters.values())))
        spans.watch(ddp, self._recorder)
        ddp.register_forward_pre_hook(_OnWrapper(self._forward_begins), with_kwargs=True)
        ddp.register_forward_hook(_OnWrapper(self._forward_ends))
        closing = weakref.finalize(ddp, _close, self._last_gradient, self._survey)
        closing.atexit = False

    def metrics(self) -> Metrics:
        """Return a few numbers of the last step, as the wrappers of Gradweave have them.

        The keys are those of ``DistributedDataParallel.metrics``, without "predicted_s".
        """
        return self._numbers.of(
            stage=self._clock.stages[-1].stage,
            messages=self._recorder.message_count(),
            predicted=None,
        )

    def timeline(self) -> Timeline:
        """Return the last step as this rank saw it; it is empty before the first one."""
        return self._recorder.timeline()

    def timelines(self) -> list[Timeline]:
        """Return the last step on every rank, on one clock.

        Call it on every rank, between two steps.

        Raises:
            RequestError: if the wrapper is gone; on all ranks that call it, if others do not within
                80 % of the process group's time-out.
            CollectiveError: if the store of the process group does not answer.
        """
        group = self._group
        require_all_ranks(group, "timelines")
        return aligned_timelines(self._recorder, group, clock_offset_s(group))

    def save_run(
        self, folder: Folder, *, losses: StepLosses | None = None, network: Network | None = None
    ) -> None:
        """Keep what is known of this training as the folder of a run, for `gradweave report`.

        Call it on every rank, between two steps, while the wrapper lives. Rank 0 writes, and
        replaces a run that the folder held before.

        Args:
            folder: where the run is kept.
            losses: rank 0's losses, if they are to be drawn: a number for each step since the first
                one, or pairs of step, counted from 0, and loss.
            network: rank 0's network, such as `gradweave.calibrate` measures (default: what the
                messages of the last steps tell).

        Raises:
            RequestError: on all ranks, if no step was taken, losses do not fit the steps, the
                folder cannot be written or has files of others in the way, or the wrapper is gone;
                on all ranks that call it, if others do not within 80 % of the process group's
                time-out.
            CollectiveError: if the store of the process group does not answer.
        """
        group = self._group
        clock = self._clock
        require_all_ranks(group, "save_run")
        ranks = gather_notes(group, self._notes, WatchedNotes)
        timelines = aligned_timelines(self._recorder, group, clock_offset_s(group))

        def training() -> Training:
            plan = self._plan()
            found = self._findings(plan, ranks, network)
            return Training(
                runtime="torch-ddp",
                command=script_name(),
                findings=found,
                explanation=explanation(found, workers=group.size(), baseline=TORCHS_BUCKETS),
                tensors=tensors_of(self._parameters),
                model=self._model,
                plan=plan,
                step_s=tuple(clock.all_step_s()),
                stages=(),  # of planning, and nobody planned
                ranks=tuple(one.rank for one in ranks),
                timelines=tuple(timelines),
            )

        write_on_rank_0(group, folder, losses, training)

    @property
    def _group(self) -> dist.ProcessGroup:
        ddp = self._ddp()
        if ddp is None:
            raise RequestError("the wrapper is gone; save its run, and ask, while it is there")
        group: dist.ProcessGroup = ddp.process_group
        return group

    def _notes(self) -> "WatchedNotes":
        if not self._clock.steps or self._recorder.message_count() is None:
            raise RequestError("no step was seen to end; save the run after some steps")
        self._end_step()
        return WatchedNotes(
            rank=rank_notes(self._clock, notes_timelines=True),
            survey=self._recorded,
            steps=tuple(
                tuple(
                    MessageTimes(
                        operation=message.operation,
                        collective="native",
                        nbytes=message.nbytes,
                        ready_s=message.ready_s,
                        done_s=message.done_s,
                    )
                    for message in messages
                )
                for messages in self._recorder.messages()
            ),
        )

    def _plan(self) -> Plan:
        """Return the buckets of the last step, without parameters that have no elements."""
        messages = (message.tensors for message in self._recorder.messages()[-1])
        names = [[n for n in tensors if self._parameters[n].numel()] for tensors in messages]
        return unplanned([bucket for bucket in names if bucket], NATIVE)

    def _findings(
        self, plan: Plan, ranks: Sequence["WatchedNotes"], network: Network | None
    ) -> Findings:
        """Return findings as if planned; without a trace where too few steps were recorded."""
        found = Findings(
            stage=Stage.SETTLED,
            steps=self._clock.steps,
            network=network,
            note="they were watched, and nothing was planned",
        )
        trace = self._trace(plan, [one.survey for one in ranks])
        if trace is None:
            return found
        if network is None:
            # Backwards from the last step, for some ranks may have kept fewer.
            by_step = zip(*(reversed(one.steps) for one in ranks), strict=False)
            network = network_from(by_step, trace)
        predicted = predicted_of(trace, plan, network, workers=len(ranks))
        return replace(found, trace=trace, network=network, predicted=predicted)

    def _trace(self, plan: Plan, surveys: Sequence[RankSurvey | None]) -> Trace | None:
        recorded = [survey for survey in surveys if survey is not None]
        if len(recorded) < len(surveys):
            return None
        trace = trace_of(
            slowest_rank([survey.times for survey in recorded]),
            self._parameters,
            name=self._model,
            batch_size=recorded[0].batch_size,
            iterations=RECORD_STEPS,
        )
        return trace.in_order(name for bucket in plan.buckets for name in bucket.tensors)

    def _forward_begins(
        self, ddp: TorchDDP, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_compiling: bool
    ) -> None:
        if not torch.is_grad_enabled():
            return
        if not is_compiling and is_capturing(ddp.device):
            self._clock.looks_away()
            return
        if self._survey is not None and (is_compiling or is_compiled(ddp.module)):
            self._survey.close()  # its hooks would be compiled, too
            self._survey = None
            self._clock.stage_begins(str(Stage.SETTLED))
        self._end_step()
        if self._clock.misses_end:
            in_order = list(self._parameters.values())
            self._last_gradient.look_again(noted_gradients(ddp), in_order)
        is_synchronised = ddp.require_backward_grad_sync
        self._clock.begun += is_synchronised
        self._clock.forward_begins(is_synchronised=is_synchronised)
        if self._survey is not None:
            self._survey.forward_begins(batch_size((args, kwargs)))
        if is_synchronised:
            self._recorder.begin()

    def _forward_ends(
        self, ddp: TorchDDP, args: object, output: object, *, is_compiling: bool
    ) -> None:
        del args, output
        if not torch.is_grad_enabled() or (not is_compiling and is_capturing(ddp.device)):
            return
        if ddp.require_backward_grad_sync:
            self._recorder.backward()
        self._clock.forward_ends()

    def _end_step(self) -> None:
        """Note a step that is over, while it is recorded when gradients are ready."""
        ddp = self._ddp()
        if self._survey is None or ddp is None:
            return
        is_over, self._reduced = has_reduced_since(ddp, self._reduced)
        if not is_over:
            return
        self._survey.step_over()
        part = self._survey.part()
        if part is None:
            return
        self._survey = None
        if isinstance(part, RankSurvey):
            self._recorded = part
            self._last_gradient.expect(self._parameters[part.order[-1]])
        self._clock.stage_begins(str(Stage.SETTLED))


class WatchedNotes(Struct, frozen=True, kw_only=True):
    """What one rank tells of torch's wrapper."""

    rank: RankNotes
    survey: RankSurvey | None
    steps: tuple[tuple[MessageTimes, ...], ...]  # the messages of the last ones


class _OnWrapper:
    """A hook on a module; copies of the module have one that does nothing."""

    def __init__(self, note: Callable[..., None]) -> None:
        # torch.compile must not trace it: it reads clocks.
        self._note = torch.compiler.disable(note)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any) -> None:
        self._note(*args, is_compiling=torch.compiler.is_compiling())

    def __reduce__(self) -> tuple[Any, ...]:
        return (_OnWrapper, (_nothing,))


def _nothing(*args: object, is_compiling: bool) -> None:
    del args, is_compiling


def _close(last_gradient: LastGradient, survey: Survey) -> None:
    last_gradient.close()
    survey.close()


def _check(ddp: object) -> None:
    """Refuse what cannot be watched, before anything is hooked on."""
    if isinstance(ddp, PlanningWrapper):
        raise RequestError(
            f"{type(ddp).__name__} of Gradweave is watched by itself; call its own save_run() and "
            "metrics()"
        )
    if not isinstance(ddp, TorchDDP):
        raise RequestError(
            "watch() takes a model in torch.nn.parallel.DistributedDataParallel, got "
            f"{type(ddp).__name__}"
        )
    require(FOR_BACKWARD_CALLBACKS)
    if has_comm_hook(ddp):
        raise RequestError(
            "the wrapper has a communication hook, and there is one per wrapper; watch it without"
        )
    is_late, _ = has_reduced_since(ddp, [])
    if is_late:
        raise RequestError("the wrapper has run a backward pass; call watch() before the first one")
    for name in modules_with_sparse_gradients(ddp.module):
        raise RequestError(
            f"{name!r} has sparse gradients, which a hook cannot send; use sparse=False"
        )
    if not any(parameter.numel() for parameter in planned_parameters(ddp).values()):
        raise RequestError("the model has no parameter with a gradient to send")
