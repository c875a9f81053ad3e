"""How busy others keep this machine while something is measured on it."""

import os
import time
from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")
# The columns behind `cpu` that count: user, nice, system, irq, softirq and steal.
BUSY_COLUMNS = (0, 1, 2, 5, 6, 7)

# The kernel counts in hundredths of a second, which say little about less time than this.
LEAST_S = 0.5
# The user is told of other processes that keep more than this share of all cores busy.
WORTH_A_WORD = 0.1


class Reading(NamedTuple):
    """What has been computed so far, in seconds: by all, and by this process and its children."""

    now_s: float
    all_s: float
    own_s: float


class Neighbours:
    """Watches the machine from the moment at which it is made."""

    def __init__(self) -> None:
        self._began = _reading()

    def note(self) -> str | None:
        """Return what to tell the user; None where others were quiet, or where that is unknown."""
        return busy_note(self._began, _reading(), cores=os.cpu_count() or 1)


def busy_note(began: Reading | None, ended: Reading | None, *, cores: int) -> str | None:
    if began is None or ended is None or ended.now_s - began.now_s < LEAST_S:
        return None
    others_s = (ended.all_s - began.all_s) - (ended.own_s - began.own_s)
    busy = others_s / (ended.now_s - began.now_s)
    if busy < WORTH_A_WORD * cores:
        return None
    return (
        f"other processes kept {busy:.1f} of {cores} cores busy meanwhile, so times may be too "
        "long; measure again when they are idle"
    )


def _reading() -> Reading | None:
    """Return what has been computed so far; None where the kernel does not tell."""
    try:
        name, *columns = STAT.read_text().partition("\n")[0].split()
        ticks = sum(int(columns[column]) for column in BUSY_COLUMNS)
    except (OSError, ValueError, IndexError):
        return None
    if name != "cpu":
        return None
    used = os.times()
    own_s = used.user + used.system + used.children_user + used.children_system
    return Reading(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), own_s)
