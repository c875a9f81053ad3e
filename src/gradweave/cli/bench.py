"""Measure: collectives and training on an emulated cluster, or on the one torchrun started.

Examples:

  gradweave bench collectives --nodes 4 --rate 1gbit --op broadcast \\
      --algorithm native,linear-pipeline --size 64KB,32MB
  gradweave bench training --nodes 4 --rate 1gbit --trace densenet201 --parameter-scale 0.25 \\
      --forward 0.25 --backward 0.5 --runtime torch-ddp,torch-ddp-tuned,wfbp,mgwfbp,optimal
  torchrun --nnodes 2 --nproc-per-node 4 … -m gradweave bench collectives --op all-reduce
"""

import argparse

from gradweave.cli import bench_collectives, bench_select, bench_training

BENCHES = {
    "collectives": bench_collectives,
    "select": bench_select,
    "training": bench_training,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    for name, module in BENCHES.items():
        module.add_arguments(benches.add_parser(name, help=module.__doc__))


def run(options: argparse.Namespace) -> None:
    BENCHES[options.bench].run(options)
