"""The doctor on emulated clusters: what is slow, wrongly wired, pinned or cut off is named."""

import json
import sys

import pytest

from gradweave._src.bench.checkup import CheckupQuestion, check_cluster
from gradweave._src.doctor import diagnose
from gradweave._src.lab import Cluster, ClusterSpec

LIMIT_S = 120.0

WRONG = """
case $RANK in
  1) export GLOO_SOCKET_IFNAME=lo;;
  2) export GLOO_SOCKET_IFNAME=eth1;;
  3) exec taskset -c 0 "$@";;
esac
exec "$@"
"""


def diagnosis_of(cluster, *, timeout_s=20.0):
    return diagnose(check_cluster(cluster, CheckupQuestion(timeout_s=timeout_s)))


@pytest.mark.long
def test_a_slow_node_is_named(namespaces):
    """Several seconds: every rank imports torch."""
    with Cluster(ClusterSpec(nodes=4, rate="200mbit")) as cluster:
        cluster.set_rate(2, "20mbit")
        found = diagnosis_of(cluster)
    assert [(one.kind, one.ranks) for one in found.findings] == [("slow-host", (2,))]
    assert found.findings[0].what.startswith("node2 (10.77.2.1): ")
    assert found.price.all_reduce_s > 1


@pytest.mark.long
def test_wrong_interfaces_and_a_pinned_rank_are_named_together(namespaces):
    """Several seconds: every rank imports torch."""
    printed = []
    command = ["sh", "-c", WRONG, "-", sys.executable, "-m", "gradweave", "doctor", "--json"]
    with Cluster(ClusterSpec(nodes=5, rate="200mbit", second_rate="50mbit")) as cluster:
        result = cluster.start(command, on_line=printed.append).wait(LIMIT_S)
    assert result.exit_code == 0, printed
    found = json.loads("\n".join(one.text for one in printed if not one.is_error))
    kinds = {one["kind"]: one for one in found["findings"]}
    # On a machine of one core nobody is pinned.
    cores = found["checkup"]["ranks"][0]["host_cores"]
    assert set(kinds) == {"loopback", "other-network", *(["one-core"] if cores > 1 else [])}
    assert kinds["loopback"]["ranks"] == [1]
    assert kinds["loopback"]["advice"] == "export GLOO_SOCKET_IFNAME=eth0 on node1 (10.77.1.1)"
    assert kinds["other-network"]["ranks"] == [2]
    assert "would use eth1 (10.78.2.1)" in kinds["other-network"]["what"]


@pytest.mark.long
def test_an_uplink_that_racks_share_is_named(namespaces):
    """Several seconds: every rank imports torch."""
    # So slow that busy cores are no excuse: what they could carry is not told from the uplink.
    spec = ClusterSpec(nodes=4, rate="20mbit", racks=2, uplink_rate="20mbit")
    with Cluster(spec) as cluster:
        found = diagnosis_of(cluster)
    (finding,) = found.findings
    assert finding.kind == "shared-uplink"
    assert "between {node0, node1} and {node2, node3}: " in finding.what


@pytest.mark.long
def test_a_node_that_is_cut_off_while_it_is_measured_is_named(namespaces):
    """Half a minute: silence is heard by waiting."""
    seen = []
    with Cluster(ClusterSpec(nodes=3, rate="200mbit")) as cluster:

        def advance():
            seen.append(None)
            if len(seen) == 4:
                cluster.cut(1)

        found = diagnose(check_cluster(cluster, CheckupQuestion(timeout_s=8.0), advance=advance))
    (finding,) = found.findings
    assert (finding.kind, finding.ranks) == ("lost", (1,))


@pytest.mark.long
def test_a_node_that_is_cut_off_is_waited_for_and_named(namespaces):
    """Half a minute: silence is heard by waiting."""
    with Cluster(ClusterSpec(nodes=3, rate="200mbit")) as cluster:
        cluster.cut(1)
        found = diagnosis_of(cluster, timeout_s=8.0)
    (finding,) = found.findings
    assert (finding.kind, finding.ranks) == ("absent", (1,))
    assert "10.77.0.1:29500" in finding.what
    assert len(found.checkup.alone) == 2
