"""The drop-in wrapper: torch's results with other buckets, whatever else is asked of torch."""

import copy
import gc
import logging
import pickle
import threading
import time
import weakref

import pytest
import torch
from msgspec.structs import replace
from ranks import on_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave import FormatError, PlanMismatch, RequestError, files
from gradweave.plan import Bucket, Plan
from gradweave.recipe import Recipe
from gradweave.runtime.buckets import torch_bucket_bytes
from gradweave.runtime.ddp import DistributedDataParallel
from gradweave.sparse.settings import GTopK, TopK

QUICK = {"record_steps": 1, "trial_steps": 1}
MOST_STEPS = 600


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 2, bias=False)
    ).to(dtype)


# In backward order: of a layer, torch yields the bias first.
NAMES = ["4.weight", "2.bias", "2.weight", "0.bias", "0.weight"]


def plan_of(*lengths, collective="native"):
    left = iter(NAMES)
    buckets = tuple(
        Bucket(tensors=tuple(next(left) for _ in range(length)), collective=collective)
        for length in lengths
    )
    return Plan(planner="made", buckets=buckets)


def batch(step, rank, dtype=torch.float32):
    torch.manual_seed(1000 * step + rank)
    return torch.randn(4, 6, dtype=dtype)


def trained(wrapped, rank, *, steps, until_settled=False, accumulate=1):
    """SGD with momentum and clipping; the weights, as exact numbers."""
    dtype = next(wrapped.parameters()).dtype
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
    taken = 0
    while taken < steps or (until_settled and not wrapped._pilot.is_settled):
        assert taken < MOST_STEPS
        optimizer.zero_grad()
        # torch's static graphs want their first pass to be a synchronised one.
        for micro in range(accumulate - 1 if taken else 0):
            with wrapped.no_sync():
                wrapped(
                    batch(7000 + accumulate * taken + micro, rank, dtype)
                ).square().mean().backward()
        wrapped(batch(taken, rank, dtype)).square().mean().backward()
        nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        taken += 1
    return taken, [parameter.detach().clone() for parameter in wrapped.parameters()]


def same_bits(group, ours, torchs, **training):
    """Both take the same number of steps on the same data; whether their weights are equal."""
    wrapped = DistributedDataParallel(network(), **ours)
    steps, weights = trained(wrapped, group.rank(), **training)
    training = {"accumulate": training.get("accumulate", 1), "steps": steps}
    _, expected = trained(TorchDDP(network(), **torchs), group.rank(), **training)
    return all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


def on_two(fn, *args, scratch, world=2):
    return on_processes(world, fn, *args, scratch=scratch)


TORCH_OPTIONS = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}


def whole_course(group, options, accumulate):
    ours = {**QUICK, **options}
    return same_bits(group, ours, options, steps=10, until_settled=True, accumulate=accumulate)


@pytest.mark.parametrize("options", TORCH_OPTIONS.values(), ids=TORCH_OPTIONS)
@pytest.mark.filterwarnings("ignore:You passed find_unused_parameters")
def test_two_ranks_train_bit_for_bit_as_with_torch_while_plans_change(tmp_path, options):
    """Seconds: it records, calibrates, plans and tries."""
    accumulate = 2 if options else 1
    assert on_two(whole_course, options, accumulate, scratch=tmp_path) == [True, True]


def settled(group, options):
    wrapped = DistributedDataParallel(network(), **QUICK, **options)
    steps, _ = trained(wrapped, group.rank(), steps=5, until_settled=True)
    hooks = [len(part._forward_pre_hooks) for part in wrapped.module.modules()]
    return wrapped.explain(), sum(hooks), wrapped.findings().trace.forward_s > 0, steps


@pytest.mark.parametrize(
    "options",
    [{"collective": "ring"}, {"collective": "parameter-server"}, {"compression": GTopK()}],
)
def test_a_whole_course_with_messages_of_ours(tmp_path, options):
    """Calibration and messages each have a group of their own."""
    for explained, hooks, has_forward, _ in on_two(settled, options, scratch=tmp_path):
        assert "Chosen:" in explained
        assert hooks == 0
        assert has_forward


