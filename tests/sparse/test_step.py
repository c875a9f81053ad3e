"""Whole steps on process groups: what the communication hook of a runtime does."""

import io

import pytest
import torch
from ranks import on_threads

from gradweave._src.errors import RequestError
from gradweave._src.sparse.exchange import EXCHANGES
from gradweave._src.sparse.exchanger import Exchanger
from gradweave._src.sparse.step import Sparsifier
from gradweave._src.sparse.warmup import MomentumCorrection

NUMEL = {"a": 30, "b": 7, "c": 1}
PARAMETERS = {name: torch.zeros(numel) for name, numel in NUMEL.items()}
BUCKETS = [["c", "b"], ["a"]]
OTHER_BUCKETS = [["c"], ["b", "a"]]
CONSERVING = [name for name in EXCHANGES if name != "gtopk-tree-lossy"]


def gradient_of(rank, step, names, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * step + rank)
    whole = {n: torch.randint(-5, 6, (k,), generator=generator) for n, k in NUMEL.items()}
    return torch.cat([whole[name] for name in names]).to(dtype)


def sparsifier(group, **options):
    return Sparsifier(Exchanger(group), PARAMETERS, **options)


def pieces(names, flat):
    return dict(zip(names, torch.split(flat, [NUMEL[name] for name in names]), strict=True))


def trained(group, options, steps):
    """Sums of gradients produced, of what was applied, and the residuals in the end."""
    sparse = sparsifier(group, **options)
    produced = {name: torch.zeros(numel) for name, numel in NUMEL.items()}
    applied = {name: torch.zeros(numel) for name, numel in NUMEL.items()}
    for step in range(steps):
        for names in BUCKETS if step < 2 else OTHER_BUCKETS:
            gradient = gradient_of(group.rank(), step, names)
            for name, part in pieces(names, gradient).items():
                produced[name] += part
            sparse.reduce(names, gradient, density=0.1)
            for name, part in pieces(names, gradient).items():
                applied[name] += part
        assert sparse.commit()
    residuals = {name: sparse.residuals.value(name) for name in NUMEL}
    return [torch.cat(list(one.values())) for one in (produced, applied, residuals)]


@pytest.mark.parametrize("exchange", CONSERVING)
@pytest.mark.parametrize("world", [1, 3, 4])
def test_applied_and_residuals_are_all_gradients(exchange, world):
    """Through several steps and a change of buckets, exactly."""
    results = on_threads(world, trained, {"exchange": exchange}, 5)
    produced, applied, residuals = (torch.stack(kind) for kind in zip(*results, strict=True))
    assert all(torch.equal(one, applied[0]) for one in applied)
    assert torch.equal(applied[0] + residuals.sum(dim=0), produced.sum(dim=0))
    assert residuals.any() or world == 1


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("below", [2, 8, 31])
def test_small_parameters_travel_whole(below, world):
    """Nothing of them is left, also where nothing else is in their bucket, and nothing is lost."""
    results = on_threads(world, trained, {"dense_below": below}, 5)
    produced, applied, residuals = (torch.stack(kind) for kind in zip(*results, strict=True))
    assert all(torch.equal(one, applied[0]) for one in applied)
    assert torch.equal(applied[0] + residuals.sum(dim=0), produced.sum(dim=0))
    whole = torch.cat([torch.full((numel,), numel < below) for numel in NUMEL.values()])
    assert not residuals[:, whole].any()
    assert torch.equal(applied[0][whole], produced.sum(dim=0)[whole])
    assert residuals.any() or world == 1 or below == 31


def with_momentum(group):
    """The small one follows the optimizer's momentum, for nothing of it waits or is masked."""
    sparse = sparsifier(group, momentum=MomentumCorrection(PARAMETERS, momentum=0.5), dense_below=8)
    applied = []
    for step in range(3):
        gradient = gradient_of(group.rank(), step, ["a", "b"])
        sparse.reduce(["a", "b"], gradient, density=1.0)
        applied.append(gradient[NUMEL["a"] :].clone())
        sparse.commit()
    return applied


