"""Calls that are for all ranks, made by one: it says so in a line, and nothing has been sent."""

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count
from threading import Event
from time import sleep

import pytest
import torch
import torch.distributed as dist
from interleavings import every_end
from interrupting import interrupt_when_there
from ranks import on_processes, on_threads
from small_training import batch, network, plan_of
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave import CollectiveError, DistributedDataParallel, RequestError, watch
from gradweave._src import torch_internals
from gradweave._src.comm import groups, meetings
from gradweave._src.comm.groups import common_place, leave_token
from gradweave._src.comm.stores import cloned_store
from gradweave._src.runtime.reporting import all_ranks
from gradweave._src.runtime.reporting.all_ranks import Caller

CALLS = {
    "save_run": lambda model, folder: model.save_run(folder),
    "timelines": lambda model, folder: model.timelines(),
    "slow_ranks": lambda model, folder: model.slow_ranks(),
}
# Whatever a machine does meanwhile, nobody comes in this time, which is 80 % of a time-out.
SHORT = timedelta(seconds=0.25)
NOT_ON_OTHERS = (
    "() was called on rank 0 and within 0.2 s not on ranks 1, 2; call it on every rank, or look "
    "whether those ranks are still there"
)
# And whoever comes does so in this.
LONG_S = 60.0


def wrapped(group, *, is_torchs):
    """A wrapper, and who tells of it, after steps enough for all calls."""
    if is_torchs:
        model = TorchDDP(network())
        told_by = watch(model)
    else:
        model = told_by = DistributedDataParallel(network(), plan=plan_of(2, 3), timeline=True)
    for step in range(22):
        model(batch(step, group.rank())).sum().backward()
    return model, told_by


def alone(group, is_torchs, folder):
    """What each call says on rank 0 alone; then all ranks make it, and all is well."""
    model, told_by = wrapped(group, is_torchs=is_torchs)
    store, said = group.get_group_store(), []
    for name, call in CALLS.items():
        if is_torchs and name == "slow_ranks":
            continue
        if group.rank() == 0:
            all_ranks.timeout_s, usual = lambda _: SHORT.total_seconds(), all_ranks.timeout_s
            with pytest.raises(RequestError) as caught:
                call(told_by, folder)
            said.append(str(caught.value))
            all_ranks.timeout_s = usual
        keys = []
        for _ in range(2):
            model(batch(0, group.rank())).sum().backward()  # others wait here for rank 0
            call(told_by, folder)
            group.barrier().wait()
            keys.append(store.num_keys())
            group.barrier().wait()
        assert keys[0] == keys[1]
    return said


@pytest.mark.parametrize("is_torchs", [False, True])
def test_a_call_on_one_rank_alone_is_a_line(tmp_path, is_torchs):
    said, _ = on_processes(3, alone, is_torchs, str(tmp_path / "mine"), scratch=tmp_path)[:2]
    called = [name for name in CALLS if not is_torchs or name != "slow_ranks"]
    assert said == [f"{name}{NOT_ON_OTHERS}" for name in called]


