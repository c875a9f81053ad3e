"""Candidates in real training steps: who is tried twice, and who wins.

A noisy machine can make one trial fast or slow by chance. So the best of a first round are tried
again, and the baseline with them: what wins was not slower than that.
"""

from collections.abc import Sequence
from statistics import mean

from msgspec import Struct

from gradweave.session.candidates import Candidate

# What is slower by more in the first round is not tried again.
CLOSE = 0.05
MOST_RIVALS = 2
# Of two plans that differ by less, the one with the better prediction stays.
TRIAL_NOISE = 0.01


class Trial(Struct, frozen=True, kw_only=True):
    """A candidate in real training steps; times of the slowest rank."""

    candidate: Candidate
    rounds_s: tuple[float, ...]  # of each round the median step

    @property
    def step_s(self) -> float:
        return mean(self.rounds_s)


def finalists(trials: Sequence[Trial]) -> list[Candidate]:
    """Who is tried again after the first round, in the opposite order: a drift then cancels out.

    Nobody where the baseline is the fastest by far.
    """
    fastest_s = min(trial.step_s for trial in trials)
    close = [
        trial
        for trial in trials
        if not trial.candidate.is_baseline and trial.step_s <= fastest_s * (1 + CLOSE)
    ]
    rivals = sorted(close, key=lambda trial: trial.step_s)[:MOST_RIVALS]
    if not rivals:
        return []
    return [t.candidate for t in reversed(trials) if t.candidate.is_baseline or t in rivals]


def winner(trials: Sequence[Trial]) -> Trial:
    """Of those that were tried most, and were not slower than the baseline."""
    rounds = max(len(trial.rounds_s) for trial in trials)
    last = [trial for trial in trials if len(trial.rounds_s) == rounds]
    baseline_s = next(trial.step_s for trial in trials if trial.candidate.is_baseline)
    most_s = min(baseline_s, min(trial.step_s for trial in last) * (1 + TRIAL_NOISE))
    close = [trial for trial in last if trial.step_s <= most_s]
    return min(close, key=lambda trial: trial.candidate.predicted_s)
