"""Two plans are timed in turn in real training steps, and the faster one stays.

A noisy machine makes steps fast or slow by chance, and for a while. So a challenger and the plan
that it is to replace run in turn, and differences between neighbouring visits are what counts. A
clear gain decides at once; without one the plan that was there first stays.
"""

from collections.abc import Sequence
from enum import Enum
from itertools import chain, pairwise, zip_longest
from statistics import mean, median

from msgspec import Struct
from msgspec.structs import replace

from gradweave._src.session.candidates import Candidate

# A challenger that is slower by more than CLEARLY_WORSE in each of its first HOPELESS_AFTER_STEPS
# steps is dropped at once.
CLEARLY_WORSE = 0.15
HOPELESS_AFTER_STEPS = 2
# A challenger wins at once if its first visit is faster by more than this; otherwise it gets
# another visit. Of several visits a smaller difference is clear.
CLEAR_AT_ONCE, CLEAR_IN_TURN = 0.06, 0.03
# How often each of two close plans runs at most.
MOST_VISITS = 3
# A challenger that is not faster by more than this in the end does not replace the champion.
TRIAL_NOISE = 0.01


class Visit(Struct, frozen=True, kw_only=True):
    """A few steps in a row with one plan.

    Attributes:
        steps_s: seconds of each step, on the rank where it took longest.
        is_noted: whether a hook noted when messages were ready and done, which takes some time.
    """

    steps_s: tuple[float, ...]
    is_noted: bool

    @property
    def step_s(self) -> float:
        """The median step of this visit."""
        return median(self.steps_s)


class Trial(Struct, frozen=True, kw_only=True):
    """A candidate in real training steps; ``Findings.trials`` has those that were tried.

    Attributes:
        candidate: the plan, and what was predicted of it.
        visits: the times when the plan ran, in their order.
    """

    candidate: Candidate
    visits: tuple[Visit, ...] = ()

    @property
    def rounds_s(self) -> tuple[float, ...]:
        """The median step of each visit."""
        return tuple(visit.step_s for visit in self.visits)

    @property
    def step_s(self) -> float:
        """What a step takes, without a hook that notes messages where that was timed."""
        plain_s = [visit.step_s for visit in self.visits if not visit.is_noted]
        return mean(plain_s or self.rounds_s)


def with_visit(trial: Trial, visit: Visit) -> Trial:
    """Return the trial with one more visit."""
    return replace(trial, visits=(*trial.visits, visit))


def times_as_fast(chosen: Trial, baseline: Trial) -> float:
    """Return how many times as fast steps were with the chosen plan as with the baseline.

    If the baseline ran only while its messages were noted, which makes it slower, the chosen plan's
    turns of both kinds are compared with it, and the smaller ratio counts.
    """
    chosen_s = chosen.step_s
    noted_s = [visit.step_s for visit in chosen.visits if visit.is_noted]
    if noted_s and all(visit.is_noted for visit in baseline.visits):
        chosen_s = max(chosen_s, mean(noted_s))
    return baseline.step_s / chosen_s


class Outcome(Enum):
    FASTER = "the challenger is faster"
    NOT_FASTER = "the challenger is not faster"
    CLOSE = "they have to run again"


def outcome(
    challenger_s: Sequence[float], champion_s: Sequence[float], *, is_last: bool = False
) -> Outcome:
    """Decide by the median step of each visit; the champion came first, then both in turn.

    ``is_last`` says that neither can run again. A single visit must then be as clear as ever.
    """
    in_turn = [s for s in chain(*zip_longest(champion_s, challenger_s)) if s is not None]
    # As shares of a champion's step; negative where the challenger is faster.
    differences = [
        (after_s / before_s - 1) * (1 if number % 2 == 0 else -1)
        for number, (before_s, after_s) in enumerate(pairwise(in_turn))
    ]
    # A machine that changes its speed once makes one outlier, which the median leaves out. The
    # means keep a challenger from winning that took longer in all.
    both = (median(differences), mean(challenger_s) / mean(champion_s) - 1)
    is_only = len(challenger_s) == 1
    if is_only:
        is_clear = max(both) < -CLEAR_AT_ONCE
    else:
        is_clear = max(both) < -CLEAR_IN_TURN or min(both) > CLEAR_IN_TURN
    if not (is_clear or is_last) and len(challenger_s) < MOST_VISITS:
        return Outcome.CLOSE
    least = CLEAR_AT_ONCE if is_only else TRIAL_NOISE
    return Outcome.FASTER if max(both) < -least else Outcome.NOT_FASTER
