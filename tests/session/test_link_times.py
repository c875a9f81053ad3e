"""What a byte takes on each link, from what it took between pairs."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradweave._src.session.link_times import Transfer, link_times, s_per_byte


def test_a_late_look_at_the_clock_does_not_count():
    in_time = [0.1 * number for number in range(8)]
    assert s_per_byte(in_time, 1000) == pytest.approx(1e-4)
    late = [*in_time[:2], in_time[2] + 0.09, *in_time[3:]]
    assert s_per_byte(late, 1000) == pytest.approx(1e-4)


def test_one_burst_that_seems_short_does_not_count():
    taken = [5.0] * 9
    taken[4] = 1.0
    transfers = [Transfer(part=0, sender=1, receiver=0, s_per_byte=seconds) for seconds in taken]
    assert link_times(transfers)[1] == [5.0]


rates = st.lists(st.floats(1e-9, 1e-6), min_size=3, max_size=8)


@given(rates, st.integers(1, 4))
def test_where_most_links_are_alike_all_are_known(links, parts):
    """A burst is as slow as the slower of two links."""
    most = len(links) // 2 + 1
    links[:most] = [min(links)] * most
    transfers = [
        Transfer(part=part, sender=a, receiver=b, s_per_byte=max(links[a], links[b]))
        for part in range(parts)
        for a, b in permutations(range(len(links)), 2)
    ]
    assert link_times(transfers) == {rank: [taken] * parts for rank, taken in enumerate(links)}


def test_a_link_that_is_slow_in_one_direction():
    transfers = [
        Transfer(part=0, sender=a, receiver=b, s_per_byte=5.0 if a == 1 else 1.0)
        for a, b in permutations(range(4), 2)
    ]
    assert link_times(transfers) == {0: [1.0], 1: [5.0], 2: [1.0], 3: [1.0]}
