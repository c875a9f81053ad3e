"""Calibrating an emulated cluster, from the outside."""

from collections.abc import Callable

import msgspec
from msgspec import Struct

from gradweave._src.bench.jobs import ask
from gradweave._src.compression import Compression
from gradweave._src.lab import Cluster
from gradweave._src.network import Network
from gradweave._src.vocabulary import Way


class CalibrationQuestion(Struct, frozen=True, kw_only=True):
    name: str
    ways: tuple[Way, ...]
    largest_bytes: int
    repeats: int
    nodes_per_rack: int | None = None
    compressions: tuple[Compression, ...] = ()  # also time selecting and exchanging for these
    keeps_slow: bool = False  # also ways that nobody would choose


class CalibrationAnswer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A size is done, or all of them."""

    network: Network | None = None


def calibrate_cluster(
    cluster: Cluster, question: CalibrationQuestion, *, advance: Callable[[], None] = lambda: None
) -> Network:
    found: list[Network] = []

    def take(text: str) -> None:
        advance()
        if network := msgspec.json.decode(text, type=CalibrationAnswer).network:
            found.append(network)

    ask(cluster, "gradweave._src.bench.calibration_job", question, on_answer=take)
    return found[0]
