"""MG-WFBP, INFOCOM Fig. 5(b) and journal Fig. 4: what an all-reduce costs, and the line for it."""

from functools import cache
from itertools import pairwise

import altair as alt
import numpy as np

from gradweave import Trace, load_network, load_trace
from gradweave._src.costs import Curve, Line, fit_line, least_squares
from gradweave._src.planning.mgwfbp import mgwfbp
from gradweave._src.planning.optimal import optimal

from . import charts
from .mgwfbp_clusters import K80_TFLOPS, MODELS, V100_TFLOPS, WIDTHS
from .page import Section, bullets, claim, differences, paragraph, picture, table

# INFOCOM, text on Fig. 5(b): "the startup overheads (i.e., 2(N-1) x alpha in the ring-based
# all-reduce algorithm) are 90.52us, 271.56us and 633.64us in 2-, 4- and 8-node clusters".
PAPER_STARTUP_S = {2: 90.52e-6, 4: 271.56e-6, 8: 633.64e-6}
# Journal, Fig. 4: clusters 1 to 3, 16 workers. Nobody published the points.
PAPER_LINES = {
    "cluster 1": Line(startup_s=9.72e-4, s_per_byte=1.97e-9),
    "cluster 2": Line(startup_s=9.08e-4, s_per_byte=7.4e-10),
    "cluster 3": Line(startup_s=2.36e-4, s_per_byte=4.06e-10),
}
SPEEDS = {"K80": 1.0, "V100": V100_TFLOPS / K80_TFLOPS}

FITS = ("papers", "least squares", "least relative errors")
LOOKS = {
    "measured": charts.Look(charts.BLACK),
    "least squares": charts.Look(charts.BLUE),
    "least relative errors": charts.Look(charts.ORANGE, charts.DASHED),
    "papers' start-up": charts.Look(charts.GREEN, charts.DOTTED),
}


@cache
def measured(workers: int) -> Curve:
    cost = load_network("mpi-10gbe-measured").cost("all-reduce", "native", workers=workers)
    assert isinstance(cost, Curve), "the network is given by its points"
    return cost


def fitted(workers: int) -> dict[str, Line]:
    """Return the lines for a cluster: as printed, of least squares, of least relative errors.

    The papers print no slope for these clusters: theirs is that of least squares.
    """
    curve = measured(workers)
    squares = curve.line(1.0, least_squares)
    printed = Line(startup_s=PAPER_STARTUP_S[workers], s_per_byte=squares.s_per_byte)
    return dict(zip(FITS, (printed, squares, curve.line(1.0, fit_line)), strict=True))


def section() -> Section:
    name = "results-all-reduce-fits"
    return Section(
        title="What an all-reduce costs, and the line for it (INFOCOM Fig. 5(b), journal Fig. 4)",
        parts=[
            picture(name, "measured all-reduces and the lines fitted to them"),
            paragraph(how_to_read()),
            fits_table(),
            paragraph(what_it_changes()),
            plans_table(),
            bullets([who_uses_which(), journal_lines()]),
            differences([startups_differ()]),
        ],
        pictures={name: chart()},
    )


def how_to_read() -> str:
    return """
        The points are the OSU micro-benchmark's over Open MPI on 10 GbE that the authors published
        (`mpi-10gbe-measured`, 4 B to 1 MiB). The papers fit a line a + b M to such points by least
        squares; Algorithm 1 decides by its start-up a alone. Our `mgwfbp` fits as they do. A line
        of least *relative* errors, which describes short messages better and which we use where a
        line is shown to people, has a several times smaller start-up: the curve bends, and least
        squares follows its long messages.
    """


def fits_table() -> str:
    header = ["nodes", "a, papers", "a, least squares (`mgwfbp`)", "a, least relative errors"]
    header += ["b, least squares", "b, least relative errors", "measured at 4 B and 1 MiB"]
    rows = []
    for workers in PAPER_STARTUP_S:
        lines, curve = fitted(workers), measured(workers)
        rows.append(
            [
                f"{workers}",
                *(f"{lines[fit].startup_s * 1e6:.1f} µs" for fit in FITS),
                *(f"{lines[fit].s_per_byte * 1e9:.2f} ns/B" for fit in FITS[1:]),
                f"{curve.measured_s[0] * 1e6:.0f} µs, {curve.measured_s[-1] * 1e3:.2f} ms",
            ]
        )
    return table(header, rows)


@cache
def trace_of(model: str, gpu: str, width: int) -> Trace:
    trace = load_trace(MODELS[model])
    return trace.rescaled(
        forward_s=trace.forward_s / SPEEDS[gpu], backward_s=trace.backward_s / SPEEDS[gpu]
    ).with_bytes_per_element(width)


def iteration_s(trace: Trace, lengths: list[int], curve: Curve) -> float:
    """Return the iteration by a plan's lengths, each message at what was measured."""
    edges = np.cumsum([0, *lengths])
    sent = np.concatenate([[0.0], np.cumsum(trace.nbytes)])
    end_s = 0.0
    for first, last in pairwise(edges):
        cost_s = float(curve.seconds(np.array([sent[last] - sent[first]]))[0])
        end_s = max(end_s, float(trace.ready_s[last - 1])) + cost_s
    return trace.forward_s + end_s


