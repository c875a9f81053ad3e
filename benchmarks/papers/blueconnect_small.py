"""BlueConnect, Fig. 5: two nodes of four P100, against NCCL's ring."""

import altair as alt

from gradweave import Network, load_network

from . import charts
from .page import Highlight, Section, claim, differences, ms, picture, table, times

TEN_GBE, INFINIBAND = "blueconnect-2x4-p100-pcie-10gbe", "blueconnect-2x4-p100-nvlink-100gbib"
SETUPS = {
    "PCIe inside, 10 GbE between": TEN_GBE,
    "NVLink inside, 100 Gb/s InfiniBand between": INFINIBAND,
}
WORKERS = 8
SIZES = (1e5, 1e6, 1e7, 1e8)
LARGEST = SIZES[-1]
LOOKS = {"ring": charts.Look(charts.ORANGE), "blueconnect": charts.Look(charts.BLUE, charts.DASHED)}

# BlueConnect 4.1: "about 1.6x faster than NCCL on both cases"; both run "about 10x faster" on the
# InfiniBand machines.
PAPER_GAIN = 1.6
PAPER_FASTER_NETWORK = 10


def networks() -> dict[str, Network]:
    return {setup: load_network(preset) for setup, preset in SETUPS.items()}


def seconds(network: Network, collective: str, nbytes: float) -> float:
    return network.seconds("all-reduce", collective, nbytes=nbytes, workers=WORKERS)


def gain(network: Network, nbytes: float) -> float:
    return seconds(network, "ring", nbytes) / seconds(network, "blueconnect", nbytes)


def inside_over_between(network: Network) -> float:
    assert network.links is not None, "the setups are given by their links"
    inside, between = (level.link.s_per_byte for level in network.links.levels)
    return between / inside


def section() -> Section:
    return Section(
        title="Two nodes of four GPUs (its Fig. 5)",
        parts=[
            picture("results-blueconnect-two-nodes", "all-reduce time over message size"),
            gains_table(),
            differences(reasons()),
        ],
        pictures={"results-blueconnect-two-nodes": chart()},
        highlights=[highlight()],
    )


def gains_table() -> str:
    header = ["message"]
    for setup in SETUPS:
        header += [f"{setup}: ring, ms", "blueconnect, ms", "ring / blueconnect"]
    rows = []
    for nbytes in SIZES:
        row = [f"{nbytes / 1e6:g} MB"]
        for network in networks().values():
            row += [ms(seconds(network, collective, nbytes)) for collective in LOOKS]
            row.append(times(gain(network, nbytes)))
        rows.append(row)
    paper = f"about {PAPER_GAIN}x"
    rows.append(["measured by the paper, against NCCL", "", "", paper, "", "", paper])
    return table(header, rows)


def reasons() -> list[str]:
    slow, fast = networks().values()
    largest = f"{LARGEST / 1e6:g} MB"
    faster = {name: seconds(slow, name, LARGEST) / seconds(fast, name, LARGEST) for name in LOOKS}
    return [
        claim(
            f"""10 GbE: {times(gain(slow, LARGEST))} at {largest}, the paper's figure. Between two
            nodes a ring sends {WORKERS - 1}/{WORKERS} of the message twice, BlueConnect half of it,
            and 10 GbE is so slow that the traffic inside the nodes does not count.""",
            holds=abs(gain(slow, LARGEST) / PAPER_GAIN - 1) < 0.05,
        ),
        claim(
            f"""InfiniBand: {times(gain(fast, LARGEST))} at {largest}. By the paper's Eq. 9 the
            stages inside and between the nodes take turns, and NVLink is only
            {inside_over_between(fast):.1f} times as fast as the InfiniBand port, so what is saved
            between the nodes is mostly spent inside them. Small messages, which count steps, gain
            more ({times(gain(fast, SIZES[0]))} at {SIZES[0] / 1e6:g} MB). The measured figure has
            in it that NCCL did not reach the full bandwidth with one ring, which the paper mentions
            and Eq. 6 does not know.""",
            holds=gain(fast, LARGEST) < 0.8 * PAPER_GAIN < PAPER_GAIN < gain(fast, SIZES[0]),
        ),
        claim(
            f"""The paper also sees both run about {PAPER_FASTER_NETWORK}x faster on the InfiniBand
            machines; here it is {faster["ring"]:.1f}x for the ring and {faster["blueconnect"]:.1f}x
            for BlueConnect at {largest}.""",
            holds=min(faster.values()) > 6 and max(faster.values()) < 11,
        ),
    ]


def chart() -> alt.TopLevelMixin:
    rows: list[charts.Row] = [
        {
            "panel": setup,
            "series": collective,
            "nbytes": nbytes / 1e6,
            "ms": seconds(network, collective, nbytes) * 1e3,
        }
        for setup, network in networks().items()
        for collective in LOOKS
        for nbytes in (1e5, 3e5, 1e6, 3e6, 1e7, 3e7, 1e8)
    ]
    size = charts.Axis(field="nbytes", title="message, MB", log_base=10, ticks=(0.1, 1, 10, 100))
    time = charts.Axis(field="ms", title="all-reduce, ms", log_base=10, ticks=(0.1, 1, 10, 100))
    lines = charts.lines(rows, x=size, y=time, looks=LOOKS, size=(290, 180))
    title = claim(
        "Two nodes: BlueConnect is ahead of the ring at every size",
        holds=min(gain(network, nbytes) for network in networks().values() for nbytes in SIZES) > 1,
    )
    return charts.finished(charts.in_panels(lines, list(SETUPS), columns=2), title)


def highlight() -> Highlight:
    gains = [times(gain(network, LARGEST)) for network in networks().values()]
    return Highlight(
        what=f"2 x 4 GPUs, {LARGEST / 1e6:g} MB (BlueConnect Fig. 5): ring / BlueConnect, 10 GbE "
        "and InfiniBand",
        paper=f"about {PAPER_GAIN}x both (measured, against NCCL)",
        ours=" and ".join(gains),
    )
