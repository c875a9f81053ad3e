"""Measuring: when gradients are ready, what messages cost, and what a step looked like."""
