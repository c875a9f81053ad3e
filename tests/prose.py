"""Prose of pages, wrapped: ``python tests/prose.py`` wraps every paragraph with a line too long.

Tables, fenced blocks and headings stay as they are, and so do paragraphs whose lines are short
enough: whoever changes a word changes a line.
"""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
WIDTH = 100
# Written by programs: `make results` and benchmarks/predictions_world.py.
GENERATED = {"docs/results.md", "docs/predictions-lab.md", "docs/predictions-world.md"}
ITEM = re.compile(r"( *)([-*] |\d+\. |:   )?")
# At the beginning of a line these would be a list, a heading, a quotation or a table.
NOT_FIRST = re.compile(r" (?=(?:[-+*#>|]|\d+[.)])(?: |$))")
CODE = re.compile(r"`[^`\n]{1,60}`")
KEPT = "\0"
# Rows of tables, headings, HTML, pictures.
OTHER = ("|", "#", "<", "![")


def prose_pages() -> list[Path]:
    """Return every page that people write."""
    found = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in found if str(path.relative_to(ROOT)) not in GENERATED]


def wrapped(page: str) -> str:
    """Return the page with its overlong paragraphs and list items wrapped."""
    lines: list[str] = []
    for part in _parts(page):
        is_too_long = any(len(line) > WIDTH for line in part.lines)
        lines += _wrap(part.lines) if is_too_long and part.is_prose else part.lines
    return "\n".join(lines)


class Part(NamedTuple):
    """Lines that belong together: a paragraph, a list item, or one line of something else."""

    is_prose: bool
    lines: list[str]


def _parts(page: str) -> Iterator[Part]:
    paragraph: list[str] = []
    is_fenced = False
    for line in page.split("\n"):
        is_fence = line.lstrip().startswith("```")
        is_other = is_fence or is_fenced or not line.strip() or line.lstrip().startswith(OTHER)
        if paragraph and (is_other or ITEM.match(line)[2]):
            yield Part(is_prose=True, lines=paragraph)
            paragraph = []
        if is_other:
            yield Part(is_prose=False, lines=[line])
        else:
            paragraph.append(line)
        is_fenced ^= is_fence
    if paragraph:
        yield Part(is_prose=True, lines=paragraph)


def _wrap(lines: list[str]) -> list[str]:
    indent, mark = ITEM.match(lines[0]).groups(default="")
    text = " ".join(line.strip() for line in lines)[len(mark) :]
    text = CODE.sub(lambda code: code[0].replace(" ", KEPT), NOT_FIRST.sub(KEPT, text))
    broken = textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent + mark,
        subsequent_indent=indent + " " * len(mark),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(KEPT, " ") for line in broken]


if __name__ == "__main__":
    for path in prose_pages():
        before = path.read_text()
        if (after := wrapped(before)) != before:
            path.write_text(after)
            print(path.relative_to(ROOT))  # noqa: T201
