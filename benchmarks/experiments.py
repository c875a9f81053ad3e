"""The experiments of training.py: which traces, clusters and runtimes."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from gradweave import load_trace
from gradweave._src.planning import bsp
from gradweave._src.vocabulary import MIB

PAPERS = ("torch-ddp", "wfbp", "single", "mgwfbp", "optimal")
LOOPS = tuple(f"{loop}:{collective}" for loop in bsp.LOOPS for collective in bsp.COLLECTIVES)


class Nodes(NamedTuple):
    """An emulated cluster; ``rate`` is of the links between nodes."""

    nodes: int
    rate: str
    ranks_per_node: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    name: str
    title: str
    clusters: tuple[Nodes, ...]
    traces: tuple[tuple[str, float], ...]  # name and parameter scale
    forward_s: float
    backward_s: float
    runtimes: tuple[str, ...]
    repeats: int
    iterations: int
    largest_bytes: int = 32 * MIB  # that are calibrated
    calibrated: int = 9  # times each size; many ways to send take long
    with_timelines: bool = False
    # These runtimes beside those, instead of a table of predictions.
    ratios: tuple[tuple[str, str], ...] = ()
    note: str = ""


# Few and many tensors, even and uneven ones.
VARIED = ("densenet201", "googlenet-k80", "resnet20", "resnet50", "vgg16")

# What the papers train.
PAPERS_MODELS = (
    "alexnet",
    "densenet161",
    "densenet201",
    "googlenet-k80",
    "inceptionv4",
    "resnet152",
    "resnet20",
    "resnet50",
    "vgg16",
)
# Each of them at about 12 MB of gradients, or as it is where it has less.
SHIPPED = tuple(
    (name, min(1.0, round(12e6 / float(load_trace(name).nbytes.sum()), 3)))
    for name in PAPERS_MODELS
)

EXPERIMENTS = [
    Experiment(
        name="scaling",
        title="MG-WFBP journal, Figs. 6 to 8: 2, 4 and 8 nodes at 1 Gbit/s, an eighth of the "
        "parameters",
        clusters=(Nodes(2, "1gbit"), Nodes(4, "1gbit"), Nodes(8, "1gbit")),
        traces=(("googlenet-k80", 0.125), ("resnet50", 0.125)),
        forward_s=0.1,
        backward_s=0.2,
        runtimes=PAPERS,
        repeats=5,
        iterations=2,
    ),
]

PAIRS = Experiment(
    name="pairs",
    title="Our wrapper beside torch's, thirty times in turn: 4 nodes at 1 Gbit/s",
    clusters=(Nodes(4, "1gbit"),),
    traces=tuple(pair for pair in SHIPPED if pair[0] in VARIED),
    forward_s=0.05,
    backward_s=0.1,
    runtimes=("torch-ddp", "torch-ddp-tuned", "ddp", "gradweave"),
    repeats=30,
    iterations=1,
    ratios=(("gradweave", "torch-ddp"), ("gradweave", "torch-ddp-tuned"), ("ddp", "torch-ddp")),
    note=" `ddp` is our wrapper with torch's own buckets as its plan: what it costs by itself.",
)

SPARSE = Experiment(
    name="sparse",
    title="gTop-k, Figs. 10 and 11: density 0.001 on 2, 4 and 8 nodes at 100 Mbit/s",
    clusters=(Nodes(2, "100mbit"), Nodes(4, "100mbit"), Nodes(8, "100mbit")),
    traces=(("alexnet", 0.25), ("vgg16", 1.0)),
    forward_s=0.1,
    backward_s=0.2,
    runtimes=("torch-ddp", "topk:0.001", "gtopk:0.001"),
    repeats=3,
    iterations=1,
    largest_bytes=8 * MIB,
)

EXPERIMENTS += [
    PAIRS,
    replace(
        PAIRS,
        name="pairs-more",
        title="The same for the other shipped traces",
        traces=tuple(pair for pair in SHIPPED if pair[0] not in VARIED),
    ),
    Experiment(
        name="timeline",
        title="Our wrapper with and without a timeline, thirty times in turn: 4 nodes at 1 Gbit/s",
        clusters=(Nodes(4, "1gbit"),),
        traces=tuple(pair for pair in SHIPPED if pair[0] in {"resnet20", "resnet50"}),
        forward_s=0.05,
        backward_s=0.1,
        runtimes=("optimal", "timeline:optimal"),
        repeats=30,
        iterations=3,
        ratios=(("timeline:optimal", "optimal"),),
    ),
    Experiment(
        name="eighth",
        title="ResNet-50, an eighth of its parameters, 4 nodes at 1 Gbit/s",
        clusters=(Nodes(4, "1gbit"),),
        traces=(("resnet50", 0.125),),
        forward_s=0.15,
        backward_s=0.3,
        runtimes=("torch-ddp", "torch-ddp-tuned", "gradweave", "gtopk"),
        repeats=10,
        iterations=2,
        with_timelines=True,
    ),
    Experiment(
        name="both-passes",
        title="ResNet-50 at its full size, 4 nodes at 1 Gbit/s: communication exceeds backward",
        clusters=(Nodes(4, "1gbit"),),
        traces=(("resnet50", 1.0),),
        forward_s=0.3,
        backward_s=0.6,
        runtimes=(
            "torch-ddp",
            "fixed:6MiB",
            "mgwfbp",
            "optimal",
            "sharded",
            "sharded:fixed:3MiB",
            "sharded:optimal:0",
            "zero",
            "fsdp2",
        ),
        repeats=5,
        iterations=3,
        with_timelines=True,
        calibrated=5,
    ),
    Experiment(
        name="both-small",
        title="Where communication is small, both passes beside one, thirty times in turn: 4 nodes "
        "at 1 Gbit/s",
        clusters=(Nodes(4, "1gbit"),),
        traces=(("resnet20", 1.0),),
        forward_s=0.15,
        backward_s=0.3,
        runtimes=("gradweave", "optimal", "sharded"),
        repeats=30,
        iterations=1,
        calibrated=5,
        ratios=(("sharded", "gradweave"), ("sharded", "optimal")),
    ),
    Experiment(
        name="loops",
        title="Linear Pipeline, Table 2: its three loops by each collective, 4 nodes at 1 Gbit/s",
        clusters=(Nodes(4, "1gbit"),),
        traces=(("alexnet", 0.125), ("googlenet-k80", 0.25)),
        forward_s=0.1,
        backward_s=0.2,
        runtimes=LOOPS,
        repeats=3,
        iterations=5,
        largest_bytes=16 * MIB,
        calibrated=3,
    ),
    SPARSE,
    Experiment(
        name="sparse-pairs",
        title="Top-k and gTop-k at density 0.001, fifteen times in turn: 8 nodes at 100 Mbit/s",
        clusters=(Nodes(8, "100mbit"),),
        traces=(("alexnet", 0.25), ("vgg16", 1.0)),
        forward_s=0.1,
        backward_s=0.2,
        runtimes=("topk:0.001", "gtopk:0.001"),
        repeats=15,
        iterations=2,
        largest_bytes=8 * MIB,
        ratios=(("gtopk:0.001", "topk:0.001"),),
    ),
    replace(
        SPARSE,
        name="sparse-resnets",
        title="The same for its other models",
        runtimes=("torch-ddp", "optimal", "topk:0.001", "gtopk:0.001"),
        repeats=5,
        traces=(("resnet20", 1.0), ("resnet50", 0.1)),
    ),
    Experiment(
        name="tiers",
        title="BlueConnect, Fig. 6 in small: ResNet-50's proportions on nodes of several ranks, "
        "200 Mbit/s between nodes",
        clusters=(Nodes(2, "200mbit", 4), Nodes(4, "200mbit", 2)),
        traces=(("resnet50", 0.08),),
        forward_s=0.1,
        backward_s=0.2,
        runtimes=(
            "torch-ddp",
            "optimal@native",
            "optimal@ring",
            "optimal@two-level",
            "optimal@blueconnect",
            "optimal@any",
        ),
        repeats=6,
        iterations=3,
        largest_bytes=8 * MIB,
        calibrated=3,
    ),
    Experiment(
        name="servers",
        title="Parameter servers, MG-WFBP journal Figs. 6 and 7: 4 nodes at 1 Gbit/s, an eighth of "
        "the parameters",
        clusters=(Nodes(4, "1gbit"),),
        traces=(("googlenet-k80", 0.125), ("resnet50", 0.125)),
        forward_s=0.1,
        backward_s=0.2,
        runtimes=(
            "torch-ddp",
            "wfbp@native",
            "wfbp@parameter-server",
            "wfbp@parameter-server:4",
            "optimal@native",
            "optimal@parameter-server",
            "optimal@parameter-server:4",
        ),
        repeats=5,
        iterations=3,
        largest_bytes=16 * MIB,
        calibrated=3,
    ),
]
