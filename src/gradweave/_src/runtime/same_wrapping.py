"""Whether all ranks wrap alike: they compare it in the store before anything else is sent.

Ranks with other options would send or wait for other messages than others: they would end in a
time-out that names nothing, in an abort of torch's, or go on with other weights.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields, is_dataclass
from functools import wraps
from hashlib import sha256
from time import monotonic, sleep
from typing import Any, ParamSpec, TypeVar

import msgspec
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave import __version__
from gradweave._src.comm.groups import common_place
from gradweave._src.comm.small_messages import all_say_the_same, gather_long_text
from gradweave._src.comm.stores import cloned_store
from gradweave._src.errors import CollectiveError, RequestError
from gradweave._src.in_time import in_time
from gradweave._src.plan import Plan
from gradweave._src.recipe import Recipe
from gradweave._src.runtime.options import Options, check_names
from gradweave._src.runtime.torch_arguments import asked_group
from gradweave._src.torch_internals import group_timeout, is_fake

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
# Keys of the store, below the place of a wrapper. What is over is so by all ranks' having come, or
# by what one of them refuses.
COME, OVER, LEFT = "wrapping/come", "wrapping/over", "wrapping/left"
ALL_ARE_HERE, GIVEN_UP = "all are here", "given up: "
# Others come within milliseconds, as a rule.
ASKED_EVERY_S, ASKED_LATER_EVERY_S, PATIENCE = 0.0005, 0.1, 1.2
ANSWERED_WITHIN_S = TOLD_WITHIN_S = 5.0
# A message about differences names at most so many of each.
MOST_FIELDS, MOST_RANKS, MOST_CHARACTERS = 3, 8, 120
NOT_SAID = "not given"
# Fields of which another value means other fields.
WRAPPER, VERSION = "wrapper", "gradweave's version"
# Whoever gives torch nothing for one of these means that.
MEANT_BY_NONE = {"broadcast_buffers": True, "forward_sync_buffers": True}

Said = Mapping[str, str]
Answer = TypeVar("Answer")
Given = ParamSpec("Given")


class SameWrapping:
    """One call of a wrapper's constructor, which all ranks make together.

    ``store`` is a place for this wrapper in the group's store, the same on all ranks; None on all
    of them where one has no store that can be used beside the group. Make this before anything is
    refused: a message on the group, which no rank may leave behind there, finds that place. Without
    a group nothing is compared: torch will say that there is none.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = None if group is None or group.size() == 1 else group
        self.store: Store | None = None
        self._has_own_store = False
        if self._group is not None:
            self.store, self._has_own_store = agreed_place(self._group, "wrap")

    @contextmanager
    def refusals_told(self) -> Iterator[None]:
        """Tell other ranks, which wait for this one, what it refuses within a block.

        It does not wait for them: perhaps they refuse by themselves.
        """
        try:
            yield
        except Exception as error:
            group, store = self._group, self.store
            if group is not None and store is not None:
                text = " ".join(str(error).split()) or type(error).__name__
                told = f"rank {group.rank()}: {text}"
                with suppress(RuntimeError, OSError):  # the store is gone, and others with it
                    in_time(lambda: refuse(store, told, group.size()), limit_s=TOLD_WITHIN_S)
            raise

    def require_same(self, said: Said) -> None:
        """Raise on all ranks where they do not say the same, or where one of them has refused.

        Raises:
            RequestError: on all ranks.
            CollectiveError: where a rank does not come, or the store does not answer, within the
                group's time-out.
        """
        group = self._group
        if group is None:
            return
        reach = "in reach" if self._has_own_store else "out of reach"
        text = msgspec.json.encode({VERSION: __version__, "the group's store": reach, **said})
        if self.store is None or is_fake(group):
            are_alike = all_say_the_same(group, text.decode())
        else:
            are_alike = meet(group, self.store, sha256(text).hexdigest())
        if not are_alike:
            texts = gather_long_text(group, text.decode())  # all ranks are here
            everyone = [msgspec.json.decode(one, type=dict[str, str]) for one in texts]
            raise RequestError(
                f"ranks wrap differently: {differences(everyone)}; wrap the same model alike on "
                "every rank"
            )


def telling_unknown_names(wrap: Callable[Given, None]) -> Callable[Given, None]:
    """Let a constructor that takes no other options than its own refuse others as it does theirs.

    Python refuses them before its first line, and other ranks would wait for this one in vain.
    """
    wrapper, _, _ = wrap.__qualname__.partition(".")
    known = list(inspect.signature(wrap).parameters)

    @wraps(wrap)
    def checked(*args: Given.args, **kwargs: Given.kwargs) -> None:
        group = asked_group({"process_group": kwargs.get("process_group")})
        are_known = kwargs.keys() <= set(known)
        with nullcontext() if are_known else SameWrapping(group).refusals_told():
            check_names(wrapper, kwargs, known)
            wrap(*args, **kwargs)

    return checked


