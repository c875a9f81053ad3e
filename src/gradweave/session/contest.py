"""Plans in real training steps: the most promising challenge what is sent, one by one.

Parts of a session: generators that yield commands, are sent replies and return what they found.
"""

from collections.abc import Generator
from typing import Any

from msgspec.structs import replace

from gradweave.compression import Compression
from gradweave.session.candidates import Candidate
from gradweave.session.commands import (
    Candidates,
    Command,
    FindCandidates,
    Install,
    SimpleBuckets,
    StepsTimed,
    TimeSteps,
)
from gradweave.session.gains import expected_s, is_worth_trying, why_nothing_is_gained
from gradweave.session.knowledge import Knowledge
from gradweave.session.task import AGREEING_STEPS, SETTLING_STEPS
from gradweave.session.trials import CLEARLY_WORSE, Outcome, Trial, outcome

# How many plans may be tried against what is sent.
MOST_CHALLENGERS = 3
# Of a chosen plan, before it is called settled.
CONFIRMING_STEPS = 6
STEPS_TO_CONFIRM = SETTLING_STEPS + CONFIRMING_STEPS + AGREEING_STEPS

StepsOfVisit = Generator[Command, Any, tuple[float, ...]]
Contest = Generator[Command, Any, Trial]


def baseline_steps(known: Knowledge) -> StepsOfVisit:
    """What steps take with what the wrapper began with, and what its messages tell."""
    order = tuple(tensor.name for tensor in known.trace.tensors)
    yield Install(SimpleBuckets.ORIGINAL, order=order, notes_messages=True)
    return (yield from _timed(known, None))


def fastest(
    known: Knowledge,
    candidates: tuple[Candidate, ...],
    baseline_s: tuple[float, ...],
    compression: Compression | None,
) -> Contest:
    """Who stays when the most promising have challenged what is sent.

    What a challenger's messages tell is learnt before the next one is chosen.
    """
    champion = _note(known, Trial(candidate=candidates[-1], visits_s=(baseline_s,)))
    for _ in range(MOST_CHALLENGERS):
        challenger = _challenger(known, candidates, champion)
        if challenger is None or not _has_time_for(known, visits=1):
            break
        champion = yield from _challenged(known, champion, Trial(candidate=challenger, visits_s=()))
        if compression is None:
            known.note(network=known.learnt_network())
        assert known.findings.network is not None
        found: Candidates = yield FindCandidates(known.trace, known.findings.network, compression)
        candidates = found.candidates
    if not champion.candidate.is_baseline:
        champion = yield from _confirmed(known, champion)
    if champion.candidate.is_baseline:
        known.note(note=_why_nothing(known, candidates, champion))
    return champion


def _challenger(
    known: Knowledge, candidates: tuple[Candidate, ...], champion: Trial
) -> Candidate | None:
    """The most promising that was not tried, and could win by enough to matter."""
    tried = {trial.candidate.plan.buckets for trial in known.findings.trials}
    untried = [one for one in candidates if one.plan.buckets not in tried]
    is_asked_for = known.task.planner != "optimal" and len(tried) == 1
    if is_asked_for and candidates[0] in untried:
        return candidates[0]
    predicted_s = known.predicted(champion.candidate.plan).iteration_s
    best = min(untried, key=lambda one: one.predicted_s, default=None)
    if best is None or not is_worth_trying(
        expected_s(best.predicted_s, champion.step_s, predicted_s), champion.step_s
    ):
        return None
    return best


def _challenged(known: Knowledge, champion: Trial, challenger: Trial) -> Contest:
    """Both run in turn until one of them has clearly won, which stays, or time is up."""
    # The champion has just run; what both took before that is of another time.
    first, firsts = len(challenger.visits_s), len(champion.visits_s) - 1
    hopeless_s = (1 + CLEARLY_WORSE) * champion.rounds_s[-1]
    while True:
        challenger = yield from _visited(known, challenger, hopeless_s)
        if min(challenger.visits_s[-1]) > hopeless_s:
            result = Outcome.NOT_FASTER
        else:
            result = outcome(
                challenger.rounds_s[first:],
                champion.rounds_s[firsts:],
                is_last=not _has_time_for(known, visits=2),
            )
        if result is not Outcome.CLOSE:
            break
        champion = yield from _visited(known, champion, None)
    if result is Outcome.FASTER:
        return challenger
    yield Install(champion.candidate.plan, notes_messages=True)
    return champion


def _confirmed(known: Knowledge, chosen: Trial) -> Contest:
    """The chosen plan as it will run; where its steps are no gain after all, both run again."""
    yield Install(chosen.candidate.plan)
    timed: StepsTimed = yield TimeSteps(CONFIRMING_STEPS, SETTLING_STEPS)
    chosen = _note(known, replace(chosen, visits_s=(*chosen.visits_s, timed.steps_s)))
    baseline = _baseline(known)
    is_gain = max(chosen.step_s, chosen.rounds_s[-1]) <= baseline.step_s
    if not is_gain and known.has_time_for(2 * known.task.steps_per_visit):
        baseline = yield from _visited(known, baseline, None)
        chosen = yield from _challenged(known, baseline, chosen)
    # By all visits: steps vary, and what is promised is what was measured.
    baseline = _baseline(known)
    return chosen if chosen.step_s <= baseline.step_s else baseline


def _has_time_for(known: Knowledge, *, visits: int) -> bool:
    """And to look for others and confirm what is chosen after them."""
    afterwards = AGREEING_STEPS + STEPS_TO_CONFIRM
    return known.has_time_for(visits * known.task.steps_per_visit + afterwards)


def _visited(known: Knowledge, trial: Trial, hopeless_s: float | None) -> Contest:
    yield Install(trial.candidate.plan, notes_messages=True)
    steps_s = yield from _timed(known, hopeless_s)
    return _note(known, replace(trial, visits_s=(*trial.visits_s, steps_s)))


def _timed(known: Knowledge, hopeless_s: float | None) -> StepsOfVisit:
    timed: StepsTimed = yield TimeSteps(known.task.visit_steps, SETTLING_STEPS, hopeless_s)
    known.samples += timed.samples
    return timed.steps_s


def _note(known: Knowledge, trial: Trial) -> Trial:
    """In the place of what was known of the candidate."""
    trials = {one.candidate: one for one in known.findings.trials}
    trials[trial.candidate] = trial
    known.note(trials=tuple(trials.values()))
    return trial


def _baseline(known: Knowledge) -> Trial:
    return next(trial for trial in known.findings.trials if trial.candidate.is_baseline)


def _why_nothing(known: Knowledge, candidates: tuple[Candidate, ...], baseline: Trial) -> str:
    if len(known.findings.trials) > 1:
        return f"nothing that was tried is faster than {known.task.baseline}"
    if not _has_time_for(known, visits=1):
        return "the steps that planning may take were over before anything could be tried"
    best = min(candidates, key=lambda one: one.predicted_s)
    timeline = known.predicted(baseline.candidate.plan)
    return why_nothing_is_gained(
        timeline, known.trace, step_s=baseline.step_s, best_s=best.predicted_s
    )
