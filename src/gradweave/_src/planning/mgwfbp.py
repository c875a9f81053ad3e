"""MG-WFBP, Algorithm 1 of the journal paper, as published.

Backward order throughout: the paper's layer L is the first tensor here. It is *not* optimal, though
the paper's Theorem 1 says so; docs/merging.md has the counterexample.
"""

from gradweave._src.costs import Cost, least_squares
from gradweave._src.trace import Trace


def mgwfbp(trace: Trace, cost: Cost) -> list[int]:
    """Merge a tensor with the next if that is ready before ``its own start + a`` (Eq. 38).

    The paper recomputes every start time after each merge, which takes O(L^2). A start depends only
    on the tensors before it, so one pass carries the same numbers in O(L). The rule knows only
    lines: a measured curve is replaced by its line of least squares, as in the papers. (A line of
    least relative errors has a several times smaller start-up, and the rule merges too little.)
    """
    line = cost.line(float(trace.nbytes.sum()), least_squares)
    lengths, length, held_bytes = [], 1, trace.tensors[0].nbytes
    start_s = trace.tensors[0].ready_s
    for following in trace.tensors[1:]:
        if following.ready_s - start_s < line.startup_s:
            length += 1
            held_bytes += following.nbytes
        else:
            lengths.append(length)
            start_s += line.startup_s + line.s_per_byte * held_bytes
            length, held_bytes = 1, following.nbytes
        start_s = max(start_s, following.ready_s)
    return [*lengths, length]
