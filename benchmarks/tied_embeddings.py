"""What hides the messages of a tied embedding: ``python benchmarks/tied_embeddings.py OUTPUT``.

On paper, for plans for both passes: what updating bucket by bucket saves, what splitting the
largest tensor would add to that, and what sending a tied embedding's gradient in two parts would
save. Writes OUTPUT.md. Seconds.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from made_with import made_with

from gradweave import Network, Trace, load_network, load_trace
from gradweave._src.planning.both_passes import optimal_for_both

TRACES = ("gpt2", "bert-base", "resnet50", "vit-b16")
NETWORKS = ("k80-10gbe", "gtopk-1gbe")
WORKERS = (8, 16, 32)
# Adam reads parameter, gradient and two moments of an element and writes three of them.
UPDATED_BYTES = 28
UPDATES_BYTES_PER_S = {"an accelerator's": 100e9, "a host's": 10e9}
PARTS = 4
# gpt2's batch has 8 texts of 1024 tokens: at most so many rows of a rank's embedding differ from 0.
MOST_ROWS = 8 * 1024
INDEX_BYTES = 4


class Job:
    """A trace on some workers of a network, and its optimal buckets."""

    def __init__(self, trace: Trace, network: Network, workers: int) -> None:
        halves = [
            network.cost(operation, "ring", workers=workers)
            for operation in ("reduce-scatter", "all-gather")
        ]
        self.trace, self.workers = trace, workers
        self._scatter, self._gather = halves
        lengths = optimal_for_both(trace, *halves, tolerance=0)
        ends = [sum(lengths[: number + 1]) for number in range(len(lengths))]
        self.buckets = [
            trace.tensors[end - length : end] for end, length in zip(ends, lengths, strict=True)
        ]
        self.sizes = [sum(tensor.nbytes for tensor in bucket) for bucket in self.buckets]
        self.ready_s = [bucket[-1].ready_s for bucket in self.buckets]

    def scatter_s(self, nbytes: float) -> float:
        return float(self._scatter.seconds(np.array(nbytes)))

    def gather_s(self, nbytes: float) -> float:
        return float(self._gather.seconds(np.array(nbytes)))

    def tail_s(self, ready: Sequence[tuple[float, float]]) -> float:
        """Return when the last reduce-scatter is over, given starts and bytes of all of them."""
        free_s = 0.0
        for ready_s, nbytes in ready:
            free_s = max(free_s, ready_s) + self.scatter_s(nbytes)
        return free_s

    def forward_s(self, updates_s: Sequence[float], sizes: Sequence[float]) -> float:
        """Return the time from the last reduce-scatter to the end of forward.

        ``updates_s`` are when buckets have been updated, and forward begins with the last of them.
        """
        free_s, arrived_s = 0.0, [0.0] * len(sizes)
        for number in reversed(range(len(sizes))):
            free_s = max(free_s, updates_s[number]) + self.gather_s(sizes[number])
            arrived_s[number] = free_s
        now_s = max(updates_s)
        for number in reversed(range(len(sizes))):
            now_s = max(now_s, arrived_s[number])
            now_s += sum(tensor.forward_s for tensor in self.buckets[number])
        return now_s

    @property
    def scatters(self) -> list[tuple[float, float]]:
        return list(zip(self.ready_s, map(float, self.sizes), strict=True))

    def iteration_s(self, updates_s: Sequence[float] | None = None) -> float:
        updates_s = updates_s or [0.0] * len(self.sizes)
        return self.tail_s(self.scatters) + self.forward_s(updates_s, self.sizes)

    def updates_s(self, bytes_per_s: float) -> list[float]:
        """Return what each bucket's update takes."""
        per_byte_s = UPDATED_BYTES / 4 / self.workers / bytes_per_s
        return [size * per_byte_s for size in self.sizes]

    def in_two_s(self, *, last_bytes: float, first_bytes: float | None = None) -> float:
        """Return the time of both passes with the last tensor's gradient sent early and again.

        At the end ``last_bytes`` of it travel. ``first_bytes`` of its parameters are needed at the
        beginning of forward, the others at its end; with None all of them are needed at the
        beginning.
        """
        tied = self.trace.tensors[-1]
        rest = self.sizes[-1] - tied.nbytes
        early = (self.trace.tensors[0].ready_s, float(tied.nbytes))
        *others, (ready_s, _) = self.scatters
        tail_s = self.tail_s([early, *others, (ready_s, rest + last_bytes)])
        if first_bytes is None:
            return tail_s + self.forward_s([0.0] * len(self.sizes), self.sizes)
        sizes = [*self.sizes[:-1], rest + first_bytes]
        gathered_s = sum(map(self.gather_s, [*sizes, tied.nbytes - first_bytes]))
        return tail_s + max(self.forward_s([0.0] * len(sizes), sizes), gathered_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="path without suffix")
    output = parser.parse_args().output
    lines = [
        "# What hides the messages of a tied embedding",
        "",
        made_with(),
        "",
        "Made by `python benchmarks/tied_embeddings.py`: predictions, for the optimal plan of each "
        "model without time for updates.",
        "",
        *updating(),
        "",
        *sending_twice(),
    ]
    output.with_suffix(".md").write_text("\n".join(lines) + "\n")


