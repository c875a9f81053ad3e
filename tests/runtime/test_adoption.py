"""A recipe for a model that is wrapped already, and what outlives a wrapper."""

import gc
import logging
import weakref
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace
from small_training import MOST_STEPS, QUICK, batch, network, on_two, plan_of, trained
from test_plan_cache import RECIPE
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave import DistributedDataParallel, RequestError
from gradweave._src import files
from gradweave._src.compression import ROUNDED
from gradweave._src.plan import Plan
from gradweave._src.runtime import ddp
from gradweave._src.runtime.reporting import account as account_module
from gradweave._src.runtime.reporting.account import PlanningAccount
from gradweave._src.session.findings import Findings, Stage


class Lines(logging.Handler):
    """What wrappers warn of on this rank, from now on."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.said = []
        ddp.logger.addHandler(self)

    def emit(self, record):
        self.said.append(record.getMessage())


WAYS = {
    "torch's own": {},
    "ring": {"collective": "ring"},
    "rounded": {"precision": ROUNDED},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "declared order": {"find_unused_parameters": True},
}


def resumed(group, way):
    """The first run's recipe as text on rank 0 alone, and what the second one makes of it."""
    first = DistributedDataParallel(network(), **QUICK, **WAYS[way])
    trained(first, group.rank(), steps=5, until_settled=True)
    text = files.dumps(first.recipe()) if group.rank() == 0 else None
    again = DistributedDataParallel(network(), **QUICK, **WAYS[way])
    account = again.account()
    is_adopted = again.adopt(text)
    at_once = again.plan == first.plan, again.findings().stage, account.plan == first.plan
    _, weights = trained(again, group.rank(), steps=9)
    _, expected = trained(TorchDDP(network()), group.rank(), steps=9)
    is_equal = all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
    return is_adopted, at_once, again.findings().is_remembered, is_equal, again.explain()


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=pytest.mark.long if way in {"views", "static"} else [])
        for way in WAYS
    ],
)
def test_a_wrapped_model_begins_with_an_earlier_runs_plan(tmp_path, way):
    """Seconds: whole courses of planning."""
    for adopted, at_once, remembered, is_equal, explained in on_two(resumed, way, scratch=tmp_path):
        assert adopted
        assert at_once == (True, "settled", True)
        assert remembered
        assert is_equal or way == "rounded"
        assert explained.split("\n")[0].endswith(", remembered from an earlier run.")


def stepped(wrapped, rank):
    wrapped(batch(0, rank)).sum().backward()
    wrapped(batch(1, rank)).sum().backward()
    return wrapped


def no_steps(wrapped, rank):
    return wrapped


REFUSED = {
    "text": ("{", {}, no_steps, "recipe: not complete JSON ("),
    "workers": (replace(RECIPE, workers=3), {}, no_steps, "it was made for 3 workers, not 2"),
    "device": (replace(RECIPE, device="H100"), {}, no_steps, "it was made on H100, not cpu"),
    "both passes": (
        replace(RECIPE, plan=replace(RECIPE.plan, passes="both")),
        {},
        no_steps,
        "the plan is one for both passes",
    ),
    "precision": (RECIPE, {"precision": "bf16"}, no_steps, "the plan sends bucket 1 as it is"),
    "steps": (RECIPE, {}, stepped, "steps have been taken; give it before the first"),
    "given": (RECIPE, {"plan": plan_of(5)}, no_steps, "nothing is being planned"),
    "hook": (RECIPE, {"bucket_cap_mb_list": [1]}, no_steps, "bucket_cap_mb_list is given"),
    "tensors": (
        replace(RECIPE, plan=Plan(planner="made", buckets=RECIPE.plan.buckets[:1])),
        {},
        no_steps,
        "3 ",
    ),
}


def refused(group):
    found = {}
    for name, (recipe, options, prepare, _) in REFUSED.items():
        wrapped = prepare(DistributedDataParallel(network(), **QUICK, **options), group.rank())
        before = wrapped.findings().stage
        lines = Lines()
        adopted = wrapped.adopt(recipe if group.rank() == 0 else None)
        ddp.logger.removeHandler(lines)
        for step in range(3):
            wrapped(batch(step, group.rank())).sum().backward()
        found[name] = adopted, lines.said, before == "settled" or wrapped.plan is None
    return found


def test_a_recipe_that_will_not_do_is_one_line(tmp_path):
    first, second = on_two(refused, scratch=tmp_path)
    for name, (_, _, _, why) in REFUSED.items():
        adopted, (line,), goes_on = first[name]
        assert not adopted
        assert line.startswith(f"leaving a recipe alone: {why}"), line
        assert "\n" not in line
        assert goes_on
        assert second[name] == (False, [], True)


def other_names_on_rank_1(group):
    model = network()
    if group.rank() == 1:
        model = nn.Sequential()
        for name, part in network().named_children():
            model.add_module(f"another{name}", part)
    wrapped = DistributedDataParallel(model, **QUICK)
    return wrapped.adopt(RECIPE), wrapped.findings().is_remembered


def test_what_one_rank_cannot_do_none_does(tmp_path):
    assert on_two(other_names_on_rank_1, scratch=tmp_path) == [(False, False)] * 2


def alone(group):
    wrapped = DistributedDataParallel(network())
    return wrapped.adopt(RECIPE), wrapped.explain()


def test_one_worker_has_nothing_to_adopt(tmp_path):
    ((adopted, explained),) = on_two(alone, scratch=tmp_path, world=1)
    assert not adopted
    assert explained == "Torch's own buckets stay: one worker sends no messages."


def test_why_there_is_no_recipe_is_one_line():
    """However much there is to explain by now."""
    found = Findings(stage=Stage.LEARNING, baseline_step_s=0.1)
    account = PlanningAccount(
        SimpleNamespace(findings=found),
        None,
        why_unplanned=None,
        workers=2,
        device="cpu",
        baseline="torch's own buckets",
    )
    assert len(account.explain().splitlines()) > 1
    with pytest.raises(RequestError, match=r"^there is no recipe: No plan yet: [^\n]*\.$"):
        account.recipe()


def without_explaining(group):
    """To explain means to predict what else could be done, and checkpoints ask for recipes."""
    wrapped = DistributedDataParallel(network(), **QUICK)
    trained(wrapped, group.rank(), steps=5, until_settled=True)
    account_module.explanation = None
    return wrapped.account().recipe_text() == wrapped.recipe().to_text()


def test_a_recipe_takes_no_explanation(tmp_path):
    assert on_two(without_explaining, scratch=tmp_path) == [True] * 2


def outlived(group):
    wrapped = DistributedDataParallel(network(), **QUICK)
    account = wrapped.account()
    with pytest.raises(RequestError, match="there is no recipe: No plan yet"):
        account.recipe()
    steps, _ = trained(wrapped, group.rank(), steps=5, until_settled=True)
    assert steps < MOST_STEPS
    told = wrapped.explain(), wrapped.plan, wrapped.recipe(), wrapped.findings()
    gone = weakref.ref(wrapped)
    del wrapped
    gc.collect()
    return gone() is None, told == (
        account.explain(),
        account.plan,
        account.recipe(),
        account.findings(),
    )


def test_what_was_found_outlives_the_wrapper(tmp_path):
    assert on_two(outlived, scratch=tmp_path) == [(True, True)] * 2
