"""What an experiment measured, beside what was predicted."""

from msgspec import Struct

from gradweave.checks import require_not_negative, require_text


class Result(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One runtime on one cluster; what each number means is in docs/measuring.md."""

    trace: str
    runtime: str
    nodes: int
    ranks_per_node: int
    rate: str | None
    iteration_s: float
    predicted_s: float
    prediction_error: float  # of the predicted time, as a share of the measured
    compute_s: float
    exposed_s: float
    messages: int
    speedup: float | None  # over torch-ddp; None where that did not run
    repeats_s: tuple[float, ...]
    correct: bool
    bucket_cap_mb: float | None

    def __post_init__(self) -> None:
        require_text(self, "trace", "runtime")
        require_not_negative(self, "iteration_s", "predicted_s", "compute_s", "exposed_s")


class Results(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    command: str  # what was run, for people
    rows: tuple[Result, ...]
