import pytest


@pytest.fixture(scope="session", autouse=True)
def _with_kernels(compiled_kernels):
    """For whatever is sparsified."""
