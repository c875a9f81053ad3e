"""Sparsified training as people train: accumulation, mixed precision, uneven data, mistakes."""

import pytest
import torch
from ranks import on_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave import RequestError
from gradweave._src import hooks
from gradweave._src.runtime.ddp import DistributedDataParallel
from gradweave._src.sparse.settings import GTopK

NUMEL = 40
WHOLE = GTopK(density=0.1, whole_model=True)


def linear(dtype=torch.float32):
    """Its gradient is the sum of its inputs."""
    model = nn.Linear(NUMEL, 1, bias=False, dtype=dtype)
    nn.init.zeros_(model.weight)
    return model


def whole_numbers(step, rank, rows=1):
    torch.manual_seed(100 * step + rank)
    return torch.randint(-9, 10, (rows, NUMEL)).float()


def residual(wrapped):
    return wrapped.sparse_state_dict()["residuals"]["values"]["weight"].flatten()


def accumulated(group):
    """Three micro-batches of two rows, and one batch of six: applied, and left."""
    ends = []
    for micro in (3, 1):
        model = linear()
        wrapped = DistributedDataParallel(model, compression=GTopK(density=0.1, whole_model=True))
        applied = []
        for step in range(4):
            model.zero_grad()
            *before, last = whole_numbers(step, group.rank(), rows=6).chunk(micro)
            for rows in before:
                with wrapped.no_sync():
                    wrapped(rows).sum().backward()
            wrapped(last).sum().backward()
            applied.append(model.weight.grad.clone())
            model.weight.data -= applied[-1]
        ends.append((torch.cat(applied), residual(wrapped)))
        assert residual(wrapped).any()
    return [torch.equal(one, other) for one, other in zip(*ends, strict=True)]


def test_micro_batches_are_selected_from_as_one_batch(tmp_path):
    assert on_processes(2, accumulated, scratch=tmp_path) == [[True, True]] * 2


def by_text(group):
    """Applied and left, with settings, and with the text for them; and by a hook's text."""
    ends = []
    for compression in (GTopK(0.1), "gtopk:0.1"):
        model = linear()
        wrapped = DistributedDataParallel(model, compression=compression, trial_steps=0)
        wrapped(whole_numbers(0, group.rank())).sum().backward()
        ends.append((model.weight.grad.flatten(), residual(wrapped)))
    assert ends[0][1].any()
    hooked = TorchDDP(linear())
    hooked.register_comm_hook(hooks.SparseState(hooked, "gtopk:0.1"), hooks.gtopk)
    hooked(whole_numbers(0, group.rank())).sum().backward()
    (settings, left), (text, left_too) = ends
    return [
        torch.equal(settings, text),
        torch.equal(left, left_too),
        torch.equal(settings, hooked.module.weight.grad.flatten()),
    ]


def test_a_text_means_the_settings_of_its_name(tmp_path):
    assert on_processes(2, by_text, scratch=tmp_path) == [[True] * 3] * 2


def with_momentum(group, masking):
    """Where everything travels: our momentum, and the optimizer's on torch's wrapper."""
    ends = []
    for ours in (True, False):
        model = linear()
        settings = GTopK(density=1.0, momentum=0.5, masking=masking, whole_model=True)
        wrapped = DistributedDataParallel(model, compression=settings) if ours else TorchDDP(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.0 if ours else 0.5)
        for step in range(4):
            optimizer.zero_grad()
            wrapped(whole_numbers(step, group.rank())).sum().backward()
            optimizer.step()
        ends.append(model.weight.detach())
    return torch.equal(*ends)


@pytest.mark.parametrize("masking", [False, True])
def test_momentum_is_the_optimizers_unless_it_is_masked(tmp_path, masking):
    assert on_processes(2, with_momentum, masking, scratch=tmp_path) == [not masking] * 2


