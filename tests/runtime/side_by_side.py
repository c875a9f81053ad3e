"""One training script, run with torch's wrapper and with ours on the same data.

A script is a function of ``wrap`` and ``rank``: it wraps its models by ``wrap(model, **options)``,
takes as many steps as ``wrap.steps()`` says, and returns by name what came out of it: modules,
tensors and plain values.
"""

import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave import DistributedDataParallel

STAGES = ("not begun", "recording", "learning", "trying", "settled")
# Its plan is tried whatever is predicted, so that buckets change.
QUICK = {"record_steps": 1, "trial_steps": 1, "planner": "single"}
# So that torch's own buckets of these small models are several, and one of them is another plan.
SMALL_BUCKETS = {"bucket_cap_mb": 0.0005}
LEAST_STEPS, MOST_STEPS = 24, 600
# Steps between two looks at the stage, and how often it is looked at once planning is over.
LOOK_EVERY, LOOKS_AFTERWARDS = 1, 12


class Course(NamedTuple):
    """How long a script ran with ours, and at which steps it first saw each stage."""

    steps: int
    began: dict[str, int]


class TorchsWrapper:
    """Wraps by torch's class, for as many steps as ours has taken."""

    def __init__(self, course: Course) -> None:
        self._course, self._step = course, 0

    def __call__(self, module: nn.Module, **options: Any) -> TorchDDP:
        return TorchDDP(module, **(SMALL_BUCKETS | options))

    def steps(self):
        for step in range(self._course.steps):
            self._step = step
            yield step

    def begins(self, stage: str) -> bool:
        """Whether this is the step at which ours was first seen in that stage."""
        return self._course.began.get(stage) == self._step


class OurWrapper:
    """Wraps by our class, until all that were wrapped have been settled for a while.

    Ranks look at each other's stages by a group of the test's own, which is not the script's.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._wrapped: list[weakref.ref[DistributedDataParallel]] = []
        self._step, self._taken, self._looks_afterwards = 0, 0, 0
        self.began: dict[str, int] = {}

    def __call__(self, module: nn.Module, **options: Any) -> DistributedDataParallel:
        wrapped = DistributedDataParallel(module, **(SMALL_BUCKETS | QUICK | options))
        self._wrapped.append(weakref.ref(wrapped))
        return wrapped

    def steps(self):
        self._step = 0
        while self._step < MOST_STEPS:
            if self._step % LOOK_EVERY == 0 and self._is_long_over():
                break
            self._taken += 1
            yield self._step
            self._step += 1

    def begins(self, stage: str) -> bool:
        return self.began.get(stage) == self._step

    @property
    def course(self) -> Course:
        return Course(self._taken, self.began)

    @property
    def explanations(self) -> list[str]:
        return [wrapped.explain() for wrapped in self._alive()]

    def _alive(self) -> list[DistributedDataParallel]:
        return [wrapped for ref in self._wrapped if (wrapped := ref()) is not None]

    def _is_long_over(self) -> bool:
        """Agreed on by all ranks."""
        latest = max(STAGES.index(stage) for stage in map(stage_of, self._alive()))
        is_open = any(map(may_change, self._alive()))
        seen = torch.tensor([latest, int(is_open)])
        self._group.allreduce([seen], dist.ReduceOp.MAX).wait()
        self.began.setdefault(STAGES[int(seen[0])], self._step)
        self._looks_afterwards += int(seen[1]) == 0
        return self._step >= LEAST_STEPS and self._looks_afterwards > LOOKS_AFTERWARDS


def stage_of(wrapped: DistributedDataParallel) -> str:
    return wrapped.findings().stage


def may_change(wrapped: DistributedDataParallel) -> bool:
    """Not where planning is over, nor where it never was possible."""
    return stage_of(wrapped) != "settled" and not gave_up(wrapped.explain())


def gave_up(explained: str) -> bool:
    return explained.startswith("Torch's own buckets stay: ")


class Sides(NamedTuple):
    """What one rank has to tell."""

    ours: dict[str, Any]
    torchs: dict[str, Any]
    course: Course
    explanations: list[str]


def side_by_side(group: dist.ProcessGroup, script) -> Sides:
    """With ours first, which says how many steps there are."""
    ours, course, explanations = _with_ours(script, group.rank())
    torchs = plain(script(TorchsWrapper(course), group.rank()))
    return Sides(ours, torchs, course, explanations)


def _with_ours(script, rank):
    """In a frame of its own: wrappers die with it, before process groups."""
    wrap = OurWrapper(dist.new_group())
    came_out = script(wrap, rank)
    return plain(came_out), wrap.course, wrap.explanations


def plain(value):
    """Modules and tensors as plain values, which travel between processes."""
    if isinstance(value, nn.Module):
        return plain(dict(value.state_dict()))
    if isinstance(value, torch.Tensor):
        return value.detach().resolve_conj().tolist()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def is_same(one, other, *, within=0.0):
    """Of nested plain values; numbers may differ by so much."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            is_same(one[name], other[name], within=within) for name in one
        )
    if isinstance(one, list):
        return len(one) == len(other) and all(
            is_same(a, b, within=within) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, float | complex) and within:
        return abs(one - other) <= within
    return one == other
