"""Builds the package: pyproject.toml says all of it, except that the README's links are absolute.

Outside of the repository, relative ones would lead nowhere.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# The text of a link or picture, and where it leads unless that is another site or this page.
RELATIVE_LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!\w+:|#)([^)\s]+)\)")


def with_absolute_links(text: str) -> str:
    """Return the text with links to the repository's files, and pictures from there."""
    repository = PROJECT["urls"]["Repository"]

    def absolute(found: re.Match[str]) -> str:
        is_picture, label, path = found.groups()
        return f"{is_picture}{label}({repository}/{'raw' if is_picture else 'blob'}/HEAD/{path})"

    return RELATIVE_LINK.sub(absolute, text)


if __name__ == "__main__":
    setup(
        long_description=with_absolute_links((ROOT / "README.md").read_text(encoding="utf-8")),
        long_description_content_type="text/markdown",
    )
