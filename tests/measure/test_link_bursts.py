"""Bursts between hosts: who sends to whom, and how much."""

from collections import Counter
from itertools import permutations

import pytest
from ranks import on_threads

from gradweave._src.measure.link_bursts import BURSTS, MOST_PEERS, link_transfers
from gradweave._src.session.slow_ranks import PARTS


@pytest.mark.parametrize(
    ("hosts", "firsts"),
    [
        (["a", "b", "c"], [0, 1, 2]),
        (["a", "a", "b", "c", "b"], [0, 2, 3]),
        pytest.param(["a", "b", "c", "d"], [0, 1, 2, 3], marks=pytest.mark.long),
    ],
)
def test_one_rank_of_each_host_sends_to_all_others(hosts, firsts):
    answers = on_threads(len(hosts), link_transfers, hosts)
    assert all(answer == answers[0] for answer in answers)
    sent = Counter((one.sender, one.receiver, one.part) for one in answers[0])
    pairs = permutations(firsts, 2)
    assert sent == {(*pair, part): BURSTS for pair in pairs for part in range(PARTS)}
    assert all(one.s_per_byte > 0 for one in answers[0])


@pytest.mark.long
def test_of_many_hosts_each_sends_to_a_few():
    hosts = [f"host{rank}" for rank in range(MOST_PEERS + 2)]
    found = on_threads(len(hosts), link_transfers, hosts)[0]
    peers = Counter(sender for sender, _ in {(one.sender, one.receiver) for one in found})
    assert set(peers.values()) == {MOST_PEERS}


@pytest.mark.parametrize("hosts", [["a", "a", "a"], ["a", "b", "a"]])
def test_of_fewer_than_three_hosts_nobody_could_tell(hosts):
    assert on_threads(3, link_transfers, hosts) == [[]] * 3
