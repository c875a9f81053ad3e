"""Exchanges: nothing is lost, all ranks end alike, and each applies what it promises.

The pure part first, all ranks in one process; then the same on process groups.
"""

import os
from collections import Counter
from datetime import timedelta
from itertools import pairwise
from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lockstep import Traffic, bits, dense, elements, exchange_all, sparse
from ranks import on_processes, on_threads

from gradweave._src.collectives.program import Kind, program
from gradweave._src.compression import EXCHANGE_NAMES
from gradweave._src.costs import SPARSE_FORMULAS
from gradweave._src.errors import CollectiveError, RequestError
from gradweave._src.sparse import vectors
from gradweave._src.sparse.exchange import EXCHANGES, find_exchange
from gradweave._src.sparse.exchanger import Exchanger
from gradweave._src.sparse.settings import GTopK, TopK
from gradweave._src.sparse.vectors import (
    SparseVector,
    add,
    index_type,
    message_bytes,
    pack,
    part_by,
    part_largest,
    unpack,
)

WORLDS = range(1, 10)
CONSERVING = [name for name in EXCHANGES if name != "gtopk-tree-lossy"]
GLOBAL = [name for name in EXCHANGES if name.startswith("gtopk")]


# What the paper says, on dictionaries.


def merged(first, second, k):
    """The paper's operator: the sum, of which k are kept (Definition 1); and what is dropped."""
    total = {i: first.get(i, 0) + second.get(i, 0) for i in first | second}
    kept = sorted(total, key=lambda i: (-abs(total[i]), i))[:k]
    return {i: total[i] for i in kept}, {i: v for i, v in total.items() if i not in kept}


def up_the_tree(sent, k):
    """What rank 0 ends with, and everything that was dropped on the way."""
    held, dropped = dict(enumerate(sent)), []
    distance = 1
    while distance < len(sent):
        for rank in range(0, len(sent) - distance, 2 * distance):
            held[rank], lost = merged(held[rank], held[rank + distance], k)
            dropped.append(lost)
        distance *= 2
    return held[0], dropped


def across_the_butterfly(sent, k):
    """Neighbours act as one until the number of ranks is a power of two; then as in the tree."""
    cores = 1 << (len(sent).bit_length() - 1)
    pairs = len(sent) - cores
    folded = [merged(sent[2 * p], sent[2 * p + 1], k)[0] for p in range(pairs)]
    return up_the_tree(folded + sent[2 * pairs :], k)[0]


def sums(dictionaries):
    total = Counter()
    for one in dictionaries:
        for index, value in one.items():
            total[index] += value
    return {index: value for index, value in total.items() if value}


def nonzero(dictionary):
    return {index: value for index, value in dictionary.items() if value}


@st.composite
def sent_by_all(draw, worlds=WORLDS):
    """What each rank sends, and k: few indices and small whole numbers, so that there are ties."""
    k = draw(st.integers(1, 6))
    numel = draw(st.integers(k, 12))
    ranks = draw(st.sampled_from(list(worlds)))
    values = st.integers(-4, 4).map(float)
    indices = st.integers(0, numel - 1)
    one = st.dictionaries(indices, values, max_size=k)
    return draw(st.lists(one, min_size=ranks, max_size=ranks)), k


@pytest.mark.parametrize("name", CONSERVING)
@given(case=sent_by_all())
def test_what_is_applied_and_what_returns_is_what_was_sent(name, case):
    sent, k = case
    done = exchange_all(name, [sparse(one) for one in sent], k)
    returned = [elements(one.returned) for one in done]
    assert sums([elements(done[0].applied), *returned]) == sums(sent)


@pytest.mark.parametrize("name", EXCHANGES)
@given(case=sent_by_all(), seed=st.integers(0, 2**32 - 1))
def test_all_ranks_end_with_the_same_bits(name, case, seed):
    """Also where sums are rounded, and all of them ascend."""
    sent, k = case
    noise = np.random.default_rng(seed)
    rough = [{i: v + noise.standard_normal() for i, v in one.items()} for one in sent]
    done = exchange_all(name, [sparse(one) for one in rough], k)
    assert len({bits(one.applied) for one in done}) == 1
    for one in done:
        for vector in (one.applied, one.returned):
            assert all(a < b for a, b in pairwise(vector.indices.tolist()))


@given(case=sent_by_all())
def test_topk_applies_all_sums(case):
    sent, k = case
    done = exchange_all("topk", [sparse(one) for one in sent], k)
    assert nonzero(elements(done[0].applied)) == sums(sent)
    assert all(len(one.returned) == 0 for one in done)


