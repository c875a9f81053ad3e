"""What planning sends beside a training, counted by the kernel, on a slow link."""

import json

import pytest
from lab_watching import LIMIT_S

from gradweave._src.lab import Cluster, ClusterSpec

TRAINING = """
import json
import torch
import torch.distributed as dist
from torch import nn
from gradweave import DistributedDataParallel
from gradweave._src.sparse.settings import GTopK
import sys

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(110, 110), nn.ReLU(), nn.Linear(110, 3))
options = {"compression": GTopK(density=0.01)} if sys.argv[1] == "gtopk" else {}
wrapped = DistributedDataParallel(model, **options)
optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
steps = 0
while wrapped.findings().stage != "settled":
    wrapped(torch.ones(1, 110)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
if dist.get_rank() == 0:
    print(json.dumps({"steps": steps, "model_bytes": sum(p.nbytes for p in model.parameters())}))
del wrapped
dist.destroy_process_group()
"""
# Wrapping compares and broadcasts, ranks tell each other of what they have found, and each packet
# has a header.
STEPS_AROUND, OVERHEAD, AROUND_BYTES = 30, 1.3, 300_000


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dense", "gtopk"])
def test_a_small_model_is_planned_for_with_little(namespaces, ranks_program, kind):
    """Half a minute: ranks import torch, and train at 20 Mbit/s until planning is over."""
    told = []

    def take(line):
        if line.rank == 0 and line.text.startswith("{"):
            told.append(json.loads(line.text))

    with Cluster(ClusterSpec(nodes=2, rate="20mbit")) as cluster:
        result = cluster.start(ranks_program(TRAINING, kind), on_line=take).wait(8 * LIMIT_S)
        sent = cluster.sent_bytes().by_node
    assert result.exit_code == 0
    (found,) = told
    expected = OVERHEAD * (found["steps"] + STEPS_AROUND) * found["model_bytes"] + AROUND_BYTES
    assert max(sent) < expected, (found, sent)
