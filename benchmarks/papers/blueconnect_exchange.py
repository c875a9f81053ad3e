"""BlueConnect, 4.2: one all-reduce of ResNet-50's gradients on 48 nodes of four P100."""

from dataclasses import dataclass
from functools import cache

from gradweave import Network, load_network
from gradweave._src.costs import Line

from . import charts

GPUS = (4, 8, 16, 32, 64, 128, 192)
LARGEST = GPUS[-1]
LOOKS = {
    "ring": charts.Look(charts.ORANGE),
    "two-level": charts.Look(charts.PURPLE, charts.DASHED),
    "blueconnect": charts.Look(charts.BLUE),
}

# BlueConnect 4.2: 100 MB of gradients; 163.0 ms per iteration on one GPU; 32 images per GPU.
GRADIENT_BYTES = 100e6
COMPUTE_S = 0.163
BATCH = 32
# BlueConnect 4.2, 192 GPUs: overhead of BlueConnect and of GLOO (two-level), of which jitter is
# 5 to 10 ms; the ring "wastes 48% of GPU computing power"; BlueConnect's images/s are 11 % above
# GLOO's and 45 % above the ring's.
PAPER_BLUECONNECT_S, PAPER_TWO_LEVEL_S = 0.031, 0.058
PAPER_JITTER_S = (0.005, 0.010)
PAPER_RING_WASTE = 0.48
PAPER_OVER_TWO_LEVEL, PAPER_OVER_RING = 0.11, 0.45


@cache
def cluster() -> Network:
    return load_network("blueconnect-48x4-p100-nvlink-100gbib")


@dataclass(frozen=True, slots=True)
class Exchange:
    """One all-reduce of all gradients after backward, as the paper measures it."""

    collective: str
    gpus: int

    @property
    def line(self) -> Line:
        cost = cluster().cost("all-reduce", self.collective, workers=self.gpus)
        return cost.line(GRADIENT_BYTES)

    @property
    def overhead_s(self) -> float:
        return self.line.startup_s + self.line.s_per_byte * GRADIENT_BYTES

    @property
    def steps(self) -> float:
        """The messages that go one after the other, for every tier has the same latency."""
        return self.line.startup_s / latency_s()

    def overhead_at(self, latency_s: float) -> float:
        return self.steps * latency_s + self.line.s_per_byte * GRADIENT_BYTES


def latency_s() -> float:
    links = cluster().links
    assert links is not None, "the cluster is given by its links"
    latencies = {level.link.latency_s for level in links.levels}
    assert len(latencies) == 1, "one latency for all tiers, as in the paper"
    return latencies.pop()


def efficiency(overhead_s: float) -> float:
    return COMPUTE_S / (COMPUTE_S + overhead_s)


def images_per_s(gpus: int, overhead_s: float) -> float:
    return gpus * BATCH / (COMPUTE_S + overhead_s)


def overhead_of(efficiency: float) -> float:
    return COMPUTE_S / efficiency - COMPUTE_S


def at_largest() -> dict[str, Exchange]:
    return {collective: Exchange(collective, LARGEST) for collective in LOOKS}
