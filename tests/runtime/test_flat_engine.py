"""What the engine of sharded training promises to whoever plans for it."""

import gc
import weakref

import pytest
import torch
from sharded_training import MADE, OPTIMIZERS, alone, batches, on_ranks, plan, small

from gradweave._src.clocks import HostClock
from gradweave._src.errors import PlanMismatch
from gradweave._src.runtime.flat.engine import FlatEngine
from gradweave._src.runtime.reporting.step_clock import StepClock

OTHER = plan(("2.bias", "2.weight", "0.bias"), ("0.weight",))
BACKWARD = plan(("2.bias", "2.weight", "0.bias", "0.weight"), passes="backward")
EVERY = {**OPTIMIZERS, "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05)}


def engine_of(group, twins, on_step_over):
    """An engine whose steps end with what is given, and the model that it trains."""
    model = small()
    engine = FlatEngine(
        model,
        dict(model.named_parameters()),
        group,
        make_group=iter(twins).__next__,
        first_plan=MADE,
        clock=StepClock(HostClock()),
        recorder=None,
        on_step_over=lambda: on_step_over(engine),
    )
    return engine, model


def passed(engine, step):
    """A synchronised pass on this rank's part of a batch."""
    engine.begin_forward(is_synchronised=True)
    (engine.call(step[engine.group.rank()]) ** 2).mean().backward()
    engine.end_forward(is_synchronised=True)


def weights(engine, model):
    engine.synchronise()
    return {name: value.clone() for name, value in model.state_dict().items()}


def replanned(group, twins, name):
    """Plans in turn; what is known of an element moves with it. Something may be frozen then."""
    plans = [MADE, OTHER, BACKWARD]

    def install(engine):
        model[0].requires_grad_(requires_grad=False)
        engine.install(plans[engine.passes % 3])
        model[0].requires_grad_(requires_grad=True)

    engine, model = engine_of(group, twins, install)
    optimizer = EVERY[name](engine.shards.by_name.values())
    buckets = []
    for step in batches(group.size(), 8):
        optimizer.zero_grad()
        passed(engine, step)
        optimizer.step()
        buckets.append(weakref.ref(engine._buckets[0]))
    gc.collect()
    alive = [bucket() is not None for bucket in buckets]
    found = weights(engine, model)
    engine.close()
    return found, alive


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("name", ["momentum", "adamw", "adagrad"])
def test_plans_change_under_an_optimizer(name, world):
    expected = alone(model := small(), EVERY[name](model.parameters()), batches(world, 8))
    for found, alive in on_ranks(world, replanned, name):
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12)
        assert alive == [False] * 7 + [True]  # old buckets are not kept


def replaced(group, twins, keepers, held, more_passes):
    """An optimizer takes another's place on the way; some ranks keep the first one."""
    plans, kept = [MADE, OTHER], []
    engine, model = engine_of(group, twins, lambda e: e.install(plans[e.passes % 2]))
    for part in range(2):
        optimizer = EVERY["adamw"](engine.shards.by_name[name] for name in held)
        for step in batches(group.size(), more_passes):
            passed(engine, step)
        for step in batches(group.size(), 8)[4 * part : 4 * part + 4]:
            optimizer.zero_grad()
            passed(engine, step)
            optimizer.step()
        if group.rank() in keepers:
            kept.append(optimizer)
        del optimizer
        gc.collect()
    found = weights(engine, model)
    engine.close()
    return found


@pytest.mark.parametrize("more_passes", [pytest.param(0, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("held", [["0.weight", "0.bias", "2.weight", "2.bias"], ["0.weight"]])
def test_an_optimizer_may_go_on_some_ranks_before_it_goes_on_others(held, more_passes):
    expected, *_ = on_ranks(3, replaced, {0, 1, 2}, held, more_passes)
    for found in on_ranks(3, replaced, {0}, held, more_passes):
        for key, value in expected.items():
            assert torch.equal(found[key], value)


def not_zeroed(group, twins, plans):
    """Gradients of all passes so far, in each step, and a second update by the same gradients."""
    engine, model = engine_of(group, twins, lambda e: e.install(plans[e.passes % 2]))
    optimizer = torch.optim.SGD(engine.shards.by_name.values(), lr=0.01)
    for step in batches(group.size()):
        passed(engine, step)
        optimizer.step()
        optimizer.step()
    found = weights(engine, model)
    engine.close()
    return found


def test_gradients_stay_where_their_elements_are():
    expected, *_ = on_ranks(3, not_zeroed, [MADE, MADE])
    for found in on_ranks(3, not_zeroed, [MADE, OTHER]):
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12)


def counted(group, twins):
    """What is called when: two optimizers, two passes in a step, and a step without a pass."""
    log = []
    engine, _ = engine_of(group, twins, lambda e: log.append(f"over {e.passes}"))
    gather = engine.gather
    engine.gather = lambda: (log.append("gather"), gather())
    named = engine.shards.by_name
    weight = torch.optim.SGD([named["0.weight"], named["2.weight"]], lr=0.1)
    bias = torch.optim.SGD([named["0.bias"], named["2.bias"]], lr=0.1)
    steps = batches(group.size())
    engine.begin_forward(is_synchronised=False)
    (engine.call(steps[0][group.rank()]) ** 2).mean().backward()
    for step in steps[:2]:
        passed(engine, step)
        weight.step()
        log.append("weights")
        bias.step()
        log.append("biases")
    bias.step()
    engine.close()
    return log


def test_a_step_is_over_once_and_what_it_has_updated_is_under_way():
    first = ["weights", "gather", "over 1", "biases"]
    for log in on_ranks(2, counted):
        assert log == [*first, "weights", "gather", "over 2", "biases", "gather"]


def part_of_the_model(group, twins):
    over = []
    engine, _ = engine_of(group, twins, lambda e: over.append(e.passes))
    optimizer = torch.optim.SGD([engine.shards.by_name["2.weight"]], lr=0.1)
    for step in batches(group.size()):
        passed(engine, step)
        optimizer.step()
    engine.close()
    return over


def test_what_no_optimizer_holds_is_not_waited_for():
    """Except in the first step, in which others may be to come."""
    assert on_ranks(2, part_of_the_model) == [[2, 3, 4, 5]] * 2


def another_models(group, twins):
    engine, _ = engine_of(group, twins, lambda _: None)
    with pytest.raises(PlanMismatch, match="other tensors than the model"):
        engine.install(plan(("2.bias",)))
    engine.close()


def test_a_plan_for_another_model_is_refused():
    on_ranks(1, another_models)
