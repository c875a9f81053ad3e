"""Ray Train, where it is installed: with 600 MB it is not among what CI tries."""

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray.train.torch")

import ray
import ray.train
import torch
from launched import MOST_STEPS, QUICK, TORCHS, inputs_of, network
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave import DistributedDataParallel


def train_loop(config):
    rank = ray.train.get_context().get_world_rank()
    model = prepare_model(network(), parallel_strategy=None)
    is_ours = config["steps"] is None
    model = DistributedDataParallel(model, **QUICK) if is_ours else TorchDDP(model, **TORCHS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    while len(losses) < (config["steps"] or MOST_STEPS):
        if is_ours and model.findings().stage == "settled":
            break
        optimizer.zero_grad()
        loss = model(inputs_of(100 * len(losses) + rank, 4)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    ray.train.report({"losses": losses, "settled": is_ours and model.findings().stage == "settled"})


def test_the_same_losses_as_with_torchs_class(tmp_path):
    """Tens of seconds: Ray starts a cluster."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    environment = {"env_vars": {"PYTHONPATH": path}}
    ray.init(num_cpus=3, include_dashboard=False, runtime_env=environment)
    try:
        found, steps = [], None
        for name in ("ours", "torchs"):
            result = TorchTrainer(
                train_loop,
                train_loop_config={"steps": steps},
                scaling_config=ScalingConfig(num_workers=2),
                torch_config=TorchConfig(backend="gloo"),
                run_config=RunConfig(storage_path=str(tmp_path), name=name),
            ).fit()
            found.append(result.metrics)
            steps = len(result.metrics["losses"])
    finally:
        ray.shutdown()
    ours, torchs = found
    assert ours["settled"]
    assert ours["losses"] == torchs["losses"]
