"""A training script of forty lines on two nodes, kept, and its page."""

import sys

from lab_watching import LIMIT_S

from gradweave.cli import main
from gradweave.lab import Cluster, ClusterSpec
from gradweave.report.folders import read_folders

SCRIPT = """
import sys

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import gradweave
from gradweave.workloads.datasets import Batches, fashion_mnist_subset
from gradweave.workloads.models import SmallCNN


def train(wrapper, folder):
    torch.manual_seed(0)
    module = SmallCNN(width=16)
    if wrapper == "torch":
        model = torch.nn.parallel.DistributedDataParallel(module)
        watched = gradweave.watch(model)
    else:
        model = watched = getattr(gradweave, wrapper)(module, timeline=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    images = fashion_mnist_subset(train=True)
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = Batches(examples=len(images), batch_size=8, world=world, rank=rank)
    losses = []
    for step in range(30):
        batch = images.take(batches.indices(step))
        optimizer.zero_grad()
        loss = cross_entropy(model(batch.normalised()), batch.labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    watched.save_run(folder, losses=losses)
    if rank == 0:
        print(watched.metrics())


torch.set_num_threads(1)
dist.init_process_group("gloo")
train(*sys.argv[1:])
dist.destroy_process_group()
"""

RUNTIMES = {
    "DistributedDataParallel": "gradweave",
    "ShardedDataParallel": "sharded",
    "torch": "torch-ddp",
}


def test_trainings_on_two_nodes(namespaces, tmp_path):
    """Seconds: three trainings, each with ranks that import torch."""
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    (tmp_path / "runs").mkdir()
    with Cluster(ClusterSpec(nodes=2, rate="1gbit")) as cluster:
        for wrapper in RUNTIMES:
            folder = tmp_path / "runs" / wrapper
            said = []
            command = [sys.executable, str(file), wrapper, str(folder)]
            result = cluster.start(command, on_line=said.append).wait(4 * LIMIT_S)
            assert result.exit_code == 0, said
    for folder in read_folders([tmp_path / "runs"]):
        run = folder.run
        (row,) = run.results.rows
        assert row.runtime == RUNTIMES[folder.name]
        assert (row.workers, row.nodes, row.ranks_per_node) == (2, 2, 1)
        assert len(run.measured[row.runtime]) == 2
        assert len(run.steps.step_s) == 30
        assert run.network is not None
        assert row.runtime in run.predicted
        assert folder.losses is not None
        tensors = {name for bucket in run.plans[row.runtime].buckets for name in bucket.tensors}
        assert tensors == {tensor.name for tensor in run.trace.tensors}
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    argv = ["report", str(tmp_path / "runs"), "--output", str(page), "--perfetto", str(trace)]
    assert main(argv) == 0
    assert "Trainings side by side" in page.read_text()
    assert trace.stat().st_size > 0
