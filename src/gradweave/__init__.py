"""Fast synchronous data-parallel training in PyTorch on the network you have."""

from gradweave.compression import Compression
from gradweave.costs import Curve, Level, Line, Link, Links
from gradweave.errors import (
    CollectiveError,
    FormatError,
    GradweaveError,
    LabError,
    PlanMismatch,
    RequestError,
    UnknownCost,
)
from gradweave.files import read, write
from gradweave.network import CollectiveCost, Network
from gradweave.plan import Bucket, Plan
from gradweave.planning import make_plan
from gradweave.presets import load_network, load_trace
from gradweave.simulation import simulate
from gradweave.timeline import Span, Timeline
from gradweave.trace import Tensor, Trace

__all__ = [
    "Bucket",
    "CollectiveCost",
    "CollectiveError",
    "Compression",
    "Curve",
    "FormatError",
    "GradweaveError",
    "LabError",
    "Level",
    "Line",
    "Link",
    "Links",
    "Network",
    "Plan",
    "PlanMismatch",
    "RequestError",
    "Span",
    "Tensor",
    "Timeline",
    "Trace",
    "UnknownCost",
    "load_network",
    "load_trace",
    "make_plan",
    "read",
    "simulate",
    "write",
]

__version__ = "0.1.0"
