"""From a wrapped model to a plan: recording, trying, choosing, planning again."""

import pytest
from msgspec.structs import replace
from small_training import MOST_STEPS, QUICK, batch, network, on_two, plan_of, trained
from torch import nn

from gradweave import RequestError
from gradweave._src import files
from gradweave._src.clocks import HostClock
from gradweave._src.recipe import Recipe
from gradweave._src.runtime.ddp import DistributedDataParallel
from gradweave._src.sparse.settings import GTopK
from gradweave._src.sparse.warmup import Densities


def settled(group, options):
    wrapped = DistributedDataParallel(network(), **QUICK, **options)
    steps, _ = trained(wrapped, group.rank(), steps=5, until_settled=True)
    hooks = [len(part._forward_pre_hooks) for part in wrapped.module.modules()]
    return wrapped.explain(), sum(hooks), wrapped.findings().trace.forward_s > 0, steps


@pytest.mark.parametrize(
    "options",
    [
        {"collective": "ring"},
        {"collective": "parameter-server"},
        {"compression": GTopK(density=0.001)},
    ],
)
def test_a_whole_course_with_messages_of_ours(tmp_path, options):
    """Calibration and messages each have a group of their own."""
    for explained, hooks, has_forward, _ in on_two(settled, options, scratch=tmp_path):
        assert "(chosen)" in explained
        assert hooks == 0
        assert has_forward


def accumulating(group, options):
    wrapped = DistributedDataParallel(network(), **QUICK, **options)
    trained(wrapped, group.rank(), steps=5, until_settled=True, accumulate=3)
    return wrapped.findings().passes, wrapped.explain()


@pytest.mark.parametrize("options", [{}, {"static_graph": True}])
def test_a_step_has_all_of_its_passes(tmp_path, options):
    """Otherwise what one of them is predicted to take would stand beside what a step took."""
    for passes, explained in on_two(accumulating, options, scratch=tmp_path):
        assert passes == 3
        assert "in each of 3 passes" in explained


def called_by_name(group):
    wrapped = DistributedDataParallel(network(), **QUICK)
    for step in range(MOST_STEPS):
        wrapped(input=batch(step, group.rank())).square().mean().backward()
        if wrapped.findings().trace is not None:
            return wrapped.findings().trace.batch_size
    return None


def test_inputs_may_have_names(tmp_path):
    """As those of Transformers' models."""
    assert on_two(called_by_name, scratch=tmp_path) == [4, 4]


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
    why = "Torch's own buckets stay: gradients do not come in the same order in every step."
    assert on_two(out_of_order, scratch=tmp_path) == [why, why]


class Clock:
    """Says what it is told, however long steps really take."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def clock_of(wrapped):
    """The same one every time."""
    if not isinstance(wrapped._driver._now_s, Clock):
        wrapped._driver._now_s = Clock()
        wrapped._driver._instruments.clock = HostClock(wrapped._driver._now_s)
    return wrapped._driver._now_s


def stages(wrapped, group, seconds):
    """The wrapper's stage after each step, where each of them takes so many seconds."""
    clock = clock_of(wrapped)
    found = []
    for number, step_s in enumerate(seconds):
        wrapped(batch(number, group.rank())).sum().backward()
        clock.now_s += step_s
        found.append(wrapped.findings().stage)
    return found


def drifting(group, slower_s):
    """From some step on they are slower, on one rank; the first ones after settling tell."""
    wrapped = DistributedDataParallel(network(), plan=plan_of(2, 3), replan_when=0.5)
    late_s = slower_s if group.rank() == 1 else 1.0
    found = stages(wrapped, group, [1.0] * 30 + [late_s] * 50)
    return found[40], "recording" in found


@pytest.mark.parametrize(("slower_s", "plans_again"), [(1.4, False), (1.6, True)])
def test_planning_again_when_steps_take_another_time(tmp_path, slower_s, plans_again):
    assert on_two(drifting, slower_s, scratch=tmp_path) == [("settled", plans_again)] * 2


def drifted_from_a_recipe(group, step_s):
    """The recipe predicts a moment; steps took a second over it when it was made."""
    first = DistributedDataParallel(network(), **QUICK)
    trained(first, group.rank(), steps=1, until_settled=True)
    recipe = replace(first.recipe(), step_s=1.0)
    wrapped = DistributedDataParallel(network(), plan=recipe, replan_when=0.5, **QUICK)
    found = stages(wrapped, group, [step_s] * 40)
    assert wrapped.findings().is_given == ("recording" not in found)
    while wrapped.findings().stage != "settled":
        found += stages(wrapped, group, [step_s])
    planned = wrapped.findings()
    assert stages(wrapped, group, [step_s] * 60) == ["settled"] * 60
    return found[10], "recording" in found, planned.step_s, planned.predicted.iteration_s < 1.0


