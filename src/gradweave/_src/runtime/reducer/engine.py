"""torch's own reducer as an engine: it is given exactly the buckets of a plan."""

import weakref

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave._src.clocks import clock_for
from gradweave._src.plan import Plan
from gradweave._src.runtime.driving.message_log import MessageLog
from gradweave._src.runtime.reducer.transports import BucketSender, Transports, send_bucket
from gradweave._src.runtime.reporting.step_clock import LastGradient
from gradweave._src.session.candidates import unplanned_lengths
from gradweave._src.session.commands import SimpleBuckets
from gradweave._src.torch_internals import (
    has_reduced_since,
    keeps_declared_order,
    noted_gradients,
    renew_reducer,
    replace_reducer,
    require_finished_reduction,
    torch_bucket_bytes,
    torch_caps_bytes,
)
from gradweave._src.vocabulary import MIB

# torch.compile refuses wrappers whose largest cap is smaller.
COMPILABLE_BYTES = 1 * MIB


class ReducerEngine:
    """Gives a live wrapper other buckets, and tells whether its gradients were averaged."""

    def __init__(
        self, ddp: TorchDDP, parameters: dict[str, nn.Parameter], transports: Transports
    ) -> None:
        self.plan: Plan | None = None  # None while torch's own buckets are sent
        self.sender: BucketSender | None = None  # None: torch sends by itself
        self.message_log: MessageLog | None = None  # while messages are noted
        self._ddp = weakref.ref(ddp)  # which must die before its process group
        self._parameters, self._transports = parameters, transports
        self.torch_cap_bytes: int = ddp.bucket_bytes_cap
        # As the user gave them; ``install`` lets the wrapper's own follow the plan.
        self._torch_caps_bytes = torch_caps_bytes(ddp)
        self._noted: list[int] = []
        self._installed: list[list[str]] = []  # names by bucket; empty while torch's own are there
        self._torchs_messages = 0  # how many torch sends by itself, once it says so

    def has_reduced(self) -> bool:
        """Return whether there was a synchronised backward pass since this was asked last."""
        has_reduced, self._noted = has_reduced_since(self._live, self._noted)
        return has_reduced

    @property
    def uses_own_group(self) -> bool:
        """Whether some buckets of the plan do not travel on the user's group."""
        plan = self.plan
        return plan is not None and any(bucket.collective != "native" for bucket in plan.buckets)

    def install(
        self,
        buckets: Plan | SimpleBuckets,
        order: tuple[str, ...] = (),
        *,
        notes_messages: bool = False,
    ) -> None:
        """Send these buckets from the next pass on; torch's own follow ``order``, if known."""
        require_finished_reduction(self._live)
        is_untouched = not self._installed and self.sender is None
        if is_untouched and buckets is SimpleBuckets.ORIGINAL and not notes_messages:
            return  # torch's are there, and another first pass is nothing to ask for
        self._install(buckets, order, notes_messages=notes_messages)

    def start_anew(self) -> None:
        """Leave buckets to torch as in a new wrapper, whatever this rank has sent before."""
        ddp = self._live
        is_declared = keeps_declared_order(ddp)
        names = self._names(SimpleBuckets.ORIGINAL if is_declared else SimpleBuckets.ONE, ())
        renew_reducer(ddp, self._parameters, names, caps_bytes=self._torch_caps_bytes)
        ddp.bucket_bytes_cap = self.torch_cap_bytes
        self._noted = []
        self.message_log = self.sender = None
        self.leave_to_torch()

    def leave_to_torch(self) -> None:
        """Note that torch has made, or will make, other buckets by itself."""
        self.plan, self._installed, self._torchs_messages = None, [], 0

    def install_again(self) -> None:
        """Send the plan's buckets where torch would make others, as for another process group."""
        assert self.plan is not None
        self._install(self.plan, (), notes_messages=False)

    def _install(
        self, buckets: Plan | SimpleBuckets, order: tuple[str, ...], *, notes_messages: bool
    ) -> None:
        ddp = self._live
        self.plan = plan = buckets if isinstance(buckets, Plan) else None
        self._installed = self._names(buckets, order)
        replace_reducer(ddp, self._parameters, self._installed)
        ddp.bucket_bytes_cap = self.torch_cap_bytes if plan is None else self._largest(plan)
        self._noted = []
        self.message_log = MessageLog(clock_for(ddp.device)) if notes_messages else None
        self.register_sender(plan)

    @property
    def messages(self) -> int | None:
        """How many messages a step sends; None while torch does not say what buckets it has."""
        if self._installed:
            return len(self._installed)
        if not self._torchs_messages:
            self._torchs_messages = len(torch_bucket_bytes(self._live))
        return self._torchs_messages or None

    def buckets(self, order: tuple[str, ...]) -> list[list[str]] | None:
        """Return the names that travel together now; torch's own buckets follow ``order``.

        Return None where torch says that it has others: those of several types, say.
        """
        if self._installed:
            return self._installed
        names = self._names(SimpleBuckets.ORIGINAL, order)
        sizes = [sum(self._parameters[name].nbytes for name in bucket) for bucket in names]
        return names if sorted(sizes) == sorted(torch_bucket_bytes(self._live)) else None

    def look_again(self, last_gradient: LastGradient) -> None:
        """Expect the end of backward at the gradient that came last in the previous pass."""
        names = [name for bucket in self._installed for name in bucket] or list(self._parameters)
        in_order = [self._parameters[name] for name in names]
        last_gradient.look_again(noted_gradients(self._live), in_order)

    def stop_noting(self) -> None:
        """Note nothing any more; the hook stays, for only other buckets would remove it."""
        self.message_log = None
        if self.sender is not None:
            self.sender.log = None

    def register_sender(self, plan: Plan | None = None) -> None:
        """Have a new reducer's buckets travel as the plan says."""
        self.sender = self._transports.sender_for(plan, self.message_log)
        if self.sender is not None:
            # torch's own: the wrapper's takes hooks of the user's, which end planning.
            TorchDDP.register_comm_hook(self._live, self.sender, send_bucket)

    def _names(self, buckets: Plan | SimpleBuckets, order: tuple[str, ...]) -> list[list[str]]:
        with_elements = {name for name, p in self._parameters.items() if p.numel()}
        if isinstance(buckets, Plan):
            return [list(bucket.tensors) for bucket in buckets.buckets]
        backwards = [name for name in reversed(self._parameters) if name in with_elements]
        if buckets is SimpleBuckets.ONE:
            return [backwards]
        first = [name for name in order if name in with_elements]
        names = first + [name for name in backwards if name not in set(first)]
        lengths = unplanned_lengths(
            [self._parameters[name].nbytes for name in names],
            caps_bytes=self._torch_caps_bytes,
            is_declared=keeps_declared_order(self._live),
        )
        left = iter(names)
        return [[next(left) for _ in range(length)] for length in lengths]

    def _largest(self, plan: Plan) -> int:
        """Return the bytes by which torch.compile is to split its graph."""
        sizes = (sum(self._parameters[n].nbytes for n in b.tensors) for b in plan.buckets)
        return max(COMPILABLE_BYTES, *sizes)

    @property
    def _live(self) -> TorchDDP:
        ddp = self._ddp()
        assert ddp is not None, "the wrapper calls its engine"
        return ddp
