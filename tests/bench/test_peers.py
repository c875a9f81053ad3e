"""Torch's own runtimes beside ours: what they do to gradients, and what is expected of them."""

from math import isfinite
from types import SimpleNamespace

import msgspec
import pytest
import torch
from ranks import on_processes

from gradweave import (
    CollectiveCost,
    Network,
    RequestError,
    Tensor,
    Trace,
    load_trace,
    simulate,
)
from gradweave._src.bench import training
from gradweave._src.bench.peer_plans import Job, find_peer, low_rank_bytes, zero_shares
from gradweave._src.bench.runtimes import running
from gradweave._src.bench.trainee import Seen, Trainee
from gradweave._src.bench.training import (
    COMPUTE,
    Case,
    Settings,
    TrainingAnswer,
    TrainingQuestion,
    check_runtimes,
    needs_slow_ways,
    plan_of,
    to_measure,
    train_on_cluster,
    with_collectives,
)
from gradweave._src.bench.training_job import answers
from gradweave._src.cli import main
from gradweave._src.costs import Line
from gradweave._src.lab import ClusterSpec
from gradweave._src.runs import RunFolder
from gradweave._src.vocabulary import MIB, Way
from gradweave._src.workloads.replay import Replay

RANKS = 2


def tensor(name, *shape, ready_s=0.0, forward_s=0.0):
    return Tensor(
        name=name,
        elements=torch.Size(shape).numel(),
        bytes_per_element=4,
        ready_s=ready_s,
        forward_s=forward_s,
        shape=shape,
    )


# Matrices of which PowerSGD sends less, a small one of which it does not, and a vector.
TRACE = Trace(
    name="made",
    origin="measured",
    source="made up",
    batch_size=1,
    tensors=(
        tensor("d", 32, 16, ready_s=0.001, forward_s=0.001),
        tensor("c", 7, ready_s=0.002, forward_s=0.0),
        tensor("b", 20, 4, 5, ready_s=0.002, forward_s=0.001),
        tensor("a", 3, 3, ready_s=0.004, forward_s=0.002),
    ),
)
CAP_BYTES = 1000  # d; c and b; a


def priced(operation, collective, startup_s, s_per_byte):
    return CollectiveCost(
        operation=operation,
        collective=collective,
        workers=RANKS,
        cost=Line(startup_s=startup_s, s_per_byte=s_per_byte),
        latency_s=0.25,
    )


NETWORK = Network(
    name="made",
    source="made up",
    costs=(
        priced("all-reduce", "native", 1.0, 1.0),
        priced("all-reduce", "native+fp16", 8.0, 0.5),
        priced("broadcast", "native", 2.0, 1.0),
        priced("all-gather", "native", 4.0, 1.0),
    ),
)
JOB = Job(TRACE, NETWORK, RANKS)


def case(runtime, *, noting=False):
    peer = find_peer(runtime)
    plan = peer.plan(JOB, f"fixed:{CAP_BYTES}B")
    return Case(runtime=runtime, plan=plan, bucket_cap_mb=CAP_BYTES / MIB, noting=noting)


def trainee_of(group):
    return Trainee(Replay(TRACE, gradient=group.size() * (group.rank() + 1.0)), group)


RUNTIMES = (
    "torch-fp16",
    "torch-bf16",
    "powersgd:1",
    "powersgd:2",
    "powersgd:4",
    "zero",
    "fsdp2",
    "fsdp2:wfbp",
)


def trained(group, runtimes):
    """Whether each was correct, and its gradients; fsdp2's are not the model's."""
    trainee, found = trainee_of(group), {}
    for runtime in runtimes:
        with running(case(runtime), trainee) as run:
            for _ in range(3):
                run.step()
            is_correct = run.is_correct()
            gradients = torch.cat([p.grad.flatten() for p in trainee.model.parameters()]).tolist()
        found[runtime] = is_correct, gradients
    return found


def test_gradients_under_each_of_them(tmp_path):
    """Seconds: ranks are processes, for ZeRO and fully_shard want a default group."""
    ranks = on_processes(RANKS, trained, RUNTIMES, scratch=tmp_path)
    assert ranks[0] == ranks[1]  # to the bit
    for runtime, (is_correct, gradients) in ranks[0].items():
        assert is_correct, runtime
        if runtime == "powersgd:2":
            # These matrices have one direction; torch makes the second from rounding errors.
            assert all(map(isfinite, gradients))
        elif runtime.startswith("powersgd"):
            assert gradients == pytest.approx([3.0] * len(gradients), rel=1e-3), runtime
        else:
            assert gradients == [3.0] * len(gradients), runtime


