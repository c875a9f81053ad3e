"""Ranks of a self-test as processes: started here, watched, and ended when they take too long."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from gradweave._src.errors import CollectiveError
from gradweave._src.selftest.on_rank import notes_in
from gradweave._src.selftest.results import Check, Noted, Selftest

# Where a rank that was started here finds the folder in which it meets the others.
FOLDER = "GRADWEAVE_SELFTEST_FOLDER"
MEETING, NOTES = "meeting", "notes"
POLLED_EVERY_S = 0.1
# When one has failed, others may still have something to say.
ENDED_WITHIN_S = 5.0


def run_ranks(command: Sequence[str], ranks: int, *, most_s: float) -> Selftest:
    """Run the command as so many ranks and return what they found.

    A rank that crashes or hangs fails the check that it was in; those after it are not tried.
    """
    with tempfile.TemporaryDirectory(prefix="gradweave-selftest-") as name, ExitStack() as opened:
        folder = Path(name)
        said = [opened.enter_context((folder / f"rank-{r}").open("w+b")) for r in range(ranks)]
        processes = [
            subprocess.Popen(  # noqa: S603 our own command
                command,
                env=_environment(os.environ, folder, rank, ranks),
                stdin=subprocess.DEVNULL,
                stdout=said[rank],
                stderr=said[rank],
            )
            for rank in range(ranks)
        ]
        opened.callback(_end, processes)
        trouble = _watch(processes, most_s)
        last_words = [
            (folder / f"rank-{rank}").read_text(errors="replace") for rank in range(ranks)
        ]
        return told(notes_in(folder / NOTES), trouble, last_words)


def told(notes: Sequence[Noted], trouble: str | None, last_words: Sequence[str]) -> Selftest:
    """Put together what rank 0 has noted, and why it noted no more."""
    surroundings = next((one.surroundings for one in notes if one.surroundings), None)
    lines = [text.strip().rpartition("\n")[2] for text in last_words if text.strip()]
    if surroundings is None:
        reason = "; ".join([trouble or "nothing was noted", *lines[:1]])
        raise CollectiveError(f"the ranks have not begun: {reason}")
    checks = [one.ended for one in notes if one.ended]
    began = [one.began for one in notes if one.began]
    if trouble is not None and len(began) > len(checks):
        line = "; ".join([trouble, *lines[:1]])
        checks.append(Check(name=began[-1], outcome="failed", line=line))
    return Selftest(surroundings=surroundings, checks=tuple(checks))


def _environment(ours: Mapping[str, str], folder: Path, rank: int, ranks: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": "1",
        **ours,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        FOLDER: str(folder),
    }


def _watch(processes: Sequence["subprocess.Popen[bytes]"], most_s: float) -> str | None:
    """Wait for all of them; say in words what went wrong, if something did."""
    deadline_s = time.monotonic() + most_s
    while any(process.poll() is None for process in processes):
        failed = [rank for rank, one in enumerate(processes) if one.poll() not in {None, 0}]
        if failed:
            _wait_for_others(processes)
            break
        if time.monotonic() > deadline_s:
            stuck = [str(rank) for rank, one in enumerate(processes) if one.poll() is None]
            return f"rank {', '.join(stuck)} had not ended after {most_s:g} s"
        time.sleep(POLLED_EVERY_S)
    codes = {rank: one.poll() for rank, one in enumerate(processes)}
    failed_codes = {rank: code for rank, code in codes.items() if code}
    if not failed_codes:
        return None
    rank, code = next(iter(failed_codes.items()))
    return f"rank {rank} ended with exit code {code}"


def _wait_for_others(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    deadline_s = time.monotonic() + ENDED_WITHIN_S
    while any(one.poll() is None for one in processes) and time.monotonic() < deadline_s:
        time.sleep(POLLED_EVERY_S)


def _end(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


def command_of(device: str, imports: Sequence[str]) -> list[str]:
    """Return how a rank of this self-test is started."""
    modules = [word for name in imports for word in ("--import", name)]
    return [sys.executable, "-m", "gradweave", "selftest", "--device", device, *modules]
