"""Clocks for classes of ranks tell what clocks for every rank do."""

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples

from gradweave import RequestError
from gradweave._src.collectives import TIERS, build, stages_of
from gradweave._src.collectives.alike import Axis, spread
from gradweave._src.collectives.blueconnect import stages
from gradweave._src.collectives.topology import Topology
from gradweave._src.costs import GIGABIT_ETHERNET, Level, Link, Links, closed_form, flat
from gradweave._src.simulation.classes import classes_of, simulate_classes
from gradweave._src.simulation.schedule import simulate_schedule

OPERATIONS = ["all-reduce", "reduce-scatter", "all-gather"]
MOST_RANKS = 64


def links_of(sizes, numbers, topology="fat-tree"):
    """Tiers of these sizes, with links of so many microseconds and nanoseconds a byte."""
    members = [*sizes[:-1], None]
    return Links(
        levels=tuple(
            Level(
                members=size,
                link=Link(latency_s=us * 1e-6, s_per_byte=ns * 1e-9, sum_s_per_byte=sum_ns * 1e-9),
            )
            for size, (us, ns, sum_ns) in zip(members, numbers, strict=True)
        ),
        topology=topology,
    )


@st.composite
def tiered_worlds(draw):
    """The sizes of one to four tiers of at most 64 ranks in all, and their links."""
    sizes = []
    for _ in range(draw(st.integers(1, 4))):
        sizes.append(draw(st.integers(1, max(1, min(9, MOST_RANKS // prod(sizes))))))
    number = st.tuples(*[st.integers(0, 100)] * 3)
    numbers = draw(st.lists(number, min_size=len(sizes), max_size=len(sizes)))
    return links_of(sizes, numbers, draw(st.sampled_from(["fat-tree", "torus"]))), prod(sizes)


def is_power_of_two(number):
    return number & (number - 1) == 0


def assert_alike(operation, collective, links, ranks, nbytes):
    factors = links.factors(ranks)
    topology = Topology(tuple(range(ranks)), factors)
    asked = {"nbytes": nbytes, "link": GIGABIT_ETHERNET}
    full = build(operation, collective, topology=topology, **asked)
    by_classes = stages_of(operation, collective, factors=factors, **asked)
    expected_s = simulate_schedule(full, links, nbytes=nbytes)
    found_s = simulate_classes(by_classes, links, ranks=ranks, nbytes=nbytes)
    assert found_s == expected_s, (operation, collective, factors, links.topology)


@given(
    world=tiered_worlds(),
    operation=st.sampled_from(OPERATIONS),
    names=st.lists(st.sampled_from(list(TIERS)), min_size=4, max_size=4),
    per_rank=st.integers(1, 10**6),
)
@examples(60)
def test_classes_of_ranks_take_as_long_as_all_ranks(world, operation, names, per_rank):
    """By BlueConnect with any ways for its tiers, and by each of the ways blind to the tiers."""
    links, ranks = world
    factors = links.factors(ranks)
    named = [
        name if name != "halving-doubling" or is_power_of_two(size) else "pat"
        for name, size in zip(names, factors, strict=False)
    ]
    assert_alike(operation, f"blueconnect:{'/'.join(named)}", links, ranks, ranks * per_rank)
    for name in TIERS:
        if name != "halving-doubling" or is_power_of_two(ranks):
            assert_alike(operation, name, links, ranks, ranks * per_rank)


LARGE = [
    ((4, 5, 9), "ring"),
    ((4, 5, 9), "pat"),
    pytest.param((4, 8, 32), "ring", marks=pytest.mark.long),
    ((4, 8, 32), "halving-doubling"),
    pytest.param((4, 10, 25), "ring", marks=pytest.mark.long),
    pytest.param((4, 10, 25), "pat", marks=pytest.mark.long),
    ((4, 10, 25), "blueconnect:ring"),
    ((4, 10, 25), "blueconnect:ring/pat/pat"),
    ((4, 4, 8, 8), "blueconnect:ring/halving-doubling/pat/ring"),
    pytest.param((1024,), "pat", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("sizes", "collective"), LARGE)
def test_the_same_for_hundreds_of_ranks(sizes, collective):
    numbers = [(5, 0.1, 0.05), (20, 0.8, 0.05), (30, 0.2, 0.05), (40, 0.1, 0.05)][: len(sizes)]
    ranks = prod(sizes)
    assert_alike("all-reduce", collective, links_of(sizes, numbers), ranks, ranks * 1000)


@pytest.mark.parametrize("collective", ["blueconnect", "blueconnect:ring/pat/pat/ring"])
def test_a_hundred_thousand_ranks_cost_what_the_formula_says(collective):
    sizes = (4, 10, 25, 100)
    numbers = [(5, 0.1, 0), (20, 0.8, 0), (30, 0.16, 0), (40, 0.01, 0)]
    links, ranks, nbytes = links_of(sizes, numbers), prod(sizes), 100_000_000
    found_s = simulate_classes(
        stages_of("all-reduce", collective, factors=sizes, nbytes=nbytes, link=GIGABIT_ETHERNET),
        links,
        ranks=ranks,
        nbytes=nbytes,
    )
    cost = closed_form("all-reduce", collective, links, ranks)
    expected_s = float(cost.seconds(np.array([float(nbytes)]))[0])
    # The formula takes halving for the hosts of four, where the schedule may take the ring.
    assert found_s == pytest.approx(expected_s, rel=1e-4)


def test_how_many_places_differ():
    links = links_of((4, 10, 25), [(1, 1, 1)] * 3)
    assert classes_of(links, (4, 10, 25), [Axis(1, 1000)]) == [40]
    assert classes_of(links, (4, 10, 25), [Axis(1, 4), Axis(4, 10), Axis(40, 25)]) == [1, 1, 1]
    assert classes_of(links, (4, 10, 25), [Axis(1, 4), Axis(4, 250)]) == [1, 10]
    assert classes_of(flat(GIGABIT_ETHERNET), (7,), [Axis(1, 7)]) == [1]


def test_what_is_written_down_once_holds_for_every_rank():
    inwards, outwards = stages([5], [TIERS["pat"]])
    assert spread(inwards[0].alike).round(0).add.all()
    assert not spread(outwards[0].alike).round(0).add.any()


def test_what_is_not_the_same_for_all_ranks_is_refused():
    asked = {"factors": (3, 2), "nbytes": 600, "link": GIGABIT_ETHERNET}
    with pytest.raises(RequestError, match="'mst' is not written down once for all ranks; take"):
        stages_of("all-reduce", "mst", **asked)
    with pytest.raises(RequestError, match="6 ranks by halving-doubling do not all do the same"):
        stages_of("all-reduce", "halving-doubling", **asked)
    with pytest.raises(RequestError, match="no argument"):
        stages_of("all-reduce", "ring:2", **asked)


def test_tiers_that_do_not_divide_are_refused():
    links = links_of((4, 2), [(1, 1, 1)] * 2)
    ring = stages_of("all-reduce", "ring", factors=(6,), nbytes=600, link=GIGABIT_ETHERNET)
    with pytest.raises(RequestError, match="6 ranks do not fill the tiers of these links evenly"):
        simulate_classes(ring, links, ranks=6, nbytes=600)
    by_threes = stages_of(
        "all-reduce", "blueconnect", factors=(6, 2), nbytes=600, link=GIGABIT_ETHERNET
    )
    with pytest.raises(RequestError, match="do not divide those of the schedule"):
        simulate_classes(by_threes, links, ranks=12, nbytes=600)
