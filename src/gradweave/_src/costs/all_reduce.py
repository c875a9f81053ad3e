"""All-reduce by the algorithms of Table 2 of the MG-WFBP journal paper, as our schedules cost.

Ring and halving/doubling cost what the table says, for any number of workers, with its log N as
ceil(log2 N). Recursive doubling does where N is a power of two. The table's trees leave out that a
parent of two children has one port: as printed they stand in benchmarks/papers/journal_table_2.py.
"""

from gradweave._src.costs.cost import Line, total_line
from gradweave._src.costs.links import Link
from gradweave._src.costs.scatter_gather import (
    doubling_all_gather,
    halving_reduce_scatter,
    ring_all_gather,
    ring_reduce_scatter,
)

# Chunks that follow each other through each of two trees: enough to keep all levels of a large tree
# busy, few enough that their start-ups stay small.
DOUBLE_TREE_CHUNKS = 8


def binary_tree(link: Link, workers: int) -> Line:
    """Price a tree: the whole message goes up and down again, with two children at every level.

    Of a power of two workers, the root has one child.
    """
    height = workers.bit_length() - 1
    children = 2 * height - _is_power_of_two(workers)
    return Line(
        startup_s=2 * height * link.latency_s,
        s_per_byte=(2 * link.s_per_byte + link.sum_s_per_byte) * children,
    )


def recursive_doubling(link: Link, workers: int) -> Line:
    """Price recursive doubling: pairs at distance 1, 2, 4, … swap the whole message.

    Where the workers are no power of two, those that are too many hand over what they have before
    and get the sum afterwards: two rounds more than the power of two below takes, and the last of
    them does not add.
    """
    swaps = workers.bit_length() - 1
    folded = not _is_power_of_two(workers)
    messages = swaps + 2 * folded
    return Line(
        startup_s=messages * link.latency_s,
        s_per_byte=messages * link.s_per_byte + (swaps + folded) * link.sum_s_per_byte,
    )


def halving_doubling(link: Link, workers: int) -> Line:
    """Price halving and doubling, which send the ring's bytes in log N rounds each."""
    return total_line(halving_reduce_scatter(link, workers), doubling_all_gather(link, workers))


def double_tree(link: Link, workers: int) -> Line:
    """Price two trees, each with half of the message in chunks, up and down at once.

    Rounds keep step: the busiest worker of each decides how long it takes. Exact where adding is
    free; otherwise up to 4 % too little, because some workers add while others send.
    """
    height, chunks = workers.bit_length() - 1, DOUBLE_TREE_CHUNKS
    total = 2 * height + chunks - 1
    busiest_s = sum(_busiest_s(link, workers, number) for number in range(total))
    return Line(startup_s=total * link.latency_s, s_per_byte=busiest_s / (2 * chunks))


def _busiest_s(link: Link, workers: int, number: int) -> float:
    """Return what the busiest worker of a round takes for each byte of a chunk.

    It sends, or receives and adds. A worker is inside one tree, at some depth, and a leaf of the
    other.
    """
    height = workers.bit_length() - 1

    def goes_up(depth: int) -> bool:
        return 0 <= number - (height - depth) < DOUBLE_TREE_CHUNKS

    def comes_down(depth: int) -> bool:
        return 0 <= number - (height + depth - 1) < DOUBLE_TREE_CHUNKS

    busiest_s = 0.0
    for depth in range(height):
        children = 1 if depth == 0 and _is_power_of_two(workers) else 2
        inner = depth > 0
        added = children * goes_up(depth + 1)
        received = added + (inner and comes_down(depth)) + comes_down(height)
        sent = children * comes_down(depth + 1) + (inner and goes_up(depth)) + goes_up(height)
        receiving_s = received * link.s_per_byte + added * link.sum_s_per_byte
        busiest_s = max(busiest_s, receiving_s, sent * link.s_per_byte)
    return busiest_s


def _is_power_of_two(workers: int) -> bool:
    return workers & (workers - 1) == 0


def ring(link: Link, workers: int) -> Line:
    """Price a ring: 2 (N-1) rounds of 1/N of the message each."""
    return total_line(ring_reduce_scatter(link, workers), ring_all_gather(link, workers))
