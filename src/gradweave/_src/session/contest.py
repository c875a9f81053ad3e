"""Plans in real training steps: the most promising challenge the one in use, one by one.

Parts of a session: generators that yield commands, are sent replies and return what they found.
"""

from collections.abc import Generator
from typing import Any

from gradweave._src.compression import KEEPS_ERRORS, Compression
from gradweave._src.plan import Plan
from gradweave._src.session.candidates import Candidate
from gradweave._src.session.commands import (
    Candidates,
    Command,
    FindCandidates,
    Install,
    SimpleBuckets,
    StepsTimed,
    TakeSteps,
    TimeSteps,
)
from gradweave._src.session.gains import expected_s, is_worth_trying, why_nothing_is_gained
from gradweave._src.session.knowledge import Knowledge
from gradweave._src.session.task import AGREEING_STEPS, SETTLING_STEPS
from gradweave._src.session.trials import (
    CLEAR_AT_ONCE,
    CLEARLY_WORSE,
    Outcome,
    Trial,
    Visit,
    outcome,
    times_as_fast,
    with_visit,
)

# How many plans may be tried against the one in use.
MOST_CHALLENGERS = 3
# A chosen plan is timed for so many steps, as it will run.
CONFIRMING_STEPS = 6
STEPS_TO_CONFIRM = SETTLING_STEPS + CONFIRMING_STEPS + AGREEING_STEPS
# One more step after 8-bit plans, in which their carried errors are added back.
STEPS_TO_PAY = 1
# A gain as large as this does not come from the moment at which the baseline ran. A plan that gains
# less has to run in turn with the baseline again, without a hook that notes messages.
CLEAR_GAIN = 0.15

Contest = Generator[Command, Any, Trial]


def baseline_visit(known: Knowledge) -> Generator[Command, Any, Visit]:
    """Time steps with what the wrapper began with, and note what its messages tell."""
    order = tuple(tensor.name for tensor in known.trace.tensors)
    yield Install(SimpleBuckets.ORIGINAL, order=order, notes_messages=True)
    timed: StepsTimed = yield TimeSteps(known.task.visit_steps, SETTLING_STEPS)
    known.samples += timed.samples
    return Visit(steps_s=timed.steps_s, is_noted=True)


def fastest(
    known: Knowledge,
    candidates: tuple[Candidate, ...],
    visit: Visit,
    compression: Compression | None,
) -> Contest:
    """Let the most promising plans challenge the one in use, and return the one that stays.

    ``visit`` is what the plan in use has taken so far. The network is learnt anew from each
    challenger's messages before the next challenger is chosen.
    """
    champion = _note(known, Trial(candidate=candidates[-1], visits=(visit,)))
    for left in reversed(range(MOST_CHALLENGERS)):
        challenger = _challenger(known, candidates, champion)
        if challenger is None or not _has_time_for(known, visits=1):
            break
        champion = yield from _challenged(known, champion, Trial(candidate=challenger))
        if compression is None:
            known.note(network=known.learnt_network())
        if left:
            assert known.findings.network is not None
            network = known.findings.network
            found: Candidates = yield FindCandidates(known.trace, network, compression)
            candidates = found.candidates
    if not champion.candidate.is_baseline:
        champion = yield from _confirmed(known, champion)
    owes = any(_keeps_errors(trial.candidate.plan) for trial in known.findings.trials)
    if owes and not _keeps_errors(champion.candidate.plan):
        yield TakeSteps(STEPS_TO_PAY)
    known.note(baseline_step_s=_baseline(known).step_s, step_s=champion.step_s)
    if champion.candidate.is_baseline:
        known.note(note=_why_nothing(known, candidates, champion))
    return champion


def _challenger(
    known: Knowledge, candidates: tuple[Candidate, ...], champion: Trial
) -> Candidate | None:
    """Return the most promising untried candidate that could win by enough to matter."""
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


