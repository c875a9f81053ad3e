"""Measure collectives, selection and training.

Collectives and training are measured on an emulated cluster, or on the one torchrun started.
Examples:

  gradweave bench collectives --nodes 4 --rate 1gbit --op broadcast \\
      --algorithm native,linear-pipeline --size 64KB,32MB
  gradweave bench training --nodes 4 --rate 1gbit --trace densenet201 --parameter-scale 0.25 \\
      --forward 250ms --backward 500ms --runtime torch-ddp,torch-ddp-tuned,gradweave,wfbp,mgwfbp
  gradweave bench select --density 0.001
  torchrun --nnodes 2 --nproc-per-node 4 … -m gradweave bench collectives --op all-reduce
  torchrun --nnodes 2 --nproc-per-node 4 … -m gradweave bench training --trace resnet50
"""

import argparse

from gradweave._src.cli import bench_collectives, bench_select, bench_training
from gradweave._src.cli.parser import Parser

BENCHES = {
    "training": bench_training,
    "collectives": bench_collectives,
    "select": bench_select,
}


def add_arguments(parser: Parser) -> None:
    parser.add_verbs(BENCHES, dest="bench", noun="benchmark")


def run(options: argparse.Namespace) -> None:
    BENCHES[options.bench].run(options)
