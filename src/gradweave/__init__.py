"""Fast synchronous data-parallel training in PyTorch on the network you have.

    from gradweave import DistributedDataParallel as DDP
    model = DDP(model)

``gradweave.hooks`` has communication hooks for torch's own wrapper.

What needs torch is imported when it is first asked for: everything else starts at once without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
from gradweave.recipe import Recipe
from gradweave.simulation import simulate
from gradweave.timeline import Span, Timeline
from gradweave.trace import Tensor, Trace

if TYPE_CHECKING:
    from gradweave.checkpoint.training_state import TrainingState, saved_recipe
    from gradweave.measure.backward import record_trace
    from gradweave.measure.network import calibrate
    from gradweave.runtime.ddp import DistributedDataParallel
    from gradweave.runtime.sharded import ShardedDataParallel
    from gradweave.runtime.watched import watch
    from gradweave.sparse.settings import GTopK, TopK
    from gradweave.sparse.warmup import Densities

WITH_TORCH = {
    "DistributedDataParallel": "gradweave.runtime.ddp",
    "ShardedDataParallel": "gradweave.runtime.sharded",
    "Densities": "gradweave.sparse.warmup",
    "GTopK": "gradweave.sparse.settings",
    "TopK": "gradweave.sparse.settings",
    "TrainingState": "gradweave.checkpoint.training_state",
    "calibrate": "gradweave.measure.network",
    "record_trace": "gradweave.measure.backward",
    "saved_recipe": "gradweave.checkpoint.training_state",
    "watch": "gradweave.runtime.watched",
}

__all__ = [
    "Bucket",
    "CollectiveCost",
    "CollectiveError",
    "Compression",
    "Curve",
    "Densities",
    "DistributedDataParallel",
    "FormatError",
    "GTopK",
    "GradweaveError",
    "LabError",
    "Level",
    "Line",
    "Link",
    "Links",
    "Network",
    "Plan",
    "PlanMismatch",
    "Recipe",
    "RequestError",
    "ShardedDataParallel",
    "Span",
    "Tensor",
    "Timeline",
    "TopK",
    "Trace",
    "TrainingState",
    "UnknownCost",
    "calibrate",
    "load_network",
    "load_trace",
    "make_plan",
    "read",
    "record_trace",
    "saved_recipe",
    "simulate",
    "watch",
    "write",
]

__version__ = "0.1.0"


def __dir__() -> list[str]:
    return sorted({*__all__, "__all__", "__doc__", "__file__", "__name__", "__version__", "hooks"})


def __getattr__(name: str) -> Any:
    if name == "hooks":
        return import_module("gradweave.hooks")
    if name not in WITH_TORCH:
        raise AttributeError(f"module 'gradweave' has no attribute {name!r}")
    return getattr(import_module(WITH_TORCH[name]), name)