@cache
def behind(model: str, gpu: str, width: int, workers: int) -> dict[str, float]:
    """Return the iteration by each fit's plan over that of the exact optimum."""
    trace, curve = trace_of(model, gpu, width), measured(workers)
    best_s = iteration_s(trace, optimal(trace, curve, tolerance=0), curve)
    return {
        fit: iteration_s(trace, mgwfbp(trace, line), curve) / best_s
        for fit, line in fitted(workers).items()
    }


def cases() -> list[tuple[str, str, int, int]]:
    return [
        (model, gpu, width, workers)
        for gpu in SPEEDS
        for width in WIDTHS
        for model in MODELS
        for workers in PAPER_STARTUP_S
    ]


def what_it_changes() -> str:
    found = [behind(*case) for case in cases()]
    worse = sum(one["least relative errors"] > one["least squares"] + 5e-4 for one in found)
    better = sum(one["least relative errors"] < one["least squares"] - 5e-4 for one in found)
    apart = max(abs(one["papers"] - one["least squares"]) for one in found)
    return claim(
        f"""What the fit does to `mgwfbp`: its iterations over those of `optimal:0`, which plans on
        the measured curve itself and needs no line, for six models with gradients of
        {" and ".join(map(str, WIDTHS))} bytes on 2, 4 and 8 nodes, at the speed of a K80 and of a
        V100 ({len(found)} settings). With the smaller start-up the rule is worse in {worse} and
        better in {better}; the papers' own start-ups and ours by least squares give the same ratios
        to four digits. Settings in which any fit is more than 1 % behind:""",
        holds=worse > 4 * better and apart < 5e-5,
    )


def plans_table() -> str:
    header = ["model", "GPU", "bytes", "nodes", *(f"a of {fit}" for fit in FITS)]
    rows = []
    for model, gpu, width, workers in cases():
        found = behind(model, gpu, width, workers)
        if max(found.values()) > 1.01:
            ratios = (f"{found[fit]:.3f}x" for fit in FITS)
            rows.append([model, gpu, f"{width}", f"{workers}", *ratios])
    return table(header, rows)


def who_uses_which() -> str:
    return """`mgwfbp` asks for the line of least squares wherever a network was measured, in
        simulations and in training. `optimal` asks for no line: it plans on the measured curve, and
        on a line where the network is given by one (the papers' fits, a ring's formula)."""


def journal_lines() -> str:
    listing = "; ".join(
        f"{name} a = {line.startup_s * 1e6:.0f} µs, b = {line.s_per_byte * 1e9:.3g} ns/B"
        for name, line in PAPER_LINES.items()
    )
    return f"""The journal's Fig. 4 gives lines for 16 workers and no points: {listing}. We take
        them as they are (`cluster1-16xk80-10gbe` and its neighbours)."""


def startups_differ() -> str:
    alphas = [startup / (2 * (n - 1)) for n, startup in PAPER_STARTUP_S.items()]
    ours = {n: fitted(n)["least squares"].startup_s for n in PAPER_STARTUP_S}
    ratios = [ours[n] / PAPER_STARTUP_S[n] for n in PAPER_STARTUP_S]
    return claim(
        f"""The papers' three start-ups are 2(N-1) times {alphas[0] * 1e6:.2f} µs to the last digit,
        so they follow from one latency by the ring's formula and were not fitted one by one. Least
        squares on the published points gives {min(ratios):.2f} to {max(ratios):.2f} times as much.
        Which points the {alphas[0] * 1e6:.2f} µs come from is not explained: leaving out short or
        long ones does not lead to it on all three clusters.""",
        holds=max(alphas) - min(alphas) < 1e-9 and min(ratios) > 0.8 and max(ratios) < 1.2,
    )


def chart() -> alt.TopLevelMixin:
    rows: list[charts.Row] = []
    for workers in PAPER_STARTUP_S:
        curve, lines = measured(workers), fitted(workers)
        shown = {
            "least squares": lines["least squares"],
            "least relative errors": lines["least relative errors"],
            "papers' start-up": lines["papers"],
        }
        sizes = np.geomspace(curve.nbytes[0], curve.nbytes[-1], 60)
        panel = f"{workers} nodes"
        points = zip(curve.nbytes, curve.measured_s, strict=True)
        thinned = [point for place, point in enumerate(points) if place < 13 or place % 8 == 0]
        rows += [
            {"panel": panel, "series": "measured", "nbytes": size, "ms": seconds * 1e3}
            for size, seconds in thinned
        ]
        rows += [
            {"panel": panel, "series": name, "nbytes": float(size), "ms": float(ms)}
            for name, line in shown.items()
            for size, ms in zip(sizes, line.seconds(sizes) * 1e3, strict=True)
        ]
    nbytes = charts.Axis(
        field="nbytes", title="bytes", log_base=10, format="~s", ticks=(10, 1e3, 1e5)
    )
    taken = charts.Axis(
        field="ms", title="all-reduce, ms", log_base=10, ticks=(0.03, 0.1, 0.3, 1, 3)
    )
    lines_chart = charts.lines(rows, x=nbytes, y=taken, looks=LOOKS, size=(190, 200), points=False)
    panels = [f"{workers} nodes" for workers in PAPER_STARTUP_S]
    title = "Least squares follows the long messages, and its start-up exceeds what short ones take"
    holds = all(fitted(n)["least squares"].startup_s > measured(n).measured_s[1] for n in (2, 4, 8))
    return charts.finished(
        charts.in_panels(lines_chart, panels, columns=3), claim(title, holds=holds)
    )
