"""The folder that a training leaves behind: whole, readable, and what the wrapper says itself."""

import copy

import pytest
import torch
from ranks import on_processes
from small_training import MOST_STEPS, QUICK, batch, network, plan_of
from torch import nn

from gradweave import DistributedDataParallel, ShardedDataParallel
from gradweave._src import files
from gradweave._src.plan import Bucket, Plan
from gradweave._src.report.folders import read_folders
from gradweave._src.results import Losses

WRAPPERS = {"gradweave": DistributedDataParallel, "sharded": ShardedDataParallel}
BOTH = Plan(
    planner="made",
    buckets=tuple(
        Bucket(tensors=names, collective="ring")
        for names in (("4.weight", "2.bias", "2.weight"), ("0.bias", "0.weight"))
    ),
    passes="both",
)


def taken(model, rank, *, steps):
    """Train; steps may be "until settled", and three more."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses, more = [], 3
    while more and len(losses) < (MOST_STEPS if steps is None else steps):
        optimizer.zero_grad()
        loss = model(batch(len(losses), rank)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if steps is None:
            more -= model.findings().stage == "settled"
    return losses


def saved_when_settled(group, name, folder):
    model = WRAPPERS[name](network(), timeline=True, **QUICK)
    losses = taken(model, group.rank(), steps=None)
    model.save_run(folder, losses=losses)
    found = model.findings()
    return {
        "timelines": model.timelines(),
        "losses": losses,
        "steps": model._clock.all_step_s(),
        "explanation": model.explain(),
        "trace": found.trace,
        "network": found.network,
        "plan": found.plan,
        "predicted": found.predicted,
        "trials": len(found.trials),
    }


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_settled_training(name, tmp_path):
    said, _ = on_processes(2, saved_when_settled, name, str(tmp_path / "mine"), scratch=tmp_path)
    (folder,) = read_folders([tmp_path / "mine"])
    run = folder.run
    assert (run.trace, run.network) == (said["trace"], said["network"])
    assert run.plans == {name: said["plan"]}
    assert run.predicted == {name: said["predicted"]}
    assert list(run.measured[name]) == said["timelines"]
    (row,) = run.results.rows
    assert (row.runtime, row.workers, row.nodes, row.ranks_per_node) == (name, 2, 1, 2)
    assert row.messages == len(said["plan"].buckets)
    assert min(row.iteration_s, row.compute_s) > 0 <= row.exposed_s
    assert run.steps.step_s == tuple(round(step_s, 6) for step_s in said["steps"])
    assert len(run.steps.step_s) == len(said["losses"])
    stages = [begin.stage for begin in run.steps.stages]
    assert stages[:2] == ["not begun", "recording"]
    assert stages[-1] == "settled"
    assert None not in run.steps.phases
    assert run.account.explanation == said["explanation"]
    assert len(run.account.trials) == said["trials"]
    (series,) = folder.losses.series
    assert series.losses == tuple(said["losses"])
    assert series.steps == tuple(range(len(said["losses"])))
    assert series.stages == run.steps.stages


GIVEN = {"gradweave": plan_of(2, 3), "sharded": BOTH}


def saved_with_a_plan(group, name, folder, timeline):
    model = WRAPPERS[name](network(), plan=GIVEN[name], timeline=timeline)
    taken(model, group.rank(), steps=4)
    model.save_run(folder)
    return model._clock.stages


@pytest.mark.parametrize("timeline", [False, True])
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_plan_that_was_given(name, timeline, tmp_path):
    """Nothing was recorded: a trace is estimated, and a network learnt from messages, if noted."""
    path = tmp_path / "mine"
    stages, _ = on_processes(2, saved_with_a_plan, name, str(path), timeline, scratch=tmp_path)
    (folder,) = read_folders([path])
    run = folder.run
    assert run.trace.origin == "estimated"
    assert run.plans == {name: GIVEN[name]}
    noted = [run.network is not None, name in run.predicted, name in run.measured]
    assert noted == [timeline] * 3
    assert [(begin.stage, begin.step) for begin in run.steps.stages] == [("settled", 0)]
    assert stages == list(run.steps.stages)
    assert folder.losses is None


class MixedTypes(nn.Module):
    """torch makes buckets of each type by itself."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 3)
        self.second = nn.Linear(3, 2).double()

    def forward(self, inputs):
        return self.second(self.first(inputs).double())


def saved_unplanned(group, folder, make, options):
    torch.manual_seed(0)
    model = DistributedDataParallel(make(), **options)
    taken(model, group.rank(), steps=6)
    model.save_run(folder)
    return model.explain()


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (MixedTypes, {"timeline": True}),
        (network, {"bucket_cap_mb_list": [1], "bucket_cap_mb": None}),
        (network, {"find_unused_parameters": True, "plan": None, "record_steps": 50}),
    ],
)
def test_torchs_own_buckets(make, options, tmp_path):
    path = tmp_path / "mine"
    (said, _) = on_processes(2, saved_unplanned, str(path), make, options, scratch=tmp_path)
    (folder,) = read_folders([path])
    run = folder.run
    assert run.account.explanation == said
    names = {name for name, _ in make().named_parameters()}
    assert {t for b in run.plans["gradweave"].buckets for t in b.tensors} == names


