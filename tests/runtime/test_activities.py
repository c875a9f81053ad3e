"""What ranks do for a session's commands."""

from gradweave._src.clocks import HostClock
from gradweave._src.runtime.driving.activities import StepTiming
from gradweave._src.session.commands import TimeSteps


def test_a_rank_that_has_answered_times_no_more_steps():
    """It may wait for the others for good."""
    marks = []
    clock = HostClock(lambda: marks.append(1) or float(len(marks)))
    timing = StepTiming(TimeSteps(steps=2, settling_steps=1), clock, None)
    answers = []
    for _ in range(50):
        timing.step_over()
        answers.append(timing.part())
    assert answers[:2] == [None, None]
    assert set(answers[2:]) == {answers[2]}
    assert answers[2].steps_s == (1.0, 1.0)
    assert len(marks) == 4
