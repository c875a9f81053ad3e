"""What cannot be planned stays with torch's buckets; what means nothing is refused in a line."""

import logging
import re
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from small_training import batch, network, on_two, plan_of, trained
from torch import nn

from gradweave import FormatError, PlanMismatch, RequestError
from gradweave._src import files
from gradweave._src.compression import Compression
from gradweave._src.plan import Bucket, Plan
from gradweave._src.runtime.ddp import DistributedDataParallel
from gradweave._src.runtime.sharded import ShardedDataParallel
from gradweave._src.runtime.wrapping.options import Options
from gradweave._src.runtime.wrapping.plan_source import given_plan
from gradweave._src.sparse.settings import GTopK

SPARSE = Compression(method="gtopk", density=0.1)
TRACE = Path(__file__).parents[1] / "golden" / "trace-2.json"


def falls_back(group, kind):
    model = network()
    if kind == "two dtypes":
        model[0].double()
        model[1] = nn.Sequential(nn.Tanh(), _ToFloat())
    if kind == "sparse":
        model.append(_WithEmbedding())
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("gradweave").addHandler(handler)
    options = {"bucket_cap_mb_list": [1]} if kind == "caps" else {}
    wrapped = DistributedDataParallel(model, **options)
    for step in range(4):
        wrapped(batch(step, group.rank()).to(model[0].weight.dtype)).sum().backward()
    return records, wrapped.explain(), wrapped.plan


class _WithEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 2, sparse=True)

    def forward(self, value):
        return value + self.table(torch.tensor([1]))


class _ToFloat(nn.Module):
    def forward(self, value):
        return value.float()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("two dtypes", "torch buckets each type and device by itself, and there are torch.float32"),
        ("caps", "bucket_cap_mb_list is given"),
        ("sparse", "sparse gradients travel by themselves"),
    ],
)
def test_what_cannot_be_planned_stays_with_torchs_buckets(tmp_path, kind, why):
    for warnings, explained, plan in on_two(falls_back, kind, scratch=tmp_path):
        assert len(warnings) == 1
        assert why in warnings[0]
        assert why in explained
        assert plan is None


def alone(group):
    wrapped = DistributedDataParallel(network())
    trained(wrapped, 0, steps=3)
    return wrapped.explain()


def test_one_worker_needs_no_plan(tmp_path):
    assert on_two(alone, scratch=tmp_path, world=1) == [
        "Torch's own buckets stay: one worker sends no messages."
    ]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"planner": "best"}, "no planner 'best'"),
        ({"collective": "rign"}, r"no collective 'rign', did you mean ring\? There are auto,"),
        ({"precision": "int4"}, r"no precision 'int4', did you mean int8\? There are exact, round"),
        ({"compression": "gtop:0.001"}, r"no compression 'gtop', did you mean gtopk\?"),
        ({"compression": "gtopk:2"}, "density must be above 0 and at most 1, got 2"),
        ({"compression": "bf16"}, "write precision='bf16' instead of compression"),
        ({"compression": 0.001}, r"must be GTopK\(…\), TopK\(…\) or a text .* got a float"),
        ({"compression": GTopK}, "got the class itself"),
        ({"precision": "bf16", "collective": "native"}, "is for schedules of ours; leave out"),
        ({"record_steps": 0}, "record_steps must be at least 1, got 0"),
        ({"trial_steps": -1}, "trial_steps must be at least 0, got -1"),
        ({"replan_when": float("nan")}, "replan_when must be positive, got nan"),
        ({"replan_when": 0.0}, "replan_when must be positive, got 0"),
        ({"replan_when": "often"}, "replan_when must be a number, or None, got 'often'"),
        ({"planner": None}, "planner must be the name of a planner, got None"),
        ({"precision": 16}, "must be the name of a precision, got 16; there are exact, rounded,"),
        ({"precision": torch.bfloat16}, r'got torch.bfloat16; write "bf16" \(there are exact, rou'),
        ({"precision": torch.float64}, "got torch.float64; there are exact, rounded, sparse, bf16"),
        ({"bucket_cap_mb": "25"}, "bucket_cap_mb: bucket caps must be positive .* got '25'"),
        ({"bucket_cap_mb_list": ["1"]}, "bucket_cap_mb_list: bucket caps must be .* got '1'"),
        ({"bucket_cap_mb_list": "25"}, "bucket_cap_mb_list must be a list of numbers .* '25'"),
        ({"bucket_cap_mb_list": 25}, "bucket_cap_mb_list must be a list of numbers .* got 25"),
        ({"bucket_cap_mb": 0}, "bucket caps must be positive numbers of MiB, got 0"),
        ({"bucket_cap_mb_list": [1.0, float("nan")]}, "bucket caps must be positive .* got nan"),
        ({"bucket_cap_mb_list": []}, "bucket_cap_mb_list must not be empty"),
    ],
)
def test_options_that_mean_nothing(options, complaint):
    """Found before torch is asked for anything, so no group is needed."""
    with pytest.raises(RequestError, match=complaint):
        DistributedDataParallel(network(), **options)