def wrong(group):
    """Every rank has the same gradients here, so none of them is the expected mean."""
    trainee, found = Trainee(Replay(TRACE, gradient=1.0), group), {}
    for runtime in ("torch-fp16", "zero", "fsdp2"):
        with running(case(runtime), trainee) as run:
            for _ in range(3):
                run.step()
            found[runtime] = run.is_correct()
    return found


def test_a_wrong_mean_is_noticed(tmp_path):
    for found in on_processes(RANKS, wrong, scratch=tmp_path):
        assert found == {"torch-fp16": False, "zero": False, "fsdp2": False}


def noted(group, runtimes):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415 it warns

    trainee, found = trainee_of(group), {}
    for runtime in runtimes:
        with running(case(runtime, noting=True), trainee) as run:
            for _ in range(3):
                run.step()
            found[runtime] = [
                [span.label.split()[0] for span in one.spans if span.lane == "communication"]
                for one in run.timelines()
            ]
    zero = ZeroRedundancyOptimizer(trainee.model.parameters(), Seen, process_group=group)
    own = [trainee.names[p] for g in zero.optim.param_groups for p in g["params"]]
    return found, own


@pytest.mark.long
def test_messages_are_noted_and_shares_are_those_of_zero(tmp_path):
    runtimes = ("torch-fp16", "powersgd:1", "zero", "fsdp2:wfbp")
    ranks = on_processes(RANKS, noted, runtimes, scratch=tmp_path)
    timelines, _ = ranks[0]
    for runtime, of_ranks in timelines.items():
        assert len(of_ranks) == RANKS, runtime
        assert of_ranks[0] == of_ranks[1], runtime
    assert timelines["torch-fp16"][0] == ["all-reduce"] * 3
    assert timelines["powersgd:1"][0] == ["all-reduce"] * 3
    assert timelines["zero"][0] == ["all-reduce"] * 3 + ["broadcast"]
    backward = ["all-gather", "reduce-scatter"] * 4
    assert sorted(timelines["fsdp2:wfbp"][0]) == sorted(["all-gather"] * 4 + backward)
    assert timelines["fsdp2:wfbp"][0][:4] == ["all-gather"] * 4
    shares = [{one.name for one in share} for share in zero_shares(TRACE, RANKS)]
    assert [set(own) for _, own in ranks] == shares


def asked(group):
    """What ranks of a sweep, and of PowerSGD, answer."""
    swept = msgspec.structs.replace(case("torch-fp16-tuned"), runtime="torch-fp16-tuned:0.001")
    question = TrainingQuestion(
        trace=TRACE,
        mode="waiting",
        cases=(Case(runtime=COMPUTE), swept, case("powersgd:2")),
        warmup=2,
        iterations=1,
        repeats=1,
        with_timelines=False,
    )
    return list(answers(question, group))


@pytest.mark.long
def test_ranks_compute_before_they_are_timed(tmp_path):
    (learnt, *timed), _ = on_processes(RANKS, asked, scratch=tmp_path)
    assert learnt.runtime == "powersgd:2"
    assert len(learnt.computing_s) == 3
    assert min(learnt.computing_s) > 0
    assert [(one.runtime, one.correct) for one in timed] == [
        ("compute", True),
        ("torch-fp16-tuned:0.001", True),
        ("powersgd:2", True),
    ]


def answering(seconds_of):
    """In place of a cluster: what each case takes is what the function says."""

    def ask(_cluster, _job, question, *, on_answer):
        for _ in range(question.repeats):
            for one in question.cases:
                iteration_s = seconds_of(one)
                found = TrainingAnswer(runtime=one.runtime, iteration_s=iteration_s, correct=True)
                on_answer(msgspec.json.encode(found).decode())

    return ask


