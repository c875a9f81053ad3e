"""The values: what a cluster may be, what its ranks are told, how it is wired and shaped."""

import pytest

from gradweave._src.errors import LabError, RequestError
from gradweave._src.lab import ClusterSpec
from gradweave._src.lab.layout import lay_out
from gradweave._src.lab.shaping import FRAME_BYTES, MAX_SEGMENT_BYTES, shape, token_bucket
from gradweave._src.lab.spec import MeetingPoint, hosts_file, rank_environment
from gradweave._src.vocabulary import parse_duration, parse_rate


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [
        ("1gbit", 10**9),
        ("200mbit", 2 * 10**8),
        ("100kbit", 10**5),
        ("2.5gbit", 25 * 10**8),
        ("1bit", 1),
    ],
)
def test_rates_are_bits_per_second(text, bits_per_s):
    assert parse_rate(text) == bits_per_s


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "1gb",
        "1Gbit",
        "1 gbit",
        "-1gbit",
        "0gbit",
        "0.1bit",
        "1gbit;",
        "1e3mbit",
        "\u0661gbit",
    ],
)
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(RequestError, match="rate"):
        parse_rate(text)


def test_durations_have_units():
    assert parse_duration("0.2ms") == pytest.approx(2e-4)
    assert parse_duration("50us") == pytest.approx(5e-5)
    assert parse_duration("1s") == 1.0
    assert parse_duration("2ns") == pytest.approx(2e-9)
    with pytest.raises(RequestError, match=r"'0.2' .* write 0.2s or 0.2ms"):
        parse_duration("0.2")
    for text in ("0.2", "ms", "-1ms", "1 ms", "1m"):
        with pytest.raises(RequestError, match="duration"):
            parse_duration(text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nodes": 0}, "nodes must be between 1 and 254, got 0"),
        ({"nodes": 255}, "nodes must be between 1 and 254, got 255"),
        ({"nodes": 1, "ranks_per_node": 0}, "ranks_per_node must be between 1 and 254, got 0"),
        ({"nodes": 3, "racks": 2}, "racks must divide the 3 nodes evenly, got 2"),
        ({"nodes": 2, "racks": 0}, "racks must divide the 2 nodes evenly, got 0"),
        ({"nodes": 2, "uplink_rate": "1gbit"}, "uplink_rate 1gbit needs at least two racks"),
        ({"nodes": 2, "rate": "1kbit"}, "rate must be between 100kbit and 32gbit, got 1kbit"),
        ({"nodes": 2, "local_rate": "99gbit"}, "local_rate must be between"),
        ({"nodes": 2, "rate": "fast"}, "'fast' is not a rate"),
        ({"nodes": 2, "delay": "11s"}, "delay must be at most 10s, got 11s"),
    ],
)
def test_a_spec_names_the_field_and_the_value(fields, message):
    with pytest.raises(RequestError, match=message):
        ClusterSpec(**fields)


def test_ranks_are_told_what_torchrun_would_tell_them():
    spec = ClusterSpec(nodes=3, ranks_per_node=2)
    meeting = MeetingPoint("10.77.0.1", 29500, "eth0")
    base = {"OMP_NUM_THREADS": "4", "RANK": "of another launcher", "OTHER": "kept"}
    assert rank_environment(spec, 3, base=base, meeting=meeting) == {
        "RANK": "3",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "10.77.0.1",
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "4",
        "PYTHONUNBUFFERED": "1",
        "OTHER": "kept",
    }
    assert [spec.address_of(rank) for rank in (0, 1, 5)] == ["10.77.0.1", "10.77.0.2", "10.77.2.2"]
    assert "10.77.2.2 node2-1\n::ffff:10.77.2.2 node2-1\n" in hosts_file(spec)


@pytest.mark.parametrize("found", [-1, 2, 7])
def test_there_are_no_other_ranks_and_nodes(found):
    spec = ClusterSpec(nodes=2)
    for ask in (spec.node_of, spec.address_of, spec.second_address_of):
        with pytest.raises(RequestError, match=f"rank must be between 0 and 1, got {found}"):
            ask(found)
    for ask in (spec.rack_of, spec.ranks_of):
        with pytest.raises(RequestError, match=f"node must be between 0 and 1, got {found}"):
            ask(found)


