"""Lightning modules, and their training with torch's wrapper and with ours."""

import torch
from launched import MOST_STEPS, STEPS_AFTERWARDS, inputs_of, network
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

BATCH = 4


class Small(LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.losses = network(), []

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        self.losses.append(loss.item())
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("validation", self.net(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Manual(Small):
    """Backward runs inside of the wrapper's forward here."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.net(batch).square().mean()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        self.losses.append(loss.item())


class Gan(Small):
    """Two optimizers, each of which has a part of the parameters, in one wrapper."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(1)
        self.critic = nn.Sequential(nn.Linear(2, 7), nn.Tanh(), nn.Linear(7, 1))

    def training_step(self, batch, batch_idx):
        for optimizer, sign in zip(self.optimizers(), (-1, 1), strict=True):
            self.toggle_optimizer(optimizer)
            made = self.net(batch)
            judged = self.critic(made if sign < 0 else made.detach())
            loss = sign * judged.tanh().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.losses.append(loss.item())

    def configure_optimizers(self):
        parts = (self.net, self.critic)
        return [torch.optim.Adam(part.parameters(), lr=1e-3) for part in parts]


class Wide(Small):
    """Another model than the small one."""

    def __init__(self):
        super().__init__()
        self.net.append(nn.Linear(2, 3))


class Frozen(Small):
    """Some of it is left out of the loss."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(3, 3)


class StopAfterwards(Callback):
    """Ends a training some steps after planning has settled, at the same one on all ranks."""

    def __init__(self):
        self.settled_for = 0

    def on_train_batch_end(self, trainer, *args):
        self.settled_for += trainer.strategy.findings().stage == "settled"
        if self.settled_for >= STEPS_AFTERWARDS:
            trainer.should_stop = True


def data_of(rank):
    return DataLoader(list(inputs_of(rank, 120)), batch_size=BATCH)


def made_trainer(strategy, **options):
    settings = {
        "accelerator": "cpu",
        "devices": 2,
        "strategy": strategy,
        "max_steps": MOST_STEPS,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "log_every_n_steps": 10,
        "num_sanity_val_steps": 0,
    }
    return Trainer(**(settings | options))


def fitted(strategy, module, rank, *, validates=False, callbacks=(), **options):
    """The trainer, when it has trained."""
    callbacks = [make() for make in callbacks]
    trainer = made_trainer(strategy, callbacks=callbacks, **options)
    limits = {"val_dataloaders": data_of(rank + 10)} if validates else {}
    trainer.fit(module, data_of(rank), **limits)
    return trainer
