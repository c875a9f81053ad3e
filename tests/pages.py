"""What a page tells people to type: read from its fenced blocks, to be run in a checkout."""

import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Block(NamedTuple):
    language: str
    note: str  # what stands behind the language, such as who is to run it
    text: str


def blocks(page: str) -> list[Block]:
    """Of a page's text, in their order."""
    found = re.findall(r"^```(\w*) *(.*)\n((?:.*\n)*?)```$", page, re.MULTILINE)
    return [Block(*parts) for parts in found]


def section(page: str, heading: str) -> str:
    """From a heading to the next one of its kind."""
    _, found, rest = page.partition(f"\n## {heading}\n")
    assert found, f"no heading {heading!r}"
    return rest.partition("\n## ")[0]


def make_checkout(folder: Path) -> Path:
    """What of a checkout commands need after `make demo`; they leave their files in here."""
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder
