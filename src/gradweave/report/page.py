"""One page to look at runs with: everything in it, nothing loaded.

The charts are drawn here, by Vega-Lite; timelines, plans and what-if in the browser, by the scripts
in assets/. A content security policy in the page forbids every request and every other script.
"""

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from importlib.resources import files as package_files
from typing import Any

import jinja2
from markupsafe import Markup
from msgspec import Struct
from msgspec.structs import replace

from gradweave.advice import Option, advise
from gradweave.costs import flat
from gradweave.errors import UnknownCost
from gradweave.network import Network
from gradweave.phases import PHASES, Phases
from gradweave.report import charts
from gradweave.report.document import WIRES, document, known_link
from gradweave.report.folders import Folder
from gradweave.results import Losses, Result
from gradweave.simulation import PAPER_WORKERS, Outcome, cases, run
from gradweave.vocabulary import parse_spec

# In this order: each uses what the ones before it define.
SCRIPTS = (
    "planner.js",
    "format.js",
    "explore.js",
    "gantt.js",
    "skyline.js",
    "what_if.js",
    "main.js",
)
BASELINE = "torch-ddp"
SEVERAL = 2

# What a runtime does, for people who have not read the papers.
EXPLAINED = {
    "gradweave": "Gradweave's wrapper, which finds its buckets while the model trains",
    "torch-ddp": "torch as it comes: a first bucket of 1 MiB, then of 25 MiB",
    "torch-ddp-tuned": "torch with its best bucket size, found by trying",
    "torch-fp16": "torch with its hook that rounds gradients to fp16",
    "torch-fp16-tuned": "torch with its hook for fp16 and the best bucket size for it",
    "torch-bf16": "torch with its hook that rounds gradients to bf16",
    "torch-bf16-tuned": "torch with its hook for bf16 and the best bucket size for it",
    "powersgd": "torch with its hook for PowerSGD: matrices as products of thin ones",
    "zero": "torch, and its ZeRO: each worker updates a share of the parameters and broadcasts it",
    "fsdp2": "torch's fully_shard: parameters gathered for each pass, gradients scattered",
    "naive": "each gradient by itself, after backward has ended",
    "wfbp": "each gradient by itself, as soon as it is ready",
    "single": "all gradients in one message",
    "fixed": "buckets of one size",
    "ddp": "buckets as torch makes them",
    "inductor": "buckets as torch's compiler makes them: as many gradients as fit into 2000 MiB",
    "mgwfbp": "merged by the rule of the MG-WFBP papers",
    "optimal": "merged by the exact planner",
    "sharded": "gradients scattered beside backward, parameters gathered beside the next forward",
    "topk": "only the largest gradients of each worker",
    "gtopk": "only the largest gradients of all workers",
    "gtopk-tree": "only the largest gradients of all workers, by the gTop-k paper's tree",
    "gtopk-tree-lossy": "the gTop-k paper's tree, with what it loses",
    "gtopk-all-gather": "only the largest gradients of all workers, found by all of them",
}


class Chart(Struct, frozen=True, kw_only=True):
    """The same chart for a screen and for a telephone."""

    wide: Markup
    narrow: Markup


def make_page(folders: Sequence[Folder]) -> str:
    style, script = _asset("page.css"), "\n".join(_asset(name) for name in SCRIPTS)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(_asset("page.html")).render(
        runs=[_run(folder) for folder in folders],
        compared=_compared(folders),
        wires=list(WIRES),
        data=_embedded(document(folders)),
        style=Markup(style),  # noqa: S704 our own file
        script=Markup(script),  # noqa: S704 our own files
        style_hash=_hash(style),
        script_hash=_hash(script),
    )


def _asset(name: str) -> str:
    return (package_files(__package__) / "assets" / name).read_text("utf-8")


def _hash(text: str) -> str:
    """How a content security policy names a text that may stand in the page."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _embedded(value: Any) -> Markup:
    """JSON in which nothing can end the element it stands in."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704 escaped above