@given(case=sent_by_all())
def test_the_oracle_applies_the_k_largest_sums(case):
    """Algorithm 2: and each rank gets back exactly what of its own was not applied."""
    sent, k = case
    done = exchange_all("gtopk-all-gather", [sparse(one) for one in sent], k)
    total = {i: sum(one.get(i, 0) for one in sent) for one in sent for i in one}
    largest = sorted(total, key=lambda i: (-abs(total[i]), i))[:k]
    assert elements(done[0].applied) == {i: total[i] for i in sorted(largest)}
    for own, one in zip(sent, done, strict=True):
        assert elements(one.returned) == {i: own[i] for i in sorted(own) if i not in largest}


@given(case=sent_by_all())
def test_tree_and_butterfly_merge_as_the_paper_does(case):
    """G1 T G2 T … (Algorithm 3). The operator is not associative, so brackets matter: the tree has
    the paper's, the butterfly the same ones wherever the number of ranks is a power of two."""
    sent, k = case
    expected = {
        "gtopk-tree": up_the_tree(sent, k)[0],
        "gtopk-tree-lossy": up_the_tree(sent, k)[0],
        "gtopk": across_the_butterfly(sent, k),
    }
    for name, applied in expected.items():
        done = exchange_all(name, [sparse(one) for one in sent], k)
        assert elements(done[0].applied) == dict(sorted(applied.items())), name
    if len(sent).bit_count() == 1:
        assert expected["gtopk-tree"] == expected["gtopk"]


@given(case=sent_by_all())
def test_all_agree_with_the_oracle_where_nothing_is_dropped_half_way(case):
    """Two ranks, or no more indices than k. Otherwise tree and butterfly may drop, before all have
    added to it, an index that would be among the k largest in the end; the paper accepts that."""
    sent, k = case
    if len(sent) > 2 and len(set().union(*sent)) > k:
        return
    results = {
        bits(exchange_all(name, [sparse(one) for one in sent], k)[0].applied) for name in GLOBAL
    }
    assert len(results) == 1


@given(case=sent_by_all())
def test_the_papers_tree_loses_what_survives_elsewhere_and_nothing_more(case):
    sent, k = case
    applied, dropped = up_the_tree(sent, k)
    done = exchange_all("gtopk-tree-lossy", [sparse(one) for one in sent], k)
    left = sums([elements(done[0].applied), *(elements(one.returned) for one in done)])
    lost = sums([{i: v for i, v in one.items() if i in applied} for one in dropped])
    assert sums([left, lost]) == sums(sent)


def test_the_example_of_the_docs():
    """Four ranks, k = 1: rank 1's element 0 is dropped half-way, and element 0 is applied."""
    sent = [{1: 3.0}, {0: 2.0}, {0: 5.0}, {1: 1.0}]
    vectors_sent = [sparse(one) for one in sent]
    lossy = exchange_all("gtopk-tree-lossy", vectors_sent, 1)
    assert elements(lossy[0].applied) == {0: 5.0}
    assert [elements(one.returned) for one in lossy] == [{1: 3.0}, {}, {}, {1: 1.0}]
    tree = exchange_all("gtopk-tree", vectors_sent, 1)
    assert [elements(one.returned) for one in tree] == [{0: 2.0, 1: 3.0}, {}, {1: 1.0}, {}]
    butterfly = exchange_all("gtopk", vectors_sent, 1)
    assert [elements(one.returned) for one in butterfly] == [{1: 3.0}, {0: 2.0}, {}, {1: 1.0}]
    oracle = exchange_all("gtopk-all-gather", vectors_sent, 1)
    assert elements(oracle[0].applied) == {0: 7.0}


