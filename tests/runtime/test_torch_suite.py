"""torch's own tests pass with our class in the place of torch's."""

import sys
from pathlib import Path

import pytest
from commands import run

SUITE = Path(__file__).parent / "torch_suite.py"

TESTS = [
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_requires_grad",
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_grads_same_across_ranks_with_no_sync",
    "test_ddp_create_graph",
    "test_static_graph_api_cpu",
]


@pytest.mark.long
@pytest.mark.parametrize("half", [0, 1])
def test_torchs_own_tests(half, tmp_path):
    """Half a minute: every rank of every test imports torch."""
    names = [f"TestOurs.{name}" for name in TESTS[half::2]]
    environment = {"TEMP_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = run(sys.executable, SUITE, "-v", *names, environment=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    summary = done.stderr.strip().splitlines()[-3:]
    assert summary[0].startswith(f"Ran {len(names)} tests")
    assert summary[-1] == "OK", summary  # without a word of tests that were skipped
