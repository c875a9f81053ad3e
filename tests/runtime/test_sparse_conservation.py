"""Nothing is lost where training is not plain: unused parameters, mixed precision, uneven data.

Gradients are whole numbers, the learning rate is 1: what was applied are the weights.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import on_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave import RequestError
from gradweave._src import hooks
from gradweave._src.runtime.ddp import DistributedDataParallel
from gradweave._src.sparse.settings import GTopK, TopK
from gradweave._src.sparse.warmup import Densities

NUMEL = 40


def zeroed(model):
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def linear():
    """Its gradient is the sum of its inputs."""
    return zeroed(nn.Linear(NUMEL, 1, bias=False))


def whole_numbers(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-9, 10, (1, NUMEL), generator=generator).float()


def missing(group, model, state, produced):
    """Of all that was ever produced, without what was applied and what is left."""
    residuals = state["residuals"]
    total = {}
    for name, parameter in model.named_parameters():
        left = residuals["values"].get(name, torch.zeros_like(parameter)) / residuals["scale"]
        total[name] = torch.stack([produced[name], left])
        dist.all_reduce(total[name])
        assert total[name][1].any(), "nothing is left, so nothing is shown"
    return [
        (total[name][0] - total[name][1] + group.size() * parameter.detach()).abs().sum().item()
        for name, parameter in model.named_parameters()
    ]


class Branches(nn.Module):
    """Only one of them is used in a step."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList([linear(), linear()])

    def forward(self, inputs, which):
        return self.branches[which](inputs)


def branching(group, wrapper, options, zeroing):
    """One pass before each step, of changing branches; with two passes, of both branches."""
    model = Branches()
    if wrapper == "ours":
        settings = GTopK(density=0.1, whole_model=True)
        wrapped = DistributedDataParallel(
            model, compression=settings, find_unused_parameters=True, **options
        )
        state_dict = wrapped.sparse_state_dict
    else:
        wrapped = TorchDDP(model, find_unused_parameters=True, **options)
        state = hooks.SparseState(wrapped, GTopK(density=0.1))
        wrapped.register_comm_hook(state, hooks.gtopk)
        state_dict = state.state_dict
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    produced = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for step in range(7):
        optimizer.zero_grad(set_to_none=zeroing != "in place")
        for which in (0, 1) if zeroing == "after two passes" else (step % 2 if step < 5 else 0,):
            inputs = whole_numbers(step, group.rank())
            wrapped(inputs, which).sum().backward()
            produced[f"branches.{which}.weight"] += inputs
        optimizer.step()
    return missing(group, model, state_dict(), produced)


@pytest.mark.parametrize("wrapper", ["ours", "torch's"])
@pytest.mark.parametrize(
    "options",
    # With the last, torch's own wrapper sends a branch that is not used in the forward pass.
    [
        {},
        pytest.param({"gradient_as_bucket_view": True}, marks=pytest.mark.long),
        {"bucket_cap_mb": NUMEL * 4 / 2**20},
    ],
)
@pytest.mark.parametrize("zeroing", ["to none", "in place", "after two passes"])
def test_residuals_of_unused_parameters_arrive(tmp_path, wrapper, options, zeroing):
    results = on_processes(2, branching, wrapper, options, zeroing, scratch=tmp_path)
    assert results == [[0.0, 0.0]] * 2


