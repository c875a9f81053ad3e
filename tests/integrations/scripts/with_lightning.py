"""A training with Lightning."""

import logging

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

logging.basicConfig(level=logging.INFO)


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


data = DataLoader(torch.randn(800, 16, generator=torch.Generator().manual_seed(1)), batch_size=8)
model = Model()
trainer = Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_steps=200,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(model, data)
if trainer.is_global_zero:
    print("losses", model.losses)  # noqa: T201
torch.distributed.destroy_process_group()
