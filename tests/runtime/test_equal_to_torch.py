"""The drop-in wrapper gives torch's results with other buckets."""

import pytest
import torch
from small_training import (
    MOST_STEPS,
    NAMES,
    QUICK,
    TORCH_OPTIONS,
    batch,
    network,
    on_two,
    plan_of,
    same_bits,
    trained,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave._src.runtime.ddp import DistributedDataParallel
from gradweave._src.torch_internals import torch_bucket_bytes


def whole_course(group, options, accumulate):
    ours = {**QUICK, **options}
    return same_bits(group, ours, options, steps=10, until_settled=True, accumulate=accumulate)


@pytest.mark.parametrize("options", TORCH_OPTIONS.values(), ids=TORCH_OPTIONS)
@pytest.mark.filterwarnings("ignore:You passed find_unused_parameters")
def test_two_ranks_train_bit_for_bit_as_with_torch_while_plans_change(tmp_path, options):
    """Seconds: it records, calibrates, plans and tries."""
    accumulate = 2 if options else 1
    assert on_two(whole_course, options, accumulate, scratch=tmp_path) == [True, True]


def while_messages_are_noted(group, options):
    """Long enough to end before any plan is tried."""
    ours = {"record_steps": 1, "trial_steps": 40, **options}
    wrapped = DistributedDataParallel(network(), **ours)
    steps, weights = trained(wrapped, group.rank(), steps=25)
    _, expected = trained(TorchDDP(network(), **options), group.rank(), steps=steps)
    has_noted = wrapped._engine.message_log is not None
    same = all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
    return wrapped.findings().stage, has_noted, same


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["plain", "views"])
def test_three_ranks_train_bit_for_bit_while_messages_are_noted(tmp_path, options):
    """A third of a number depends on whether it is divided or multiplied."""
    found = on_two(while_messages_are_noted, options, scratch=tmp_path, world=3)
    assert found == [("learning", True, True)] * 3


def of_each(group, fn, cases):
    """What fn says of each case, by its name: one launch of ranks serves them all."""
    found = {}
    for name, case in cases.items():
        try:
            found[name] = fn(group, *case)
        except Exception as error:
            error.add_note(f"in the case of {name}")
            raise
    return found


def with_plan(group, options, accumulate):
    ours = {"plan": plan_of(2, 1, 2), **options}
    return same_bits(group, ours, options, steps=8, accumulate=accumulate)


def test_a_given_plan_changes_no_bit(tmp_path):
    named = {
        f"{name}, {accumulate} passes for a step": (options, accumulate)
        for name, options in TORCH_OPTIONS.items()
        for accumulate in (1, 3)
    }
    for found in on_two(of_each, with_plan, named, scratch=tmp_path):
        assert found == dict.fromkeys(named, True)


def buckets_seen(group, options, lengths):
    wrapped = DistributedDataParallel(network(), plan=plan_of(*lengths), **options)
    trained(wrapped, group.rank(), steps=12)  # torch reports a static graph's after ten
    return torch_bucket_bytes(wrapped)


LENGTHS = {
    (2, 1, 2): [60, 180, 252],
    (1, 1, 1, 1, 1): [40, 20, 180, 36, 216],
    (5,): [492],
    (4, 1): [276, 216],
}


def test_torch_makes_the_planned_buckets(tmp_path):
    # Declaration order, turned round: within a layer the bias comes first here too.
    assert list(reversed([n for n, _ in network().named_parameters()])) == NAMES
    named = {
        f"{name}, {lengths}": (options, lengths)
        for name, options in TORCH_OPTIONS.items()
        for lengths in LENGTHS
    }
    for found in on_two(of_each, buckets_seen, named, scratch=tmp_path):
        assert found == {name: LENGTHS[lengths] for name, (_, lengths) in named.items()}


def three_ranks(group, collective):
    ours = {"plan": plan_of(2, 3, collective=collective), "collective": collective}
    wrapped = DistributedDataParallel(network(torch.float64), **ours)
    steps, weights = trained(wrapped, group.rank(), steps=20)
    _, expected = trained(TorchDDP(network(torch.float64)), group.rank(), steps=steps)
    return max(float((a - b).abs().max()) for a, b in zip(weights, expected, strict=True))


def test_other_orders_of_summation_differ_by_rounding_only(tmp_path):
    collectives = ["native", "ring", "recursive-doubling", "parameter-server"]
    named = {name: (name,) for name in collectives}
    for found in on_two(of_each, three_ranks, named, scratch=tmp_path, world=3):
        assert list(found) == collectives
        assert {name: error for name, error in found.items() if not error < 1e-13} == {}


def on_a_narrow_wire(group, precision):
    """Two ranks whose sum would overflow float16."""
    model = nn.Linear(1, 1, bias=False)
    wrapped = DistributedDataParallel(model, precision=precision, **QUICK)
    wrapped(torch.full((1, 1), 40_001.0)).sum().backward()
    return model.weight.grad.item()


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_a_narrow_wire_does_not_overflow(tmp_path, precision, dtype):
    half = torch.tensor(20_000.5).to(dtype)  # of each rank, as it travels
    assert on_two(on_a_narrow_wire, precision, scratch=tmp_path) == [(half + half).item()] * 2


def in_turns(wrapped, rank, is_over):
    """As in the training of a GAN: in every second step the parameters are frozen.

    Returns the gradients of each step: those of the parameters in one, of the input in the next.
    """
    model, gradients = wrapped.module, []
    while not is_over(len(gradients)):
        assert len(gradients) < MOST_STEPS
        is_frozen = len(gradients) % 2 == 1
        model.requires_grad_(not is_frozen)
        model.zero_grad()
        inputs = batch(len(gradients), rank).requires_grad_()
        wrapped(inputs).square().mean().backward()
        leaves = [inputs] if is_frozen else list(model.parameters())
        gradients.append([leaf.grad.tolist() for leaf in leaves])
    return gradients


def frozen_for_a_while(group):
    wrapped, settled = DistributedDataParallel(network(), **QUICK), []

    def is_over(step):
        settled.extend([step] if wrapped.findings().stage == "settled" else [])
        return len(settled) > 8

    ours = in_turns(wrapped, group.rank(), is_over)
    torchs = in_turns(TorchDDP(network()), group.rank(), lambda step: step == len(ours))
    return ours, torchs


def test_parameters_frozen_for_a_while(tmp_path):
    """In every stage of planning, and for some steps afterwards."""
    (first, expected), (second, expected_too) = on_two(frozen_for_a_while, scratch=tmp_path)
    assert first == expected
    assert second == expected_too
    assert first[::2] == second[::2]  # all but gradients of inputs, which are a rank's own


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
