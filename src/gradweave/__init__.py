"""Fast synchronous data-parallel training in PyTorch on the network you have."""

from gradweave.compression import Compression
from gradweave.errors import FormatError, GradweaveError, RequestError, UnknownCost
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
    "Compression",
    "FormatError",
    "GradweaveError",
    "Network",
    "Plan",
    "RequestError",
    "Span",
    "Tensor",
    "Timeline",
    "Trace",
    "UnknownCost",
    "load_network",
    "load_trace",
    "make_plan",
    "simulate",
]

__version__ = "0.1.0"
