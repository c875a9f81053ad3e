"""The three loops of the Linear Pipeline paper, for any model and optimizer (docs/sharded.md)."""

from gradweave._src.runtime.bsp import AllReduce, BspLoop, Overlap, ReduceBroadcast

__all__ = ["AllReduce", "BspLoop", "Overlap", "ReduceBroadcast"]
