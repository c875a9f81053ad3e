"""What is tried, each on all ranks at once. A new check is a function and a line in ``CHECKS``.

A check returns what it found in a line, and raises AssertionError with a line where that is wrong,
or Skipped where it cannot be tried here. A failure on one rank is a failure on all.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave._src.bench.buckets import bucket_bytes
from gradweave._src.plan import Bucket, Plan
from gradweave._src.runtime.ddp import DistributedDataParallel
from gradweave._src.runtime.sharded import ShardedDataParallel
from gradweave._src.selftest.trainings import FEATURES, Training, batch, small_model
from gradweave._src.sparse.settings import GTopK
from gradweave._src.timeline import Timeline
from gradweave._src.torch_internals import torch_bucket_bytes

# A plan is tried whatever is predicted, so that buckets change; torch's own are several.
QUICK: dict[str, Any] = {"record_steps": 1, "trial_steps": 1, "planner": "single"}
TORCH_OPTIONS: dict[str, Any] = {"bucket_cap_mb": 0.005}
SETTLED_STEPS = 5
SPARSE_STEPS, DENSITY = 6, 0.05
# Sums in another order are rounded in another way.
LARGEST_DIFFERENCE = 1e-5
# Weights are up to 0.2; rounding to 8 bits moves them by 1e-5, and sums in another order by 3e-8.
SMALLEST_ROUNDED_DIFFERENCE = 1e-6
LARGEST_ROUNDED_DIFFERENCE = 1e-3
# What was averaged over ranks that are no power of two is whole again but for this.
LARGEST_ERROR_OF_SUMS = 0.1


class Skipped(Exception):
    """Raised where a check cannot be tried here; the line says why."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place where a rank trains."""

    group: dist.ProcessGroup
    device: torch.device
    beside: dist.ProcessGroup  # of gloo, for what checks tell each other

    @property
    def rank(self) -> int:
        return self.group.rank()

    def training(self, wrapped: Any, *, passes: int = 1) -> Training:
        return Training(wrapped, self.rank, self.device, passes=passes)


Check = Callable[[Place], str]
Wrapper = Callable[[nn.Module], Any]


def equals_torch(place: Place, *, wrap: Wrapper, passes: int = 1) -> str:
    """Check that weights after planning are torch's after as many steps on the same data."""
    ours = place.training(wrap(small_model(place.device)), passes=passes)
    ours.settle()
    ours.run(SETTLED_STEPS)
    difference = _difference_from_torchs(place, ours, passes=passes)
    assert difference <= LARGEST_DIFFERENCE, (
        f"weights differ from those of torch's wrapper by {difference:g} after {ours.steps} steps"
    )
    how = "the same bits" if difference == 0 else f"within {difference:.1g}"
    return f"weights as with torch's wrapper, {how}, after {ours.steps} steps"


def _difference_from_torchs(place: Place, ours: Training, *, passes: int = 1) -> float:
    """Return the largest difference of a weight from torch's after as many steps."""
    torchs = place.training(TorchDDP(small_model(place.device), **TORCH_OPTIONS), passes=passes)
    torchs.run(ours.steps)
    return max(
        float((mine - theirs).abs().max())
        for mine, theirs in zip(ours.weights(), torchs.weights(), strict=True)
    )


def rounds_alike(place: Place) -> str:
    """Check that all ranks end with the same bits where gradients travel in 8 bits."""
    ours = place.training(_reducing(small_model(place.device), precision="int8"))
    ours.settle()
    ours.run(SETTLED_STEPS)
    _require_same(place, torch.cat([weight.flatten() for weight in ours.weights()]))
    difference = _difference_from_torchs(place, ours)
    assert difference >= SMALLEST_ROUNDED_DIFFERENCE, (
        f"nothing was rounded: weights are within {difference:g} of those without"
    )
    assert difference <= LARGEST_ROUNDED_DIFFERENCE, (
        f"weights differ from those without rounding by {difference:g} after {ours.steps} steps"
    )
    return f"the same bits on all ranks after {ours.steps} steps, within {difference:.1g} of exact"


def carries_out_plan(place: Place) -> str:
    """Check that buckets are those of a plan that torch would not make."""
    model = small_model(place.device)
    names = [name for name, _ in model.named_parameters()][::-1]
    parts = (names[:1], names[1:4], names[4:])
    plan = Plan(
        planner="selftest",
        buckets=tuple(Bucket(tensors=tuple(part), collective="native") for part in parts),
    )
    wrapped = DistributedDataParallel(model, plan=plan)
    place.training(wrapped).run(3)
    bytes_of = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    planned, found = bucket_bytes(plan, bytes_of), torch_bucket_bytes(wrapped)
    assert found == planned, f"buckets of {found} bytes where {planned} were planned"
    return f"buckets of {', '.join(map(str, found))} bytes, as planned"


