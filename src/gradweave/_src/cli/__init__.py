"""``gradweave VERB …``: each verb parses, calls the library, and prints."""

import argparse
import sys
from collections.abc import Sequence

from gradweave import __version__
from gradweave._src.cli import (
    advise,
    bench,
    calibrate,
    demo,
    doctor,
    importing,
    lab,
    listing,
    plan,
    record,
    report,
    run,
    selftest,
    simulate,
)
from gradweave._src.cli.endings import ending_in_order
from gradweave._src.cli.parser import Parser
from gradweave._src.cli.streams import flush_output, make_writable
from gradweave._src.errors import GradweaveError
from gradweave._src.lab.run import INTERRUPTED
from gradweave._src.vocabulary import printable

ABOUT = """\
Make synchronous data-parallel training in PyTorch fast on the network you have.

A training script needs one other import:

  from gradweave import DistributedDataParallel as DDP

This program shows what that gains and why: it records models, measures and
emulates networks, plans and predicts, and makes pages of what was measured."""

BEGIN = """\
Begin with `gradweave demo`. Every verb has --help with examples, and nearly
every one --json for machines. Sizes, rates and durations have their units:
25MiB, 1gbit, 300ms."""

# In the order in which people meet them.
VERBS = {
    "demo": demo,
    "list": listing,
    "lab": lab,
    "doctor": doctor,
    "selftest": selftest,
    "run": run,
    "record": record,
    "import": importing,
    "calibrate": calibrate,
    "plan": plan,
    "simulate": simulate,
    "advise": advise,
    "bench": bench,
    "report": report,
}

# These run a script, which decides what happens when they are interrupted.
SCRIPTS_OWN = {"run"}


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 when done, 2 for a user's mistake, or that of a command it ran."""
    make_writable()
    given = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    parser.refuse_unknown(given)
    options = parser.parse_args(given)
    if options.verb in SCRIPTS_OWN:
        return _result(options)
    try:
        with ending_in_order():
            return _result(options)
    except KeyboardInterrupt:
        print(f"{options.program}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _result(options: argparse.Namespace) -> int:
    try:
        try:
            exit_code = int(VERBS[options.verb].run(options) or 0)
        finally:
            flush_output()
    except BrokenPipeError:  # `head`, for one, has seen enough, and that is no failure
        exit_code = 0
    except (GradweaveError, OSError) as error:
        print(f"{options.program}: {printable(str(error))}", file=sys.stderr)
        exit_code = 2
    return exit_code


def _parser() -> Parser:
    parser = Parser(prog="gradweave", description=ABOUT, epilog=BEGIN)
    parser.add_argument("--version", action="version", version=f"gradweave {__version__}")
    parser.add_verbs(VERBS, dest="verb", noun="verb")
    return parser
