"""A training with Transformers."""

import logging
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

logging.basicConfig(level=logging.INFO)
set_seed(0)
size = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 16}
model = GPT2LMHeadModel(GPT2Config(**size))
data = [{"input_ids": one, "labels": one} for one in torch.randint(50, (64, 8))]
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    use_cpu=True,
    max_steps=200,
    per_device_train_batch_size=2,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=data)
trainer.train()
if trainer.is_world_process_zero():
    losses = [said["loss"] for said in trainer.state.log_history if "loss" in said]
    print("losses", losses)  # noqa: T201
trainer.accelerator.end_training()
