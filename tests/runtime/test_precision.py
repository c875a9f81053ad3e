"""What planning may change about results, and what becomes of what rounding drops."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from small_training import NAMES, TORCH_OPTIONS, batch, network, on_two, plan_of, trained
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave._src.compression import Compression
from gradweave._src.errors import RequestError
from gradweave._src.plan import Bucket, Plan
from gradweave._src.runtime.ddp import DistributedDataParallel
from gradweave._src.runtime.reducer.carried_errors import BucketLayout, CarriedErrors
from gradweave._src.sparse.settings import GTopK

INT8 = Compression(method="int8")


def rounded_plan(*lengths, compression=INT8):
    plan = plan_of(*lengths, collective="ring")
    return replace(
        plan, buckets=tuple(replace(bucket, compression=compression) for bucket in plan.buckets)
    )


def exact_sums(group, make_plan):
    """Gradients given and applied over some steps, and what is carried over in the end."""
    model = network()
    wrapped = DistributedDataParallel(model, plan=make_plan(2, 3), precision="rounded")
    given = {name: torch.zeros_like(p).double() for name, p in model.named_parameters()}
    applied = {name: torch.zeros_like(p).double() for name, p in model.named_parameters()}
    for step in range(6):
        if step == 3:  # other buckets take over what the first have dropped
            wrapped._engine.install(make_plan(1, 1, 3))
        for p in model.parameters():
            p.grad = None
        model(batch(step, group.rank())).square().mean().backward()
        own = {name: p.grad.clone() for name, p in model.named_parameters()}
        wrapped.zero_grad()
        wrapped(batch(step, group.rank())).square().mean().backward()
        for name, p in model.named_parameters():
            given[name] += own[name].double() / group.size()
            applied[name] += p.grad.double()
    carried = wrapped._engine._transports._carried._of_parameter
    kept = {name: carried.get(name, torch.zeros(())).double() for name in given}
    return [[one[name].flatten().tolist() for name in NAMES] for one in (given, applied, kept)]


def test_what_is_applied_and_what_is_carried_over_are_all_gradients(tmp_path):
    (given_a, applied, kept_a), (given_b, applied_b, kept_b) = on_two(
        exact_sums, rounded_plan, scratch=tmp_path
    )
    assert applied == applied_b
    for *given, result, kept, kept_too in zip(
        given_a, given_b, applied, kept_a, kept_b, strict=True
    ):
        everything = np.sum(given, axis=0)
        assert np.allclose(np.sum([result, kept, kept_too], axis=0), everything, atol=1e-6)
        assert not np.allclose(result, everything, atol=1e-6)


def back_to_exact(group):
    """From 8 bits to messages as they are: the next step pays what is owed."""
    model = network()
    wrapped = DistributedDataParallel(model, plan=rounded_plan(5), precision="rounded")
    wrapped(batch(0, group.rank())).square().mean().backward()
    carried = wrapped._engine._transports._carried
    owed = {name: part.clone() for name, part in carried._of_parameter.items()}
    wrapped._engine.install(plan_of(2, 3))
    wrapped.zero_grad()
    wrapped(batch(1, group.rank())).square().mean().backward()
    first = {name: p.grad.clone() for name, p in model.named_parameters()}
    wrapped.zero_grad()
    wrapped(batch(1, group.rank())).square().mean().backward()
    second = {name: p.grad.clone() for name, p in model.named_parameters()}
    paid = {name: (first[name] - second[name]).flatten().tolist() for name in first}
    return {name: part.tolist() for name, part in owed.items()}, paid, carried.has_any


def test_what_is_owed_is_paid_when_nothing_is_rounded_any_more(tmp_path):
    (owed_a, paid, has_a), (owed_b, _, has_b) = on_two(back_to_exact, scratch=tmp_path)
    assert not has_a
    assert not has_b
    for name, value in paid.items():
        owed = np.add(owed_a[name], owed_b[name])
        assert np.allclose(value, owed, atol=1e-7)
        assert owed.any()


def test_errors_follow_their_parameters():
    errors, gradient = CarriedErrors(), torch.zeros(6)
    errors.of_bucket(BucketLayout(("a", "b"), (2, 4)), gradient).copy_(torch.arange(6.0))
    other = errors.of_bucket(BucketLayout(("b", "c"), (4, 1)), torch.zeros(5))
    assert other.tolist() == [2, 3, 4, 5, 0]
    errors.give_back(BucketLayout(("a",), (2,)), first := torch.zeros(2))
    assert first.tolist() == [0, 1]
    errors.give_back(BucketLayout(("a",), (2,)), first)
    assert first.tolist() == [0, 1]
    errors.give_back(BucketLayout(("c", "b"), (1, 4)), last := torch.ones(5))
    assert last.tolist() == [1, 3, 4, 5, 6]
    assert not errors.has_any


def weights_of(group, precision, make=network, **options):
    wrapped = DistributedDataParallel(make(), precision=precision, **options)
    _, weights = trained(wrapped, group.rank(), steps=12)
    return [weight.tolist() for weight in weights], wrapped.explain()


@pytest.mark.parametrize("precision", ["bf16", "fp16", "int8"])
def test_one_format_for_all_messages(tmp_path, precision):
    """The same on all ranks, and near what exact training comes to."""
    (first, said), (second, _) = on_two(weights_of, precision, scratch=tmp_path)
    assert first == second
    assert said
    (tmp_path / "rendezvous").unlink(missing_ok=True)
    (exact, _), _ = on_two(weights_of, "exact", scratch=tmp_path)
    for one, other in zip(first, exact, strict=True):
        assert one != other
        assert torch.allclose(torch.tensor(one), torch.tensor(other), atol=0.02)


def wide():
    """Enough bytes for rounding to matter on any network."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 700), nn.Linear(700, 700), nn.Linear(700, 2))


