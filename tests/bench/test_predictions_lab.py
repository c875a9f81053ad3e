"""The page of predictions in the lab, from results that nobody has measured."""

import msgspec
import pytest
from predictions_lab import (
    ALL,
    EXTRAPOLATED_FROM,
    MERGED_BY,
    SETTINGS,
    Everything,
    Measured,
    extrapolated_s,
    page,
)
from result_rows import row

from gradweave import CollectiveCost, Network, load_trace
from gradweave._src import files
from gradweave._src.bench.calibration import RecordedJob
from gradweave._src.bench.training import check_runtimes
from gradweave._src.costs import Curve

MEASURED = Measured(
    nodes=4,
    rate="1gbit",
    trace="resnet50",
    scale=0.125,
    made_with="Commit 1.",
    compute_s=0.3,
    copy_s_per_byte=3e-10,
    extrapolated_s={"optimal": 0.36},
    results=[row("optimal", 0.4, 0.38, messages=3), row("wfbp", 1.0, 1.2, messages=161)],
)


def test_the_page_has_the_errors_by_kind():
    text = page(Everything(measured=[MEASURED]))
    assert "| **all** | 2 | +7.5% | 12.5% | 19.2% | 20.0% | 1 of 2 |" in text
    assert "| merged plans, dense | 1 | -5.0% | 5.0% |" in text
    assert "| one message for each gradient | 1 | +20.0% |" in text
    assert "| from 2 nodes to more, merged | 1 | -10.0% |" in text
    assert "sparse" not in text  # nothing of the kind was measured
    assert "| resnet50 | 4 | 1gbit | `optimal` | 400 | 360 | -10.0% |" in text


def test_there_are_fifty_configurations_and_more_all_of_which_can_run():
    assert sum(len(setting.runtimes) for setting in SETTINGS) >= 50
    assert {setting.nodes for setting in SETTINGS} == {2, 3, 4, 8}
    assert {runtime for setting in SETTINGS for runtime in setting.runtimes} == set(ALL)
    for setting in SETTINGS:
        check_runtimes(setting.runtimes)
    pairs = {(setting.trace, setting.rate) for setting in SETTINGS if setting.nodes == 2}
    larger = {(s.trace, s.rate, s.nodes) for s in SETTINGS if s.nodes in {4, 8}}
    assert {nodes for trace, rate, nodes in larger if (trace, rate) in pairs} == {4, 8}


def test_more_nodes_are_predicted_from_two(tmp_path):
    (setting,) = [s for s in SETTINGS if s[:3] == (4, "1gbit", "resnet50")]
    assert extrapolated_s(setting, tmp_path, cores=2) == {}
    before = tmp_path / f"resnet50-{EXTRAPOLATED_FROM}-1gbit"
    before.mkdir()
    cost = CollectiveCost(
        operation="all-reduce",
        collective="native",
        workers=2,
        beside="compute",
        cost=Curve(nbytes=(1000, 10**7), measured_s=(0.001, 0.081)),
    )
    files.write(before / "calibrated.json", Network(name="two", source="made", costs=(cost,)))
    trace = load_trace("resnet50").rescaled(
        forward_s=0.1, backward_s=0.2, parameter_scale=setting.scale
    )
    job = RecordedJob(trace=trace, copy_s_per_byte=0.0)
    (before / "recorded.json").write_bytes(msgspec.json.encode(job))
    found = extrapolated_s(setting, tmp_path, cores=2)
    assert set(found) == set(MERGED_BY)
    # One message after backward: 3 times the start-ups among 4, twice that where two share a core,
    # and 3/4 of the bytes instead of 1/2.
    nbytes = float(trace.nbytes.sum())
    bytes_s = 0.08 / (10**7 - 1000) * (nbytes - 1000) * 1.5
    assert found["single"] == pytest.approx(0.3 + 6 * 0.001 + bytes_s)
