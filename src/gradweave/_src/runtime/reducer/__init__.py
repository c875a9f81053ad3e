"""Gradients by torch's own reducer, which is given the exact buckets of a plan."""
