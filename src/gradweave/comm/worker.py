"""Collectives that run beside the caller, one after the other, on a thread of their own."""

import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

import torch

from gradweave.comm.communicator import Communicator
from gradweave.errors import CollectiveError
from gradweave.words import Operation

POLLED_EVERY_S = 0.005

Done = torch.futures.Future[torch.Tensor]
Task = tuple[Callable[[], None], torch.Tensor, Done]


class CommunicationThread:
    """Runs what is submitted in that order, which must be the same on every rank.

    The communicator needs a process group that nobody else uses. What takes long, waiting and
    adding, happens without the GIL; each step of a program takes it for a moment.

    On an accelerator the thread idles: the backend's work is asynchronous by itself. Transfers are
    enqueued on a stream of their own that waits for what the caller's stream has enqueued so far,
    and the future completes with that stream. (Not run here: no accelerator.)
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self._failure: BaseException | None = None
        self._closed = False
        self._streams: dict[torch.device, torch.Stream] = {}
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="gradweave communication", daemon=True)
        self._thread.start()

    def submit(
        self, operation: Operation, message: torch.Tensor, *, collective: str, root: int = 0
    ) -> Done:
        """A future of the message itself; once a collective has failed, all later ones fail."""

        def task() -> None:
            self.communicator.run(operation, message, collective=collective, root=root)

        return self.submit_task(task, message)

    def submit_task(self, task: Callable[[], None], message: torch.Tensor) -> Done:
        """Anything else that communicates over the communicator's group and changes the message."""
        if self._closed:
            raise CollectiveError("the communication thread is closed; nothing can be submitted")
        if message.device.type != "cpu":
            return self._enqueue(task, message)
        done: Done = torch.futures.Future()
        self._tasks.put((task, message, done))
        return done

    def drain(self, within_s: float) -> None:
        """Until everything submitted is over or has failed, or so long."""
        drained: Done = torch.futures.Future()
        self._tasks.put((lambda: None, torch.empty(0), drained))
        deadline_s = time.monotonic() + within_s
        while self._thread.is_alive() and not drained.done() and time.monotonic() < deadline_s:
            time.sleep(POLLED_EVERY_S)

    def close(self) -> None:
        """Until everything submitted is over."""
        self._closed = True
        self._tasks.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (item := self._tasks.get()) is not None:
            task, message, done = item
            self._complete(done, message, task)
            del item, task, message, done  # what is over must not be kept alive while idle

    def _complete(self, done: Done, message: torch.Tensor, task: Callable[[], None]) -> None:
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
        stream = self._streams.setdefault(message.device, torch.Stream(device=message.device))
        stream.wait_stream(torch.accelerator.current_stream(message.device))
        message.record_stream(stream)
        done: Done = torch.futures.Future(devices=[message.device])
        with stream:
            self._complete(done, message, task)
        return done


def _again(failure: BaseException) -> Exception:
    """A future wants an exception of its own; the first failure is its cause."""
    error = CollectiveError(str(failure))
    error.__cause__ = failure
    return error
