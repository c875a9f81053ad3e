"""Looking over an emulated cluster, from the outside."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec
from msgspec import Struct

from gradweave._src.bench.jobs import ask
from gradweave._src.doctor import Checkup
from gradweave._src.errors import RequestError
from gradweave._src.lab import Cluster


class CheckupQuestion(Struct, frozen=True, kw_only=True):
    timeout_s: float  # how long a rank is waited for


class CheckupAnswer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What rank 0 answers: something has been measured, or all of it."""

    checkup: Checkup | None = None


class Place(NamedTuple):
    """Where this rank is in its job, as launchers say it."""

    rank: int
    world_size: int
    address: str
    port: int

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


def place_in(environment: Mapping[str, str]) -> Place:
    """Return the place in the launcher's variables; RequestError where one is missing or wrong."""
    try:
        return Place(
            rank=int(environment["RANK"]),
            world_size=int(environment["WORLD_SIZE"]),
            address=environment["MASTER_ADDR"],
            port=int(environment["MASTER_PORT"]),
        )
    except KeyError as error:
        raise RequestError(
            f"{error.args[0]} is not set; start this by torchrun -m gradweave doctor"
        ) from None
    except ValueError as error:
        raise RequestError(f"RANK, WORLD_SIZE and MASTER_PORT must be numbers: {error}") from None


def check_cluster(
    cluster: Cluster, question: CheckupQuestion, *, advance: Callable[[], None] = lambda: None
) -> Checkup:
    found: list[Checkup] = []

    def take(text: str) -> None:
        advance()
        if checkup := msgspec.json.decode(text, type=CheckupAnswer).checkup:
            found.append(checkup)

    ask(cluster, "gradweave._src.bench.checkup_job", question, on_answer=take)
    return found[0]