def frozen_for_a_while(group):
    """As in the training of a GAN: in every second step the parameters are frozen."""
    model = network()
    wrapped = DistributedDataParallel(model, **QUICK)
    steps = 0
    while wrapped.findings().stage != "settled":
        assert steps < MOST_STEPS
        model.requires_grad_(steps % 2 == 0)
        batch_ = batch(steps, group.rank()).requires_grad_()
        wrapped(batch_).sum().backward()
        steps += 1
    model.requires_grad_()
    for step in range(8):
        model.zero_grad()
        wrapped(batch(step, group.rank())).sum().backward()
    return [p.grad.tolist() for p in model.parameters()]


def test_parameters_frozen_for_a_while(tmp_path):
    first, second = on_two(frozen_for_a_while, scratch=tmp_path)
    assert first == second


class Swapping(nn.Module):
    """Two branches whose gradients come in another order each time."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)
        self.turn = 0

    def forward(self, value):
        self.turn += 1
        parts = [self.a, self.b][:: 1 if self.turn % 2 else -1]
        return parts[0](value) + 2 * parts[1](value)


def out_of_order(group):
    wrapped = DistributedDataParallel(Swapping(), record_steps=3, trial_steps=1)
    for step in range(MOST_STEPS):
        wrapped(batch(step, group.rank())).sum().backward()
        if wrapped.findings().stage == "settled":
            break
    wrapped(batch(0, group.rank())).sum().backward()
    return wrapped.explain()


def test_gradients_in_changing_order_keep_torchs_buckets(tmp_path):
    why = "torch's own buckets stay: gradients do not come in the same order in every step."
    assert on_two(out_of_order, scratch=tmp_path) == [why, why]


def with_plan(group, options, accumulate):
    ours = {"plan": plan_of(2, 1, 2), **options}
    return same_bits(group, ours, options, steps=8, accumulate=accumulate)


@pytest.mark.parametrize("options", TORCH_OPTIONS.values(), ids=TORCH_OPTIONS)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.filterwarnings("ignore:You passed find_unused_parameters")
def test_a_given_plan_changes_no_bit(tmp_path, options, accumulate):
    assert on_two(with_plan, options, accumulate, scratch=tmp_path) == [True, True]


def buckets_seen(group, options, plan):
    wrapped = DistributedDataParallel(network(), plan=plan, **options)
    trained(wrapped, group.rank(), steps=12)  # torch reports a static graph's after ten
    return torch_bucket_bytes(wrapped)


@pytest.mark.parametrize("options", TORCH_OPTIONS.values(), ids=TORCH_OPTIONS)
@pytest.mark.parametrize("lengths", [(2, 1, 2), (1, 1, 1, 1, 1), (5,), (4, 1)])
def test_torch_makes_the_planned_buckets(tmp_path, options, lengths):
    sizes = [40, 20, 180, 36, 216]
    expected, first = [], 0
    for length in lengths:
        expected.append(sum(sizes[first : first + length]))
        first += length
    plan = plan_of(*lengths)
    if options.get("find_unused_parameters"):
        # Declaration order, turned round: within a layer the bias comes first here too.
        assert list(reversed([n for n, _ in network().named_parameters()])) == NAMES
    assert on_two(buckets_seen, options, plan, scratch=tmp_path) == [expected, expected]


def drifting(group):
    """Steps become slower after the plan was chosen; the wrapper plans again."""
    wrapped = DistributedDataParallel(network(), plan=plan_of(2, 3), replan_when=1.0)
    stages = []
    for step in range(60):
        if step > 30:
            time.sleep(0.02)
        wrapped(batch(step, group.rank())).sum().backward()
        stages.append(wrapped.findings().stage)
    return stages[25], stages[-1]


def test_planning_again_when_steps_take_another_time(tmp_path):
    assert on_two(drifting, scratch=tmp_path) == [("settled", "recording")] * 2


def three_ranks(group, ours):
    wrapped = DistributedDataParallel(network(torch.float64), **ours)
    steps, weights = trained(wrapped, group.rank(), steps=20)
    _, expected = trained(TorchDDP(network(torch.float64)), group.rank(), steps=steps)
    return max(float((a - b).abs().max()) for a, b in zip(weights, expected, strict=True))


@pytest.mark.parametrize("collective", ["native", "ring", "recursive-doubling", "parameter-server"])
def test_other_orders_of_summation_differ_by_rounding_only(tmp_path, collective):
    ours = {"plan": plan_of(2, 3, collective=collective), "collective": collective}
    assert max(on_two(three_ranks, ours, scratch=tmp_path, world=3)) < 1e-13


def on_a_narrow_wire(group, dtype):
    """Two ranks whose sum would overflow float16."""
    model = nn.Linear(1, 1, bias=False)
    wrapped = DistributedDataParallel(model, wire_dtype=dtype, **QUICK)
    wrapped(torch.full((1, 1), 40_001.0)).sum().backward()
    return model.weight.grad.item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_narrow_wire_does_not_overflow(tmp_path, dtype):
    half = torch.tensor(20_000.5).to(dtype)  # of each rank, as it travels
    assert on_two(on_a_narrow_wire, dtype, scratch=tmp_path) == [(half + half).item()] * 2


def timelines(group):
    plain = DistributedDataParallel(network(), plan=plan_of(2, 3))
    trained(plain, group.rank(), steps=5)
    noting = DistributedDataParallel(network(), plan=plan_of(2, 3), timeline=True)
    trained(noting, group.rank(), steps=5)
    hooks = (len(plain._comm_hooks), len(noting._comm_hooks))
    return hooks, noting.timeline(), noting.timelines()


def test_timelines_of_all_ranks(tmp_path):
    results = on_two(timelines, scratch=tmp_path)
    for rank, (hooks, own, everyone) in enumerate(results):
        assert hooks == (0, 1)
        assert everyone == results[0][2]
        for timeline in (own, everyone[rank]):
            messages = [span for span in timeline.spans if span.lane == "communication"]
            assert [span.nbytes for span in messages] == [60, 432]
            assert [len(span.tensors) for span in messages] == [2, 3]
    begins = [timeline.spans[0].start_s for timeline in results[0][2]]
    assert min(begins) == pytest.approx(0, abs=1e-9)


def dies(group):
    model = network()
    wrapped = DistributedDataParallel(model, **QUICK)
    trained(wrapped, group.rank(), steps=3)
    gone = weakref.ref(wrapped)
    gc.disable()
    del wrapped
    hooks = [len(part._forward_pre_hooks) for part in model.modules()]
    threads = [thread.name for thread in threading.enumerate() if "gradweave" in thread.name]
    return gone() is None, sum(hooks), threads


def test_nothing_keeps_the_wrapper_alive(tmp_path):
    """It must die before its process group: a cycle would keep it until who knows when.

    Nor does it leave anything behind, though it dies while it records.
    """
    assert on_two(dies, scratch=tmp_path) == [(True, 0, [])] * 2


class Doubling:
    calls = 0


def doubling(
    state: Doubling, bucket: torch.distributed.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    state.calls += 1
    done = torch.futures.Future()
    done.set_result(bucket.buffer() * 2)
    return done


def with_a_hook_of_ones_own(group):
    wrapped = DistributedDataParallel(network(), plan=plan_of(2, 3))
    state = Doubling()
    wrapped.register_comm_hook(state, doubling)
    steps = 0
    for steps in range(1, 7):
        wrapped(batch(steps, group.rank())).sum().backward()
    return state.calls >= 2 * (steps - 1)


def test_a_users_hook_stays(tmp_path):
    assert on_two(with_a_hook_of_ones_own, scratch=tmp_path) == [True, True]


def recipes(group, folder):
    wrapped = DistributedDataParallel(network(), **QUICK)
    trained(wrapped, group.rank(), steps=1, until_settled=True)
    text = wrapped.explain()
    assert "Chosen:" in text
    path = folder / f"recipe-{group.rank()}.json"
    files.write(path, wrapped.recipe())
    again = DistributedDataParallel(network(), plan=path)
    trained(again, group.rank(), steps=5)
    elsewhere = DistributedDataParallel(network(), plan=replace(wrapped.recipe(), workers=3))
    trained(elsewhere, group.rank(), steps=2)
    assert elsewhere.findings().stage == "recording"
    return text, again.recipe() == wrapped.recipe(), path.read_text()


def test_a_recipe_can_be_used_again_and_not_elsewhere(tmp_path):
    results = on_two(recipes, tmp_path, scratch=tmp_path)
    assert [same for _, same, _ in results] == [True, True]
    assert results[0][0].startswith("Measured: 5 gradients")
    recipe = files.loads(results[0][2], Recipe, origin="rank 0")
    assert recipe.why_not(workers=2, device="cpu") is None
    assert recipe.why_not(workers=3, device="cpu") == "it was made for 2 workers, not 3"
    assert recipe.why_not(workers=2, device="H100") == "it was made on cpu, not H100"


def falls_back(group, kind):
    model = network()
    if kind == "two dtypes":
        model[0].double()
        model[1] = nn.Sequential(nn.Tanh(), _ToFloat())
    if kind == "sparse":
        model.append(_WithEmbedding())
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("gradweave").addHandler(handler)
    options = {"bucket_cap_mb_list": [1]} if kind == "caps" else {}
    wrapped = DistributedDataParallel(model, **options)
    for step in range(4):
        wrapped(batch(step, group.rank()).to(model[0].weight.dtype)).sum().backward()
    return records, wrapped.explain(), wrapped.plan


class _WithEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 2, sparse=True)

    def forward(self, value):
        return value + self.table(torch.tensor([1]))


class _ToFloat(nn.Module):
    def forward(self, value):
        return value.float()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("two dtypes", "torch buckets each type and device by itself, and there are torch.float32"),
        ("caps", "bucket_cap_mb_list is given"),
        ("sparse", "sparse gradients travel by themselves"),
    ],
)
def test_what_cannot_be_planned_stays_with_torchs_buckets(tmp_path, kind, why):
    for warnings, explained, plan in on_two(falls_back, kind, scratch=tmp_path):
        assert len(warnings) == 1
        assert why in warnings[0]
        assert why in explained
        assert plan is None


def alone(group):
    wrapped = DistributedDataParallel(network())
    trained(wrapped, 0, steps=3)
    return wrapped.explain()


def test_one_worker_needs_no_plan(tmp_path):
    assert on_two(alone, scratch=tmp_path, world=1) == [
        "torch's own buckets stay: one worker sends no messages."
    ]


def uneven(group):
    wrapped = DistributedDataParallel(network(), **QUICK)
    trained(wrapped, group.rank(), steps=2)
    with wrapped.join():
        for step in range(3 + 2 * group.rank()):
            wrapped(batch(step, group.rank())).sum().backward()
    return wrapped.explain(), [p.grad.tolist() for p in wrapped.parameters()]


@pytest.mark.filterwarnings("ignore")
def test_planning_ends_where_join_begins(tmp_path):
    (explained, _), _ = on_two(uneven, scratch=tmp_path)
    assert explained == "torch's own buckets stay: planning ends where join() begins."


def copied(group):
    wrapped = DistributedDataParallel(network(), **QUICK)
    trained(wrapped, group.rank(), steps=2)
    again = pickle.loads(pickle.dumps(wrapped))  # noqa: S301 torch's wrapper can be pickled
    again(batch(1, group.rank())).sum().backward()
    return copy.copy(again.explain())


def test_a_pickled_wrapper_is_torchs(tmp_path):
    assert on_two(copied, scratch=tmp_path) == ["torch's own buckets stay: this is a copy."] * 2


def mixed_precision(group):
    """With GradScaler and autocast: a step with an infinite gradient is skipped on all ranks."""
    model = network()
    wrapped = DistributedDataParallel(model, plan=plan_of(2, 3))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [p.detach().clone() for p in model.parameters()]
    skipped = []
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = wrapped(batch(step, group.rank())).square().mean()
        if step == 1 and group.rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        skipped.append(
            all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        )
        before = [p.detach().clone() for p in model.parameters()]
    return skipped


def test_mixed_precision(tmp_path):
    assert on_two(mixed_precision, scratch=tmp_path) == [[False, True, False, False]] * 2


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"planner": "best"}, "no planner 'best'"),
        ({"collective": "rign"}, "no collective 'rign'; there are auto, native, ring"),
        ({"wire_dtype": torch.int8}, "wire_dtype must be torch.float16 or torch.bfloat16"),
        ({"record_steps": 0}, "record_steps must be at least 1, got 0"),
        ({"trial_steps": -1}, "trial_steps must be at least 0, got -1"),
        ({"replan_when": float("nan")}, "replan_when must be positive, got nan"),
        ({"replan_when": 0.0}, "replan_when must be positive, got 0"),
        ({"bucket_cap_mb": 0}, "bucket caps must be positive numbers of MiB, got 0"),
        ({"bucket_cap_mb_list": [1.0, float("nan")]}, "bucket caps must be positive .* got nan"),
        ({"bucket_cap_mb_list": []}, "bucket_cap_mb_list must not be empty"),
    ],
)
def test_options_that_mean_nothing(options, complaint):
    """Found before torch is asked for anything, so no group is needed."""
    with pytest.raises(RequestError, match=complaint):
        DistributedDataParallel(network(), **options)


def complaint_of(group, plans):
    with pytest.raises((PlanMismatch, RequestError)) as caught:
        trained(DistributedDataParallel(network(), plan=plans[group.rank()]), 0, steps=1)
    return str(caught.value)


def test_plans_that_differ_between_ranks(tmp_path):
    expected = "ranks [1] have another plan than rank 0; give all ranks the same plan"
    plans = [plan_of(2, 3), plan_of(1, 4)]
    assert on_two(complaint_of, plans, scratch=tmp_path) == [expected] * 2


def test_plans_of_another_model(tmp_path):
    short = Plan(planner="made", buckets=plan_of(2, 3).buckets[:1])
    long = Plan(
        planner="made",
        buckets=(*plan_of(2, 3).buckets, Bucket(tensors=("head",), collective="native")),
    )
    for plan, expected in (
        (short, "3 parameters of the model are in no bucket, first '0.bias'"),
        (long, "the plan has 1 tensors that the model has not, first 'head'"),
    ):
        for found in on_two(complaint_of, [plan] * 2, scratch=tmp_path):
            assert found.startswith(expected)
        (tmp_path / "rendezvous").unlink()


def test_plan_files_that_are_not(tmp_path):
    truncated = tmp_path / "plan.json"
    truncated.write_text(files.dumps(plan_of(2, 3))[:-30])
    for plan, expected in (
        (truncated, "not complete JSON"),
        (tmp_path / "none.json", "there is no file"),
    ):
        for found in on_two(reading_complaint, str(plan), scratch=tmp_path):
            assert expected in found
        (tmp_path / "rendezvous").unlink()


def reading_complaint(group, plan):
    with pytest.raises((FormatError, RequestError)) as caught:
        DistributedDataParallel(network(), plan=plan)
    return str(caught.value)


def sparse(group, settings, plan):
    """Gradients that are integers: what is applied and what is left are all there ever were."""
    model = nn.Linear(40, 1, bias=False)
    nn.init.zeros_(model.weight)
    given = {} if plan is None else {"plan": plan}
    wrapped = DistributedDataParallel(model, compression=settings, **given)
    applied, produced = torch.zeros(40), torch.zeros(40)
    for step in range(12):
        model.zero_grad()
        torch.manual_seed(100 * step + group.rank())
        batch = torch.randint(-9, 10, (1, 40)).float()
        wrapped(batch).sum().backward()
        produced += batch[0]
        applied += model.weight.grad[0] * group.size()
    wrapped._sparse.sparsifier.commit()
    (residual,) = wrapped._sparse.sparsifier.state_dict()["residuals"]["values"].values()
    return applied.tolist(), residual.flatten().tolist(), produced.tolist()


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", [GTopK, TopK])
@pytest.mark.parametrize("whole_model", [True, False])
def test_sparsification_loses_nothing(tmp_path, world, kind, whole_model):
    settings = kind(density=0.1, whole_model=whole_model)
    plan = None
    if not whole_model:
        bucket = Bucket(tensors=("weight",), collective="native")
        plan = Plan(planner="made", buckets=(bucket,))
    results = on_processes(world, sparse, settings, plan, scratch=tmp_path)
    applied = results[0][0]
    assert all(one == applied for one, _, _ in results)
    left = [sum(values) for values in zip(*(residual for _, residual, _ in results), strict=True)]
    produced = [sum(values) for values in zip(*(made for _, _, made in results), strict=True)]
    assert [a + b for a, b in zip(applied, left, strict=True)] == produced


def test_compression_goes_its_own_way():
    with pytest.raises(RequestError, match="compression sends values and indices its own way"):
        DistributedDataParallel(network(), compression=GTopK(), wire_dtype=torch.float16)
    with pytest.raises(RequestError, match="density"):
        GTopK(density=0.0)