def planned_weights(group, precision):
    wrapped = DistributedDataParallel(wide(), precision=precision, record_steps=2, trial_steps=2)
    _, weights = trained(wrapped, group.rank(), steps=5, until_settled=True)
    tried = [trial.candidate.plan for trial in wrapped.findings().trials]
    ways = {str(bucket.travel) for plan in tried for bucket in plan.buckets}
    return ways, [weight.sum().item() for weight in weights], wrapped.explain()


def test_plans_may_round_where_they_are_allowed_to(tmp_path):
    (ways, sums, said), (_, others, _) = on_two(planned_weights, "rounded", scratch=tmp_path)
    assert sums == others
    assert ways <= {"native", "recursive-doubling", "ring+bf16", "ring+int8"}
    assert "Measured" in said


def test_exact_plans_round_nothing(tmp_path):
    for ways, _, _ in on_two(planned_weights, "exact", scratch=tmp_path):
        assert ways <= {"native", "recursive-doubling"}


def refusal(group, options, *, make=network, hook=False):
    try:
        wrapped = DistributedDataParallel(make(), **options[group.rank() % len(options)])
        if hook:
            wrapped.register_comm_hook(None, lambda *_: None)
    except RequestError as error:
        return str(error)
    return None


def half():
    return network(torch.bfloat16)


def with_sparse_gradients():
    return nn.Sequential(nn.Embedding(3, 6, sparse=True), network())


def by(collective, plan):
    buckets = tuple(replace(bucket, collective=collective) for bucket in plan.buckets)
    return replace(plan, buckets=buckets)


def copying_plan():
    return by("recursive-doubling", rounded_plan(2, 3))


def native_plan():
    return by("native", rounded_plan(2, 3))


DIFFERENT = (
    "ranks wrap differently: precision is 'exact' on rank 0 and 'rounded' on rank 1; wrap the same "
    "model alike on every rank"
)
EXACT_AND_ROUNDED = [{"precision": "exact"}, {"precision": "rounded"}]


