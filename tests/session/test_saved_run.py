"""The run that a training leaves behind, from what its ranks have noted."""

import pytest
from msgspec.structs import replace

from gradweave import PlanMismatch, RequestError, Span, Timeline, make_plan, simulate
from gradweave._src.phases import Phases
from gradweave._src.plan import Bucket, Plan
from gradweave._src.results import StageBegin
from gradweave._src.session.candidates import Candidate
from gradweave._src.session.findings import Findings, Stage
from gradweave._src.session.saved_run import RankNotes, Training, losses_of, run_of, unplanned
from gradweave._src.session.trials import Trial, Visit
from gradweave._src.travel import Travel

FAST = Phases(input_s=0.5, forward_s=1.0, backward_s=2.0, network_s=3.0)
SLOW = Phases(input_s=0.25, forward_s=1.0, backward_s=3.0, network_s=1.0)
SETTLED = (StageBegin("recording", 0), StageBegin("settled", 3))


def rank(*phases, host="a"):
    return RankNotes(host=host, phases=phases, notes_timelines=False)


@pytest.fixture
def found(small_trace, linked_network):
    plan = make_plan(small_trace, linked_network, workers=2, planner="single")
    before = make_plan(small_trace, linked_network, workers=2, planner="wfbp")
    return Findings(
        stage=Stage.SETTLED,
        trace=small_trace,
        network=linked_network,
        plan=plan,
        predicted=simulate(small_trace, plan, linked_network, workers=2),
        baseline_step_s=4.0,
        step_s=2.0,
        trials=(
            Trial(
                candidate=Candidate(plan=before, predicted_s=6.0, is_baseline=True),
                visits=(Visit(steps_s=(4.0,), is_noted=False),),
            ),
            Trial(
                candidate=Candidate(plan=plan, predicted_s=5.0),
                visits=(Visit(steps_s=(1.0, 3.0), is_noted=False),),
            ),
        ),
    )


@pytest.fixture
def training(found, small_trace):
    return Training(
        runtime="gradweave",
        command="train.py",
        findings=found,
        explanation="All is well.",
        tensors=tuple(replace(t, ready_s=0.0, forward_s=0.0) for t in small_trace.tensors[::-1]),
        model="Small",
        plan=found.plan,
        step_s=(9.0, 8.0, 7.0, 6.0, 5.0),
        stages=SETTLED,
        ranks=(rank(FAST, FAST), rank(SLOW, host="b")),
    )


def test_an_iteration_is_that_of_the_rank_that_computes_longest(training, found):
    run = run_of(training)
    (row,) = run.results.rows
    assert (row.trace, row.runtime, row.messages) == ("small", "gradweave", 1)
    assert (row.workers, row.nodes, row.ranks_per_node, row.rate) == (2, 2, 1, None)
    assert (row.iteration_s, row.compute_s, row.exposed_s) == (5.0, 4.0, 1.0)
    assert row.repeats_s == (5.0,)
    assert row.predicted_s == found.predicted.iteration_s
    assert row.prediction_error == found.predicted.iteration_s / 5.0 - 1
    assert (row.speedup, row.correct) == (None, None)
    assert run.steps.phases == (FAST, SLOW)
    assert run.steps.step_s == training.step_s
    assert (run.trace, run.network) == (found.trace, found.network)
    assert run.plans == {"gradweave": found.plan}
    assert run.predicted == {"gradweave": found.predicted}
    assert run.measured == {}


def test_phases_are_medians(training):
    slower = replace(FAST, backward_s=20.0)
    run = run_of(replace(training, ranks=(rank(FAST, slower, FAST),)))
    assert run.steps.phases == (FAST,)


def test_without_phases_an_iteration_is_a_settled_step(training):
    (row,) = run_of(replace(training, ranks=(rank(), rank()))).results.rows
    assert (row.iteration_s, row.repeats_s) == (5.5, (6.0, 5.0))
    assert (row.compute_s, row.exposed_s) == (None, None)
    assert (row.nodes, row.ranks_per_node) == (1, 2)


def test_hosts_may_have_different_numbers_of_ranks(training):
    ranks = (rank(FAST), rank(FAST), rank(FAST, host="b"))
    (row,) = run_of(replace(training, ranks=ranks)).results.rows
    assert (row.workers, row.nodes, row.ranks_per_node) == (3, 2, None)


def test_the_account_is_of_what_was_found(training):
    account = run_of(training).account
    assert (account.stage, account.gain, account.explanation) == ("settled", 2.0, "All is well.")
    before, trial = account.trials
    assert (before.planner, before.is_chosen, before.is_baseline) == ("wfbp", False, True)
    assert (trial.planner, trial.messages, trial.rounds_s) == ("single", 1, (2.0,))
    assert (trial.is_chosen, trial.is_baseline) == (True, False)


def test_an_unrecorded_training_is_estimated(training):
    """Declared are a, b and c, of 250, 1 and 100 elements; backward turns that round."""
    unrecorded = replace(training, findings=Findings(stage=Stage.SETTLED, note="why not"))
    run = run_of(unrecorded)
    assert run.trace.origin == "estimated"
    assert [tensor.name for tensor in run.trace.tensors] == ["c", "b", "a"]
    assert run.trace.backward_s == pytest.approx(SLOW.backward_s)
    assert run.trace.forward_s == pytest.approx(SLOW.forward_s)
    assert run.trace.tensors[0].ready_s == pytest.approx(SLOW.backward_s * 100 / 351)
    assert (run.network, run.predicted) == (None, {})
    (row,) = run.results.rows
    assert (row.predicted_s, row.prediction_error) == (None, None)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"step_s": ()}, "no step was seen to end"),
        ({"findings": Findings(), "ranks": (rank(),)}, "no step was timed from its beginning"),
    ],
)
def test_nothing_to_keep_yet(training, change, complaint):
    with pytest.raises(RequestError, match=complaint):
        run_of(replace(training, **change))