def _run(folder: Folder) -> dict[str, Any]:
    rows = folder.run.results.rows
    return {
        "title": folder.name,
        "headline": _headline(rows),
        "about": _about(folder),
        "wrong": [row.runtime for row in rows if row.correct is False],
        "command": folder.run.results.command,
        "times": _chart(lambda width: charts.iteration_times(rows, width)),
        "scaling": _scaling(folder),
        "calibration": _calibration(folder),
        "losses": _losses(folder),
        "training": _training(folder),
        "can_ask": known_link(folder) is not None,
        "advice": _advice(folder),
        "compared": any(row.speedup is not None for row in rows),
        "rows": [_numbers(row) for row in rows],
        "runtimes": [
            {
                "name": row.runtime,
                "explained": _explained(row.runtime),
                "note": _note(row),
                "messages": _messages(row),
            }
            for row in rows
        ],
    }


def _chart(draw: Callable[[int], str]) -> Chart:
    """Vega-Lite escapes the text it draws."""
    return Chart(wide=Markup(draw(charts.WIDE)), narrow=Markup(draw(charts.NARROW)))  # noqa: S704


def _scaling(folder: Folder) -> Chart | None:
    """By formula on the network's links, for nothing else is known about other worker counts."""
    network, known = folder.run.network, known_link(folder)
    if network is None or known is None:
        return None
    links = network.links or flat(known.link)
    outcomes: list[Outcome] = [
        run(case).outcome
        for case in cases(
            [folder.run.trace],
            [Network(name=network.name, source=network.source, links=links)],
            workers=PAPER_WORKERS,
            planners=list(charts.PLANNERS),
            collectives=["ring"],
        )
    ]
    return _chart(lambda width: charts.scaling(outcomes, width))


def _calibration(folder: Folder) -> Chart | None:
    plans = folder.run.plans.values()
    used = {bucket.collective for plan in plans for bucket in plan.buckets}
    network, workers = folder.run.network, folder.workers
    if network is None or known_link(folder) is None:
        return None
    return _chart(lambda width: charts.calibration(network, used, workers, width))


def _losses(folder: Folder) -> list[Chart]:
    losses = folder.losses
    if losses is None:
        return []
    losses = charts.thinned(losses)
    return [_chart(partial(charts.loss_curves, losses, over)) for over in ("steps", "wall_s")]


def _advice(folder: Folder) -> dict[str, Any] | None:
    """What else could be done, and why the first is first; or why nothing is known about that."""
    network = folder.run.network
    if network is None:
        return None
    try:
        advice = advise(folder.run.trace, network, workers=folder.workers)
    except UnknownCost as error:
        return {"why": f"Nothing can be compared: {error}.", "options": [], "unpriced": []}
    return {
        "why": advice.why,
        "options": [_advised(option) for option in advice.options],
        "unpriced": advice.unpriced,
    }


def _advised(option: Option) -> dict[str, str]:
    return {
        "name": option.name,
        "step": _ms(option.step_s),
        "samples": f"{option.samples_per_s:,.0f}",
        "gain": f"{option.gain:.2f}x",
        "memory": f"{option.memory_bytes / 1e6:,.0f}",
        "changes": option.changes,
        "code": option.code,
    }


def _headline(rows: Sequence[Result]) -> str:
    best = min(rows, key=lambda row: row.iteration_s)
    was = "was the fastest, with" if len(rows) > 1 else "took"
    took = f"{best.runtime} {was} {_ms(best.iteration_s)} ms an iteration"
    if best.exposed_s is not None:
        took += f", {best.exposed_s / best.iteration_s:.0%} of it waiting for the network"
    if best.speedup is None or best.runtime == BASELINE:
        return f"{took}."
    return f"{took}: {best.speedup:.2f} times as fast as {BASELINE}."


