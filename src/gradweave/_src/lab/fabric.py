"""The process that holds an emulated cluster: ``python -m gradweave._src.lab.fabric``.

It is the first process of its PID namespace. When it ends, the kernel ends every process in there,
and with the last of them the network namespaces and all that is in them. So it ends when the
launcher closes the control socket or is gone, however that came about, and nothing else needs
cleaning up.
"""

import os
import selectors
import signal
import socket
import sys
from contextlib import nullcontext, suppress
from errno import EPERM
from typing import TYPE_CHECKING

from gradweave._src.errors import LabError
from gradweave._src.lab import messages, namespaces
from gradweave._src.lab.messages import Answer, Request
from gradweave._src.lab.processes import Processes
from gradweave._src.lab.spec import ClusterSpec, hosts_file

if TYPE_CHECKING:
    from gradweave._src.lab.wiring import Wiring


class Fabric:
    """Answers requests, one at a time, until nobody is there to ask."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._signals = _child_signals()
        self._selector = selectors.EpollSelector()
        self._processes = Processes(self._selector)
        self._wiring: Wiring | None = None  # None on loopback
        self._refusals: tuple[type[Exception], ...] = (OSError,)  # the kernel's, as they are raised

    def serve(self, launcher: int) -> None:
        """Answer until nobody asks; ``launcher`` is a pidfd, readable when that process ends."""
        for file, handle in (
            (launcher, lambda: False),
            (self._control, self._answer_next),
            (self._signals, lambda: bool(self._signals.recv(4096))),
        ):
            self._selector.register(file, selectors.EVENT_READ, handle)
        wanted = True
        try:
            while wanted:
                for key, _ in self._selector.select(self._processes.until_overdue_s()):
                    wanted &= key.data()
                self._processes.reap_orphans()
                self._processes.kill_overdue()
        except ConnectionError:
            pass  # the launcher has ended while we spoke
        finally:
            self._processes.end()

    def _answer_next(self) -> bool:
        received = messages.receive_request(self._control)
        if received is None:
            return False
        try:
            answer = self._answer(received.request, received.files)
        except LabError as error:
            answer = Answer(problem=str(error))
        except self._refusals as error:
            code = error.errno if isinstance(error, OSError) else getattr(error, "code", None)
            building = isinstance(received.request, messages.Build)
            answer = Answer(problem=str(error), forbidden=building and code == EPERM)
        finally:
            for file in received.files:
                os.close(file)
        messages.send_answer(self._control, received.number, answer)
        return True

    def _answer(self, request: Request, files: list[int]) -> Answer:
        match request:
            case messages.Build():
                self._build(request.spec, loopback=request.loopback)
            case messages.StartRank():
                with self._wiring.rank(request.rank) if self._wiring else nullcontext():
                    self._processes.start(request, files)
            case messages.Stop():
                self._processes.stop(request.job, grace_s=request.grace_s)
            case messages.Kill():
                self._processes.kill(request.ranks)
            case messages.Plug():
                self._links().plug(request.node, plugged=request.plugged)
            case messages.SetRate():
                self._links().set_rate(request.node, request.bits_per_s)
            case messages.ReadSent():
                return Answer(sent=self._links().sent())
            case messages.ReadRates():
                return Answer(rates=self._links().rates(request.node))
        return Answer()

    def _build(self, spec: ClusterSpec, *, loopback: bool) -> None:
        if loopback:
            namespaces.adopt_orphans()
            return
        # Loopback does without pyroute2.
        from pyroute2.netlink.exceptions import NetlinkError  # noqa: PLC0415

        from gradweave._src.lab.wiring import Wiring  # noqa: PLC0415

        self._refusals = (OSError, NetlinkError)
        with suppress(PermissionError):  # in a container; ranks then see the outer process ids
            namespaces.mount_own_proc()
        with suppress(FileNotFoundError):
            namespaces.replace_file("/etc/hosts", hosts_file(spec))
        self._wiring = Wiring(spec)

    def _links(self) -> "Wiring":
        if self._wiring is None:
            raise LabError("on loopback there are no links to cut, shape or count")
        return self._wiring


def _child_signals() -> socket.socket:
    """Return a socket that is readable when a child has ended."""
    reading, writing = socket.socketpair()
    reading.settimeout(0)
    writing.settimeout(0)
    signal.set_wakeup_fd(writing.detach())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reading


def main(control: int, launcher: int) -> None:
    for inherited in (control, launcher):
        os.set_inheritable(inherited, False)  # noqa: FBT003 ranks must not have them
    Fabric(socket.socket(fileno=control)).serve(launcher)
    os._exit(0)  # Python would take 0.2 s to tidy up what the kernel drops


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