def late(group):
    """Rank 2 comes when one of the others, who both wait, has complained."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: (lines.append(record.getMessage()), store.set("told", ""))
    all_ranks.logger.addHandler(handler)
    all_ranks.TOLD_AFTER_S = 0.0
    store = group.get_group_store()
    if group.rank() == 2:
        store.wait(["told"])
    elif group.rank() == 1:
        store.wait(["gradweave, save_run /number 0/0"])
    all_ranks.require_all_ranks(group, "save_run")
    number = torch.ones(1)
    group.allreduce([number]).wait()
    return lines, number.item()


def test_who_waits_for_others_says_so_once(tmp_path):
    found = on_processes(3, late, scratch=tmp_path)
    (line,) = [line for lines, _ in found for line in lines]
    assert line in [
        f"save_run() was called on rank{came} and not yet on rank{missing}; it waits for them"
        for came, missing in ((" 0", "s 1, 2"), ("s 0, 1", " 2"))
    ]
    assert [number for _, number in found] == [3.0] * 3


@pytest.mark.parametrize(
    ("timeout", "limit_s"), [(timedelta(minutes=30), 1440.0), (None, 1440.0), (SHORT, 0.2)]
)
def test_the_groups_timeout_decides_how_long_ranks_wait(monkeypatch, timeout, limit_s):
    """Rank 0 may evaluate for as long as torch waits for it."""
    asked = []
    monkeypatch.setattr(torch_internals, "group_timeout", lambda _: timeout)
    monkeypatch.setattr(Caller, "meet", lambda self, store, most_s, **_: asked.append(most_s))
    on_threads(2, all_ranks.require_all_ranks, "save_run")
    assert asked == [limit_s] * 2


def test_ranks_that_wait_long_ask_seldom(monkeypatch):
    """A thousand may wait for the one that hosts the store."""
    now_s, pauses_s = [0.0], []

    def sleep(pause_s):
        now_s[0] += pause_s
        pauses_s.append(pause_s)

    monkeypatch.setattr(meetings, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(meetings, "sleep", sleep)
    with pytest.raises(RequestError, match=r"within 1000 s not on rank 1; .* that rank is still"):
        Caller("save_run", rank=0, ranks=2).meet(dist.HashStore(), 1000.0)
    assert len(pauses_s) < 10_100
    assert pauses_s[0] < 0.001  # others come within milliseconds, as a rule


def test_what_was_waited_for_a_token_counts(monkeypatch):
    """The call ends when it has waited for as long as it may, in all."""
    pauses_s = []
    monkeypatch.setattr(meetings, "monotonic", lambda: sum(pauses_s))
    monkeypatch.setattr(meetings, "sleep", pauses_s.append)
    with pytest.raises(RequestError, match=r"within 10 s not on rank 1"):
        Caller("save_run", rank=0, ranks=2).meet(dist.HashStore(), 10.0, waited_s=7.0)
    assert 3.0 <= sum(pauses_s) < 3.0 + 2 * meetings.LONGEST_PAUSE_S


class StoreThatCounts:
    """The keys 0, 1, … but a few."""

    def __init__(self, *missing):
        self.missing, self.asked = {str(rank) for rank in missing}, 0

    def check(self, keys):
        self.asked += 1
        return not self.missing.intersection(keys)


def test_who_is_missing_among_many_is_found_by_few_questions():
    store = StoreThatCounts(17, 18, 700)
    meeting = all_ranks._CallOfAll(store, Caller("save_run", rank=0, ranks=1000), Event())
    came, missing = meeting._attendance()
    assert list(missing) == [17, 18, 700]
    assert list(came) == [rank for rank in range(1000) if rank not in missing]
    assert store.asked < 70


def ends(rank, limit_s, store, callers):
    try:
        callers[rank].meet(store, limit_s)
    except RequestError:
        return "given up"
    return "all are here"


def makes_sure_that_all_can_meet(store, callers):
    """Later on, whoever has given up; and nothing is left of any meeting."""
    with ThreadPoolExecutor(len(callers)) as pool:
        again = [pool.submit(ends, rank, LONG_S, store, callers) for rank in range(len(callers))]
        return [one.result() for one in again] == ["all are here"] * len(callers)


@pytest.mark.parametrize("ranks", [2, 3])
def test_giving_up_is_one_decision(ranks, monkeypatch):
    """In every order in which ranks that wait no longer ask the store: seconds, many runs."""
    monkeypatch.setattr(all_ranks, "PrefixStore", store_below)
    made, found = [], set()

    def acts():
        callers = [Caller("save_run", rank=rank, ranks=ranks) for rank in range(ranks)]
        made.append(callers)
        return [partial(act, rank, callers) for rank in range(ranks)]

    def act(rank, callers, store):
        return ends(rank, 0.0, store, callers)

    for order, results, store in every_end(acts):
        found.add(tuple(results))
        assert len(set(results)) == 1, order
        assert makes_sure_that_all_can_meet(store, made[-1]), order
        assert store.num_keys() == 0, order
    assert found == {("given up",) * ranks, ("all are here",) * ranks}


def store_below(prefix, store):
    return dist.PrefixStore(prefix, store) if isinstance(store, dist.Store) else store.below(prefix)


class LosesConnection:
    """A store that fails once, at a question with this number, which it may have heard."""

    def __init__(self, store, numbers, lost_at, *, is_heard):
        self._store, self._numbers = store, numbers
        self._lost_at, self._is_heard = lost_at, is_heard

    def below(self, prefix):
        inner = dist.PrefixStore(prefix, self._store)
        return LosesConnection(inner, self._numbers, self._lost_at, is_heard=self._is_heard)

    def __getattr__(self, name):
        def ask(*asked):
            is_lost = next(self._numbers) == self._lost_at
            if not is_lost or self._is_heard:
                answer = getattr(self._store, name)(*asked)
            if is_lost:
                raise dist.DistNetworkError("Connection reset by peer")
            return answer

        return ask


def lost_everywhere(is_heard):
    """A store for each question of rank 1 at which it may lose its connection, and two callers."""
    for lost_at in count():
        store, numbers = dist.HashStore(), count()
        callers = [Caller("save_run", rank=rank, ranks=2) for rank in range(2)]
        yield store, LosesConnection(store, numbers, lost_at, is_heard=is_heard), callers
        if next(numbers) <= lost_at:
            assert lost_at > 6
            return


@pytest.mark.parametrize("is_heard", [True, False])
def test_who_calls_again_after_a_lost_connection_is_not_two(monkeypatch, is_heard):
    monkeypatch.setattr(all_ranks, "PrefixStore", store_below)
    for store, losing, callers in lost_everywhere(is_heard):
        with suppress(dist.DistNetworkError):
            assert ends(1, 0.0, losing, callers) == "given up"
        assert ends(1, 0.0, store, callers) == "given up"
        assert makes_sure_that_all_can_meet(store, callers)


def meets(store, callers, losing):
    """How it ends for rank 1, which makes the call again if it has lost its connection."""
    try:
        return ends(1, LONG_S, losing, callers)
    except dist.DistNetworkError:
        return ends(1, LONG_S, store, callers)


@pytest.mark.parametrize("is_heard", [True, False])
@pytest.mark.parametrize("comes", ["first", "last", "again when all have gone on"])
def test_who_calls_again_after_a_lost_connection_meets_those_of_the_first(
    monkeypatch, comes, is_heard
):
    """And what a rank has learnt stays, whatever becomes of the keys that it wants to delete."""
    monkeypatch.setattr(all_ranks, "PrefixStore", store_below)
    for store, losing, callers in lost_everywhere(is_heard):
        with ThreadPoolExecutor(2) as pool:
            if comes == "last":
                other = pool.submit(ends, 0, LONG_S, store, callers)
                waits_until(store, "number 0/0")
                found = meets(store, callers, losing)
            else:
                mine = pool.submit(ends, 1, LONG_S, losing, callers)
                if comes == "again when all have gone on":
                    waits_until(store, "number 0/1", mine)
                other = pool.submit(ends, 0, LONG_S, store, callers)
                try:
                    found = mine.result()
                except dist.DistNetworkError:
                    found = ends(1, LONG_S, store, callers)
            assert (found, other.result()) == ("all are here",) * 2
        assert [caller.number for caller in callers] == [1, 1]
        assert makes_sure_that_all_can_meet(store, callers)


def waits_until(store, key, unless_over=None):
    while not (store.check([key]) or (unless_over is not None and unless_over.done())):
        sleep(0.0005)


def test_a_call_behind_one_that_hangs_says_so():
    caller = Caller("save_run", rank=0, ranks=2)
    with caller._one_at_a_time, pytest.raises(TimeoutError, match="to an earlier call of this"):
        caller.meet(dist.HashStore(), 0.0)


def killed_while_it_waits(group, monkeypatch):
    def killed(_):
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(meetings, "sleep", killed)
        with pytest.raises(CollectiveError, match="store of their process group says killed;"):
            all_ranks.require_all_ranks(group, "save_run")


def in_two_lives(any_group, monkeypatch):
    """As torchrun starts a job anew whose rank 0 was waiting: all of that is in the store."""
    first, second = (group_on(any_group, life) for life in range(2))
    common_place(first, cloned_store(first))
    if any_group.rank() == 0:
        killed_while_it_waits(first, monkeypatch)
    any_group.barrier().wait()
    common_place(second, cloned_store(second))
    said = ""
    if any_group.rank() != 2:
        with pytest.raises(RequestError) as caught:
            all_ranks.require_all_ranks(second, "save_run")
        said = str(caught.value)
    any_group.barrier().wait()
    return said


def group_on(any_group, life):
    store, rank, ranks = any_group.get_group_store(), any_group.rank(), any_group.size()
    group = dist.ProcessGroup(store, rank, ranks)
    place = dist.PrefixStore(f"users {life}", store)
    gloo = dist.ProcessGroupGloo(place, rank, ranks, timedelta(seconds=LONG_S))
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


def test_nobody_meets_a_rank_of_an_earlier_life(monkeypatch):
    """Two and the one of before would be three."""
    monkeypatch.setattr(all_ranks, "timeout_s", lambda _: 1.0)
    first, second, _ = on_threads(3, in_two_lives, monkeypatch)
    assert first == second
    assert "() was called on rank" in first


def met_before_and_after_a_token(group, monkeypatch):
    """Rank 0 gives up, then ranks agree on a token: its next meeting is the others' first."""
    if group.rank() == 0:
        with monkeypatch.context() as patched:
            patched.setattr(all_ranks, "timeout_s", lambda _: SHORT.total_seconds())
            with pytest.raises(RequestError):
                all_ranks.require_all_ranks(group, "save_run")
    group.barrier().wait()
    common_place(group, cloned_store(group))
    all_ranks.require_all_ranks(group, "save_run")
    return "met"


