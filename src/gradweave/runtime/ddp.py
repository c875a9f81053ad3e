"""A drop-in DistributedDataParallel that finds its own buckets while the model trains."""

import inspect
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave.comm import Communicator
from gradweave.comm.communicator import same_ranks
from gradweave.comm.worker import CommunicationThread
from gradweave.errors import PlanMismatch, RequestError
from gradweave.measure.alignment import clock_offset_s
from gradweave.measure.spans import SpanRecorder, aligned_timelines
from gradweave.plan import Plan
from gradweave.recipe import Recipe
from gradweave.runtime.buckets import (
    bucket_bytes,
    bucket_caps_mb,
    check_buckets,
    check_compressible,
    planned_parameters,
    torch_bucket_bytes,
)
from gradweave.runtime.candidates import Candidate
from gradweave.runtime.explain import explanation
from gradweave.runtime.findings import Findings
from gradweave.runtime.given import PlanSource, check_passes, device_name, given_plan
from gradweave.runtime.hooks import BucketSender, SettlingJoinHook, send_bucket
from gradweave.runtime.options import (
    COMPILED,
    Options,
    check_caps,
    check_whole_model,
    is_compiled,
    is_whole,
    why_unplannable,
)
from gradweave.runtime.passes import Backward, batch_size
from gradweave.runtime.pilot import Pilot
from gradweave.runtime.regroup import PlannedBuckets
from gradweave.runtime.swap import bucket_fields, swap_reducer
from gradweave.sparse.settings import Sparse
from gradweave.sparse.training import SparseTraining
from gradweave.timeline import Timeline
from gradweave.torch_internals import is_in_join
from gradweave.words import MIB

logger = logging.getLogger(__name__)

# Steps after a change of buckets before torch may report the new ones.
CHECKED_AFTER_STEPS = 4
# torch.compile refuses wrappers whose largest cap is smaller.
COMPILABLE_CAP_MB = 1.0


