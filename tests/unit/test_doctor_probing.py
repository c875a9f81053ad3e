"""Who meets whom; messages over real sockets; ranks that do not answer."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count
from threading import Event, get_ident
from types import SimpleNamespace

import pytest
from checkups import LOOPBACK, ThreadStore, interface, rank_facts
from hypothesis import given
from hypothesis import strategies as st

from gradweave._src.doctor import probe, store_in_time
from gradweave._src.doctor.checkup import Interface
from gradweave._src.doctor.meeting import Lost, Meeting, assemble
from gradweave._src.doctor.probe import TOKEN_BYTES, Line, Listener, Sent, Unanswered, read_alone
from gradweave._src.doctor.rounds import matchings, rounds_alone, rounds_together
from gradweave._src.doctor.slowness import doubtful_pairs
from gradweave._src.doctor.surroundings import gloo_choice
from gradweave._src.doctor.survey import Survey, survey
from gradweave._src.in_time import in_time

TOKEN = b"t" * TOKEN_BYTES


@given(st.integers(0, 40))
def test_everybody_meets_everybody_once_and_nobody_is_in_two_places(members):
    rounds = matchings(range(members))
    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met)) == members * (members - 1) // 2
    for pairs in rounds:
        inside = [member for pair in pairs for member in pair]
        assert len(inside) == len(set(inside))


@given(st.integers(0, 64))
def test_every_pair_is_measured_alone_in_both_directions(members):
    rounds = rounds_alone(range(members))
    pairs = [pair for turn in rounds for pair in turn]
    assert sorted(pairs) == [(a, b) for a in range(members) for b in range(members) if a != b]
    if members <= 12:
        assert all(len(turn) == 1 for turn in rounds)


@given(st.integers(0, 300))
def test_all_at_once_means_all_but_an_odd_one_and_has_an_end(members):
    rounds = rounds_together(range(members))
    assert len(rounds) <= 31
    for turn in rounds:
        assert len({sender for sender, _ in turn}) == members // 2 * 2
        assert {(b, a) for a, b in turn} == set(turn)


class SlowLine:
    """A link on paper: a round trip, then bytes at a rate."""

    def __init__(self, bytes_per_s, round_trip_s):
        self.sent = []
        self.now_s = 0.0
        self._bytes_per_s, self._round_trip_s = bytes_per_s, round_trip_s

    def send(self, nbytes):
        self.sent.append(nbytes)
        taken_s = self._round_trip_s + nbytes / self._bytes_per_s
        self.now_s += taken_s
        return Sent(taken_s, 0.0)


@given(st.floats(1e4, 1e10), st.floats(1e-5, 0.05))
def test_a_rate_is_found_in_time_on_any_link(bytes_per_s, round_trip_s):
    line = SlowLine(bytes_per_s, round_trip_s)
    found = read_alone(line, now_s=lambda: line.now_s)
    assert found.round_trip_s == pytest.approx(round_trip_s)
    assert found.bytes_per_s == pytest.approx(bytes_per_s, rel=0.01)
    most_s = probe.MOST_PAIR_S + probe.FIRST_BYTES / bytes_per_s + 10 * round_trip_s
    assert line.now_s <= most_s


@pytest.mark.parametrize(("mine_s", "theirs_s"), [(1.0, 2.0), (3.0, 2.0)])
def test_work_is_that_of_the_busier_side(mine_s, theirs_s, monkeypatch):
    """By clocks that go on whenever they are looked at."""
    here, mine, theirs, wall = get_ident(), count(0.0, mine_s), count(0.0, theirs_s), count(0.0, 9)
    clocks = SimpleNamespace(
        perf_counter=lambda: next(wall),
        thread_time=lambda: next(mine if get_ident() == here else theirs),
    )
    monkeypatch.setattr(probe, "time", clocks)
    listener = Listener("127.0.0.1", rank=3, token=TOKEN)
    with Line("127.0.0.1", listener.port, rank=3, token=TOKEN, timeout_s=5.0) as line:
        for nbytes in (0, 3 * 2**20 + 1):
            assert line.send(nbytes) == pytest.approx((9.0, max(mine_s, theirs_s)))
    listener.close()


def test_a_line_reaches_the_rank_that_it_means():
    listener = Listener("127.0.0.1", rank=3, token=TOKEN)
    with Line("127.0.0.1", listener.port, rank=3, token=TOKEN, timeout_s=5.0) as line:
        for nbytes in (0, 3 * 2**20 + 1):
            taken_s, worked_s = line.send(nbytes)
            assert min(taken_s, worked_s) > 0
    with pytest.raises(Unanswered, match="somebody else than rank 4"):
        Line("127.0.0.1", listener.port, rank=4, token=TOKEN, timeout_s=5.0)
    with pytest.raises(Unanswered, match="somebody else than rank 3"):
        Line("127.0.0.1", listener.port, rank=3, token=b"x" * TOKEN_BYTES, timeout_s=5.0)
    listener.close()
    with pytest.raises(Unanswered, match="connection refused"):
        Line("127.0.0.1", listener.port, rank=3, token=TOKEN, timeout_s=5.0)


def test_a_peer_that_goes_away_is_one_reason():
    listener = Listener("127.0.0.1", rank=0, token=TOKEN)
    with Line("127.0.0.1", listener.port, rank=0, token=TOKEN, timeout_s=5.0) as line:
        listener.close()
        with pytest.raises(Unanswered, match="while 16,777,216 bytes were sent"):
            line.send(2**24)


def on_threads(ranks, act):
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(act, range(ranks)))


@pytest.fixture
def hurried(monkeypatch):
    """Messages that are long enough at once: nothing here is about speed."""
    monkeypatch.setattr(probe, "ENOUGH_S", 1e-6)
    monkeypatch.setattr(probe, "TOGETHER_S", 1e-3)


def local_facts(ranks, ranks_per_host, without_address=()):
    return {
        rank: rank_facts(
            rank,
            rank // ranks_per_host,
            address=None if rank in without_address else "127.0.0.1",
        )
        for rank in range(ranks)
    }


def surveyed(facts):
    """What every rank of these knows in the end."""
    store = ThreadStore()

    def act(rank):
        found = Survey()
        meeting = Meeting(store, rank=rank, ranks=list(facts), timeout_s=20.0)
        survey(meeting, facts, found, token=TOKEN, timeout_s=20.0)
        return found

    return on_threads(len(facts), act)


def test_a_survey_finds_every_pair_of_hosts_and_two_ranks_of_each(hurried):
    surveys = surveyed(local_facts(6, 2))
    inside = {(0, 1), (1, 0), (2, 3), (3, 2), (4, 5), (5, 4)}
    between = {(a, b) for a in (0, 2, 4) for b in (0, 2, 4) if a != b}
    for found in surveys:
        assert found.alone == surveys[0].alone
        assert set(found.alone) == inside | between
        assert set(found.together) == between
        assert not found.unreached


def test_a_rank_without_an_address_is_named_and_the_others_are_measured(hurried):
    for found in surveyed(local_facts(3, 1, without_address=[1])):
        assert set(found.unreached) == {(0, 1), (2, 1)}
        assert set(found.alone) == {(0, 2), (2, 0), (1, 0), (1, 2)}


def test_who_does_not_say_anything_is_lost_by_name():
    meeting = Meeting(ThreadStore(), rank=0, ranks=[0, 1, 2], timeout_s=0.01)
    with pytest.raises(Lost, match=r"ranks \[1, 2\] fell silent while waiting") as caught:
        meeting.together("waiting")
    assert caught.value.ranks == (1, 2)


def test_those_that_come_are_counted_by_rank_0_and_late_ones_are_told():
    store = ThreadStore()
    assert assemble(store, rank=0, world_size=3, timeout_s=0.01) == [0]
    assert assemble(store, rank=2, world_size=3, timeout_s=0.01) is None
    store = ThreadStore()
    everyone = on_threads(3, lambda rank: assemble(store, rank=rank, world_size=3, timeout_s=20.0))
    assert everyone == [[0, 1, 2]] * 3


class StuckStore(ThreadStore):
    """As torch's when its host is cut off: it waits, whatever it was told."""

    def __init__(self):
        super().__init__()
        self.end = Event()

    def wait(self, keys, timeout):
        self.end.wait()


