"""Sparsified gradients: selecting the largest, exchanging them, and losing nothing."""

from gradweave._src.sparse.exchange import EXCHANGES, Exchanged
from gradweave._src.sparse.exchanger import Exchanger
from gradweave._src.sparse.residual import Carried
from gradweave._src.sparse.select import SELECTIONS, compile_kernels
from gradweave._src.sparse.step import Sparsifier
from gradweave._src.sparse.warmup import Densities, MomentumCorrection, clip_local_norm

__all__ = [
    "EXCHANGES",
    "SELECTIONS",
    "Carried",
    "Densities",
    "Exchanged",
    "Exchanger",
    "MomentumCorrection",
    "Sparsifier",
    "clip_local_norm",
    "compile_kernels",
]