def test_a_token_begins_a_new_count(monkeypatch):
    assert on_threads(2, met_before_and_after_a_token, monkeypatch) == ["met"] * 2


def watched_and_met(group, is_first):
    """In the first group rank 2 does not come, and what the others say stays in the store."""
    model = TorchDDP(network(), process_group=group)
    watch(model)
    model(batch(0, group.rank())).sum().backward()
    if not is_first:
        return all_ranks.require_all_ranks(group, "timelines")
    if group.rank() != 2:
        with pytest.raises(RequestError):
            all_ranks.require_all_ranks(group, "timelines")
    return None


def watched_in_two_groups(any_group, monkeypatch):
    groups = [group_on(any_group, life) for life in range(2)]
    with monkeypatch.context() as patched:
        if any_group.rank() == 0:
            patched.setattr(all_ranks, "timeout_s", lambda _: SHORT.total_seconds())
        any_group.barrier().wait()
        watched_and_met(groups[0], is_first=True)
        any_group.barrier().wait()
    any_group.barrier().wait()
    watched_and_met(groups[1], is_first=False)
    return "met"


def test_those_who_watch_meet_nobody_of_an_earlier_group(monkeypatch):
    assert on_threads(3, watched_in_two_groups, monkeypatch) == ["met"] * 3


