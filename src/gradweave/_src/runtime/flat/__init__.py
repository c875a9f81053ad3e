"""Gradients and parameters in flat buckets of ours, for overlap with both passes."""
