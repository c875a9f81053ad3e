"""torch's own tests of DistributedDataParallel, with ours in its place.

    python torch_suite.py TestOurs.test_ddp_create_graph …

Run by test_torch_suite.py. Ranks are spawned and import this file again, so what is set here is set
for them too.
"""

import os
import tempfile
import unittest
from pathlib import Path

os.environ.setdefault("BACKEND", "gloo")
os.environ.setdefault("WORLD_SIZE", "2")
if "TEMP_DIR" not in os.environ:
    os.environ["TEMP_DIR"] = tempfile.mkdtemp()
for name in ("barrier", "test_dir", "init_dir"):
    Path(os.environ["TEMP_DIR"], name).mkdir(exist_ok=True)

import torch  # noqa: E402

from gradweave._src.runtime.ddp import DistributedDataParallel  # noqa: E402

torch.nn.parallel.DistributedDataParallel = DistributedDataParallel
torch.nn.parallel.distributed.DistributedDataParallel = DistributedDataParallel

from torch.testing._internal.distributed import distributed_test  # noqa: E402

distributed_test.DistributedDataParallel = DistributedDataParallel


class TestOurs(
    distributed_test.TestDistBackend,
    distributed_test.DistributedTest._DistTestBase,
):
    def setUp(self):
        super().setUp()
        self._spawn_processes()
        torch.backends.cudnn.flags(enabled=True, allow_tf32=False).__enter__()


if __name__ == "__main__":
    unittest.main()
