"""Only `make test-accelerator` looks into this folder: to import its tests builds the device."""

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    asked = config.option.markexpr
    return True if "accelerator" not in asked or "not accelerator" in asked else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.accelerator)
