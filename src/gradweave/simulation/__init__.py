"""Predicting: one iteration, one that jitters, and how a job scales."""

from gradweave.simulation.iteration import simulate
from gradweave.simulation.jitter import Jitter
from gradweave.simulation.passes import PassesCompared, compare_passes
from gradweave.simulation.scaling import PAPER_WORKERS, Case, Outcome, Simulated, cases, run

__all__ = [
    "PAPER_WORKERS",
    "Case",
    "Jitter",
    "Outcome",
    "PassesCompared",
    "Simulated",
    "cases",
    "compare_passes",
    "run",
    "simulate",
]
