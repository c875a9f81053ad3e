"""The page of integrations names tests that exist."""

import re
from pathlib import Path

FOLDER = Path(__file__).parent / "integrations"
PAGE = Path(__file__).parents[1] / "docs" / "integrations.md"


def test_every_cell_is_a_test():
    _, table = PAGE.read_text().split("## What works with what")
    cells = re.findall(r"`(test_\w+\.py)(?:::(\w+)|\[([^\]]+)\])`", table)
    assert len(cells) > 30
    for file, function, case in cells:
        text = (FOLDER / file).read_text()
        assert f"def {function}(" in text if function else f'"{case}": (' in text, (file, case)


def test_versions_on_the_page_are_those_that_are_tested():
    pinned = (PAGE.parents[1] / "constraints-integrations.txt").read_text()
    named = re.findall(r"(lightning|accelerate|transformers) (\d[\d.]*\d)", PAGE.read_text())
    assert len(named) == 3
    for name, version in named:
        assert f"\n{name}=={version}\n" in pinned
