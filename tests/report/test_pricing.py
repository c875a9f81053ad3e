"""What messages would cost elsewhere: as measured where it was measured, scaled everywhere else."""

import pytest
from msgspec.structs import replace
from report_cases import drawn_trace, measured_network, write_run

from gradweave._src.costs import Curve, Line, Link
from gradweave._src.costs.all_reduce import ring
from gradweave._src.errors import UnknownCost
from gradweave._src.network import CollectiveCost, Network
from gradweave._src.report.folders import read_folders
from gradweave._src.report.page import scaled_outcomes
from gradweave._src.report.pricing import Price, price_of, ring_link

MEASURED = Curve(nbytes=(1024, 65536, 2**20, 2**24), measured_s=(0.006, 0.0055, 0.02, 0.22))


def priced(cost, workers=4):
    return Price(collective="native", workers=workers, cost=cost, latency_s=0.001)


def test_where_it_was_measured_it_costs_what_was_measured():
    price = priced(MEASURED)
    assert price.among(4).cost.measured_s == pytest.approx(MEASURED.measured_s)
    assert price.among(4).latency_s == price.latency_s


@pytest.mark.parametrize("workers", [2, 3, 8, 2048])
def test_a_ring_is_scaled_to_what_its_formula_says(workers):
    link = Link(latency_s=1.33e-4, s_per_byte=8.45e-9, sum_s_per_byte=3e-11)
    scaled = priced(ring(link, 4)).among(workers).cost
    expected = ring(link, workers)
    assert scaled.startup_s == pytest.approx(expected.startup_s)
    assert scaled.s_per_byte == pytest.approx(expected.s_per_byte)


@pytest.mark.parametrize("workers", [2, 3, 8, 64, 2048])
def test_no_message_is_cheaper_than_a_smaller_one_because_of_scaling(workers):
    rising = replace(MEASURED, measured_s=(0.0055, 0.006, 0.02, 0.22))
    seconds = priced(rising).among(workers).cost.measured_s
    assert list(seconds) == sorted(seconds)
    assert seconds[0] == pytest.approx(0.0055 * (workers - 1) / 3)


def test_other_links_cost_more_or_less():
    price = priced(MEASURED)
    slow = price.among(4, per_byte=10.0).cost.measured_s
    assert slow[1] == MEASURED.measured_s[1] == price.startup_s
    assert slow[3] == pytest.approx(0.0055 + 10 * (0.22 - 0.0055))
    far = price.among(4, startups=3.0)
    assert far.startup_s == pytest.approx(3 * 0.0055)
    assert far.latency_s == pytest.approx(0.003)


def test_scaling_agrees_with_the_predictions_beside_it(tmp_path):
    """The chart once said 98 % for wfbp at 4 workers beside a bar that said 38 %."""
    runtimes = {name: name for name in ("wfbp", "single", "mgwfbp", "optimal")}
    runtimes["torch-ddp"] = "ddp"
    trace = drawn_trace(60).rescaled(forward_s=0.05, backward_s=0.1)
    path = write_run(tmp_path / "run", trace, measured_network(), runtimes=runtimes)
    (folder,) = read_folders([path])
    price = price_of(folder.run.network, folder.workers)
    here = {o.planner: o for o in scaled_outcomes(folder, price) if o.workers == folder.workers}
    for runtime, planner in runtimes.items():
        predicted = folder.run.predicted[runtime]
        assert here[planner].iteration_s == pytest.approx(predicted.iteration_s)
        assert here[planner].efficiency == pytest.approx(predicted.efficiency)
    assert here["wfbp"].efficiency < 0.8, "nothing could disagree"


@pytest.mark.parametrize("workers", [2, 4, 7])
def test_a_network_without_links_gets_those_of_a_ring_that_costs_the_same(workers):
    line = Line(startup_s=0.012, s_per_byte=1.5e-8)
    entry = CollectiveCost(operation="all-reduce", collective="native", workers=workers, cost=line)
    network = Network(name="lines", source="made up", costs=(entry,))
    link = ring_link(network, workers)
    assert 2 * (workers - 1) * link.latency_s == pytest.approx(line.startup_s)
    assert 2 * (workers - 1) / workers * link.s_per_byte == pytest.approx(line.s_per_byte)


def test_one_worker_has_no_price():
    with pytest.raises(UnknownCost, match="one worker sends no messages"):
        price_of(measured_network(), 1)
