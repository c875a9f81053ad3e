"""What wrappers open they close: threads, descriptors and process groups."""

import gc
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import on_processes
from side_by_side import LOOK_EVERY, MOST_STEPS, QUICK, stage_of
from small_training import batch, network
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave import DistributedDataParallel, GTopK, RequestError, ShardedDataParallel
from gradweave._src.comm.groups import same_ranks
from gradweave._src.comm.lanes import lanes_for

# By each of these a wrapper needs other threads and groups.
KINDS = {
    "dense": (DistributedDataParallel, {"collective": "native"}),
    "ring": (DistributedDataParallel, {"collective": "ring"}),
    "sparse": (DistributedDataParallel, {"compression": GTopK(density=0.05)}),
    "sharded": (ShardedDataParallel, {}),
}
QUIET_S, QUIET_WITHIN_S = 0.3, 5.0


class Open(NamedTuple):
    threads: int
    descriptors: int
    groups: int

    def __sub__(self, other):
        return Open(*(mine - before for mine, before in zip(self, other, strict=True)))


def open_now():
    gc.collect()
    return Open(
        threads=len(list(Path("/proc/self/task").iterdir())),
        descriptors=len(list(Path("/proc/self/fd").iterdir())),
        groups=len(dist.distributed_c10d._world.pg_map),
    )


def open_when_quiet():
    """What is open once nothing has been closed for a while: threads take a moment to end."""
    deadline_s = time.monotonic() + QUIET_WITHIN_S
    found, since_s = open_now(), time.monotonic()
    while time.monotonic() < since_s + QUIET_S:
        assert time.monotonic() < deadline_s, f"no quiet within {QUIET_WITHIN_S:g} s: {found}"
        time.sleep(QUIET_S / 10)
        if (now := open_now()) != found:
            found, since_s = now, time.monotonic()
    dist.barrier()  # a rank that goes on, or ends, closes what others see
    return found


def take_steps(wrapped, rank, steps):
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    for step in steps:
        optimizer.zero_grad()
        wrapped(batch(step, rank)).square().mean().backward()
        optimizer.step()
    if isinstance(wrapped, ShardedDataParallel):
        wrapped.synchronise()


def until_settled(wrapped, looking):
    """Step numbers, until planning is over on all ranks."""
    for step in range(MOST_STEPS):
        yield step
        if step % LOOK_EVERY == 0:
            is_open = torch.tensor([stage_of(wrapped) != "settled"], dtype=torch.int32)
            looking.allreduce([is_open]).wait()
            if not is_open:
                return
    pytest.fail(wrapped.explain())


def made_and_dropped(group, kind, times, settles):
    """What is open after the second wrapper, and after the last."""
    make, options = KINDS[kind]
    looking, found = dist.new_group(), []
    for number in range(1, times + 1):
        train_one(make(network(), **QUICK, **options), group.rank(), looking if settles else None)
        if number in {2, times}:
            found.append(open_when_quiet())
    return found


def train_one(wrapped, rank, looking):
    """In a frame of its own, with which the wrapper goes."""
    take_steps(wrapped, rank, range(3) if looking is None else until_settled(wrapped, looking))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("times", "settles"), [(8, False), (4, True)], ids=["planning", "settled"])
def test_wrappers_made_and_dropped_leave_nothing(tmp_path, kind, times, settles):
    """Seconds: some that are dropped while they plan, some that are dropped when settled."""
    ranks = on_processes(2, made_and_dropped, kind, times, settles, scratch=tmp_path)
    for after_two, after_all in ranks:
        assert after_all == after_two


def refused(group, kind, options, groups):
    """A wrapper whose groups cannot be made from some number of them on."""
    made = []

    def make_group():
        if len(made) == groups:
            raise OSError("no more groups")
        made.append("one")
        return same_ranks(group)

    with pytest.raises((RequestError, OSError)):
        kind(network(), make_group=make_group, **options)
    assert len(made) == groups


def refused_again(group, kind, options, groups):
    """What is open after one that was refused, and after more of them."""
    found = []
    for number in range(4):
        refused(group, kind, options, groups)
        if number in {0, 3}:
            found.append(open_when_quiet())
    return found


@pytest.mark.parametrize(
    ("kind", "options", "groups"),
    [
        (DistributedDataParallel, {"precision": "int8", "collective": "recursive-doubling"}, 0),
        (DistributedDataParallel, {"collective": "ring"}, 1),
        (ShardedDataParallel, {}, lanes_for(torch.device("cpu"))),
    ],
    ids=["options", "second group", "sharded"],
)
def test_what_is_refused_leaves_nothing(tmp_path, kind, options, groups):
    for first, last in on_processes(2, refused_again, kind, options, groups, scratch=tmp_path):
        assert last == first


def held_when_settled(group, kind):
    """How much a wrapper that has planned holds open, and one that was given its plan."""
    make, options = KINDS[kind]
    looking = dist.new_group()
    train_one(TorchDDP(network()), group.rank(), None)  # starts what torch keeps anyhow
    before = open_when_quiet()
    wrapped = make(network(), **QUICK, **options)
    take_steps(wrapped, group.rank(), until_settled(wrapped, looking))
    by_itself, plan = open_when_quiet() - before, wrapped.plan
    assert plan is not None, wrapped.explain()
    del wrapped
    before = open_when_quiet()
    given = make(network(), plan=plan, **options)
    take_steps(given, group.rank(), range(5))
    return by_itself, open_when_quiet() - before


@pytest.mark.parametrize("kind", KINDS)
def test_a_settled_wrapper_holds_what_its_messages_need(tmp_path, kind):
    """Nothing of what was opened to find the plan; and torch's own messages need nothing."""
    for by_itself, given in on_processes(2, held_when_settled, kind, scratch=tmp_path):
        assert by_itself == given
        if kind == "dense":
            assert given == Open(threads=0, descriptors=0, groups=0)
