"""A parameter server as push and pull (MG-WFBP journal, 4.3).

One of the workers is the server and has one port, so the other N-1 take turns. Spread over s
servers, each handles 1/s of the message.
"""

from gradweave._src.costs.cost import Line, total_line
from gradweave._src.costs.links import Link


def push(link: Link, workers: int, servers: int = 1) -> Line:
    return _turns(workers, servers, link.latency_s, link.s_per_byte + link.sum_s_per_byte)


def pull(link: Link, workers: int, servers: int = 1) -> Line:
    return _turns(workers, servers, link.latency_s, link.s_per_byte)


def push_then_pull(link: Link, workers: int, servers: int = 1) -> Line:
    """Price both ways: 2 (N-1) (alpha + beta M/s) + (N-1) gamma M/s."""
    return total_line(push(link, workers, servers), pull(link, workers, servers))


def _turns(workers: int, servers: int, latency_s: float, s_per_byte: float) -> Line:
    others = workers - 1
    return Line(startup_s=others * latency_s, s_per_byte=others / servers * s_per_byte)
