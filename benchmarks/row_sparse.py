"""Rows instead of a dense gradient, exactly: ``python benchmarks/row_sparse.py OUTPUT``.

The large table of the shipped `recommender` has a gradient in as few rows as a batch looks up. Each
rank finds them in its dense gradient, all ranks exchange rows and indices, and each adds them up in
the order of ranks. Beside it: the dense all-reduce, and torch's own for embeddings that have
``sparse=True``, whose gradients are rows from the beginning. On emulated clusters.
Writes OUTPUT.json and OUTPUT.md. Five minutes on two cores.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from ask_ranks import run_cases
from made_with import made_with
from msgspec import Struct

from gradweave._src.bench.ranks import default_group
from gradweave._src.comm.communicator import Communicator
from gradweave._src.comm.small_messages import largest
from gradweave._src.presets import load_trace

CASES = ((2, "10gbit"), (2, "1gbit"), (4, "1gbit"))
TABLE = "tables.0.weight"
BATCHES = (256, 2048, 16384, 65536)
REPEATS = 5
DENSE_REPEATS = 3


class Taken(Struct, frozen=True, kw_only=True):
    """Seconds of the slowest rank, for one size of batches."""

    rows: int  # that differ, on one rank
    find_s: float
    exchange_s: float  # rows that have been found, until they are added up
    torchs_s: float


class Found(Struct, frozen=True, kw_only=True):
    """What was measured on one cluster."""

    dense_s: float
    compared_s: float  # finding rows by comparing every element with zero
    by_batch: dict[int, Taken]


def main() -> None:
    run_cases(__file__, Found, description=__doc__, cases=CASES, answer=answer, page=page)


def answer() -> None:
    """Time all ways on one rank; rank 0 prints the answer."""
    with default_group() as group:
        gradient = torch.zeros(table_shape())
        communicator = Communicator(group)

        def slowest_s(act: Callable[[], object], repeats: int = REPEATS) -> float:
            taken_s = []
            for _ in range(1 + repeats):
                group.barrier().wait()
                started_s = time.perf_counter()
                act()
                taken_s.append(time.perf_counter() - started_s)
            return median(largest(group, taken_s[1:]))

        by_batch = {}
        for batch in BATCHES:
            drawn = np.random.default_rng(group.rank()).integers(len(gradient), size=batch)
            looked_up = torch.from_numpy(np.unique(drawn))
            values = torch.randn(len(looked_up), gradient.shape[1])
            fill(gradient, looked_up, values)
            indices = rows_with_a_gradient(gradient)
            assert torch.equal(indices, looked_up)
            check_sums(gradient, indices, group)
            fill(gradient, looked_up, values)
            by_batch[batch] = Taken(
                rows=len(indices),
                find_s=slowest_s(partial(rows_with_a_gradient, gradient)),
                exchange_s=slowest_s(partial(add_up_rows, gradient, indices, group)),
                torchs_s=slowest_s(partial(all_reduce_by_torch, indices, values, gradient.shape)),
            )
        found = Found(
            dense_s=slowest_s(
                lambda: communicator.run("all-reduce", gradient.view(-1), collective="ring"),
                DENSE_REPEATS,
            ),
            compared_s=slowest_s(lambda: (gradient != 0).any(1)),
            by_batch=by_batch,
        )
        if group.rank() == 0:
            print(msgspec.json.encode(found).decode(), flush=True)


def table_shape() -> tuple[int, ...]:
    tensors = {tensor.name: tensor for tensor in load_trace("recommender").tensors}
    shape = tensors[TABLE].shape
    assert shape is not None
    return shape


def fill(gradient: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    gradient.zero_()
    gradient[indices] = values


def rows_with_a_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """Return the rows that are not zero; one with NaN has a gradient, too.

    This is the fastest of nine ways that were tried.
    """
    return ((gradient.amax(1) != 0) | (gradient.amin(1) != 0)).nonzero().flatten()


def add_up_rows(gradient: torch.Tensor, indices: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Add up all ranks' rows in the order of ranks, so that all have the same bits."""
    own = torch.tensor([len(indices)])
    counts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(counts, own)
    most = int(max(counts))
    sent_indices, sent_rows = indices.new_zeros(most), gradient.new_zeros(most, gradient.shape[1])
    sent_indices[: len(indices)] = indices
    torch.index_select(gradient, 0, indices, out=sent_rows[: len(indices)])
    every_index = [torch.empty_like(sent_indices) for _ in counts]
    every_row = [torch.empty_like(sent_rows) for _ in counts]
    dist.all_gather(every_index, sent_indices)
    dist.all_gather(every_row, sent_rows)
    gradient.index_fill_(0, indices, 0.0)
    for count, index, rows in zip(counts, every_index, every_row, strict=True):
        gradient.index_add_(0, index[: int(count)], rows[: int(count)])


def all_reduce_by_torch(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> None:
    sparse = torch.sparse_coo_tensor(indices[None], values, shape, is_coalesced=True)
    dist.all_reduce(sparse)


def check_sums(gradient: torch.Tensor, indices: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Check that rows add up to a dense all-reduce's sums, up to the order of additions."""
    dense = gradient.clone()
    dist.all_reduce(dense)
    add_up_rows(gradient, indices, group)
    torch.testing.assert_close(gradient, dense)


def page(found: Mapping[str, Found]) -> str:
    rows, columns = table_shape()
    lines = [
        "# Rows instead of a dense gradient",
        "",
        made_with(),
        "",
        f"Made by `python benchmarks/row_sparse.py`: a table of {rows:,} rows with {columns} "
        f"columns ({rows * columns * 4 / 1e6:.0f} MB), of which each sample of a batch looks up "
        f"one, at random. Times of the slowest rank, medians of {REPEATS} (dense: "
        f"{DENSE_REPEATS}); sums were compared with those of a dense all-reduce.",
        "",
        "| | batch | rows found | find, ms | exchange and add, ms | together, ms | torch's for "
        "sparse=True, ms | dense, ms | dense / together |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, one in found.items():
        for batch, taken in one.by_batch.items():
            together_s = taken.find_s + taken.exchange_s
            lines.append(
                f"| {name} | {batch:,} | {taken.rows:,} | {taken.find_s * 1e3:.0f} "
                f"| {taken.exchange_s * 1e3:.1f} | {together_s * 1e3:.0f} "
                f"| {taken.torchs_s * 1e3:.1f} | {one.dense_s * 1e3:.0f} "
                f"| {one.dense_s / together_s:.1f}x |"
            )
    find_s = median(taken.find_s for one in found.values() for taken in one.by_batch.values())
    compared_s = median(one.compared_s for one in found.values())
    lines += [
        "",
        f"Finding rows takes {find_s / (rows * columns) * 1e9:.2f} ns an element by the largest "
        f"and the smallest of each row, {compared_s / (rows * columns) * 1e9:.2f} ns by "
        "`(gradient != 0).any(1)`.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