def keeps_all_gradients(place: Place) -> str:
    """Check that what gTop-k has applied and still keeps are exactly all gradients there were.

    Gradients are whole numbers, so sums are exact in any order.
    """
    model = nn.Linear(FEATURES, 40, bias=False)
    nn.init.zeros_(model.weight)
    produced = torch.zeros_like(model.weight.detach())
    model.to(place.device)
    wrapped = DistributedDataParallel(model, compression=GTopK(DENSITY))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
    for step in range(SPARSE_STEPS):
        inputs = (4 * batch(step, place.rank, torch.device("cpu"))).round()
        # The gradient of a sum of all outputs is the sum of inputs, here times the output's number.
        factors = torch.arange(1.0, 41.0)
        produced += torch.outer(factors, inputs.sum(0))
        optimizer.zero_grad()
        (wrapped(inputs.to(place.device)) @ factors.to(place.device)).sum().backward()
        optimizer.step()
    kept = wrapped.sparse_state_dict()["residuals"]["values"]["weight"].cpu()
    sums = -model.weight.detach().cpu() * place.group.size()
    _require_same(place, sums)
    applied = sums.round()
    assert float((sums - applied).abs().max()) <= LARGEST_ERROR_OF_SUMS, "sums are not whole"
    total = torch.stack([produced, kept])
    _reduce(place, total, dist.ReduceOp.SUM)
    missing = float((total[0] - total[1] - applied).abs().max())
    assert missing == 0, f"up to {missing:g} of a gradient is neither applied nor kept"
    assert kept.any(), "everything was applied, so nothing is shown"
    return f"all gradients of {SPARSE_STEPS} steps are applied or kept, the same on all ranks"


def has_consistent_timeline(place: Place, *, wrap: Wrapper) -> str:
    """Check that spans are in the order of events, and that messages carry every gradient."""
    wrapped = wrap(small_model(place.device))
    training = place.training(wrapped)
    training.settle()
    training.run(SETTLED_STEPS)
    timelines = wrapped.timelines()
    names = {name for name, _ in wrapped.module.named_parameters()}
    for timeline in timelines:
        _require_consistent(timeline, names)
    mine = timelines[place.rank]
    return f"of all ranks, in order; the last step here: {mine.summary}"


def _require_consistent(timeline: Timeline, names: set[str]) -> None:
    of_lane = {
        lane: [span for span in timeline.spans if span.lane == lane]
        for lane in ("forward", "backward", "communication")
    }
    for lane, spans in of_lane.items():
        assert spans, f"nothing on the {lane} lane"
    forward, backward = of_lane["forward"], of_lane["backward"]
    assert forward[-1].end_s <= backward[0].start_s, "backward begins before forward ends"
    for lane in ("forward", "backward"):
        for before, after in pairwise(of_lane[lane]):
            assert before.end_s <= after.start_s, f"spans overlap on the {lane} lane"
    sent = {name for span in of_lane["communication"] for name in span.tensors}
    assert sent == names, f"no message has {sorted(names - sent)}"
    leaving = [span for span in of_lane["communication"] if span.end_s > backward[0].start_s]
    assert leaving, "no message travels in backward or after it"
    first = min(span.start_s for span in leaving)
    assert first >= backward[0].start_s, "a gradient travels before backward begins"


def makes_nobody_wait(place: Place, *, wrap: Wrapper) -> str:
    """Check that no call in settled steps makes the host wait for the device, as torch sees it.

    Data are on the device before, and nothing reads a loss.
    """
    if not _watches_waits(place.device):
        raise Skipped(f"torch does not watch for waits of the host on {place.device.type}")
    training = place.training(wrap(small_model(place.device)))
    training.settle()
    training.run(SETTLED_STEPS)
    inputs = [batch(step, place.rank, place.device) for step in range(SETTLED_STEPS)]
    with _no_waiting(place.device):
        for one in inputs:
            training.step(one)
    return f"{SETTLED_STEPS} settled steps without a wait of the host"


def _watches_waits(device: torch.device) -> bool:
    if device.type == "cpu":
        return False
    return hasattr(torch.get_device_module(device), "set_sync_debug_mode")


@contextmanager
def _no_waiting(device: torch.device) -> Iterator[None]:
    watching = torch.get_device_module(device)
    torch.accelerator.synchronize(device)
    watching.set_sync_debug_mode("error")
    try:
        yield
    finally:
        watching.set_sync_debug_mode("default")


def _reduce(place: Place, tensor: torch.Tensor, operation: Any) -> None:
    dist.all_reduce(tensor, operation, group=place.beside)


def _require_same(place: Place, applied: torch.Tensor) -> None:
    lowest, highest = applied.clone(), applied.clone()
    _reduce(place, lowest, dist.ReduceOp.MIN)
    _reduce(place, highest, dist.ReduceOp.MAX)
    assert torch.equal(lowest, highest), "ranks have applied different gradients"


def _reducing(module: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, **QUICK, **TORCH_OPTIONS, **options)


def _sharding(module: nn.Module, **options: Any) -> ShardedDataParallel:
    return ShardedDataParallel(module, **QUICK, **options)


# In the order of what others rest on.
CHECKS: Mapping[str, Check] = {
    "equal to torch": partial(equals_torch, wrap=_reducing),
    "equal to torch, gradients of three passes": partial(equals_torch, wrap=_reducing, passes=3),
    "equal to torch, both passes": partial(equals_torch, wrap=_sharding),
    "equal to torch, both passes, three at a time": partial(equals_torch, wrap=_sharding, passes=3),
    "plan carried out": carries_out_plan,
    "8 bits": rounds_alike,
    "gTop-k loses nothing": keeps_all_gradients,
    "timeline": partial(has_consistent_timeline, wrap=partial(_reducing, timeline=True)),
    "timeline, both passes": partial(
        has_consistent_timeline, wrap=partial(_sharding, timeline=True)
    ),
    "no waits of the host": partial(makes_nobody_wait, wrap=_reducing),
    "no waits of the host, both passes": partial(makes_nobody_wait, wrap=_sharding),
}