def _challenged(
    known: Knowledge, champion: Trial, challenger: Trial, *, is_noted: bool = True
) -> Contest:
    """Run both in turn until one of them has clearly won, which stays, or time is up.

    ``is_noted`` says that it is noted what their messages took.
    """
    # The champion's last visit came just before the challenger's first one here. Earlier visits of
    # both were at another time, so they are not compared.
    challenger_from, champion_from = len(challenger.visits), len(champion.visits) - 1
    while True:
        hopeless_s = (1 + CLEARLY_WORSE) * champion.rounds_s[-1]
        challenger = yield from _visited(
            known, challenger, is_noted=is_noted, hopeless_s=hopeless_s
        )
        if min(challenger.visits[-1].steps_s) > hopeless_s:
            result = Outcome.NOT_FASTER
        else:
            result = outcome(
                challenger.rounds_s[challenger_from:],
                champion.rounds_s[champion_from:],
                is_last=not _has_time_for(known, visits=2),
            )
        if result is not Outcome.CLOSE:
            break
        champion = yield from _visited(known, champion, is_noted=is_noted)
    if result is Outcome.FASTER:
        return challenger
    yield Install(champion.candidate.plan, notes_messages=is_noted)
    return champion


def _confirmed(known: Knowledge, chosen: Trial) -> Contest:
    """Run the chosen plan as it will run, without a hook that notes its messages.

    Unless it clearly gains, the baseline runs like that, too, and both in turn.
    """
    chosen = yield from _visited(known, chosen, is_noted=False, steps=CONFIRMING_STEPS)
    baseline = _baseline(known)
    gain = 1 - 1 / times_as_fast(chosen, baseline)
    if gain >= CLEAR_GAIN:
        return chosen
    if not known.has_time_for(2 * known.task.steps_per_visit):
        return chosen if gain >= CLEAR_AT_ONCE else baseline
    baseline = yield from _visited(known, baseline, is_noted=False)
    winner = yield from _challenged(known, baseline, chosen, is_noted=False)
    # Steps vary, so all visits count, and the gain that is reported is the one that was measured.
    baseline = _baseline(known)
    return winner if winner.step_s <= baseline.step_s else baseline


def _keeps_errors(plan: Plan) -> bool:
    """Return whether the plan carries over to the next step what rounding drops."""
    compressions = [bucket.compression for bucket in plan.buckets if bucket.compression]
    return any(compression.rounding in KEEPS_ERRORS for compression in compressions)


def _has_time_for(known: Knowledge, *, visits: int) -> bool:
    """Return whether there is time for so many visits, one more search and a confirmation."""
    afterwards = AGREEING_STEPS + STEPS_TO_CONFIRM + STEPS_TO_PAY
    return known.has_time_for(visits * known.task.steps_per_visit + afterwards)


def _visited(
    known: Knowledge,
    trial: Trial,
    *,
    is_noted: bool,
    hopeless_s: float | None = None,
    steps: int | None = None,
) -> Contest:
    """Return the trial with one more visit, which may end early where it takes ``hopeless_s``."""
    yield Install(trial.candidate.plan, notes_messages=is_noted)
    timed: StepsTimed = yield TimeSteps(steps or known.task.visit_steps, SETTLING_STEPS, hopeless_s)
    known.samples += timed.samples
    return _note(known, with_visit(trial, Visit(steps_s=timed.steps_s, is_noted=is_noted)))


def _note(known: Knowledge, trial: Trial) -> Trial:
    """Put a trial among the findings, in place of an earlier one of the same candidate."""
    trials = {one.candidate: one for one in known.findings.trials}
    trials[trial.candidate] = trial
    known.note(trials=tuple(trials.values()))
    return trial


def _baseline(known: Knowledge) -> Trial:
    return next(trial for trial in known.findings.trials if trial.candidate.is_baseline)


def _why_nothing(known: Knowledge, candidates: tuple[Candidate, ...], baseline: Trial) -> str:
    if len(known.findings.trials) > 1:
        return f"turn by turn, nothing that was tried is clearly faster than {known.task.baseline}"
    if not _has_time_for(known, visits=1):
        return "the steps that planning may take were over before anything could be tried"
    best = min(candidates, key=lambda one: one.predicted_s)
    timeline = known.predicted(baseline.candidate.plan)
    return why_nothing_is_gained(
        timeline, known.trace, step_s=baseline.step_s, best_s=best.predicted_s
    )
