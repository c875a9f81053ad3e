"""Both wrappers in a world of 10,000 ranks, in one process: nothing of a step grows with it.

`python benchmarks/fake_world.py 100000` takes minutes.
"""

import fake_world
import pytest
import torch

pytestmark = pytest.mark.long  # torch's fake all-gather itself is slow among so many

LARGE = 10_000


@pytest.fixture(scope="module", params=list(fake_world.BACKENDS))
def found(request):
    torch.set_num_threads(1)
    fake_world.measure(request.param, 2, traces_memory=False)  # pays for what torch loads
    return [
        fake_world.measure(request.param, world, traces_memory=True, settled_steps=1)
        for world in (8, LARGE)
    ]


def test_planning_ends(found):
    assert all(one.planning_steps < fake_world.MOST_STEPS for one in found)


def test_the_store_holds_as_much_in_any_world(found):
    """Of a command, what this rank says and how many have said something."""
    small, large = found
    assert large.keys_kept <= small.keys_kept + 4


def test_rank_0_reads_a_share_of_a_large_world(found):
    """At most 256 reports for each command; a list of all ranks would be 10,000 keys."""
    _, large = found
    assert large.keys_asked < LARGE / 3


def test_wrapping_keeps_some_bytes_for_each_rank(found):
    """Whose host is whose must be known for every rank; no object of torch's for each of them."""
    small, large = found
    assert large.wrapping_bytes - small.wrapping_bytes < LARGE * 1000
