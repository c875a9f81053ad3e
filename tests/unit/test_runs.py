"""The folder of a run: predictions first, everything back as it was."""

import pytest

from gradweave import FormatError, make_plan, simulate
from gradweave.results import Result, Results
from gradweave.runs import Prediction, RunFolder


def result(runtime):
    return Result(
        trace="small",
        runtime=runtime,
        nodes=2,
        ranks_per_node=1,
        rate=None,
        iteration_s=2.0,
        predicted_s=1.0,
        prediction_error=-0.5,
        compute_s=1.0,
        exposed_s=1.0,
        messages=1,
        speedup=None,
        repeats_s=(2.0,),
        correct=True,
        bucket_cap_mb=None,
    )


def test_a_run_comes_back_as_it_was(tmp_path, small_trace, linked_network):
    runtimes = ["single", "fixed:1KiB"]
    plans = {
        name: make_plan(small_trace, linked_network, workers=2, planner=name) for name in runtimes
    }
    timelines = {
        name: simulate(small_trace, plan, linked_network, workers=2) for name, plan in plans.items()
    }
    folder = RunFolder(tmp_path / "new" / "run")
    folder.begin(small_trace, linked_network)
    for name in runtimes:
        folder.predict(Prediction(runtime=name, plan=plans[name], timeline=timelines[name]))
    with pytest.raises(
        FormatError, match=r"has no results\.json; name a folder of a run that ended"
    ):
        folder.read()
    results = Results(command="made up", rows=tuple(result(name) for name in runtimes))
    by_rank = {name: (timeline, timelines["single"]) for name, timeline in timelines.items()}
    folder.finish(results, by_rank)
    run = folder.read()
    assert (run.trace, run.network, run.results) == (small_trace, linked_network, results)
    assert run.plans == plans
    assert run.predicted == timelines
    assert run.measured == by_rank
