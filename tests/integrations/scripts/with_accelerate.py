"""A training with Accelerate."""

import logging

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

logging.basicConfig(level=logging.INFO)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
data = DataLoader(torch.randn(1600, 16), batch_size=8)
accelerator = Accelerator(cpu=True)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
losses = []
for _ in range(2):
    for batch in data:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
if accelerator.is_main_process:
    print("losses", losses)  # noqa: T201
del model, optimizer
accelerator.end_training()
