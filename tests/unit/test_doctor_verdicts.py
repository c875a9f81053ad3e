"""Verdicts: nothing where nothing is wrong, the right name where something is."""

from itertools import product

import pytest
from checkups import GIGABIT, LOOPBACK, checkup, interface, rank_facts
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gradweave._src.doctor import diagnose
from gradweave._src.doctor.checkup import AllReduce, Unreached, hosts_of
from gradweave._src.doctor.verdicts import verdicts

NOISE = 0.1


def kinds(found):
    return [finding.kind for finding in verdicts(found)]


def only(found):
    (finding,) = verdicts(found)
    return finding


def noisy(data, rate=lambda _a, _b: GIGABIT):
    """What noise of at most a tenth leaves of rates; the same when asked again."""
    drawn = {}

    def of(a, b):
        if (a, b) not in drawn:
            drawn[a, b] = data.draw(st.floats(1 - NOISE, 1 + NOISE))
        return rate(a, b) * drawn[a, b]

    return of


@given(st.data(), st.integers(1, 9), st.integers(1, 3))
def test_equal_hosts_have_no_findings_whatever_the_noise(data, hosts, ranks_per_host):
    found = checkup(
        hosts,
        ranks_per_host=ranks_per_host,
        alone=noisy(data),
        together=noisy(data),
        trip_s=noisy(data, lambda _a, _b: 1e-4),
    )
    assert verdicts(found) == ()


@given(st.data(), st.integers(3, 9), st.floats(0.01, 0.45))
def test_a_slow_host_is_named_and_nothing_else(data, hosts, share):
    slow = data.draw(st.integers(0, hosts - 1))
    rates = noisy(data, lambda a, b: GIGABIT * (share if slow in (a, b) else 1))
    finding = only(checkup(hosts, alone=rates))
    assert (finding.kind, finding.ranks) == ("slow-host", (slow,))
    assert finding.what.startswith(f"node{slow} (10.77.{slow}.{slow + 1}): ")


