"""BlueConnect: its Fig. 6, 4 to 192 GPUs, its Fig. 5, two nodes of four GPUs, and the lab."""

from gradweave import load_network

from .blueconnect_large import section as large_cluster
from .blueconnect_measured import section as in_the_lab
from .blueconnect_small import INFINIBAND, TEN_GBE
from .blueconnect_small import section as two_nodes
from .page import Chapter


def introduction() -> str:
    latencies = [f"{seconds * 1e6:.0f}" for seconds in (latency_s(TEN_GBE), latency_s(INFINIBAND))]
    return f"""
        An all-reduce over GPUs, nodes and racks is cut into reduce-scatters and all-gathers that
        follow these tiers. Our numbers are the paper's own closed forms (its Eqs. 6, 7 and 9) on
        the bandwidths that it names. It prints no latency; we take {latencies[0]} microseconds for
        10 GbE, from the INFOCOM paper's start-ups, and {latencies[1]} for InfiniBand, from the
        journal's fits. The paper's numbers are measured.
    """


def latency_s(preset: str) -> float:
    links = load_network(preset).links
    assert links is not None, "the setups are given by their links"
    return links.levels[-1].link.latency_s


def chapter() -> Chapter:
    return Chapter(
        title="BlueConnect: all-reduce along the network's tiers",
        introduction=introduction(),
        sections=[large_cluster(), two_nodes(), in_the_lab()],
    )
