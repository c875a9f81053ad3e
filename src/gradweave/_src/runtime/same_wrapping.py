"""Whether all ranks wrap alike: one small message says so before anything else is sent.

Ranks with other options would send or wait for other messages than others: they would end in a
time-out that names nothing, in an abort of torch's, or go on with other weights.
"""

import inspect
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from hashlib import sha256
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave._src.comm.groups import cloned_store
from gradweave._src.comm.small_messages import all_say_the_same, gather_long_text
from gradweave._src.errors import RequestError
from gradweave._src.in_time import in_time
from gradweave._src.plan import Plan
from gradweave._src.recipe import Recipe
from gradweave._src.runtime.options import Options

# Rank 0's counts, and a variable of the environment may be set on some hosts only.
OF_RANK_0 = {"cache"}
# What torch's wrapper may be told differently: where this rank computes, and how it keeps what it
# has.
OF_EACH_RANK = {
    "device_ids",
    "output_device",
    "dim",
    "process_group",
    "device_mesh",
    "check_reduction",
    "gradient_as_bucket_view",
}
# Others come within milliseconds, as a rule; later on this rank asks whether one of them refuses.
ASKED_AFTER_S, ASKED_EVERY_S, ANSWERED_WITHIN_S = 0.5, 0.1, 5.0
# A message about differences names at most so many of each.
MOST_FIELDS, MOST_RANKS, MOST_CHARACTERS = 3, 8, 120
NOT_SAID = "not given"
WRAPPER = "wrapper"  # the field that says which one
# Whoever gives torch nothing for one of these means that.
MEANT_BY_NONE = {"broadcast_buffers": True, "forward_sync_buffers": True}

Said = Mapping[str, str]

# How often models were wrapped for a group. All ranks wrap in the same order, so a number is a
# name.
_wrapped: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


class SameWrapping:
    """One call of a wrapper's constructor, which all ranks make together.

    Without a group nothing is compared: torch will say that there is none.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = None if group is None or group.size() == 1 else group
        self._store: Store | None = None
        self._ask_at_s = 0.0
        if self._group is not None:
            number = _wrapped.get(self._group, 0) + 1
            _wrapped[self._group] = number
            self._refused_key = f"gradweave, refused when wrapping number {number}"

    @contextmanager
    def refusals_told(self) -> Iterator[None]:
        """Tell other ranks, which wait for this one, what it refuses within a block.

        It does not wait for them: perhaps they refuse by themselves.
        """
        try:
            yield
        except Exception as error:
            if self._group is not None:
                text = " ".join(str(error).split()) or type(error).__name__
                with suppress(RuntimeError, OSError):  # the store is gone, and others with it
                    self._opened_store().set(
                        self._refused_key, f"rank {self._group.rank()}: {text}"
                    )
            raise

    def require_same(self, said: Said) -> None:
        """Raise on all ranks where they do not say the same, or where one of them has refused."""
        group = self._group
        if group is None:
            return
        text = msgspec.json.encode(said).decode()
        self._ask_at_s = time.monotonic() + ASKED_AFTER_S
        try:
            are_alike = all_say_the_same(group, text, while_waiting=self._raise_refusal_in_time)
        except RuntimeError:  # a rank is gone, perhaps because it has refused
            self._raise_refusal()
            raise
        if not are_alike:
            texts = gather_long_text(group, text)
            everyone = [msgspec.json.decode(one, type=dict[str, str]) for one in texts]
            raise RequestError(
                f"ranks wrap differently: {differences(everyone)}; wrap the same model alike on "
                "every rank"
            )

    def _raise_refusal_in_time(self) -> None:
        if time.monotonic() >= self._ask_at_s:
            self._ask_at_s = time.monotonic() + ASKED_EVERY_S
            self._raise_refusal()

    def _raise_refusal(self) -> None:
        try:
            refused = in_time(self._refusal, limit_s=ANSWERED_WITHIN_S)
        except (RuntimeError, OSError):  # what happens to the message will say more
            self._ask_at_s = inf
            return
        if refused is not None:
            raise RequestError(f"another rank could not wrap its model: {refused}")

    def _refusal(self) -> str | None:
        store = self._opened_store()
        if not store.check([self._refused_key]):
            return None
        return store.get(self._refused_key).decode()

    def _opened_store(self) -> Store:
        if self._store is None:
            assert self._group is not None
            self._store = cloned_store(self._group)
        if self._store is None:
            raise RuntimeError("the group has no store that others can use beside it")
        return self._store


def differences(everyone: Sequence[Said]) -> str:
    """Say in words what ranks say differently: the field, its values, and whose they are."""
    found = []
    for field in dict.fromkeys(field for said in everyone for field in said):
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for rank, said in enumerate(everyone):
            ranks_of[said.get(field, NOT_SAID)].append(rank)
        if len(ranks_of) > 1:
            values = [f"{_short(value)} on {_named(ranks)}" for value, ranks in ranks_of.items()]
            found.append(f"{field} is {', '.join(values[:-1])} and {values[-1]}")
            if field == WRAPPER:
                break  # which has other fields
    more = len(found) - MOST_FIELDS
    return "; ".join(found[:MOST_FIELDS]) + (f"; and {more} more" if more > 0 else "")


def options_said(options: Options) -> dict[str, str]:
    """Return what is said of our own options, which both wrappers have."""
    names = [name for name in options.__struct_fields__ if name not in OF_RANK_0]
    said = {name: _said(getattr(options, name)) for name in names}
    compression = options.compression
    if compression is not None:
        said["compression"] = type(compression).__name__
        for field in fields(compression):
            said[f"compression's {field.name}"] = repr(getattr(compression, field.name))
    return said


def torch_options_said(given: Mapping[str, Any]) -> dict[str, str]:
    """Return what is said of torch's options; whoever gives a default gives nothing."""
    known = inspect.signature(TorchDDP.__init__).parameters
    defaults = {name: one.default for name, one in known.items() if one.default is not one.empty}
    return {
        name: _said(MEANT_BY_NONE.get(name) if value is None else value)
        for name, value in {**defaults, **given}.items()
        if name not in OF_EACH_RANK
    }


def plan_said(source: object, given: Plan | Recipe | None) -> str:
    """Return what is said of a plan: its kind and length, and the beginning of a digest."""
    if source is None:
        return "None"
    if given is None:
        return "a recipe for something else"
    plan = given.plan if isinstance(given, Recipe) else given
    digest = sha256(msgspec.json.encode(given)).hexdigest()[:8]
    kind = type(given).__name__.lower()
    return f"a {kind} of {len(plan.buckets)} messages by {plan.planner!r} ({digest})"


def given_said(value: object) -> str:
    """Return what is said of something that is only there or not."""
    return "None" if value is None else "given"


def _said(value: object) -> str:
    """Return how a value is told to others: by itself if it is plain, otherwise by its kind."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_said, value))}]"
    is_value = is_dataclass(value) and not isinstance(value, type)
    return repr(value) if is_value else type(value).__name__


def _named(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:MOST_RANKS]))
    more = len(ranks) - MOST_RANKS
    if more > 0:
        named += f" and {more} more"
    return f"rank{'' if len(ranks) == 1 else 's'} {named}"


def _short(value: str) -> str:
    return value if len(value) <= MOST_CHARACTERS else f"{value[:MOST_CHARACTERS]}…"