def updating() -> Iterator[str]:
    yield "## Updating bucket by bucket"
    yield ""
    yield (
        f"Adam moves {UPDATED_BYTES} bytes for an element of a rank's shards. *gain*: of updating "
        "and sending bucket by bucket over updating everything first. *left*: what an iteration "
        f"without updates would gain over that. *split*: what {PARTS} messages for the largest "
        "tensor of the bucket that forward needs first would gain at most."
    )
    for whose, bytes_per_s in UPDATES_BYTES_PER_S.items():
        yield ""
        yield f"At {bytes_per_s / 1e9:.0f} GB/s, such as {whose}:"
        yield ""
        yield "| | | workers | everything first, ms | gain | left | split |"
        yield "|---|---|---:|---:|---:|---:|---:|"
        for name in TRACES:
            for network in NETWORKS:
                for workers in WORKERS:
                    job = Job(load_trace(name), load_network(network), workers)
                    yield f"| {name} | {network} | {workers} | {_updated(job, bytes_per_s)} |"


def _updated(job: Job, bytes_per_s: float) -> str:
    each_s = job.updates_s(bytes_per_s)
    whole_s = job.iteration_s([sum(each_s)] * len(each_s))
    parts_s = job.iteration_s([sum(each_s[number:]) for number in range(len(each_s))])
    ideal_s = job.iteration_s()
    largest = max(tensor.nbytes for tensor in job.buckets[-1]) / job.sizes[-1]
    split_s = min(parts_s - ideal_s, each_s[-1] * largest * (1 - 1 / PARTS))
    gains = (whole_s - parts_s, parts_s - ideal_s, split_s)
    cells = " | ".join(f"{gain_s / whole_s:.2%}" for gain_s in gains)
    return f"{whole_s * 1e3:.0f} | {cells}"


def sending_twice() -> Iterator[str]:
    trace = load_trace("gpt2")
    tied = trace.tensors[-1]
    assert tied.shape is not None
    row_bytes = tied.nbytes / tied.shape[0]
    rows_bytes = MOST_ROWS * (row_bytes + INDEX_BYTES)
    yield "## The gradient of a tied embedding in two parts"
    yield ""
    yield (
        f"gpt2, {tied.name}: {tied.nbytes / 1e6:.0f} MB. The output layer's part is complete when "
        "backward has just begun, the input's when it ends. *dense*: both parts whole. *rows*: of "
        f"the input's part only those that a batch has, {MOST_ROWS:,} at most "
        f"({rows_bytes / 1e6:.0f} MB, each to the rank that owns it). *rows in both*: forward "
        "waits for no more than these rows, and for all others before its output layer."
    )
    yield ""
    yield "| | workers | today, ms | dense, ms | rows, ms | rows in both, ms | computing, ms |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for network in NETWORKS:
        for workers in WORKERS:
            job = Job(trace, load_network(network), workers)
            found_s = (
                job.iteration_s(),
                job.in_two_s(last_bytes=tied.nbytes),
                job.in_two_s(last_bytes=rows_bytes),
                job.in_two_s(last_bytes=rows_bytes, first_bytes=rows_bytes),
                trace.compute_s,
            )
            cells = " | ".join(f"{seconds * 1e3:.0f}" for seconds in found_s)
            yield f"| {network} | {workers} | {cells} |"


if __name__ == "__main__":
    main()
