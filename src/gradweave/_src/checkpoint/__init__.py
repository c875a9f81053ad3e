"""Trainings in checkpoints of torch.distributed.checkpoint: whole, or refused."""

from gradweave._src.checkpoint.training_state import TrainingState, saved_recipe

__all__ = ["TrainingState", "saved_recipe"]
