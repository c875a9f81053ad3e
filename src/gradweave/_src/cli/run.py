"""Run a training script as it is, with Gradweave's wrapper in place of torch's.

  torchrun --nproc-per-node 2 -m gradweave run train.py --epochs 3

The script needs no change, whatever wraps its model: itself, Lightning, Accelerate, Transformers.
Its output and its exit code stay its own; what was found is printed at the end, on rank 0, to the
standard error stream.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from gradweave._src.cli.arguments import number, whole_number
from gradweave._src.errors import RequestError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] script.py [arguments of the script]"
    parser.add_argument(
        "--precision",
        metavar="P",
        help="what planning may change about results: exact, rounded or sparse; or bf16, fp16, "
        "int8 for all messages (default: exact)",
    )
    parser.add_argument(
        "--cache", metavar="FOLDER", help="where plans outlast the run (default: GRADWEAVE_CACHE)"
    )
    parser.add_argument("--plan", metavar="FILE", help="a plan or recipe, instead of planning")
    parser.add_argument(
        "--planner",
        metavar="P",
        help="the planner whose plan is tried first, as `gradweave list planners` names them "
        "(default: optimal)",
    )
    parser.add_argument(
        "--collective",
        metavar="C",
        help="one for all messages, such as native or ring, as `gradweave list collectives` names "
        "them (default: auto, for each message what is fastest)",
    )
    parser.add_argument(
        "--record-steps",
        metavar="N",
        type=whole_number(least=1),
        help="how many steps are recorded (default: 5)",
    )
    parser.add_argument(
        "--trial-steps",
        metavar="N",
        type=whole_number(least=0),
        help="how many steps a plan is timed for in each of its turns; 0 trusts the prediction "
        "(default: 4)",
    )
    parser.add_argument(
        "--replan-when",
        metavar="SHARE",
        type=number(above=0),
        help="plan again when steps take another time by more than this share, such as 0.25 "
        "(default: never, except with --cache)",
    )
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="the script is a module's name"
    )
    parser.add_argument("script", help=argparse.SUPPRESS)
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    rest.required = False  # or else an error names it beside a script that is missing


def run(options: argparse.Namespace) -> int:
    from gradweave._src.integrations.script import Script, run_script
    from gradweave._src.runtime.wrapping.options import Options

    asked = _asked(options)
    Options(**{name: value for name, value in asked.items() if name != "plan"})  # may refuse them
    if options.plan is not None and not Path(options.plan).is_file():
        raise RequestError(f"there is no file {options.plan}; --plan wants a plan or a recipe")
    script = Script(
        name=options.script, arguments=tuple(options.arguments), is_module=options.is_module
    )
    return run_script(script, asked, to=sys.stderr)


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of our wrapper that were given.

    Paths are made absolute, for a script may change its folder before it wraps its model.
    """
    names = (
        "precision",
        "cache",
        "plan",
        "planner",
        "collective",
        "record_steps",
        "trial_steps",
        "replan_when",
    )
    said = {name: getattr(options, name) for name in names}
    said |= {name: str(Path(said[name]).absolute()) for name in ("cache", "plan") if said[name]}
    return {name: value for name, value in said.items() if value is not None}
