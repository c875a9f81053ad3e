"""What another plan could gain, by prediction, before a step is spent on it."""

from gradweave._src.timeline import Timeline
from gradweave._src.trace import Trace

# A plan is tried only if it is expected to be faster by this share of a step.
WORTH_TRYING = 0.02


def expected_s(predicted_s: float, known_step_s: float, known_predicted_s: float) -> float:
    """Return what a step will take if predictions leave out as much of it as with the known plan.

    They leave out what is no part of an iteration: loading data, an optimizer, other processes.
    """
    return known_step_s + predicted_s - known_predicted_s


def is_worth_trying(step_s: float, known_step_s: float) -> bool:
    return step_s < (1 - WORTH_TRYING) * known_step_s


def why_nothing_is_gained(sent: Timeline, trace: Trace, *, step_s: float, best_s: float) -> str:
    """Say why no plan is worth trying beside what is ``sent``; the best is predicted ``best_s``."""
    at_most = max(0.0, sent.iteration_s - best_s) / step_s
    gain = f"the best plan would gain {at_most:.1%} of a step of {step_s * 1e3:.1f} ms"
    if sent.exposed_s < WORTH_TRYING * step_s:
        return (
            f"messages are short beside backward, which hides all but {sent.exposed_s * 1e3:.1f} ms"
            f" of them; {gain}"
        )
    if sent.communication_s > trace.backward_s:
        return (
            f"messages take {sent.communication_s * 1e3:.1f} ms and backward "
            f"{trace.backward_s * 1e3:.1f} ms, so no merging hides them; {gain}"
        )
    return gain
