"""A Python that has imported what scripts of tests need, and runs each of them in a fork of itself.

``python warm_python.py DESCRIPTOR MODULE ...``: the descriptor of a socket at which those who run
tests come to ask for scripts (commands.py), and what is imported besides ``preloaded``. It ends
when the last of them has gone. Unlike multiprocessing's fork server it is one for all processes
that run tests, and its children leave this module as a script does, so that their interpreters end
as a user's: with exit functions, joined threads, destructors.
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import socket
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import preloaded
import torch
from commands import MOST_FILES

__all__ = ["preloaded"]

HUGE_PAGE_BYTES = 2**21
MADV_COLLAPSE = 25  # of linux/mman.h; Python's mmap does not name it


def serve(listening: socket.socket) -> list[str] | None:
    """Return what to run, in each fork; and None, here, when nobody is left to ask."""
    # Threads would be missing in every fork, and locks that they hold be locked for ever.
    assert len(os.listdir("/proc/self/task")) == 1  # noqa: PTH208
    selector = selectors.DefaultSelector()
    selector.register(listening, selectors.EVENT_READ)
    asking: set[socket.socket] = set()
    while True:
        for key, _ in selector.select():
            if key.data is not None:
                selector.unregister(key.fd)
                _tell_how_it_ended(key.fd, *key.data)
                continue
            if key.fileobj is listening:
                came, _ = listening.accept()
                asking.add(came)
                selector.register(came, selectors.EVENT_READ)
                continue
            assert isinstance(key.fileobj, socket.socket)
            request, files, _, _ = socket.recv_fds(key.fileobj, 2**20, MOST_FILES)
            if not request:
                selector.unregister(key.fileobj)
                asking.remove(key.fileobj)
                key.fileobj.close()
                if not asking and not _has_come(listening):
                    Path(listening.getsockname()).unlink(missing_ok=True)
                    return None
                continue
            child = os.fork()
            if child == 0:
                _close_all(selector)
                return _made_ready(json.loads(request), *files)
            out, said, told, *given = files
            for file in (out, said, *given):
                os.close(file)
            with suppress(BrokenPipeError):  # where nobody waits for it any more
                os.write(told, f"{child}\n".encode())
            selector.register(os.pidfd_open(child), selectors.EVENT_READ, (child, told))


def _close_all(selector: selectors.BaseSelector) -> None:
    """Close what belongs to the parent: a sibling's end would be seen only after this one's."""
    for key in selector.get_map().values():
        if isinstance(key.fileobj, socket.socket):
            key.fileobj.close()
        else:
            _, told = key.data
            os.close(key.fd)
            os.close(told)
    selector.close()


def _has_come(listening: socket.socket) -> bool:
    """Whether somebody waits to be let in."""
    waiting, _, _ = select.select([listening], [], [], 0)
    return bool(waiting)


def _tell_how_it_ended(ended: int, child: int, told: int) -> None:
    _, status = os.waitpid(child, 0)
    with suppress(BrokenPipeError):  # where nobody waits for it any more
        os.write(told, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os.close(ended)
    os.close(told)


def _made_ready(request: dict, out: int, said: int, told: int, *given: int) -> list[str]:
    os.close(told)
    for file, number in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (said, 2)):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return [*request["command"], *map(str, given)]


def gather_into_huge_pages() -> None:
    """Have Linux keep this process's memory in pages of 2 MB, of which a fork copies few entries.

    With those of 4 kB a fork and its end take 25 ms of a core instead of 5, and tests fork more
    than a thousand times. Where this can't be done (before Linux 6.1), nothing is lost but that.
    """
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, _, _, inode, *_ = line.split()
        begin, end = (int(address, 16) for address in place.split("-"))
        begin, end = -(-begin // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, end - end % HUGE_PAGE_BYTES
        if rights == "rw-p" and inode == "0" and begin < end:  # no file's
            libc.madvise(begin, end - begin, MADV_COLLAPSE)


def run(command: list[str]) -> None:
    """What ``python COMMAND`` does."""
    first, *arguments = command
    if first == "-m":
        sys.argv, sys.path[0] = arguments, str(Path.cwd())
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    # Its names live as long as those of a script, until the interpreter has ended.
    script = sys.modules["__main__"] = ModuleType("__main__")
    if first == "-c":
        code, name = arguments.pop(0), "<string>"
        sys.argv, sys.path[0] = ["-c", *arguments], ""
    else:
        code, name = Path(first).read_text(), first
        sys.argv, sys.path[0] = command, str(Path(first).parent)
        script.__file__ = first
    exec(compile(code, name, "exec"), vars(script))  # noqa: S102


if __name__ == "__main__":
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.freeze()  # scripts that collect need not look at a million objects that are not their own
    gather_into_huge_pages()
    if (wanted := serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        run(wanted)
