"""What the lab's links deliver, against what was asked for: ``python benchmarks/lab_rates.py``.

Plain TCP transfers of two seconds each; then gloo's all-reduce of 16 MB on 4 nodes at 1 Gbit/s. A
rate counts whole Ethernet frames, of which TCP's payload is at most 95.6 %. Prints medians and the
extremes; nothing is asserted, because machines differ.
"""

import argparse
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from statistics import median
from threading import Thread

from gradweave._src.lab import Cluster, ClusterSpec, OutputLine
from gradweave._src.vocabulary import parse_rate

PORT = 5001
TRANSFER_S = 2.0
ALL_REDUCE_BYTES = 16 * 10**6
ALL_REDUCES = 10
NODES, RATE = 4, "1gbit"
PAYLOAD_SHARE = 1448 / 1514
LIMIT_S = 300.0


def transfer_cases(rate: str) -> dict[str, tuple[ClusterSpec, str]]:
    """Return the clusters and kinds of transfers, by the words that are printed for them."""
    two = ClusterSpec(nodes=2, rate=rate)
    return {
        "node to node": (two, "one-way"),
        "node to node, the other way at once": (two, "both-ways"),
        "three nodes to one": (ClusterSpec(nodes=4, rate=rate), "one-way"),
        "inside a node": (ClusterSpec(nodes=1, ranks_per_node=2, local_rate=rate), "one-way"),
        "rack to rack": (ClusterSpec(nodes=2, racks=2, uplink_rate=rate), "one-way"),
        "two ranks of a node to another": (
            ClusterSpec(nodes=2, ranks_per_node=2, rate=rate),
            "from-node-1",
        ),
    }


def transfer(nbytes: int, *, senders: list[int], both_ways: bool) -> None:
    """Send ``nbytes`` in all from ``senders`` to rank 0, which prints the bits per second."""
    share = bytes(nbytes // len(senders))
    rank = int(os.environ["RANK"])
    if rank == 0:
        with socket.create_server(("", PORT)) as server:
            peers = [server.accept()[0] for _ in senders]
        if both_ways:
            Thread(target=peers[0].sendall, args=(share,), daemon=True).start()
        print(nbytes * 8 / _seconds_to_receive(peers))
    elif rank in senders:
        peer = _connected()
        if both_ways:
            Thread(target=_seconds_to_receive, args=([peer],), daemon=True).start()
        peer.sendall(share)
        peer.shutdown(socket.SHUT_WR)
        time.sleep(TRANSFER_S)  # the other way may take a little longer


def _seconds_to_receive(peers: list[socket.socket]) -> float:
    began_s = time.perf_counter()
    threads = [Thread(target=_receive, args=(peer,)) for peer in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began_s


def _receive(peer: socket.socket) -> None:
    buffer = bytearray(2**20)
    while peer.recv_into(buffer):
        pass


def _connected() -> socket.socket:
    while True:
        try:
            return socket.create_connection((os.environ["MASTER_ADDR"], PORT))
        except ConnectionRefusedError:
            time.sleep(0.01)


def one_way(nbytes: int) -> None:
    transfer(nbytes, senders=[*range(1, int(os.environ["WORLD_SIZE"]))], both_ways=False)


def both_ways(nbytes: int) -> None:
    transfer(nbytes, senders=[1], both_ways=True)


def from_node_1(nbytes: int) -> None:
    transfer(nbytes, senders=[2, 3], both_ways=False)


def all_reduce(nbytes: int) -> None:
    import torch  # noqa: PLC0415 the other programs start without it
    import torch.distributed as dist  # noqa: PLC0415

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tensor = torch.zeros(nbytes // 4)
    for _ in range(1 + ALL_REDUCES):  # the first is a warm-up
        dist.barrier()
        began_s = time.perf_counter()
        dist.all_reduce(tensor)
        if dist.get_rank() == 0:
            print(time.perf_counter() - began_s)
    dist.destroy_process_group()


PROGRAMS: Mapping[str, Callable[[int], None]] = {
    "one-way": one_way,
    "both-ways": both_ways,
    "from-node-1": from_node_1,
    "all-reduce": all_reduce,
}


def printed_by_rank_0(spec: ClusterSpec, program: str, nbytes: int) -> list[float]:
    lines: list[OutputLine] = []
    with Cluster(spec) as cluster:
        command = [sys.executable, __file__, "--program", program, "--bytes", str(nbytes)]
        result = cluster.start(command, on_line=lines.append).wait(LIMIT_S)
    if result.first_failure:
        sys.exit("\n".join([str(result.first_failure), *result.first_failure.last_lines]))
    return [float(line.text) for line in lines if line.rank == 0 and not line.is_error]


def measure_rates(rates: list[str], repeats: int) -> None:
    for rate in rates:
        bits_per_s = parse_rate(rate)
        for name, (spec, program) in transfer_cases(rate).items():
            nbytes = int(bits_per_s / 8 * TRANSFER_S)
            shares = [
                bits / bits_per_s
                for _ in range(repeats)
                for bits in printed_by_rank_0(spec, program, nbytes)
            ]
            found = f"{median(shares):.1%} ({min(shares):.1%} to {max(shares):.1%})"
            print(f"{rate:>8}  {name:36} payload {found} of the rate", flush=True)


def measure_all_reduce(repeats: int) -> None:
    wire_s = 2 * (NODES - 1) / NODES * ALL_REDUCE_BYTES * 8 / parse_rate(RATE) / PAYLOAD_SHARE
    spec = ClusterSpec(nodes=NODES, rate=RATE)
    times_s = [
        taken_s
        for _ in range(repeats)
        for taken_s in printed_by_rank_0(spec, "all-reduce", ALL_REDUCE_BYTES)[1:]
    ]
    found = f"{median(times_s) * 1e3:.0f} ms ({min(times_s) * 1e3:.0f} to {max(times_s) * 1e3:.0f})"
    print(f"gloo all-reduce of 16 MB, {NODES} nodes, {RATE}: {found}; wire {wire_s * 1e3:.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", default="100mbit,200mbit,1gbit")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--program", choices=PROGRAMS, help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program:
        PROGRAMS[options.program](options.bytes)
        return
    measure_rates(options.rates.split(","), options.repeats)
    measure_all_reduce(options.repeats)


if __name__ == "__main__":
    main()
