"""What is learnt of a network from messages, on networks whose truth is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradweave._src.errors import RequestError
from gradweave._src.session.learning import (
    PROBED_BYTES,
    MessageSample,
    MessageTimes,
    learnt_network,
    probe_takes_s,
    samples_of,
    sizes_to_probe,
)

MB = 1_000_000


def times(ready_s, done_s, nbytes=MB, operation="all-reduce"):
    return MessageTimes(
        operation=operation, collective="native", nbytes=nbytes, ready_s=ready_s, done_s=done_s
    )


def sent(*messages, ranks_ready_s, cost, clocks_s):
    """Messages as ranks see them that are ready at different times and have other clocks."""
    free_s, seen = 0.0, [[] for _ in clocks_s]
    for number, nbytes in enumerate(messages):
        ready_s = [of_rank[number] for of_rank in ranks_ready_s]
        free_s = max(free_s, *ready_s) + cost(nbytes)
        for rank, clock_s in enumerate(clocks_s):
            seen[rank].append(times(clock_s + ready_s[rank], clock_s + free_s, nbytes))
    return seen


def cost(nbytes):
    return 0.002 + 1e-8 * nbytes


def sample(*sizes, taken_s):
    return MessageSample(
        operation="all-reduce", collective="native", sizes_bytes=sizes, taken_s=taken_s
    )


@given(
    ready_s=st.lists(
        st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3).map(sorted), min_size=2, max_size=4
    ),
    data=st.data(),
)
def test_whoever_was_ready_last_tells_how_long_messages_took(ready_s, data):
    """Whatever the ranks' clocks say, and all the time the network was busy is accounted for."""
    clocks_s = data.draw(st.lists(st.floats(-5, 5), min_size=len(ready_s), max_size=len(ready_s)))
    sizes = [MB, 3 * MB, 2 * MB]
    seen = sent(*sizes, ranks_ready_s=ready_s, cost=cost, clocks_s=clocks_s)
    samples = samples_of(seen)
    assert [size for one in samples for size in one.sizes_bytes] == sizes
    for one in samples:
        assert one.taken_s == pytest.approx(sum(map(cost, one.sizes_bytes)), abs=1e-6)


def test_operations_are_told_apart():
    seen = [[times(0, 1, operation="reduce-scatter"), times(0.5, 2, operation="all-gather")]]
    assert [one.operation for one in samples_of(seen * 2)] == ["reduce-scatter", "all-gather"]


def test_a_step_that_not_all_ranks_saw_whole_says_nothing():
    assert samples_of([[times(0, 1), times(1, 2)], [times(0, 1)]]) == []


def priced(network, nbytes, workers=4):
    return network.seconds("all-reduce", "native", nbytes=nbytes, workers=workers)


@given(st.lists(st.integers(1000, 4 * MB), min_size=1, max_size=6))
def test_a_line_is_found_again(smaller):
    sizes = [*smaller, 5 * MB]
    samples = [sample(size, taken_s=cost(size)) for size in sizes]
    network = learnt_network(samples, workers=4, model_bytes=25 * MB)
    for size in [*sizes, 25 * MB]:
        assert priced(network, size) == pytest.approx(cost(size), rel=0.12)


def test_messages_that_overlapped_share_their_time():
    samples = [
        sample(MB, taken_s=cost(MB)),
        sample(10 * MB, taken_s=cost(10 * MB)),
        sample(2 * MB, 5 * MB, taken_s=cost(2 * MB) + cost(5 * MB)),
    ]
    network = learnt_network(samples, workers=4, model_bytes=12 * MB)
    for size in (2 * MB, 5 * MB):
        assert priced(network, size) == pytest.approx(cost(size), rel=0.01)


def test_streams_tell_the_latency():
    samples = [
        sample(1024, taken_s=0.003),
        sample(*[1024] * 4, taken_s=0.003 + 3 * 0.001),
        sample(10 * MB, taken_s=0.1),
    ]
    network = learnt_network(samples, workers=4, model_bytes=10 * MB)
    assert network.latency_s("native", workers=4) == pytest.approx(0.002)
    assert priced(network, 1024) == pytest.approx(0.001)
    assert priced(network, 10 * MB) == pytest.approx(0.098)


@given(
    st.lists(st.tuples(st.integers(1, 100 * MB), st.floats(1e-6, 10.0)), min_size=1, max_size=20),
    st.integers(1, 200 * MB),
)
def test_whatever_was_seen_more_bytes_never_cost_less(seen, model_bytes):
    samples = [sample(size, taken_s=taken_s) for size, taken_s in seen]
    network = learnt_network(samples, workers=2, model_bytes=model_bytes)
    curve = network.cost("all-reduce", "native", workers=2)
    prices = curve.seconds(np.geomspace(1, 400 * MB, 100))
    assert prices[0] > 0
    assert np.all(np.diff(prices) >= -1e-12)
    assert prices[-1] > prices[0], "bytes are never free"


def test_nothing_is_known_of_no_messages():
    assert learnt_network([], workers=2, model_bytes=MB) is None


def test_what_a_probe_takes_is_not_known_of_no_messages():
    with pytest.raises(RequestError, match="no message of the training was seen"):
        probe_takes_s([], PROBED_BYTES[0])


def test_only_what_training_does_not_send_is_probed():
    def sizes(samples, collective="native", *, is_sparse=False, model_bytes=MB):
        return sizes_to_probe(samples, collective, is_sparse=is_sparse, model_bytes=model_bytes)

    assert sizes([sample(MB, taken_s=1)]) == PROBED_BYTES
    small = [sample(1500, MB, taken_s=1)]
    assert sizes(small) == ()
    # What small messages of one collective cost says nothing of another's.
    assert sizes(small, "ring") == PROBED_BYTES
    # No message is larger than a model.
    assert sizes(small, "ring", model_bytes=50_000) == (1024, 50_000)
    assert sizes(small, is_sparse=True, model_bytes=50_000) == (1024, 50_000)
    assert sizes([], model_bytes=100) == (100,)
    assert 0 < probe_takes_s([sample(MB, taken_s=0.01)], PROBED_BYTES[-1]) < 6 * 0.01


@pytest.mark.parametrize("sizes", [(MB,), (MB, 11 * MB), (5000, 5000, 5000)])
def test_where_all_samples_are_alike_half_is_start_up(sizes):
    """Nobody can tell start-ups from bytes then, also where one sample has several sizes."""
    samples = [sample(*sizes, taken_s=0.6)] * 4
    network = learnt_network(samples, workers=2, model_bytes=sum(sizes))
    costs = network.cost("all-reduce", "native", workers=2)
    assert costs.seconds(np.zeros(1))[0] == pytest.approx(0.3 / len(sizes))
    assert costs.seconds(np.array(sizes, dtype=float)).sum() == pytest.approx(0.6)
