"""Ray Train, where it is installed: with 600 MB it is not among what CI tries."""

import json
import os
import secrets
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray.train.torch")

import ray
import ray.train
import torch
from launched import MOST_STEPS, QUICK, STEPS_AFTERWARDS, TORCHS, inputs_of, network
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
    losses, settled_for = [], 0
    while len(losses) < (config["steps"] or MOST_STEPS) and settled_for < STEPS_AFTERWARDS:
        optimizer.zero_grad()
        loss = model(inputs_of(100 * len(losses) + rank, 4)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        settled_for += is_ours and model.findings().stage == "settled"
    # Ray keeps what is reported only with a checkpoint.
    Path(config["folder"], f"{config['name']} {rank}.json").write_text(json.dumps(losses))
    ray.train.report({"steps": len(losses)})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, of itself
def test_the_same_losses_as_with_torchs_class(tmp_path, monkeypatch):
    """Tens of seconds: Ray starts a cluster, whose token stays here instead of going home."""
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(32))
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    environment = {"env_vars": {"PYTHONPATH": path}}
    ray.init(num_cpus=3, include_dashboard=False, runtime_env=environment)
    try:
        steps = None
        for name in ("ours", "torchs"):
            TorchTrainer(
                train_loop,
                train_loop_config={"steps": steps, "folder": str(tmp_path), "name": name},
                scaling_config=ScalingConfig(num_workers=2),
                torch_config=TorchConfig(backend="gloo"),
                run_config=RunConfig(storage_path=str(tmp_path), name=name),
            ).fit()
            steps = len(json.loads((tmp_path / f"{name} 0.json").read_text()))
    finally:
        ray.shutdown()
    assert STEPS_AFTERWARDS < steps < MOST_STEPS
    for rank in range(2):
        ours = json.loads((tmp_path / f"ours {rank}.json").read_text())
        assert ours == json.loads((tmp_path / f"torchs {rank}.json").read_text())
