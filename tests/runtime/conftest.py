import pytest
import torch

from gradweave.sparse.select import compile_kernels


@pytest.fixture(scope="session", autouse=True)
def _compiled_kernels():
    """Ranks load them from numba's cache: to compile takes longer than a rank waits for another."""
    compile_kernels(torch.float32)
