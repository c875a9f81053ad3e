"""Collectives that run beside the caller, one after the other, on a thread of their own."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import NamedTuple

import torch

from gradweave._src.comm.communicator import Communicator
from gradweave._src.errors import CollectiveError
from gradweave._src.torch_internals import named_range
from gradweave._src.vocabulary import Operation

POLLED_EVERY_S = 0.005
SENDING = "gradweave: %s of %d bytes by %s"  # what profilers call it

Done = torch.futures.Future[torch.Tensor]


class Task(NamedTuple):
    run: Callable[[], None]
    message: torch.Tensor
    done: Done
    stream: torch.Stream | None  # of a message on an accelerator


class CommunicationThread:
    """Runs what is submitted in that order, which must be the same on every rank.

    The communicator needs a process group that nobody else uses. What takes long, waiting and
    adding, happens without the GIL; each step of a program takes it for a moment.

    On an accelerator work is enqueued on a stream of its own that waits for what the caller's
    stream has enqueued so far, and the future completes with that stream. A collective is enqueued
    at once: the backend's work is asynchronous by itself. Other tasks may go through the host's
    memory and block, and so run on the thread there, too. (Not run here: no accelerator.)
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

        def run() -> None:
            with named_range(SENDING, operation, message.nbytes, collective):
                self.communicator.run(operation, message, collective=collective, root=root)

        task = self._task(run, message)
        if task.stream is None:
            self._tasks.put(task)
        else:
            self._carry_out(task)
        return task.done

    def submit_task(self, run: Callable[[], None], message: torch.Tensor) -> Done:
        """Anything else that communicates over the communicator's group and changes the message.

        On the thread, wherever the message is: it may block.
        """
        task = self._task(run, message)
        self._tasks.put(task)
        return task.done

    def _task(self, run: Callable[[], None], message: torch.Tensor) -> Task:
        if self._closed:
            raise CollectiveError("the communication thread is closed; nothing can be submitted")
        done = future_on(message.device)
        if message.device.type == "cpu":
            return Task(run, message, done, stream=None)
        stream = self._streams.setdefault(message.device, torch.Stream(device=message.device))
        stream.wait_stream(torch.accelerator.current_stream(message.device))
        message.record_stream(stream)
        return Task(run, message, done, stream)

    def drain(self, within_s: float) -> None:
        """Until everything submitted is over or has failed, or so long."""
        drained: Done = torch.futures.Future()
        self._tasks.put(Task(lambda: None, torch.empty(0), drained, stream=None))
        deadline_s = time.monotonic() + within_s
        while self._thread.is_alive() and not drained.done() and time.monotonic() < deadline_s:
            time.sleep(POLLED_EVERY_S)

    def close(self, within_s: float | None = None) -> bool:
        """End when everything submitted is over; whether that was within so long."""
        self._closed = True
        self._tasks.put(None)
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def is_this_thread(self) -> bool:
        return current_thread() is self._thread

    def _work(self) -> None:
        while task := self._tasks.get():
            self._carry_out(task)
            del task  # what is over must not be kept alive while idle

    def _carry_out(self, task: Task) -> None:
        with task.stream or nullcontext():
            if self._failure is None:
                try:
                    task.run()
                except BaseException as error:  # noqa: BLE001 the caller sees it through the future
                    self._failure = error
            if self._failure is None:
                task.done.set_result(task.message)
            else:
                # torch declares the result type here, but takes an exception.
                task.done.set_exception(_again(self._failure))  # type: ignore[arg-type]


def future_on(device: torch.device) -> Done:
    """Whoever waits for it also waits for the stream that it was completed on."""
    return torch.futures.Future(devices=None if device.type == "cpu" else [device])


def _again(failure: BaseException) -> Exception:
    """A future wants an exception of its own; the first failure is its cause."""
    error = CollectiveError(str(failure))
    error.__cause__ = failure
    return error
