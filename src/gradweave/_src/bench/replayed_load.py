"""A replayed job beside which messages are timed: what ranks compute while they train."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from gradweave._src.bench.calibration import ReplayedJob
from gradweave._src.bench.trainee import BATCH
from gradweave._src.workloads.replay import TIMERS, Replay, Timer

# Gradients travel beside backward, so nearly all of what is replayed is that.
FORWARD_S = 1e-3
# The replay looks at least so often whether it is over.
LONGEST_WAIT_S = 0.01


class _UntilOver:
    """A timer that does not wait any more once the replay is over."""

    def __init__(self, timer: Timer, over: Event) -> None:
        self._timer, self._over = timer, over

    def now_s(self) -> float:
        return self._timer.now_s()

    def wait_until(self, moment_s: float) -> None:
        while not self._over.is_set() and (now_s := self._timer.now_s()) < moment_s:
            self._timer.wait_until(min(moment_s, now_s + LONGEST_WAIT_S))


@contextmanager
def replaying(job: ReplayedJob) -> Iterator[Thread]:
    """Have a thread replay the job's passes again and again for the length of a block."""
    over = Event()
    trace = job.trace.rescaled(forward_s=FORWARD_S) if job.trace.forward_s else job.trace
    model = Replay(trace, timer=_UntilOver(TIMERS[job.mode](), over))

    def work() -> None:
        while not over.is_set():
            model.zero_grad()
            model(BATCH).backward()

    thread = Thread(target=work, name="gradweave replayed load", daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        over.set()
        thread.join()