def token_comes_late(group, monkeypatch):
    """Rank 1 asks before rank 0 watches: both meet, for rank 1 waits for the token."""
    if group.rank() == 0:
        group.barrier().wait()
    leave_token(group)
    if group.rank():
        began = Event()

        def sleep(pause_s):
            del pause_s
            if not began.is_set():
                began.set()
                group.barrier().wait()

        monkeypatch.setattr(all_ranks, "sleep", sleep)
    all_ranks.require_all_ranks(group, "timelines")
    return "met"


def test_the_time_until_a_place_is_known_counts(monkeypatch):
    waited = []
    meet, seconds = Caller.meet, count()

    def noted(self, *arguments, waited_s, interrupted):
        waited.append(waited_s)
        meet(self, *arguments, waited_s=waited_s, interrupted=interrupted)

    monkeypatch.setattr(Caller, "meet", noted)
    monkeypatch.setattr(all_ranks, "monotonic", lambda: float(next(seconds)))
    on_threads(2, lambda group: all_ranks.require_all_ranks(group, "timelines"))
    assert len(waited) == 2
    assert min(waited) > 0


def test_a_token_is_waited_for(monkeypatch):
    assert on_threads(2, token_comes_late, monkeypatch) == ["met"] * 2


def alone_with_its_token(group):
    if group.rank() == 0:
        return ""
    leave_token(group)
    with pytest.raises(RequestError) as caught:
        all_ranks.require_all_ranks(group, "timelines")
    return str(caught.value)


