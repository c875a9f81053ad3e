"""The launcher's hold on its fabric: one process, one socket, requests and answers."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock

from gradweave._src.checks import why_missing
from gradweave._src.errors import LabError
from gradweave._src.lab import messages
from gradweave._src.lab.messages import Answer, Request

# A request takes milliseconds, building a few hundred ranks some seconds.
ANSWER_WITHIN_S = 60.0
GONE_WITHIN_S = 5.0

NEW_NAMESPACES = (
    "unshare",
    "--user",
    "--map-root-user",
    "--net",
    "--uts",
    "--mount",
    "--pid",
    "--fork",
    "--kill-child",
    "--",
)
INSTEAD = "use --loopback to run without them, unshaped"


class Control:
    """A fabric that lives until ``close``, or until this process ends."""

    def __init__(self, *, loopback: bool) -> None:
        why = why_missing("pyroute2", what="the lab", extra="lab")
        if why is not None and not loopback:
            raise LabError(why)
        self._lock = Lock()  # a job's thread asks too
        self._closed = False
        self._asked = 0
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(ANSWER_WITHIN_S)
        self._said = os.memfd_create("fabric")
        launcher = os.pidfd_open(os.getpid())
        # -P: files in the user's directory must not pass for modules.
        fabric = [sys.executable, "-P", "-m", "gradweave._src.lab.fabric"]
        files = [theirs.fileno(), launcher]
        try:
            self._process = subprocess.Popen(  # noqa: S603 no shell, and nothing of the user's
                [*(() if loopback else NEW_NAMESPACES), *fabric, *map(str, files)],
                pass_fds=files,
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                start_new_session=True,  # Ctrl-C is for the launcher alone
            )
        except OSError as error:
            self._socket.close()
            os.close(self._said)
            raise LabError(f"cannot run unshare, of util-linux ({error}); {INSTEAD}") from None
        finally:
            theirs.close()
            os.close(launcher)

    def request(self, request: Request, files: Sequence[int] = ()) -> Answer:
        with self._lock:
            if self._closed:
                raise LabError("the cluster has ended")
            self._asked += 1
            try:
                messages.send_request(self._socket, self._asked, request, files)
                answer = messages.receive_answer(self._socket, self._asked)
            except TimeoutError:
                raise LabError(f"the fabric gave no answer in {ANSWER_WITHIN_S:g} s") from None
            except (BrokenPipeError, ConnectionResetError):
                answer = None
            if answer is None:
                raise LabError(self._why_it_ended())
        if answer.forbidden:
            raise LabError(f"namespaces are forbidden here ({answer.problem}); {INSTEAD}")
        if answer.problem is not None:
            raise LabError(answer.problem)
        return answer

    def close(self) -> None:
        """End the fabric and, with it, everything inside."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # a thread that waits for an answer gets none
        try:
            self._process.wait(GONE_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the kernel then kills the fabric, and with it its ranks
            self._process.wait()
        with self._lock:
            self._closed = True
            self._socket.close()
            os.close(self._said)

    def _why_it_ended(self) -> str:
        try:
            self._process.wait(GONE_WITHIN_S)
        except subprocess.TimeoutExpired:
            return "the fabric closed its connection"
        said = os.pread(self._said, 2**16, 0).decode(errors="replace").strip().splitlines()
        last = said[-1] if said else f"exit code {self._process.returncode}"
        if last.startswith("unshare:") and "failed to execute" not in last:
            return f"namespaces are forbidden here ({last}); {INSTEAD}"
        return f"the fabric ended: {last}"
