"""What a soak holds for a problem, and what it does to links and ranks; the soak is `make soak`."""

from itertools import islice

import pytest
import soak
from msgspec.structs import replace
from soak import Sample, Slowed, Soaked, Stopped

BLOCKS = 9


def samples(**grown):
    """Of both ranks; ``grown`` says by how much a field of rank 1 grows from block to block."""
    for block in range(BLOCKS):
        one = Sample(
            rank=0,
            steps=40 * (block + 1),
            elapsed_s=2.0 * block,
            stage="settled",
            plans=1,
            memory_bytes=400 * 2**20,
            descriptors=30 + block % 3,  # a plan may need more than another
            threads=9,
            differs_by=0.0,
        )
        yield one
        more = {name: getattr(one, name) + each * block for name, each in grown.items()}
        yield replace(one, rank=1, **more)


def soaked(found):
    return Soaked(made_with="", wrapper="dense", minutes=1.0, events=[], samples=list(found))


def test_what_stays_as_it_is_is_no_problem():
    assert soaked(samples()).problems == []


@pytest.mark.parametrize(
    ("grown", "problem"),
    [
        ({"memory_bytes": 10 * 2**20}, "memory_bytes of rank 1 have grown"),
        ({"descriptors": 1}, "descriptors of rank 1 have grown from 34 to 36"),
        ({"threads": 1}, "threads of rank 1 have grown from 11 to 15"),
        ({"differs_by": 1e-16}, "weights differ from torch's"),
    ],
)
def test_what_grows_or_differs_is_one(grown, problem):
    (found,) = soaked(samples(**grown)).problems
    assert found.startswith(problem)


def test_few_samples_tell_nothing():
    assert soaked(islice(samples(), 4)).problems == ["too few samples to tell what grows"]


def test_a_seed_tells_what_happens():
    events = list(islice(soak.schedule(3), 50))
    assert events == list(islice(soak.schedule(3), 50))
    assert {event.rank for event in events} == {0, 1}
    assert {type(event) for event in events} == {Slowed, Stopped}
    assert {event.rate for event in events if isinstance(event, Slowed)} == set(soak.RATES)


def test_a_page_says_what_has_grown():
    text = soak.page(soaked(samples(threads=1)), "soak")
    assert "| 1 | threads | 10, 11 | 16, 15 |" in text
    assert "- **threads of rank 1 have grown from 11 to 15**" in text