def scaled(group, value):
    """Steps 0 to 4 with a changing loss scale, of which step 2 is skipped; and without both."""
    ends, states = [], []
    for steps, init_scale in (((0, 1, 2, 3, 4), 2.0**8), ((0, 1, 3, 4), None)):
        model = linear()
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=init_scale or 1.0, growth_interval=2, enabled=init_scale is not None
        )
        wrapped = DistributedDataParallel(
            model,
            compression=GTopK(density=0.1, momentum=0.5, clip_norm=20.0, whole_model=True),
            grad_scaler=scaler,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in steps:
            optimizer.zero_grad()
            loss = wrapped(whole_numbers(step, group.rank())).sum()
            if step == 2 and group.rank() == 1:
                loss = loss * value
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if init_scale is not None:
                states.append(wrapped.sparse_state_dict())
        scale = wrapped.sparse_state_dict()["residuals"]["scale"]
        ends.append((model.weight.detach().clone(), residual(wrapped) / scale))
    as_before = [
        torch.equal(
            *(states[i][kind]["values"]["weight"] / states[i][kind]["scale"] for i in (1, 2))
        )
        for kind in ("residuals", "velocities")
    ]
    scales = [state["residuals"]["scale"] for state in states]
    assert residual(wrapped).any()
    return as_before, [torch.equal(*pair) for pair in zip(*ends, strict=True)], scales


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_skipped_step_leaves_residuals_and_others_follow_the_scale(tmp_path, value):
    """What is not finite on one rank reaches no residual, and all ranks skip."""
    for as_before, same, scales in on_processes(2, scaled, value, scratch=tmp_path):
        assert as_before == [True, True]
        assert same == [True, True]
        # Grown after two steps, halved after the one that was skipped.
        assert scales == [2.0**8, 2.0**8, 2.0**9, 2.0**8, 2.0**8]


def narrow(group, dtype, density):
    model = linear(dtype)
    wrapped = DistributedDataParallel(
        model, compression=GTopK(density=density, whole_model=True, dense_below=2)
    )
    applied = torch.zeros(NUMEL)
    for step in range(4):
        model.zero_grad()
        wrapped(whole_numbers(step, group.rank()).to(dtype)).sum().backward()
        applied += model.weight.grad[0].float() * 2
        model.weight.data -= model.weight.grad
    assert model.weight.grad.dtype == dtype
    return applied.tolist(), residual(wrapped).dtype, residual(wrapped).tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("density", [0.1, 1.0])
def test_narrow_gradients(tmp_path, dtype, density):
    """Whole numbers are exact in both; at density 1 the result is the dense one."""
    results = on_processes(2, narrow, dtype, density, scratch=tmp_path)
    produced = sum(whole_numbers(step, rank)[0] for step in range(4) for rank in range(2))
    left = sum(torch.tensor(residual) for *_, residual in results)
    for applied, kind, _ in results:
        assert kind == torch.float32
        assert torch.equal(torch.tensor(applied) + left, produced)
    assert left.any() == (density < 1)


def small_ones_whole(group):
    """Biases as torch averages them, weights thinned out."""
    gradients = []
    for wrap in (
        lambda model: DistributedDataParallel(
            model, compression=GTopK(density=0.1, dense_below=10, whole_model=True)
        ),
        TorchDDP,
    ):
        torch.manual_seed(0)
        wrapped = wrap(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)))
        torch.manual_seed(group.rank())
        wrapped(torch.randn(4, 6)).square().mean().backward()
        gradients.append([parameter.grad for parameter in wrapped.parameters()])
    return [
        (torch.equal(ours, torchs), int(ours.count_nonzero()))
        for ours, torchs in zip(*gradients, strict=True)
    ]


def test_small_tensors_travel_whole(tmp_path):
    for weights, bias, more_weights, last_bias in on_processes(
        2, small_ones_whole, scratch=tmp_path
    ):
        assert (bias, last_bias) == ((True, 9), (True, 3))
        assert not weights[0]
        assert weights[1] + more_weights[1] == round(0.1 * (54 + 27))


def without_a_price(group):
    wrapped = DistributedDataParallel(linear(torch.bfloat16), compression=GTopK(density=0.1))
    for step in range(9):
        wrapped(whole_numbers(step, group.rank()).bfloat16()).sum().backward()
    return wrapped.explain()


def test_other_widths_keep_torchs_buckets(tmp_path):
    why = "Torch's own buckets stay: sparse messages have a price for gradients of 4 bytes only."
    assert on_processes(2, without_a_price, scratch=tmp_path) == [why, why]


