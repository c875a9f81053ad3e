"""What a page tells people to type: read from its fenced blocks, to be run in a checkout."""

import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Block(NamedTuple):
    """A fenced block: its language, its title (who runs it, or which file it is), its lines."""

    language: str
    title: str
    text: str


FENCED = re.compile(r'^ *```(\w*)(?: title="(.*)")?\n((?:.*\n)*?) *```$', re.MULTILINE)


def blocks(page: str) -> list[Block]:
    """Return a page's fenced blocks, in their order."""
    return [Block(*parts) for parts in FENCED.findall(page)]


def pages() -> dict[str, str]:
    """Return README and everything in docs/, by their paths in the repository."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {str(file.relative_to(ROOT)): file.read_text() for file in files}


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
