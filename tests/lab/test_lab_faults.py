"""Links that are cut, healed, slowed and counted, and nodes that fail."""

import os
import signal
import time
from pathlib import Path

import pytest
from lab_watching import LIMIT_S, Told, children, printed

from gradweave._src.lab import Cluster, ClusterSpec, Rates

PING = """
import os, socket, time
answers = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
rank = int(os.environ["RANK"])
if rank < 3:
    answers.bind(("", 5001))
    while True:
        answers.sendto(*answers.recvfrom(64))
answers.settimeout(0.1)
peers = {"far": ("10.77.0.1", 5001), "near": ("10.77.1.1", 5001)}
for number in range(10**9):
    for name, peer in peers.items():
        asked = f"{number} {name}".encode()
        try:
            answers.sendto(asked, peer)
            while answers.recv(64) != asked:
                pass
            print(name, "answers")
        except OSError:
            print(name, "is silent")
    time.sleep(0.01)
"""

SEND = """
import os, socket, time
if os.environ["RANK"] == "1":
    with socket.create_server(("", 5001)) as server:
        peer, _ = server.accept()
    while peer.recv(2**20):
        pass
else:
    while True:
        try:
            peer = socket.create_connection(("10.77.1.1", 5001))
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    peer.sendall(bytes(10**6))
    peer.close()
"""

# Four connections, so that there is always a backlog; told when something has come.
FLOOD = """
import os, socket, threading, time
def flood(peer):
    while True:
        peer.sendall(bytes(2**20))
def take(peer):
    while data := peer.recv(2**20):
        come.append(len(data))
come = []
if os.environ["RANK"] == "1":
    with socket.create_server(("", 5001)) as server:
        for _ in range(4):
            threading.Thread(target=take, args=server.accept()[:1]).start()
    while True:
        time.sleep(0.02)
        if come:
            come.clear()
            print("something has come", flush=True)
for _ in range(4):
    while True:
        try:
            peer = socket.create_connection(("10.77.1.1", 5001))
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    threading.Thread(target=flood, args=(peer,)).start()
"""


def test_a_cut_node_is_silent_to_others_until_it_is_healed(namespaces, ranks_program):
    """Takes a second or two: silence is heard by waiting."""
    told = Told()
    with Cluster(ClusterSpec(nodes=2, ranks_per_node=2, rate="1gbit")) as cluster:
        cluster.start(ranks_program(PING), on_line=told)
        told.until("far answers")
        cluster.cut(1)
        told.until("far is silent", times=5)
        told.until("near answers", times=3)
        cluster.heal(1)
        told.until("far answers", times=3)


def test_the_only_rank_of_a_node_is_cut_and_healed_as_well(namespaces, ranks_program):
    told = Told()
    source = PING.replace("rank < 3", "rank < 1").replace("10.77.1.1", "127.0.0.1")
    with Cluster(ClusterSpec(nodes=2, rate="1gbit")) as cluster:
        cluster.start(ranks_program(source), on_line=told)
        told.until("far answers")
        cluster.cut(0)
        told.until("far is silent", times=5)
        cluster.heal(0)
        told.until("far answers", times=3)


def test_a_failing_node_takes_its_ranks_with_it_and_no_others(two_by_two):
    job = two_by_two.start(["sleep", "600"], keep_going=True)
    two_by_two.fail(1)
    job.stop()
    assert [found.status for found in job.wait(LIMIT_S).exits] == [-15, -15, -9, -9]


def test_a_failing_node_is_the_first_failure(two_by_two):
    job = two_by_two.start(["sleep", "600"])
    two_by_two.fail(1)
    result = job.wait(LIMIT_S)
    assert (result.first_failure.node, result.exit_code) == (1, 137)
    assert [found.status for found in result.exits[:2]] == [-15, -15]


def test_the_first_to_die_is_named_though_the_fabric_looks_late(namespaces, tmp_path):
    told = Told()
    script = 'echo up; until [ -e "$0/$RANK" ]; do sleep 0.01; done; exit $((RANK + 1))'
    with Cluster(ClusterSpec(nodes=3)) as cluster:
        job = cluster.start(["sh", "-c", script, str(tmp_path)], on_line=told, keep_going=True)
        told.until("up", times=3)
        fabric, ranks = fabric_and_ranks(cluster)
        os.kill(fabric, signal.SIGSTOP)
        for rank in (2, 0, 1):
            (tmp_path / str(rank)).touch()
            wait_until_dead(ranks[rank], fabric)
        os.kill(fabric, signal.SIGCONT)
        result = job.wait(LIMIT_S)
    assert [found.status for found in result.exits] == [1, 2, 3]
    assert result.first_failure.rank == 2


def fabric_and_ranks(cluster):
    """Their process ids outside; the ranks' are told by their environment."""
    (fabric,) = children(cluster._control._process.pid)
    ranks = {}
    for pid in children(fabric):
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        (rank,) = (int(word[5:]) for word in words if word.startswith(b"RANK="))
        ranks[rank] = pid
    return fabric, ranks


def wait_until_dead(pid, parent):
    deadline_s = time.monotonic() + LIMIT_S
    while pid in children(parent):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_a_changed_rate_is_what_the_kernel_holds(namespaces, ranks_per_node):
    spec = ClusterSpec(nodes=2, ranks_per_node=ranks_per_node, rate="1gbit")
    with Cluster(spec) as cluster:
        assert cluster.rates(0) == cluster.rates(1) == Rates(10**9, 10**9)
        cluster.set_rate(1, "200mbit")
        assert cluster.rates(1) == Rates(2 * 10**8, 2 * 10**8)
        assert cluster.rates(0) == Rates(10**9, 10**9)


def test_a_busy_link_that_is_slowed_goes_on(namespaces, ranks_program):
    """Takes two seconds: each rate is held for a while. What waits is larger than a slow bucket."""
    told = Told()
    with Cluster(ClusterSpec(nodes=2, rate="1gbit")) as cluster:
        cluster.start(ranks_program(FLOOD), on_line=told)
        for _ in range(3):
            told.until("something has come", times=10)
            cluster.set_rate(0, "20mbit")
            told.forget()
            told.until("something has come", times=10)
            cluster.set_rate(0, "1gbit")


def test_an_unshaped_node_can_be_slowed_later(namespaces):
    with Cluster(ClusterSpec(nodes=1)) as cluster:
        assert cluster.rates(0) == Rates(None, None)
        cluster.set_rate(0, "100kbit")
        assert cluster.rates(0) == Rates(10**5, 10**5)


def test_bytes_are_counted_where_they_pass(namespaces, ranks_program):
    spec = ClusterSpec(nodes=2, racks=2, rate="1gbit", uplink_rate="1gbit")
    with Cluster(spec) as cluster:
        assert cluster.sent_bytes().by_node == (0, 0)
        printed(cluster, ranks_program(SEND))
        sent = cluster.sent_bytes()
    for there, back in (sent.by_node, sent.by_rack):
        assert 10**6 < there < 1.1 * 10**6
        assert back < 10**5
