"""What each rank does: one check after the other, and all ranks agree on how each ended."""

import gc
import logging
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

import gradweave
from gradweave._src.comm.groups import world_group
from gradweave._src.comm.small_messages import gather_text
from gradweave._src.selftest.checks import CHECKS, Place, Skipped
from gradweave._src.selftest.devices import backend_of, device_name, device_of_rank
from gradweave._src.selftest.results import Check, Noted, Outcome, Surroundings
from gradweave._src.vocabulary import printable

# A message between ranks of one machine; the first of a device takes longest.
MESSAGE_WITHIN = timedelta(seconds=120)
HOST = torch.device("cpu")
# What each rank says of a check begins with one of these; the worst of all ranks counts.
WORST_FIRST: tuple[Outcome, ...] = ("failed", "skipped", "passed")


def run_checks(kind: str, note: Callable[[Noted], None], *, meeting: Path | None = None) -> None:
    """Run everything in the group that the environment describes; ``note`` is rank 0's to use.

    Ranks meet in a file, or without one where torchrun says.
    """
    logging.getLogger("gradweave").setLevel(logging.ERROR)  # plans of toys are nobody's news
    device = device_of_rank(kind, int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    backend = backend_of(kind)
    with _groups(backend, meeting) as (group, beside):
        place = Place(group, device, beside)
        note(Noted(surroundings=_surroundings(place, backend)))
        for name in CHECKS:
            note(Noted(began=name))
            note(Noted(ended=_tried(name, place)))


def notes_in(file: Path) -> list[Noted]:
    """Return what ``noting_in`` has written so far."""
    lines = file.read_bytes().splitlines() if file.exists() else []
    return [msgspec.json.decode(line, type=Noted) for line in lines]


def noting_in(file: Path) -> Callable[[Noted], None]:
    """Return what adds a line to a file."""

    def note(noted: Noted) -> None:
        with file.open("ab") as out:
            out.write(msgspec.json.encode(noted) + b"\n")

    return note


@contextmanager
def _groups(
    backend: str, meeting: Path | None
) -> Iterator[tuple[dist.ProcessGroup, dist.ProcessGroup]]:
    """Make the default group and one of gloo beside it; wrappers must be gone at the end."""
    torch.set_num_threads(1)
    where = None if meeting is None else f"file://{meeting}"
    rank, ranks = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    dist.init_process_group(
        backend, init_method=where, rank=rank, world_size=ranks, timeout=MESSAGE_WITHIN
    )
    beside = dist.new_group(backend="gloo", timeout=MESSAGE_WITHIN)
    assert isinstance(beside, dist.ProcessGroup)
    yield world_group(), beside
    gc.collect()
    dist.destroy_process_group()


def _tried(name: str, place: Place) -> Check:
    """Try it here, and return the worst that any rank says."""
    said = _outcome(name, place)
    gc.collect()  # wrappers of a check are gone before the next
    everyone = gather_text(place.beside, said)
    for outcome in WORST_FIRST:
        for rank, text in enumerate(everyone):
            found, _, line = text.partition(":")
            if found == outcome:
                whose = f"rank {rank}: " if outcome == "failed" else ""
                return Check(name=name, outcome=outcome, line=printable(whose + line))
    raise AssertionError(f"ranks say {everyone}")


def _outcome(name: str, place: Place) -> str:
    try:
        return f"passed:{CHECKS[name](place)}"
    except Skipped as reason:
        return f"skipped:{reason}"
    except Exception as error:  # noqa: BLE001 whatever goes wrong is what the user is to tell
        what = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        return f"failed:{what}{str(error).strip().partition(chr(10))[0]}"


def _surroundings(place: Place, backend: str) -> Surroundings:
    names = gather_text(place.beside, device_name(place.device))
    return Surroundings(
        device=place.device.type,
        backend=backend,
        ranks=place.group.size(),
        device_names=tuple(names),
        versions=_versions(),
    )


def _versions() -> dict[str, str]:
    found = {
        "gradweave": gradweave.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
    }
    for name in ("cuda", "hip", "xpu"):
        version = getattr(torch.version, name, None)
        if version is not None:
            found[name] = str(version)
    if torch.version.cuda is not None and dist.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found
