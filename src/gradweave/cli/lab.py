"""Run a command on an emulated cluster: nodes, links and rates of your choice on this machine.

The command is started once for each rank with the environment that torchrun gives, for example
  gradweave lab --nodes 4 --rate 1gbit -- python train.py
torchrun is started once for each node instead, and its agents are told of each other:
  gradweave lab --nodes 4 --rate 1gbit -- torchrun --nproc-per-node 2 train.py
It needs no root. Everything ends with it, however it ends.
"""

import argparse

from gradweave.cli.arguments import whole_number
from gradweave.cli.clusters import add_link_arguments, asked_cluster


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s --nodes N [options] -- command ..."
    count = whole_number(least=1)
    parser.add_argument("--nodes", required=True, type=count, metavar="N", help="how many nodes")
    add_link_arguments(parser)
    parser.add_argument("command", nargs="*", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    from gradweave.lab import run_command

    spec = asked_cluster(options, options.nodes)
    return run_command(spec, options.command, loopback=options.loopback)
