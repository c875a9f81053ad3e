"""The MG-WFBP paper's two simulated models, planned and simulated for 4 to 2048 workers."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import altair as alt
from msgspec.structs import replace

from gradweave import Network, Plan, Trace, load_network, load_trace
from gradweave._src.costs import Line, flat
from gradweave._src.simulation import PAPER_WORKERS, Case, Outcome, run

from . import charts
from .journal_table_2 import network_of_double_trees
from .page import claim

# Journal 6.4, 64 workers: the other's iteration time over MG-WFBP's.
COMPARED_WORKERS = 64
PAPER_WFBP = {"GoogLeNet": 1.78, "ResNet-50": 1.75}
PAPER_SINGLE = {"GoogLeNet": 1.35, "ResNet-50": 1.45}
# The authors' simulator also has a time to add a byte; the preset leaves it out.
AUTHORS_SUM_S_PER_BYTE = 2.5e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A model, and what counts as one gradient in it."""

    model: str
    layers: str
    trace: Trace

    @property
    def label(self) -> str:
        return f"{self.model}, {self.layers}"


@cache
def googlenet() -> Job:
    trace = load_trace("googlenet-k80")
    return Job(model="GoogLeNet", layers=f"{len(trace.tensors)} layers", trace=trace)


@cache
def resnet50_by_tensor() -> Job:
    trace = load_trace("resnet50")
    return Job(model="ResNet-50", layers=f"{len(trace.tensors)} tensors", trace=trace)


@cache
def resnet50_by_layer() -> Job:
    trace = load_trace("resnet50").joined(_layer_of)
    return Job(model="ResNet-50", layers=f"{len(trace.tensors)} layers", trace=trace)


def _layer_of(tensor: str) -> str:
    """Return a tensor's layer, which a convolution shares with its normalisation."""
    *module, kind, _ = tensor.split(".")
    return ".".join(module if kind in {"conv", "bn"} else [*module, kind])


@cache
def k80_network() -> Network:
    return load_network("k80-10gbe")


@cache
def k80_network_that_adds() -> Network:
    links = k80_network().links
    assert links is not None, "k80-10gbe is given by its links"
    link = replace(links.levels[0].link, sum_s_per_byte=AUTHORS_SUM_S_PER_BYTE)
    return Network(name="k80-10gbe-adding", source="the authors' simulator", links=flat(link))


@dataclass(frozen=True, slots=True)
class Sweep:
    """One job on one network by one collective, for any planner and number of workers."""

    job: Job
    network: Network
    collective: str

    def outcome(self, planner: str, workers: int) -> Outcome:
        return _simulated(self._case(planner, workers))

    def plan(self, planner: str, workers: int) -> Plan:
        return self._case(planner, workers).plan()

    def all_reduce(self, workers: int) -> Line:
        """Return start-up and time per byte of the all-reduce."""
        cost = self.network.cost("all-reduce", self.collective, workers=workers)
        return cost.line(float(self.job.trace.nbytes.sum()))

    def ratio(self, slow: str, fast: str, workers: int) -> float:
        """Return the iteration time of one planner over that of the other."""
        slow_s = self.outcome(slow, workers).iteration_s
        return slow_s / self.outcome(fast, workers).iteration_s

    def messages(self, planner: str) -> tuple[int, ...]:
        return tuple(self.outcome(planner, workers).messages for workers in PAPER_WORKERS)

    def merged_messages(self, planner: str) -> tuple[int, ...]:
        """Return how many messages hold more than one gradient, by number of workers."""
        plans = (self.plan(planner, workers) for workers in PAPER_WORKERS)
        return tuple(sum(length > 1 for length in plan.lengths) for plan in plans)

    def crossing(self) -> tuple[int, int]:
        """Return the last workers with which WFBP is faster, and the first with which single is."""
        wfbp_wins = [self.ratio("single", "wfbp", workers) > 1 for workers in PAPER_WORKERS]
        place = wfbp_wins.index(False)
        claim("WFBP and single cross once", holds=place > 0 and not any(wfbp_wins[place:]))
        return PAPER_WORKERS[place - 1], PAPER_WORKERS[place]

    def single_from(self) -> int:
        """Return the number of workers from which on MG-WFBP sends one message."""
        counts = self.messages("mgwfbp")
        place = counts.index(1)
        claim("MG-WFBP stays at one message", holds=set(counts[place:]) == {1})
        return PAPER_WORKERS[place]

    def _case(self, planner: str, workers: int) -> Case:
        return Case(
            trace=self.job.trace,
            network=self.network,
            workers=workers,
            planner=planner,
            collective=self.collective,
        )


def by(collective: str) -> tuple[Sweep, Sweep, Sweep]:
    """Return the sweeps of GoogLeNet, ResNet-50 in tensors, and ResNet-50 in layers."""
    google = Sweep(googlenet(), k80_network(), collective)
    tensors = Sweep(resnet50_by_tensor(), k80_network(), collective)
    layers = Sweep(resnet50_by_layer(), k80_network(), collective)
    return google, tensors, layers


def by_printed_double_trees() -> tuple[Sweep, Sweep]:
    """Return the sweeps of both models in tensors, at the price of the journal's Table 2."""
    network = network_of_double_trees(k80_network(), PAPER_WORKERS)
    return (
        Sweep(googlenet(), network, "double-tree"),
        Sweep(resnet50_by_tensor(), network, "double-tree"),
    )


def googlenet_adding() -> Sweep:
    """Return GoogLeNet's sweep by ring, with the authors' time to add."""
    return Sweep(googlenet(), k80_network_that_adds(), "ring")


def efficiency_chart(
    panels: Mapping[str, Sweep], title: str, *, height: int = 220
) -> alt.TopLevelMixin:
    rows: list[charts.Row] = [
        {
            "panel": panel,
            "series": planner,
            "workers": workers,
            "efficiency": sweep.outcome(planner, workers).efficiency,
        }
        for panel, sweep in panels.items()
        for planner in charts.PLANNERS
        for workers in PAPER_WORKERS
    ]
    workers = charts.workers_axis(PAPER_WORKERS)
    chart = charts.lines(
        rows, x=workers, y=charts.EFFICIENCY, looks=charts.PLANNERS, size=(290, height)
    )
    return charts.finished(charts.in_panels(chart, list(panels), columns=2), title)


@cache
def _simulated(case: Case) -> Outcome:
    return run(case).outcome
