"""Predicting: one iteration, one that jitters, and how a job scales."""

from gradweave._src.simulation.iteration import simulate
from gradweave._src.simulation.jitter import Jitter
from gradweave._src.simulation.passes import PassesCompared, compare_passes
from gradweave._src.simulation.scaling import PAPER_WORKERS, Case, Outcome, Simulated, cases, run

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
