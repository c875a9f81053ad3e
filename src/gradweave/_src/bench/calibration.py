"""Calibrating an emulated cluster, from the outside."""

from collections.abc import Callable

import msgspec
from msgspec import Struct

from gradweave._src.bench.jobs import ask
from gradweave._src.compression import Compression
from gradweave._src.lab import Cluster
from gradweave._src.network import Network
from gradweave._src.trace import Trace
from gradweave._src.vocabulary import ReplayMode, Way


class ReplayedJob(Struct, frozen=True, kw_only=True):
    """What ranks compute beside messages."""

    trace: Trace
    mode: ReplayMode


class RecordedJob(Struct, frozen=True, kw_only=True):
    """A job as recorded on its slowest rank, where it will run, while no rank sends anything.

    ``copy_s_per_byte`` is what it takes to copy gradients into a bucket, or out of it.
    """

    trace: Trace
    copy_s_per_byte: float


class CalibrationQuestion(Struct, frozen=True, kw_only=True):
    name: str
    ways: tuple[Way, ...]
    largest_bytes: int
    repeats: int
    nodes_per_rack: int | None = None
    compressions: tuple[Compression, ...] = ()  # for which selecting and exchanging are timed, too
    job: ReplayedJob | None = None  # messages are timed idle and beside it, and it is recorded
    keeps_slow: bool = False  # whether ways that nobody would choose are timed, too


class CalibrationAnswer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What rank 0 answers: a size is done, or all of them are, or the job was recorded."""

    network: Network | None = None
    recorded: RecordedJob | None = None


def calibrate_cluster(
    cluster: Cluster, question: CalibrationQuestion, *, advance: Callable[[], None] = lambda: None
) -> Network:
    network, _ = _answers(cluster, question, advance)
    return network


def calibrate_for_job(
    cluster: Cluster, question: CalibrationQuestion, *, advance: Callable[[], None] = lambda: None
) -> tuple[Network, RecordedJob]:
    """Return the network, idle and beside the question's job, and the job as recorded there."""
    network, recorded = _answers(cluster, question, advance)
    assert recorded is not None
    return network, recorded


def _answers(
    cluster: Cluster, question: CalibrationQuestion, advance: Callable[[], None]
) -> tuple[Network, RecordedJob | None]:
    networks: list[Network] = []
    jobs: list[RecordedJob] = []

    def take(text: str) -> None:
        advance()
        answer = msgspec.json.decode(text, type=CalibrationAnswer)
        if answer.network is not None:
            networks.append(answer.network)
        if answer.recorded is not None:
            jobs.append(answer.recorded)

    ask(cluster, "gradweave._src.bench.calibration_job", question, on_answer=take)
    return networks[0], jobs[0] if jobs else None