class DistributedDataParallel(TorchDDP):
    """torch's wrapper, whose buckets are planned for this model on this network.

    It starts with one bucket, records when gradients are ready and what messages cost beside the
    training, tries the most promising plans and torch's own buckets for a few steps each, and keeps
    the fastest. Gradients are the same as torch's, up to the order of summation.

    ``planner``      which plan to try first, as `gradweave plan --planner`.
    ``plan``         a Plan or Recipe, or a file of one: nothing is recorded and nothing is tried.
    ``collective``   "auto", or how every bucket travels, as `gradweave bench collectives` names it.
    ``compression``  GTopK(…) or TopK(…) of gradweave.sparse.settings: only the largest travel.
    ``grad_scaler``  with compression: whose scale the residuals follow.
    ``wire_dtype``   torch.float16 or torch.bfloat16, while gradients travel.
    ``record_steps`` how many steps are recorded at least, after two for warming up.
    ``trial_steps``  how many steps each candidate is timed for; 0 trusts the prediction.
    ``replan_when``  plan again when steps take another time than when the plan was chosen, by this
                     share.
    ``timeline``     note when each bucket was ready and done, for ``timeline()``.
    ``make_group``   makes another process group of the same ranks, where calibration or collectives
                     of ours need one (default: torch.distributed.new_group).

    Everything else is torch's own.
    """

    def __init__(
        self,
        module: nn.Module,
        *torch_arguments: Any,
        planner: str = "optimal",
        plan: PlanSource | None = None,
        collective: str = "auto",
        compression: Sparse | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        wire_dtype: torch.dtype | None = None,
        record_steps: int = 5,
        trial_steps: int = 5,
        replan_when: float | None = None,
        timeline: bool = False,
        make_group: Callable[[], dist.ProcessGroup] | None = None,
        **torch_options: Any,
    ) -> None:
        options = Options(
            planner=planner,
            collective=collective,
            compression=compression,
            wire_dtype=wire_dtype,
            record_steps=record_steps,
            trial_steps=trial_steps,
            replan_when=replan_when,
            timeline=timeline,
        )
        torch_options |= _named(torch_arguments)
        check_caps(torch_options)
        if compression is not None:
            skips = torch_options.get("skip_all_reduce_unused_params", False)
            check_compressible(module, skips_unused=skips)
        if is_whole(compression):
            check_whole_model(plan)
        super().__init__(module, **torch_options)
        self._options, self._make_group = options, make_group
        self._torch_cap_mb: float | None = torch_options.get("bucket_cap_mb")
        self._torch_buckets = bucket_fields(self)
        self._planned = planned_parameters(self)
        self._sender: BucketSender | None = None
        self._thread: CommunicationThread | None = None
        self._message_group: dist.ProcessGroup | None = None
        self._sparse: SparseTraining | None = None
        if compression is not None:  # one for the wrapper's life: residuals stay with other buckets
            self._sparse = SparseTraining(
                compression,
                self._planned,
                self._own_group(),
                grad_scaler=grad_scaler,
                may_be_idle=partial(is_in_join, weakref.ref(self)),
            )
        self._backward = Backward()
        self._user_hook: tuple[object, Callable[..., Any]] | None = None
        self._recorder: SpanRecorder | None = None
        self._clock_offset_s = 0.0
        self._step = 0
        self._is_compiled = False
        self._unchecked: tuple[int, list[int]] | None = None
        self._pilot: Pilot | None = None
        why = why_unplannable(module, self._planned, torch_options)
        if why is not None and is_whole(compression):
            raise RequestError(
                f"whole_model wants one bucket, and torch's own must stay: {why}; leave out one of "
                "them"
            )
        if why is None and self.process_group.size() == 1 and not is_whole(compression):
            why = "one worker sends no messages"
        if why is None:
            given = given_plan(
                plan,
                workers=self.process_group.size(),
                device=self.device,
                compression=compression,
            )
            check_passes(given)
            self._pilot = self._new_pilot(given)
            weakref.finalize(self, self._pilot.close).atexit = False
        elif self.process_group.size() > 1:
            logger.warning("keeping torch's own buckets: %s", why)
        self._why_unplanned = why
        if timeline:
            self._clock_offset_s = clock_offset_s(self.process_group)
            self._recorder = SpanRecorder({p: name for name, p in self._planned.items()})
        if why is not None:
            self._hook([])

    @property
    def plan(self) -> Plan | None:
        """What is carried out; None while it is being found, and where torch's own buckets stay.

        While densities warm up it is the best one for the present density.
        """
        return None if self._pilot is None else self._pilot.found.plan

    def findings(self) -> Findings:
        """What planning has found out so far."""
        return Findings() if self._pilot is None else self._pilot.found

    def recipe(self) -> Recipe:
        """What a restart can be given as ``plan``."""
        return self.findings().recipe(
            workers=self.process_group.size(),
            device=device_name(self.device),
            why_not=self.explain(),
        )

    def explain(self) -> str:
        """What was measured, what was tried, what was chosen, what it gains."""
        found = None if self._pilot is None else self._pilot.found
        return explanation(found, self._why_unplanned, workers=self.process_group.size())

    def timeline(self) -> Timeline:
        """The last step as this rank saw it."""
        if self._recorder is None:
            raise RequestError("nothing was noted; wrap the model with timeline=True")
        return self._recorder.timeline()

    def timelines(self) -> list[Timeline]:
        """The last step on every rank, on one clock. Call it on every rank, between two steps."""
        if self._recorder is None:
            raise RequestError("nothing was noted; wrap the model with timeline=True")
        return aligned_timelines(self._recorder, self.process_group, self._clock_offset_s)

    def sparse_state_dict(self) -> dict[str, Any]:
        """Residuals, velocities and schedule position of this rank, after the optimizer's step.

        ``gradweave.sparse.checkpoint`` keeps it in a folder.
        """
        return self._sparsified().state_dict()

    def load_sparse_state_dict(self, state: Mapping[str, Any]) -> None:
        """Between two steps, on every rank."""
        self._sparsified().load_state_dict(state)

    def _sparsified(self) -> SparseTraining:
        if self._sparse is None:
            raise RequestError("nothing is sparsified; wrap the model with compression=GTopK(…)")
        return self._sparse

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        is_synced = self._before_forward(inputs, is_compiling=torch.compiler.is_compiling())
        output = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        if is_synced:
            self._after_forward(output)
        return output

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_forward(self, inputs: tuple[Any, ...], *, is_compiling: bool) -> bool:
        """Whether gradients of this pass are synchronised."""
        if self._sender is not None and self._sender.failure is not None:
            raise self._sender.failure
        if is_compiling:
            self._stop_for_compiled()
        is_synced: bool = torch.is_grad_enabled() and self.require_backward_grad_sync
        if self._backward.has_begun and (is_synced or self._may_change_before_no_sync()):
            self._backward.has_begun = False
            self._begin_step(inputs)
        if is_synced:
            self._begin_pass()
        return is_synced

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_forward(self, output: Any) -> None:
        where = None
        if self._sender is None:  # whose failures say more than this
            where = f"rank {self.process_group.rank()}, step {self._step}"
        self._backward.watch(output, where=where)
        if self._recorder is not None:
            self._recorder.backward()

    def _may_change_before_no_sync(self) -> bool:
        """A reducer remembers what was used without synchronising, so a step begins there.

        Only a static graph's wants its first pass to be a synchronised one, and remembers nothing.
        """
        return torch.is_grad_enabled() and not self.static_graph

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Ranks that have run out of data cannot take part in planning, so it ends here."""
        if self._pilot is not None:
            self._pilot.stop("planning ends where join() begins")
        if self._sender is not None and not kwargs.get("divide_by_initial_world_size", True):
            raise RequestError(
                "with collective, compression, wire_dtype or timeline gradients are divided by the "
                "number of all workers; leave out divide_by_initial_world_size=False"
            )
        hook: JoinHook = super().join_hook(**kwargs)  # type: ignore[no-untyped-call]
        return hook if self._sparse is None else SettlingJoinHook(hook, self._sparse)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """With a hook of the user's, planning ends: it may keep state for each bucket."""
        if "_options" not in self.__dict__:  # torch itself, for its mixed precision
            super().register_comm_hook(state, hook)
            return
        options = self._options
        named = options.collective != "auto"
        if options.wire_dtype or options.compression or options.timeline or named:
            raise RequestError(
                "there is one hook per wrapper, and collective, compression, wire_dtype or "
                "timeline need it; leave them out"
            )
        if self._pilot is not None:
            self._pilot.stop("there is a communication hook")
        super().register_comm_hook(state, hook)
        self._user_hook = (state, hook)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has torch's own buckets and does not plan: threads and groups stay here."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        gone = ("_pilot", "_sender", "_sparse", "_thread", "_recorder", "_unchecked")
        state |= dict.fromkeys((*gone, "_make_group", "_message_group", "_user_hook"))
        state |= {"_options": Options(), "_comm_hooks": [], "_why_unplanned": "this is a copy"}
        if self._sparse is not None:
            logger.warning("the copy of a sparsified wrapper sends all of its gradients")
        return {**state, **self._torch_buckets}

    def _begin_step(self, inputs: tuple[Any, ...]) -> None:
        self._step += 1
        if self._pilot is not None:
            if self._pilot.may_change and is_compiled(self.module):
                self._stop_for_compiled()
            self._pilot.step(batch_size(inputs))
        if self._sender is not None:
            self._sender.step = self._step
        self._check_buckets()

    def _stop_for_compiled(self) -> None:
        self._is_compiled = True
        if self._pilot is not None:
            self._pilot.stop(COMPILED)

    def _begin_pass(self) -> None:
        """Of the step's passes, the one whose gradients travel."""
        if self._pilot is not None:
            self._pilot.begin_pass()
        if self._recorder is not None:
            self._recorder.begin()

    def _check_buckets(self) -> None:
        """Once after each change, when torch has reported its buckets: are they as planned?"""
        if self._unchecked is None or self._step < self._unchecked[0]:
            return
        if not torch_bucket_bytes(self):
            return
        planned = self._unchecked[1]
        self._unchecked = None
        try:
            check_buckets(self, planned)
        except PlanMismatch as difference:
            if not (self._is_compiled or is_compiled(self.module)):
                raise
            logger.warning("compiled code yields gradients in its own order: %s", difference)

    def _new_pilot(self, given: Plan | Recipe | None) -> Pilot:
        # The pilot must not keep the wrapper alive: it has to die before its process group.
        wrapper = weakref.ref(self)

        def adopt(what: Candidate | Literal["one bucket", "torch's own"]) -> None:
            live = wrapper()
            if live is not None:
                live._adopt(what)  # noqa: SLF001

        return Pilot(
            self._options,
            module=self.module,
            parameters=self._planned,
            group=self.process_group,
            make_group=self._make_group or partial(same_ranks, self.process_group),
            adopt=adopt,
            keeps_declared_order=self.find_unused_parameters and not self.static_graph,
            torch_cap_mb=self._torch_cap_mb,
            given=given,
            sparse=self._sparse,
        )

    def _own_group(self) -> dist.ProcessGroup:
        """For messages alone."""
        if self._message_group is None:
            backend = None if self._options.compression is None else "gloo"
            make = self._make_group or partial(same_ranks, self.process_group, backend=backend)
            self._message_group = make()
        return self._message_group

    def _adopt(self, what: Candidate | Literal["one bucket", "torch's own"]) -> None:
        """Other buckets from now on."""
        collectives: list[str] = []
        caps_mb: list[float] = []
        self._unchecked = None
        bytes_of = {name: parameter.nbytes for name, parameter in self._planned.items()}
        if what == "one bucket":
            caps_mb = [sum(bytes_of.values()) / MIB + 1]
        elif isinstance(what, Candidate):
            collectives = [bucket.collective for bucket in what.plan.buckets]
            planned = bucket_bytes(what.plan, bytes_of)
            self._unchecked = (self._step + CHECKED_AFTER_STEPS, planned)
            if not what.is_torchs:
                caps_mb = bucket_caps_mb(what.plan, bytes_of)
        if self.find_unused_parameters and not self.static_graph:
            caps_mb = caps_mb[::-1]  # torch goes through the declaration, then turns it round
        if caps_mb and max(caps_mb) < COMPILABLE_CAP_MB:
            caps_mb = [*caps_mb, COMPILABLE_CAP_MB]  # of a bucket that nothing is left for
        cap_mb = None if caps_mb else self._torch_cap_mb
        swap_reducer(self, self._planned.values(), bucket_cap_mb=cap_mb, caps_mb=caps_mb)
        plan = what.plan.buckets if isinstance(what, Candidate) else ()
        self._hook(collectives, [bucket.tensors for bucket in plan])

    def _hook(self, collectives: list[str], planned: Sequence[Sequence[str]] = ()) -> None:
        """Only where torch's own all-reduce is not all that is wanted."""
        if self._user_hook is not None:
            super().register_comm_hook(*self._user_hook)
            return
        named = self._options.collective
        if not collectives and named not in {"auto", "native"}:
            collectives = [named] * len(self._planned)
        needs_thread = self._sparse is not None or any(name != "native" for name in collectives)
        if not needs_thread and self._options.wire_dtype is None and self._recorder is None:
            self._sender = None
            return
        self._sender = BucketSender(
            self.process_group,
            collectives=collectives,
            thread=self._communication_thread() if needs_thread else None,
            wire_dtype=self._options.wire_dtype,
            recorder=self._recorder,
            sparse=self._planned_buckets(planned),
            finds_unused=self.find_unused_parameters,
        )
        super().register_comm_hook(self._sender, send_bucket)

    def _planned_buckets(self, planned: Sequence[Sequence[str]]) -> PlannedBuckets | None:
        if self._sparse is None:
            return None
        return PlannedBuckets(self._sparse, self._communication_thread(), planned)

    def _communication_thread(self) -> CommunicationThread:
        if self._thread is None:
            self._thread = CommunicationThread(Communicator(self._own_group()))
            # Not at exit: a thread that waits for a dead peer would keep the script from ending.
            weakref.finalize(self, self._thread.close).atexit = False
        return self._thread


def _named(torch_arguments: tuple[Any, ...]) -> dict[str, Any]:
    """What was given to torch by position, by name."""
    names = list(inspect.signature(TorchDDP.__init__).parameters)[2:]
    if len(torch_arguments) > len(names):
        raise TypeError(f"DistributedDataParallel takes at most {len(names) + 1} arguments")
    return dict(zip(names, torch_arguments, strict=False))
