"""What the runtime says of compression: what it costs here, and whether it pays."""

import pytest
import torch
from msgspec.structs import replace
from ranks import on_threads

from gradweave import Link, Network, Tensor, Trace
from gradweave._src.compression import Compression
from gradweave._src.costs import Line, flat
from gradweave._src.network import CollectiveCost
from gradweave._src.plan import merge
from gradweave._src.planning import make_plan
from gradweave._src.recipe import Recipe
from gradweave._src.session.compression_worth import verdict, with_compression_price
from gradweave._src.session.explain import explanation
from gradweave._src.session.findings import Findings, Stage
from gradweave._src.session.session import Session
from gradweave._src.session.task import LAST_STEP, PlanningTask
from gradweave._src.sparse.exchange import EXCHANGES
from gradweave._src.sparse.exchanger import Exchanger
from gradweave._src.sparse.settings import GTopK, settings_for
from gradweave._src.sparse.timing import exchange_cost, selection_s_per_element

TRACE = Trace(
    name="two",
    origin="measured",
    source="made up",
    batch_size=1,
    tensors=tuple(
        Tensor(name=name, elements=10**6, bytes_per_element=4, ready_s=ready_s, forward_s=0.01)
        for name, ready_s in (("b", 0.01), ("a", 0.02))
    ),
)
SPARSE = GTopK(density=0.001).compression_at(LAST_STEP)


def network(*, bits_per_s, selection_s=1e-9):
    link = Link(latency_s=1e-4, s_per_byte=8 / bits_per_s)
    return Network(name="n", source="n", links=flat(link), selection_s_per_element=selection_s)


def settled(net, compression=SPARSE):
    plan = make_plan(TRACE, net, workers=4, compression=compression)
    worth = verdict(TRACE, plan, net, workers=4)
    return Findings(trace=TRACE, network=net, plan=plan, stage=Stage.SETTLED, worth=worth)


def test_what_is_compressed_is_called_so():
    said = explanation(settled(network(bits_per_s=1e8)), workers=4)
    assert said.partition(",")[0] == "2 messages by gtopk:0.001"


def test_it_pays_on_a_slow_network():
    found = settled(network(bits_per_s=1e8))
    judged = verdict(TRACE, found.plan, found.network, workers=4)
    assert judged.pays
    assert judged.compressed_s < judged.dense_s / 4
    (said,) = [line for line in explanation(found, workers=4).split("\n") if "ompress" in line]
    assert said == (
        f"Compression pays: predicted {judged.compressed_s * 1e3:.1f} ms an iteration with it, "
        f"{judged.dense_s * 1e3:.1f} ms with the best dense plan."
    )


@pytest.mark.parametrize(("bits_per_s", "selection_s"), [(1e11, 1e-9), (1e9, 1e-6)])
def test_it_does_not_pay_where_messages_are_cheap_or_selecting_is_dear(bits_per_s, selection_s):
    found = settled(network(bits_per_s=bits_per_s, selection_s=selection_s))
    assert not verdict(TRACE, found.plan, found.network, workers=4).pays
    said = explanation(found, workers=4)
    assert "Compression does not pay on this network: predicted" in said
    assert said.endswith("ms with the best dense plan; leave it out.")


def test_of_dense_plans_there_is_nothing_to_say():
    net = network(bits_per_s=1e9)
    assert "ompression" not in explanation(settled(net, compression=None), workers=4)
    assert verdict(TRACE, merge(TRACE, [2], planner="p", collective="ring"), net, workers=4) is None


def test_what_trains_by_default_is_called_gtopk_by_who_predicts():
    assert Compression(method="gtopk", density=0.001) == SPARSE


@pytest.mark.parametrize("method", EXCHANGES)
def test_what_has_a_price_can_be_done(method):
    compression = Compression(method=method, density=0.01)
    settings = settings_for(compression)
    assert (settings.exchange, settings.compression_at(LAST_STEP)) == (method, compression)


def agreed(group):
    """What a bucket of a thousand elements costs, to select from and to exchange."""
    selecting_s = selection_s_per_element(
        1000, like=torch.zeros(1), density=SPARSE.density, settings=settings_for(SPARSE)
    )
    exchange = exchange_cost(Exchanger(group), exchange=SPARSE.method, density=SPARSE.density)
    net = with_compression_price(
        network(bits_per_s=1e9),
        SPARSE,
        selection_s_per_element=selecting_s,
        exchange=exchange,
        workers=group.size(),
    )
    phases = net.phases("ring", workers=group.size(), compression=SPARSE)
    return [(name, cost.startup_s, cost.s_per_byte) for name, cost in phases]


def test_ranks_agree_on_what_exchanging_costs():
    first, second = on_threads(2, agreed)
    assert first[1] == second[1]
    (_, nothing_s, selecting_s), (exchange, startup_s, s_per_byte) = first
    assert exchange == "gtopk:0.001"
    assert nothing_s == 0 < selecting_s
    assert startup_s > 0
    assert s_per_byte >= 2 * 0.001 * 8e-9, "less than the links need"


def test_a_measured_exchange_is_the_price():
    """The formula of the links knows nothing of threads and merges."""
    slow = CollectiveCost(
        operation="all-reduce",
        collective=str(SPARSE),
        workers=4,
        cost=Line(startup_s=1.0, s_per_byte=0.0),
    )
    net = replace(network(bits_per_s=1e8), costs=(slow,))
    cost = net.cost("all-reduce", "ring", workers=4, compression=SPARSE)
    assert cost.startup_s == 1.0
    plan = make_plan(TRACE, net, workers=4, compression=SPARSE)
    assert len(plan.buckets) == 1
    assert not verdict(TRACE, plan, net, workers=4).pays
    other = net.cost("all-reduce", "ring", workers=8, compression=SPARSE)
    assert other.startup_s < 0.1
    assert net.default_collective == "ring", "no collective for dense messages"


def test_timing_draws_no_number_of_the_trainings():
    before = torch.get_rng_state()
    selection_s_per_element(
        10,
        like=torch.zeros(1),
        density=0.1,
        settings=GTopK(density=0.1, momentum=0.9, clip_norm=1.0),
    )
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("bits_per_s", "times"), [(1e11, 1), (1e7, 0)])
def test_the_log_says_where_it_does_not_pay(caplog, bits_per_s, times):
    net = network(bits_per_s=bits_per_s)
    plan = make_plan(TRACE, net, workers=2, compression=SPARSE)
    recipe = Recipe(workers=2, device="cpu", plan=plan, trace=TRACE, network=net, step_s=None)
    Session(PlanningTask(workers=2), given=recipe)
    assert caplog.text.count("Compression does not pay on this network") == times