def uneven(group):
    """Rank 1 has two batches more; rank 0's residuals go on travelling meanwhile.

    torch itself would send the two layers in two buckets, from the second step on.
    """
    model = nn.ModuleList([linear(), linear()])
    model.forward = lambda inputs: model[0](inputs) + model[1](2 * inputs)
    wrapped = DistributedDataParallel(
        model, compression=GTopK(density=0.1, whole_model=True), bucket_cap_mb=NUMEL * 4 / 2**20
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    produced, applied, kept = torch.zeros(2 * NUMEL), torch.zeros(2 * NUMEL), []
    with wrapped.join():
        for step in range(3 + 2 * group.rank()):
            model.zero_grad()
            inputs = whole_numbers(step, group.rank())
            wrapped(inputs).sum().backward()
            produced += torch.cat([inputs[0], 2 * inputs[0]])
            gradient = torch.cat([layer.weight.grad[0] for layer in model])
            applied += gradient * 2
            kept.append(int(gradient[:NUMEL].count_nonzero()))
            optimizer.step()
    state = wrapped.sparse_state_dict()
    left = torch.cat([state["residuals"]["values"][f"{i}.weight"][0] for i in range(2)])
    return applied.tolist(), produced.tolist(), left.tolist(), kept[1:], state["step"]


def test_uneven_data(tmp_path):
    """A bucket of its own would always send the same share of a layer."""
    results = on_processes(2, uneven, scratch=tmp_path)
    applied = torch.tensor(results[1][0])
    produced, left = (sum(torch.tensor(one[place]) for one in results) for place in (1, 2))
    assert torch.equal(applied + left, produced)
    assert [step for *_, step in results] == [5, 5]
    assert set(results[1][3]) != {round(0.1 * NUMEL)}


def mistakes(group):
    class Tabled(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(4, 2, sparse=True)

    found = []
    with pytest.raises(RequestError) as caught:
        DistributedDataParallel(Tabled(), compression=GTopK(density=0.001))
    found.append(str(caught.value))
    stock = TorchDDP(Tabled())
    with pytest.raises(RequestError) as caught:
        hooks.SparseState(stock, GTopK(density=0.001))
    found.append(str(caught.value))
    wrapped = DistributedDataParallel(linear(), compression=GTopK(density=0.001))
    with pytest.raises(RequestError) as caught:
        wrapped.register_comm_hook(None, hooks.gtopk)
    found.append(str(caught.value))
    skipping = TorchDDP(linear(), skip_all_reduce_unused_params=True, find_unused_parameters=True)
    for ddp, settings in ((skipping, GTopK(density=0.1)), (TorchDDP(linear()), WHOLE)):
        with pytest.raises(RequestError) as caught:
            hooks.SparseState(ddp, settings)
        found.append(str(caught.value))
    return found


def test_what_cannot_be_sparsified(tmp_path):
    for one, other, second, skipping, whole in on_processes(2, mistakes, scratch=tmp_path):
        assert one == other
        assert one == (
            "'table' has sparse gradients, which travel by themselves; use sparse=False there, or "
            "leave out compression"
        )
        assert second.startswith("there is one hook per wrapper, and collective, compression")
        assert skipping.startswith("residuals travel in every step, also those of unused")
        assert whole.startswith("torch's wrapper makes its own buckets, and each is selected from")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"density": 0.0}, "density must be above 0 and at most 1, got 0.0"),
        ({"density": 1.1}, "density must be above 0 and at most 1, got 1.1"),
        ({"density": float("nan")}, "density must be above 0 and at most 1, got nan"),
        ({"exchange": "magic"}, "no exchange 'magic'; there are topk"),
        ({"exchange": "topk"}, "GTopK goes by exchanges gtopk…, not by 'topk'"),
        ({"selection": "magic"}, "no selection 'magic'; there are radix"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1, got 1.0"),
        ({"clip_norm": float("nan")}, "clip_norm must be positive and finite, got nan"),
        ({"clip_norm": float("inf")}, "clip_norm must be positive and finite, got inf"),
        ({"dense_below": -1}, "dense_below must be a number of elements, 0 or more, got -1"),
    ],
)
def test_settings_that_mean_nothing(settings, complaint):
    with pytest.raises(RequestError, match=complaint):
        GTopK(**{"density": 0.1, **settings})
