"""What warm_python imports once, for every script and every rank of tests.

make imports it once on a fresh checkout, as a plugin of pytest, so that it is compiled.

It must leave no thread behind, for a forked process would not have it.
"""

import hypothesis
import pytest
import ranks
import torch
import torch._dynamo
import torch.distributed
from kernels import compile_one_by_one

import gradweave.bsp
import gradweave.hooks
import gradweave.sparse_checkpoint
import gradweave.workloads

__all__ = ["gradweave", "hypothesis", "pytest", "ranks", "torch"]

for public in gradweave.__all__:
    getattr(gradweave, public)  # which is imported when it is first asked for
compile_one_by_one()
