"""Collectives on a process group, by name."""

from functools import lru_cache
from socket import gethostname

import torch
import torch.distributed as dist

from gradweave.collectives import OWNED, build
from gradweave.collectives.program import Program, program
from gradweave.collectives.topology import Topology, flat_topology, topology_of
from gradweave.comm.agree import gather_text, group_device
from gradweave.comm.execute import Scratch, execute, lanes_for
from gradweave.comm.native import NATIVE
from gradweave.comm.rounds import execute_by_rounds
from gradweave.comm.tiers import MakeGroup, fastest_collectives, tier_groups, tiered_all_reduce
from gradweave.costs import Link
from gradweave.errors import CollectiveError, RequestError
from gradweave.words import Operation, parse_spec

# What a transfer costs on Gigabit Ethernet through gloo, until somebody has measured it. Only the
# block size of pipelines depends on it, and only by its square root.
GIGABIT_ETHERNET = Link(latency_s=300e-6, s_per_byte=8e-9)

PROGRAMS_KEPT = 256


class Communicator:
    """Runs collectives in place on flat, contiguous tensors, on every rank in the same order.

    The group must not be used for anything else meanwhile: two threads on one group mix up their
    messages. ``make_group`` is needed for BlueConnect by named tiers only.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        topology: Topology | None = None,
        link: Link = GIGABIT_ETHERNET,
        make_group: MakeGroup = dist.new_group,
    ) -> None:
        self.group = group
        self.topology = topology or host_topology(group)
        self._link, self._make_group = link, make_group
        self._scratch = Scratch()
        self._agreed: set[str] = set()
        self._tiers: list[Communicator] | None = None
        self._tuned: dict[tuple[int, torch.dtype], tuple[str, ...]] = {}

    def run(
        self, operation: Operation, message: torch.Tensor, *, collective: str, root: int = 0
    ) -> None:
        """Sum over all ranks, or copy from ``root`` to all.

        For reduce-scatter and all-gather, what ``block_edges`` gives to block r belongs to rank r.
        """
        if message.dim() != 1 or not message.is_contiguous():
            raise ValueError(f"message must be flat and contiguous, got shape {message.shape}")
        what = f"{operation} by {collective}"
        self._check_agreement(what, message, root)
        if self.group.size() == 1 or message.numel() == 0:
            return
        if collective == "native":
            self._run_native(operation, message, root, what)
        elif tiers := _named_tiers(operation, collective):
            self._run_tiers(message, tiers)
        else:
            self._run_ours(operation, message, collective, root)

    def _run_native(
        self, operation: Operation, message: torch.Tensor, root: int, what: str
    ) -> None:
        try:
            NATIVE[operation](message, self.group, root)
        except RuntimeError as error:
            raise CollectiveError(f"{what} on rank {self.group.rank()} failed: {error}") from error

    def _run_ours(
        self, operation: Operation, message: torch.Tensor, collective: str, root: int
    ) -> None:
        nbytes = message.numel() * message.element_size()
        steps = _program(
            operation,
            collective,
            topology=self.topology,
            nbytes=nbytes,
            link=self._link,
            root=root,
            rank=self.group.rank(),
        )
        if self.group.name() == "nccl":
            execute_by_rounds(steps, message, self.group)
            return
        execute(
            steps,
            message,
            self.group,
            what=f"{operation} by {collective}",
            scratch=self._scratch,
            lanes=lanes_for(message, steps, owned=operation in OWNED),
        )

    def _run_tiers(self, message: torch.Tensor, named: tuple[str, ...]) -> None:
        if self._tiers is None:
            groups = tier_groups(self.topology, self.group.rank(), self._make_group)
            self._tiers = [
                Communicator(group, topology=flat_topology(group.size()), link=self._link)
                for group in groups
            ]
        if named == ("auto",):
            self._run_tuned(message)
            return
        if len(named) != len(self._tiers):
            raise RequestError(
                f"blueconnect:{'/'.join(named)} names {len(named)} tiers, the topology has "
                f"{len(self._tiers)}: {self.topology.factors}"
            )
        tiered_all_reduce(self._tiers, message, named)

    def _run_tuned(self, message: torch.Tensor) -> None:
        """By what was fastest in each tier when a message of this kind was first seen."""
        assert self._tiers is not None
        kind = (message.numel(), message.dtype)
        if kind not in self._tuned:
            self._tuned[kind] = fastest_collectives(self._tiers, message, self.group)
        chosen = self._tuned[kind]
        if "native" in chosen:
            tiered_all_reduce(self._tiers, message, chosen)
        else:  # as one schedule, whose tiers overlap
            self._run_ours("all-reduce", message, f"blueconnect:{'/'.join(chosen)}", root=0)

    def _check_agreement(self, what: str, message: torch.Tensor, root: int) -> None:
        """Before a kind of message travels for the first time: do all ranks mean the same?"""
        meant = f"{what}, {message.dtype}, {message.numel()} elements, root {root}"
        if meant in self._agreed:
            return
        everyone = gather_text(self.group, meant, device=message.device)
        for rank, text in enumerate(everyone):
            if text != everyone[0]:
                raise CollectiveError(
                    f"ranks disagree on what to do: rank 0 has {everyone[0]}; rank {rank} has "
                    f"{text}; call it alike on every rank"
                )
        self._agreed.add(meant)


# Not a method: a cache that knows its communicator would keep it, and its group, alive.
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
    """Ranks grouped by the name of their host."""
    return topology_of(gather_text(group, gethostname(), device=group_device(group)))


def _named_tiers(operation: Operation, collective: str) -> tuple[str, ...]:
    """``blueconnect:native/ring`` and ``:auto`` run on groups of their own; others: empty."""
    name, argument = parse_spec(collective)
    if operation != "all-reduce" or name != "blueconnect" or argument is None:
        return ()
    tiers = tuple(argument.split("/"))
    return tiers if {"native", "auto"} & set(tiers) else ()
