"""A pass that ends a script is logged with its rank and step; other errors are not."""

from pathlib import Path

import pytest
from commands import python

SCRIPT = Path(__file__).parent / "failing.py"


@pytest.mark.parametrize(
    ("where", "logged"),
    [
        ("backward", "rank 0, step 3: the backward pass failed"),
        ("hooked", None),  # a hook of ours says more by itself
        ("buffers", "rank 0, step 3: the forward pass failed outside of the model"),
        ("forward", None),  # the model's own
        ("elsewhere", None),
    ],
)
def test_a_pass_that_ends_the_script_is_logged(where, logged):
    """Seconds: a script of its own."""
    done = python(SCRIPT, where)
    assert done.returncode == 1
    assert "ArithmeticError: on purpose" in done.stderr
    assert done.stderr.count(" pass failed") == (logged is not None)
    assert (logged or "") in done.stderr
