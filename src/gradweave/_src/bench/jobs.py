"""A question to every rank of a cluster, and the answers that rank 0 prints as lines of JSON."""

import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import msgspec
from msgspec import Struct

from gradweave._src.errors import LabError
from gradweave._src.lab import Cluster, OutputLine

Question = TypeVar("Question", bound=Struct)


def ask(
    cluster: Cluster, module: str, question: Struct, *, on_answer: Callable[[str], None]
) -> None:
    """Run ``python -m module FILE`` on every rank, the question in the file, until all have ended.

    ``on_answer`` sees each line of JSON as it comes, in another thread.
    """

    def take(line: OutputLine) -> None:
        if line.rank == 0 and not line.is_error and line.text.startswith("{"):
            on_answer(line.text)

    with TemporaryDirectory(prefix="gradweave-") as folder:
        file = Path(folder, "question.json")
        file.write_bytes(msgspec.json.encode(question))
        result = cluster.start([sys.executable, "-m", module, str(file)], on_line=take).wait()
    if result.first_failure is not None:
        last = next((line for line in reversed(result.first_failure.last_lines) if line), "")
        raise LabError(f"{result.first_failure}: {last}")


def asked(kind: type[Question]) -> Question:
    """Return what this rank was asked."""
    return msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=kind)


def answer(value: Struct) -> None:
    """Print the answer of a job, which rank 0 gives."""
    print(msgspec.json.encode(value).decode(), flush=True)  # noqa: T201
