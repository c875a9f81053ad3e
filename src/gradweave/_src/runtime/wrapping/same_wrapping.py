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
from threading import Event
from typing import Any, ParamSpec

import msgspec
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave import __version__
from gradweave._src.comm.groups import common_place
from gradweave._src.comm.meetings import ALL_ARE_HERE, Meeting, named_ranks
from gradweave._src.comm.small_messages import all_say_the_same, gather_long_text
from gradweave._src.comm.stores import cloned_store
from gradweave._src.errors import CollectiveError, RequestError
from gradweave._src.in_time import in_time
from gradweave._src.plan import Plan
from gradweave._src.recipe import Recipe
from gradweave._src.runtime.wrapping.options import Options, check_names
from gradweave._src.runtime.wrapping.torch_arguments import asked_group
from gradweave._src.torch_internals import is_fake, timeout_s

# Only rank 0's value counts; the environment variable behind it may be set on some hosts only.
OF_RANK_0 = {"cache"}
# Options of torch's wrapper that may differ: where this rank computes, and how it keeps gradients.
OF_EACH_RANK = {
    "device_ids",
    "output_device",
    "dim",
    "process_group",
    "device_mesh",
    "check_reduction",
    "gradient_as_bucket_view",
}
GIVEN_UP = "given up: "  # the beginning of an ending that nobody has refused
# How long the store may take to answer, on top of waiting for others; and to take a refusal.
ANSWERED_WITHIN_S = TOLD_WITHIN_S = 5.0
# An error about differences names at most so many fields, and so many characters of a value.
MOST_FIELDS, MOST_CHARACTERS = 3, 120
NOT_SAID = "not given"
# Where these differ, other differences follow from them and are not listed.
WRAPPER, VERSION = "wrapper", "gradweave's version"
# What a rank says instead of its options, or beside them, where there is no store to say it in.
REFUSED, UNREACHED = "refused", "the store cannot be reached"
# Options for which None means this value to torch.
MEANT_BY_NONE = {"broadcast_buffers": True, "forward_sync_buffers": True}

Description = Mapping[str, str]
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
        self._why_unreached = ""
        if self._group is not None:
            self.store, self._why_unreached = _agreed_place(self._group)

    @contextmanager
    def refusals_told(self) -> Iterator[None]:
        """Tell other ranks, which wait for this one, what it refuses within a block.

        It does not wait for them where there is a store: perhaps they refuse by themselves.
        """
        try:
            yield
        except Exception as error:
            group, store = self._group, self.store
            if group is not None and not is_fake(group):
                text = " ".join(str(error).split()) or type(error).__name__
                with suppress(RuntimeError, OSError, CollectiveError):  # others are gone, too
                    if store is None:
                        self._compared({REFUSED: text})
                    else:
                        told = f"rank {group.rank()}: {text}"
                        in_time(lambda: refuse(store, told, group.size()), limit_s=TOLD_WITHIN_S)
            raise

    def require_same(self, said: Description) -> None:
        """Raise on all ranks where they do not say the same, or where one of them has refused.

        Raises:
            RequestError: on all ranks.
            CollectiveError: where a rank does not come, or the store does not answer, within the
                group's time-out.
        """
        group = self._group
        if group is None:
            return
        if self.store is not None and not is_fake(group):
            text = _encoded({VERSION: __version__, **said})
            if meet(group, self.store, sha256(text.encode()).hexdigest()):
                return
            everyone = _gathered(group, text)  # all ranks are here
        else:
            everyone = self._compared({VERSION: __version__, **said})
        for rank, one in enumerate(everyone):
            if REFUSED in one:
                raise _refused_elsewhere(f"rank {rank}: {one[REFUSED]}")
        for rank, one in enumerate(everyone):
            if UNREACHED in one:
                raise CollectiveError(
                    f"rank {rank} cannot reach the store of the process group: {one[UNREACHED]}; "
                    "look at its connection to the host of the store"
                )
        if everyone:
            raise RequestError(
                f"ranks wrap differently: {differences(everyone)}; wrap the same model alike on "
                "every rank"
            )

    def _compared(self, said: Description) -> list[Description]:
        """Compare by messages on the group; return what all ranks say, or nothing if it is alike.

        Every rank comes here, also one that refuses: a message of ours must not stay in the group.
        """
        group = self._group
        assert group is not None
        if self._why_unreached:
            said = {**said, UNREACHED: self._why_unreached}
        text = _encoded(said)
        try:
            return [] if all_say_the_same(group, text) else _gathered(group, text)
        except RuntimeError as error:
            raise _gone(group, error) from error


def _encoded(said: Description) -> str:
    return msgspec.json.encode(said).decode()


def _gathered(group: dist.ProcessGroup, text: str) -> list[Description]:
    return [msgspec.json.decode(one, type=dict[str, str]) for one in gather_long_text(group, text)]


def _refused_elsewhere(told: str) -> RequestError:
    return RequestError(f"another rank could not wrap its model: {told}")


def _gone(group: dist.ProcessGroup, error: Exception) -> CollectiveError:
    reason = str(error).partition("\n")[0]
    return CollectiveError(f"rank {group.rank()} cannot meet the others to wrap a model: {reason}")


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


