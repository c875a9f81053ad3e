"""``gradweave VERB …``: each verb parses, calls the library, and prints."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from gradweave.cli import advise, bench, calibrate, demo, lab, plan, record, report, run, simulate
from gradweave.errors import GradweaveError

VERBS = {
    "advise": advise,
    "bench": bench,
    "calibrate": calibrate,
    "demo": demo,
    "lab": lab,
    "plan": plan,
    "record": record,
    "report": report,
    "run": run,
    "simulate": simulate,
}


class _Parser(argparse.ArgumentParser):
    """A mistake is one line, not a page of usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """0 when done, 2 for a user's mistake; a verb that runs a command returns that command's."""
    options = _parser().parse_args(argv)
    try:
        exit_code = VERBS[options.verb].run(options) or 0
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read us, `head` for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        exit_code = 0
    except (GradweaveError, OSError) as error:
        print(f"gradweave {options.verb}: {error}", file=sys.stderr)
        exit_code = 2
    return exit_code


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="gradweave", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, module in VERBS.items():
        summary, _, details = (module.__doc__ or "").partition("\n")
        verb = verbs.add_parser(
            name,
            allow_abbrev=False,
            help=summary,
            description=f"{summary}\n{details}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(verb)
    return parser
