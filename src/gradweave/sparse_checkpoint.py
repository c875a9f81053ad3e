"""What sparsification carries over, kept in a folder, a file for each rank."""

from gradweave._src.sparse.checkpoint import load, save

__all__ = ["load", "save"]
