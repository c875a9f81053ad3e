"""MG-WFBP, INFOCOM and journal Figs. 6 to 8: GoogLeNet and ResNet-50 on 2, 4 and 8 nodes."""

from functools import cache

from gradweave import load_network, load_trace
from gradweave._src.simulation import Case, Outcome, run

from . import measured
from .mgwfbp_clusters import PAPER_CLUSTER1_SINGLE, PAPER_CLUSTER1_WFBP
from .page import Section, claim, differences, ms, paragraph, percent, table, times

MODELS = {"GoogLeNet": "googlenet-k80", "ResNet-50": "resnet50"}
NODES = (2, 4, 8)
LARGEST = NODES[-1]
PLANNERS = ("wfbp", "single", "mgwfbp", "optimal")
# The all-reduce that the authors published measurements of, and a parameter server with one port,
# as the TensorFlow of the figures has, on the links of their simulator.
WAYS = {
    "all-reduce, measured (`mpi-10gbe-measured`)": ("mpi-10gbe-measured", "native"),
    "parameter server (`k80-10gbe`)": ("k80-10gbe", "parameter-server"),
    "4 parameter servers (`k80-10gbe`)": ("k80-10gbe", "parameter-server:4"),
}


@cache
def simulated(model: str, way: str, workers: int, planner: str) -> Outcome:
    network, collective = WAYS[way]
    case = Case(
        trace=load_trace(MODELS[model]),
        network=load_network(network),
        workers=workers,
        planner=planner,
        collective=collective,
    )
    return run(case).outcome


def section() -> Section:
    return Section(
        title="GoogLeNet and ResNet-50 on 2, 4 and 8 nodes (INFOCOM and journal Figs. 6 to 8)",
        parts=[
            paragraph(how_to_read()),
            simulated_table(),
            paragraph(lab_words()),
            lab_table(),
            compared_table(),
            differences([lab_is_another_cluster(), wfbp_suffers(), servers()]),
        ],
        pictures={},
    )


def how_to_read() -> str:
    return """
        The figures show measured speed-ups over one machine (Figs. 6 and 7) and communication that
        is not hidden (Fig. 8), without numbers; the text prints 1.2x and 1.36x on 8 nodes.
        Simulated here with one worker on each node, on the all-reduces that the authors measured on
        10 GbE and by parameter servers, which the figures have as TensorFlow. Efficiency, and in
        brackets exposed communication in ms:
    """


def simulated_table() -> str:
    header = ["model", "sent by", "nodes", *(f"`{planner}`" for planner in PLANNERS)]
    rows = []
    for model in MODELS:
        for way in WAYS:
            for nodes in NODES:
                if ":4" in WAYS[way][1] and nodes < 4:
                    continue
                found = [simulated(model, way, nodes, planner) for planner in PLANNERS]
                cells = (f"{percent(one.efficiency)} ({ms(one.exposed_s)})" for one in found)
                rows.append([model, way, f"{nodes}", *cells])
    return table(header, rows)


def lab_words() -> str:
    return f"""
        Measured on emulated nodes at 1 Gbit/s with gloo, replayed traces with an eighth of the
        parameters, forward 0.1 s and backward 0.2 s ({measured.page_of("training")}), iterations in
        ms:
    """


@cache
def lab() -> dict[tuple[str, int], dict[str, measured.Row]]:
    found: dict[tuple[str, int], dict[str, measured.Row]] = {}
    for experiment in measured.training("scaling"):
        for row in experiment.results:
            found.setdefault((row.trace, row.nodes), {})[row.runtime] = row
    return found


def lab_table() -> str:
    header = ["model", "nodes", *(f"`{planner}`" for planner in PLANNERS)]
    rows = []
    for model, trace in MODELS.items():
        for nodes in NODES:
            cells = (f"{lab()[trace, nodes][p].iteration_s * 1e3:,.0f}" for p in PLANNERS)
            rows.append([model, f"{nodes}", *cells])
    return table(header, rows)


def lab_ratio(model: str, planner: str) -> float:
    rows = lab()[MODELS[model], LARGEST]
    return rows[planner].iteration_s / rows["mgwfbp"].iteration_s


