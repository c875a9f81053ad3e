"""Run a command on an emulated cluster: nodes, links and rates of your choice on this machine.

The command is started once for each rank with the environment that torchrun gives, for example
  gradweave lab --nodes 4 --rate 1gbit -- python train.py
It needs no root. Everything ends with it, however it ends.
"""

import argparse

from gradweave.cli.arguments import whole_number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s --nodes N [options] -- command ..."
    count = whole_number(least=1)
    parser.add_argument("--nodes", required=True, type=count, metavar="N", help="how many nodes")
    parser.add_argument(
        "--ranks-per-node", type=count, default=1, metavar="R", help="how many on each (default: 1)"
    )
    parser.add_argument(
        "--rate", metavar="X", help="of each node's link, such as 1gbit (default: not shaped)"
    )
    parser.add_argument(
        "--local-rate",
        metavar="X",
        help="of each rank's link inside its node (default: not shaped)",
    )
    parser.add_argument(
        "--racks",
        type=count,
        default=1,
        metavar="K",
        help="how many racks the nodes are spread over (default: 1)",
    )
    parser.add_argument(
        "--uplink-rate", metavar="X", help="of each rack's link to the core (default: not shaped)"
    )
    parser.add_argument(
        "--delay", metavar="T", help="from node to node, one way, such as 0.2ms (needs netem)"
    )
    parser.add_argument(
        "--loopback", action="store_true", help="run without namespaces, and without any shaping"
    )
    parser.add_argument("command", nargs="*", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    from gradweave.lab import ClusterSpec, run_command

    spec = ClusterSpec(
        nodes=options.nodes,
        ranks_per_node=options.ranks_per_node,
        rate=options.rate,
        local_rate=options.local_rate,
        racks=options.racks,
        uplink_rate=options.uplink_rate,
        delay=options.delay,
    )
    return run_command(spec, options.command, loopback=options.loopback)
