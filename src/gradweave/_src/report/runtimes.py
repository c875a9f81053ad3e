"""What names of runtimes mean, for people who have not read the papers, and their order."""

from collections.abc import Iterable

from gradweave._src.compression import EXACT, EXCHANGE_NAMES, ROUNDED, ROUNDING_NAMES
from gradweave._src.glossary import RUNTIMES
from gradweave._src.plan import Plan
from gradweave._src.results import Result
from gradweave._src.runs import Run
from gradweave._src.vocabulary import parse_spec

OURS, BASELINE = "gradweave", "torch-ddp"

# What these send is not the mean of the gradients, so a training learns something else.
LOSSY = frozenset(
    {
        ROUNDED,
        "powersgd",
        *ROUNDING_NAMES,
        *EXCHANGE_NAMES,
        *(f"torch-{name}{tuned}" for name in ("fp16", "bf16") for tuned in ("", "-tuned")),
    }
)


def explained(runtime: str) -> str | None:
    """Say what a runtime does, as part of a sentence; None where its name is not known."""
    return RUNTIMES.get(parse_spec(runtime).name)


def is_lossy(runtime: str, plan: Plan | None = None) -> bool:
    """Return whether it changes the training, by its name or by a plan with smaller messages."""
    name, argument = parse_spec(runtime)
    if name in LOSSY or (name == OURS and argument not in {None, EXACT}):
        return True
    return plan is not None and any(bucket.compression is not None for bucket in plan.buckets)


def rows_in_order(run: Run) -> list[Result]:
    """Sort a run's rows: Gradweave by itself first, what changes the training last."""
    return sorted(run.results.rows, key=lambda row: _place(row.runtime, run.plans))


def glossary(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return what these names mean, each once and without arguments; unknown ones are left out."""
    known = dict.fromkeys(parse_spec(name).name for name in names)
    return [(name, RUNTIMES[name]) for name in known if name in RUNTIMES]


def _place(runtime: str, plans: dict[str, Plan]) -> int:
    if is_lossy(runtime, plans.get(runtime)):
        return 2
    return 0 if parse_spec(runtime).name == OURS else 1
