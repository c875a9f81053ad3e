"""Collectives that run beside the caller, one after the other, on a thread of their own."""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

import torch

from gradweave.comm.communicator import Communicator
from gradweave.errors import CollectiveError
from gradweave.words import Operation

Done = torch.futures.Future[torch.Tensor]
Task = tuple[Callable[[], None], torch.Tensor, Done]


class CommunicationThread:
    """Runs what is submitted in that order, which must be the same on every rank.

    The communicator needs a process group that nobody else uses. Per message the thread crosses
    the GIL a few times only; what takes long, waiting and adding, happens without it.

    On an accelerator there is no thread: the backend's work is asynchronous by itself. Transfers
    are enqueued on a stream of their own that waits for what the caller's stream has enqueued so
    far, and the future completes with that stream. (Not run here: no accelerator.)
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._failure: BaseException | None = None
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="gradweave communication", daemon=True)
        self._thread.start()

    def submit(
        self, operation: Operation, message: torch.Tensor, *, collective: str, root: int = 0
    ) -> Done:
        """A future of the message itself; once a collective has failed, all later ones fail."""

        def task() -> None:
            self._communicator.run(operation, message, collective=collective, root=root)

        if message.device.type != "cpu":
            return self._enqueue(task, message)
        done: Done = torch.futures.Future()
        self._tasks.put((task, message, done))
        return done

    def close(self) -> None:
        """Until everything submitted is over."""
        self._tasks.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (item := self._tasks.get()) is not None:
            task, message, done = item
            if self._failure is None:
                try:
                    task()
                except BaseException as error:  # noqa: BLE001 the caller sees it through the future
                    self._failure = error
            if self._failure is None:
                done.set_result(message)
            else:
                # torch declares the result type here, but takes an exception.
                done.set_exception(_again(self._failure))  # type: ignore[arg-type]

    def _enqueue(self, task: Callable[[], None], message: torch.Tensor) -> Done:
        stream = self._stream(message.device)
        stream.wait_stream(torch.accelerator.current_stream())
        message.record_stream(stream)
        done: Done = torch.futures.Future(devices=[message.device])
        with stream:
            task()
            done.set_result(message)
        return done

    def _stream(self, device: torch.device) -> torch.Stream:
        if not hasattr(self, "_side_stream"):
            self._side_stream = torch.Stream(device=device)
        return self._side_stream


def _again(failure: BaseException) -> Exception:
    """A future wants an exception of its own; the first failure is its cause."""
    error = CollectiveError(str(failure))
    error.__cause__ = failure
    return error