def test_momentum_of_what_travels_whole():
    velocity = torch.zeros(NUMEL["b"])
    for step, first, second in zip(range(3), *on_threads(2, with_momentum), strict=True):
        velocity = 0.5 * velocity + sum(gradient_of(rank, step, ["b"]) for rank in range(2))
        assert torch.equal(first, velocity)
        assert torch.equal(second, velocity)


def not_finite_in(group, names, dtype, value, density):
    """Rank 1's first element is not finite, or rank 0's sum with it is too large for the type."""
    sparse = sparsifier(group, dense_below=8)
    gradient = torch.zeros(sum(NUMEL[name] for name in names), dtype=dtype)
    gradient[0] = value
    if not torch.isfinite(gradient[0]) and group.rank() == 0:
        gradient[0] = 0
    done = sparse.reduce(names, gradient, density=density)
    left = {name: sparse.residuals.value(name).any().item() for name in names}
    return done.finite, gradient.isnan().all().item(), sparse.commit(), any(left.values())


@pytest.mark.parametrize("names", [["a", "b"], ["b", "a"], ["b", "c"]])
@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.float32, float("nan")), (torch.float32, float("inf")), (torch.float16, 60_000.0)],
)
def test_what_is_not_finite_is_seen_by_all_wherever_it_is(names, dtype, value):
    expected = (False, True, False, False)
    assert on_threads(2, not_finite_in, names, dtype, value, 0.1) == [expected] * 2


def test_what_travels_whole_has_no_residuals_to_load():
    def load(group):
        sparse = sparsifier(group)
        sparse.reduce(["b"], gradient_of(0, 0, ["b"]), density=0.2)
        sparse.commit()
        with pytest.raises(RequestError, match="residuals of 'b', which travels whole here; set"):
            sparsifier(group, dense_below=8).load_state_dict(sparse.state_dict())

    on_threads(1, load)


@pytest.mark.parametrize("selection", ["torch-topk", "sampled", "gaussian"])
def test_whatever_is_selected_nothing_is_lost(selection):
    results = on_threads(3, trained, {"selection": selection}, 4)
    produced, applied, residuals = (torch.stack(kind) for kind in zip(*results, strict=True))
    assert torch.equal(applied[0] + residuals.sum(dim=0), produced.sum(dim=0))


def dense(group, exchange, dtype):
    gradient = gradient_of(group.rank(), 0, ["a", "b"], dtype)
    sparsifier(group, exchange=exchange).reduce(["a", "b"], gradient, density=1.0, divide_by=2.0)
    return gradient


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_density_1_is_the_dense_result(exchange, dtype):
    expected = sum(gradient_of(rank, 0, ["a", "b"]) for rank in range(3)) / 2
    for gradient in on_threads(3, dense, exchange, dtype):
        assert gradient.dtype == dtype
        assert torch.equal(gradient.float(), expected)


def skipping(group, how):
    """A step that all ranks skip, between two that are taken; then a fresh run without it."""
    histories = []
    for steps in ([0, 1, 2], [0, 2]):
        momentum = MomentumCorrection(PARAMETERS)
        sparse = sparsifier(group, momentum=momentum, clip_norm=20.0)
        for step in steps:
            for names in BUCKETS:
                gradient = gradient_of(group.rank(), step, names)
                if step == 1 and how == "nan" and group.rank() == 1 and names == BUCKETS[0]:
                    gradient[0] = torch.nan
                done = sparse.reduce(names, gradient, density=0.1)
                if step == 1 and how == "nan" and names == BUCKETS[0]:
                    assert not done.finite
                    assert gradient.isnan().all()
            if step == 1 and how == "skipped":
                sparse.rollback()
            else:
                assert sparse.commit() == (step != 1)
        histories.append(sparse.state_dict())
    return [
        torch.equal(value, histories[1][kind]["values"][name])
        for kind, state in histories[0].items()
        for name, value in state["values"].items()
    ]


@pytest.mark.parametrize("how", ["nan", "skipped"])
def test_a_skipped_step_leaves_every_bit(how):
    """Skipped by the optimizer, or because one rank has NaN in one bucket: seen by all."""
    assert on_threads(2, skipping, how) == [[True] * 6] * 2


