"""Ranks that fail: how often to write a checkpoint, and what is left of the time.

Every rank fails at random, on average once in its own mean time between failures, and one failure
stops all of them: N ranks fail N times as often as one. A failure costs a restart, which may fail
too, and everything since the last checkpoint. With M the mean time between failures of the whole
job, C that of writing a checkpoint and R that of a restart, an interval of t useful seconds takes
``M exp(R/M) (exp((t + C)/M) - 1)`` seconds on average (J. T. Daly, "A higher order estimate of the
optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22, 2006). The
best t solves ``(1 - t/M) exp((t + C)/M) = 1``. Young's ``sqrt(2 C M)`` (Communications of the ACM
17, 1974) is what it comes to where C is far below M.
"""

from math import exp, expm1, sqrt

from msgspec import Struct

from gradweave._src.checks import require_not_negative, require_positive

HOUR_S = 3600.0


class Failures(Struct, frozen=True, kw_only=True):
    """How often a rank fails, and what a failure and a checkpoint cost."""

    rank_mtbf_s: float  # mean time between failures of one rank
    restart_s: float = 0.0  # until all ranks train again from a checkpoint
    checkpoint_s: float = 0.0  # in which nobody trains

    def __post_init__(self) -> None:
        require_positive(self, "rank_mtbf_s")
        require_not_negative(self, "restart_s", "checkpoint_s")

    def job_mtbf_s(self, workers: int) -> float:
        return self.rank_mtbf_s / workers


class Survival(Struct, frozen=True, kw_only=True):
    """What failures leave of a training of so many workers."""

    job_mtbf_s: float
    interval_s: float  # of training between two checkpoints, when it is best
    young_interval_s: float
    goodput: float  # the share of the time in which training gets on


def survival(failures: Failures, *, workers: int) -> Survival:
    """Return what failures leave of a training with checkpoints as often as is best."""
    mtbf_s = failures.job_mtbf_s(workers)
    interval_s = best_interval_s(mtbf_s, failures.checkpoint_s)
    return Survival(
        job_mtbf_s=mtbf_s,
        interval_s=interval_s,
        young_interval_s=sqrt(2 * failures.checkpoint_s * mtbf_s),
        goodput=goodput(failures, interval_s, workers=workers),
    )


def goodput(failures: Failures, interval_s: float, *, workers: int) -> float:
    """Return the useful share of the time, with a checkpoint after so many useful seconds."""
    mtbf_s = failures.job_mtbf_s(workers)
    without_failure = (interval_s + failures.checkpoint_s) / mtbf_s
    survives_restart = exp(-failures.restart_s / mtbf_s)
    if without_failure == 0:
        return survives_restart
    # The same as interval / (M exp(R/M) (exp(x) - 1)), without numbers that overflow.
    survives = exp(-without_failure)
    return survives_restart * (interval_s / mtbf_s) * survives / -expm1(-without_failure)


def best_interval_s(mtbf_s: float, checkpoint_s: float) -> float:
    """Return the interval with the largest useful share; halving finds it between 0 and M."""
    if checkpoint_s == 0:
        return 0.0
    low, high = 0.0, 1.0  # of the mean time between failures
    for _ in range(200):
        share = (low + high) / 2
        # (1 - t) exp(t + c) - 1, which falls from above zero to -1
        if (1 - share) * exp(min(share + checkpoint_s / mtbf_s, 700.0)) > 1:
            low = share
        else:
            high = share
    return mtbf_s * (low + high) / 2
