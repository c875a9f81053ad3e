"""When one rank ends, all end as with torch's wrapper, in whatever stage they were."""

import json

import endings
import pytest
from commands import python


@pytest.mark.long
@pytest.mark.parametrize("kind", endings.KINDS)
def test_ranks_end_as_with_torchs_wrapper(kind):
    """Seconds: six pairs of ranks train and end, those of torch's wrapper first and last."""
    ran = python(endings.__file__, kind)
    assert ran.returncode == 0, ran.stderr
    first, *ours, last = (endings.Ending(**json.loads(line)) for line in ran.stdout.splitlines())
    assert [ending.moment for ending in ours] == list(endings.MOMENTS)
    for ending in ours:
        assert ending.exits in (first.exits, last.exits), (ending, ran.stderr)
