"""Predicting: one iteration, one that jitters, and how a job scales."""

from gradweave.simulation.iteration import simulate
from gradweave.simulation.jitter import Jitter
from gradweave.simulation.scaling import PAPER_WORKERS, Case, Outcome, Simulated, cases, run

__all__ = ["PAPER_WORKERS", "Case", "Jitter", "Outcome", "Simulated", "cases", "run", "simulate"]
