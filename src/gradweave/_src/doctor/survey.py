"""Finding out how ranks reach each other. Every rank does the same, so all know the same."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from gradweave._src.doctor.checkup import Flow, RankFacts, Speed, Unreached, hosts_of
from gradweave._src.doctor.meeting import Meeting
from gradweave._src.doctor.probe import Line, Listener, Unanswered, read_alone, read_together
from gradweave._src.doctor.rounds import Pair, rounds_alone, rounds_together
from gradweave._src.doctor.slowness import doubtful_pairs, is_doubtful_together

# A rank that takes longer to answer a message of some kilobytes is not there.
MOST_PATIENCE_S = 10.0
# What seems slow is looked at again, and the best counts: chance makes a link seem slower than it
# is, never faster.
LOOKS_AGAIN = 3
MOST_DOUBTFUL = 24
MOST_CALLERS = 32


@dataclass(slots=True)
class Survey:
    """What is known so far; the same on every rank."""

    unreached: dict[Pair, Unreached] = field(default_factory=dict)
    alone: dict[Pair, Speed] = field(default_factory=dict)
    together: dict[Pair, Flow] = field(default_factory=dict)


class _Report(Struct):
    """What one rank has measured since the last report."""

    speeds: list[Speed] = []
    flows: list[Flow] = []
    unreached: list[Unreached] = []


def survey(
    meeting: Meeting,
    facts: Mapping[int, RankFacts],
    found: Survey,
    *,
    token: bytes,
    timeout_s: float,
    advance: Callable[[], None] = lambda: None,
) -> None:
    """Fill in ``found``, which keeps what is known so far when a rank is Lost on the way."""
    own = facts[meeting.rank]
    hosts = hosts_of(facts.values())
    ends = [host.first.rank for host in hosts]
    inside = [(host.ranks[0].rank, host.ranks[1].rank) for host in hosts if host.ranks[1:]]
    with ExitStack() as stack:
        listener = _listener(own, token)
        if listener is not None:
            stack.callback(listener.close)
        ports = meeting.gather("opening ports", listener.port if listener else 0, int)
        tour = _Tour(meeting, facts, found, advance)
        stack.callback(tour.close)
        tour.connect(ports, token=token, timeout_s=min(MOST_PATIENCE_S, timeout_s / 2))
        tour.alone("measuring inside hosts", [inside, [(b, a) for a, b in inside]])
        tour.alone("measuring pairs of hosts", rounds_alone(ends))
        tour.alone_again(ends)
        tour.together(rounds_together(ends))


def _listener(own: RankFacts, token: bytes) -> Listener | None:
    """Open the rank's listener; None where the rank has no address, or one that is not there."""
    if own.address is None:
        return None
    try:
        return Listener(own.address, rank=own.rank, token=token)
    except OSError:
        return None


