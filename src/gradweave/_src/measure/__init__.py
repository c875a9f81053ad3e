"""Measuring: what collectives really take on a group."""
