"""A training script of forty lines on two nodes, kept, and its page."""

import json
import sys

import pytest
from drawn_timelines import assert_drawn_as_measured
from needs import missing
from test_browser import Page

from gradweave._src.cli import main
from gradweave._src.errors import LabError
from gradweave._src.lab import Cluster, ClusterSpec
from gradweave._src.report.folders import read_folders
from gradweave._src.report.page import make_page

# Both tests show what was trained once.
pytestmark = [pytest.mark.long, pytest.mark.xdist_group("browser")]
STEPS = 30
LIMIT_S = 240.0  # for what takes ten seconds, on a busy machine

SCRIPT = """
import sys

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import gradweave
from gradweave._src.workloads.datasets import Batches, fashion_mnist_subset
from gradweave._src.workloads.models import SmallCNN


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
for wrapper in sys.argv[2:]:
    train(wrapper, f"{sys.argv[1]}/{wrapper}")
dist.destroy_process_group()
"""

RUNTIMES = {
    "DistributedDataParallel": "gradweave",
    "ShardedDataParallel": "sharded",
    "torch": "torch-ddp",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Skips where a user may not make namespaces."""
    path = tmp_path_factory.mktemp("kept")
    (path / "train.py").write_text(SCRIPT)
    (path / "runs").mkdir()
    try:
        with Cluster(ClusterSpec(nodes=2, rate="1gbit")) as cluster:
            said = []
            command = [sys.executable, str(path / "train.py"), str(path / "runs"), *RUNTIMES]
            result = cluster.start(command, on_line=said.append).wait(LIMIT_S)
            assert result.exit_code == 0, said
    except LabError as error:
        if "namespaces are forbidden" not in str(error):
            raise
        missing(str(error))
    return path / "runs"


def test_trainings_on_two_nodes(runs, tmp_path):
    """Seconds: ranks import torch, and train three times."""
    for folder in read_folders([runs]):
        run = folder.run
        (row,) = run.results.rows
        assert row.runtime == RUNTIMES[folder.name]
        assert (row.workers, row.nodes, row.ranks_per_node) == (2, 2, 1)
        assert len(run.measured[row.runtime]) == 2
        assert len(run.steps.step_s) == STEPS
        assert run.network is not None
        assert row.runtime in run.predicted
        assert folder.losses is not None
        tensors = {name for bucket in run.plans[row.runtime].buckets for name in bucket.tensors}
        assert tensors == {tensor.name for tensor in run.trace.tensors}
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    assert main(["report", str(runs), "--output", str(page), "--perfetto", str(trace)]) == 0
    assert "Trainings side by side" in page.read_text()
    titles = [
        event["args"]["name"]
        for event in json.loads(trace.read_text())["traceEvents"]
        if event["name"] == "process_name"
    ]
    for wrapper, runtime in RUNTIMES.items():
        assert f"{wrapper}: {runtime}, measured, rank 1" in titles


def test_their_timelines_in_the_browser_are_the_data(runs, browser, tmp_path):
    folders = read_folders([runs])
    page = Page(browser, tmp_path / "kept.html", make_page(folders))
    for number, folder in enumerate(folders, 1):
        assert_drawn_as_measured(page, number, folder.run)
    assert browser.get_log("browser") == []
