"""What is computed from the steps of runtimes that took turns."""

from itertools import accumulate
from types import SimpleNamespace

import pytest
from ranks import on_processes
from regret_cases import CASES, made_trace
from regret_page import Everything, Measured, page
from torch import nn

from gradweave._src.bench import regret_job
from gradweave._src.bench.regret import (
    RUNTIMES,
    RealWork,
    RegretQuestion,
    ReplayedWork,
    Turn,
    break_even_step,
    ratio_of_first,
    worst_stretch,
)
from gradweave._src.bench.regret_job import SWEEP_REPEATS, WARMUP, answers, best_cap_mb, turns
from gradweave._src.bench.training import swept_caps_mb
from gradweave._src.results import StageBegin


def turn(*steps_s, stages=(), runtime="gradweave"):
    return Turn(
        runtime=runtime,
        step_ends_s=tuple(accumulate(steps_s)),
        wrapping_s=0.0,
        correct=True,
        stages=tuple(StageBegin(*stage) for stage in stages),
    )


def torchs(*steps_s):
    return turn(*steps_s, runtime="torch-ddp")


PLANNED = (("recording", 1), ("trying", 5), ("settled", 9))


def test_regret_is_in_settled_steps():
    ours = turn(*[6.0] * 4, *[4.0] * 4, *[2.0] * 8, stages=PLANNED)
    assert ours.planning_steps == 8
    assert ours.settled_s == 2
    assert ours.total_s == 56
    assert ours.regret_steps == 56 / 2 - 16


def test_regret_of_whoever_starts_settled_is_that_of_slow_steps():
    ours = turn(5.0, *[2.0] * 9, stages=[("settled", 1)])
    assert (ours.planning_steps, ours.settled_s, ours.regret_steps) == (0, 2, 1.5)


def test_who_plans_anew_has_settled_when_that_is_over():
    stages = [("settled", 1), ("recording", 5), ("settled", 7)]
    ours = turn(*[2.0] * 4, *[8.0] * 2, *[4.0] * 4, stages=stages)
    assert (ours.planning_steps, ours.settled_s, ours.regret_steps) == (6, 4, 0)


def test_there_is_no_regret_before_a_plan_is_settled_on():
    ours = turn(*[6.0] * 8, stages=PLANNED[:2])
    assert ours.planning_steps == 8
    assert ours.settled_s is None
    assert ours.regret_steps is None


def test_torchs_first_steps_are_not_settled():
    assert torchs(*[9.0] * 5, *[3.0] * 5).settled_s == 3
    assert torchs(*[9.0] * 5, *[3.0] * 5).regret_steps == 10
    assert torchs(*[9.0] * 5).settled_s is None


def test_break_even_is_when_the_sums_cross():
    ours = turn(*[4.0] * 6, *[2.0] * 10, stages=[("recording", 1), ("settled", 7)])
    assert break_even_step(ours, torchs(*[3.0] * 16)) == 13  # 38 of 39; after 12 they are even
    assert break_even_step(ours, torchs(*[1.0] * 16)) is None


def test_what_is_ahead_in_the_first_steps_only_has_not_broken_even():
    ours = turn(*[2.0] * 5, *[4.0] * 10)
    assert break_even_step(ours, torchs(*[2.5] * 5, 1.0, *[4.0] * 9)) is None


def test_ratios_are_of_the_same_steps():
    ours, other = turn(*[3.0] * 2, *[1.0] * 2), torchs(*[2.0] * 4)
    assert ratio_of_first(ours, other, steps=2) == 1.5
    assert ratio_of_first(ours, other, steps=100) == 1


def test_the_worst_stretch_is_one_that_plans():
    other = torchs(*[1.0] * 60)
    stages = [("recording", 1), ("settled", 11)]
    ours = turn(*[1.5] * 10, *[1.0] * 20, *[9.0] * 30, stages=stages)
    assert worst_stretch(ours, other) == pytest.approx(1.25)
    assert worst_stretch(turn(*[2.0] * 60, stages=stages[:1]), other) == pytest.approx(2)


def test_there_is_no_worst_stretch_where_nobody_plans_or_steps_are_few():
    assert worst_stretch(turn(*[1.0] * 60, stages=[("settled", 1)]), torchs(*[1.0] * 60)) is None
    assert worst_stretch(torchs(*[1.0] * 60), torchs(*[1.0] * 60)) is None
    assert worst_stretch(turn(*[1.0] * 19, stages=[("trying", 1)]), torchs(*[1.0] * 19)) is None


def measured(*runs):
    return Measured(
        case="slow-link",
        title="by hand",
        nodes=2,
        rate="200mbit",
        steps=runs[0][0].steps,
        made_with="by hand",
        runs=list(runs),
    )


