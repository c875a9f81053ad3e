"""Sharded data parallelism trains as one worker does on everybody's batch."""

import gc
import weakref
from collections import OrderedDict

import pytest
import torch
from ranks import on_processes, on_threads, seeded
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from gradweave.comm.lanes import LANES
from gradweave.errors import CollectiveError, PlanMismatch, RequestError
from gradweave.plan import Bucket, Plan
from gradweave.runtime.sharded import ShardedDataParallel
from gradweave.workloads.datasets import Batches, fashion_mnist_subset
from gradweave.workloads.models import SmallCNN

STEPS = 5
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.01),
}


class Attentive(nn.Module):
    """Reads parameters of modules that it does not call, one of them tied, one of them unused."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.unused = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(()))
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.inner.weight

    def forward(self, batch):
        batch = self.inner(batch)
        batch, _ = self.attention(batch, batch, batch, need_weights=False)
        return self.tied(batch) * self.scale


def small():
    return seeded(lambda: nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)).double())


def batches(world, steps=STEPS):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(steps, world, 3, 4, 6, generator=generator, dtype=torch.float64)


def plan(*buckets, collective="ring", passes="both"):
    made = tuple(Bucket(tensors=tensors, collective=collective) for tensors in buckets)
    return Plan(planner="made", buckets=made, passes=passes)


TENSORS = (("2.bias",), ("2.weight", "0.bias"), ("0.weight",))
MADE = plan(*TENSORS)
BACKWARD_ONLY = plan(*TENSORS, passes="backward")


def alone(model, optimizer, everything, *, clip=None):
    """One worker with everybody's batches."""
    for step in everything:
        optimizer.zero_grad()
        (model(step.flatten(0, 1)) ** 2).mean().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model.state_dict()


def assert_same(state, expected):
    for name, value in expected.items():
        torch.testing.assert_close(state[f"module.{name}"], value, rtol=1e-9, atol=1e-12)


def on_ranks(world, fn, *args):
    """fn gets a group, and others of the same ranks for the threads that send."""
    return on_threads(world, with_twins, fn, *args, groups=1 + LANES)


def with_twins(group, *rest):
    twins, (fn, *args) = rest[:LANES], rest[LANES:]
    return fn(group, twins, *args)


def sharded(group, twins, model, **options):
    made = iter(twins).__next__
    return ShardedDataParallel(model, process_group=group, make_group=made, **options)


def trained(group, twins, make_model, make_optimizer, options):
    model = sharded(group, twins, make_model(), **options)
    optimizer = make_optimizer(model.parameters())
    for step in batches(group.size()):
        optimizer.zero_grad()
        (model(step[group.rank()]) ** 2).mean().backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("given", [MADE, BACKWARD_ONLY], ids=["both", "backward"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_as_one_worker(world, given, name):
    make = OPTIMIZERS[name]
    expected = alone(model := small(), make(model.parameters()), batches(world))
    for state in on_ranks(world, trained, small, make, {"plan": given}):
        assert_same(state, expected)


@pytest.mark.parametrize("collective", ["native", "halving-doubling"])
def test_other_collectives(collective):
    given = plan(*TENSORS, collective=collective)
    expected = alone(model := small(), OPTIMIZERS["adam"](model.parameters()), batches(3))
    arguments = (small, OPTIMIZERS["adam"], {"plan": given})
    for state in on_ranks(3, trained, *arguments):
        assert_same(state, expected)


def attentive():
    return seeded(lambda: Attentive().double())


def test_parameters_that_others_read():
    """Each in a bucket of its own, so that every one must be waited for."""
    make = OPTIMIZERS["sgd"]  # weight decay would shrink the unused ones: their gradients are zero
    expected = alone(model := attentive(), make(model.parameters()), batches(3))
    names = [name for name, _ in attentive().named_parameters()]
    options = {"plan": plan(*((name,) for name in reversed(names)))}
    for state in on_ranks(3, trained, attentive, make, options):
        assert_same(state, expected)


def accumulated(group, twins):
    model = sharded(group, twins, small(), plan=MADE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in batches(group.size()):
        own = step[group.rank()].chunk(3)
        with model.no_sync():
            for part in own[:-1]:
                (model(part) ** 2).mean().div(3).backward()
        (model(own[-1]) ** 2).mean().div(3).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def test_accumulating_gradients():
    expected = alone(model := small(), torch.optim.SGD(model.parameters(), lr=0.1), batches(2))
    for state in on_ranks(2, accumulated):
        assert_same(state, expected)


def not_zeroed(group, twins):
    model = sharded(group, twins, small(), plan=MADE)
    for part in batches(group.size())[0][group.rank()].chunk(3):
        (model(part) ** 2).mean().div(3).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model.state_dict()


def test_gradients_add_up_until_they_are_zeroed():
    expected = alone(model := small(), torch.optim.SGD(model.parameters(), lr=0.1), batches(2)[:1])
    for state in on_ranks(2, not_zeroed):
        assert_same(state, expected)


def clipped(group, twins, norm_type, given):
    model = sharded(group, twins, small(), plan=given)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for step in batches(group.size()):
        optimizer.zero_grad()
        (model(step[group.rank()]) ** 2).mean().backward()
        norms.append(float(model.clip_grad_norm_(0.05, norm_type)))
        optimizer.step()
    return norms, model.state_dict()


@pytest.mark.parametrize("given", [MADE, BACKWARD_ONLY], ids=["both", "backward"])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_by_the_norm_of_all(norm_type, given):
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for step in batches(3):
        optimizer.zero_grad()
        (model(step.flatten(0, 1)) ** 2).mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type)))
        optimizer.step()
    for found, state in on_ranks(3, clipped, norm_type, given):
        assert found == pytest.approx(norms, rel=1e-9)
        assert_same(state, model.state_dict())


