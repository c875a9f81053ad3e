"""How long selections take, and whether they are exact; how long exchanges take."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from time import perf_counter

import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import replace

from gradweave._src.comm.small_messages import largest
from gradweave._src.costs.cost import Line
from gradweave._src.costs.sparse import BYTES_PER_ELEMENT
from gradweave._src.sparse.exchanger import Exchanger
from gradweave._src.sparse.residual import Flat, carried_type
from gradweave._src.sparse.select import check_selection, compile_kernels, default_selection, select
from gradweave._src.sparse.settings import Sparse
from gradweave._src.sparse.step import Sparsifier
from gradweave._src.sparse.vectors import SparseVector, elements_kept
from gradweave._src.sparse.warmup import MomentumCorrection, clip_local_norm
from gradweave._src.torch_internals import HOST

BASELINE = "torch-topk"

# So many elements are selected from when that is timed in passing: more than caches hold, and over
# soon.
MOST_TIMED = 1 << 20
TIMES = 3
# Elements of a bucket from which selecting takes no time, and of a message whose bytes take some.
LEAST_PROBED = 64
EXCHANGED = 1 << 14
NOT_CLIPPED = 1e30


class SelectionTiming(Struct, frozen=True, kw_only=True):
    """What one method took to add the gradient, select, and take the selected values out."""

    method: str
    numel: int
    k: int
    median_s: float
    exact: bool  # the k largest, of equals the first ones, and nothing lost
    ratio: float | None = None  # how many times as fast as torch-topk, if that was timed too


def time_selections(
    methods: Sequence[str],
    *,
    numel: int,
    density: float,
    repeats: int,
    threads: int = 1,
    on_timed: Callable[[], None] = lambda: None,
) -> list[SelectionTiming]:
    """Time all methods on the same normally distributed numbers, in turn, for machines drift.

    The first run of each is not counted; ``on_timed`` is called after every run.
    """
    for method in methods:
        check_selection(method)
    k = elements_kept(numel, density)
    compile_kernels(torch.float32)
    generator = torch.Generator(HOST).manual_seed(0)
    kept, gradient = (torch.randn(numel, generator=generator, device=HOST) for _ in range(2))
    flat = Flat((), kept, torch.zeros_like(kept))
    exact: dict[str, bool] = {}
    times: dict[str, list[float]] = {method: [] for method in methods}
    with _threads(threads):
        for repeat in range(repeats + 1):
            for method, taken in times.items():
                started_s = perf_counter()
                chosen = select(flat, gradient, k=k, method=method)
                taken_s = perf_counter() - started_s
                if repeat:
                    taken.append(taken_s)
                else:
                    exact[method] = _is_exact(flat, gradient, chosen, k)
                on_timed()
    timings = {
        method: SelectionTiming(
            method=method, numel=numel, k=k, median_s=median(taken), exact=exact[method]
        )
        for method, taken in times.items()
    }
    if BASELINE not in timings:
        return list(timings.values())
    base_s = timings[BASELINE].median_s
    return [replace(timing, ratio=base_s / timing.median_s) for timing in timings.values()]


def selection_s_per_element(
    numel: int, *, like: torch.Tensor, density: float, settings: Sparse
) -> float:
    """Time selecting, and what comes before it, for gradients like ``like``: some milliseconds.

    It includes making the zeros into which a bucket's result is written: there are as many.
    """
    numel = max(1, min(numel, MOST_TIMED))
    kind = carried_type(like.dtype)
    kept, pending = (torch.zeros(numel, dtype=kind, device=like.device) for _ in range(2))
    own = torch.Generator(HOST).manual_seed(0)  # training goes on drawing from torch's own
    gradient = torch.randn(numel, generator=own, device=HOST).to(like.device, like.dtype)
    applied = torch.empty_like(gradient)
    k, method = elements_kept(numel, density), settings.selection or default_selection(like.device)
    velocities = None
    if settings.momentum is not None:
        velocities = MomentumCorrection({"probe": kept}, momentum=settings.momentum)

    def run() -> None:
        if settings.clip_norm is not None:
            clip_local_norm(gradient, {"probe": numel}, limit=NOT_CLIPPED)
        candidates = gradient
        if velocities is not None:
            candidates = velocities.begin(["probe"], gradient).pending
            velocities.velocities.rollback()
        select(Flat((), kept, pending), candidates, k=k, method=method)
        applied.zero_()

    return _median_s(run) / numel


def exchange_cost(
    exchanger: Exchanger, *, exchange: str, density: float, numel: int | None = None
) -> Line:
    """Measure what a message takes beside selecting, over the bytes of the dense message.

    The slowest rank counts; call it on every rank. With ``numel``, the elements of a model, no
    vector that is sent here has more bytes than half of it.
    """
    ranks, rank = exchanger.group.size(), exchanger.group.rank()
    probe = {"probe": torch.zeros(LEAST_PROBED, device=HOST)}
    sparsifier = Sparsifier(exchanger, probe, exchange=exchange, selection=BASELINE)

    def small() -> None:
        """Do everything that is done for a bucket."""
        sparsifier.reduce(
            ["probe"], torch.ones(LEAST_PROBED, device=HOST), density=1 / LEAST_PROBED
        )
        sparsifier.rollback()

    def of_many(k: int) -> None:
        indices = ranks * np.arange(k, dtype=np.int32) + rank
        values = np.full(k, 1.0 + rank, np.float32)
        exchanger.run(SparseVector(indices, values), exchange=exchange, k=k, numel=k * ranks)

    many = EXCHANGED if numel is None else max(2, min(EXCHANGED, numel // 4))
    startup_s, one_s, many_s = largest(
        exchanger.group,
        [_median_s(run) for run in (small, partial(of_many, 1), partial(of_many, many))],
    )
    s_per_exchanged = max(0.0, many_s - one_s) / (many - 1)
    return Line(startup_s=startup_s, s_per_byte=s_per_exchanged * density / BYTES_PER_ELEMENT)


def _median_s(run: Callable[[], object]) -> float:
    """Return the median time of a call, without the first one, which allocates."""
    times_s = []
    for _ in range(1 + TIMES):
        started_s = perf_counter()
        run()
        times_s.append(perf_counter() - started_s)
    return median(times_s[1:])


def _is_exact(flat: Flat, gradient: torch.Tensor, chosen: SparseVector, k: int) -> bool:
    """Tell by what is left, not by another selection, whether these are the k largest."""
    indices, values = torch.from_numpy(chosen.indices).long(), torch.from_numpy(chosen.values)
    total = flat.kept + gradient
    left = total.index_fill(0, indices, 0)
    if len(chosen) != k or not torch.equal(left, flat.pending):
        return False
    smallest = values.abs().min()
    ties = torch.nonzero(total.abs() == smallest).view(-1)
    chosen_ties = indices[values.abs() == smallest]
    others = left.abs().max() if k < len(left) else left.new_zeros(())
    return (
        torch.equal(values, total[indices])
        and bool(others <= smallest)
        and torch.equal(chosen_ties, ties[: len(chosen_ties)])
    )


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