def test_the_page_compares_run_by_run():
    """Runs of a machine that is twice as slow the second time; break-even comes in one only."""
    ours = turn(*[4.0] * 2, *[1.0] * 8, stages=[("trying", 1), ("settled", 3)])
    fast = (torchs(*[2.0] * 10), ours)
    slow = (torchs(*[4.0] * 10), turn(*[8.0] * 9, 2.0, stages=[("trying", 1), ("settled", 10)]))
    text = page(Everything(measured=[measured(fast, slow)]), "stem")
    assert "## 2 nodes at 200mbit" in text
    (row,) = (line for line in text.splitlines() if line.startswith("| slow-link | 10 | 2 | gradw"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[5:7] == ["1,500 (1,000…2,000)", "0.500"]
    assert cells[-4:] == ["1.325 (0.800…1.850)", "16.5 (6.0…27.0)", "never (7…never)", ""]
    (stages,) = (line for line in text.splitlines() if line.startswith("| slow-link | 10 | gradw"))
    assert stages.endswith("| 1 | 6 (3…10) | 2 of 2 |")


def test_the_page_has_rows_of_who_never_settles():
    run = (torchs(*[2.0] * 10), turn(*[3.0] * 10, stages=[("recording", 1)]))
    text = page(Everything(measured=[measured(run)]), "stem")
    assert "|  |  |  |  | 30.0 | 1.500 | 1.500 | never | never |  |" in text
    assert "| 1 | 0 of 1 |" in text


def test_the_slow_link_is_what_it_is_said_to_be():
    trace = CASES["slow-link"].work.trace
    assert len(trace.tensors) == 20
    assert trace.nbytes.sum() == 5e6
    assert (trace.forward_s, trace.backward_s) == (pytest.approx(0.007), pytest.approx(0.013))


def all_answers(group, question):
    """Which cap a sweep finds best is chance, so it is told; the sweep runs all the same."""
    sweep = regret_job.best_cap_mb

    def told(work, group):
        sweep(work, group)
        return 0.25

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(regret_job, "best_cap_mb", told)
        return list(answers(question, group))


@pytest.mark.parametrize("best_mb", [None, 0.25, 1.0])
def test_the_best_cap_is_that_of_the_shortest_median_step(monkeypatch, best_mb):
    """First steps take long whatever the cap, and so does one step in each turn."""
    swept = []

    def scripted_ends_s(cap, steps, group):
        swept.append(cap)
        step_s = 2.0 if cap == best_mb else 3.0
        first_s = 1.0 if cap != best_mb else 50.0
        taken_s = [first_s] * WARMUP + [90.0 if cap == best_mb else 1.0]
        return list(accumulate(taken_s + [step_s] * (steps - len(taken_s))))

    monkeypatch.setattr(regret_job, "_torchs", lambda model, group, cap: cap)
    monkeypatch.setattr(regret_job, "step_ends_s", scripted_ends_s)
    model = nn.Linear(2**18, 1, bias=False)  # a MiB
    work = SimpleNamespace(model=lambda: model, step_of=lambda cap: cap)
    assert best_cap_mb(work, None) == best_mb
    assert swept == swept_caps_mb(2**20) * SWEEP_REPEATS


TINY = ReplayedWork(
    trace=made_trace("tiny", layers=2, elements=2000, forward_s=1e-4, backward_s=1e-4)
)
REAL = RealWork(model="small-cnn", batch_size=4, learning_rate=0.02)


@pytest.mark.parametrize(("work", "sweeps", "found_mb"), [(TINY, True, 0.25), (REAL, False, None)])
def test_runtimes_take_turns_on_all_ranks(work, sweeps, found_mb, tmp_path):
    """Trains on two processes, with half a second before each turn: seconds."""
    question = RegretQuestion(
        work=work,
        runtimes=("torch-ddp", "torch-ddp-tuned", "gradweave"),
        steps=4,
        runs=2,
        cache=str(tmp_path),
        sweeps=sweeps,
    )
    ranks = on_processes(2, all_answers, question, scratch=tmp_path)
    names = list(question.runtimes)
    assert [turn.runtime for turn in ranks[0]] == names + names[::-1]
    assert all(turn.correct and turn.steps == 4 for turn in ranks[0])
    # The slowest rank's ends, so the same on all.
    assert [turn.step_ends_s for turn in ranks[1]] == [turn.step_ends_s for turn in ranks[0]]
    torch_turn, tuned, ours, *_ = ranks[0]
    assert torch_turn.bucket_cap_mb is None
    assert tuned.bucket_cap_mb == found_mb
    assert (torch_turn.stages, tuned.stages) == ((), ())
    assert ours.stages[0].step == 1
    assert ours.explanation


def test_only_the_first_cold_run_fills_the_cache_and_none_reads_it(monkeypatch):
    def noted(runtime, work, question, group, cache):
        return runtime, cache

    monkeypatch.setattr(regret_job, "turn", noted)
    question = RegretQuestion(work=REAL, runtimes=RUNTIMES, steps=1, runs=3, cache="folder")
    first, second, third = zip(*[iter(turns(question, None, None))] * len(RUNTIMES), strict=True)
    assert [runtime for runtime, _ in first] == list(RUNTIMES)
    assert dict(first) == {**dict(third), "gradweave": "folder"}
    assert dict(second) == dict(third) == dict.fromkeys(RUNTIMES) | {"gradweave-cached": "folder"}
