"""A parameter server through the same class: calibrated, planned and run as push and pull."""

import pytest
import torch
from small_training import QUICK, network, on_two, trained
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave._src.runtime.ddp import DistributedDataParallel

SERVED = "parameter-server"


def served(group):
    wrapped = DistributedDataParallel(network(torch.float64), collective=SERVED, **QUICK)
    steps, weights = trained(wrapped, group.rank(), steps=5, until_settled=True)
    _, expected = trained(TorchDDP(network(torch.float64)), group.rank(), steps=steps)
    furthest = max(float((a - b).abs().max()) for a, b in zip(weights, expected, strict=True))
    found = wrapped.findings()
    measured = {(entry.operation, entry.collective) for entry in found.network.costs}
    ways = {bucket.collective for bucket in found.plan.buckets}
    arrivals = [span for span in found.predicted.spans if span.lane == "communication"]
    prices_s = [
        found.network.seconds("all-reduce", SERVED, nbytes=span.nbytes, workers=group.size())
        + found.network.latency_s(SERVED, workers=group.size())
        for span in arrivals
    ]
    took_s = [span.end_s - span.start_s for span in arrivals]
    return furthest, measured, ways, took_s, prices_s


@pytest.mark.parametrize(("world", "most"), [(2, 0.0), (3, 1e-13)])
def test_planned_for_what_is_run(tmp_path, world, most):
    """What is timed is the whole way of a message, to the server and back; so is what is planned.

    Seconds: it records, calibrates, plans and tries.
    """
    for furthest, measured, ways, took_s, prices_s in on_two(served, scratch=tmp_path, world=world):
        assert furthest <= most
        assert measured == {("all-reduce", SERVED)}
        assert ways == {SERVED}
        assert took_s == pytest.approx(prices_s)
