"""Data parallelism that communicates during forward as well as during backward.

Gradients are reduce-scattered while backward goes on, so that each rank has the sums of its shard;
it updates that shard with any optimizer that works element by element; and updated parameters are
all-gathered while the next forward pass goes on, each before the first module that reads it.
Together that is one all-reduce, half of it hidden behind forward, and the optimizer keeps state for
a shard only.
"""

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer

from gradweave.comm.agree import broadcast_bytes, group_device, ranks_that_differ
from gradweave.comm.communicator import world_group
from gradweave.comm.twins import TwinGroups
from gradweave.errors import RequestError
from gradweave.measure.alignment import clock_offset_s
from gradweave.measure.spans import SpanRecorder, aligned_timelines
from gradweave.plan import Plan
from gradweave.planning import BOTH_PASSES_COLLECTIVE
from gradweave.recipe import Recipe
from gradweave.runtime.buckets import modules_with_sparse_gradients
from gradweave.runtime.candidates import Candidate
from gradweave.runtime.explain import explanation
from gradweave.runtime.findings import Findings
from gradweave.runtime.flat_buckets import buckets_up_to, dense_strides, merged
from gradweave.runtime.flat_engine import FlatEngine
from gradweave.runtime.given import PlanSource, device_name, given_plan, require_fit
from gradweave.runtime.options import AUTO, Options, is_compiled
from gradweave.runtime.passes import batch_size
from gradweave.runtime.pilot import Pilot
from gradweave.timeline import Timeline
from gradweave.words import MIB

# Until there is a plan: as torch's own wrapper.
FIRST_BUCKET_BYTES = 25 * MIB


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
    ``elementwise``       classes of optimizers, beside torch's, that update each element by itself:
                          others are warned of, for a shard is a flat part of a parameter.
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
        elementwise: Collection[type[Optimizer]] = (),
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
        self.process_group = group = process_group or world_group()
        self.require_backward_grad_sync = True
        self._full = {name: p for name, p in module.named_parameters() if p.requires_grad}
        _check_model(module, self._full, group)
        self._recorder: SpanRecorder | None = None
        if timeline:
            self._clock_offset_s = clock_offset_s(group)
            self._recorder = SpanRecorder({p: name for name, p in self._full.items()})
        device = next(iter(self._full.values())).device
        given = given_plan(plan, workers=group.size(), device=device)
        first = _first_plan(self._full, options)
        asked = given.plan if isinstance(given, Recipe) else given
        require_fit(asked or first, self._full, group)
        live = weakref.ref(self)  # nothing may keep the wrapper: it has to go before its group

        def step_over() -> None:
            if (wrapper := live()) is not None:
                wrapper._step_over()  # noqa: SLF001

        self._engine = FlatEngine(
            module,
            self._full,
            group,
            make_group=make_group,
            first_plan=asked or first,
            recorder=self._recorder,
            on_step_over=step_over,
            elementwise=elementwise,
        )
        opened = ExitStack()
        opened.callback(self._engine.close)
        # Not at exit: a thread that waits for a dead peer would keep the script from ending.
        weakref.finalize(self, opened.close).atexit = False
        self._batch_size = 1
        self._pilot: Pilot | None = None
        if group.size() > 1:
            make = make_group or TwinGroups(group).make
            self._pilot = _pilot(options, self._engine, make, given, first)
            opened.callback(self._pilot.close)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        is_synchronised = torch.is_grad_enabled() and self.require_backward_grad_sync
        self._engine.begin_forward(is_synchronised=is_synchronised)
        if is_synchronised:
            self._batch_size = batch_size(inputs)
            if self._pilot is not None:
                self._pilot.begin_pass()
            if self.broadcast_buffers:
                broadcast_bytes(list(self.module.buffers()), self.process_group)
        output = self._engine.call(*inputs, **kwargs)
        self._engine.end_forward(is_synchronised=is_synchronised)
        return output

    @property
    def plan(self) -> Plan:
        """What is carried out now."""
        return self._engine.plan

    def _step_over(self) -> None:
        if self._pilot is not None:
            self._pilot.step(self._batch_size)

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
        return explanation(
            found, alone, workers=self.process_group.size(), baseline="the first buckets"
        )

    def recipe(self) -> Recipe:
        """What a restart can be given as ``plan``."""
        device = next(iter(self._full.values())).device
        return self.findings().recipe(
            workers=self.process_group.size(), device=device_name(device), why_not=self.explain()
        )

    def synchronise(self) -> None:
        """Until the model's parameters are complete on this rank."""
        self._engine.synchronise()

    def gather(self) -> None:
        """Begin to send updated parameters to all ranks; it happens by itself where it is due.

        After each step of an optimizer of torch's, or else when the model is called.
        """
        self._engine.gather()

    def named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,  # noqa: FBT001, FBT002 torch's signature
        remove_duplicate: bool = True,  # noqa: FBT001, FBT002
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's shards, flat, some without elements; frozen parameters as they are."""
        found = super().named_parameters(prefix, recurse, remove_duplicate)
        shards = self._engine.shards.by_name
        shard_of = {full: shards[name] for name, full in self._full.items()}
        for name, parameter in found:
            yield name, shard_of.get(parameter, parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 torch's signature
        """Also forgets what passes under ``no_sync`` have added up, which no optimizer sees."""
        super().zero_grad(set_to_none)
        self._engine.forget_gradients()

    def requires_grad_(self, requires_grad: bool = True) -> Self:  # noqa: FBT001, FBT002
        """Freeze the model, or go on with it; optimizers leave alone what is frozen."""
        self.module.requires_grad_(requires_grad)
        return self

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """As torch.nn.utils.clip_grad_norm_, by the norm over all ranks' shards."""
        norm = torch.nn.utils.get_total_norm(self._engine.shards.counted_gradients(), norm_type)
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
        return self._engine.whole_state(optimizer)

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """This rank's part of it."""
        self._engine.load_whole_state(optimizer, state)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        raise RequestError(
            "the model's parameters lie in buckets; move it or change its type before wrapping it"
        )


def _pilot(
    options: Options,
    engine: FlatEngine,
    make_group: Callable[[], dist.ProcessGroup],
    given: Plan | Recipe | None,
    first: Plan,
) -> Pilot:
    def adopt(what: Candidate | Literal["one bucket", "torch's own"]) -> None:
        if isinstance(what, Candidate):
            engine.install(what.plan)
        else:
            engine.install(merged(first) if what == "one bucket" else first)

    return Pilot(
        options,
        module=engine.module,
        parameters=engine.parameters,
        group=engine.group,
        make_group=make_group,
        adopt=adopt,
        keeps_declared_order=False,
        torch_cap_mb=None,
        given=given,
        passes="both",
    )


def _first_plan(parameters: Mapping[str, nn.Parameter], options: Options) -> Plan:
    by = BOTH_PASSES_COLLECTIVE if options.collective == AUTO else options.collective
    return buckets_up_to(parameters, FIRST_BUCKET_BYTES, planner="first buckets", collective=by)


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
    described = "\n".join(
        f"{name} {tuple(p.shape)} {dense_strides(p)} {p.dtype}" for name, p in parameters.items()
    )
    if different := ranks_that_differ(group, described, device=group_device(group)):
        raise RequestError(
            f"ranks {different} have other parameters than rank 0; build the same model, in the "
            "same memory format, everywhere"
        )
