"""Make a trace from a profile: ready times, from what torch.profiler has seen of one step.

The profile is one rank's, of training under torch's DistributedDataParallel, as
export_chrome_trace writes it, also gzipped; best with record_shapes=True, and with the profiler's
step() called after each iteration. Nothing of Gradweave has to be where it was made. Example:

  gradweave import profile.json.gz --batch-size 64 --output trace.json
  gradweave advise --trace trace.json --network k80-10gbe --workers 16
"""

import argparse

from gradweave._src import files
from gradweave._src.cli.arguments import whole_number
from gradweave._src.cli.tables import print_json, print_note, print_table
from gradweave._src.formats.kineto import Imported, import_profile
from gradweave._src.vocabulary import count_text, milliseconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("profile", metavar="PROFILE", help="a .json or .json.gz file")
    parser.add_argument(
        "--batch-size",
        required=True,
        type=whole_number(least=1),
        metavar="N",
        help="samples per worker and step, which no profile tells",
    )
    parser.add_argument(
        "--step",
        type=whole_number(least=0, most=10**12),
        metavar="N",
        help="take ProfilerStep#N (default: the last in the file)",
    )
    parser.add_argument("--name", help="the trace's name (default: the file's)")
    parser.add_argument("--output", metavar="FILE", help="write the trace to this file")
    parser.add_argument("--json", action="store_true", help="print a list of objects")


def run(options: argparse.Namespace) -> None:
    imported = import_profile(
        options.profile, batch_size=options.batch_size, step=options.step, name=options.name
    )
    if options.output is not None:
        files.write(options.output, imported.trace)
    if options.json:
        print_json([_row(imported)])
    else:
        _print(imported)
    if imported.note is not None:
        print_note(imported.note)


def _row(imported: Imported) -> dict[str, object]:
    trace = imported.trace
    return {
        "trace": trace.name,
        "step": imported.step,
        "steps": imported.steps,
        "tensors": len(trace.tensors),
        "parameters": sum(tensor.elements for tensor in trace.tensors),
        "forward_s": trace.forward_s,
        "backward_s": trace.backward_s,
        "all_reduces": imported.all_reduces,
        "on_device": imported.on_device,
        "note": imported.note,
    }


def _print(imported: Imported) -> None:
    trace = imported.trace
    timed = "kernels on the device" if imported.on_device else "operations on the host"
    print_table(
        f"{trace.name}, step {imported.step}: forward {milliseconds(trace.forward_s)} ms, backward "
        f"{milliseconds(trace.backward_s)} ms, by {timed}; "
        f"{count_text(imported.all_reduces, 'all-reduce')}",
        {
            "tensor": [tensor.name for tensor in trace.tensors],
            "shape": ["x".join(map(str, t.shape or (t.elements,))) for t in trace.tensors],
            "ready at ms": [f"{tensor.ready_s * 1e3:.3f}" for tensor in trace.tensors],
        },
    )
