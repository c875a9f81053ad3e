"""What each rank of ``gradweave doctor`` runs: ``python -m …checkup_job FILE``.

It does without torch's default group, which is made only where nothing is wrong. Ranks meet in a
store; when all of them reach each other, gloo's group is made for what only it can tell.
"""

import os
import platform
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta

import torch
from msgspec import Struct
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

import gradweave
from gradweave._src.bench.checkup import CheckupAnswer, CheckupQuestion, place_in
from gradweave._src.bench.jobs import answer, asked
from gradweave._src.comm.communicator import Communicator
from gradweave._src.doctor.checkup import AllReduce, Checkup, RankFacts
from gradweave._src.doctor.meeting import Lost, Meeting, assemble
from gradweave._src.doctor.store_in_time import StoreInTime
from gradweave._src.doctor.surroundings import rank_facts
from gradweave._src.doctor.survey import Survey, survey
from gradweave._src.errors import CollectiveError, RequestError
from gradweave._src.in_time import in_time
from gradweave._src.measure.alignment import clock_offset_s
from gradweave._src.measure.collectives import bus_factor, time_collectives
from gradweave._src.torch_internals import unlisted_gloo_group
from gradweave._src.vocabulary import KIB, MIB, printable

# All-reduces are long enough for their slope to hold for 100 MB, and soon done on slow networks.
ALL_REDUCE_S = 0.1
LEAST_BYTES, MOST_BYTES = 64 * KIB, 16 * MIB
SIZE_FACTOR = 8
REPEATS = 3


def in_environment(
    question: CheckupQuestion,
    environment: Mapping[str, str],
    *,
    advance: Callable[[], None] = lambda: None,
) -> Checkup | None:
    """Look over the ranks that the environment describes; rank 0 has the answer."""
    place = place_in(environment)
    facts = rank_facts(
        environment, rank=place.rank, threads=torch.get_num_threads(), versions=_versions()
    )
    try:
        store = meeting_store(environment, question.timeout_s)
    except RuntimeError as error:
        reason = printable(str(error).partition("\n")[0])
        if place.rank == 0:
            raise RequestError(f"rank 0 has no store at {place}: {reason}") from None
        _tell(
            f"{_who(facts)} does not reach the meeting point {place} within "
            f"{question.timeout_s:g} s ({reason}): check that MASTER_ADDR is an address of rank "
            f"0's host which this host reaches (ping {place.address}), and that no firewall closes "
            f"port {place.port}"
        )
        return None
    return check_up(
        store,
        facts,
        world_size=place.world_size,
        where=str(place),
        question=question,
        advance=advance,
    )


def check_up(
    store: Store,
    facts: RankFacts,
    *,
    world_size: int,
    where: str,
    question: CheckupQuestion,
    advance: Callable[[], None] = lambda: None,
) -> Checkup | None:
    """Check up the ranks that come to the store, a new one, and return the result on rank 0."""
    began_s = time.perf_counter()
    timeout_s = question.timeout_s
    board = StoreInTime(store, timeout_s=timeout_s)
    try:
        present = assemble(board, rank=facts.rank, world_size=world_size, timeout_s=timeout_s)
    except RuntimeError:
        _tell(f"{_who(facts)} has not heard from rank 0 at {where}; see what rank 0 says")
        return None
    if present is None:
        _tell(f"{_who(facts)} came to {where} after rank 0 had waited {timeout_s:g} s; start again")
        return None
    meeting = Meeting(board, rank=facts.rank, ranks=present, timeout_s=timeout_s)
    found = _Found(facts)
    try:
        _find_out(meeting, store, found, timeout_s, advance if facts.rank == 0 else lambda: None)
    except Lost as error:
        found.lost = error
    with suppress(RuntimeError):  # where the store does not answer any more
        meeting.leave()
    if facts.rank != 0:
        return None
    meeting.wait_until_left(but=found.lost.ranks if found.lost else ())
    return found.checkup(
        where, world_size=world_size, timeout_s=timeout_s, took_s=time.perf_counter() - began_s
    )


def meeting_store(environment: Mapping[str, str], timeout_s: float) -> Store:
    """Return the store of torchrun's agent or one of rank 0's; nobody is waited for."""
    place = place_in(environment)
    of_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        place.address,
        place.port,
        is_master=place.rank == 0 and not of_agent,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,
    )
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"gradweave doctor {attempt}", store)


