"""Small things that all ranks of a group must know alike. Nothing is pickled."""

from collections.abc import Callable, Iterable
from functools import partial
from hashlib import sha256

import torch
import torch.distributed as dist

from gradweave._src.torch_internals import gather_flat, wait_until_let_go

# Enough for a host name or the description of a message.
TEXT_BYTES = 256


def gather_text(group: dist.ProcessGroup, text: str, *, device: torch.device) -> list[str]:
    """What every rank says, cut to ``TEXT_BYTES``, which is what each rank adds to the message."""
    mine = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
    encoded = text.encode()[:TEXT_BYTES]
    mine[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    return _gathered(group, mine, device=device)


def all_say_the_same(
    group: dist.ProcessGroup,
    text: str,
    *,
    device: torch.device,
    while_waiting: Callable[[], None] | None = None,
) -> bool:
    """Whether all ranks say the same, on all of them alike; as long a message in any world.

    The largest of all digests, and of what is missing to the largest number there is: they are
    equal where all digests are. ``while_waiting`` is called again and again; what it raises ends
    waiting for others.
    """
    digest = torch.frombuffer(bytearray(sha256(text.encode()).digest()), dtype=torch.uint8)
    both = torch.cat([digest, ~digest]).to(device)
    wait_until_let_go(
        lambda: group.allreduce([both], _of_largest()), [both], while_waiting=while_waiting
    )
    highest, complement = both.cpu().chunk(2)
    return torch.equal(highest, ~complement)


def first_to_say(group: dist.ProcessGroup, text: str, *, device: torch.device) -> str | None:
    """What the first rank says that says anything, and which it is; None where nobody does."""
    (anybody,) = largest(group, [float(bool(text))], device=device)
    if not anybody:
        return None
    everyone = gather_text(group, text, device=device)
    return next(f"{said} (rank {rank})" for rank, said in enumerate(everyone) if said)


def broadcast_text(group: dist.ProcessGroup, text: str, *, device: torch.device) -> str:
    """What rank 0 says, of any length; what others say is not looked at."""
    encoded = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8).to(device)
    length = torch.tensor([len(encoded)], dtype=torch.int64, device=device)
    wait_until_let_go(lambda: group.broadcast([length]), [length])
    if group.rank() != 0:
        encoded = torch.empty(int(length.item()), dtype=torch.uint8, device=device)
    wait_until_let_go(lambda: group.broadcast([encoded]), [encoded])
    return bytes(encoded.tolist()).rstrip(b"\0").decode()


def gather_long_text(group: dist.ProcessGroup, text: str, *, device: torch.device) -> list[str]:
    """What every rank says, of any length."""
    encoded = text.encode()
    (longest,) = largest(group, [float(len(encoded))], device=device)
    mine = torch.zeros(max(1, int(longest)), dtype=torch.uint8)
    if encoded:
        mine[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    return _gathered(group, mine, device=device)


def _gathered(group: dist.ProcessGroup, mine: torch.Tensor, *, device: torch.device) -> list[str]:
    """In one tensor: one for each rank would be many objects where there are many ranks."""
    mine = mine.to(device)
    everyone = torch.empty(group.size() * len(mine), dtype=torch.uint8, device=device)
    wait_until_let_go(lambda: gather_flat(group, everyone, mine), [everyone, mine])
    rows = everyone.cpu().numpy().reshape(group.size(), -1)
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]


def largest(group: dist.ProcessGroup, values: list[float], *, device: torch.device) -> list[float]:
    """The largest of each value over the ranks, such as the time of the slowest."""
    gathered = torch.tensor(values, dtype=torch.float64).to(device)
    wait_until_let_go(lambda: group.allreduce([gathered], _of_largest()), [gathered])
    return [float(value) for value in gathered.tolist()]


def _of_largest() -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    return options


def group_device(group: dist.ProcessGroup) -> torch.device:
    """Where the group's small messages live: on the accelerator where its backend needs that."""
    if group.name() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@torch.no_grad()
def broadcast_bytes(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Rank 0's, in one message for each device, whatever their types."""
    of_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        of_device.setdefault(tensor.device, []).append(tensor)
    for held in of_device.values():
        as_bytes = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in held]
        message = torch.cat(as_bytes)
        wait_until_let_go(partial(group.broadcast, [message]), [message])
        if group.rank() == 0:
            continue
        parts = torch.split(message, [part.numel() for part in as_bytes])
        for tensor, part in zip(held, parts, strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