def test_a_store_that_does_not_answer_is_left_behind(monkeypatch):
    monkeypatch.setattr(store_in_time, "GRACE_S", 0.01)
    stuck = StuckStore()
    store = store_in_time.StoreInTime(stuck, timeout_s=0.01)
    with pytest.raises(RuntimeError, match="no answer within"):
        store.wait(["key"], timedelta(seconds=0.01))
    with pytest.raises(RuntimeError, match="has not answered before"):
        store.set("key", "value")
    stuck.end.set()


def test_what_a_call_raises_in_time_is_raised():
    with pytest.raises(ZeroDivisionError):
        in_time(lambda: 1 // 0, limit_s=20.0)
    store = store_in_time.StoreInTime(ThreadStore(), timeout_s=20.0)
    assert assemble(store, rank=0, world_size=1, timeout_s=20.0) == [0]


def test_what_seems_slow_is_looked_at_again_the_slowest_first():
    rates = {(0, 1): 100.0, (1, 0): 70.0, (0, 2): 99.0, (2, 0): 98.0, (1, 2): 50.0, (2, 1): 97.0}
    assert doubtful_pairs(rates) == [(1, 2), (1, 0)]
    assert doubtful_pairs({}) == []


ETH0, ETH1 = interface("eth0", "10.0.0.1/24"), interface("eth1", "192.168.7.1/24")


@pytest.mark.parametrize(
    ("wanted", "resolved", "expected"),
    [
        ("eth1", ["10.0.0.1"], ("eth1", "192.168.7.1", "GLOO_SOCKET_IFNAME")),
        ("eth1,eth0", [], ("eth1", "192.168.7.1", "GLOO_SOCKET_IFNAME")),
        ("ib0", ["10.0.0.1"], (None, None, "GLOO_SOCKET_IFNAME")),
        ("", ["10.9.9.9", "10.0.0.1"], ("eth0", "10.0.0.1", "the host name")),
        ("", ["127.0.1.1"], ("lo", "127.0.1.1", "the host name")),
        ("", [], ("lo", "127.0.0.1", "nothing else")),
    ],
)
def test_the_address_is_the_one_that_gloo_would_choose(wanted, resolved, expected):
    assert gloo_choice((LOOPBACK, ETH0, ETH1), wanted, resolved) == expected


def test_of_an_interface_with_both_the_older_kind_of_address_is_taken():
    both = Interface(name="eth0", addresses=("fd00::1/64", "10.0.0.1/24"), is_up=True)
    assert gloo_choice((both,), "eth0", []).address == "10.0.0.1"