@dataclass(slots=True)
class _Tour:
    """One rank's part in the measurements."""

    meeting: Meeting
    facts: Mapping[int, RankFacts]
    found: Survey
    advance: Callable[[], None]
    lines: dict[int, Line] = field(default_factory=dict)

    def close(self) -> None:
        for line in self.lines.values():
            line.close()

    def connect(self, ports: Mapping[int, int], *, token: bytes, timeout_s: float) -> None:
        """Connect every rank to every other, as gloo will."""
        own = _Report()

        def call(peer: int) -> None:
            address = self.facts[peer].address
            if address is None or not ports[peer]:
                own.unreached.append(self._unreached(peer, "connecting", "it cannot listen there"))
                return
            try:
                self.lines[peer] = Line(
                    address, ports[peer], rank=peer, token=token, timeout_s=timeout_s
                )
            except Unanswered as error:
                own.unreached.append(self._unreached(peer, "connecting", str(error)))

        others = [rank for rank in self.meeting.ranks if rank != self.meeting.rank]
        with ThreadPoolExecutor(MOST_CALLERS) as callers:
            list(callers.map(call, others))
        self._share("connecting", own)

    def alone(self, doing: str, rounds: Sequence[Sequence[Pair]]) -> None:
        self._go_through(doing, rounds, self._read_alone)

    def alone_again(self, ends: Sequence[int]) -> None:
        for _ in range(LOOKS_AGAIN):
            rates = {
                pair: speed.bytes_per_s
                for pair, speed in self.found.alone.items()
                if set(pair) <= set(ends)
            }
            doubtful = doubtful_pairs(rates)[:MOST_DOUBTFUL]
            self.alone("looking again at what seems slow", [[pair] for pair in doubtful])

    def together(self, rounds: Sequence[Sequence[Pair]]) -> None:
        for _ in range(1 + LOOKS_AGAIN):
            self._go_through("measuring all at once", rounds, self._read_together)
            rounds = [turn for turn in rounds if any(map(self._is_doubtful_together, turn))]

    def _go_through(
        self,
        doing: str,
        rounds: Sequence[Sequence[Pair]],
        read: Callable[[int, _Report], None],
    ) -> None:
        turns = [turn for turn in rounds if turn]
        if not turns:
            return
        own = _Report()
        for turn in turns:
            self.meeting.together(doing)
            for sender, receiver in turn:
                if sender != self.meeting.rank or receiver not in self.lines:
                    continue
                try:
                    read(receiver, own)
                except Unanswered as error:
                    self.lines.pop(receiver).close()
                    own.unreached.append(self._unreached(receiver, "sending", str(error)))
            self.advance()
        self._share(doing, own)

    def _share(self, doing: str, own: _Report) -> None:
        for report in self.meeting.gather(doing, own, _Report).values():
            for one in report.unreached:
                self.found.unreached[one.sender, one.receiver] = one
            for speed in report.speeds:
                pair = speed.sender, speed.receiver
                self.found.alone[pair] = _better(self.found.alone.get(pair), speed)
            for flow in report.flows:
                known = self.found.together.get((flow.sender, flow.receiver))
                if known is None or flow.bytes_per_s > known.bytes_per_s:
                    self.found.together[flow.sender, flow.receiver] = flow

    def _read_alone(self, receiver: int, own: _Report) -> None:
        reading = read_alone(self.lines[receiver])
        own.speeds.append(
            Speed(
                sender=self.meeting.rank,
                receiver=receiver,
                round_trip_s=reading.round_trip_s,
                bytes_per_s=reading.bytes_per_s,
                core_share=reading.core_share,
            )
        )

    def _read_together(self, receiver: int, own: _Report) -> None:
        alone = self.found.alone.get((self.meeting.rank, receiver))
        if alone is None:
            return
        bytes_per_s = read_together(
            self.lines[receiver],
            round_trip_s=alone.round_trip_s,
            expected_bytes_per_s=alone.bytes_per_s,
        )
        own.flows.append(Flow(sender=self.meeting.rank, receiver=receiver, bytes_per_s=bytes_per_s))

    def _is_doubtful_together(self, pair: Pair) -> bool:
        flow, alone = self.found.together.get(pair), self.found.alone.get(pair)
        if flow is None or alone is None:
            return False
        return is_doubtful_together(flow.bytes_per_s / alone.bytes_per_s)

    def _unreached(
        self, peer: int, stage: Literal["connecting", "sending"], reason: str
    ) -> Unreached:
        return Unreached(
            sender=self.meeting.rank,
            receiver=peer,
            address=self.facts[peer].address or "",
            stage=stage,
            reason=reason,
        )


def _better(known: Speed | None, speed: Speed) -> Speed:
    """Return the faster of both, with the shorter round trip."""
    if known is None:
        return speed
    faster = max(known, speed, key=lambda one: one.bytes_per_s)
    return replace(faster, round_trip_s=min(known.round_trip_s, speed.round_trip_s))
