"""Parameter servers: ranks that each own a part of the message; all push to them and pull."""

import numpy as np

from gradweave._src.collectives.schedule import Round, Schedule, backwards, then, transfers


def push(ranks: int, servers: int = 1) -> Schedule:
    """Sum block s on server s, which is rank s, in N-1 rounds.

    In each round a server hears from one rank, and no two servers from the same one.
    """
    server = np.arange(servers)

    def round_(number: int) -> Round:
        return transfers((server + number + 1) % ranks, server, server, server + 1, add=True)

    return Schedule(ranks, servers, ranks - 1, round_)


def pull(ranks: int, servers: int = 1) -> Schedule:
    """Send block s from server s, which is rank s, to all ranks in N-1 rounds."""
    return backwards(push(ranks, servers), add=False)


def all_reduce(ranks: int, servers: int = 1) -> Schedule:
    return then(push(ranks, servers), pull(ranks, servers))
