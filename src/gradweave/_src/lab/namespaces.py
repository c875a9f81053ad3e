"""The system calls that Python 3.11 does not have: namespaces, mounts, process control."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import NamedTemporaryFile

CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND = 2, 4, 8, 4096
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


class Namespace:
    """A namespace of this process's, kept alive by an open file."""

    def __init__(self, kind: str) -> None:
        self.fd = os.open(f"/proc/self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)

    def enter(self) -> None:
        _checked(_libc.setns(self.fd, 0), "setns")


@contextmanager
def entered(*namespaces: Namespace, home: tuple[Namespace, ...]) -> Iterator[None]:
    """Put this thread, and what it starts, into ``namespaces`` for the length of a block."""
    try:
        for namespace in namespaces:
            namespace.enter()
        yield
    finally:
        for namespace in home:
            namespace.enter()


def new_network_namespace(home: Namespace) -> Namespace:
    try:
        _checked(_libc.unshare(CLONE_NEWNET), "unshare")
        return Namespace("net")
    finally:
        home.enter()


def new_host(name: str, home: Namespace) -> Namespace:
    """Return a new UTS namespace whose hostname is ``name``."""
    try:
        _checked(_libc.unshare(CLONE_NEWUTS), "unshare")
        encoded = name.encode()
        _checked(_libc.sethostname(encoded, len(encoded)), "sethostname")
        return Namespace("uts")
    finally:
        home.enter()


def mount_own_proc() -> None:
    """Show this PID namespace's processes in /proc."""
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    _checked(_libc.mount(b"proc", b"/proc", b"proc", flags, None), "mount /proc")


def replace_file(path: str, text: str) -> None:
    """Let ``path`` read as ``text``, in this mount namespace only."""
    with NamedTemporaryFile("w") as file:  # the mount keeps the file when its name is gone
        file.write(text)
        file.flush()
        os.fchmod(file.fileno(), 0o644)
        _checked(
            _libc.mount(os.fsencode(file.name), os.fsencode(path), None, _MS_BIND, None),
            f"mount {path}",
        )


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process, which can then end them."""
    _checked(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")
