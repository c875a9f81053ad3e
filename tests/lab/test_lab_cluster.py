"""What ranks find, what they print, and what a job reports."""

import json
import os

import pytest
from lab_watching import LIMIT_S, Told, printed

from gradweave._src.errors import LabError, RequestError
from gradweave._src.lab import Cluster, ClusterSpec

SURROUNDINGS = """
import json, os, socket
rank = int(os.environ["RANK"])
own = f"10.77.{rank // 2}.{rank % 2 + 1}"
socket.create_server((own, 0)).close()
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"]
print(json.dumps({
    "interfaces": sorted(name for _, name in socket.if_nameindex()),
    "host": socket.gethostname(),
    "peer": socket.gethostbyname("node1"),
    "odd": list(os.environb[b"ODD"]),
    **{name: os.environ[name] for name in names},
}))
"""


def test_each_rank_has_its_address_and_each_node_its_name(two_by_two, ranks_program):
    odd = os.fsdecode(b"\xff")
    found = printed(two_by_two, ranks_program(SURROUNDINGS), env={"ODD": odd})
    rows = [json.loads(line) for (line,) in found]
    assert [row["host"] for row in rows] == ["node0", "node0", "node1", "node1"]
    assert [row["RANK"] for row in rows] == ["0", "1", "2", "3"]
    assert [row["LOCAL_RANK"] for row in rows] == ["0", "1", "0", "1"]
    for row in rows:
        assert row["interfaces"] == ["eth0", "lo"]
        assert row["peer"] == "10.77.1.1"
        assert row["WORLD_SIZE"] == "4"
        assert row["MASTER_ADDR"] == "10.77.0.1"
        assert row["GLOO_SOCKET_IFNAME"] == "eth0"
        assert row["odd"] == [255]
    assert len({row["MASTER_PORT"] for row in rows}) == 1


AGENT = """
import os, socket
told = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME"}
socket.create_server((socket.gethostbyname(socket.gethostname()), 0)).close()
print(socket.gethostname(), os.environ["ODD"], *told & set(os.environ))
"""


def test_an_agent_is_started_once_on_each_node_and_told_of_no_ranks(two_by_two, ranks_program):
    found = printed(two_by_two, ranks_program(AGENT), env={"ODD": "1"}, once_per_node=True)
    assert found == [["node0 1"], [], ["node1 1"], []]


def test_agents_that_fail_are_named_by_their_nodes(two_by_two):
    script = "[ $(hostname) = node1 ] && echo broken && exit 7; exec sleep 600"
    result = two_by_two.start(["sh", "-c", script], once_per_node=True).wait(LIMIT_S)
    assert [found.node for found in result.exits] == [0, 1]
    assert (result.first_failure.node, result.first_failure.last_lines) == (1, ("broken",))
    assert result.exit_code == 7


def test_lines_are_whole_and_in_order(two_by_two, ranks_program):
    source = "for n in range(300): print(n)\nprint('no end', end='')"
    expected = [*map(str, range(300)), "no end"]
    assert printed(two_by_two, ranks_program(source)) == [expected] * 4


def test_the_first_failure_ends_the_others(two_by_two):
    script = "echo $RANK begins; [ $RANK = 2 ] && echo broken >&2 && exit 7; exec sleep 600"
    result = two_by_two.start(["sh", "-c", script]).wait(LIMIT_S)
    assert result.exit_code == 7
    assert (result.first_failure.rank, result.first_failure.node) == (2, 1)
    assert set(result.first_failure.last_lines) == {"2 begins", "broken"}
    assert [found.status for found in result.exits] == [-15, -15, 7, -15]
    assert str(result.exits[0]) == "rank 0 on node 0: killed by SIGTERM"


def test_who_ignores_the_polite_signal_is_killed(two_by_two):
    told = Told()
    job = two_by_two.start(
        ["sh", "-c", "trap '' TERM; echo deaf; while :; do sleep 0.05; done"], on_line=told
    )
    told.until("deaf", times=4)
    job.stop(grace_s=0.1)
    assert [found.exit_code for found in job.wait(LIMIT_S).exits] == [137] * 4


def test_what_a_rank_leaves_running_ends_with_it(two_by_two):
    left = printed(two_by_two, ["sh", "-c", "sleep 600 & echo $!"])
    pids = [pid for (pid,) in left]
    printed(two_by_two, ["sh", "-c", "for p; do while kill -0 $p; do :; done; done", "-", *pids])


def test_two_jobs_at_once_meet_at_different_ports(two_by_two):
    told = Told()
    waiting = two_by_two.start(["sh", "-c", "echo $MASTER_PORT; exec sleep 600"], on_line=told)
    ((port,), *_) = printed(two_by_two, ["sh", "-c", "echo $MASTER_PORT"])
    told.until(str(int(port) - 1))
    waiting.stop()
    assert waiting.wait(LIMIT_S).exit_code == 128 + 15


def test_waiting_ends_and_names_who_still_runs(two_by_two):
    job = two_by_two.start(["sleep", "600"])
    with pytest.raises(LabError, match=r"still run: \[0, 1, 2, 3\]"):
        job.wait(0.01)
    job.stop()
    assert job.wait(LIMIT_S).exit_code == 128 + 15


def test_a_failing_listener_ends_the_job_and_is_heard(two_by_two):
    def listener(line):
        raise ZeroDivisionError(line.text)

    job = two_by_two.start(["sh", "-c", "echo one; exec sleep 600"], on_line=listener)
    with pytest.raises(ZeroDivisionError, match="one"):
        job.wait(LIMIT_S)


def test_mistakes_are_named_and_leave_the_cluster_usable(two_by_two):
    with pytest.raises(RequestError, match="no program 'no-such-program'"):
        two_by_two.start(["no-such-program"])
    with pytest.raises(RequestError, match="no command"):
        two_by_two.start([])
    with pytest.raises(RequestError, match="node must be between 0 and 1, got 2"):
        two_by_two.cut(2)
    with pytest.raises(RequestError, match="'slow' is not a rate"):
        two_by_two.set_rate(0, "slow")
    assert printed(two_by_two, ["echo", "well"]) == [["well"]] * 4


def test_outside_its_block_there_is_no_cluster():
    with pytest.raises(LabError, match="inside its with-block"):
        Cluster(ClusterSpec(nodes=1)).start(["true"])


def test_loopback_runs_without_namespaces_and_has_no_links():
    with Cluster(ClusterSpec(nodes=2, rate="1gbit"), loopback=True) as cluster:
        script = "echo $MASTER_ADDR $GLOO_SOCKET_IFNAME $RANK"
        found = printed(cluster, ["sh", "-c", script])
        assert found == [["127.0.0.1 lo 0"], ["127.0.0.1 lo 1"]]
        with pytest.raises(LabError, match="on loopback there are no links"):
            cluster.cut(0)
        job = cluster.start(["sleep", "600"], keep_going=True)
        cluster.fail(1)
        job.stop()
        assert [found.status for found in job.wait(LIMIT_S).exits] == [-15, -9]
