"""Collectives that run beside the caller, one after the other, on a thread of their own."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from math import inf
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import NamedTuple

import torch

from gradweave._src.comm.communicator import Communicator
from gradweave._src.device_order import Order, keep_for, wait_for_current
from gradweave._src.errors import CollectiveError
from gradweave._src.torch_internals import HOST, named_range
from gradweave._src.vocabulary import Operation

POLLED_EVERY_S = 0.005
SENDING = "gradweave: %s of %d bytes by %s"  # what profilers call it

Done = torch.futures.Future[torch.Tensor]
OnBegin = Callable[[], Callable[[], None]]  # returns what is called at the end


class Task(NamedTuple):
    run: Callable[[], None]
    message: torch.Tensor
    done: Done
    stream: torch.Stream | None  # where the message is on an accelerator


class CommunicationThread:
    """Runs what is submitted in that order, which must be the same on every rank.

    The communicator needs a process group that nobody else uses. Waiting and adding, which take
    long, happen without the GIL; each step of a program needs it for a moment.

    On an accelerator work is queued on a stream of its own that waits for what the caller's stream
    has been asked for so far, and the future completes with that stream. A collective is launched
    at once, by the thread that submits it: nothing waits there, and backends of accelerators want
    all their groups' messages launched in an order that all ranks share, which is that of the
    program (docs/runtime.md). Other tasks may go through the host's memory and block, so they run
    on the thread there, too.
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
        self,
        operation: Operation,
        message: torch.Tensor,
        *,
        collective: str,
        root: int = 0,
        on_begin: OnBegin | None = None,
    ) -> Done:
        """Return a future of the message; once a collective has failed, all later ones fail.

        ``on_begin`` is called when the message begins to travel, and what it returns when the
        message is back. On an accelerator they are called while that is queued on a stream, where a
        mark of its clock is passed at that moment.
        """

        def run() -> None:
            on_end = None if on_begin is None else on_begin()
            with named_range(SENDING, operation, message.nbytes, collective):
                self.communicator.run(operation, message, collective=collective, root=root)
            if on_end is not None:
                on_end()

        return self.submit_task(run, message, blocks=False)

    def submit_task(
        self, run: Callable[[], None], message: torch.Tensor, *, blocks: bool = True
    ) -> Done:
        """Run anything else that communicates over the group and changes the message.

        ``blocks`` says that it waits for something even on an accelerator, so that it runs on the
        thread there, too.
        """
        task = self._task(run, message)
        if blocks or task.stream is None:
            self._tasks.put(task)
        else:
            self._carry_out(task)
        return task.done

    def _task(self, run: Callable[[], None], message: torch.Tensor) -> Task:
        if self._closed:
            raise CollectiveError("the communication thread is closed; nothing can be submitted")
        done = future_on(message.device)
        if message.device.type == "cpu":
            return Task(run, message, done, stream=None)
        stream = self._streams.get(message.device)
        if stream is None:
            stream = self._streams[message.device] = torch.Stream(device=message.device)
        wait_for_current(stream, Order.LANE_AFTER_WRITER)
        keep_for(message, stream, Order.MESSAGE_KEPT)
        return Task(run, message, done, stream)

    def drain(self, within_s: float) -> None:
        """Wait until everything submitted is over or has failed, at most so long."""
        drained: Done = torch.futures.Future()
        self._tasks.put(Task(lambda: None, torch.empty(0, device=HOST), drained, stream=None))
        deadline_s = time.monotonic() + within_s
        while self._thread.is_alive() and not drained.done() and time.monotonic() < deadline_s:
            time.sleep(POLLED_EVERY_S)
        self._wait_for_streams(deadline_s)

    def close(self, within_s: float | None = None) -> bool:
        """End the thread when all submitted work is done, and return whether it was in time."""
        deadline_s = inf if within_s is None else time.monotonic() + within_s
        self._closed = True
        self._tasks.put(None)
        self._thread.join(within_s)
        return not self._thread.is_alive() and self._wait_for_streams(deadline_s)

    def _wait_for_streams(self, deadline_s: float) -> bool:
        """Wait until accelerators have done what they were asked for; return whether in time."""
        while not all(stream.query() for stream in self._streams.values()):
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(POLLED_EVERY_S)
        return True

    def is_this_thread(self) -> bool:
        return current_thread() is self._thread

    def _work(self) -> None:
        while task := self._tasks.get():
            self._carry_out(task)
            del task  # a finished task must not be kept alive while the thread is idle

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
    """Return a future whose waiters also wait for the stream on which it is completed."""
    return torch.futures.Future(devices=None if device.type == "cpu" else [device])


def _again(failure: BaseException) -> Exception:
    """Return a new exception for another future, caused by the first failure."""
    error = CollectiveError(str(failure))
    error.__cause__ = failure
    return error
