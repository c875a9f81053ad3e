"""Record a model's trace: when each gradient is ready, and how long forward takes.

Runs real iterations on random input. The loss is the model's `loss` where its output has one,
otherwise the mean of its output. Example:

  gradweave record --model pytorchcv.models.resnet:resnet18 --input 8x3x224x224 --output trace.json
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gradweave._src import files
from gradweave._src.cli.arguments import whole_number
from gradweave._src.cli.tables import print_json, print_note, print_table, progress_bar
from gradweave._src.vocabulary import milliseconds

if TYPE_CHECKING:
    from gradweave._src.measure.backward import Recording, Spread

WARMUP = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        required=True,
        metavar="M:F",
        help="package.module:factory; the factory takes no arguments and returns a module",
    )
    parser.add_argument(
        "--input",
        required=True,
        action="append",
        metavar="SHAPE",
        help="32x3x224x224 for random numbers, 32x128:50000 for random integers below 50000; "
        "repeat it for a model of several inputs; the first number is the batch size",
    )
    parser.add_argument("--name", help="the trace's name (default: the factory's)")
    parser.add_argument(
        "--iterations",
        type=whole_number(least=1, most=10_000),
        default=10,
        metavar="N",
        help="how many iterations are recorded, after three for warming up (default: 10)",
    )
    parser.add_argument("--output", metavar="FILE", help="write the trace to this file")
    parser.add_argument("--json", action="store_true", help="print a list of objects")


def run(options: argparse.Namespace) -> None:
    from gradweave._src.measure.backward import record_trace
    from gradweave._src.measure.models import build_model, loss_of, random_input, telling
    from gradweave._src.measure.neighbours import Neighbours

    neighbours = Neighbours()
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does, for a user's own model
    inputs = [random_input(text) for text in options.input]
    model = build_model(options.model)
    total = WARMUP + options.iterations
    with progress_bar(total, doing="recording") as advance:

        def step() -> None:
            model.zero_grad()
            with telling(f"the model does not train on --input {' --input '.join(options.input)}"):
                loss_of(model(*inputs)).backward()  # type: ignore[no-untyped-call]
            advance()

        recording = record_trace(
            model,
            step,
            name=options.name or options.model.partition(":")[2],
            batch_size=inputs[0].shape[0],
            warmup=WARMUP,
            iterations=options.iterations,
        )
    if options.output is not None:
        files.write(options.output, recording.trace)
    if options.json:
        print_json([_row(recording)])
    else:
        _print(recording)
    _report(recording)
    if (busy := neighbours.note()) is not None:
        print_note(busy)


def _row(recording: "Recording") -> dict[str, object]:
    trace = recording.trace
    return {
        "trace": trace.name,
        "tensors": len(trace.tensors),
        "parameters": sum(tensor.elements for tensor in trace.tensors),
        "forward_s": trace.forward_s,
        "forward_quartiles_s": recording.forward,
        "backward_s": trace.backward_s,
        "backward_quartiles_s": recording.backward,
        "iterations": recording.iterations,
        "reordered": recording.reordered,
        "without_gradient": recording.without_gradient,
    }


def _print(recording: "Recording") -> None:
    trace = recording.trace
    tensors = trace.tensors
    print_table(
        f"{trace.name}: forward {_times(trace.forward_s, recording.forward)}, backward "
        f"{_times(trace.backward_s, recording.backward)}, {len(tensors)} tensors; medians of "
        f"{recording.iterations} iterations; in brackets the range of the middle half",
        {
            "tensor": [tensor.name for tensor in tensors],
            "elements": [f"{tensor.elements:,}" for tensor in tensors],
            "forward ms": [f"{tensor.forward_s * 1e3:.3f}" for tensor in tensors],
            "ready at ms": [f"{tensor.ready_s * 1e3:.3f}" for tensor in tensors],
        },
    )


def _times(seconds: float, spread: "Spread") -> str:
    low, high = map(milliseconds, spread)
    return f"{milliseconds(seconds)} ms ({low} to {high})"


def _report(recording: "Recording") -> None:
    """Print notes on what differed between iterations, for a plan can only follow one order."""
    if recording.reordered:
        print_note(
            f"gradients came in another order in {recording.reordered} of "
            f"{recording.iterations} iterations; the trace has the order of their median times"
        )
    for name, missing in recording.without_gradient.items():
        print_note(f"{name} had no gradient in {missing} of {recording.iterations} iterations")