def resumed(group):
    """Four steps at once, and two steps, a file, two steps."""
    ends = []
    for stop in (None, 2):
        sparse = sparsifier(group, momentum=MomentumCorrection(PARAMETERS))
        for step in range(4):
            if step == stop:
                file = io.BytesIO()
                torch.save(sparse.state_dict(), file)
                file.seek(0)
                sparse = sparsifier(group, momentum=MomentumCorrection(PARAMETERS))
                sparse.load_state_dict(torch.load(file, weights_only=True))
            last = []
            for names in BUCKETS:
                gradient = gradient_of(group.rank(), step, names) + 0.1
                sparse.reduce(names, gradient, density=0.1)
                last.append(gradient)
            sparse.commit()
        ends.append(torch.cat(last))
    return torch.equal(*ends)


def test_resuming_equals_an_uninterrupted_run():
    assert on_threads(2, resumed) == [True, True]


def scaled(group):
    """Powers of two leave no trace, whenever the loss scale changes."""
    ends = []
    for scales in ([1.0] * 4, [2.0**16, 2.0**15, 2.0**15, 2.0**17]):
        sparse = sparsifier(group, momentum=MomentumCorrection(PARAMETERS), clip_norm=20.0)
        total = torch.zeros(NUMEL["a"])
        for step, scale in enumerate(scales):
            sparse.follow_scale(scale)
            gradient = gradient_of(group.rank(), step, ["a"]) * scale
            sparse.reduce(["a"], gradient, density=0.1)
            total += gradient / scale
            sparse.commit()
        ends.append(total)
    return torch.equal(*ends)


def test_a_changing_loss_scale_changes_nothing():
    assert on_threads(2, scaled) == [True, True]


def masked(group, gradients):
    """One step with k = 1: what is applied, this rank's residual and its velocity."""
    parameters = {"w": torch.zeros(2)}
    momentum = MomentumCorrection(parameters, momentum=0.5)
    sparse = Sparsifier(Exchanger(group), parameters, momentum=momentum)
    gradient = torch.tensor(gradients[group.rank()])
    sparse.reduce(["w"], gradient, density=0.5)
    sparse.commit()
    return (
        gradient.tolist(),
        sparse.residuals.value("w").tolist(),
        momentum.velocities.value("w").tolist(),
    )


def test_only_what_was_applied_loses_its_momentum():
    """Rank 0's element wins, rank 1's returns and keeps its momentum."""
    assert on_threads(2, masked, [[8.0, 1.0], [1.0, 6.0]]) == [
        ([8.0, 0.0], [0.0, 1.0], [0.0, 1.0]),
        ([8.0, 0.0], [1.0, 6.0], [1.0, 6.0]),
    ]


def test_what_was_dropped_half_way_keeps_its_momentum():
    """Element 0 is applied, but rank 1's part of it is not (the table of the documentation)."""
    gradients = [[0.0, 3.0], [2.0, 0.0], [5.0, 0.0], [0.0, 1.0]]
    applied = [5.0, 0.0]
    assert on_threads(4, masked, gradients) == [
        (applied, [0.0, 3.0], [0.0, 3.0]),
        (applied, [2.0, 0.0], [2.0, 0.0]),
        (applied, [0.0, 0.0], [0.0, 0.0]),
        (applied, [0.0, 1.0], [0.0, 1.0]),
    ]


def bad_requests(group):
    sparse = sparsifier(group)
    for density in (0.0, 1.5, float("nan")):
        with pytest.raises(RequestError, match="density must be above 0 and at most 1"):
            sparse.reduce(["a"], torch.zeros(30), density=density)
    with pytest.raises(RequestError, match="no exchange 'magic'"):
        sparsifier(group, exchange="magic")
    done = sparse.reduce([], torch.zeros(0), density=0.1)
    return len(done.applied), done.finite, sparse.commit()


def test_bad_requests_and_an_empty_bucket():
    assert on_threads(2, bad_requests) == [(0, True, True)] * 2
