"""Sparsified gradients: selecting the largest, exchanging them, and losing nothing."""
