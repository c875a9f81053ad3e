import numpy as np
import pytest
from msgspec.structs import replace

from gradweave import CollectiveCost, Compression, Network, RequestError, UnknownCost, load_network
from gradweave._src.compression import compression_of
from gradweave._src.costs import FREE, Curve, Line, Link, flat, total_line
from gradweave._src.travel import Travel

FITTED = Network(
    name="fitted",
    source="made up",
    costs=tuple(
        CollectiveCost(
            operation="all-reduce",
            collective="native",
            workers=workers,
            cost=Line(startup_s=1.0 * workers, s_per_byte=0.5),
        )
        for workers in (2, 16)
    ),
)


def test_it_answers_for_the_number_of_workers_it_knows():
    assert FITTED.seconds("all-reduce", "native", nbytes=10, workers=2) == 7.0
    assert FITTED.seconds("all-reduce", "native", nbytes=10, workers=16) == 21.0
    assert FITTED.seconds("all-reduce", "native", nbytes=10, workers=1) == 0.0
    assert FITTED.known_workers == (2, 16)
    assert FITTED.default_collective == "native"


@pytest.mark.parametrize(
    ("operation", "collective", "workers", "complaint"),
    [
        ("all-reduce", "native", 8, "'fitted' knows all-reduce by 'native' for 2, 16 workers, not"),
        ("all-reduce", "ring", 2, "does not know all-reduce by 'ring'; it knows all-reduce by 'n"),
    ],
)
def test_it_refuses_what_it_does_not_know(operation, collective, workers, complaint):
    with pytest.raises(UnknownCost, match=complaint):
        FITTED.cost(operation, collective, workers=workers)


def test_it_refuses_what_means_nothing(linked_network):
    for network in (FITTED, linked_network):
        with pytest.raises(RequestError, match="workers must be at least 1, got 0"):
            network.cost("all-reduce", "native", workers=0)
        with pytest.raises(RequestError, match="no operation 'all-redce', did you mean all-reduce"):
            network.cost("all-redce", "ring", workers=2)


def test_what_was_measured_comes_before_the_formula():
    both = Network(
        name="both",
        source="made up",
        costs=(
            CollectiveCost(
                operation="all-reduce",
                collective="ring",
                workers=4,
                cost=Line(startup_s=9.0, s_per_byte=0.0),
            ),
        ),
        links=flat(Link(latency_s=1.0, s_per_byte=0.0)),
    )
    assert both.seconds("all-reduce", "ring", nbytes=1, workers=4) == 9.0
    assert both.seconds("all-reduce", "ring", nbytes=1, workers=3) == 4.0
    assert both.known_workers == (4,)


@pytest.mark.parametrize("collective", ["ring", "parameter-server", "parameter-server:3"])
def test_the_phases_of_a_message_add_up_to_its_all_reduce(collective, linked_network):
    phases = linked_network.phases(collective, workers=5)
    whole = linked_network.cost("all-reduce", collective, workers=5)
    total = phases[0][1]
    for _, cost in phases[1:]:
        total = total_line(total, cost)
    assert (total.startup_s, total.s_per_byte) == pytest.approx((whole.startup_s, whole.s_per_byte))
    names = [name for name, _ in phases]
    assert names == (["push", "pull"] if "server" in collective else ["all-reduce"])


def test_a_measured_parameter_server_is_priced_alike_everywhere(small_trace, linked_network):
    """Planned for and simulated at the same price, measured whole or as push and pull."""
    whole = Line(startup_s=10.0, s_per_byte=0.0)
    measured = {
        ("all-reduce",): [("all-reduce", 10.0)],
        ("reduce", "broadcast"): [("push", 10.0), ("pull", 10.0)],
    }
    for operations, phases in measured.items():
        network = Network(
            name="measured",
            source="made up",
            links=linked_network.links,
            costs=tuple(
                CollectiveCost(
                    operation=operation, collective="parameter-server", workers=3, cost=whole
                )
                for operation in operations
            ),
        )
        found = network.phases("parameter-server", workers=3)
        assert [(name, cost.startup_s) for name, cost in found] == phases
        total = network.cost("all-reduce", "parameter-server", workers=3)
        assert total.startup_s == sum(seconds for _, seconds in phases)


def test_push_and_pull_by_curves_add_up():
    curve = Curve(nbytes=(1, 10), measured_s=(1.0, 2.0))
    network = Network(
        name="curves",
        source="made up",
        costs=tuple(
            CollectiveCost(operation=operation, collective="parameter-server", workers=2, cost=cost)
            for operation, cost in (
                ("reduce", curve),
                ("broadcast", Line(startup_s=0.5, s_per_byte=0.0)),
            )
        ),
    )
    cost = network.cost("all-reduce", "parameter-server", workers=2)
    assert cost.seconds(np.array([1.0, 10.0])).tolist() == [1.5, 2.5]
    assert cost.known_to_bytes == 10
    assert cost.line(10.0).startup_s == pytest.approx(0.5 + curve.line(10.0).startup_s)


