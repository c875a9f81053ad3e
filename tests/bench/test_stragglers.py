"""What is computed from cases of slow ranks, and the job that goes through them."""

import pytest
import stragglers
from ranks import on_processes
from stragglers import Everything, page, schedule, trace

from gradweave._src.bench.stragglers import Fault, StragglersQuestion, Watched, healed
from gradweave._src.bench.stragglers_job import Stretched, cases
from gradweave._src.phases import PHASES
from gradweave._src.session.slow_ranks import SlowRank

FAULT = Fault(rank=2, phase="backward", share=0.2)


def watched(fault=None, *, found=(), step_s=1.0, number=0):
    return Watched(number=number, fault=fault, step_s=step_s, found=found)


def said(rank=2, phase="backward", step_without_s=1.0):
    return SlowRank(
        rank=rank,
        host=None,
        phase=phase,
        times_as_long=1.2,
        step_s=1.1,
        step_without_s=step_without_s,
    )


def test_right_is_the_rank_and_the_phase():
    assert watched().is_right
    assert watched(FAULT, found=(said(), said(rank=0))).is_right
    assert not watched(FAULT).is_right
    assert not watched(FAULT, found=(said(rank=1),)).is_right
    assert not watched(FAULT, found=(said(phase="forward"),)).is_right
    assert not watched(found=(said(),)).is_right


def test_a_case_is_compared_with_its_healthy_neighbours():
    faulty = watched(FAULT, found=(said(step_without_s=1.1),), step_s=1.3)
    (one,) = healed([watched(step_s=0.9), faulty, watched(step_s=1.1)])
    assert (one.step_s, one.prediction_error) == pytest.approx((1.0, 0.1))
    assert healed([watched(), watched(FAULT), watched()]) == []


def test_the_schedule_has_all_kinds_between_healthy_cases():
    planned = list(schedule(2, seed=1))
    assert planned[::2] == [None] * (2 * len(PHASES) * len(stragglers.SHARES) + 1)
    kinds = [(fault.phase, fault.share) for fault in planned[1::2]]
    assert {kinds.count(kind) for kind in kinds} == {2}


def test_the_page_says_what_was_wrong():
    right = watched(FAULT, found=(said(),), number=1)
    missed = watched(FAULT, number=3)
    alarm = watched(found=(said(rank=0),), number=4)
    text = page(Everything(made_with="", cases=[watched(), right, watched(), missed, alarm]), "out")
    assert "Rank and phase right: 1 of 2 (50.0%). False alarms: 1 in 3 undisturbed cases." in text
    assert "| backward | 20% | 2 | 1 | 1000.0 | 1000.0 | 1000.0 | 0.0% |" in text
    assert "- Case 3: backward of rank 2 by 20% was longer; said: nobody" in text
    assert "- Case 4: nothing was longer; said: Rank 0" in text


def test_a_stretched_timer_goes_on_where_it_was(monkeypatch):
    now = [0.0]
    waited = []
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("time.sleep", waited.append)
    timer = Stretched()
    now[0] = 1.0
    timer.take(2.0)
    now[0] = 2.0
    assert timer.now_s() == 1.5
    timer.wait_until(2.5)
    assert waited == [2.0]
    timer.take(1.0)
    now[0] = 3.0
    assert timer.now_s() == 2.5


def went_through(group, folder):
    question = StragglersQuestion(
        trace=trace().rescaled(forward_s=0.002, backward_s=0.002, parameter_scale=0.001),
        input_s=0.002,
        settling_steps=1,
        steps=20,
        cases=(None, Fault(rank=1, phase="forward", share=20.0)),
        folder=str(folder),
    )
    return list(cases(question, group))


def test_the_job_goes_through_all_cases(tmp_path):
    """Takes some seconds: planning comes first. Twenty times as long is no accident."""
    for number in range(2):
        (tmp_path / str(number)).touch()
    answers = on_processes(2, went_through, tmp_path, scratch=tmp_path)
    assert answers[0] == answers[1]
    healthy, slow = answers[0]
    assert (healthy.number, healthy.fault, slow.number) == (0, None, 1)
    assert slow.is_right