def _about(folder: Folder) -> str:
    trace, network, row = folder.run.trace, folder.run.network, folder.run.results.rows[0]
    link = known_link(folder)
    rate = "" if row.rate is None else f", links of {row.rate}"
    priced = "What messages cost is not known"
    if network is not None:
        priced = f"Network {network.name} ({network.source})"
    if link is not None:
        priced += f"; link for the formulas: {link.source}"
    return (
        f"{trace.name}: {len(trace.tensors)} gradient tensors, {trace.nbytes.sum() / 1e6:,.1f} MB; "
        f"times {trace.origin} ({trace.source}). {_cluster(row)}{rate}. {priced}."
    )


def _cluster(row: Result) -> str:
    if row.nodes is None or row.ranks_per_node is None:
        return _counted(row.workers, "worker")
    each = _counted(row.ranks_per_node, "worker")
    return f"{_counted(row.nodes, 'node')} with {each} each"


def _numbers(row: Result) -> dict[str, str]:
    return {
        "runtime": row.runtime,
        "measured": _ms(row.iteration_s),
        "predicted": _ms(row.predicted_s),
        "error": "" if row.prediction_error is None else f"{row.prediction_error:+.1%}",
        "exposed": _ms(row.exposed_s),
        "messages": f"{row.messages:,}",
        "speedup": "" if row.speedup is None else f"{row.speedup:.2f}x",
    }


def _note(row: Result) -> str:
    cap = "" if row.bucket_cap_mb is None else f", bucket_cap_mb {row.bucket_cap_mb:g}"
    measured = f"{_messages(row)}{cap}; median {_ms(row.iteration_s)} ms"
    if row.predicted_s is None:
        return measured
    return f"{measured}, predicted {_ms(row.predicted_s)} ms ({row.prediction_error:+.1%})"


def _explained(runtime: str) -> str:
    text = EXPLAINED.get(parse_spec(runtime).name)
    return "" if text is None else f"{text}: "


def _messages(row: Result) -> str:
    return _counted(row.messages, "message")


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:,.1f}"


def _training(folder: Folder) -> dict[str, Any] | None:
    """What a training's folder has and a benchmark's has not."""
    steps, account = folder.run.steps, folder.run.account
    if steps is None:
        return None
    return {
        "times": _chart(partial(charts.step_times, steps)),
        "phases": [_rank(rank, phases) for rank, phases in enumerate(steps.phases)],
        "explained": [] if account is None else account.explanation.splitlines(),
    }


def _rank(rank: int, phases: Phases | None) -> dict[str, str]:
    row = {"rank": str(rank), "step": "" if phases is None else _ms(phases.step_s)}
    for name in PHASES:
        row[name] = "" if phases is None else _ms(phases.seconds(name))
    return row


def _compared(folders: Sequence[Folder]) -> dict[str, Any] | None:
    """Trainings side by side, where there are several."""
    trainings = [folder for folder in folders if folder.run.steps is not None]
    if len(trainings) < SEVERAL:
        return None
    names = _apart([folder.name for folder in trainings])
    rows = [
        replace(folder.run.results.rows[0], runtime=name)
        for name, folder in zip(names, trainings, strict=True)
    ]
    fastest, *_, slowest = sorted(rows, key=lambda row: row.iteration_s)
    curves = [
        replace(folder.losses.series[0], label=name)
        for name, folder in zip(names, trainings, strict=True)
        if folder.losses is not None
    ]
    losses = charts.thinned(Losses(series=tuple(curves))) if len(curves) > 1 else None
    return {
        "sentence": f"{fastest.runtime} took {_ms(fastest.iteration_s)} ms an iteration, "
        f"{slowest.runtime} {_ms(slowest.iteration_s)} ms: "
        f"{slowest.iteration_s / fastest.iteration_s:.2f} times as long.",
        "times": _chart(lambda width: charts.iteration_times(rows, width)),
        "losses": []
        if losses is None
        else [_chart(partial(charts.loss_curves, losses, over)) for over in ("steps", "wall_s")],
    }


def _apart(names: Sequence[str]) -> list[str]:
    """The same names, with a number where one stands twice."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return found
