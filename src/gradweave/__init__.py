"""Fast synchronous data-parallel training in PyTorch on the network you have.

    from gradweave import DistributedDataParallel as DDP
    model = DDP(model)

Wrap a model:

    DistributedDataParallel  plans its messages while the model trains
    ShardedDataParallel      the same, where each rank updates a shard of every parameter
    watch                    measures what torch's own wrapper does

Compress its gradients:

    GTopK, TopK, Densities   only the largest elements travel
    Compression              how one message of a plan is made smaller

Save and restart:

    TrainingState            a training in a checkpoint of torch.distributed.checkpoint
    Recipe, saved_recipe     the plan of an earlier run

Measure:

    record_trace, load_trace      Trace of Tensor: when gradients are ready
    calibrate, load_network       Network of CollectiveCost and Links: what messages cost
    Line, Curve, Link, Level      what these are made of

Plan and predict:

    make_plan                Plan of Bucket: which gradients travel together
    simulate                 Timeline of Span: what a step would look like
    advise                   compares other ways to train
    read, write              any of these values in a file

Errors:

    GradweaveError           the root of FormatError, LabError, PlanMismatch, RequestError,
                             UnknownCost and CollectiveError

Everything for users is here and in these modules; what is below ``gradweave._src`` may change.

    gradweave.hooks              communication hooks for torch's own wrapper
    gradweave.sparse_checkpoint  what compressed training keeps back, in files of its own
    gradweave.integrations       Lightning, Accelerate, Transformers
    gradweave.bsp                the three loops of the Linear Pipeline paper
    gradweave.lab                a cluster on one machine
    gradweave.workloads          small models and data sets to try it with
    gradweave.types              what calls take and return, for annotations

Importing gradweave does not import torch; names that need torch import it when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from gradweave._src.advice import advise
from gradweave._src.compression import Compression
from gradweave._src.costs import Curve, Level, Line, Link, Links
from gradweave._src.errors import (
    CollectiveError,
    FormatError,
    GradweaveError,
    LabError,
    PlanMismatch,
    RequestError,
    UnknownCost,
)
from gradweave._src.files import read, write
from gradweave._src.network import CollectiveCost, Network
from gradweave._src.plan import Bucket, Plan
from gradweave._src.planning import make_plan
from gradweave._src.presets import load_network, load_trace
from gradweave._src.recipe import Recipe
from gradweave._src.simulation import simulate
from gradweave._src.timeline import Span, Timeline
from gradweave._src.trace import Tensor, Trace

if TYPE_CHECKING:
    from gradweave import bsp as bsp
    from gradweave import hooks as hooks
    from gradweave import integrations as integrations
    from gradweave import lab as lab
    from gradweave import sparse_checkpoint as sparse_checkpoint
    from gradweave import types as types
    from gradweave import workloads as workloads
    from gradweave._src.checkpoint.training_state import TrainingState, saved_recipe
    from gradweave._src.measure.backward import record_trace
    from gradweave._src.measure.network import calibrate
    from gradweave._src.runtime.ddp import DistributedDataParallel
    from gradweave._src.runtime.reporting.watched import watch
    from gradweave._src.runtime.sharded import ShardedDataParallel
    from gradweave._src.sparse.settings import GTopK, TopK
    from gradweave._src.sparse.warmup import Densities

_WITH_TORCH = {
    "DistributedDataParallel": "gradweave._src.runtime.ddp",
    "ShardedDataParallel": "gradweave._src.runtime.sharded",
    "Densities": "gradweave._src.sparse.warmup",
    "GTopK": "gradweave._src.sparse.settings",
    "TopK": "gradweave._src.sparse.settings",
    "TrainingState": "gradweave._src.checkpoint.training_state",
    "calibrate": "gradweave._src.measure.network",
    "record_trace": "gradweave._src.measure.backward",
    "saved_recipe": "gradweave._src.checkpoint.training_state",
    "watch": "gradweave._src.runtime.reporting.watched",
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
    "advise",
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

__version__ = "0.2.0.dev0"


# Modules for users, which are found as attributes without being imported first.
_MODULES = {"bsp", "hooks", "integrations", "lab", "sparse_checkpoint", "types", "workloads"}


def __dir__() -> list[str]:
    return list(__all__)


# Type checkers know the names from above, and refuse all others.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return import_module(f"gradweave.{name}")
        if name not in _WITH_TORCH:
            raise AttributeError(f"module 'gradweave' has no attribute {name!r}")
        return getattr(import_module(_WITH_TORCH[name]), name)