@pytest.mark.parametrize("name", CONSERVING)
@pytest.mark.parametrize("world", WORLDS)
def test_over_several_steps_nothing_is_lost(name, world):
    """Applied sums + all residuals = all gradients ever produced, exactly, ties included."""
    numel, k = 23, 4
    chance = np.random.default_rng(world)
    residuals = np.zeros((world, numel), np.float32)
    produced, applied = np.zeros(numel), np.zeros(numel)
    for _ in range(8):
        gradients = chance.integers(-5, 6, (world, numel)).astype(np.float32)
        produced += gradients.sum(axis=0)
        residuals += gradients
        sent = []
        for residual in residuals:
            indices = np.sort(np.argsort(-np.abs(residual), kind="stable")[:k])
            sent.append(SparseVector(indices.astype(np.int32), residual[indices]))
            residual[indices] = 0
        done = exchange_all(name, sent, k)
        applied += dense(done[0].applied, numel)
        residuals += np.stack([dense(one.returned, numel) for one in done])
        assert (applied + residuals.sum(axis=0) == produced).all()


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("world", WORLDS)
def test_what_is_not_finite_on_one_rank_is_seen_by_all(name, world):
    for bad in range(world):
        sent = [sparse({rank: 1.0}) for rank in range(world)]
        sent[bad] = vectors.empty(np.float32, np.int32, finite=False)
        assert not any(one.finite for one in exchange_all(name, sent, 2))


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("world", range(2, 10))
def test_a_sum_that_overflows_is_seen_by_all(name, world):
    sent = [sparse({0: 3e38 if rank >= world - 2 else 0.0}) for rank in range(world)]
    assert not any(one.finite for one in exchange_all(name, sent, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vectors, "kernels", lambda: None)
        assert not any(one.finite for one in exchange_all(name, sent, 1))


@pytest.mark.parametrize("world", WORLDS)
def test_rounds_and_bytes(world):
    """As the table of docs/sparsification-explained.md; on powers of two as Table I."""
    traffic = {name: Traffic() for name in EXCHANGES}
    for name, counted in traffic.items():
        exchange_all(name, [sparse({0: 1.0})] * world, 1, counted)
    rounds = {name: len(counted.rounds) for name, counted in traffic.items()}
    vectors_ = {name: counted.vectors_in_a_row for name, counted in traffic.items()}
    doublings = ceil(log2(world))
    whole = 1 << doublings == world
    crossing = doublings if whole else doublings + 1
    for name in ("topk", "gtopk-all-gather"):
        assert (rounds[name], vectors_[name]) == (doublings, world - 1)
    for name in ("gtopk-tree", "gtopk-tree-lossy"):
        assert (rounds[name], vectors_[name]) == (2 * doublings, 2 * doublings)
    assert (rounds["gtopk"], vectors_["gtopk"]) == (crossing, crossing)


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("world", WORLDS)
def test_what_one_rank_sends_another_receives(name, world):
    """The same vectors, in the same round, as the same one of all messages between the two."""
    sent, received = [], []
    for rank in range(world):
        for step in program(EXCHANGES[name].schedule(world), rank).steps:
            message = (step.round, step.ordinal, step.first, step.last)
            if step.kind is Kind.SEND:
                sent.append((rank, step.peer, *message))
            else:
                received.append((step.peer, rank, *message))
    assert sorted(sent) == sorted(received)
    assert len(sent) >= world - 1


@given(case=sent_by_all(worlds=[2]))
def test_with_and_without_numba_the_same_bits(case):
    (first, second), k = case
    with pytest.MonkeyPatch.context() as patch:
        first, second = sparse(first), sparse(second)
        fast = add(first, second)
        parted = [*part_largest(fast, k), *part_by(fast, first.indices)]
        patch.setattr(vectors, "kernels", lambda: None)
        slow = add(second, first)
        again = [*part_largest(slow, k), *part_by(slow, first.indices)]
        assert bits(fast) == bits(slow)
        assert [bits(one) for one in parted] == [bits(one) for one in again]


@given(
    values=st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, 3e38]), max_size=40),
    k=st.integers(0, 41),
)
def test_parting_by_magnitude(values, k):
    vector = sparse(dict(enumerate(values)))
    inside, outside = part_largest(vector, k)
    chosen = sorted(range(len(values)), key=lambda i: (-abs(np.float32(values[i])), i))[:k]
    assert inside.indices.tolist() == sorted(chosen)
    assert sorted(inside.indices.tolist() + outside.indices.tolist()) == list(range(len(values)))


def test_parting_by_indices():
    vector = sparse({1: 1.0, 4: 4.0, 9: 9.0})
    inside, outside = part_by(vector, np.array([0, 4, 10], np.int32))
    assert (elements(inside), elements(outside)) == ({4: 4.0}, {1: 1.0, 9: 9.0})
    inside, outside = part_by(vector, np.array([], np.int32))
    assert (len(inside), len(outside)) == (0, 3)


@pytest.mark.parametrize("values", [np.float32, np.float64])
@pytest.mark.parametrize("indices", [np.int32, np.int64])
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_one_message_carries_values_and_indices(values, indices, count):
    vector = sparse({2**20 + i: 0.5 - i for i in range(count)}, values, indices)
    message = np.zeros(message_bytes(5, values, indices), np.uint8)
    pack(vector, message)
    arrived = unpack(message, values, indices)
    assert bits(arrived) == bits(vector)
    assert arrived.values.flags.aligned
    assert arrived.indices.flags.aligned
    pack(vectors.empty(values, indices, finite=False), message)
    assert not unpack(message, values, indices).finite


def test_indices_have_32_bits_where_they_fit():
    assert index_type(25_557_032) == index_type(2**31) == np.int32
    assert index_type(2**31 + 1) == np.int64
    assert message_bytes(1000, np.float32, np.int32) == 8 + 8 * 1000


