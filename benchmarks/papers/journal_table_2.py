"""MG-WFBP journal, Table 2: the rows for trees as they are printed.

No schedule can cost that little. A parent of two children has one port, so a level of a binary tree
takes two transfers; and any all-reduce sends at least 2 (N-1)/N of the message over each worker's
port, where the row for double trees has it sent once. The rows stand here because the paper's
Fig. 11 is computed with the second.
"""

from collections.abc import Sequence

from gradweave import Network
from gradweave._src.costs import Line, Link
from gradweave._src.costs.scatter_gather import rounds
from gradweave._src.network import CollectiveCost


def binary_tree(link: Link, workers: int) -> Line:
    return Line(
        startup_s=2 * link.latency_s * rounds(workers),
        s_per_byte=(2 * link.s_per_byte + link.sum_s_per_byte) * rounds(workers),
    )


def double_tree(link: Link, workers: int) -> Line:
    """Price the table's double tree.

    The table prints "2 log N" as start-up, without the latency, which is put in here.
    """
    return Line(
        startup_s=2 * link.latency_s * rounds(workers),
        s_per_byte=link.s_per_byte + link.sum_s_per_byte,
    )


def network_of_double_trees(network: Network, workers: Sequence[int]) -> Network:
    """Return the same links, with ``double-tree`` at the printed price."""
    assert network.links is not None, "rows of the table are of links"
    costs = tuple(
        CollectiveCost(
            operation="all-reduce",
            collective="double-tree",
            workers=count,
            cost=double_tree(network.links.slowest(count), count),
        )
        for count in workers
    )
    return Network(name=f"{network.name}-printed", source="journal, Table 2", costs=costs)