def test_caps_are_swept_for_each_hook_by_itself(monkeypatch, tmp_path):
    fastest_mb = {"torch-ddp-tuned": 2, "torch-fp16-tuned": 0.5, "torch-bf16-tuned": None}
    swept = {}

    def seconds_of(one):
        name, _, cap = one.runtime.partition(":")
        if cap:
            swept.setdefault(name, set()).add(one.planned.buckets[0].compression)
        wanted_mb, cap_mb = fastest_mb.get(name), one.bucket_cap_mb
        if wanted_mb is None or cap_mb is None:
            return 1 if cap_mb is wanted_mb else 9
        return 1 + abs(cap_mb - wanted_mb)

    monkeypatch.setattr(training, "ask", answering(seconds_of))
    large = Trace(
        name="large",
        origin="measured",
        source="made up",
        batch_size=1,
        tensors=tuple(tensor(str(n), 512, 512, ready_s=1.0 + n) for n in range(5)),
    )
    rows = train_on_cluster(
        SimpleNamespace(spec=ClusterSpec(nodes=RANKS)),
        large,
        NETWORK,
        Settings(
            runtimes=tuple(fastest_mb),
            mode="waiting",
            warmup=2,
            iterations=1,
            repeats=1,
            with_timelines=False,
        ),
        folder=RunFolder(tmp_path / "run"),
        command="test",
    )
    assert {row.runtime: row.bucket_cap_mb for row in rows} == fastest_mb
    assert [row.messages for row in rows] == [3, 5, 2]
    methods = {name: {c and c.method for c in found} for name, found in swept.items()}
    assert methods == {
        "torch-ddp-tuned": {None},
        "torch-fp16-tuned": {"fp16"},
        "torch-bf16-tuned": {"bf16"},
    }


def predicted(runtime, computing=()):
    peer = find_peer(runtime)
    return peer.predict(JOB, case(runtime).plan, computing)


BYTES = [4 * 512, 4 * 7, 4 * 400, 4 * 9]


def test_rounded_messages_have_their_own_price():
    forward_s, ready_s = TRACE.forward_s, TRACE.tensors[0].ready_s
    sizes = [BYTES[0], BYTES[1] + BYTES[2], BYTES[3]]
    sent_s = sum(8 + 0.5 * nbytes for nbytes in sizes)
    assert predicted("torch-fp16").iteration_s == pytest.approx(forward_s + ready_s + sent_s + 0.25)
    # Nobody has measured bf16: as if fewer bytes were all the difference.
    sent_s = sum(1 + 0.5 * nbytes for nbytes in sizes)
    assert predicted("torch-bf16").iteration_s == pytest.approx(forward_s + ready_s + sent_s + 0.25)


def test_zero_broadcasts_shares_after_the_last_gradient():
    averaged_s = predicted("torch-ddp").iteration_s
    shares = zero_shares(TRACE, RANKS)
    assert [[one.name for one in share] for share in shares] == [["d"], ["b", "a", "c"]]
    sent_s = sum(2.25 + sum(one.nbytes for one in share) for share in shares)
    assert predicted("zero").iteration_s == pytest.approx(averaged_s + sent_s)
    assert len(zero_shares(TRACE, 10)) == len(TRACE.tensors)


def test_fully_shard_on_a_host_waits_for_every_message():
    groups = [BYTES[0] + 0, BYTES[1], BYTES[2], BYTES[3]]
    gathers_s = 2 * sum(4.25 + nbytes for nbytes in groups)
    scatters_s = sum(1.25 + nbytes for nbytes in groups)
    timeline = predicted("fsdp2:wfbp")
    assert timeline.iteration_s == pytest.approx(TRACE.compute_s + gathers_s + scatters_s)
    assert timeline.compute_s == pytest.approx(TRACE.compute_s)


def test_low_ranks_are_three_messages_and_what_they_are_made_by():
    d, c, b, a = TRACE.tensors
    assert low_rank_bytes([d], 1) == (0, 4 * 32, 4 * 16)
    assert low_rank_bytes([d, b], 4) == (0, 4 * 4 * (32 + 20), 4 * 4 * (16 + 20))
    assert low_rank_bytes([c, a], 1) == (4 * 7 + 4 * 9, 0, 0)
    assert low_rank_bytes([d], 6) == (4 * 512, 0, 0)  # 2 * 6 * 48 is more than 512
    # d: two factors; c whole, and two factors of b; a whole
    sent_s = (2 * 1.25 + 4 * 48) + (3 * 1.25 + 4 * 7 + 4 * 40) + (1.25 + 4 * 9)
    timeline = predicted("powersgd:1", [10.0, 20.0, 30.0])
    assert timeline.iteration_s == pytest.approx(
        TRACE.forward_s + d.ready_s + 60 + sent_s, rel=1e-9
    )


def test_a_calibration_times_what_they_send():
    assert to_measure(["torch-fp16-tuned", "torch-bf16", "optimal", "zero", "fsdp2"]) == (
        Way("all-reduce", "native"),
        Way("all-reduce", "native+fp16"),
        Way("all-reduce", "native+bf16"),
        Way("broadcast", "native"),
        Way("all-gather", "native"),
    )