def simulated_ratio(model: str, planner: str, way: str = next(iter(WAYS))) -> float:
    slow, fast = (simulated(model, way, LARGEST, name) for name in (planner, "mgwfbp"))
    return slow.iteration_s / fast.iteration_s


def compared_table() -> str:
    header = [f"{LARGEST} nodes", "the papers' text on Figs. 6 to 8", "simulated", "lab, measured"]
    papers = {"wfbp": PAPER_CLUSTER1_WFBP, "single": PAPER_CLUSTER1_SINGLE}
    rows = [
        [
            f"{model}: `{planner}` / `mgwfbp`",
            f"about {papers[planner]}x",
            times(simulated_ratio(model, planner)),
            times(lab_ratio(model, planner)),
        ]
        for model in MODELS
        for planner in ("wfbp", "single")
    ]
    return table(header, rows)


def lab_is_another_cluster() -> str:
    """Say why the lab is another cluster; predictions by its calibrated curve bear that out."""
    errors = [
        abs(prediction_error(rows[planner]))
        for rows in lab().values()
        for planner in ("single", "mgwfbp")
    ]
    counts = [lab()[trace, LARGEST]["mgwfbp"].messages for trace in MODELS.values()]
    return claim(
        f"""The lab is no K80 cluster, and says so: `single` / `mgwfbp` is
        {times(lab_ratio("GoogLeNet", "single"))} and {times(lab_ratio("ResNet-50", "single"))} on 8
        nodes because a gloo message among 8 processes on two cores starts so slowly that
        Algorithm 1 sends {counts[0]} and {counts[1]} messages, one of them being `single` itself.
        The reason was checked: predictions from the lab's calibrated curve are within
        {max(errors):.0%} of the times of `single` and `mgwfbp`.""",
        holds=max(errors) < 0.06 and min(counts) == 1,
    )


def prediction_error(row: measured.Row) -> float:
    return row.predicted_s / row.iteration_s - 1


def wfbp_suffers() -> str:
    rows = [lab()[trace, LARGEST]["wfbp"] for trace in MODELS.values()]
    errors = [prediction_error(row) for row in rows]
    pairs = [f"{row.predicted_s * 1e3:,.0f} for {row.iteration_s * 1e3:,.0f} ms" for row in rows]
    return claim(
        f"""`wfbp` / `mgwfbp` is {times(lab_ratio("GoogLeNet", "wfbp"))} and
        {times(lab_ratio("ResNet-50", "wfbp"))} in the lab, where the papers have about
        {PAPER_CLUSTER1_WFBP}x: a start-up there is a larger part of an iteration than on their
        10 GbE. The calibrated curve has that too, and exaggerates it: its predictions of `wfbp` on
        8 nodes are {errors[0]:.0%} and {errors[1]:.0%} too slow ({pairs[0]} and {pairs[1]}). On the
        authors' own curve WFBP loses
        {times(simulated_ratio("GoogLeNet", "wfbp"))} and
        {times(simulated_ratio("ResNet-50", "wfbp"))}, less than they measured with two GPUs on each
        node; why is not explained, for their traces on 8 nodes are not published.""",
        holds=lab_ratio("ResNet-50", "wfbp") > 2
        and min(errors) > 0.15
        and simulated_ratio("ResNet-50", "wfbp") < PAPER_CLUSTER1_WFBP,
    )


def servers() -> str:
    one = next(way for way, (_, name) in WAYS.items() if name == "parameter-server")
    found = {m: simulated(m, one, LARGEST, "wfbp").efficiency for m in MODELS}
    ring = {m: simulated(m, next(iter(WAYS)), LARGEST, "wfbp").efficiency for m in MODELS}
    return claim(
        f"""Parameter servers: the papers find TensorFlow behind all-reduces because one port has to
        take everybody's gradients, and so it is here: `wfbp` by one server has
        {percent(found["GoogLeNet"])} and {percent(found["ResNet-50"])} efficiency on 8 nodes, by
        all-reduce {percent(ring["GoogLeNet"])} and {percent(ring["ResNet-50"])}. The next section
        measures the same in the lab.""",
        holds=all(found[m] < ring[m] for m in MODELS),
    )
