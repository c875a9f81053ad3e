"""Which pairs stand for a tier, and what they say of it."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import on_threads

from gradweave._src.collectives.topology import Topology
from gradweave._src.comm.communicator import Communicator
from gradweave._src.measure.network import _measure_links
from gradweave._src.measure.sampled_pairs import TierSample, sampled_pairs, typical
from gradweave._src.torch_internals import HOST


def tier_of(topology, one, other):
    """The outermost tier in which two ranks are in different groups."""
    places = [topology.order.index(rank) for rank in (one, other)]
    tiers = range(len(topology.factors))
    groups = [[place // prod(topology.factors[:tier]) for tier in tiers] for place in places]
    return max(tier for tier in tiers if groups[0][tier] != groups[1][tier])


@given(
    factors=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    most=st.integers(1, 8),
    seed=st.integers(0, 99),
)
def test_pairs_cross_the_tier_they_stand_for(factors, most, seed):
    ranks = prod(factors)
    topology = Topology(tuple(reversed(range(ranks))), tuple(factors))
    for tier, size in enumerate(factors):
        pairs = sampled_pairs(topology, tier, most=most, seed=seed)
        assert pairs == sampled_pairs(topology, tier, most=most, seed=seed)
        assert len(set(pairs)) == len(pairs) <= most
        assert bool(pairs) == (size > 1)
        assert all(tier_of(topology, *pair) == tier for pair in pairs)


def test_as_many_in_any_world():
    """Of a large world as many as asked for, and no list of all its pairs."""
    for hosts in (10, 25_000):
        topology = Topology(tuple(range(4 * hosts)), (4, hosts))
        assert [len(sampled_pairs(topology, tier, most=5)) for tier in (0, 1)] == [5, 5]


def test_how_sure():
    found = typical([3.0, 1.0, 2.0, 5.0, 4.0])
    assert (found.median, found.least, found.greatest, found.pairs) == (3.0, 1.0, 5.0, 5)
    assert found.confidence == pytest.approx(1 - 2 * 0.5**5)
    assert typical([1.0]).confidence == 0.0


def test_said_in_a_line():
    sample = TierSample(latency_s=typical([1e-5, 2e-5, 4e-5]), s_per_byte=typical([1e-8, 0.0]))
    assert sample.text() == (
        "20.0 us (10.0 us to 40.0 us) and 200.0 MB/s (100.0 MB/s to any rate), 3 pairs, 75% sure"
    )
    one = TierSample(latency_s=typical([2e-5]), s_per_byte=typical([1e-8]))
    assert one.text() == "20.0 us and 100.0 MB/s, 1 pair"


def links_of(group, factors):
    topology = Topology(tuple(range(group.size())), factors)
    links, samples = _measure_links(Communicator(group, topology=topology), HOST)
    return links, [(one.latency_s, one.s_per_byte) for one in samples]


def test_every_rank_learns_the_same():
    found = on_threads(4, links_of, (2, 2))
    assert all(one == found[0] for one in found)
    links, samples = found[0]
    assert [level.members for level in links.levels] == [2, None]
    for level, (latency_s, s_per_byte) in zip(links.levels, samples, strict=True):
        assert latency_s.least <= level.link.latency_s <= latency_s.greatest
        assert s_per_byte.least <= level.link.s_per_byte <= s_per_byte.greatest
