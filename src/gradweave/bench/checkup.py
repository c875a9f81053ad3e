"""Looking over an emulated cluster, from the outside."""

from collections.abc import Callable

import msgspec
from msgspec import Struct

from gradweave.bench.jobs import ask
from gradweave.doctor import Checkup
from gradweave.lab import Cluster


class CheckupQuestion(Struct, frozen=True, kw_only=True):
    timeout_s: float  # how long a rank is waited for


class CheckupAnswer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something has been measured, or all of it."""

    checkup: Checkup | None = None


def check_cluster(
    cluster: Cluster, question: CheckupQuestion, *, advance: Callable[[], None] = lambda: None
) -> Checkup:
    found: list[Checkup] = []

    def take(text: str) -> None:
        advance()
        if checkup := msgspec.json.decode(text, type=CheckupAnswer).checkup:
            found.append(checkup)

    ask(cluster, "gradweave.bench.checkup_job", question, on_answer=take)
    return found[0]