def one_worker(group, folder):
    model = DistributedDataParallel(network(), timeline=True)
    taken(model, 0, steps=4)
    model.save_run(folder)
    return group.size()


def test_one_worker(tmp_path):
    assert on_processes(1, one_worker, str(tmp_path / "mine"), scratch=tmp_path) == [1]
    (folder,) = read_folders([tmp_path / "mine"])
    assert folder.workers == 1
    assert folder.run.network is None


def saved_again(group, folder):
    model = DistributedDataParallel(network(), plan=plan_of(2, 3), timeline=True)
    losses = taken(model, group.rank(), steps=3)
    model.save_run(folder, losses=losses)
    losses += taken(model, group.rank(), steps=2)
    model.save_run(folder, losses=[(4, losses[4])])
    return losses


def test_the_same_folder_again(tmp_path):
    losses, _ = on_processes(2, saved_again, str(tmp_path / "mine"), scratch=tmp_path)
    (folder,) = read_folders([tmp_path / "mine"])
    assert len(folder.run.steps.step_s) == 5
    (series,) = files.read(tmp_path / "mine" / "losses.json", Losses).series
    assert (series.steps, series.losses) == ((4,), (losses[4],))


def refused(group, folder, mistake):
    # Of torch's own buckets nothing is known before the first step.
    given = None if mistake == "no step" else plan_of(2, 3)
    model = DistributedDataParallel(network(), plan=given)
    losses = None
    if mistake != "no step":
        losses = taken(model, group.rank(), steps=3)
    if mistake == "a copy":
        model = copy.deepcopy(model)
    if mistake == "losses":
        losses = losses[:2] if group.rank() == 0 else losses
    try:
        model.save_run(folder, losses=losses)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        said += "" if error.__cause__ is None else f", from {error.__cause__}"
    # And the group still works.
    number = torch.ones(1)
    group.allreduce([number]).wait()
    return said, number.item()


@pytest.mark.parametrize(
    ("mistake", "complaint"),
    [
        ("no step", "the run was not saved: no step has ended yet; save the run after some steps"),
        ("a copy", "this is a copy, which notes nothing; save the wrapper that trains"),
        ("losses", "the run was not saved: losses: there are 2 and there were 3 steps"),
        ("a file", "the run was not saved: FOLDER is a file, not a folder; give a new folder"),
        ("other files", "the run was not saved: FOLDER/trace.json is in the way and of no run; g"),
        ("forbidden", "the run was not saved: FOLDER: Not a directory"),
    ],
)
def test_a_mistake_is_one_line_on_all_ranks(mistake, complaint, tmp_path):
    path = tmp_path / "mine"
    if mistake in {"a file", "forbidden"}:
        path.touch()
    if mistake == "forbidden":
        path /= "inside"
    if mistake == "other files":
        path.mkdir()
        (path / "trace.json").touch()
    saids = on_processes(2, refused, str(path), mistake, scratch=tmp_path)
    for said, number in saids:
        assert said.startswith(f"RequestError: {complaint.replace('FOLDER', str(path))}")
        assert "\n" not in said
        assert ", from " not in said
        assert number == 2.0
    assert saids[0] == saids[1]
    assert not (path / "results.json").exists()


def full_disk(group, folder):
    model = DistributedDataParallel(network(), plan=plan_of(2, 3))
    losses = taken(model, group.rank(), steps=3)
    model.save_run(folder, losses=losses)
    write = files.write

    def full(path, value):
        if path.name == "plan.json":
            raise OSError(28, "No space left on device", str(path))
        write(path, value)

    files.write = full
    try:
        model.save_run(folder)
    except Exception as error:
        return type(error).__name__, str(error)


def test_a_full_disk_leaves_what_was_there(tmp_path):
    path = tmp_path / "mine"
    for name, said in on_processes(2, full_disk, str(path), scratch=tmp_path):
        assert name == "RequestError"
        assert said.startswith("the run was not saved: ")
        assert said.endswith("No space left on device")
    (folder,) = read_folders([path])
    assert folder.losses is not None


class WithEmpty(nn.Module):
    """Has a parameter without elements, which gets its gradient even so."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 3)
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, inputs):
        return self.first(inputs) + self.empty.sum()


def with_parameters_without_elements(group, name, folder):
    wrapped = WRAPPERS[name](WithEmpty(), timeline=True, **QUICK)
    taken(wrapped, group.rank(), steps=6)
    wrapped.save_run(folder)
    return True


@pytest.mark.parametrize("name", WRAPPERS)
def test_parameters_without_elements(name, tmp_path):
    on_processes(
        2, with_parameters_without_elements, name, str(tmp_path / "mine"), scratch=tmp_path
    )
    (folder,) = read_folders([tmp_path / "mine"])
    assert "empty" not in {tensor.name for tensor in folder.run.trace.tensors}
    assert folder.run.measured
