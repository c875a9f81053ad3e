"""Short bursts of messages from host to host, which tell a slow link from others."""

import time
from collections.abc import Callable, Sequence
from math import inf

import msgspec
import torch
import torch.distributed as dist

from gradweave._src.comm.small_messages import FIRST_TAG, for_texts, gather_long_text, largest
from gradweave._src.session.link_times import Transfer, s_per_byte
from gradweave._src.session.slow_ranks import LEAST_LINKS, PARTS
from gradweave._src.torch_internals import HOST
from gradweave._src.vocabulary import MIB

# A burst is so many messages and lasts so long, for buffers on the way, such as a shaper's, hold a
# millisecond or two of it.
MESSAGES, BURST_S = 8, 0.016
LONGEST_BURST_S = 0.25
LEAST_MESSAGE_BYTES, MOST_MESSAGE_BYTES = 32 * 1024, 4 * MIB
# A host sends to so many others at most.
MOST_PEERS = 4
# Each part has so many bursts to each peer: a busy host spoils one now and then.
BURSTS = 3


def link_transfers(
    group: dist.ProcessGroup,
    hosts: Sequence[str],
    *,
    now_s: Callable[[], float] = time.perf_counter,
) -> list[Transfer]:
    """Send bursts between hosts and return what bytes took; none where hosts are too few to tell.

    Call it on every rank, with the host of each, while nothing else is sent. One rank of each host
    takes part. All of them send and receive at once, each to one peer and from another, so that a
    burst has two links for itself; peers change from burst to burst. It takes two thirds of a
    second for four hosts. Where the group sends an accelerator's tensors only, messages travel by
    gloo all the same, over TCP.
    """
    firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
    if len(firsts) < LEAST_LINKS:
        return []
    own = _received(_Bursts(for_texts(group), firsts, now_s))
    texts = gather_long_text(group, msgspec.json.encode(own).decode())
    return [one for text in texts for one in msgspec.json.decode(text, type=list[Transfer])]


def _received(bursts: "_Bursts") -> list[Transfer]:
    """Return what was received of all bursts; peers take turns, so that drift meets all alike."""
    nbytes = bursts.fitting_bytes()
    return [
        transfer
        for number in range(PARTS * BURSTS)
        for distance in range(1, min(bursts.hosts, MOST_PEERS + 1))
        for transfer in bursts.burst(distance, nbytes, part=number // BURSTS)
    ]


class _Bursts:
    """One rank's part in bursts between the first ranks of all hosts."""

    def __init__(
        self, group: dist.ProcessGroup, firsts: Sequence[int], now_s: Callable[[], float]
    ) -> None:
        self._group, self._firsts, self._now_s = group, firsts, now_s
        self.hosts = len(firsts)

    def fitting_bytes(self) -> int:
        """Return the size of messages that makes a burst as long as it should be, on all ranks."""
        nbytes = LEAST_MESSAGE_BYTES
        while True:
            seen = [one.s_per_byte for one in self.burst(1, nbytes, part=0)]
            negated, slowest = largest(
                self._group, [-min(seen, default=inf), max(seen, default=0.0)]
            )
            fitting = min(BURST_S / max(-negated, 1e-12), LONGEST_BURST_S / max(slowest, 1e-12))
            fitting_bytes = min(MOST_MESSAGE_BYTES, round(fitting / MESSAGES))
            # Go on while bursts of this size are far too short to tell the rate.
            if fitting_bytes <= 4 * nbytes or nbytes >= MOST_MESSAGE_BYTES:
                return max(LEAST_MESSAGE_BYTES, fitting_bytes)
            nbytes *= 4

    def burst(self, distance: int, nbytes: int, *, part: int) -> list[Transfer]:
        """Let all hosts send to the one at this distance; return what this rank has received."""
        rank, firsts = self._group.rank(), self._firsts
        received = [torch.empty(nbytes, dtype=torch.uint8, device=HOST) for _ in range(MESSAGES)]
        message = torch.zeros(nbytes, dtype=torch.uint8, device=HOST)
        self._group.barrier().wait()  # the burst before is over on all ranks
        if rank not in firsts:
            return []
        place = firsts.index(rank)
        sender = firsts[(place - distance) % len(firsts)]
        receiver = firsts[(place + distance) % len(firsts)]
        receives = [
            self._group.recv([into], sender, tag) for tag, into in enumerate(received, FIRST_TAG)
        ]
        sends = [
            self._group.send([message], receiver, FIRST_TAG + number) for number in range(MESSAGES)
        ]
        arrived_s = []
        for receive in receives:
            receive.wait()
            arrived_s.append(self._now_s())
        for send in sends:
            send.wait()
        taken = s_per_byte(arrived_s, nbytes)
        return [Transfer(part=part, sender=sender, receiver=rank, s_per_byte=taken)]
