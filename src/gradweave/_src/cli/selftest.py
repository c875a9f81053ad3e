"""Check on your devices that the wrappers give torch's results.

It also checks that plans are carried out, and that no host waits. It starts a rank for each device,
trains small models for a minute or two, and says in a table what was right. Paste the table into an
issue, whatever it says: nobody but users has such devices. Examples:

  gradweave selftest --device cuda
  gradweave selftest --device cuda --ranks 2 --json
  torchrun --nnodes 2 --nproc-per-node 8 … -m gradweave selftest --device cuda
"""

import argparse
import os
from pathlib import Path

from gradweave._src.cli.arguments import number, whole_number
from gradweave._src.cli.tables import print_json, print_line, print_table
from gradweave._src.selftest.results import Noted, Selftest

FAILED = 1
MOST_RANKS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        default="cpu",
        metavar="KIND",
        help="what to train on: cpu, or what torch.accelerator knows, such as cuda (default: cpu)",
    )
    parser.add_argument(
        "--ranks",
        type=whole_number(least=2, most=MOST_RANKS),
        metavar="N",
        help="how many ranks to start (default: as many as there are devices, 2 on cpu)",
    )
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="import this first: a backend that is not a part of torch; may be repeated",
    )
    parser.add_argument(
        "--most-s",
        type=number(above=0, most=86400),
        default=600.0,
        metavar="S",
        help="end ranks that have not ended after so many seconds (default: 600)",
    )
    parser.add_argument("--json", action="store_true", help="print everything as one object")


def run(options: argparse.Namespace) -> int:
    from gradweave._src.selftest.devices import import_first, ranks_for
    from gradweave._src.selftest.ranks import FOLDER, command_of, run_ranks

    import_first(options.imports)
    folder = os.environ.get(FOLDER)
    if folder is not None:
        _as_started_rank(options.device, Path(folder))
        return 0
    if "RANK" in os.environ:
        found = _under_torchrun(options.device)
    else:
        ranks = ranks_for(options.device, options.ranks)
        command = command_of(options.device, options.imports)
        found = run_ranks(command, ranks, most_s=options.most_s)
    if found is None:  # not on rank 0
        return 0
    if options.json:
        print_json(found)
    else:
        surroundings = found.surroundings
        for what, version in surroundings.versions.items():
            print_line(f"{what} {version}")
        names = dict.fromkeys(surroundings.device_names)
        print_line(f"{', '.join(names)}; messages by {surroundings.backend}")
        print_table(
            found.summary,
            {
                "check": [check.name for check in found.checks],
                "outcome": [check.outcome for check in found.checks],
                "what it is": [check.line for check in found.checks],
            },
        )
    return 0 if found.has_passed else FAILED


def _as_started_rank(device: str, folder: Path) -> None:
    """Run the checks as one of the ranks that ``run_ranks`` has started."""
    from gradweave._src.selftest.on_rank import noting_in, run_checks
    from gradweave._src.selftest.ranks import MEETING, NOTES

    is_first = os.environ["RANK"] == "0"
    note = noting_in(folder / NOTES) if is_first else _ignore
    run_checks(device, note, meeting=folder / MEETING)


def _under_torchrun(device: str) -> Selftest | None:
    from gradweave._src.selftest.devices import devices_of
    from gradweave._src.selftest.on_rank import run_checks
    from gradweave._src.selftest.ranks import told

    devices_of(device)
    notes: list[Noted] = []
    run_checks(device, notes.append)
    return told(notes, None, ()) if os.environ["RANK"] == "0" else None


def _ignore(noted: object) -> None:
    """Take a note that nobody reads: only rank 0 notes anything."""
