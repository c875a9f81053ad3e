"""Small things that all ranks of a group must know alike. Nothing is pickled.

Texts stay on the host, because reading one from an accelerator would wait for everything that was
queued there before. A group whose backend sends only an accelerator's tensors gets a gloo group
beside it for texts. Its first text makes that one, on all ranks alike, and this once they wait for
the accelerator. Tensors of texts are made on the CPU explicitly, for a script may have set another
default device.
"""

import secrets
from collections.abc import Iterable
from functools import partial
from hashlib import sha256
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from gradweave._src.comm.stores import store_for
from gradweave._src.device_order import Order, wait_for
from gradweave._src.torch_internals import (
    HOST,
    devices_carried,
    gather_flat,
    group_timeout,
    unlisted_gloo_group,
    wait_until_let_go,
)

# Enough for a host name or the description of a message.
TEXT_BYTES = 256
# The first tag of our messages from rank to rank on a user's group; those of collectives are behind
# these (channel.py). Tags of users begin with 0, torch's default, and a receive that a script has
# posted would take a message of ours with such a tag. gloo's tags have 31 bits, and NCCL has none.
FIRST_TAG = 1 << 24
# Bits that an int64 holds exactly.
NAME_BITS = 63

_for_texts: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def for_texts(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the group itself, or one of the same ranks that sends tensors of the host."""
    if HOST.type in devices_carried(group):
        return group
    beside = _for_texts.get(group)
    if beside is None:
        # A group before this one may have left its addresses in the store.
        chosen = torch.tensor(secrets.randbits(NAME_BITS), device=payload_device(group))
        broadcast_bytes([chosen], group)
        beside = _for_texts[group] = unlisted_gloo_group(
            store_for(group, f"gradweave texts {chosen.item():x}"),
            rank=group.rank(),
            ranks=group.size(),
            timeout=group_timeout(group),
        )
    return beside


def gather_text(group: dist.ProcessGroup, text: str) -> list[str]:
    """Return what every rank says, each cut to ``TEXT_BYTES``."""
    mine = torch.zeros(TEXT_BYTES, dtype=torch.uint8, device=HOST)
    encoded = text.encode()[:TEXT_BYTES]
    mine[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8, device=HOST)
    return _gathered(group, mine)


def all_say_the_same(group: dist.ProcessGroup, text: str) -> bool:
    """Return whether all ranks say the same, by a message whose length does not depend on them.

    All ranks get the same answer. The message is the largest of all digests and of their
    complements: these belong together only where all digests are equal.
    """
    group = for_texts(group)
    digest = torch.frombuffer(bytearray(sha256(text.encode()).digest()), dtype=torch.uint8)
    both = torch.cat([digest, ~digest])
    wait_until_let_go(lambda: group.allreduce([both], _of_largest()), [both])
    highest, complement = both.chunk(2)
    return torch.equal(highest, ~complement)


def first_to_say(group: dist.ProcessGroup, text: str) -> str | None:
    """Return the text of the first rank that has one, with its number; None if none has."""
    (anybody,) = largest(group, [float(bool(text))])
    if not anybody:
        return None
    everyone = gather_text(group, text)
    return next(f"{said} (rank {rank})" for rank, said in enumerate(everyone) if said)


def broadcast_text(group: dist.ProcessGroup, text: str) -> str:
    """Return rank 0's text, of any length; other ranks' are ignored."""
    group = for_texts(group)
    encoded = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
    length = torch.tensor([len(encoded)], dtype=torch.int64, device=HOST)
    wait_until_let_go(lambda: group.broadcast([length]), [length])
    if group.rank() != 0:
        encoded = torch.empty(int(length.item()), dtype=torch.uint8, device=HOST)
    wait_until_let_go(lambda: group.broadcast([encoded]), [encoded])
    return bytes(encoded.tolist()).rstrip(b"\0").decode()


def gather_long_text(group: dist.ProcessGroup, text: str) -> list[str]:
    """Return what every rank says, of any length."""
    group, encoded = for_texts(group), text.encode()
    (longest,) = largest(group, [float(len(encoded))])
    mine = torch.zeros(max(1, int(longest)), dtype=torch.uint8, device=HOST)
    if encoded:
        mine[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    return _gathered(group, mine)


def _gathered(group: dist.ProcessGroup, mine: torch.Tensor) -> list[str]:
    """Gather texts in one tensor, for one of each rank would be many objects in a large world."""
    group = for_texts(group)
    everyone = torch.empty(group.size() * len(mine), dtype=torch.uint8, device=HOST)
    wait_until_let_go(lambda: gather_flat(group, everyone, mine), [everyone, mine])
    rows = everyone.numpy().reshape(group.size(), -1)
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]


def largest(group: dist.ProcessGroup, values: list[float]) -> list[float]:
    """Return the largest of each value over the ranks, such as the time of the slowest."""
    group = for_texts(group)
    gathered = torch.tensor(values, dtype=torch.float64, device=HOST)
    wait_until_let_go(lambda: group.allreduce([gathered], _of_largest()), [gathered])
    return [float(value) for value in gathered.tolist()]


def _of_largest() -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    return options


def payload_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device of a group's messages: the host if the group sends tensors of the host.

    Call it on the thread that trains: of several accelerators, that thread's current one is meant.
    """
    if group.bound_device_id is not None:
        return torch.device(group.bound_device_id)
    carried = devices_carried(group)
    if HOST.type in carried:
        return HOST
    return torch.device(min(carried), torch.accelerator.current_device_index())


@torch.no_grad()
def broadcast_bytes(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Give all ranks rank 0's tensors, in one message for each device, whatever their types."""
    of_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        of_device.setdefault(tensor.device, []).append(tensor)
    for held in of_device.values():
        as_bytes = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in held]
        message = torch.cat(as_bytes)
        begin = partial(group.broadcast, [message])
        if message.device == HOST:
            wait_until_let_go(begin, [message])
        else:
            wait_for(begin(), Order.BUFFERS_AFTER_BROADCAST)
        if group.rank() == 0:
            continue
        parts = torch.split(message, [part.numel() for part in as_bytes])
        for tensor, part in zip(held, parts, strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
