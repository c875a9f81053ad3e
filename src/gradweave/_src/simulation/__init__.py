"""Predicting: one iteration, one that jitters, and how a job scales."""

from gradweave._src.simulation.failures import HOUR_S, Failures, Survival, survival
from gradweave._src.simulation.iteration import simulate
from gradweave._src.simulation.jitter import Jitter
from gradweave._src.simulation.passes import PassesCompared, compare_passes
from gradweave._src.simulation.scaling import PAPER_WORKERS, Case, Outcome, Simulated, cases, run

__all__ = [
    "HOUR_S",
    "PAPER_WORKERS",
    "Case",
    "Failures",
    "Jitter",
    "Outcome",
    "PassesCompared",
    "Simulated",
    "Survival",
    "cases",
    "compare_passes",
    "run",
    "simulate",
    "survival",
]