def two_optimizers(group, twins):
    model = sharded(group, twins, small(), plan=MADE)
    named = dict(model.named_parameters())
    weights = torch.optim.AdamW([p for n, p in named.items() if "weight" in n], lr=1e-3)
    biases = torch.optim.SGD([p for n, p in named.items() if "bias" in n], lr=0.1)
    for step in batches(group.size()):
        (model(step[group.rank()]) ** 2).mean().backward()
        for optimizer in (weights, biases):
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def test_groups_by_name_and_two_optimizers():
    model = small()
    weights = torch.optim.AdamW([model[0].weight, model[2].weight], lr=1e-3)
    biases = torch.optim.SGD([model[0].bias, model[2].bias], lr=0.1)
    for step in batches(2):
        (model(step.flatten(0, 1)) ** 2).mean().backward()
        for optimizer in (weights, biases):
            optimizer.step()
            optimizer.zero_grad()
    for state in on_ranks(2, two_optimizers):
        assert_same(state, model.state_dict())


def evaluated_alone(group, twins):
    """Rank 0 looks at the model after a step, as scripts do; the others go on."""
    model = sharded(group, twins, small(), plan=MADE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = None
    for step in batches(group.size()):
        optimizer.zero_grad()
        (model(step[group.rank()]) ** 2).mean().backward()
        optimizer.step()
        if group.rank() == 0:
            with torch.no_grad():
                seen = model.eval()(step[0])
            model.train()
            model.state_dict()
    return seen, model.state_dict()


def test_evaluation_and_checkpoint_on_one_rank():
    expected = alone(model := small(), torch.optim.SGD(model.parameters(), lr=0.1), batches(2))
    results = on_ranks(2, evaluated_alone)
    for _, state in results:
        assert_same(state, expected)
    torch.testing.assert_close(results[0][0], model(batches(2)[-1][0]))


def saved(group, twins, steps):
    model = sharded(
        group, twins, small(), plan=plan(("2.bias", "2.weight"), ("0.bias", "0.weight"))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in steps:
        optimizer.zero_grad()
        (model(step[group.rank()]) ** 2).mean().backward()
        optimizer.step()
    return model.state_dict(), model.optimizer_state_dict(optimizer)


def resumed(group, twins, kept, steps, options):
    model = sharded(group, twins, small(), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model.load_state_dict(kept[0])
    model.load_optimizer_state_dict(optimizer, kept[1])
    for step in steps:
        optimizer.zero_grad()
        own = step.flatten(0, 1).chunk(group.size())[group.rank()]
        (model(own) ** 2).mean().backward()
        optimizer.step()
    return model.state_dict()


def test_resuming_is_going_on():
    everything = batches(2)
    kept = on_ranks(2, saved, everything[:2])[0]
    expected = on_ranks(2, saved, everything)[0][0]
    for state in on_ranks(2, resumed, kept, everything[2:], {"plan": MADE}):
        assert all(torch.equal(state[name], value) for name, value in expected.items())


@pytest.mark.parametrize("world", [1, 4])
def test_resuming_on_other_ranks_with_another_plan(world):
    everything = batches(4)
    kept = on_ranks(4, saved, everything[:2])[0]
    expected = on_ranks(4, saved, everything)[0][0]
    options = {"plan": MADE}
    for state in on_ranks(world, resumed, kept, everything[2:], options):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


def test_state_is_one_that_torch_loads(tmp_path):
    _, state = on_ranks(3, saved, batches(3))[1]
    torch.save(state, tmp_path / "state.pt")
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert optimizer.state[model[0].weight]["exp_avg"].shape == model[0].weight.shape


def scaled(group, twins):
    """One rank's gradient overflows once; everyone skips that step."""
    model = sharded(group, twins, small(), plan=MADE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler(device="cpu", init_scale=16.0, process_group=group)
    weights = []
    for number, step in enumerate(batches(group.size())):
        optimizer.zero_grad()
        loss = (model(step[group.rank()]) ** 2).mean()
        if number == 2 and group.rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        weights.append({name: value.clone() for name, value in model.state_dict().items()})
    return weights


def test_a_step_that_overflows_is_skipped_by_all():
    results = on_ranks(2, scaled)
    for weights in results:
        for name, value in weights[1].items():
            assert torch.equal(weights[2][name], value)
        assert not torch.equal(weights[3]["module.0.weight"], weights[2]["module.0.weight"])
        for name, value in results[0][-1].items():
            assert torch.equal(weights[-1][name], value)


def normalised(group, twins):
    names = ("1.bias", "1.weight", "0.bias", "0.weight")
    made = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    model = sharded(group, twins, made, plan=plan(names))
    with torch.no_grad():
        model.module[1].running_mean.fill_(group.rank() + 1.0)
    model(torch.ones(5, 6))
    return model.module[1].running_mean.clone(), int(model.module[1].num_batches_tracked)


def test_buffers_are_rank_0s():
    first, second = on_ranks(2, normalised)
    assert first[1] == second[1] == 1
    # Both have taken rank 0's, and then a step of their own from there.
    assert torch.allclose(first[0], second[0])


def several_kinds(group, twins):
    model = nn.Sequential(OrderedDict(a=nn.Linear(3, 3), b=nn.Linear(3, 3).double()))
    model.b.register_forward_pre_hook(lambda _, inputs: (inputs[0].double(),))
    model.a.bias.requires_grad = False
    given = plan(("b.bias", "b.weight", "a.weight"))
    wrapped = sharded(group, twins, model, plan=given)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    wrapped(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return wrapped.state_dict(), sum(p.numel() for p in wrapped.parameters())


def test_types_may_differ_and_parameters_be_frozen():
    (first, own), (second, others) = on_ranks(2, several_kinds)
    assert all(torch.equal(first[name], value) for name, value in second.items())
    assert own + others == 3 * 3 + 3 * 3 + 3 + 2 * 3  # the frozen bias is with everyone


def complaints(group, twins):
    found = []
    for model, options in (
        (nn.Embedding(3, 2, sparse=True), {}),
        (nn.ReLU(), {}),
        (small(), {"plan": plan(("0.weight",))}),
        (nn.Linear(2, 2 + group.rank()), {}),
        (small(), {"plan": plan(*TENSORS, collective="mst")}),
        (torch.compile(small(), backend="eager"), {"plan": MADE}),
    ):
        with pytest.raises((RequestError, PlanMismatch)) as caught:
            sharded(group, twins, model, **options)
        found.append(str(caught.value))
    wrapped = sharded(group, twins, small(), plan=MADE)
    for refused in (
        wrapped.half,
        lambda: wrapped.requires_grad_(requires_grad=False),
        lambda: wrapped.load_state_dict(wrapped.state_dict(), assign=True),
    ):
        with pytest.raises(RequestError, match="buckets"):
            refused()
    return found


def test_what_it_refuses():
    for found in on_ranks(2, complaints):
        assert [text.split(";")[0] for text in found] == [
            "'Embedding' has sparse gradients, which have no place in a bucket",
            "the model has no parameter that requires a gradient",
            "3 parameters of the model are in no bucket, first '0.bias'",
            "ranks [1] have other parameters than rank 0",
            "no reduce-scatter and all-gather by 'mst'",
            "a compiled model may not wait for its parameters",
        ]


def checkpointed(group, twins, kind):
    """A layer that is used inside a checkpoint and outside of it."""
    model = sharded(
        group, twins, nn.Sequential(nn.Linear(6, 6)), plan=plan(("0.bias",), ("0.weight",))
    )
    layer = model.module[0]

    def forward(inputs):
        inside = checkpoint(layer, inputs, use_reentrant=kind == "reentrant")
        return inside.sum() + layer(inputs).sum()

    model.module.forward = forward
    model(torch.ones(2, 6, requires_grad=True)).backward()
    return [shard.grad.clone() for shard in model.parameters()]


def test_reentrant_checkpoints_are_refused_where_gradients_come_late():
    assert all(gradient.all() for gradient in on_ranks(1, checkpointed, "plain")[0])
    with pytest.raises(AssertionError) as caught:
        on_ranks(1, checkpointed, "reentrant")
    assert "use_reentrant=False" in str(caught.value.__cause__)


def interrupted(group, twins):
    model = sharded(group, twins, small(), plan=MADE)

    def fail(_):
        raise ValueError("the user's own mistake")

    model.module[0].weight.register_hook(fail)
    with pytest.raises(ValueError, match="own mistake"):
        model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    with pytest.raises(CollectiveError, match="a backward pass did not end"):
        model(torch.ones(2, 6, dtype=torch.float64))


def test_a_backward_pass_that_fails_is_not_forgotten():
    on_ranks(1, interrupted)


OTHER = plan(("2.bias", "2.weight", "0.bias"), ("0.weight",))


def replanned(group, twins, name):
    """Two plans in turn, as planning would; what is known of an element moves with it."""
    model = sharded(group, twins, small(), plan=MADE)
    optimizer = EVERY[name](model.parameters())
    buckets = []
    for number, step in enumerate(batches(group.size(), 8)):
        optimizer.zero_grad()
        (model(step[group.rank()]) ** 2).mean().backward()
        optimizer.step()
        model._adopt(MADE if number % 2 else OTHER)
        buckets.append(weakref.ref(model._buckets[0]))
    gc.collect()
    return model.state_dict(), [bucket() is not None for bucket in buckets]


EVERY = {**OPTIMIZERS, "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05)}


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("name", ["momentum", "adamw", "adagrad"])
def test_plans_change_under_an_optimizer(name, world):
    expected = alone(model := small(), EVERY[name](model.parameters()), batches(world, 8))
    for state, alive in on_ranks(world, replanned, name):
        assert_same(state, expected)
        assert alive == [False] * 7 + [True]  # old buckets are not kept


def stepped_twice(group, twins):
    model = sharded(group, twins, small(), plan=MADE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in batches(group.size()):
        optimizer.zero_grad()
        (model(step[group.rank()]) ** 2).mean().backward()
        optimizer.step()
        optimizer.step()
    return model.state_dict()


def test_a_second_update_is_sent_too():
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in batches(2):
        optimizer.zero_grad()
        (model(step.flatten(0, 1)) ** 2).mean().backward()
        optimizer.step()
        optimizer.step()
    for state in on_ranks(2, stepped_twice):
        assert_same(state, model.state_dict())


def forgotten(group, twins):
    model = sharded(group, twins, small(), plan=MADE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        (model(torch.full((2, 6), torch.inf, dtype=torch.float64)) ** 2).mean().backward()
    model.zero_grad()
    (model(batches(group.size())[0][group.rank()]) ** 2).mean().backward()
    optimizer.step()
    return model.state_dict()


def test_zeroing_forgets_what_was_added_up():
    expected = alone(model := small(), torch.optim.SGD(model.parameters(), lr=0.1), batches(2)[:1])
    for state in on_ranks(2, forgotten):
        assert_same(state, expected)


def older_graph(group, twins):
    model = sharded(group, twins, small(), plan=MADE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = (model(torch.ones(2, 6, dtype=torch.float64)) ** 2).mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    model.synchronise()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_torch_notices_graphs_of_older_weights():
    on_ranks(1, older_graph)


REPEATED = batches(2, 20)
MOST_STEPS = 3000


def planned(group, name):
    """Until the plan is settled, and on."""
    model = ShardedDataParallel(small(), record_steps=1, trial_steps=1)
    optimizer = OPTIMIZERS[name](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9)
    steps, plans = 0, set()
    while steps < MOST_STEPS and (model.findings().stage != "settled" or steps % 5):
        step = REPEATED[steps % len(REPEATED)]
        optimizer.zero_grad()
        (model(step[group.rank()]) ** 2).mean().backward()
        optimizer.step()
        schedule.step()
        plans.add(model.plan)
        steps += 1
    found = model.findings()
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    return steps, state, len(plans), found.plan == model.plan, found.note, model.explain()


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_it_plans_while_it_trains(name, tmp_path):
    """Seconds: processes, and a calibration. Optimizers' state moves from plan to plan."""
    results = on_processes(2, planned, name, scratch=tmp_path)
    model = small()
    optimizer = OPTIMIZERS[name](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9)
    for number in range(results[0][0]):
        alone(model, optimizer, REPEATED[number % len(REPEATED)][None])
        schedule.step()
    for steps, state, plans, is_found, note, explained in results:
        assert steps < MOST_STEPS, explained
        assert plans > 1
        assert is_found, note
        for key, value in model.state_dict().items():
            assert state[f"module.{key}"] == pytest.approx(value.numpy(), rel=1e-9, abs=1e-12)


REAL_STEPS = 50


def on_real_images(group, kind, make_optimizer):
    images = fashion_mnist_subset(train=True)
    order = Batches(examples=len(images), batch_size=4, world=group.size(), rank=group.rank())
    torch.manual_seed(0)
    model = SmallCNN(width=4).double()
    wrap = TorchDDP if kind == "torch" else ShardedDataParallel
    wrapped = wrap(model) if kind == "torch" else wrap(model, record_steps=1, trial_steps=1)
    optimizer = make_optimizer(wrapped.parameters())
    for step in range(REAL_STEPS):
        batch = images.take(order.indices(step))
        optimizer.zero_grad()
        cross_entropy(wrapped(batch.normalised().double()), batch.labels).backward()
        optimizer.step()
    return {name: value.numpy() for name, value in wrapped.state_dict().items()}


def every_optimizer(group, kind):
    return {name: on_real_images(group, kind, make) for name, make in OPTIMIZERS.items()}


def test_fifty_steps_on_real_images_as_with_torch(tmp_path):
    """Seconds: processes, with torch's wrapper."""
    world = 3
    for kind in ("torch", "ours"):
        (tmp_path / kind).mkdir()
    expected = on_processes(world, every_optimizer, "torch", scratch=tmp_path / "torch")
    found = on_processes(world, every_optimizer, "ours", scratch=tmp_path / "ours")
    for rank in range(world):
        for name in OPTIMIZERS:
            for key, value in expected[rank][name].items():
                assert found[rank][name][key] == pytest.approx(value, rel=1e-9, abs=1e-12)


def noted(group, twins):
    model = sharded(group, twins, small(), plan=MADE, timeline=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in batches(group.size()):
        optimizer.zero_grad()
        (model(step[group.rank()]) ** 2).mean().backward()
        optimizer.step()
    model.synchronise()
    return model.timelines()


def test_what_travels_is_noted_in_both_passes():
    for timelines in on_ranks(2, noted):
        assert len(timelines) == 2
        for timeline in timelines:
            messages = [span for span in timeline.spans if span.lane == "communication"]
            by = {kind: {m.tensors for m in messages if m.label.startswith(kind)} for kind in KINDS}
            assert by == {"reduce-scatter": set(TENSORS), "all-gather": set(TENSORS)}
            assert len(messages) == 2 * len(TENSORS)


KINDS = ("reduce-scatter", "all-gather")
