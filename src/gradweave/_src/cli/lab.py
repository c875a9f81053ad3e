"""Run a command on an emulated cluster: nodes, links and rates of your choice on this machine.

The command is started once for each rank with the environment that torchrun gives, for example
  gradweave lab --nodes 4 --rate 1gbit -- python train.py
torchrun is started once for each node instead, and its agents are told of each other:
  gradweave lab --nodes 4 --rate 1gbit -- torchrun --nproc-per-node 2 train.py
It needs no root. Everything ends with it, however it ends.
"""

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gradweave._src.cli.arguments import whole_number
from gradweave._src.cli.clusters import add_link_arguments, asked_cluster
from gradweave._src.cli.tables import print_note

# A `python` has so long to say whether it has this package.
ASKED_WITHIN_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s --nodes N [options] -- command ..."
    count = whole_number(least=1)
    parser.add_argument("--nodes", required=True, type=count, metavar="N", help="how many nodes")
    add_link_arguments(parser)
    parser.add_argument("command", nargs="*", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    from gradweave._src.lab import run_command

    spec = asked_cluster(options, options.nodes)
    _note_other_python(options.command)
    return run_command(spec, options.command, loopback=options.loopback)


def _note_other_python(command: Sequence[str]) -> None:
    """Print a note where the command's `python` is another one than ours, and has no gradweave."""
    if not command or not re.fullmatch(r"python[\d.]*", command[0]):
        return
    found = shutil.which(command[0])
    if found is None or Path(found).absolute().parent == Path(sys.executable).absolute().parent:
        return
    ask = "import importlib.util, sys; sys.exit(importlib.util.find_spec('gradweave') is None)"
    try:
        asked = subprocess.run(  # noqa: S603 it would be run anyway
            [found, "-c", ask], capture_output=True, check=False, timeout=ASKED_WITHIN_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return  # running it will say more
    if asked.returncode != 0:
        print_note(
            f"{command[0]} is {found}, which has no gradweave; write {sys.executable} "
            "instead, or activate its environment first"
        )