def test_names():
    """One meaning each: who predicts and who trains take them from the same list."""
    assert tuple(EXCHANGES) == EXCHANGE_NAMES == tuple(SPARSE_FORMULAS)
    assert GTopK(density=0.1).exchange == "gtopk"
    assert TopK(density=0.1).exchange == "topk"
    with pytest.raises(RequestError, match="no exchange 'magic'; there are topk, "):
        find_exchange("magic")


# On process groups.


def drawn(rank, numel, k, indices=np.int32):
    chance = np.random.default_rng(rank)
    chosen = np.sort(chance.choice(numel, k, replace=False))
    return SparseVector(chosen.astype(indices), chance.standard_normal(k).astype(np.float32))


def all_exchanges(group, numel, k):
    exchanger = Exchanger(group)
    mine = drawn(group.rank(), numel, k, index_type(numel))
    done = [exchanger.run(mine, exchange=name, k=k, numel=numel) for name in EXCHANGES]
    return [(bits(one.applied), bits(one.returned)) for one in done]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
def test_on_groups_as_in_one_process(world):
    numel, k = 1000, 50
    results = on_threads(world, all_exchanges, numel, k)
    sent = [drawn(rank, numel, k) for rank in range(world)]
    for place, name in enumerate(EXCHANGES):
        expected = [(bits(one.applied), bits(one.returned)) for one in exchange_all(name, sent, k)]
        assert [result[place] for result in results] == expected, name


def test_large_tensors_have_64_bit_indices():
    results = on_threads(2, all_exchanges, 2**31 + 7, 3)
    sent = [drawn(rank, 2**31 + 7, 3, np.int64) for rank in range(2)]
    expected = exchange_all("gtopk", sent, 3)
    place = list(EXCHANGES).index("gtopk")
    assert results[0][place][0] == results[1][place][0] == bits(expected[0].applied)


def poisoned(group):
    mine = sparse({group.rank(): 1.0})
    if group.rank() == 1:
        mine = vectors.empty(np.float32, np.int32, finite=False)
    exchanger = Exchanger(group)
    return [exchanger.run(mine, exchange=name, k=2, numel=9).finite for name in EXCHANGES]


def test_on_groups_all_ranks_see_what_is_not_finite():
    assert on_threads(3, poisoned) == [[False] * len(EXCHANGES)] * 3


def differing(group):
    k = 2 + group.rank()
    try:
        Exchanger(group).run(sparse({0: 1.0}), exchange="topk", k=k, numel=9)
    except CollectiveError as error:
        return str(error)


def test_ranks_that_disagree_are_told_so():
    for complaint in on_threads(2, differing):
        assert complaint == (
            "ranks disagree on what to do: rank 0 has topk, float32, 2 of 9 elements; rank 1 has "
            "topk, float32, 3 of 9 elements; call it alike, with the same topology and link, on "
            "every rank"
        )


def too_many(group):
    with pytest.raises(ValueError, match="room for 1 elements, got 2"):
        Exchanger(group).run(sparse({0: 1.0, 1: 1.0}), exchange="topk", k=1, numel=9)


def test_no_more_than_k_elements():
    on_threads(1, too_many)


class Other:
    def name(self):
        return "nccl"


def test_only_gloo_groups():
    with pytest.raises(RequestError, match="not through nccl; make a group for them"):
        Exchanger(Other())


def one_falls_silent(group, name):
    """All agree once; then the last rank stays away. What do the others say?"""
    exchanger = Exchanger(group)
    mine = sparse({group.rank(): 1.0})
    exchanger.run(mine, exchange=name, k=1, numel=9)
    if group.rank() == group.size() - 1:
        return None
    try:
        exchanger.run(mine, exchange=name, k=1, numel=9)
    except CollectiveError as error:
        return str(error)


@pytest.mark.parametrize("name", ["topk", "gtopk-tree", "gtopk"])
def test_a_rank_that_falls_silent_is_named(name):
    """Two seconds, the group's time-out here."""
    said = on_threads(3, one_falls_silent, name, timeout=timedelta(seconds=2))
    assert said[2] is None
    assert all(text.startswith(f"{name} on rank ") for text in said[:2])
    assert any("from rank 2 failed" in text for text in said[:2]), said


def one_dies(group, folder):
    exchanger = Exchanger(group)
    mine = sparse({group.rank(): 1.0})
    exchanger.run(mine, exchange="gtopk", k=1, numel=9)
    if group.rank() == 1:
        os._exit(3)
    try:
        exchanger.run(mine, exchange="gtopk", k=1, numel=9)
    except CollectiveError as error:
        (folder / "said").write_text(str(error))


def test_a_rank_that_dies_is_named(tmp_path):
    with pytest.raises(AssertionError, match="rank 1 died"):
        on_processes(2, one_dies, tmp_path, scratch=tmp_path)
    said = (tmp_path / "said").read_text()
    assert said.startswith("gtopk on rank 0: round 0, ")
    assert "rank 1 failed" in said
