"""What happened to a wrapped model, in a few sentences."""

from collections.abc import Sequence

from gradweave._src.advice import Option, faster_with_same_batch
from gradweave._src.network import CollectiveCost, Network
from gradweave._src.plan import Plan
from gradweave._src.session.commands import (
    Command,
    FindCandidates,
    Install,
    PriceCompression,
    Probe,
    Record,
    TakeSteps,
    TimeSteps,
)
from gradweave._src.session.findings import Findings, Stage, whole_step_s
from gradweave._src.session.task import TORCHS_BUCKETS
from gradweave._src.session.trials import Trial, Visit, times_as_fast
from gradweave._src.simulation import simulate
from gradweave._src.trace import Trace
from gradweave._src.vocabulary import count_text, printable, sentence

# More would not be read.
MOST_OTHER_WAYS = 3


def explanation(
    found: Findings,
    *,
    workers: int,
    baseline: str = TORCHS_BUCKETS,
    who_is_slow: Sequence[str] = (),
) -> str:
    """Say how messages travel and why so; ``baseline`` is what travels without a plan."""
    worth = [] if found.worth is None else [str(found.worth)]
    how = _how(found, workers, baseline)
    lines = [*how, *worth, *_other_ways(found, workers), *who_is_slow]
    return "\n".join(map(printable, lines))  # plans, networks and hosts have others' names


def _how(found: Findings, workers: int, baseline: str) -> list[str]:
    """Say how messages travel, and why so."""
    waits = "" if found.waits_for is None else f"; waits for {found.waits_for}"
    if found.is_whole:
        unknown = [] if found.note is None else [f"Whether that pays is unknown: {found.note}."]
        if found.stage is not Stage.SETTLED:
            unknown = [f"Whether that pays is not known yet: {found.stage}{waits}."]
        return ["The whole model travels as one sparse message.", *unknown]
    plan = found.plan
    if plan is not None and found.stage is Stage.WARMING_UP:
        until = "until the density is the last one"
        return [f"{_buckets(plan)}, planned by {plan.planner}, {until}; step {found.steps}{waits}."]
    if found.stage is not Stage.SETTLED:
        return _so_far(found, workers, baseline)
    if plan is None:
        return [f"{sentence(baseline)} stay: {found.note}."]
    if found.trace is None or found.network is None or not found.trials:
        how = "as given" if found.is_given else f"planned by {plan.planner}"
        since = ", remembered from an earlier run" if found.is_remembered else ""
        return [f"{_buckets(plan)}, {how}{since}."]
    return [
        _measured(found, found.trace, workers),
        *_tried(found, plan, baseline),
        *_gain(found.trials, plan, found.trace, found.network, workers=workers, baseline=baseline),
        *_kept(found, baseline),
        *_cost(found),
    ]


_WAITED_FOR: dict[type[Command], str] = {
    FindCandidates: "plans to be computed",
    TakeSteps: "the next density",
    PriceCompression: "the price of compression",
    Install: "other buckets",
}


def waiting_for(command: Command) -> str:
    """Say what a session waits for after it has asked for this command."""
    match command:
        case Record():
            return f"{command.steps} steps in which it is noted when gradients are ready"
        case Probe():
            sizes = ", ".join(f"{size:,}" for size in command.sizes_bytes)
            return f"messages of {sizes} bytes beside the training"
        case TimeSteps():
            return f"{command.settling_steps + command.steps} steps to be timed"
        case _:
            return _WAITED_FOR[type(command)]


def planning_ended(found: Findings, *, baseline: str) -> str:
    """Say in a line for the log what was chosen, what it gains and what planning has cost."""
    assert found.plan is not None
    chosen = f"{_buckets(found.plan)}, planned by {found.plan.planner}"
    gain = "" if found.gain is None else f", {found.gain:.2f}x as fast as {baseline}"
    why = "" if found.note is None else f" ({found.note})"
    return f"planning ended: {chosen}{gain}{why}; {_taken(found)}"


def _so_far(found: Findings, workers: int, baseline: str) -> list[str]:
    step = "" if found.most_steps is None else f", step {found.steps} of at most {found.most_steps}"
    waits = "" if found.waits_for is None else f"; waits for {found.waits_for}"
    lines = [f"No plan yet: {found.stage}{step}{waits}."]
    if found.trace is not None:
        lines.append(_measured(found, found.trace, workers))
    if found.network is not None:
        lines.append(_learnt(found.network, workers))
    if found.baseline_step_s is not None:
        lines.append(f"A step takes {found.baseline_step_s * 1e3:.1f} ms with {baseline}.")
    return lines


def _learnt(network: Network, workers: int) -> str:
    def said(entry: CollectiveCost) -> str:
        line = entry.cost.line(entry.cost.known_to_bytes)
        return (
            f"{entry.operation} by {entry.collective} {line.startup_s * 1e3:.1f} ms and "
            f"{line.s_per_byte * 1e9:.1f} ms per MB"
        )

    prices = "; ".join(said(entry) for entry in network.costs if entry.workers == workers)
    return f"Messages cost: {prices}."


