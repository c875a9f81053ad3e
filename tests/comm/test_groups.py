"""Groups of our own: they find each other whatever was dropped, and go when they are dropped."""

import gc
import weakref

import torch
from ranks import on_threads

from gradweave._src.comm import Communicator
from gradweave._src.comm.groups import same_ranks


def sums(group):
    """Of twins that are made, used and dropped, some of them later on some ranks."""
    kept, found, last = [], [], None
    for number in range(4):
        communicator = Communicator(same_ranks(group))
        message = torch.full((3,), float(group.rank() + number))
        communicator.run("all-reduce", message, collective="native")
        found.append(message.tolist())
        last = weakref.ref(communicator.group)
        if group.rank() == 0:
            kept.append(communicator)
        del communicator
    kept.clear()
    gc.collect()
    return found, last() is None


def test_twins_are_used_and_dropped():
    for found, is_gone in on_threads(3, sums):
        assert found == [[3.0 + 3 * number] * 3 for number in range(4)]
        assert is_gone


def in_parts(group):
    """Parts of one twin, as tiers make them: everyone asks for all, and gets its own."""
    communicator = Communicator(same_ranks(group))
    parts = [communicator._make_group(ranks) for ranks in ([0, 2], [1, 3])]
    (own,) = [part for part in parts if part is not None]
    message = torch.tensor([float(group.rank())])
    own.allreduce([message]).wait()
    return message.item(), own.rank(), own.size()


def in_parts_again(group):
    """As tiers that are timed once more after a while; the first ones may be gone or not."""
    twin, found = same_ranks(group), []
    for number in range(3):
        own = Communicator(twin)._make_group([0, 1, 2])
        message = torch.tensor([float(group.rank() + number)])
        own.allreduce([message]).wait()
        found.append(message.item())
    return found


def test_parts_of_one_group_do_not_meet_each_other():
    assert on_threads(3, in_parts_again) == [[3.0, 6.0, 9.0]] * 3


def test_tiers_of_twins():
    assert on_threads(4, in_parts) == [(2.0, 0, 2), (4.0, 0, 2), (2.0, 1, 2), (4.0, 1, 2)]
