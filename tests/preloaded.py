"""What the fork server imports once, for every rank that it forks: see ranks.py.

It must leave no thread behind, for a forked process would not have it.
"""

import gc

import hypothesis
import pytest
import torch
import torch._dynamo
import torch.distributed
from kernels import compile_one_by_one

import gradweave.bsp
import gradweave.hooks
import gradweave.sparse_checkpoint
import gradweave.workloads

__all__ = ["gradweave", "hypothesis", "pytest", "torch"]

for public in gradweave.__all__:
    getattr(gradweave, public)  # which is imported when it is first asked for
compile_one_by_one()
gc.freeze()  # a rank's own collections need not look at a million objects that are not its own
