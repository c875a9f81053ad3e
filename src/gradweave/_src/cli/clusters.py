"""The options that say which cluster to measure on."""

import argparse
import os

from gradweave._src.cli.arguments import names, whole_number
from gradweave._src.errors import RequestError
from gradweave._src.lab import ClusterSpec

_count = whole_number(least=1)


def add_cluster_arguments(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add the options that describe a cluster, or several that differ in their number of nodes."""
    where = parser.add_argument_group("where", "without --nodes: in the group torchrun started")
    where.add_argument(
        "--nodes",
        type=_counts,
        metavar="N",
        help="nodes of an emulated cluster"
        + ("; several numbers are separated by commas" if several else ""),
    )
    add_link_arguments(where)


def add_link_arguments(where: argparse._ActionsContainer) -> None:
    """Add the options for what nodes hold, and how they are linked."""
    where.add_argument(
        "--ranks-per-node",
        type=_count,
        default=1,
        metavar="R",
        help="ranks on each node (default: 1)",
    )
    where.add_argument(
        "--rate",
        metavar="X",
        help="rate of each node's link, such as 1gbit (default: not limited)",
    )
    where.add_argument(
        "--local-rate",
        metavar="X",
        help="rate of each rank's link inside its node, such as 10gbit (default: not limited)",
    )
    where.add_argument(
        "--racks",
        type=_count,
        default=1,
        metavar="K",
        help="how many racks the nodes are spread over (default: 1)",
    )
    where.add_argument(
        "--uplink-rate",
        metavar="X",
        help="rate of each rack's link to the core, such as 1gbit (default: not limited)",
    )
    where.add_argument(
        "--delay",
        metavar="T",
        help="one-way delay between nodes, such as 0.2ms; it needs netem (default: none)",
    )
    where.add_argument(
        "--second-rate",
        metavar="X",
        help="rate of a second interface, eth1, that each rank gets on a network of its own "
        "(default: there is none)",
    )
    where.add_argument(
        "--loopback", action="store_true", help="run without namespaces, and without any shaping"
    )


def asked_to_measure(options: argparse.Namespace, nodes: int) -> ClusterSpec:
    """Return the cluster that was asked for; RequestError where its one rank sends nothing."""
    spec = asked_cluster(options, nodes)
    if spec.world_size == 1:
        raise RequestError("one rank sends no messages; give --nodes 2 or more")
    return spec


def asked_cluster(options: argparse.Namespace, nodes: int) -> ClusterSpec:
    return ClusterSpec(
        nodes=nodes,
        ranks_per_node=options.ranks_per_node,
        rate=options.rate,
        local_rate=options.local_rate,
        racks=options.racks,
        uplink_rate=options.uplink_rate,
        delay=options.delay,
        second_rate=options.second_rate,
    )


def nodes_per_rack(options: argparse.Namespace, nodes: int) -> int | None:
    return nodes // options.racks if options.racks > 1 else None


def check_under_torchrun(options: argparse.Namespace) -> None:
    """Raise RequestError without a group to measure in, or for options of emulated clusters."""
    if "RANK" not in os.environ:
        raise RequestError("--nodes is missing; give it, or start this by torchrun -m gradweave")
    if os.environ.get("WORLD_SIZE") == "1":
        raise RequestError("one rank sends no messages; have torchrun start two or more")
    for name in ("rate", "local_rate", "uplink_rate", "delay", "second_rate"):
        if getattr(options, name) is not None:
            raise RequestError(
                f"--{name.replace('_', '-')} shapes an emulated cluster; give --nodes"
            )


def _counts(text: str) -> list[int]:
    return [_count(part) for part in names(text)]
