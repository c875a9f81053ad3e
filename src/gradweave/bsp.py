"""The three loops of the Linear Pipeline paper, for any model and optimizer (docs/sharded.md)."""

from gradweave._src.runtime.bsp import LOOPS, AllReduce, BspLoop, Overlap, ReduceBroadcast

__all__ = ["LOOPS", "AllReduce", "BspLoop", "Overlap", "ReduceBroadcast"]
