"""The page's planners and simulator give exactly what Python's give."""

import json
import shutil
import subprocess
from importlib.resources import files as package_files

import numpy as np
import pytest
from needs import missing
from report_cases import as_json, curve_as_json, curve_cases, planner_cases

from gradweave._src.compression import WIRE_SHARES, Compression
from gradweave._src.costs import Curve, Line, Link, flat
from gradweave._src.network import CollectiveCost, Network
from gradweave._src.plan import merge
from gradweave._src.planning import find_planner
from gradweave._src.planning.optimal import optimal
from gradweave._src.report.pricing import Price
from gradweave._src.simulation import simulate

ASSETS = package_files("gradweave._src.report") / "assets"
ANSWER = """
const lines = require("node:fs").readFileSync(0, "utf8").trim().split("\\n").map(JSON.parse);
console.log(JSON.stringify(lines.map(answer)));
"""


def asked(answer: str, *cases: object) -> list:
    """What ``function answer(case)`` of JavaScript says to each case."""
    node = shutil.which("node")
    if node is None:
        missing("node is not installed; the browser test compares the planners too")
    scripts = [(ASSETS / name).read_text("utf-8") for name in ("planner.js", "gantt.js")]
    program = "\n".join([*scripts, answer, ANSWER])
    done = subprocess.run(
        [node, "-e", program],
        input="\n".join(json.dumps(case) for case in cases),
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_optimum_to_the_last_tensor():
    cases = [
        *planner_cases(3000, seed=1, most_tensors=40),
        *planner_cases(20, seed=2, most_tensors=2000),
    ]
    found = asked(
        "const answer = (c) => optimalForLine(c.trace, c.line, c.tolerance);",
        *[as_json(case) for case in cases],
    )
    expected = [optimal(trace, line, tolerance=tolerance) for trace, line, tolerance in cases]
    assert found == expected
    assert len({tuple(lengths) for lengths in expected}) > 1000, "the cases are all alike"


@pytest.mark.parametrize("planner", ["wfbp", "single", "ddp", "mgwfbp", "optimal"])
def test_every_planner_of_the_page(planner):
    cases = planner_cases(500, seed=3, most_tensors=60)
    found = asked(
        f"const answer = (c) => PLANNERS.{planner}(c.trace, c.line);",
        *[as_json(case) for case in cases],
    )
    merging = find_planner(planner)
    assert found == [merging(trace, line) for trace, line, _ in cases]


def test_the_timeline():
    """Iteration and exposed time, with the plan of the optimum."""
    cases = planner_cases(300, seed=4, most_tensors=30)
    found = asked(
        """const answer = (c) => {
          const lengths = PLANNERS.optimal(c.trace, c.line);
          const outcome = simulate(c.trace, lengths, c.line, 2);
          const exposed = exposedIntervals(
            [[0, outcome.forward_s], [outcome.forward_s, outcome.compute_s]],
            outcome.messages.map((message) => [message.start_s, message.end_s]),
          );
          return [outcome.iteration_s, totalLength(exposed)];
        };""",
        *[as_json(case) for case in cases],
    )
    for (trace, line, _), (iteration_s, exposed_s) in zip(cases, found, strict=True):
        entry = CollectiveCost(operation="all-reduce", collective="native", workers=2, cost=line)
        network = Network(name="drawn", source="drawn", costs=(entry,))
        lengths = find_planner("optimal")(trace, line)
        plan = merge(trace, lengths, planner="optimal", collective="native")
        timeline = simulate(trace, plan, network, workers=2)
        assert iteration_s == pytest.approx(timeline.iteration_s)
        assert exposed_s == pytest.approx(timeline.exposed_s, rel=1e-6, abs=1e-12)


def test_waiting_is_what_no_computing_covers():
    (found,) = asked(
        "const answer = (c) => exposedIntervals(c.computing, c.communicating);",
        {
            "computing": [[0, 2], [5, 6], [3, 4]],
            "communicating": [[1, 3.5], [3.2, 5.5], [5.2, 9], [10, 11]],
        },
    )
    assert found == [[2, 3], [4, 5], [6, 9], [10, 11]]


@pytest.mark.parametrize("planner", ["wfbp", "single", "ddp", "mgwfbp", "optimal"])
def test_every_planner_for_measured_points(planner):
    cases = curve_cases(400, seed=6, most_tensors=40)
    found = asked(
        f"const answer = (c) => PLANNERS.{planner}(c.trace, curve(c.bytes, c.seconds));",
        *[curve_as_json(case) for case in cases],
    )
    merging = find_planner(planner)
    assert found == [merging(trace, measured) for trace, measured in cases]


def test_the_optimum_for_measured_points_of_a_large_model():
    cases = curve_cases(3, seed=7, most_tensors=800)
    found = asked(
        "const answer = (c) => PLANNERS.optimal(c.trace, curve(c.bytes, c.seconds));",
        *[curve_as_json(case) for case in cases],
    )
    assert found == [optimal(trace, measured) for trace, measured in cases]


def test_measured_points_are_joined_by_lines():
    sizes = [1, 999, 1000, 1001, 5000, 64000, 10**6, 3 * 10**6, 10**8]
    measured = Curve(nbytes=(1000, 64000, 2 * 10**6, 3 * 10**6), measured_s=(0.5, 0.4, 2.0, 3.5))
    (found,) = asked(
        """const answer = (c) => {
          const cost = curve(c.bytes, c.seconds);
          return c.sizes.map((size) => messageSeconds(cost, size));
        };""",
        {"bytes": measured.nbytes, "seconds": measured.measured_s, "sizes": sizes},
    )
    assert found == measured.seconds(np.array(sizes, dtype=float)).tolist()


PRICES = [
    Curve(nbytes=(1024, 65536, 2**20, 2**24), measured_s=(0.003, 0.0025, 0.02, 0.22)),
    Line(startup_s=0.004, s_per_byte=1.2e-8),
]


@pytest.mark.parametrize("workers", [2, 4, 7, 2048])
@pytest.mark.parametrize("cost", PRICES)
def test_other_clusters_cost_the_same_here_and_there(cost, workers):
    price = Price(collective="native", workers=4, cost=cost, latency_s=0.0005)
    expected = price.among(workers, startups=0.3, per_byte=2.5)
    is_line = isinstance(cost, Line)
    (found,) = asked(
        "const answer = (c) => priceAmong(c.price, c.workers, c.startups, c.perByte);",
        {
            "price": {
                "workers": 4,
                "startup_s": price.startup_s,
                "latency_s": price.latency_s,
                "cost": {"startup_s": cost.startup_s, "s_per_byte": cost.s_per_byte}
                if is_line
                else {"bytes": cost.nbytes, "seconds": cost.measured_s},
            },
            "workers": workers,
            "startups": 0.3,
            "perByte": 2.5,
        },
    )
    assert found["latency_s"] == expected.latency_s
    if is_line:
        assert found["cost"]["s_per_byte"] == expected.cost.s_per_byte
        assert found["cost"]["startup_s"] == expected.cost.startup_s
    else:
        assert tuple(found["cost"]["seconds"]) == expected.cost.measured_s
        assert found["cost"]["lastSlope"] == expected.cost._last_slope


def test_what_is_rounded_costs_less_for_its_bytes():
    link = Link(latency_s=1.33e-4, s_per_byte=8.4548e-9)
    network = Network(name="drawn", source="drawn", links=flat(link))
    for name, share in WIRE_SHARES.items():
        line = network.cost("all-reduce", "ring", workers=4)
        (found,) = asked(
            "const answer = (c) => onWire(c.line, c.share);",
            {
                "line": {"startup_s": line.startup_s, "s_per_byte": line.s_per_byte},
                "share": share,
            },
        )
        rounded = network.cost(
            "all-reduce", "ring", workers=4, compression=Compression(method=name)
        )
        assert found == {"startup_s": rounded.startup_s, "s_per_byte": rounded.s_per_byte}
