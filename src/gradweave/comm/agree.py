"""Small things that all ranks of a group must know alike. Nothing is pickled."""

import torch
import torch.distributed as dist

# Enough for a host name or the description of a message.
TEXT_BYTES = 256


def gather_text(group: dist.ProcessGroup, text: str, *, device: torch.device) -> list[str]:
    """What every rank says, cut to ``TEXT_BYTES``."""
    mine = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
    encoded = text.encode()[:TEXT_BYTES]
    mine[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    everyone = [torch.empty_like(mine, device=device) for _ in range(group.size())]
    group.allgather([everyone], [mine.to(device)]).wait()
    return [bytes(one.tolist()).rstrip(b"\0").decode(errors="replace") for one in everyone]


def largest(group: dist.ProcessGroup, values: list[float], *, device: torch.device) -> list[float]:
    """The largest of each value over the ranks, such as the time of the slowest."""
    gathered = torch.tensor(values, dtype=torch.float64).to(device)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    group.allreduce([gathered], options).wait()
    return [float(value) for value in gathered.tolist()]


def group_device(group: dist.ProcessGroup) -> torch.device:
    """Where the group's small messages live: on the accelerator where its backend needs that."""
    if group.name() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
