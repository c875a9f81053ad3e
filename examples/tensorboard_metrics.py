"""A wrapper's live numbers in TensorBoard, beside whatever else a script logs.

    from torch.utils.tensorboard import SummaryWriter  # pip install tensorboard
    from tensorboard_metrics import log_metrics

    writer = SummaryWriter("tensorboard") if dist.get_rank() == 0 else None
    ...
    optimizer.step()
    if writer is not None and step % 10 == 0:
        log_metrics(writer, model, step)

Any object with ``add_scalar`` and ``add_text`` will do. What each number means: docs/runtime.md.
"""

from typing import Any, Protocol


class Writer(Protocol):
    """What is used of torch.utils.tensorboard.SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...

    def add_text(self, tag: str, text_string: str, global_step: int) -> None: ...


def log_metrics(writer: Writer, model: Any, step: int) -> None:
    """Log ``model.metrics()``: numbers as scalars, the stage of planning as text.

    ``model`` is either wrapper of ours, or what ``gradweave.watch`` made of torch's.
    """
    for name, value in model.metrics().items():
        if isinstance(value, str):
            writer.add_text(f"gradweave/{name}", value, step)
        else:
            writer.add_scalar(f"gradweave/{name}", value, step)
