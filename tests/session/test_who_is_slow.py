"""Laws of who is slow: found in any phase of any world, and nobody among equals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gradweave import CollectiveCost, Network, Tensor, Trace, make_plan, simulate
from gradweave._src.costs import Line
from gradweave._src.phases import PHASES, Phases
from gradweave._src.session.slow_ranks import (
    COMPUTED_PHASES,
    LEAST_TIMED_STEPS,
    PARTS,
    SlowRank,
    Typical,
    sentences,
    slow_network,
    slow_ranks,
    typical,
)
from gradweave._src.session.without_slowness import SentPerStep

USUAL_S = (0.04, 0.05, 0.06)  # input, forward, backward
EXPOSED_S = 0.04


def training(ranks, *, times=None, noise=0.01, steps=32, seed=0):
    """What each rank's steps are typically like; a step ends on all ranks together.

    ``times`` has how many times as long a rank takes for a phase. Noise is of each step by itself,
    and of stretches of steps, for that is what other processes do to one.
    """
    draw = np.random.default_rng(seed)
    stretches = np.repeat(draw.normal(size=(ranks, 3, steps // 4 + 1)), 4, axis=2)[:, :, :steps]
    noises = 1 + noise * np.abs(draw.normal(size=(ranks, 3, steps)) + stretches)
    computed_s = noises * np.array(USUAL_S)[None, :, None]
    for (rank, phase), factor in (times or {}).items():
        computed_s[rank, COMPUTED_PHASES.index(phase)] *= factor
    of_ranks_s = computed_s.sum(axis=1)
    waits_s = of_ranks_s.max(axis=0) + EXPOSED_S - of_ranks_s
    columns_s = np.concatenate([computed_s, waits_s[:, None, :]], axis=1)
    fields = [f"{phase}_s" for phase in (*COMPUTED_PHASES, "network")]
    steps_of = (
        [Phases(**dict(zip(fields, map(float, column), strict=True))) for column in one.T]
        for one in columns_s
    )
    return [typical(steps) for steps in steps_of]


def times(phases, by):
    return Phases(**{f"{phase}_s": phases.seconds(phase) * by for phase in PHASES})


def scaled(ranks, by):
    return [
        Typical(parts=tuple(times(part, by) for part in one.parts), errors=times(one.errors, by))
        for one in ranks
    ]


def named(found):
    return [(one.rank, one.phase) for one in found]


worlds = st.integers(2, 16)
seeds = st.integers(0, 2**32 - 1)


@given(worlds, st.sampled_from(COMPUTED_PHASES), st.floats(1.3, 5), seeds, st.data())
def test_the_culprit_is_found_in_any_phase_of_any_world(world, phase, factor, seed, data):
    rank = data.draw(st.integers(0, world - 1))
    (found,) = slow_ranks(training(world, times={(rank, phase): factor}, seed=seed))
    assert (found.rank, found.phase) == (rank, phase)
    assert found.times_as_long == pytest.approx(factor, rel=0.05)
    usual_s = sum(USUAL_S) + EXPOSED_S
    more_s = USUAL_S[COMPUTED_PHASES.index(phase)] * (factor - 1)
    assert found.step_s == pytest.approx(usual_s + more_s, rel=0.05)
    assert found.step_without_s == pytest.approx(usual_s, rel=0.05)


@pytest.mark.parametrize("noise", [0.0, 0.003, 0.03, 0.1])
@pytest.mark.parametrize(
    "world", [2, 3, *(pytest.param(world, marks=pytest.mark.long) for world in (4, 8, 16))]
)
def test_nobody_is_slow_among_equals(world, noise):
    for seed in range(60):
        assert slow_ranks(training(world, noise=noise, steps=20 + seed % 45, seed=seed)) == ()


@given(worlds, st.lists(st.floats(0.1, 10), min_size=PARTS, max_size=PARTS))
def test_what_all_do_at_once_is_nobodys_fault(world, drift):
    """Warming up, or a machine that is shared by all."""
    step = Phases(input_s=1.0, forward_s=2.0, backward_s=3.0, network_s=4.0)
    assert slow_ranks([Typical(parts=tuple(times(step, by) for by in drift))] * world) == ()


two_faults = st.fixed_dictionaries(
    {}, optional={(1, "forward"): st.floats(1.3, 3), (2, "backward"): st.floats(1.3, 3)}
)


@given(two_faults, seeds, st.sampled_from([2.0**-20, 2.0**-3, 2.0**10]))
def test_other_units_give_the_same_answer(faults, seed, by):
    ranks = training(4, times=faults, seed=seed)
    found = slow_ranks(ranks)
    assert [
        replace(one, step_s=one.step_s * by, step_without_s=one.step_without_s * by)
        for one in found
    ] == list(slow_ranks(scaled(ranks, by)))


@given(two_faults, seeds, st.permutations(range(5)))
def test_ranks_in_another_order_give_the_same_answer(faults, seed, order):
    ranks = training(5, times=faults, seed=seed)
    found = slow_ranks([ranks[rank] for rank in order])
    assert [replace(one, rank=order[one.rank]) for one in found] == list(slow_ranks(ranks))


def test_two_culprits_are_named_though_one_alone_gains_little():
    times = {(1, "backward"): 2.0, (3, "input"): 2.4}
    found = slow_ranks(training(4, times=times), hosts=["a", "b", "c", "d"])
    assert named(found) == [(1, "backward"), (3, "input")]
    first, second = found
    assert first.step_without_s > second.step_without_s
    assert second.step_without_s == pytest.approx(sum(USUAL_S) + EXPOSED_S, rel=0.05)
    said = sentences(found)
    assert said[0].startswith("Rank 1 on b computes backward 2.0")
    assert "without that, too, a step would take" in said[1]


def test_equal_culprits_are_both_named():
    times = {(0, "forward"): 2.0, (2, "forward"): 2.0}
    assert sorted(named(slow_ranks(training(4, times=times)))) == [(0, "forward"), (2, "forward")]


def test_a_rank_that_is_slow_in_all_it_does_has_a_finding_for_each_phase():
    times = {(2, phase): 1.5 for phase in COMPUTED_PHASES}
    found = slow_ranks(training(4, times=times))
    assert sorted(named(found)) == sorted((2, phase) for phase in COMPUTED_PHASES)
    assert found[-1].step_without_s == pytest.approx(sum(USUAL_S) + EXPOSED_S, rel=0.05)


def test_a_little_in_each_phase_is_named_by_the_longest():
    times = {(2, phase): 1.02 for phase in COMPUTED_PHASES}
    found = slow_ranks(training(4, times=times, noise=0.0))
    assert named(found)[0] == (2, "backward")
    assert {one.rank for one in found} == {2}


def test_what_another_phase_makes_up_for_is_no_fault():
    times = {(1, "input"): 1.5, (1, "forward"): 0.6}
    assert slow_ranks(training(4, times=times)) == ()


def test_what_does_not_last_is_no_fault():
    """Slow in three quarters of the steps, as while another process ran."""
    ranks = training(4, times={(1, "backward"): 2.0})
    healthy = training(4)
    parts = (*ranks[1].parts[:3], healthy[1].parts[3])
    assert slow_ranks([ranks[0], Typical(parts=parts), *ranks[2:]]) == ()


def test_too_few_steps_tell_nothing():
    step = Phases(input_s=1.0, forward_s=2.0, backward_s=3.0, network_s=4.0)
    assert typical([step] * (LEAST_TIMED_STEPS - 1)) is None
    assert typical([step] * LEAST_TIMED_STEPS).phases == step
    with pytest.raises(ValueError, match="parts"):
        Typical(parts=())


def test_medians_alone_will_do():
    """Of a run that was kept: nothing is known of noise, so only the least effect counts."""
    usual = Phases(input_s=1.0, forward_s=1.0, backward_s=2.0, network_s=2.0)
    slow = replace(usual, backward_s=3.0, network_s=1.0)
    (found,) = slow_ranks([Typical(parts=(one,)) for one in (usual, slow, usual)])
    expected = SlowRank(
        rank=1, host=None, phase="backward", times_as_long=1.5, step_s=6.0, step_without_s=5.0
    )
    assert found == expected
    assert found.gain_s == 1.0
    assert str(found) == (
        "Rank 1 computes backward 1.50x as long as the median rank: a step would take 5000.0 "
        "instead of 6000.0 ms."
    )


def test_a_phase_that_others_do_not_have():
    usual = Phases(input_s=0.0, forward_s=1.0, backward_s=2.0, network_s=2.0)
    slow = replace(usual, input_s=1.0, network_s=1.0)
    (found,) = slow_ranks([Typical(parts=(one,)) for one in (usual, slow, usual)])
    assert (found.rank, found.phase, found.step_without_s) == (1, "input", 4.0)


def links(world, *, times=None, noise=0.01, seed=0):
    draw = np.random.default_rng(seed)
    s_per_byte = 1e-8 * (1 + noise * draw.normal(size=(world, PARTS)))
    for rank, factor in (times or {}).items():
        s_per_byte[rank] *= factor
    return {rank: [float(taken) for taken in one] for rank, one in enumerate(s_per_byte)}


@given(st.integers(3, 16), st.floats(1.1, 20), seeds, st.data())
def test_a_slow_link_is_found(world, factor, seed, data):
    rank = data.draw(st.integers(0, world - 1))
    slow = links(world, times={rank: factor}, noise=0.003, seed=seed)
    (found,) = slow_ranks(training(world), links=slow)
    assert (found.rank, found.phase) == (rank, "network")
    assert found.times_as_long == pytest.approx(factor, rel=0.05)
    # Without a simulation it is as if nothing of the messages were hidden.
    assert found.gain_s == pytest.approx(EXPOSED_S * (1 - 1 / factor), rel=0.2)


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1])
@pytest.mark.parametrize("world", [3, 4, 8])
def test_no_link_is_slow_among_equals(world, noise):
    ranks = training(world)
    for seed in range(100):
        assert slow_ranks(ranks, links=links(world, noise=noise, seed=seed)) == ()


def test_of_two_links_nobody_knows_which_is_slow():
    assert slow_ranks(training(2), links=links(2, times={1: 3.0})) == ()


def test_a_slow_link_behind_which_nothing_waits_is_no_fault():
    ranks = [
        Typical(parts=tuple(replace(part, network_s=0.0) for part in one.parts))
        for one in training(3, noise=0.0)
    ]
    assert slow_ranks(ranks, links=links(3, times={1: 3.0})) == ()


def test_a_slow_rank_and_a_slow_link():
    ranks = training(4, times={(1, "forward"): 3.0})
    found = slow_ranks(ranks, links=links(4, times={2: 1.5}))
    assert named(found) == [(1, "forward"), (2, "network")]
    (alone,) = slow_ranks(training(4), links=links(4, times={2: 1.5}))
    assert found[1].step_without_s == pytest.approx(alone.step_without_s, rel=0.05)


def sent(*, s_per_byte=1e-8, startup_s=0.0):
    """Ten layers whose messages are partly hidden."""
    layers = range(1, 11)
    tensors = tuple(
        Tensor(name=f"{n}", elements=10**5, bytes_per_element=4, ready_s=0.006 * n, forward_s=0.005)
        for n in layers
    )
    trace = Trace(name="made", origin="estimated", source="", batch_size=1, tensors=tensors)
    cost = Line(startup_s=startup_s, s_per_byte=s_per_byte)
    entry = CollectiveCost(operation="all-reduce", collective="native", workers=4, cost=cost)
    network = Network(name="made", source="", costs=(entry,))
    plan = make_plan(trace, network, workers=4, planner="fixed:1MB", collective="native")
    return SentPerStep(trace=trace, plan=plan, network=network, workers=4)


def measured(sent, *, times=None, input_s=0.04):
    """As if every step were as simulated: messages wait for the rank that computes longest."""
    phases = []
    for rank in range(4):
        usual_s = dict(
            zip(
                COMPUTED_PHASES, (input_s, sent.trace.forward_s, sent.trace.backward_s), strict=True
            )
        )
        computed = {
            f"{phase}_s": seconds * (times or {}).get((rank, phase), 1.0)
            for phase, seconds in usual_s.items()
        }
        phases.append(Phases(**computed, network_s=0.0))
    slowest = max(phases, key=lambda one: one.compute_s)
    trace = sent.trace.rescaled(forward_s=slowest.forward_s, backward_s=slowest.backward_s)
    step_s = slowest.input_s + simulate(trace, sent.plan, sent.network, workers=4).iteration_s
    parts = (replace(one, network_s=step_s - one.compute_s) for one in phases)
    return [Typical(parts=(part,)) for part in parts], step_s


@given(
    st.sampled_from(COMPUTED_PHASES),
    st.floats(1.2, 3),
    st.floats(1e-9, 5e-8),
    st.sampled_from([0.0, 0.001]),
)
def test_the_gain_is_what_simulation_says(phase, factor, s_per_byte, startup_s):
    """Also where a shorter backward pass hides less, so that not all of it is gained."""
    sends = sent(s_per_byte=s_per_byte, startup_s=startup_s)
    _, usual_s = measured(sends)
    ranks, step_s = measured(sends, times={(3, phase): factor})
    found = slow_ranks(ranks, sent=sends)
    if step_s - usual_s < 0.02 * step_s:
        return
    (one,) = found
    assert (one.rank, one.phase) == (3, phase)
    assert one.step_without_s == pytest.approx(usual_s, rel=0.01)


@given(st.floats(1.2, 4), st.floats(3e-9, 5e-8), st.floats(0.7, 1.5))
def test_the_gain_of_a_link_is_what_simulation_says(factor, s_per_byte, misjudged):
    """Whatever was learnt of the network before, it is as slow as it is now."""
    healthy, slowed = sent(s_per_byte=s_per_byte), sent(s_per_byte=s_per_byte * factor)
    _, usual_s = measured(healthy)
    ranks, step_s = measured(slowed)
    if step_s - usual_s < 0.02 * step_s:
        return
    knows = sent(s_per_byte=s_per_byte * misjudged)
    (one,) = slow_ranks(ranks, links=links(4, times={1: factor}, noise=0.0), sent=knows)
    assert (one.rank, one.phase) == (1, "network")
    assert one.step_without_s == pytest.approx(usual_s, rel=0.02)


def test_a_network_without_prices_is_taken_as_it_is():
    sends = sent()
    (priced,) = sends.network.costs
    unpriced = replace(sends, network=replace(sends.network, costs=(replace(priced, workers=99),)))
    ranks, _ = measured(sends, times={(3, "backward"): 1.5})
    assert slow_ranks(ranks, sent=unpriced) == slow_ranks(ranks)
    assert slow_network(ranks, unpriced) is None


def test_messages_that_take_longer_than_predicted_are_worth_a_word():
    sends = sent()
    as_predicted, _ = measured(sends, times={(3, "backward"): 1.5})
    longer, _ = measured(sent(s_per_byte=4e-8))
    assert slow_network(as_predicted, sends) is None
    assert "slow_ranks(), called on every rank" in slow_network(longer, sends)