def two_models(group, options, together):
    """The other's gradient is infinite once: an optimizer of both skips, one of ours does not.

    Weights are also changed in place after every step, by nothing.
    """
    model, other = linear(), nn.Parameter(torch.zeros(1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    wrapped = DistributedDataParallel(
        model, compression=TopK(density=0.1, whole_model=True), grad_scaler=scaler
    )
    ours = torch.optim.SGD([*model.parameters(), *([other] if together else [])], lr=1.0, **options)
    optimizers = [ours] if together else [ours, torch.optim.SGD([other], lr=1.0)]
    produced = torch.zeros(1, NUMEL)
    for step in range(4):
        model.zero_grad()
        other.grad = None
        inputs = whole_numbers(step, group.rank())
        loss = wrapped(inputs).sum() + other.sum() * (float("inf") if step == 1 else 1.0)
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            model.weight.clamp_(-1e6, 1e6)
        if not (together and step == 1):
            produced += inputs
    return missing(group, model, wrapped.sparse_state_dict(), {"weight": produced})


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("together", [True, False])
def test_a_step_counts_when_the_optimizer_has_taken_it(tmp_path, options, together):
    assert on_processes(2, two_models, options, together, scratch=tmp_path) == [[0.0]] * 2


def uneven_and_scaled(group, infinite):
    """The scale grows while rank 0 has run out of data, and its scaler knows nothing of that.

    In the step ``infinite`` another gradient of the same optimizer is, and the step is skipped.
    """
    model, other = linear(), nn.Parameter(torch.zeros(1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    wrapped = DistributedDataParallel(
        model, compression=TopK(density=0.1, whole_model=True), grad_scaler=scaler
    )
    optimizer = torch.optim.SGD([*model.parameters(), other], lr=1.0)
    produced = torch.zeros(1, NUMEL)
    with wrapped.join():
        for step in range(3 + 4 * group.rank()):
            optimizer.zero_grad()
            inputs = whole_numbers(step, group.rank())
            loss = wrapped(inputs).sum() + other.sum() * (float("inf") if step == infinite else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if step != infinite:
                produced += inputs
    lost = missing(group, model, wrapped.sparse_state_dict(), {"weight": produced})
    optimizer.zero_grad()
    error = ""
    try:
        scaler.scale(wrapped(whole_numbers(9, group.rank())).sum()).backward()
    except RuntimeError as raised:
        error = str(raised)
    return lost, scaler.get_scale(), error


@pytest.mark.parametrize(("infinite", "last_scale"), [(None, 32.0), (5, 8.0), (6, 16.0)])
def test_a_rank_without_data_follows_the_others(tmp_path, infinite, last_scale):
    """In their scale, and in whether they took the last steps, which are 5 and 6."""
    results = on_processes(2, uneven_and_scaled, infinite, scratch=tmp_path)
    assert [lost for lost, *_ in results] == [[0.0]] * 2
    assert [scale for _, scale, _ in results] == [8.0, last_scale]
    for _, scale, error in results:
        if last_scale != 8.0:
            assert f"loss scales go from 8 to {last_scale:g}, here {scale:g}; load the" in error


def unlike(group):
    found = []
    for settings, scaler in (
        (GTopK(density=Densities(steps_each=3 + group.rank())), None),
        (GTopK(density=0.1), torch.amp.GradScaler("cpu") if group.rank() else None),
    ):
        with pytest.raises(RequestError) as caught:
            DistributedDataParallel(linear(), compression=settings, grad_scaler=scaler)
        found.append(str(caught.value))
    return found


def test_ranks_that_sparsify_differently(tmp_path):
    for steps, scaler in on_processes(2, unlike, scratch=tmp_path):
        assert steps.startswith("ranks wrap differently: compression's density is Densities(")
        assert "steps_each=3" in steps
        assert "steps_each=4" in steps
        assert "grad_scaler is None on rank 0 and given on rank 1" in scaler


def relaid(group):
    """Residuals of a model in one memory format, loaded into the same model in another."""

    def wrapped(memory_format, density):
        model = zeroed(nn.Conv2d(4, 4, 3, bias=False)).to(memory_format=memory_format)
        return DistributedDataParallel(
            model, compression=GTopK(density=density, momentum=0.5, whole_model=True)
        )

    inputs = torch.arange(36.0).reshape(1, 4, 3, 3) + group.rank()
    first, second = wrapped(torch.channels_last, 0.01), wrapped(torch.contiguous_format, 1.0)
    first(inputs).sum().backward()
    state = first.sparse_state_dict()
    second.load_sparse_state_dict(state)
    (second(inputs) * 0).sum().backward()  # what arrives are residuals, and half of velocities
    ends = []
    for gradient in (first.module.weight.grad, second.module.weight.grad):
        was_applied = first.module.weight.grad != 0
        ends.append(gradient[~was_applied])
    expected = 1.5 * (inputs - group.rank() + 0.5).expand(4, 4, 3, 3)
    return ends[0].any().item(), torch.equal(ends[1], expected[~was_applied])


def test_residuals_follow_parameters_into_another_layout(tmp_path):
    assert on_processes(2, relaid, scratch=tmp_path) == [(False, True)] * 2


def alone(group):
    """One worker selects over the whole model, too: more from a layer whose gradient is larger."""
    model = nn.Sequential(linear(), nn.Linear(1, NUMEL, bias=False))
    nn.init.constant_(model[1].weight, 100.0)
    wrapped = DistributedDataParallel(
        model, compression=GTopK(density=0.25, whole_model=True), bucket_cap_mb=NUMEL * 4 / 2**20
    )
    kept = []
    for step in range(3):
        wrapped.zero_grad()
        wrapped(whole_numbers(step, group.rank())).sum().backward()
        kept.append([int(layer.weight.grad.count_nonzero()) for layer in model])
    return kept


def test_one_worker_selects_over_the_whole_model(tmp_path):
    (kept,) = on_processes(1, alone, scratch=tmp_path)
    assert kept == [[NUMEL // 2, 0]] * 3


def copied(group):
    wrapped = DistributedDataParallel(linear(), compression=GTopK(density=0.1, whole_model=True))
    wrapped(whole_numbers(0, group.rank())).sum().backward()
    again = copy.deepcopy(wrapped)
    again.zero_grad()
    again(whole_numbers(1, group.rank())).sum().backward()
    return int(again.module.weight.grad.count_nonzero()) > 0.5 * NUMEL, again.explain()


def test_a_copy_of_a_sparsified_wrapper_is_dense(tmp_path):
    expected = (True, "Torch's own buckets stay: this is a copy.")
    assert on_processes(2, copied, scratch=tmp_path) == [expected] * 2
