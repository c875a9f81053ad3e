"""What some machines do not have."""

import os
from typing import NoReturn

import pytest


def missing(reason: str, *, whole_module: bool = False) -> NoReturn:
    """Skip a test that lacks something, except where CI is set: there it must run."""
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason, allow_module_level=whole_module)
