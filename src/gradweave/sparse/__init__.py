"""Sparsified gradients: selecting the largest, exchanging them, and losing nothing."""

from gradweave.sparse.exchange import EXCHANGES, Exchanged
from gradweave.sparse.exchanger import Exchanger
from gradweave.sparse.residual import Carried, redistribute
from gradweave.sparse.select import SELECTIONS, compile_kernels
from gradweave.sparse.step import Sparsifier
from gradweave.sparse.warmup import Densities, MomentumCorrection, clip_local_norm

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
    "redistribute",
]