def _agreed_place(group: dist.ProcessGroup) -> tuple[Store | None, str]:
    """Return a place of their own in the store for ranks that make a wrapper together.

    Beside it this says why this rank does not reach the store, where it does not: then no rank has
    a place.

    Raises:
        CollectiveError: where another rank is gone, or does not come within the group's time-out.
    """
    own, why_unreached = None, ""
    try:
        own = cloned_store(group)
    except dist.DistError as error:
        why_unreached = str(error).partition("\n")[0] or type(error).__name__
    try:
        return common_place(group, own), why_unreached
    except RuntimeError as error:
        raise _gone(group, error) from error


def refuse(store: Store, told: str, ranks: int) -> None:
    """Tell all who come to a meeting of so many ranks that this one does not, and why."""
    meeting = Meeting(store, ranks)
    meeting.end(told)
    meeting.leave()


def meet(group: dist.ProcessGroup, store: Store, digest: str) -> bool:
    """Wait until all ranks have come, and return whether all have the same digest.

    Nothing is sent on the group, where a rank that is refused would leave it behind. All give up
    where one of them is interrupted, as by Ctrl-C.
    """
    interrupted, limit_s = Event(), timeout_s(group)
    comparison = Comparison(store, digest, rank=group.rank(), ranks=group.size())
    try:
        return in_time(
            lambda: comparison.hold(limit_s, interrupted),
            limit_s=limit_s + ANSWERED_WITHIN_S,
            interrupted=interrupted,
        )
    except (RuntimeError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise CollectiveError(
            f"rank {group.rank()} cannot learn whether all ranks wrap alike: {reason}"
        ) from error
    finally:
        interrupted.set()  # where it still waits, in a thread of its own


class Comparison:
    """A meeting to which ranks come with a digest, and learn whether all have the same.

    They are counted, in all and by digest, so what a rank asks for does not grow with their number.
    """

    def __init__(self, store: Store, digest: str, *, rank: int, ranks: int) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._meeting = Meeting(store, ranks)
        self._alike = f"come with {digest}"

    def hold(self, limit_s: float, interrupted: Event) -> bool:
        """Return whether all have come with the same digest.

        Raises:
            RequestError: where a rank has refused.
            TimeoutError: where not all have come, on all that have.
        """

        def why_end(waited_s: float) -> str | None:
            if interrupted.is_set():
                return f"{GIVEN_UP}it was interrupted on rank {self._rank}"
            if waited_s < limit_s:
                return None
            come = self._meeting.come_so_far()
            return f"{GIVEN_UP}{come} of {self._ranks} ranks have come in time"

        self._store.add(self._alike, 1)
        self._meeting.come()
        over = self._meeting.wait(why_end)
        if over == ALL_ARE_HERE:
            return self._leave_with() == self._ranks
        self._go_back()
        if over.startswith(GIVEN_UP):
            raise TimeoutError(over.removeprefix(GIVEN_UP))
        raise _refused_elsewhere(over)

    def _leave_with(self) -> int:
        """Return how many ranks are alike; the last one of them leaves nothing behind."""
        alike, left = int(self._store.get(self._alike)), f"{self._alike}, and left"
        if self._store.add(left, 1) == alike:
            for key in (self._alike, left):
                self._store.delete_key(key)
        self._meeting.leave()
        return alike

    def _go_back(self) -> None:
        """Take back that this rank has come, for others may still come."""
        if self._store.add(self._alike, -1) == 0:
            self._store.delete_key(self._alike)
        self._meeting.leave()


def differences(everyone: Sequence[Description]) -> str:
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


def describe_options(options: Options) -> dict[str, str]:
    """Describe our own options, which both wrappers have."""
    names = [name for name in options.__struct_fields__ if name not in OF_RANK_0]
    said = {name: _said(getattr(options, name)) for name in names}
    compression = options.compression
    if compression is not None:
        said["compression"] = type(compression).__name__
        for field in fields(compression):
            said[f"compression's {field.name}"] = repr(getattr(compression, field.name))
    return said


def describe_torch_options(given: Mapping[str, Any]) -> dict[str, str]:
    """Describe torch's options; one that is given its default counts as not given."""
    known = inspect.signature(TorchDDP.__init__).parameters
    defaults = {name: one.default for name, one in known.items() if one.default is not one.empty}
    return {
        name: _said(MEANT_BY_NONE.get(name) if value is None else value)
        for name, value in {**defaults, **given}.items()
        if name not in OF_EACH_RANK
    }


def describe_plan(source: object, given: Plan | Recipe | None) -> str:
    """Describe a plan by its kind, its length and the beginning of a digest."""
    if source is None:
        return "None"
    if given is None:
        return "a recipe for something else"
    plan = given.plan if isinstance(given, Recipe) else given
    digest = sha256(msgspec.json.encode(given)).hexdigest()[:8]
    kind = type(given).__name__.lower()
    return f"a {kind} of {len(plan.buckets)} messages by {plan.planner!r} ({digest})"


def describe_presence(value: object) -> str:
    """Describe something by whether it is given."""
    return "None" if value is None else "given"


def _said(value: object) -> str:
    """Return how a value is told to others: by itself if it is plain, otherwise by its kind."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_said, value))}]"
    is_value = is_dataclass(value) and not isinstance(value, type)
    return repr(value) if is_value else type(value).__name__


def _short(value: str) -> str:
    return value if len(value) <= MOST_CHARACTERS else f"{value[:MOST_CHARACTERS]}…"