def agreed_place(group: dist.ProcessGroup, what: str) -> tuple[Store | None, bool]:
    """Return a place of their own in the store for ranks that make a wrapper or watch one.

    All ranks call this together. Beside it this says whether this rank reaches the store, for no
    rank has a place where one of them does not.

    Raises:
        CollectiveError: where another rank is gone, or does not come within the group's time-out.
    """
    try:
        own = cloned_store(group)
    except dist.DistError:
        own = None
    try:
        return common_place(group, own), own is not None
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise CollectiveError(
            f"rank {group.rank()} cannot meet the others to {what} a model: {reason}"
        ) from error


def refuse(store: Store, told: str, ranks: int) -> None:
    """Tell all who come to a meeting of so many ranks that this one does not, and why."""
    store.compare_set(OVER, "", told)
    _leave(store, ranks)


def _leave(store: Store, ranks: int) -> None:
    """Count this rank as one that asks for nothing more; the last one clears up."""
    if store.add(LEFT, 1) == ranks:
        for key in (COME, OVER, LEFT):
            store.delete_key(key)


def meet(group: dist.ProcessGroup, store: Store, digest: str) -> bool:
    """Wait until all ranks have come, and return whether all have the same digest.

    Nothing is sent on the group, where a rank that is refused would leave it behind.
    """
    timeout = group_timeout(group) or default_pg_timeout
    meeting = _Meeting(store, digest, group.size(), until_s=monotonic() + timeout.total_seconds())
    try:
        return meeting.hold()
    except (RuntimeError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise CollectiveError(
            f"rank {group.rank()} cannot learn whether all ranks wrap alike: {reason}"
        ) from error


class _Meeting:
    """Ranks count themselves in a store, in all and by digest, and ask for one key until all have.

    That key is written once, by the last one to come or by one that refuses or gives up, and all
    ranks go by it. What a rank asks for does not grow with their number.
    """

    def __init__(self, store: Store, digest: str, ranks: int, *, until_s: float) -> None:
        self._store, self._ranks, self._until_s = store, ranks, until_s
        self._alike = f"wrapping/come with {digest}"

    def hold(self) -> bool:
        self._in_time(self._come)
        pause_s = ASKED_EVERY_S
        while (over := self._in_time(self._over)) is None:
            sleep(pause_s)
            pause_s = min(pause_s * PATIENCE, ASKED_LATER_EVERY_S)
        alike = self._in_time(self._leave_with if over == ALL_ARE_HERE else self._go_back)
        if over.startswith(GIVEN_UP):
            raise TimeoutError(over.removeprefix(GIVEN_UP))
        if over != ALL_ARE_HERE:
            raise RequestError(f"another rank could not wrap its model: {over}")
        return alike == self._ranks

    def _come(self) -> None:
        self._store.add(self._alike, 1)
        if self._store.add(COME, 1) == self._ranks:
            self._store.compare_set(OVER, "", ALL_ARE_HERE)

    def _over(self) -> str | None:
        if self._store.check([OVER]):
            return self._store.get(OVER).decode()
        if monotonic() < self._until_s:
            return None
        told = f"{GIVEN_UP}{self._store.add(COME, 0)} of {self._ranks} ranks have come in time"
        return self._store.compare_set(OVER, "", told).decode()

    def _leave_with(self) -> int:
        """Return how many ranks are alike; the last one of them leaves nothing behind."""
        alike, left = int(self._store.get(self._alike)), f"{self._alike}, and left"
        if self._store.add(left, 1) == alike:
            for key in (self._alike, left):
                self._store.delete_key(key)
        _leave(self._store, self._ranks)
        return alike

    def _go_back(self) -> int:
        """Take back that this rank has come, for others may still come."""
        if self._store.add(self._alike, -1) == 0:
            self._store.delete_key(self._alike)
        _leave(self._store, self._ranks)
        return 0

    def _in_time(self, call: Callable[[], Answer]) -> Answer:
        return in_time(call, limit_s=max(ANSWERED_WITHIN_S, self._until_s - monotonic()))


def differences(everyone: Sequence[Said]) -> str:
    """Say in words what ranks say differently: the field, its values, and whose they are."""
    found = []
    for field in dict.fromkeys(field for said in everyone for field in said):
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for rank, said in enumerate(everyone):
            ranks_of[said.get(field, NOT_SAID)].append(rank)
        if len(ranks_of) > 1:
            values = [
                f"{_short(value)} on {named_ranks(ranks)}" for value, ranks in ranks_of.items()
            ]
            found.append(f"{field} is {', '.join(values[:-1])} and {values[-1]}")
            if field in {WRAPPER, VERSION}:
                break
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


def named_ranks(ranks: Sequence[int]) -> str:
    """Return such texts as ``rank 3``, or ``ranks 0, 1``, of which many are not named."""
    named = ", ".join(map(str, ranks[:MOST_RANKS]))
    more = len(ranks) - MOST_RANKS
    if more > 0:
        named += f" and {more} more"
    return f"rank{'' if len(ranks) == 1 else 's'} {named}"


def _short(value: str) -> str:
    return value if len(value) <= MOST_CHARACTERS else f"{value[:MOST_CHARACTERS]}…"
