"""What to time and what came of it; without torch, so launchers do not wait for its import."""

from msgspec import Struct

from gradweave._src.costs import Link
from gradweave._src.vocabulary import Operation


class Question(Struct, frozen=True, kw_only=True):
    """A question to all ranks: time every algorithm on every size, for every operation."""

    operations: tuple[Operation, ...]
    algorithms: tuple[str, ...]
    sizes: tuple[int, ...]  # bytes
    repeats: int
    link: Link  # the expected link, for algorithms that choose a block size
    nodes_per_rack: int | None = None  # None where racks are not known

    @property
    def timings(self) -> int:
        return len(self.operations) * len(self.algorithms) * len(self.sizes)


class Timing(Struct, frozen=True, kw_only=True):
    """One operation by one algorithm on one size; times are of the slowest rank."""

    op: Operation
    algorithm: str
    ranks: int
    bytes: int
    median_s: float
    p10_s: float
    p90_s: float
    repeats: int
    algbw_bytes_per_s: float
    busbw_bytes_per_s: float
    correct: bool