@pytest.mark.parametrize(
    ("wrapper", "option", "complaint"),
    [
        (DistributedDataParallel, "precison", "no option 'precison', did you mean precision\\?"),
        (DistributedDataParallel, "bucket_cap_mib", "did you mean bucket_cap_mb\\?"),
        (DistributedDataParallel, "colour", "unexpected keyword argument 'colour'"),
        (ShardedDataParallel, "record_step", "no option 'record_step', did you mean record_steps"),
        (ShardedDataParallel, "colour", "unexpected keyword argument 'colour'"),
    ],
)
def test_a_misspelt_option(tmp_path, wrapper, option, complaint):
    """What resembles no option is refused as it would be by torch's wrapper, or any function."""
    (said,) = on_two(misspelt, wrapper, option, scratch=tmp_path, world=1)
    assert re.search(complaint, said)


def misspelt(group, wrapper, option):
    with pytest.raises(TypeError) as caught:
        wrapper(network(), **{option: "rounded"})
    return str(caught.value)


def test_a_plan_has_its_name():
    """Behind the model stand torch's own arguments, of which the first are devices."""
    with pytest.raises(RequestError, match="write plan= before the Plan"):
        DistributedDataParallel(network(), plan_of(2, 3))


def complaint_of(group, plans):
    with pytest.raises((PlanMismatch, RequestError)) as caught:
        trained(DistributedDataParallel(network(), plan=plans[group.rank()]), 0, steps=1)
    return str(caught.value)


def test_plans_that_differ_between_ranks(tmp_path):
    plans = [plan_of(2, 3), plan_of(1, 4)]
    for found in on_two(complaint_of, plans, scratch=tmp_path):
        assert found.startswith("ranks wrap differently: plan is a plan of 2 messages by 'made' (")


def test_plans_of_another_model(tmp_path):
    short = Plan(planner="made", buckets=plan_of(2, 3).buckets[:1])
    long = Plan(
        planner="made",
        buckets=(*plan_of(2, 3).buckets, Bucket(tensors=("head",), collective="native")),
    )
    for plan, expected in (
        (short, "3 parameters of the model are in no bucket, first '0.bias'"),
        (long, "the plan has 1 tensors that the model has not, first 'head'"),
    ):
        for found in on_two(complaint_of, [plan] * 2, scratch=tmp_path):
            assert found.startswith(expected)
        (tmp_path / "rendezvous").unlink(missing_ok=True)  # its last user may have


@pytest.mark.parametrize(
    ("thinned", "compression", "complaint"),
    [
        (SPARSE, None, "sends bucket 2 by gtopk:0.1, and the model is wrapped without compression"),
        (
            None,
            GTopK(density=0.1),
            "sends bucket 1 uncompressed, and the model is wrapped with com",
        ),
    ],
)
def test_plans_of_other_compression(thinned, compression, complaint):
    first, second = plan_of(2, 3).buckets
    plan = Plan(planner="made", buckets=(first, replace(second, compression=thinned)))
    with pytest.raises(RequestError, match=complaint):
        given_plan(
            plan, workers=2, device=torch.device("cpu"), options=Options(compression=compression)
        )


@pytest.mark.parametrize(
    ("precision", "rounding", "complaint"),
    [
        ("exact", "bf16", "bucket 2 rounded to bf16, and the model is wrapped with precision='ex"),
        ("int8", "bf16", "bucket 1 as it is, and the model is wrapped with precision='int8'"),
    ],
)
def test_plans_of_other_precision(precision, rounding, complaint):
    first, second = plan_of(2, 3, collective="ring").buckets
    rounded = replace(second, compression=Compression(method=rounding))
    plan = Plan(planner="made", buckets=(first, rounded))
    with pytest.raises(RequestError, match=complaint):
        given_plan(
            plan, workers=2, device=torch.device("cpu"), options=Options(precision=precision)
        )


def test_plan_files_that_are_not(tmp_path):
    truncated = tmp_path / "plan.json"
    truncated.write_text(files.dumps(plan_of(2, 3))[:-30])
    for plan, expected in (
        (truncated, "not complete JSON"),
        (tmp_path / "none.json", "there is no file"),
        (TRACE, f"{TRACE}: this is a trace, not a plan"),
    ):
        for found in on_two(reading_complaint, str(plan), scratch=tmp_path):
            assert expected in found
        (tmp_path / "rendezvous").unlink(missing_ok=True)  # its last user may have


def reading_complaint(group, plan):
    with pytest.raises((FormatError, RequestError)) as caught:
        DistributedDataParallel(network(), plan=plan)
    return str(caught.value)


def test_compression_goes_its_own_way():
    with pytest.raises(RequestError, match="compression sends values and indices its own way"):
        DistributedDataParallel(network(), compression=GTopK(density=0.001), precision="fp16")
    with pytest.raises(RequestError, match="residuals travel in every step, also those of unused"):
        DistributedDataParallel(
            network(), compression=GTopK(density=0.1), skip_all_reduce_unused_params=True
        )
    with pytest.raises(RequestError, match="whole_model sends one message, and the plan has other"):
        DistributedDataParallel(
            network(), compression=GTopK(density=0.1, whole_model=True), plan=plan_of(2, 3)
        )
    with pytest.raises(RequestError, match="density"):
        GTopK(density=0.0)
