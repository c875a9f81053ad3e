"""What the fork server imports once, for every rank that it forks: see ranks.py.

It must leave no thread behind, for a forked process would not have it.
"""

import gc

import hypothesis
import pytest
import torch
import torch._dynamo
import torch.distributed

import gradweave.bsp
import gradweave.hooks
import gradweave.sparse_checkpoint
import gradweave.workloads
from gradweave._src.comm.rounding import eight_bits
from gradweave._src.sparse.select import compile_kernels

__all__ = ["gradweave", "hypothesis", "pytest", "torch"]

for public in gradweave.__all__:
    getattr(gradweave, public)  # which is imported when it is first asked for
compile_kernels(torch.float32)
eight_bits.compile_kernels()
gc.freeze()  # a rank's own collections need not look at a million objects that are not its own