@pytest.mark.parametrize(
    ("options", "more", "complaint"),
    [
        (EXACT_AND_ROUNDED, {}, DIFFERENT),
        (EXACT_AND_ROUNDED, {"make": half}, DIFFERENT),
        (
            [{"precision": "rounded"}],
            {"make": half},
            (
                "precision='rounded' is for gradients in float32, and '0.weight' has "
                "torch.bfloat16; leave out precision"
            ),
        ),
        (
            [{"precision": "bf16"}],
            {"make": with_sparse_gradients},
            (
                "precision='bf16' is for dense gradients, and '0' has sparse ones; use "
                "sparse=False there, or leave out precision"
            ),
        ),
        (
            [{"precision": "rounded"}],
            {"hook": True},
            (
                "there is one hook per wrapper, and collective, compression, precision or timeline "
                "need it; leave them out"
            ),
        ),
        (
            [{"precision": "int8", "collective": "recursive-doubling"}],
            {},
            (
                "int8 keeps what rounding drops, and by 'recursive-doubling' several ranks make "
                "the same sums, so it would count twice; take ring, or bf16"
            ),
        ),
        (
            [{"precision": "rounded", "plan": copying_plan()}],
            {},
            (
                "int8 keeps what rounding drops, and by 'recursive-doubling' several ranks make "
                "the same sums, so it would count twice; take ring, or bf16"
            ),
        ),
        (
            [{"precision": "rounded", "plan": native_plan()}],
            {},
            (
                "the plan sends bucket 1 by native+int8, and only schedules of ours round; plan "
                "for ring"
            ),
        ),
        (
            [{"precision": "bf16", "collective": "blueconnect:auto"}],
            {},
            "precision='bf16' is for schedules of ours; leave out collective='blueconnect:auto'",
        ),
    ],
)
def test_what_precision_does_not_go_with(tmp_path, options, more, complaint):
    found = on_two(refused, options, more, scratch=tmp_path)
    assert found == [complaint] * 2


def refused(group, options, more):
    return refusal(group, options, **more)


def not_finite(group):
    """One rank's infinite gradient is seen by all, and spoils no later step."""
    model = network()
    wrapped = DistributedDataParallel(model, precision="int8", plan=rounded_plan(2, 3))
    seen = []
    for step in range(3):
        wrapped.zero_grad()
        scale = torch.inf if step == 1 and group.rank() == 1 else 1.0
        (wrapped(batch(step, group.rank())).square().mean() * scale).backward()
        seen.append(all(bool(p.grad.isfinite().all()) for p in model.parameters()))
    return seen


def test_what_is_not_finite_is_seen_by_all_and_forgotten(tmp_path):
    assert on_two(not_finite, scratch=tmp_path) == [[True, False, True]] * 2


def test_a_plan_may_mix_ways(tmp_path):
    mixed = Plan(
        planner="made",
        buckets=(
            Bucket(tensors=tuple(NAMES[:1]), collective="native"),
            Bucket(tensors=tuple(NAMES[1:3]), collective="ring", compression=INT8),
            Bucket(
                tensors=tuple(NAMES[3:]),
                collective="ring",
                compression=Compression(method="bf16"),
            ),
        ),
    )
    (first, said), (second, _) = on_two(mixed_ways, mixed, scratch=tmp_path)
    assert first == second
    assert said == "3 messages by native, ring+bf16, ring+int8, as given."


def mixed_ways(group, plan):
    return weights_of(group, "rounded", plan=plan)


pytestmark = pytest.mark.usefixtures("compiled_kernels")

SPARSE = Compression(method="gtopk", density=0.1)


def thinned_out_in(*places):
    """Three buckets, of which those in these places are thinned out."""
    plan = plan_of(1, 2, 2)
    buckets = tuple(
        replace(bucket, compression=SPARSE if place in places else None)
        for place, bucket in enumerate(plan.buckets)
    )
    return replace(plan, buckets=buckets)