@given(st.data(), st.integers(5, 9))
def test_several_slow_hosts_are_named_as_long_as_most_are_not(data, hosts):
    slow = data.draw(st.sets(st.integers(0, hosts - 1), min_size=2, max_size=(hosts - 1) // 2))
    rates = noisy(data, lambda a, b: GIGABIT * (0.1 if {a, b} & slow else 1))
    found = verdicts(checkup(hosts, alone=rates))
    assert {finding.kind for finding in found} == {"slow-host"}
    assert {rank for finding in found for rank in finding.ranks} == slow


@pytest.mark.parametrize("hosts", [3, 4, 8])
def test_a_host_may_be_slow_in_one_direction_alone(hosts):
    sends = only(checkup(hosts, alone=lambda a, b: GIGABIT / (10 if a == 1 else 1)))
    assert "94 Mbit/s to every other host, others reach 936" in sends.what
    receives = only(checkup(hosts, alone=lambda a, b: GIGABIT / (10 if b == 1 else 1)))
    assert "94 Mbit/s from every other host" in receives.what
    assert sends.advice.startswith("check its cable, port or driver (ethtool eth0)")


@given(st.data(), st.integers(3, 9), st.floats(0.01, 0.45))
def test_a_slow_link_is_named_and_neither_of_its_hosts(data, hosts, share):
    ends = data.draw(st.sets(st.integers(0, hosts - 1), min_size=2, max_size=2))
    rates = noisy(data, lambda a, b: GIGABIT * (share if {a, b} == ends else 1))
    finding = only(checkup(hosts, alone=rates))
    assert (finding.kind, set(finding.ranks)) == ("slow-link", ends)


def test_of_two_hosts_one_direction_is_compared_with_the_other():
    finding = only(checkup(2, alone=lambda a, b: GIGABIT / (10 if a == 1 else 1)))
    assert finding.kind == "slow-link"
    assert finding.what.startswith("node1 (10.77.1.2) to node0 (10.77.0.1): 94 Mbit/s")
    assert kinds(checkup(2, alone=lambda a, b: GIGABIT / 10)) == []


@given(st.data(), st.sampled_from([(2, 2), (2, 3), (4, 2), (3, 3)]))
def test_a_rack_that_is_slow_to_reach_is_named_by_its_hosts(data, racks):
    count, size = racks
    rates = noisy(data, lambda a, b: GIGABIT * (1 if a // size == b // size else 0.3))
    finding = only(checkup(count * size, alone=rates))
    assert finding.kind == "slow-uplink"
    for rack in range(count):
        names = ", ".join(f"node{host}" for host in range(rack * size, (rack + 1) * size))
        assert f"{{{names}}}" in finding.what


@given(st.data(), st.sampled_from([(2, 2), (2, 4), (4, 2)]))
def test_an_uplink_that_is_slow_only_when_all_send_is_named(data, racks):
    count, size = racks
    rates = noisy(data, lambda a, b: GIGABIT * (1 if a // size == b // size else 0.5))
    finding = only(
        checkup(
            count * size,
            together=lambda a, b: min(GIGABIT, rates(a, b)),
            changed={rank: {"machine": "one"} for rank in range(count * size)},
        )
    )
    assert finding.kind == "shared-uplink"
    assert "when all send at once" in finding.what


def test_rates_that_busy_cores_explain_are_nobodys_fault():
    def found(fast, share, load):
        changed = {rank: {"load": load} for rank in range(4)}
        rates = {"alone": lambda a, b: fast * (share if {a, b} == {1, 2} else 1)}
        return kinds(checkup(4, changed=changed, core_s_per_byte=1e-10, **rates))

    assert found(20 * GIGABIT, 0.4, 0.0) == ["slow-link"]
    assert found(20 * GIGABIT, 0.4, 80.0) == []
    assert found(GIGABIT, 0.1, 80.0) == ["slow-link"]


def test_cores_that_emulated_hosts_share_are_not_the_networks_fault():
    def less(a, b):
        return GIGABIT / 3

    assert kinds(checkup(4, together=less)) == ["slow-together"]
    one = {rank: {"machine": "one"} for rank in range(4)}
    assert kinds(checkup(4, together=less, changed=one)) == []


def test_half_duplex_is_seen_when_a_host_sends_and_receives():
    finding = only(checkup(4, together=lambda a, b: GIGABIT / (2 if 2 in (a, b) else 1)))
    assert (finding.kind, finding.ranks) == ("slow-together", (2,))
    assert "full duplex" in finding.advice


def test_round_trips_that_take_much_longer_are_named():
    finding = only(checkup(4, trip_s=lambda a, b: 3e-3 if 3 in (a, b) else 1e-4))
    assert (finding.kind, finding.ranks) == ("latency", (3,))
    finding = only(checkup(4, trip_s=lambda a, b: 3e-3 if {a, b} == {0, 3} else 1e-4))
    assert (finding.kind, finding.ranks) == ("latency", (0, 3))
    # A core that was elsewhere costs less than a millisecond.
    assert kinds(checkup(4, trip_s=lambda a, b: 9e-4 if 3 in (a, b) else 1e-4)) == []


ON_LOOPBACK = {"address": "127.0.0.1", "interface": "lo"}


@given(st.integers(2, 8), st.data())
def test_loopback_among_several_hosts_is_named_with_what_to_export(hosts, data):
    wrong = data.draw(st.integers(0, hosts - 1))
    unreached = tuple(
        Unreached(sender=r, receiver=wrong, address="127.0.0.1", stage="connecting", reason="no")
        for r in range(hosts)
        if r != wrong
    )
    finding = only(checkup(hosts, changed={wrong: ON_LOOPBACK}, unreached=unreached))
    assert (finding.kind, finding.ranks) == ("loopback", (wrong,))
    assert f"export GLOO_SOCKET_IFNAME=eth0 on node{wrong}" in finding.advice


def test_on_one_host_loopback_is_as_it_should_be():
    changed = dict.fromkeys(range(3), ON_LOOPBACK)
    assert kinds(checkup(1, ranks_per_host=3, changed=changed)) == []


def test_a_host_name_that_resolves_to_loopback_leads_to_etc_hosts():
    own = {"chosen_by": "the host name", "address": "127.0.1.1", "interface": "lo", "settings": {}}
    finding = only(checkup(2, changed={1: own}))
    assert "/etc/hosts of node1" in finding.what


def second(rank, **changes):
    """A rank that uses its other interface, in a network where all could meet."""
    own = rank_facts(rank, rank).interfaces
    other = interface("eth1", f"10.78.{rank}.1/16", **changes)
    return {"interfaces": (*own, other), "interface": "eth1", "address": f"10.78.{rank}.1"}


def test_another_network_than_the_others_is_named_and_not_called_slow_as_well():
    found = checkup(4, alone=lambda a, b: GIGABIT / (10 if b == 2 else 1), changed={2: second(2)})
    finding = only(found)
    assert (finding.kind, finding.ranks) == ("other-network", (2,))
    assert "rank 2 on node2 would use eth1 (10.78.2.1), others the network 10.77.0.0/16" in (
        finding.what
    )
    assert "gets 94 Mbit/s there (936 Mbit/s between others)" in finding.what
    assert finding.advice == "export GLOO_SOCKET_IFNAME=eth0 on node2 (10.77.2.3)"


def test_hosts_that_are_routed_to_each_other_may_have_networks_of_their_own():
    def routed(rank):
        address = f"10.{rank}.0.1"
        own = (LOOPBACK, interface("eth0", f"{address}/24"))
        return {"address": address, "interfaces": own}

    assert kinds(checkup(4, changed={rank: routed(rank) for rank in range(4)})) == []


def test_a_slower_interface_is_named_where_drivers_say_so():
    def both(rank, **changes):
        slow = interface("eth0", f"10.77.{rank}.1/16", is_physical=True, bits_per_s=10**9)
        fast = interface("eth1", f"10.78.{rank}.1/16", is_physical=True, bits_per_s=25 * 10**9)
        return {"interfaces": (LOOPBACK, slow, fast), "address": f"10.77.{rank}.1", **changes}

    finding = only(checkup(2, changed={rank: both(rank) for rank in range(2)}))
    assert finding.kind == "slower-interface"
    assert finding.what == "node0 and node1 use eth0 (1 Gbit/s), though eth1 (25 Gbit/s) is up"
    virtual = replace(both(0)["interfaces"][2], is_physical=False)
    changed = {
        rank: {**both(rank), "interfaces": (*both(rank)["interfaces"][:2], virtual)}
        for rank in range(2)
    }
    assert kinds(checkup(2, changed=changed)) == []


def test_a_variable_that_names_no_interface_is_named():
    own = {"interface": None, "address": None, "settings": {"GLOO_SOCKET_IFNAME": "ib0"}}
    finding = only(checkup(2, changed={1: own}))
    assert finding.kind == "no-interface"
    assert "GLOO_SOCKET_IFNAME=ib0 names no interface with an address; there are" in finding.what
    assert finding.advice == "export GLOO_SOCKET_IFNAME=eth0 on node1 (10.77.1.2)"


@pytest.mark.parametrize(
    ("value", "expected"),
    [("eth", []), ("=eth0", []), ("^docker", []), ("eth0:1,ib0", []), ("ib0", ["no-interface"])],
)
def test_nccls_variable_means_beginnings_of_names(value, expected):
    assert kinds(checkup(2, changed={1: {"settings": {"NCCL_SOCKET_IFNAME": value}}})) == expected


def test_ranks_on_one_core_are_named():
    shared = checkup(2, ranks_per_host=2, changed={r: {"cores": (0,)} for r in (0, 1)})
    finding = only(shared)
    assert (finding.kind, finding.ranks) == ("shared-core", (0, 1))
    assert finding.what == "ranks 0 and 1 on node0 share core 0 of 8"
    finding = only(checkup(4, changed={2: {"cores": (5,)}}))
    assert (finding.kind, finding.ranks) == ("one-core", (2,))
    assert finding.what == "rank 2 on node2 may use core 5 alone, of 8"


@given(st.integers(1, 8))
def test_ranks_that_are_pinned_well_are_left_alone(ranks):
    cores = 8 // ranks
    changed = {r: {"cores": tuple(range(r * cores, (r + 1) * cores))} for r in range(ranks)}
    assert kinds(checkup(1, ranks_per_host=ranks, changed=changed)) == []


def test_more_threads_than_cores_are_named_with_how_many_there_should_be():
    changed = {rank: {"threads": 8} for rank in range(4)}
    finding = only(checkup(1, ranks_per_host=4, changed=changed))
    assert finding.what == "ranks 0, 1, 2 and 3 on node0 compute with 32 threads on 8 cores"
    assert finding.advice == "export OMP_NUM_THREADS=2 on node0"
    changed = {rank: {"cores": (0, 1), "host_cores": 2} for rank in range(3)}
    assert only(checkup(1, ranks_per_host=3, changed=changed)).advice.startswith("start at most")


def test_a_busy_host_stands_out_or_is_none():
    assert only(checkup(4, changed={1: {"load": 20.0}})).kind == "busy"
    assert kinds(checkup(4, changed={rank: {"load": 20.0} for rank in range(4)})) == []
    assert kinds(checkup(4, changed={1: {"load": 6.0}})) == []


def test_versions_that_differ_are_listed_by_host():
    other = {"python": "3.11.7", "torch": "2.12.1", "gradweave": "0.1.0"}
    finding = only(checkup(3, changed={2: {"versions": other}}))
    assert "torch is not the same everywhere (2.13.0 on node0 and node1; 2.12.1 on node2)" in (
        finding.what
    )


def test_clocks_that_are_far_off_are_named():
    finding = only(checkup(3, clock_offsets_s={0: 0.0, 1: 0.05, 2: -3.2}))
    assert finding.what == "the clock of node2 is 3.2 s ahead of rank 0's"


def test_who_did_not_come_and_who_fell_silent_is_named():
    finding = only(checkup(3, world_size=4))
    assert (finding.kind, finding.ranks) == ("absent", (3,))
    assert "did not come to 10.77.0.1:29500 within 30 s" in finding.what
    assert "ping 10.77.0.1" in finding.advice
    finding = only(checkup(3, lost=(1,), lost_while="measuring all at once"))
    assert finding.what.startswith("rank 1 on node1 (10.77.1.2) fell silent while measuring all")


def silent(sender, receiver, stage="connecting"):
    return Unreached(
        sender=sender,
        receiver=receiver,
        address=f"10.77.{receiver}.{receiver + 1}",
        stage=stage,
        reason="no answer within 10 s",
    )


def test_a_rank_that_nobody_reaches_is_one_line():
    finding = only(checkup(4, unreached=tuple(silent(r, 2) for r in (0, 1, 3))))
    assert finding.ranks == (2,)
    assert finding.what == ("nobody reaches rank 2 on node2 at 10.77.2.3 (no answer within 10 s)")
    assert "firewall" in finding.advice


def test_a_pair_that_does_not_get_through_is_named_by_who_and_where():
    finding = only(checkup(4, unreached=(silent(0, 2),)))
    assert finding.what.startswith("rank 0 on node0 does not reach rank 2 on node2 at 10.77.2.3")
    assert "MTU" in only(checkup(4, unreached=(silent(0, 2, "sending"),))).advice


def test_hosts_of_one_name_are_told_apart_by_their_machines():
    ranks = [rank_facts(0, 0, host="localhost"), rank_facts(1, 1, host="localhost")]
    assert [host.name for host in hosts_of(ranks)] == ["localhost of rank 0", "localhost of rank 1"]
    ranks = [replace(facts, machine="one") for facts in ranks]
    assert [len(host.ranks) for host in hosts_of(ranks)] == [2]


def test_torchs_wrapper_is_priced_by_what_all_reduces_took():
    all_reduces = (AllReduce(nbytes=10**6, seconds=0.02), AllReduce(nbytes=8 * 10**6, seconds=0.16))
    price = diagnose(checkup(4, all_reduces=all_reduces)).price
    assert price.all_reduce_s == pytest.approx(2.0)
    for step in price.steps:
        assert step.step_s == pytest.approx(step.compute_s + step.exposed_s)
        # All of it but what backward hides, which is two thirds of computing at most.
        assert 2.0 - 2 / 3 * step.compute_s <= step.exposed_s <= 2.0
    assert diagnose(checkup(4)).price is None


@pytest.mark.parametrize(("fast", "slow"), [*product((1e6, 1e9, 1e11), (0.1, 0.4))])
def test_only_shares_count_never_speeds(fast, slow):
    finding = only(checkup(4, alone=lambda a, b: fast * (slow if 3 in (a, b) else 1)))
    assert (finding.kind, finding.ranks) == ("slow-host", (3,))