def _taken(found: Findings) -> str:
    if found.planning_s is None or found.planning_steps is None:
        return "nothing was planned"
    taken = f"planning took {found.planning_steps} steps, {found.planning_s:.1f} s"
    if found.regret_steps is None:
        return taken
    return f"{taken}, and cost the time of {max(0.0, found.regret_steps):.1f} more steps"


def _cost(found: Findings) -> list[str]:
    return [] if found.planning_s is None else [f"{_taken(found).capitalize()}."]


def _kept(found: Findings, baseline: str) -> list[str]:
    return [] if found.note is None else [f"{sentence(baseline)} stay: {found.note}."]


def _other_ways(found: Findings, workers: int) -> list[str]:
    """Say what would be faster by what is known of the network, and how to switch that on.

    Nothing is said where a verdict on compression has said it already, nor beside both passes,
    which is such a way itself.
    """
    trace, network, now = found.trace, found.network, found.predicted
    if found.stage is not Stage.SETTLED or trace is None or network is None or now is None:
        return []
    if found.worth is not None or (found.plan is not None and found.plan.passes == "both"):
        return []
    faster = faster_with_same_batch(
        trace,
        network,
        workers=workers,
        than_s=whole_step_s(found, now.iteration_s),
        passes=found.passes,
        roundings=found.may_round_to,
    )
    if not faster:
        return []
    said = ", ".join(map(_said, faster[:MOST_OTHER_WAYS]))
    unsure = "a format that was not measured is priced by its bytes alone"
    how = f"For {faster[0].name} write {faster[0].code}."
    return [f"Not tried, but predicted to be faster: {said}; {unsure}. {how}"]


def _said(option: Option) -> str:
    return f"{option.name} {option.step_s * 1e3:.1f} ms ({option.gain:.2f}x; {option.changes})"


def _measured(found: Findings, trace: Trace, workers: int) -> str:
    each = "" if found.passes == 1 else f" in each of {found.passes} passes"
    return (
        f"Measured: {len(trace.tensors)} gradients, {trace.nbytes.sum() / 1e6:.1f} MB; "
        f"forward {trace.forward_s * 1e3:.1f} ms, backward {trace.backward_s * 1e3:.1f} ms{each}; "
        f"{workers} workers."
    )


def _tried(found: Findings, plan: Plan, baseline: str) -> list[str]:
    lines = []
    of = "an iteration" if found.passes == 1 else f"a step of {found.passes} passes"
    for trial in found.trials:
        tried = trial.candidate.plan
        name = baseline if trial.candidate.is_baseline else tried.planner
        lines.append(
            f"Tried: {name}, {_buckets(tried)}: predicted "
            f"{whole_step_s(found, trial.candidate.predicted_s) * 1e3:.1f} ms {of}, a step took "
            f"{_taken_in(trial)}{' (chosen)' if tried == plan else ''}."
        )
    return lines


def _taken_in(trial: Trial) -> str:
    """Say what a step took, as plans are compared, and what it took in each of several turns.

    Turns in which messages were noted count only where there are no others.
    """
    noted, plain = (
        [visit for visit in trial.visits if visit.is_noted is is_noted]
        for is_noted in (True, False)
    )
    taken = f"{trial.step_s * 1e3:.1f} ms" + ("" if plain else " while messages were noted")
    if len(trial.visits) == 1:
        return taken
    count = len(plain or noted)
    turns = f"{_steps_of(plain or noted)} in {count_text(count, 'turn')}"
    if noted and plain:
        turns += f"; {_steps_of(noted)} while messages were noted"
    return f"{taken} ({turns})"


def _steps_of(visits: Sequence[Visit]) -> str:
    return ", ".join(f"{visit.step_s * 1e3:.1f}" for visit in visits)


def _gain(
    trials: Sequence[Trial],
    plan: Plan,
    trace: Trace,
    network: Network,
    *,
    workers: int,
    baseline: str,
) -> list[str]:
    unplanned = next(trial for trial in trials if trial.candidate.is_baseline)
    chosen = next(trial for trial in trials if trial.candidate.plan == plan)
    before_s, now_s = (
        simulate(trace, one, network, workers=workers).exposed_s
        for one in (unplanned.candidate.plan, plan)
    )
    exposed = f"{before_s * 1e3:.1f} ms with {baseline}"
    if chosen is unplanned:
        return [f"A step waits for messages, predicted: {exposed}."]
    ratio = times_as_fast(chosen, unplanned)
    exposed += f", {now_s * 1e3:.1f} ms now"
    return [
        f"Chosen: {_buckets(plan)}, planned by {plan.planner}.",
        f"A step is {ratio:.2f}x as fast as with {baseline}.",
        f"A step waits for messages, predicted: {exposed}.",
    ]


def _buckets(plan: Plan) -> str:
    ways = sorted({str(bucket.travel) for bucket in plan.buckets})
    return f"{count_text(len(plan.buckets), 'message')} by {', '.join(ways)}"