@pytest.mark.parametrize("step_s", [1.2, 2.0])
def test_what_a_prediction_leaves_out_is_no_drift(tmp_path, step_s):
    """Planned again at most once: what steps take then is what is expected from then on."""
    drifts = step_s > 1.5
    expected = ("settled", drifts, step_s if drifts else 1.0, True)
    assert on_two(drifted_from_a_recipe, step_s, scratch=tmp_path) == [expected] * 2


def tried(group, lucky_s):
    """One message per gradient takes 1.2 s, but by chance ``lucky_s`` at first; torch's 1.0 s."""
    # By one collective, so that there is no third candidate that differs from torch's in it alone.
    options = {"planner": "wfbp", "collective": "native", "record_steps": 1, "trial_steps": 2}
    wrapped = DistributedDataParallel(network(), **options)
    clock = clock_of(wrapped)
    steps = 0
    while wrapped.findings().stage != "settled":
        assert steps < MOST_STEPS
        wrapped(batch(steps, group.rank())).sum().backward()
        is_first_visit = len(wrapped.findings().trials) < 2
        plan = wrapped._engine.plan
        is_torchs = plan is None or plan.planner == "ddp"
        clock.now_s += 1.0 if is_torchs else lucky_s if is_first_visit else 1.2
        steps += 1
    found = wrapped.findings()
    visits = {len(trial.candidate.plan.buckets): len(trial.visits) for trial in found.trials}
    return visits, found.plan.planner, wrapped.explain()


@pytest.mark.parametrize("lucky_s", [0.9, 0.97, 1.2], ids=["lucky", "close", "unlucky"])
def test_a_lucky_trial_is_not_kept(tmp_path, lucky_s):
    for visits, planner, explained in on_two(tried, lucky_s, scratch=tmp_path):
        assert visits[1] == (1 if lucky_s > 1.15 else max(2, visits[1]))
        assert planner == "ddp"
        assert "Tried: torch's own buckets, 1 message by native: predicted" in explained
        assert (
            "Torch's own buckets stay: turn by turn, nothing that was tried is clearly faster"
            in explained
        )


def recipes(group, folder):
    wrapped = DistributedDataParallel(network(), **QUICK)
    trained(wrapped, group.rank(), steps=1, until_settled=True)
    text = wrapped.explain()
    assert "(chosen)" in text
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
    assert explained == "Torch's own buckets stay: planning ends where join() begins."


def warming_up(group):
    """What travels in each step, by stage."""
    densities = Densities(warmup=(0.5, 0.25), final=0.1, steps_each=MOST_STEPS // 3)
    wrapped = DistributedDataParallel(network(), compression=GTopK(density=densities), **QUICK)
    seen = {}
    for step in range(MOST_STEPS):
        wrapped(batch(step, group.rank())).sum().backward()
        found = wrapped.findings()
        seen.setdefault(found.stage, set()).add(densities.at(step))
        if found.stage == "warming up":
            (compression,) = {bucket.compression for bucket in wrapped.plan.buckets}
            # Ranks agree on the next plan in the steps after a change.
            assert compression.density in {densities.at(step), densities.at(max(0, step - 40))}
            assert "until the density is the last one" in wrapped.explain()
            with pytest.raises(RequestError, match="there is no recipe: "):
                wrapped.recipe()
        if found.stage == "settled":
            break
    tried = {trial.candidate.plan.buckets[0].compression.density for trial in found.trials}
    return seen, tried, str(found.worth)


@pytest.mark.long
def test_plans_are_tried_with_the_density_that_lasts(tmp_path):
    for seen, tried, worth in on_two(warming_up, scratch=tmp_path):
        assert seen["trying"] == seen["settled"] == {0.1}
        assert {0.25} <= seen["warming up"]
        assert tried == {0.1}
        assert worth.startswith("Compression ")


def judged(group):
    wrapped = DistributedDataParallel(
        network(), compression=GTopK(density=0.1, whole_model=True), **QUICK
    )
    trained(wrapped, group.rank(), steps=5, until_settled=True)
    return wrapped.explain().split("\n")


def test_one_message_for_the_whole_model_is_judged_too(tmp_path):
    for how, worth in on_two(judged, scratch=tmp_path):
        assert how == "The whole model travels as one sparse message."
        assert worth.startswith("Compression ")