MISTAKES = [
    ("powersgd", "takes a rank from 1 to 64, such as powersgd:1"),
    ("powersgd:0", "takes a rank from 1 to 64"),
    ("powersgd:x", "takes a rank from 1 to 64"),
    ("powersgd:1.5", "takes a rank from 1 to 64"),
    ("powersgd:65", "takes a rank from 1 to 64"),
    ("powersgd-tuned:1", r"no runtime 'powersgd-tuned', did you mean powersgd\?"),
    ("zero-tuned", "no runtime 'zero-tuned'"),
    ("gradwave", r"no runtime 'gradwave', did you mean gradweave\? There are torch-ddp"),
    ("bf16:2", "'bf16' takes no argument"),
    ("zero:2", "'zero' takes no argument"),
    ("torch-fp16:1", "'torch-fp16' takes no argument"),
    ("torch-fp16-tuned:1", "'torch-fp16-tuned' takes no argument"),
    ("torch-int8", "no runtime 'torch-int8'"),
    ("fsdp2:fast", "no planner 'fast'"),
]


@pytest.mark.parametrize(("runtime", "complaint"), MISTAKES)
def test_mistakes(runtime, complaint):
    with pytest.raises(RequestError, match=complaint):
        check_runtimes([runtime])


@pytest.mark.parametrize("runtime", ["powersgd:0", "powersgd:x"])
def test_mistakes_are_one_line(capsys, runtime):
    argv = ["bench", "training", "--trace", "resnet20", "--nodes", "2", "--runtime", runtime]
    assert main(argv) == 2
    stderr = capsys.readouterr().err
    assert "powersgd takes a rank" in stderr
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("runtime", "complaint"),
    [
        ("optimal@rign", r"optimal@rign: no all-reduce by 'rign', did you mean ring\?"),
        ("optimla@ring", r"no planner 'optimla', did you mean optimal\?"),
    ],
)
def test_collectives_that_nobody_can_follow(runtime, complaint):
    with pytest.raises(RequestError, match=complaint):
        check_runtimes([runtime])


def test_planners_by_collectives_are_runtimes():
    runtimes = with_collectives(["torch-ddp", "wfbp"], ["blueconnect", "parameter-server:2", "any"])
    assert runtimes == (
        "torch-ddp",
        "wfbp",
        "wfbp@blueconnect",
        "wfbp@parameter-server:2",
        "wfbp@any",
    )
    check_runtimes(runtimes)
    measured = [way.collective for way in to_measure(runtimes)]
    assert measured == ["native", "blueconnect", "parameter-server:2"]
    assert needs_slow_ways(runtimes)
    assert not needs_slow_ways(["torch-ddp", "wfbp"])


def test_a_named_collective_is_planned_for_and_any_is_no_slower():
    trace, workers = load_trace("resnet50"), 4
    line = {
        "native": Line(startup_s=5e-3, s_per_byte=1e-8),
        "mst": Line(startup_s=1e-3, s_per_byte=4e-8),
    }
    network = Network(
        name="n",
        source="drawn",
        costs=tuple(
            CollectiveCost(operation="all-reduce", collective=name, workers=workers, cost=cost)
            for name, cost in line.items()
        ),
    )
    job = Job(trace, network, workers)
    plans = {name: plan_of(f"optimal:0@{name}", job) for name in (*line, "any")}
    for name in line:
        assert {bucket.collective for bucket in plans[name].buckets} == {name}
    ends_s = {
        name: simulate(trace, plan, network, workers=workers).iteration_s
        for name, plan in plans.items()
    }
    assert ends_s["any"] <= 1.01 * min(ends_s["native"], ends_s["mst"])


BY_COLLECTIVES = ("wfbp@ring", "single@parameter-server:2", "optimal@any")


def by_collectives(group):
    """Which collectives each plan names, and whether gradients had their mean."""
    costs = (
        *NETWORK.costs,
        priced("all-reduce", "ring", 0.5, 2.0),
        priced("all-reduce", "parameter-server:2", 9.0, 9.0),
    )
    job = Job(TRACE, msgspec.structs.replace(NETWORK, costs=costs), RANKS)
    trainee, found = trainee_of(group), {}
    for runtime in BY_COLLECTIVES:
        plan = plan_of(runtime, job)
        with running(Case(runtime=runtime, plan=plan), trainee) as run:
            for _ in range(3):
                run.step()
            found[runtime] = run.is_correct(), {bucket.collective for bucket in plan.buckets}
    return found


def test_gradients_by_each_collective(tmp_path):
    for found in on_processes(RANKS, by_collectives, scratch=tmp_path):
        assert all(is_correct for is_correct, _ in found.values())
        assert found["wfbp@ring"][1] == {"ring"}
        assert found["single@parameter-server:2"][1] == {"parameter-server:2"}
        assert found["optimal@any"][1] <= {"native", "ring"}
