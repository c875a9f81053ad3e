"""Collectives on a process group, by name."""

from collections.abc import Iterable
from functools import lru_cache
from socket import gethostname
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
import torch.distributed as dist

from gradweave._src.collectives import OWNED, TIERS, build
from gradweave._src.collectives.program import Program, program
from gradweave._src.collectives.topology import Topology, flat_topology, topology_of
from gradweave._src.comm.channel import Call
from gradweave._src.comm.execute import Payload, execute
from gradweave._src.comm.groups import MakeGroup, subgroups_of
from gradweave._src.comm.native import NATIVE
from gradweave._src.comm.rounded_slices import RoundingMemory, cut_rounded
from gradweave._src.comm.rounding import WIRE_FORMATS, WireFormat
from gradweave._src.comm.rounds import execute_by_rounds
from gradweave._src.comm.same_calls import SameCalls
from gradweave._src.comm.slices import Scratch, cut, slices_for
from gradweave._src.comm.small_messages import gather_text
from gradweave._src.comm.tiers import fastest_collectives, tier_groups, tiered_all_reduce
from gradweave._src.costs import GIGABIT_ETHERNET, Link
from gradweave._src.errors import RequestError
from gradweave._src.torch_internals import backend_for
from gradweave._src.travel import Travel, parse_travel
from gradweave._src.vocabulary import Operation, parse_spec, parse_tiers

PROGRAMS_KEPT = 256
AUTO = ("auto",)

_topologies: WeakKeyDictionary[dist.ProcessGroup, Topology] = WeakKeyDictionary()


class Communicator:
    """Runs collectives in place on flat, contiguous tensors, on every rank in the same order.

    The group must not be used for anything else meanwhile: two threads on one group mix up their
    messages. BlueConnect by named tiers makes process groups when it is first used: do that on the
    thread that makes your other groups, or give a ``make_group``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        topology: Topology | None = None,
        link: Link = GIGABIT_ETHERNET,
        make_group: MakeGroup | None = None,
    ) -> None:
        self.group = group
        self.topology = topology or host_topology(group)
        self._link = link
        self._make_group = make_group or subgroups_of(group)
        self._scratch, self._rounding_memory = Scratch(), RoundingMemory()
        self._same_calls = SameCalls(group)
        self._layout = crc32(repr((self.topology, link)).encode())
        self._calls = 0
        self._tiers: list[Communicator] | None = None
        self._tuned: dict[tuple[int, torch.dtype], tuple[str, ...]] = {}

    @torch.no_grad()
    def run(
        self,
        operation: Operation,
        message: torch.Tensor,
        *,
        collective: str,
        root: int = 0,
        dropped: torch.Tensor | None = None,
    ) -> None:
        """Carry out the operation in place: sum over all ranks, or copy from ``root`` to all.

        For reduce-scatter and all-gather, what ``block_edges`` gives to block r belongs to rank r.
        An all-reduce of float32 may be rounded on the wire, as by ``ring+int8``; what this rank's
        own roundings drop of the sum is then added to ``dropped``.
        """
        if message.dim() != 1 or not message.is_contiguous():
            raise ValueError(f"message must be flat and contiguous, got shape {message.shape}")
        what = f"{operation} by {collective}"
        kind = f"{what}, {message.dtype}, {message.numel()} elements, root {root}"
        call = Call(self.group, what, kind, self._calls)
        self._calls += 1
        travel = parse_travel(collective)
        tiers = _named_tiers(operation, travel.collective, self.topology)
        wire_format = _wire_format(what, operation, travel, message, is_tiered=bool(tiers))
        if travel.collective != "native" and not tiers:
            steps = self._program(operation, travel.collective, message, root)
        layout = f", layout {self._layout:x}"
        self._same_calls.check(call, circumstances=layout)
        if self.group.size() == 1 or message.numel() == 0:
            return
        if travel.collective == "native":
            self._run_native(operation, message, call, root)
        elif tiers:
            self._run_tiers(message, tiers, call)
        elif wire_format is not None:
            self._run_rounded(message, call, steps, wire_format, dropped)
        else:
            self._run_ours(operation, message, call, steps)

    def _run_native(
        self, operation: Operation, message: torch.Tensor, call: Call, root: int
    ) -> None:
        try:
            NATIVE[operation](message, self.group, root)
        except RuntimeError as error:
            raise call.failed("the backend's own collective", error) from error

    def _run_ours(
        self, operation: Operation, message: torch.Tensor, call: Call, steps: Program
    ) -> None:
        slices = self._slices(message.nbytes, steps, message.device, owned=operation in OWNED)
        payloads = cut(message, steps, scratch=self._scratch, slices=slices)
        self._execute(steps, payloads, call, message.device, count=slices)

    def _run_rounded(
        self,
        message: torch.Tensor,
        call: Call,
        steps: Program,
        wire_format: WireFormat,
        dropped: torch.Tensor | None,
    ) -> None:
        if dropped is not None and steps.sums_copies:
            raise RequestError(
                f"{call.what}: several ranks make the same sums, so what is dropped would count "
                "twice; take ring"
            )
        nbytes = wire_format.nbytes(message.numel())
        slices = self._slices(nbytes, steps, message.device, owned=False)
        payloads = cut_rounded(
            message,
            steps,
            wire_format=wire_format,
            memory=self._rounding_memory,
            dropped=dropped,
            slices=slices,
        )
        self._execute(steps, payloads, call, message.device, count=slices)

    def _slices(self, nbytes: int, steps: Program, device: torch.device, *, owned: bool) -> int:
        return slices_for(nbytes, steps, owned=owned) if self._has_tags(device) else 1

    def _has_tags(self, device: torch.device) -> bool:
        """Return whether the device's backend tells messages between two ranks apart by tags."""
        return backend_for(self.group, device) == "gloo"

    def _execute(
        self,
        steps: Program,
        payloads: Iterable[Payload],
        call: Call,
        device: torch.device,
        *,
        count: int,
    ) -> None:
        if self._has_tags(device):
            execute(steps, payloads, call, count=count)
            return
        for payload in payloads:
            execute_by_rounds(steps, payload, call)

    def _run_tiers(self, message: torch.Tensor, named: tuple[str, ...], call: Call) -> None:
        if self._tiers is None:
            groups = tier_groups(self.topology, self.group.rank(), self._make_group)
            self._tiers = [
                Communicator(group, topology=flat_topology(group.size()), link=self._link)
                for group in groups
            ]
        if named == AUTO:
            kind = (message.numel(), message.dtype)
            if kind not in self._tuned:
                self._tuned[kind] = fastest_collectives(self._tiers, message, self.group)
            named = self._tuned[kind]
        if "native" in named:
            tiered_all_reduce(self._tiers, message, named)
            return
        # All tiers are one schedule here, so they overlap.
        steps = self._program("all-reduce", f"blueconnect:{'/'.join(named)}", message, root=0)
        self._run_ours("all-reduce", message, call, steps)

    def _program(
        self, operation: Operation, collective: str, message: torch.Tensor, root: int
    ) -> Program:
        return _program(
            operation,
            collective,
            topology=self.topology,
            nbytes=message.numel() * message.element_size(),
            link=self._link,
            root=root,
            rank=self.group.rank(),
        )


