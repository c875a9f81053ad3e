"""Sparse exchanges beside the paper's tree: ``python benchmarks/exchanges.py OUTPUT``.

Every rank sends k random elements of 25 million, half of them the same on all ranks; the exchanges
take turns on emulated clusters at 100 Mbit/s. Writes OUTPUT.json and OUTPUT.md. Two minutes on two
cores; leave the machine alone meanwhile.
"""

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
from ask_ranks import answer_of, is_rank
from made_with import made_with

from gradweave._src.bench.ranks import default_group
from gradweave._src.comm.small_messages import largest
from gradweave._src.sparse.exchange import EXCHANGES
from gradweave._src.sparse.exchanger import Exchanger
from gradweave._src.sparse.vectors import SparseVector

NODES = (2, 3, 4, 8)
RATE = "100mbit"
ELEMENTS = 25_000_000
KEPT = (1_000, 5_000, 25_000, 100_000)
REPEATS = 9
PAPERS = "gtopk-tree"
# The naive way sends what top-k sends, and the lossy tree what the tree sends.
TIMED = [name for name in EXCHANGES if name not in {"gtopk-all-gather", "gtopk-tree-lossy"}]

# Seconds, by exchange, for each k.
Found = dict[int, dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="path without suffix")
    if is_rank():
        answer()
        return
    output = parser.parse_args().output
    found = {nodes: answer_of(__file__, Found, nodes=nodes, rate=RATE) for nodes in NODES}
    output.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    output.with_suffix(".md").write_text(page(found))


def answer() -> None:
    """Time the exchanges on one rank; rank 0 answers with the slowest one's times."""
    with default_group() as group:
        exchanger = Exchanger(group)
        found: Found = {}
        for k in KEPT:
            mine = chosen(k, seed=group.rank())
            taken_s: list[float] = []
            for _ in range(1 + REPEATS):
                for name in TIMED:
                    group.barrier().wait()
                    started_s = time.perf_counter()
                    exchanger.run(mine, exchange=name, k=k, numel=ELEMENTS)
                    taken_s.append(time.perf_counter() - started_s)
            slowest_s = largest(group, taken_s)[len(TIMED) :]
            found[k] = {
                name: median(slowest_s[place :: len(TIMED)]) for place, name in enumerate(TIMED)
            }
        if group.rank() == 0:
            print(msgspec.json.encode(found).decode(), flush=True)


def chosen(k: int, seed: int) -> SparseVector:
    """Draw a rank's k elements, half of which all ranks share, as gradients agree in part."""
    common, own = np.random.default_rng(0), np.random.default_rng(1 + seed)
    shared = common.choice(ELEMENTS, k // 2, replace=False)
    others = np.setdiff1d(own.choice(ELEMENTS, k, replace=False), shared)
    indices = np.concatenate([shared, own.permutation(others)[: k - len(shared)]])
    indices = np.sort(indices).astype(np.int32)
    return SparseVector(indices, own.standard_normal(k, dtype=np.float32))


def page(found: Mapping[int, Found]) -> str:
    lines = [
        "# Sparse exchanges",
        "",
        made_with(),
        "",
        f"Made by `python benchmarks/exchanges.py`. k elements of {ELEMENTS:,} on every rank, "
        f"nodes of one rank at {RATE}; times of the slowest rank, medians of {REPEATS} in turn. "
        "The ratios say how many times as fast as the others the butterfly is.",
        "",
        f"| nodes | k | {' | '.join(f'{name}, ms' for name in TIMED)} "
        "| tree / butterfly | top-k / butterfly |",
        f"|---:|---:|{'---:|' * len(TIMED)}---:|---:|",
    ]
    for nodes, by_k in found.items():
        for k, seconds in by_k.items():
            butterfly_s = seconds["gtopk"]
            cells = " | ".join(f"{seconds[name] * 1e3:.1f}" for name in TIMED)
            lines.append(
                f"| {nodes} | {k:,} | {cells} | {seconds[PAPERS] / butterfly_s:.2f}x "
                f"| {seconds['topk'] / butterfly_s:.2f}x |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
