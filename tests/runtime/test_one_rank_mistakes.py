"""A mistake that one rank makes: it is told as with torch's wrapper, in whatever stage planning is.

The others wait for its gradients, and end when it does.
"""

import logging

import pytest
from habits_of_mistakes import Skipping, told
from habits_of_models import batch, sgd
from ranks import on_processes
from side_by_side import MOST_STEPS, QUICK, SMALL_BUCKETS, STAGES
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave import DistributedDataParallel

# In every run of the tests; the others in `make test-long`.
ALWAYS = {"learning"}


def leave_out(wrapped, step, rank, optimizer):
    """A layer, without find_unused_parameters."""
    wrapped(batch(step, rank), skips=True).square().mean().backward()
    optimizer.step()


def fail_in_backward(wrapped, step, rank, optimizer):
    """In a hook of the user's, who catches it and goes on."""

    def failing(_):
        raise ValueError("the user's hook has failed")

    value = batch(step, rank).requires_grad_()
    loss = wrapped(value, skips=False).square().mean()
    handle = wrapped.module.first[0].weight.register_hook(failing)
    try:
        loss.backward()
    except ValueError:
        handle.remove()


def mistaken(group, kind, stage, mistake):
    """What this rank is told, and how many steps after rank 1's mistake."""
    logging.getLogger("gradweave").setLevel(logging.CRITICAL)
    options = SMALL_BUCKETS | (QUICK if kind is DistributedDataParallel else {})
    wrapped = kind(Skipping(), **options)
    optimizer, wrong_at = sgd(wrapped), None
    try:
        for step in range(MOST_STEPS):
            if wrong_at is None and stage_of(wrapped, step) == stage:
                wrong_at = step
            optimizer.zero_grad()
            if step == wrong_at and group.rank() == 1:
                mistake(wrapped, step, group.rank(), optimizer)
                continue
            wrapped(batch(step, group.rank()), skips=False).square().mean().backward()
            optimizer.step()
    except RuntimeError as failure:
        return [step - wrong_at, *told(failure)]
    return ["nothing was told"]


def stage_of(wrapped, step):
    """Which is the same on all ranks between the same two steps; torch's wrapper plays along."""
    if isinstance(wrapped, DistributedDataParallel):
        return str(wrapped.findings().stage)
    return STAGES[min(step, len(STAGES) - 1)]


@pytest.mark.parametrize("mistake", [leave_out, fail_in_backward])
@pytest.mark.parametrize(
    "stage",
    [pytest.param(stage, marks=[] if stage in ALWAYS else [pytest.mark.long]) for stage in STAGES],
)
def test_torchs_own_words_for_what_one_rank_does(tmp_path, stage, mistake):
    """Seconds: rank 1 ends, and rank 0 with it. No abort: a dead rank would fail the test."""
    (tmp_path / "torchs").mkdir()
    (tmp_path / "ours").mkdir()
    torchs = on_processes(2, mistaken, TorchDDP, stage, mistake, scratch=tmp_path / "torchs")
    ours = on_processes(
        2, mistaken, DistributedDataParallel, stage, mistake, scratch=tmp_path / "ours"
    )
    assert ours[1] == torchs[1]
    assert ours[1][:2] == [1, "RuntimeError"]
    assert ours[0][1] == torchs[0][1] == "RuntimeError"