def its_token_failed(group, monkeypatch):
    """Rank 0 could not reach the store when it watched; it can when they meet."""
    if group.rank() == 0:
        with monkeypatch.context() as patched:
            patched.setattr(groups, "cloned_store", lost)
            leave_token(group)
    else:
        leave_token(group)
    group.barrier().wait()
    all_ranks.require_all_ranks(group, "timelines")
    return "met"


def test_a_token_is_left_later_where_it_could_not_be_at_first(monkeypatch):
    assert on_threads(2, its_token_failed, monkeypatch) == ["met"] * 2


def test_a_token_that_does_not_come_is_rank_0s(monkeypatch):
    monkeypatch.setattr(all_ranks, "timeout_s", lambda _: SHORT.total_seconds())
    _, said = on_threads(2, alone_with_its_token)
    assert said.startswith("timelines() was called on rank 1 and within 0.2 s not on rank 0; call")


def unreached(group, monkeypatch, where):
    """Rank 1 cannot reach the store, for once, and sends nothing, which would be taken for sums."""
    said = ""
    if group.rank() == 1:
        with monkeypatch.context() as patched:
            patched.setattr(*where, lost)
            with pytest.raises(CollectiveError) as caught:
                all_ranks.require_all_ranks(group, "save_run")
        said = str(caught.value)
    number = torch.ones(1)
    group.allreduce([number]).wait()
    all_ranks.require_all_ranks(group, "timelines")
    return said, number.item()


def lost(*_, **__):
    raise dist.DistNetworkError("no way to the host\nand its stack")


@pytest.mark.parametrize(
    "where", [(all_ranks, "cloned_store"), (all_ranks._CallOfAll, "hold")], ids=["at all", "later"]
)
def test_a_rank_that_cannot_reach_the_store_does_not_go_on_alone(monkeypatch, where):
    told = (
        "rank 1 cannot learn whether all ranks call save_run(): the store of their process group "
        "says no way to the host; look whether its host is still there"
    )
    assert on_threads(2, unreached, monkeypatch, where) == [("", 2.0), (told, 2.0)]


def interrupted(group):
    """Rank 0 waits when somebody hits Ctrl-C, goes on, and later makes the call again."""
    said = ""
    if group.rank() == 0:
        both = [f"gradweave, save_run /number 0/{rank}" for rank in (0, 1)]
        interrupt_when_there(group.get_group_store(), *both)
        with pytest.raises(KeyboardInterrupt):
            all_ranks.require_all_ranks(group, "save_run")
        # Rank 2 has not come, so this is still there; the script could end now.
        assert group.get_group_store().check(["gradweave, save_run /number 0/over"])
    elif group.rank() == 1:
        with pytest.raises(RequestError) as caught:
            all_ranks.require_all_ranks(group, "save_run")
        said = str(caught.value)
    number = torch.ones(1)
    group.allreduce([number]).wait()
    all_ranks.require_all_ranks(group, "save_run")
    return said, number.item()


def test_who_is_interrupted_has_not_come(tmp_path):
    found = on_processes(3, interrupted, scratch=tmp_path)
    assert found == [("", 3.0), ("save_run() was interrupted on rank 0", 3.0), ("", 3.0)]


class SilentStore:
    """As where its host is stopped or cut off."""

    def __init__(self, released):
        self._released = released

    def check(self, keys):
        self._released.wait(LONG_S)
        raise RuntimeError


def unanswered(group, monkeypatch):
    if group.rank():
        return ""
    with pytest.raises(CollectiveError) as caught:
        all_ranks.require_all_ranks(group, "save_run")
    return str(caught.value)


def test_a_store_that_does_not_answer_ends_the_call(monkeypatch):
    """And nothing is sent: perhaps others have given up."""
    released = Event()
    monkeypatch.setattr(all_ranks, "ANSWERED_WITHIN_S", 0.1)
    monkeypatch.setattr(all_ranks, "timeout_s", lambda _: 0.01)
    monkeypatch.setattr(all_ranks, "PrefixStore", lambda *_: SilentStore(released))
    try:
        said, _ = on_threads(2, unanswered, monkeypatch)
    finally:
        released.set()
    assert said == (
        "rank 0 cannot learn whether all ranks call save_run(): the store of their process group "
        "gives no answer within 0.108 s; look whether its host is still there"
    )
