"""Make an HTML page of one or several runs.

It has timelines, times, scaling, plans, and sliders to ask what if. RUN is a folder that a training
has written by save_run(), or `gradweave bench training`, or a folder of such folders. Several
trainings are compared. Examples:

  gradweave report runs/mine runs/torch
  gradweave report runs/20250101-120000 --output report.html --perfetto trace.json
"""

import argparse
from pathlib import Path

from gradweave._src import files
from gradweave._src.cli.tables import print_json, print_line
from gradweave._src.errors import RequestError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs")
    parser.add_argument(
        "--output",
        default="report.html",
        metavar="FILE",
        help="write the page to this file (default: report.html)",
    )
    parser.add_argument(
        "--perfetto",
        metavar="FILE",
        help="write the timelines as a trace for Perfetto, too",
    )
    parser.add_argument("--json", action="store_true", help="print a list of objects")


def run(options: argparse.Namespace) -> None:
    try:
        from gradweave._src.report.page import make_page  # slow to import
    except ModuleNotFoundError as error:
        raise RequestError(
            f"a report needs {error.name}, which is not installed; pip install 'gradweave[plots]'"
        ) from None
    from gradweave._src.report.folders import read_folders
    from gradweave._src.report.perfetto import trace_events

    if options.perfetto is not None and Path(options.perfetto) == Path(options.output):
        raise RequestError("--output and --perfetto name the same file; give each its own")
    folders = read_folders(options.runs)
    written = {options.output: make_page(folders)}
    if options.perfetto is not None:
        written[options.perfetto] = trace_events(folders)
    for path, text in written.items():
        files.write_text(path, text)
    if options.json:
        print_json(
            [
                {
                    "run": folder.name,
                    "trace": folder.run.trace.name,
                    "network": None if folder.run.network is None else folder.run.network.name,
                    "workers": folder.workers,
                    "runtimes": [row.runtime for row in folder.run.results.rows],
                    "output": options.output,
                    "perfetto": options.perfetto,
                }
                for folder in folders
            ]
        )
        return
    for path, text in written.items():
        size = f"{len(text.encode()) / 1e6:.2f} MB"
        print_line(f"{', '.join(folder.name for folder in folders)}: written to {path} ({size})")