@pytest.mark.parametrize(
    ("workers", "compression"),
    [
        (1, None),
        (1, Compression(method="topk", density=0.1)),
        (4, Compression(method="topk", density=0.1)),
    ],
)
def test_a_wrong_name_is_found_also_where_its_price_is_not_needed(
    workers, compression, linked_network
):
    with pytest.raises(UnknownCost, match="no formula for all-reduce by 'rign'"):
        linked_network.cost("all-reduce", "rign", workers=workers, compression=compression)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"workers": -3}, "workers must be at least 2, got -3"),
        ({"workers": 1}, "workers must be at least 2, got 1"),
        ({"collective": ""}, "collective must not be empty"),
        ({"latency_s": -1.0}, "latency_s must be a number >= 0, got -1"),
    ],
)
def test_entries_that_cannot_be(fields, complaint):
    given = {"operation": "all-reduce", "collective": "ring", "workers": 2}
    with pytest.raises(ValueError, match=complaint):
        CollectiveCost(**{**given, **fields}, cost=Line(startup_s=1.0, s_per_byte=0.0))


def test_a_fit_for_other_workers_is_mentioned_though_there_are_links(linked_network):
    network = Network(name="both", source="made up", costs=FITTED.costs, links=linked_network.links)
    with pytest.raises(UnknownCost, match="by 'native' for 2, 16 workers, not for 8"):
        network.cost("all-reduce", "native", workers=8)


def test_a_sparse_exchange_needs_links():
    sparse = Compression(method="gtopk", density=0.01)
    with pytest.raises(UnknownCost, match=r"'fitted' has no links, so the exchange of gtopk:0.01"):
        FITTED.cost("all-reduce", "native", workers=2, compression=sparse)
    with pytest.raises(UnknownCost, match="not a broadcast"):
        load_network("gtopk-1gbe").cost("broadcast", "ring", workers=2, compression=sparse)


def test_selecting_comes_before_sending(linked_network):
    """On the thread that sends, over the four bytes that an element of the dense message has."""
    sparse = Compression(method="gtopk", density=0.01)
    network = replace(linked_network, selection_s_per_element=0.02)
    (select, selection), (exchange, cost) = network.phases("ring", workers=4, compression=sparse)
    assert (select, exchange) == ("select", "gtopk:0.01")
    assert selection == Line(startup_s=0.0, s_per_byte=0.005)
    assert linked_network.phases("ring", workers=4, compression=sparse) == ((exchange, cost),)
    whole = network.cost("all-reduce", "ring", workers=4, compression=sparse)
    assert whole == total_line(selection, cost)
    assert network.cost("all-reduce", "ring", workers=1, compression=sparse) == FREE
    dense = network.cost("all-reduce", "ring", workers=4)
    assert dense == linked_network.cost("all-reduce", "ring", workers=4)
    with pytest.raises(ValueError, match="selection_s_per_element must be a number >= 0, got -1"):
        replace(network, selection_s_per_element=-1.0)


def test_a_network_knows_something():
    with pytest.raises(ValueError, match="costs and links are both missing"):
        Network(name="empty", source="made up")


def test_a_cost_stands_once():
    with pytest.raises(
        ValueError, match="all-reduce by 'native' for 2 workers beside nothing stands twice"
    ):
        Network(name="twice", source="made up", costs=(FITTED.costs[0], FITTED.costs[0]))


def entry(beside, startup_s, latency_s):
    return CollectiveCost(
        operation="all-reduce",
        collective="native",
        workers=4,
        beside=beside,
        cost=Line(startup_s=startup_s, s_per_byte=0.0),
        latency_s=latency_s,
    )


@pytest.mark.parametrize("order", [1, -1])
def test_beside_compute_is_the_price_where_it_is_known(order):
    entries = (entry("nothing", 1.0, 0.5), entry("compute", 3.0, 0.7))[::order]
    network = Network(name="calibrated", source="made up", costs=entries)
    assert network.seconds("all-reduce", "native", nbytes=1, workers=4) == 3.0
    assert network.latency_s("native", workers=4) == 0.7
    idle = network.beside_nothing()
    assert idle.seconds("all-reduce", "native", nbytes=1, workers=4) == 1.0
    assert idle.latency_s("native", workers=4) == 0.5


def test_idle_prices_must_have_been_measured():
    network = Network(name="busy", source="made up", costs=(entry("compute", 3.0, 0.7),))
    with pytest.raises(UnknownCost, match="'busy' was measured beside compute only"):
        network.beside_nothing()


@pytest.mark.parametrize(
    ("compression", "before", "measured"), [("bf16", 0.5, 0.25), ("gtopk:0.01", 0.0, 0.25)]
)
def test_a_compressed_message_has_a_latency_of_its_own(compression, before, measured):
    """A sparse exchange is another algorithm: what dense messages pay says nothing about it."""
    compression = compression_of(compression)
    dense = entry("nothing", 1.0, 0.5)
    name = str(Travel("native", compression))
    own = replace(dense, collective=name, latency_s=0.25)
    for costs, expected in (((dense,), before), ((dense, own), measured)):
        network = Network(name="calibrated", source="made up", costs=costs)
        assert network.latency_s("native", workers=4, compression=compression) == expected


def test_formulas_know_no_latency(linked_network):
    assert linked_network.latency_s("ring", workers=4) == 0.0
    assert linked_network.beside_nothing() == linked_network
