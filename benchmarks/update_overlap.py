"""Updating bucket by bucket beside all-gathers: ``python benchmarks/update_overlap.py OUTPUT``.

Workers train a model with a tied embedding, which forward needs first and backward completes last,
under ShardedDataParallel and with Adam: with ``updates_by_bucket``, and by turns with a hook on the
optimizer that does nothing. Hooks may change gradients, so with one all parameters are updated
before the first of them travels. Writes OUTPUT.json and OUTPUT.md. Eight minutes on two cores.
"""

import time
from collections.abc import Mapping, Sequence
from statistics import median

import msgspec
import torch
from ask_ranks import run_cases
from made_with import made_with
from msgspec import Struct
from torch import nn

from gradweave._src.bench.ranks import default_group
from gradweave._src.comm.small_messages import largest
from gradweave._src.plan import Bucket, Plan
from gradweave._src.runtime.sharded import ShardedDataParallel

CASES = ((2, "1gbit"), (2, "10gbit"), (4, "1gbit"), (4, "10gbit"))
WORDS, WIDTH, LAYERS = 8192, 1024, 16
TOKENS = 32
STEPS = 2  # in a turn, of which the first is not counted
TURNS = 25


class Turns(Struct, frozen=True, kw_only=True):
    """Seconds of the slowest rank, turn by turn."""

    whole_s: list[float]  # of a step that updates everything first
    parts_s: list[float]
    update_s: float  # of all of a rank's elements, alone


def main() -> None:
    run_cases(__file__, Turns, description=__doc__, cases=CASES, answer=answer, page=page)


class Tied(nn.Module):
    """An embedding, layers, and the embedding again."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.output = nn.Linear(WIDTH, WORDS, bias=False)
        self.output.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.output(self.layers(self.words(tokens)))
        return out


def plan() -> Plan:
    """Put four layers into a bucket; the tied embedding is the last bucket of backward."""
    groups = [
        tuple(
            f"layers.{layer}.{kind}"
            for layer in range(last, last - 4, -1)
            for kind in ("bias", "weight")
        )
        for last in range(LAYERS - 1, 0, -4)
    ]
    buckets = (Bucket(tensors=names, collective="ring") for names in (*groups, ("words.weight",)))
    return Plan(planner="by layers", buckets=tuple(buckets), passes="both")


def answer() -> None:
    """Train on one rank by turns; rank 0 prints the slowest rank's times."""
    torch.set_num_threads(1)
    with default_group() as group:
        wrapped = ShardedDataParallel(
            Tied(), plan=plan(), process_group=group, updates_by_bucket=True
        )
        optimizer = torch.optim.Adam(wrapped.parameters(), lr=1e-4)
        tokens = torch.randint(WORDS, (TOKENS,))
        updates_s: list[float] = []

        def step() -> None:
            optimizer.zero_grad()
            wrapped(tokens).square().mean().backward()
            started_s = time.perf_counter()
            optimizer.step()
            updates_s.append(time.perf_counter() - started_s)

        def turn() -> float:
            for _ in range(STEPS):
                started_s = time.perf_counter()
                step()
            return time.perf_counter() - started_s

        turn()
        taken_s: list[float] = []
        updates_s.clear()
        for _ in range(TURNS):
            handle = optimizer.register_step_pre_hook(lambda *_: None)
            taken_s.append(turn())
            handle.remove()
            taken_s.append(turn())
        whole_updates_s = [updates_s[i] for i in range(0, len(updates_s), 2 * STEPS)]
        wrapped.synchronise()
        slowest_s = largest(group, taken_s)
        if group.rank() == 0:
            turns = Turns(
                whole_s=slowest_s[::2], parts_s=slowest_s[1::2], update_s=median(whole_updates_s)
            )
            print(msgspec.json.encode(turns).decode(), flush=True)


def page(found: Mapping[str, Turns]) -> str:
    elements = sum(parameter.numel() for parameter in Tied().parameters())
    lines = [
        "# Updating bucket by bucket beside all-gathers",
        "",
        made_with(),
        "",
        f"Made by `python benchmarks/update_overlap.py`: {elements / 1e6:.1f} million parameters, "
        f"{WORDS * WIDTH / 1e6:.1f} of them in a tied embedding; Adam, five messages in each pass. "
        f"Steps of the slowest rank, medians of {TURNS} pairs in turn; the gain is the median over "
        "pairs, with its quartiles.",
        "",
        "| | update of a rank's shards, ms | everything first, ms | bucket by bucket, ms | gain |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, turns in found.items():
        gains = sorted(
            1 - part_s / whole_s
            for whole_s, part_s in zip(turns.whole_s, turns.parts_s, strict=True)
        )
        lines.append(
            f"| {name} | {turns.update_s * 1e3:.0f} | {median(turns.whole_s) * 1e3:.0f} "
            f"| {median(turns.parts_s) * 1e3:.0f} | {_with_quartiles(gains)} |"
        )
    return "\n".join(lines) + "\n"


def _with_quartiles(gains: Sequence[float]) -> str:
    quarter = len(gains) // 4
    return f"{median(gains):.1%} ({gains[quarter]:.1%} to {gains[-1 - quarter]:.1%})"


if __name__ == "__main__":
    main()
