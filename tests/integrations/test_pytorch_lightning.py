"""Who imports `pytorch_lightning` has other classes than who imports `lightning`."""

import pytest

pytest.importorskip("pytorch_lightning")

import pytorch_lightning
import torch
from launched import inputs_of, network, on_two
from torch.utils.data import DataLoader

import gradweave._src.integrations.pytorch_lightning


class Small(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.losses = network(), []

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def trained(rank):
    found = []
    for strategy in ("gradweave", "ddp"):
        module = Small()
        trainer = pytorch_lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_steps=5,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        trainer.fit(module, DataLoader(list(inputs_of(rank, 40)), batch_size=4))
        found.append(module.losses)
    return found


def test_the_other_package(tmp_path):
    strategy = gradweave._src.integrations.pytorch_lightning.GradweaveStrategy
    assert issubclass(strategy, pytorch_lightning.strategies.DDPStrategy)
    for ours, torchs in on_two(trained, scratch=tmp_path):
        assert ours == torchs
        assert len(ours) == 5