# Not a method: the cache would keep the communicator, and its group, alive.
@lru_cache(maxsize=PROGRAMS_KEPT)
def _program(
    operation: Operation,
    collective: str,
    *,
    topology: Topology,
    nbytes: int,
    link: Link,
    root: int,
    rank: int,
) -> Program:
    schedule = build(operation, collective, topology=topology, nbytes=nbytes, link=link, root=root)
    return program(schedule, rank)


def host_topology(group: dist.ProcessGroup) -> Topology:
    """Group a group's ranks by the name of their host.

    All ranks call it together. It sends once for each group, as the message grows with the ranks.
    """
    if group not in _topologies:
        hosts = gather_text(group, gethostname())
        _topologies[group] = topology_of(hosts)
    return _topologies[group]


def _wire_format(
    what: str, operation: Operation, travel: Travel, message: torch.Tensor, *, is_tiered: bool
) -> WireFormat | None:
    """Return what the message is rounded to on the wire; None where it travels as it is."""
    if travel.compression is None or travel.compression.rounding is None:
        return None
    if operation != "all-reduce" or travel.collective == "native" or is_tiered:
        raise RequestError(f"{what}: only all-reduces by schedules of ours are rounded")
    if message.dtype is not torch.float32:
        raise RequestError(f"{what}: only float32 is rounded, got {message.dtype}")
    return WIRE_FORMATS[travel.compression.rounding]


def _named_tiers(operation: Operation, collective: str, topology: Topology) -> tuple[str, ...]:
    """Return the names in ``blueconnect:native/ring`` or ``:auto``, whose tiers need own groups."""
    name, argument = parse_spec(collective)
    if operation != "all-reduce" or name != "blueconnect" or argument is None:
        return ()
    if argument == AUTO[0]:
        return AUTO
    tiers = parse_tiers(argument, len(topology.factors))
    known = {"native", *TIERS}
    if len(tiers) != len(topology.factors) or not set(tiers) <= known:
        raise RequestError(
            f"{collective}: expected auto, or {len(topology.factors)} of "
            f"{', '.join(sorted(known))}, separated by slashes, for tiers of {topology.factors}"
        )
    return tiers if "native" in tiers else ()