def test_the_only_rank_of_a_node_hangs_on_the_nodes_own_cable():
    layout = lay_out(ClusterSpec(nodes=2, rate="1gbit", local_rate="4gbit"))
    assert layout.bridges == ("core",)
    assert layout.ranks == ()
    assert [(way[0].rank, way[0].bits_per_s) for way in layout.ways] == [(0, 10**9), (1, 10**9)]


def test_a_way_leads_through_node_and_rack_to_the_core():
    layout = lay_out(
        ClusterSpec(
            nodes=4,
            ranks_per_node=2,
            racks=2,
            rate="1gbit",
            local_rate="4gbit",
            uplink_rate="2gbit",
            delay="1ms",
        )
    )
    assert len(layout.bridges) == 1 + 2 + 4
    assert len(layout.ways) == 8
    assert [(cable.lower, cable.bits_per_s, cable.delay_s) for cable in layout.ways[5]] == [
        ("rank5", 4 * 10**9, 0.0),
        ("node2", 10**9, 1e-3),
        ("rack1", 2 * 10**9, 0.0),
    ]
    names = [name for cable in layout.cables for name in (cable.upper_name, cable.lower_name)]
    assert max(map(len, names)) <= 15  # the kernel's limit


def test_second_interfaces_have_a_network_of_their_own():
    spec = ClusterSpec(nodes=2, ranks_per_node=2, rate="1gbit", second_rate="100mbit")
    layout = lay_out(spec)
    assert layout.bridges == ("core", "node0", "node1", "second")
    cables = [(one.rank, one.lower_name, one.address, one.bits_per_s) for one in layout.seconds]
    assert cables[2:] == [(2, "eth1", "10.78.1.1", 10**8), (3, "eth1", "10.78.1.2", 10**8)]
    assert [len(way) for way in layout.ways] == [2, 2, 2, 2, 1, 1, 1, 1]
    assert [one.address for one in layout.ranks] == [spec.address_of(rank) for rank in range(4)]
    names = [one.upper_name for one in lay_out(ClusterSpec(nodes=254, second_rate="1gbit")).seconds]
    assert max(map(len, names)) <= 15
    with pytest.raises(RequestError, match="second_rate must be between"):
        ClusterSpec(nodes=2, second_rate="99gbit")


@pytest.mark.parametrize("bits_per_s", [10**5, 10**8, 10**9, 32 * 10**9])
def test_a_bucket_takes_whole_packets(bits_per_s):
    bucket = token_bucket(bits_per_s)
    assert 2 * FRAME_BYTES <= bucket.segment_bytes <= MAX_SEGMENT_BYTES
    assert bucket.segment_bytes < bucket.burst_bytes < bucket.limit_bytes


class Recorder:
    def __init__(self):
        self.calls = []

    def tc(self, command, kind, **options):
        self.calls.append((command, kind, options))

    def get_qdiscs(self, index):
        return []  # nothing shapes it yet


def test_delay_comes_before_the_bucket():
    ipr = Recorder()
    shape(ipr, 7, token_bucket(10**9), delay_s=2e-3)
    (_, first, delay), (_, second, rate) = ipr.calls
    assert (first, delay["delay"], delay["handle"]) == ("netem", 2000, "1:")
    assert (second, rate["parent"], rate["rate"]) == ("tbf", "1:1", 125_000_000)
    assert delay["limit"] * FRAME_BYTES >= 125_000_000 * 2e-3


def test_without_netem_a_delay_is_refused():
    from pyroute2.netlink.exceptions import NetlinkError  # noqa: PLC0415

    class Old(Recorder):
        def tc(self, command, kind, **options):
            raise NetlinkError(2, "No such file or directory")

    with pytest.raises(LabError, match="this kernel has no netem"):
        shape(Old(), 7, None, delay_s=1e-3)
