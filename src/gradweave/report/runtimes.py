"""What names of runtimes mean, for people who have not read the papers, and their order."""

from collections.abc import Iterable

from gradweave.compression import EXACT, EXCHANGE_NAMES, ROUNDED, ROUNDING_NAMES
from gradweave.plan import Plan
from gradweave.results import Result
from gradweave.runs import Run
from gradweave.vocabulary import parse_spec

OURS, BASELINE = "gradweave", "torch-ddp"

_TUNED = "with the bucket size (bucket_cap_mb) that is fastest, found by trying"

EXPLAINED = {
    OURS: "Gradweave's wrapper by itself: it measures, plans and tries while the model trains",
    BASELINE: "torch's wrapper as it comes: a first bucket of 1 MiB, then buckets of 25 MiB",
    f"{BASELINE}-tuned": f"torch's wrapper {_TUNED}",
    "torch-fp16": "torch's wrapper with its hook that rounds gradients to fp16",
    "torch-fp16-tuned": f"torch's hook for fp16 {_TUNED}",
    "torch-bf16": "torch's wrapper with its hook that rounds gradients to bf16",
    "torch-bf16-tuned": f"torch's hook for bf16 {_TUNED}",
    "powersgd": "torch's hook for PowerSGD: matrices travel as products of thin ones",
    "zero": "torch's ZeRO: each worker updates a share of the parameters and broadcasts it",
    "fsdp2": "torch's fully_shard: parameters gathered for each pass, gradients scattered",
    "naive": "each gradient by itself, after backward has ended",
    "wfbp": "each gradient by itself, as soon as it is ready",
    "single": "all gradients in one message, after backward has ended",
    "fixed": "buckets of one size",
    "ddp": "buckets as torch's wrapper makes them: 1 MiB, then 25 MiB",
    "inductor": "buckets as torch's compiler makes them: as many gradients as fit into 2000 MiB",
    "mgwfbp": "merged by the rule of the MG-WFBP papers",
    "optimal": "merged by Gradweave's exact planner: the fewest messages within 1 % of the optimum",
    "sharded": "gradients scattered beside backward, parameters gathered beside the next forward",
    ROUNDED: "Gradweave's plan among messages as they are, rounded to bf16 and to 8 bits",
    "bf16": "all gradients rounded to bf16",
    "fp16": "all gradients rounded to fp16",
    "int8": "all gradients rounded to 8 bits, and what that drops carried over to the next step",
    "topk": "only the largest gradients of each worker",
    "gtopk": "only the largest gradients of all workers",
    "gtopk-tree": "only the largest gradients of all workers, by the gTop-k paper's tree",
    "gtopk-tree-lossy": "the gTop-k paper's tree, with what it loses",
    "gtopk-all-gather": "only the largest gradients of all workers, found by all of them",
    "bsp-reduce-broadcast": "gradients reduced to one worker, which updates and broadcasts",
    "bsp-allreduce": "an all-reduce after backward, then every worker updates",
    "bsp-overlap": "reduced beside backward, broadcast beside the next forward",
}

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
    """What a runtime does, as part of a sentence; None where its name is not known."""
    return EXPLAINED.get(parse_spec(runtime).name)


def is_lossy(runtime: str, plan: Plan | None = None) -> bool:
    """Whether it changes the training: by its name, or because its plan makes messages smaller."""
    name, argument = parse_spec(runtime)
    if name in LOSSY or (name == OURS and argument not in {None, EXACT}):
        return True
    return plan is not None and any(bucket.compression is not None for bucket in plan.buckets)


def rows_in_order(run: Run) -> list[Result]:
    """Gradweave by itself first, what changes the training last, the others as they were run."""
    return sorted(run.results.rows, key=lambda row: _place(row.runtime, run.plans))


def glossary(names: Iterable[str]) -> list[tuple[str, str]]:
    """What these names mean, each once, without their arguments; strangers are left out."""
    known = dict.fromkeys(parse_spec(name).name for name in names)
    return [(name, EXPLAINED[name]) for name in known if name in EXPLAINED]


def _place(runtime: str, plans: dict[str, Plan]) -> int:
    if is_lossy(runtime, plans.get(runtime)):
        return 2
    return 0 if parse_spec(runtime).name == OURS else 1