class _Found:
    """What is known so far, also when a rank is lost on the way."""

    def __init__(self, own: RankFacts) -> None:
        self.own = own
        self.facts = {own.rank: own}
        self.survey = Survey()
        self.clock_offsets_s: dict[int, float] = {}
        self.all_reduces: list[AllReduce] = []
        self.gloo_problem: str | None = None
        self.lost: Lost | None = None

    def checkup(self, where: str, *, world_size: int, timeout_s: float, took_s: float) -> Checkup:
        return Checkup(
            meeting_point=where,
            world_size=world_size,
            timeout_s=timeout_s,
            ranks=tuple(self.facts.values()),
            unreached=tuple(self.survey.unreached.values()),
            alone=tuple(self.survey.alone.values()),
            together=tuple(self.survey.together.values()),
            clock_offsets_s=self.clock_offsets_s,
            all_reduces=tuple(self.all_reduces),
            gloo_problem=self.gloo_problem,
            lost=self.lost.ranks if self.lost else (),
            lost_while=self.lost.doing if self.lost else "",
            took_s=took_s,
        )


def _find_out(
    meeting: Meeting,
    store: Store,
    found: _Found,
    timeout_s: float,
    advance: Callable[[], None],
) -> None:
    found.facts = meeting.gather("telling of themselves", found.own, RankFacts)
    tokens = meeting.gather("telling of themselves", secrets.token_hex(8), str)
    token = tokens[meeting.ranks[0]].encode()
    survey(meeting, found.facts, found.survey, token=token, timeout_s=timeout_s, advance=advance)
    if found.survey.unreached or len(meeting.ranks) == 1:
        return
    try:
        own = in_time(
            lambda: _asked_gloo(meeting, store, found.survey, timeout_s), limit_s=2 * timeout_s
        )
    except TimeoutError as error:
        own = _FromGloo(problem=str(error))
    # A rank on which gloo has failed early waits for others, on which it fails when time is up.
    everyone = meeting.gather("asking gloo", own, _FromGloo, timeout_s=3 * timeout_s)
    found.gloo_problem = next((one.problem for one in everyone.values() if one.problem), None)
    if found.gloo_problem is None:
        found.clock_offsets_s = {rank: one.clock_offset_s for rank, one in everyone.items()}
        found.all_reduces = own.all_reduces


class _FromGloo(Struct):
    """What only a group of gloo's can tell, or why there is none."""

    problem: str | None = None
    clock_offset_s: float = 0.0
    all_reduces: list[AllReduce] = []


def _asked_gloo(meeting: Meeting, store: Store, known: Survey, timeout_s: float) -> _FromGloo:
    """Return what a group of gloo's tells; where a message fails on one rank, it fails on all."""
    own = _FromGloo()
    try:
        group = unlisted_gloo_group(
            PrefixStore("gloo", store),
            rank=meeting.ranks.index(meeting.rank),
            ranks=len(meeting.ranks),
            timeout=timedelta(seconds=timeout_s),
        )
        own.clock_offset_s = clock_offset_s(group, now_s=time.time)
        own.all_reduces = _all_reduces(Communicator(group), known)
    except (RuntimeError, CollectiveError) as error:
        own.problem = printable(str(error).partition("\n")[0])
    return own


def _all_reduces(communicator: Communicator, known: Survey) -> list[AllReduce]:
    """Time ever larger all-reduces, until one takes too long for bursts to matter."""

    def timed(nbytes: int) -> AllReduce:
        (timing,) = time_collectives(
            communicator,
            operation="all-reduce",
            algorithms=["native"],
            nbytes=nbytes,
            repeats=REPEATS,
        )
        return AllReduce(nbytes=nbytes, seconds=timing.median_s)

    nbytes = _first_bytes(known, communicator.group.size())
    found = [timed(nbytes // SIZE_FACTOR // 4 * 4), timed(nbytes)]
    while (last := found[-1]).seconds < ALL_REDUCE_S / 2 and last.nbytes < MOST_BYTES:
        wanted_bytes = max(2 * last.nbytes, int(last.nbytes * ALL_REDUCE_S / last.seconds))
        found.append(timed(min(MOST_BYTES, SIZE_FACTOR * last.nbytes, wanted_bytes) // 4 * 4))
    return found


def _first_bytes(known: Survey, workers: int) -> int:
    """Return the bytes that a ring over the slowest pair could reduce in ``ALL_REDUCE_S``."""
    together = [flow.bytes_per_s for flow in known.together.values()]
    alone = [speed.bytes_per_s for speed in known.alone.values()]
    ideal_bytes = min(together + alone) * ALL_REDUCE_S / bus_factor("all-reduce", workers)
    return min(MOST_BYTES, max(LEAST_BYTES, int(ideal_bytes))) // 4 * 4


def _versions() -> dict[str, str]:
    found = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "gradweave": gradweave.__version__,
    }
    if torch.version.cuda is not None and torch.cuda.is_available():
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found


def _who(facts: RankFacts) -> str:
    return f"gradweave doctor: rank {facts.rank} on {facts.host}"


def _tell(line: str) -> None:
    """Print a line on this rank itself, for rank 0 knows only that this one is missing."""
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    checked = in_environment(
        asked(CheckupQuestion), os.environ, advance=lambda: answer(CheckupAnswer())
    )
    if checked is not None:
        answer(CheckupAnswer(checkup=checked))
