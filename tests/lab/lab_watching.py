"""What ranks print and when, and which processes and namespaces there are."""

from pathlib import Path
from queue import Queue

LIMIT_S = 30.0  # for what takes milliseconds, on a busy machine


def printed(cluster, command, **options):
    """What each rank wrote to stdout, after all have ended well."""
    lines = [[] for _ in range(cluster.spec.world_size)]
    everything = []

    def take(line):
        everything.append(line)
        if not line.is_error:
            lines[line.rank].append(line.text)

    result = cluster.start(command, on_line=take, **options).wait(LIMIT_S)
    assert result.exit_code == 0, everything
    return lines


class Told:
    """Lines as they come, for tests that act in between."""

    def __init__(self):
        self._lines = Queue()

    def __call__(self, line):
        self._lines.put(line.text)

    def forget(self):
        """What has been told by now."""
        while not self._lines.empty():
            self._lines.get()

    def until(self, text, times=1):
        """Wait for ``text``, so many times without another line of its first word between."""
        seen = 0
        while seen < times:
            line = self._lines.get(timeout=LIMIT_S)
            if line.split()[0] == text.split()[0]:
                seen = seen + 1 if line == text else 0


def descendants(ancestor):
    """Processes below this one, with their start times, because ids are used again."""
    living = _living()
    below, found = {ancestor}, set()
    while new := {pid for pid, (parent, _) in living.items() if parent in below} - below:
        below |= new
        found |= {(pid, living[pid][1]) for pid in new}
    return found


def children(parent):
    return [pid for pid, (found, _) in _living().items() if found == parent]


def _living():
    """Parent and start time of each process."""
    entries = [entry for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return {int(e.name): found for e in entries if (found := _parent_and_start(e))}


def alive(processes):
    return {
        (pid, start)
        for pid, start in processes
        if (found := _parent_and_start(Path("/proc", str(pid)))) and found[1] == start
    }


def network_namespaces(processes):
    return {Path(f"/proc/{pid}/ns/net").readlink() for pid, _ in processes}


def _parent_and_start(entry):
    """None for a process that has ended, though its parent may not have noticed."""
    try:
        state, parent, *fields = (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else (int(parent), int(fields[17]))
