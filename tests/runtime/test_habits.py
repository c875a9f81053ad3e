"""What torch's wrapper trains, ours trains alike, in whatever stage planning is."""

import json
import sys

import habits_of_mistakes
import pytest
import torch
import torch.distributed as dist
from commands import run
from habits import HABITS
from habits_of_mistakes import leaves_a_layer_out
from habits_of_models import batch, network, sgd, take_step
from habits_of_scripts import in_every_stage
from ranks import on_processes
from side_by_side import (
    MOST_STEPS,
    STAGES,
    Course,
    OurWrapper,
    TorchsWrapper,
    gave_up,
    is_same,
    plain,
    side_by_side,
)

ROUNDING = 1e-9
# So many share a pair of processes, and so many pairs of them run at once.
TOGETHER, AT_ONCE = 8, 2

# In every run of the tests; the others in `make test-long`.
ALWAYS = {
    "plain_model",
    "parameters_without_elements",
    "exports_its_model",
    "adversarial_with_freezing",
    "order_of_heads_changes",
    "leaves_a_micro_batch_over",
    "looks_locally_in_a_static_graph",
    "synchronises_twice_while_another_rank_looks",
    "forward_before_backward_in_a_static_graph",
    "communication_hook_in_cpp",
    "evaluates_with_gradients_before_a_barrier",
    "two_backward_passes_inside_forward",
}

# Where torch's own buckets may stay: what they do cannot be planned, or would not last.
MAY_GIVE_UP = {
    "weights_of_two_types",
    "sparse_embedding",
    "checkpoints_of_a_static_graph",
    "unused_beside_reentrant_checkpoints",
    "two_optimizers_inside_forward",
    "adversarial_with_freezing",
    "order_of_heads_changes",
    "order_of_heads_differs_from_the_first_step_on",
    "unfreezes_a_layer",
    "unfreezes_a_layer_while_plans_are_tried",
    "freezes_layers_for_a_while",
    "two_wrappers_share_parameters",
    "synchronises_twice_after_forward",
    "synchronises_twice_while_another_rank_looks",
    "communication_hook",
    "communication_hook_in_cpp",
    "other_group",
    "communication_hook_later",
    "communication_hook_while_plans_are_tried",
    "uneven_inputs",
    "uneven_inputs_while_plans_are_tried",
}
# They end before anything could be planned.
TOO_SHORT = {"differentiates_without_backward"} | {
    habit.__name__ for habit in habits_of_mistakes.HABITS
}


def in_turn(group, names):
    return [side_by_side(group, HABITS[name]) for name in names]


class Outcomes:
    """What each habit came to, on both ranks; found for several of them by the same processes.

    To start ranks takes longer than most habits. Where one fails, each runs by itself.
    """

    def __init__(self, names, folders):
        self._names, self._folders = names, folders
        self._found = {}

    def of(self, name):
        if name not in self._found:
            mine = [other for other in self._names if side_of(other) == side_of(name)]
            first = mine.index(name)
            self._run(mine[first : first + TOGETHER])
        if isinstance(self._found[name], AssertionError):
            raise self._found[name]
        return self._found[name]

    def _run(self, names):
        scratch = self._folders.mktemp("habits")
        try:
            ranks = on_processes(2, in_turn, names, scratch=scratch)
            self._found |= dict(zip(names, zip(*ranks, strict=True), strict=True))
        except AssertionError as failure:
            if len(names) == 1:
                self._found[names[0]] = failure
            else:
                for name in names:
                    self._run([name])


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    chosen = [item.callspec.params["name"] for item in request.session.items if _is_habit(item)]
    return Outcomes(chosen, tmp_path_factory)


def _is_habit(item):
    return item.originalname == "test_a_habit"


def side_of(name):
    """Which process that runs tests has it: another one would find out all of them again."""
    return sorted(HABITS, key=lambda other: (other not in ALWAYS, other)).index(name) % AT_ONCE


def marked(name):
    marks = [pytest.mark.xdist_group(f"habits {side_of(name)}")]
    return pytest.param(name, marks=marks if name in ALWAYS else [*marks, pytest.mark.long])


@pytest.mark.parametrize("name", [marked(name) for name in HABITS])
@pytest.mark.filterwarnings("ignore")
def test_a_habit(outcomes, name):
    """Seconds: it is planned for, and trained twice."""
    ranks = outcomes.of(name)
    for rank in ranks:
        for what, torchs in rank.torchs.items():
            assert is_same(rank.ours[what], torchs, within=ROUNDING), what
        if name not in TOO_SHORT:
            assert_planned(rank, may_give_up=name in MAY_GIVE_UP)
    for what in ranks[0].torchs:
        if is_same(*(rank.torchs[what] for rank in ranks)):
            assert is_same(*(rank.ours[what] for rank in ranks)), what


def assert_planned(rank, *, may_give_up):
    """To the end, or with a word why not."""
    assert rank.course.steps < MOST_STEPS, rank.explanations
    for explained in rank.explanations:
        if not (may_give_up and gave_up(explained)):
            assert {"recording", "settled"} <= rank.course.began.keys()
            assert "(chosen)" in explained


def left_out(group, stage, laters):
    """What torch's wrapper tells, and what ours tells in each case."""
    torchs = TorchsWrapper(Course(steps=20, began={stage: 4}))
    expected = leaves_a_layer_out(torchs, group.rank(), stage=stage, later=0)
    looking = dist.new_group()
    found = {
        later: leaves_a_layer_out(OurWrapper(looking), group.rank(), stage=stage, later=later)
        for later in laters
    }
    return expected, found


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "laters"),
    [
        ("not begun", range(8)),
        ("recording", range(3)),
        ("learning", range(4)),
        ("trying", range(12)),
        ("settled", [0, 5]),
    ],
)
def test_a_layer_left_out_is_told_in_the_next_step(tmp_path, stage, laters):
    """Seconds: a course for each. Whoever changes buckets in that step must not forget it."""
    for expected, found in on_processes(2, left_out, stage, laters, scratch=tmp_path):
        assert expected[:2] == [1, "RuntimeError"]
        assert found == dict.fromkeys(laters, expected)


def saved_in_every_stage(group, folder):
    """Rank 0 saves the model itself now and then; its weights by file."""
    wrap, weights = OurWrapper(dist.new_group()), {}
    wrapped = wrap(network())
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        take_step(wrapped, optimizer, batch(step, group.rank()))
        if group.rank() == 0 and in_every_stage(wrap):
            path = folder / f"{step}.pt"
            torch.save(wrapped.module, path)
            weights[str(path)] = plain(wrapped.module)
    return weights


LOADED = """
import json, sys
sys.modules["gradweave"] = None  # whoever imports it fails
import torch
found = {}
for path in sys.argv[1:]:
    model = torch.load(path, weights_only=False)
    model(torch.ones(4, 6, dtype=torch.float64)).sum().backward()
    found[path] = {name: value.tolist() for name, value in model.state_dict().items()}
print(json.dumps(found))
"""


def test_a_saved_model_needs_nothing_of_ours(tmp_path):
    """Seconds: a fresh interpreter imports torch."""
    saved, _ = on_processes(2, saved_in_every_stage, tmp_path, scratch=tmp_path)
    loaded = run(sys.executable, "-c", LOADED, *saved)
    assert loaded.returncode == 0, loaded.stderr
    assert json.loads(loaded.stdout) == saved
    assert len(saved) >= len(STAGES) - 1
