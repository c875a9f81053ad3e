"""What a run comes to, in sentences: the page says these before it shows anything."""

from collections.abc import Mapping, Sequence

from gradweave._src.compression import DEFAULT_DENSITY, EXCHANGE_NAMES
from gradweave._src.report.folders import Folder
from gradweave._src.report.runtimes import BASELINE, OURS, is_lossy
from gradweave._src.results import Losses, LossSeries, Result
from gradweave._src.runs import Run
from gradweave._src.session.learning import LEARNT
from gradweave._src.travel import Travel
from gradweave._src.vocabulary import count_text, milliseconds

# Medians that differ by less count as equal, for machines do something else besides.
EQUALLY_FAST = 0.02


def headline(run: Run) -> str:
    """Say what Gradweave by itself gains, or what was fastest, if it does not change training."""
    rows = [row for row in run.results.rows if not _is_lossy(row, run)] or [*run.results.rows]
    fastest = min(rows, key=lambda row: row.iteration_s)
    ours = next((row for row in rows if row.runtime == OURS), None)
    named = ours or fastest
    was = "took" if ours is not None or len(rows) == 1 else "was the fastest, with"
    said = (
        f"{named.runtime} {was} {milliseconds(named.iteration_s)} ms an iteration (median)"
        f"{_waiting(named)}{_compared(named)}."
    )
    if fastest.iteration_s < (1 - EQUALLY_FAST) * named.iteration_s:
        said += f" {fastest.runtime} took {milliseconds(fastest.iteration_s)} ms."
    return said


def side_by_side(trainings: Mapping[str, Run]) -> str:
    """Say how many times as fast as the slowest the fastest training is, by their names.

    Trainings that end with the same messages differ by what the machines did besides.
    """
    taken_s = {name: run.results.rows[0].iteration_s for name, run in trainings.items()}
    fastest, *_, slowest = sorted(taken_s, key=lambda name: taken_s[name])
    messages = [_messages(trainings[name]) for name in (fastest, slowest)]
    if messages[0] is not None and messages[0] == messages[1]:
        return (
            f"{fastest} and {slowest} send the same messages, so something else makes the "
            f"difference: {milliseconds(taken_s[fastest])} and {milliseconds(taken_s[slowest])} ms "
            "an iteration (medians)."
        )
    return (
        f"{fastest} is {taken_s[slowest] / taken_s[fastest]:.2f}x as fast as {slowest}: "
        f"{milliseconds(taken_s[fastest])} instead of {milliseconds(taken_s[slowest])} ms an "
        "iteration (medians). They ran apart, so some of that may be the machine's."
    )


def _messages(run: Run) -> list[tuple[frozenset[str], Travel]] | None:
    """Return what travels together in a training, and how; None where that is not known."""
    plan = run.plans.get(run.results.rows[0].runtime)
    if plan is None:
        return None
    return [(frozenset(bucket.tensors), bucket.travel) for bucket in plan.buckets]


def _waiting(row: Result) -> str:
    if row.exposed_s is None:
        return ""
    return f", {row.exposed_s / row.iteration_s:.0%} of it waiting for the network"


def _compared(row: Result) -> str:
    if row.speedup is None or row.runtime == BASELINE:
        return ""
    return f": {row.speedup:.2f} times as fast as {BASELINE}"


def _is_lossy(row: Result, run: Run) -> bool:
    return is_lossy(row.runtime, run.plans.get(row.runtime))


def about_lossy(folder: Folder) -> str | None:
    """Say how fast runtimes that change the training are, and what they learnt.

    Return None if there are none.
    """
    rows = [row for row in folder.run.results.rows if _is_lossy(row, folder.run)]
    if not rows:
        return None
    said = "; ".join(
        f"{row.runtime}, {milliseconds(row.iteration_s)} ms{_compared(row)}, "
        f"{_learnt(row.runtime, folder.losses)}"
        for row in rows
    )
    change = "it changes" if len(rows) == 1 else "they change"
    return f"Apart, because {change} what is learnt: {said}."


def _learnt(runtime: str, losses: Losses | None) -> str:
    series = () if losses is None else losses.series
    lossy = next((one for one in series if one.label in _labels(runtime)), None)
    exact = next((one for one in series if not is_lossy(one.label)), None)
    if lossy is None:
        return "whose loss is not known here"
    beside = "" if exact is None else f" beside {_last_loss(exact)} of {exact.label}"
    return f"whose loss after {count_text(lossy.steps[-1], 'step')} is {_last_loss(lossy)}{beside}"


def _labels(runtime: str) -> set[str]:
    """Return all that a runtime is called: ``gtopk`` is ``gtopk:0.001``."""
    if runtime not in EXCHANGE_NAMES:
        return {runtime}
    return {runtime, f"{runtime}:{DEFAULT_DENSITY:g}"}


def _last_loss(series: LossSeries) -> str:
    return f"{series.losses[-1]:.4f}"


def about(folder: Folder) -> str:
    """Say what was trained, and where."""
    trace, network, row = folder.run.trace, folder.run.network, folder.run.results.rows[0]
    priced = "What messages cost is not known"
    if network is not None:
        priced = f"Network {network.name} ({network.source})"
    return (
        f"{trace.name}: {count_text(len(trace.tensors), 'gradient tensor')}, "
        f"{trace.nbytes.sum() / 1e6:,.1f} MB; times {trace.origin} ({trace.source}). "
        f"{_where(row)}. {priced}."
    )


def about_learnt(folders: Sequence[Folder]) -> str | None:
    """Say for which runs training alone has priced messages; return None if for none."""
    learnt = [
        folder.name
        for folder in folders
        if folder.run.network is not None and folder.run.network.name == LEARNT
    ]
    if not learnt:
        return None
    of = "These" if len(learnt) == len(folders) else f"Of {', '.join(learnt)} these"
    return f"{of} start from what training's own messages have shown, which is rough."


def _where(row: Result) -> str:
    rate = "" if row.rate is None else f", links of {row.rate}"
    if row.nodes is None or row.ranks_per_node is None:
        return f"{count_text(row.workers, 'worker')}{rate}"
    nodes, each = count_text(row.nodes, "node"), count_text(row.ranks_per_node, "worker")
    return f"{nodes} with {each} each{rate}"