def mixed_sums(group, plans):
    """Gradients given and applied while buckets are thinned out now here, now there."""
    model = network()
    wrapped = DistributedDataParallel(
        model,
        plan=plans[0],
        precision="sparse",
        compression=GTopK(density=0.1),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    given = dict.fromkeys(NAMES, 0.0)
    applied = dict.fromkeys(NAMES, 0.0)
    for step in range(2 * len(plans)):
        if step % 2 == 0 and step:
            optimizer.zero_grad()
            wrapped._engine.install(plans[step // 2])
        model.zero_grad()
        model(batch(step, group.rank())).square().mean().backward()
        for name, p in model.named_parameters():
            given[name] = given[name] + p.grad.double()
        optimizer.zero_grad()
        wrapped(batch(step, group.rank())).square().mean().backward()
        for name, p in model.named_parameters():
            applied[name] = applied[name] + p.grad.double() * group.size()
        optimizer.step()
    left = wrapped.sparse_state_dict()["residuals"]["values"]
    kept = {name: left[name].double() for name in NAMES}
    return [[one[name].flatten().tolist() for name in NAMES] for one in (given, applied, kept)]


def test_nothing_is_lost_where_buckets_are_thinned_out_now_and_then(tmp_path):
    plans = [thinned_out_in(0, 1, 2), thinned_out_in(1), thinned_out_in(0, 2)]
    first, second = on_two(mixed_sums, plans, scratch=tmp_path)
    (given_a, applied, kept_a), (given_b, applied_b, kept_b) = first, second
    assert applied == applied_b
    is_left = []
    for mine, theirs, result, kept, kept_too in zip(
        given_a, given_b, applied, kept_a, kept_b, strict=True
    ):
        assert np.allclose(
            np.sum([result, kept, kept_too], axis=0), np.add(mine, theirs), atol=1e-5
        )
        is_left.append(bool(np.any(kept) or np.any(kept_too)))
    # In the last plan the first bucket and the last are thinned out, those between are not.
    assert is_left == [True, False, False, True, True]


def test_a_whole_bucket_beside_thinned_out_ones_is_averaged_exactly(tmp_path):
    for whole, expected in on_two(whole_beside, scratch=tmp_path):
        assert whole == expected


def whole_beside(group):
    model = network()
    wrapped = DistributedDataParallel(
        model, plan=thinned_out_in(0, 2), precision="sparse", compression=GTopK(density=0.1)
    )
    wrapped(batch(0, group.rank())).square().mean().backward()
    found = [p.grad.flatten().tolist() for name, p in model.named_parameters() if "2." in name]
    plain = network()
    torchs = TorchDDP(plain)
    torchs(batch(0, group.rank())).square().mean().backward()
    return found, [
        p.grad.flatten().tolist() for name, p in plain.named_parameters() if "2." in name
    ]


def test_sparse_plans_may_leave_buckets_dense(tmp_path):
    (ways, sums, said), (_, others, _) = on_two(planned_weights, "sparse", scratch=tmp_path)
    assert sums == others
    assert "gtopk:0.001" in ways  # what it began with
    assert ways <= {"native", "gtopk:0.001"}
    assert "Measured" in said


def joined(group):
    wrapped = DistributedDataParallel(network(), precision="rounded")
    with pytest.raises(RequestError) as caught, wrapped.join(divide_by_initial_world_size=False):
        pass
    return str(caught.value)


def test_a_join_that_divides_by_fewer_is_refused(tmp_path):
    expected = (
        "with precision='rounded' gradients are divided by the number of all workers; leave out "
        "divide_by_initial_world_size=False"
    )
    assert on_two(joined, scratch=tmp_path) == [expected] * 2


def with_options(group, options):
    """Weights after some steps of two passes each, for each precision."""
    found = []
    for precision in ("exact", "bf16", "int8"):
        wrapped = DistributedDataParallel(network(), precision=precision, **options)
        _, weights = trained(wrapped, group.rank(), steps=6, accumulate=2)
        found.append([weight.tolist() for weight in weights])
    return found


@pytest.mark.parametrize(
    "options", [*TORCH_OPTIONS.values(), {"timeline": True}], ids=[*TORCH_OPTIONS, "timeline"]
)
def test_it_goes_with_what_torchs_wrapper_can_do(tmp_path, options):
    first, second = on_two(with_options, options, scratch=tmp_path)
    assert first == second
    exact, *rounded = first
    for weights in rounded:
        for one, other in zip(weights, exact, strict=True):
            assert one != other
            assert torch.allclose(torch.tensor(one), torch.tensor(other), atol=0.02)


def remembering(group, folder):
    """What two runs with a cache plan and learn; the second begins with what the first has left."""
    found = []
    for _ in range(2):
        wrapped = DistributedDataParallel(
            wide(), precision="rounded", cache=folder, record_steps=2, trial_steps=2
        )
        _, weights = trained(wrapped, group.rank(), steps=5, until_settled=True)
        findings = wrapped.findings()
        found.append((findings.is_remembered, findings.plan, weights[0].sum().item()))
        del wrapped
    return found


def test_a_remembered_plan_rounds_as_it_did(tmp_path):
    first, second = on_two(remembering, str(tmp_path / "plans"), scratch=tmp_path)
    assert first == second
    (was_remembered, plan, _), (is_remembered, again, _) = first
    assert (was_remembered, is_remembered) == (False, True)
    assert again == plan
