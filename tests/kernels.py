"""What numba compiles for sparsified and rounded messages, compiled by one process of many."""

import fcntl
import os
from pathlib import Path
from tempfile import gettempdir

import torch

from gradweave._src.comm.rounding import eight_bits
from gradweave._src.sparse.select import compile_kernels


def compile_one_by_one() -> None:
    """Compile, or load from numba's cache what another process has compiled meanwhile.

    On a fresh checkout all who run tests would compile the same at once.
    """
    with Path(gettempdir(), f"gradweave-tests-kernels-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for dtype in (torch.float32, torch.float64):  # of models, and of tests that round nothing
            compile_kernels(dtype)
        eight_bits.compile_kernels()