def test_another_order_than_the_recorded_one(training, linked_network):
    """torch may send gradients in another order than that in which they came."""
    plan = unplanned([["a"], ["c", "b"]], Travel("ring"))
    run = run_of(replace(training, plan=plan))
    assert [(t.name, t.ready_s) for t in run.trace.tensors] == [("a", 3.0), ("c", 3.0), ("b", 3.0)]
    assert run.predicted["gradweave"] == simulate(run.trace, plan, linked_network, workers=2)


def test_another_model_than_the_recorded_one(training):
    with pytest.raises(PlanMismatch, match="other gradients than were recorded"):
        run_of(replace(training, plan=unplanned([["c", "a"]], Travel("ring"))))


def noted(*messages):
    spans = [
        Span(lane="forward", label="forward", start_s=0.0, end_s=1.0, tensors=()),
        Span(lane="backward", label="backward", start_s=1.0, end_s=2.0, tensors=()),
    ]
    spans += [
        Span(lane="communication", label=label, start_s=1.0, end_s=2.0, tensors=names, nbytes=8)
        for label, names in messages
    ]
    return Timeline(spans=tuple(spans))


def test_parameters_without_elements_are_left_out(training, found):
    """They are in no trace, and travel with others, or in a bucket of their own."""
    plan = replace(
        found.plan,
        buckets=(
            Bucket(tensors=("c", "empty", "b", "a"), collective="ring"),
            Bucket(tensors=("empty too",), collective="ring"),
        ),
    )
    timeline = noted(("all-reduce 1", ("c", "empty", "b", "a")), ("all-reduce 2", ("empty too",)))
    run = run_of(replace(training, plan=plan, timelines=(timeline, timeline)))
    assert run.plans["gradweave"].buckets == found.plan.buckets
    (measured, _) = run.measured["gradweave"]
    assert [span.tensors for span in measured.spans] == [(), (), ("c", "b", "a")]


def test_a_network_is_learnt_from_the_messages_of_the_last_step(training, found):
    known = replace(found, network=None, predicted=None)
    timelines = (noted(("all-reduce 1", ("c", "b", "a"))),) * 2
    run = run_of(replace(training, findings=known, timelines=timelines))
    assert run.network.source == "learnt from 1 messages on 2 ranks"
    assert run.network.collectives == ("ring",)
    assert run.predicted["gradweave"].iteration_s > run.trace.compute_s


def test_one_worker_has_no_network(training, found):
    known = replace(found, network=None, predicted=None)
    alone = replace(training, findings=known, ranks=(rank(FAST),), timelines=(noted(),))
    run = run_of(alone)
    assert (run.network, run.predicted) == (None, {})
    assert len(run.measured["gradweave"]) == 1


def test_messages_of_both_passes_are_told_apart(training, found):
    plan = Plan(planner="x", buckets=found.plan.buckets, passes="both")
    names = ("c", "b", "a")
    timelines = (noted(("all-gather 1", names), ("reduce-scatter 2", names)),) * 2
    known = replace(found, network=None, predicted=None)
    run = run_of(replace(training, plan=plan, findings=known, timelines=timelines))
    assert {cost.operation for cost in run.network.costs} == {"all-gather", "reduce-scatter"}
    assert "gradweave" in run.predicted


def test_losses_of_all_steps(training):
    (series,) = losses_of([5, 4.0, 3.0, 2.0, 1.0], training).series
    assert (series.label, series.steps) == ("gradweave", (0, 1, 2, 3, 4))
    assert series.losses == (5.0, 4.0, 3.0, 2.0, 1.0)
    assert series.wall_s == (9.0, 17.0, 24.0, 30.0, 35.0)
    assert series.stages == SETTLED


def test_losses_of_some_steps(training):
    one_stage = replace(training, stages=SETTLED[:1])
    (series,) = losses_of([(0, 5.0), [3, 2.0]], one_stage).series
    assert (series.steps, series.losses, series.wall_s) == ((0, 3), (5.0, 2.0), (9.0, 30.0))
    assert series.stages == ()


def test_losses_that_are_not_finite_are_left_out(training, caplog):
    (series,) = losses_of([5.0, float("nan"), 3.0, float("inf"), 1.0], training).series
    assert series.steps == (0, 2, 4)
    assert "2 losses that are not finite are left out" in caplog.text
    assert losses_of([float("nan")] * 5, training) is None
    assert losses_of(None, training) is None


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ([1.0, 2.0], "there are 2 and there were 5 steps; give one for each, or pairs"),
        ([(5, 1.0)], "there is one of step 5, and there were 5 steps, counted from 0"),
        ([(-1, 1.0)], "there is one of step -1"),
        ([(1, 1.0), (1, 2.0)], "steps must increase"),
        (["a", "b", "c", "d", "e"], "losses must be numbers"),
        ([(1, 2, 3)], "losses must be numbers"),
        (3.0, "losses must be numbers"),
    ],
)
def test_losses_that_do_not_fit(training, given, complaint):
    with pytest.raises(RequestError, match=complaint):
        losses_of(given, training)
