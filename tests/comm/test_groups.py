"""Groups of our own: they find each other whatever was dropped, and go when they are dropped."""

import gc
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Thread

import pytest
import torch
import torch.distributed as dist
from ranks import gloo_group, on_threads

from gradweave._src.comm import small_messages
from gradweave._src.comm.communicator import Communicator
from gradweave._src.comm.groups import common_place, same_ranks
from gradweave._src.comm.small_messages import for_texts
from gradweave._src.comm.stores import cloned_store


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


def group_on(store, rank, life=""):
    """A group of two that has this store itself, as the next one in the life of a job has."""
    return gloo_group(store, rank, 2, addresses=dist.PrefixStore(f"users {life}", store))


def while_another_waits(any_group, make, port):
    """Whether a thread of the user's, who waits in the store, does so after a group was made."""
    stores = [dist.TCPStore("127.0.0.1", port, is_master=False) for _ in range(2)]
    group = group_on(stores[0], any_group.rank())
    kept = []

    def wait():
        stores[0].wait(["shutdown"], timedelta(seconds=3))
        kept.append("waited until it was told")

    thread = Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    made = make(group)
    any_group.barrier().wait()
    stores[1].set("shutdown", "")
    thread.join()
    del made
    return kept


def sends_nothing_of_the_host(monkeypatch):
    """A group is taken for one whose backend has an accelerator alone, which is on the host."""
    monkeypatch.setattr(small_messages, "devices_carried", lambda _: {"cuda"})
    monkeypatch.setattr(small_messages, "payload_device", lambda _: torch.device("cpu"))


@pytest.mark.parametrize("make", [same_ranks, for_texts])
def test_a_thread_that_waits_in_the_users_store_keeps_nobody(make, monkeypatch):
    """torch's client of a store is locked meanwhile."""
    if make is for_texts:
        sends_nothing_of_the_host(monkeypatch)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = on_threads(2, while_another_waits, make, server.port)
    assert found == [["waited until it was told"]] * 2


def in_two_lives(any_group, make):
    """As where a job destroys its groups and makes them anew: old addresses are in the store."""
    store, found = any_group.get_group_store(), []
    for life in range(2):
        group = group_on(store, any_group.rank(), life)
        made, message = make(group), torch.tensor([1.0])
        made.allreduce([message]).wait()
        found.append(message.item())
        any_group.barrier().wait()
        del made, group
    return found


def twin_of_a_wrapper(group):
    common_place(group, cloned_store(group))
    return same_ranks(group)


@pytest.mark.parametrize("make", [twin_of_a_wrapper, for_texts])
def test_groups_of_an_earlier_life_are_not_met(make, monkeypatch):
    if make is for_texts:
        sends_nothing_of_the_host(monkeypatch)
    assert on_threads(2, in_two_lives, make) == [[2.0, 2.0]] * 2


def test_whoever_waits_in_the_store_holds_nobody_up():
    """Every use has a connection of its own, which ends with it."""
    server = dist.TCPStore("localhost", 0, is_master=True)
    group = dist.ProcessGroup(dist.PrefixStore("users", server), 0, 1)
    waits, other = cloned_store(group), cloned_store(group)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(waits.get, "told")
        other.set("told", "at last")
        assert waiting.result() == b"at last"
    known = weakref.ref(waits)
    del waits, waiting
    gc.collect()
    assert known() is None
