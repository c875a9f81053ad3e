"""Wrappers that are asked who is slow, and that say so by themselves."""

import time

import pytest
import torch
from ranks import on_processes
from sharded_training import plan
from small_training import batch, network, on_two, plan_of

from gradweave import DistributedDataParallel, RequestError, ShardedDataParallel, Tensor, Trace
from gradweave._src.phases import Phases
from gradweave._src.workloads.replay import Replay

WRAPPERS = {"ddp": DistributedDataParallel, "sharded": ShardedDataParallel}
SLOW, STEPS = 1, 30
# So long that no machine is as busy.
USUAL_S, SLOW_S = 0.002, 0.06


def replayed(group, phase):
    """Takes one rank thirty times as long for a phase."""

    def seconds(of):
        return SLOW_S if phase == of and group.rank() == SLOW else USUAL_S

    tensors = tuple(
        Tensor(
            name=f"layer{number}",
            elements=50,
            bytes_per_element=4,
            ready_s=seconds("backward") * number / 2,
            forward_s=seconds("forward") / 2,
        )
        for number in (1, 2)
    )
    trace = Trace(name="slow", origin="estimated", source="", batch_size=1, tensors=tensors)
    return Replay(trace), seconds("input")


def asked(group, name, phase):
    model, input_s = replayed(group, phase)
    # A given plan: while a wrapper plans, what its steps take is forgotten from stage to stage.
    given = plan(("layer1", "layer2"), passes="both" if name == "sharded" else "backward")
    wrapped = WRAPPERS[name](model, plan=given)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for _ in range(STEPS):
        time.sleep(input_s)
        wrapped(torch.zeros(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = wrapped.slow_ranks(steps=25)
    return found, wrapped.findings().slow_ranks, wrapped.explain()


@pytest.mark.long
@pytest.mark.parametrize("phase", ["input", "forward", "backward"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_rank_that_takes_long_is_named(name, phase, tmp_path):
    """Takes two seconds: there have to be steps enough."""
    answers = on_processes(3, asked, name, phase, scratch=tmp_path)
    for found, in_findings, explained in answers:
        assert found == in_findings == answers[0][0]
        assert (found[0].rank, found[0].phase) == (SLOW, phase)
        assert found[0].step_without_s < found[0].step_s
        assert str(found[0]) in explained.splitlines()


def scripted(clock, rank, *, slow=None, phase="backward", steps=64):
    """Give the clock phases of our own; nothing depends on what the machine does then."""
    usual_s = {"input": 0.2, "forward": 0.2, "backward": 0.2}
    longer_s = usual_s | {phase: 0.3}
    usual, longer = (
        Phases(**{f"{name}_s": seconds for name, seconds in taken.items()}, network_s=network_s)
        for taken, network_s in ((usual_s, 0.2), (longer_s, 0.1))
    )
    clock.phases = lambda: [longer if rank == slow else usual] * steps


def asked_of_scripts(group, name, phase):
    wrapped = WRAPPERS[name](network())
    answers = []
    for slow in (None, 1):
        scripted(wrapped._clock, group.rank(), slow=slow, phase=phase)
        answers.append((wrapped.slow_ranks(), wrapped.explain()))
    scripted(wrapped._clock, group.rank(), steps=3)
    with pytest.raises(RequestError, match=r"20 steps since .* and rank 0 has timed 3; ask"):
        wrapped.slow_ranks()
    with pytest.raises(RequestError, match="steps must be between 20 and 64, got 5"):
        wrapped.slow_ranks(steps=5)
    return answers


@pytest.mark.parametrize("phase", ["input", "forward", "backward"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_equals_are_not_slow_and_an_answer_stays_until_there_is_news(name, phase, tmp_path):
    for equal, unequal in on_two(asked_of_scripts, name, phase, scratch=tmp_path):
        assert equal[0] == ()
        assert "median rank" not in equal[1]
        (found,) = unequal[0]
        assert (found.rank, found.phase, found.times_as_long) == (1, phase, pytest.approx(1.5))
        assert (found.step_s, found.step_without_s) == pytest.approx((0.8, 0.7))
        assert found.host
        assert unequal[1].splitlines()[-1] == str(found)


def told(group, slow):
    """Rank 0 explains by itself, while others do something else."""
    wrapped = DistributedDataParallel(network(), plan=plan_of(2, 3))
    scripted(wrapped._clock, group.rank(), slow=slow)
    for step in range(51):
        wrapped(batch(step, group.rank())).sum().backward()
    group.barrier().wait()
    explained = wrapped.explain() if group.rank() == 0 else None
    group.barrier().wait()
    return explained, wrapped.findings().slow_ranks


@pytest.mark.parametrize("slow", [None, 1])
def test_one_rank_alone_can_say_who_is_slow(slow, tmp_path):
    (explained, in_findings), _ = on_two(told, slow, scratch=tmp_path)
    lines = explained.splitlines()
    assert lines[0] == "2 messages by native, as given."
    assert in_findings == ()  # all were not asked
    if slow is None:
        assert len(lines) == 1
    else:
        assert "computes backward 1.50x as long as the median rank" in lines[1]


def alone(group):
    return DistributedDataParallel(network()).slow_ranks()


def test_one_rank_waits_for_nobody(tmp_path):
    assert on_processes(1, alone, scratch=tmp_path) == [()]
