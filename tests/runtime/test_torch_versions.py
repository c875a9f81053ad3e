"""What versions of torch have is looked up; what they have beyond that keeps torch's own buckets.

The signatures are those of torch's own files. `make test-torch VERSION=…` runs the rest.
"""

import inspect
import json
import logging
import re
from functools import wraps
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from ranks import on_threads, seeded
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave import DistributedDataParallel
from gradweave._src.plan import Bucket, Plan
from gradweave._src.runtime.wrapping.options import UNPLANNABLE
from gradweave._src.torch_internals import (
    FOLLOWED,
    FOR_OTHER_BUCKETS,
    passed_on,
    torch_caps_bytes,
    unfollowed_options,
    why_no_other_buckets,
)
from gradweave._src.vocabulary import MIB

GOLDEN = Path(__file__).parents[1] / "golden" / "torch-signatures.json"
VERSIONS = json.loads(GOLDEN.read_text())
ONE_BUCKET = Plan(
    planner="made",
    buckets=(Bucket(tensors=("bias", "weight"), collective="native"),),
)


def written(names):
    """As documentation of compiled code has it."""
    return f"__init__(self: Reducer, {', '.join(f'{name}: object' for name in names)}) -> None"


@pytest.mark.parametrize("version", VERSIONS)
def test_each_version_has_what_other_buckets_need(version):
    found = VERSIONS[version]
    assert why_no_other_buckets(written(found["reducer"])) is None
    methods = {n.rpartition(".")[2] for n in FOR_OTHER_BUCKETS if "distributed.Reducer." in n}
    assert methods <= set(found["methods"])


def test_private_methods_that_ours_overrides_must_be_torchs():
    """Else torch would never call them, and what they do would be missing without a word."""
    ours = [name for name in vars(DistributedDataParallel) if re.match("_[a-z]", name)]
    overridden = {name for name in ours if inspect.isroutine(getattr(TorchDDP, name, None))}
    assert "_post_forward" in overridden
    needed = {name.rpartition(".")[2] for name in FOR_OTHER_BUCKETS if ".parallel." in name}
    assert overridden <= needed


@pytest.mark.parametrize("version", VERSIONS)
def test_reducers_are_given_all_that_wrappers_of_a_version_were_given(version):
    found = VERSIONS[version]
    wrapper = SimpleNamespace(**{name: f"the user's {name}" for name in found["wrapper"]})
    both = set(found["reducer"]) & set(found["wrapper"])
    by_replacing = {"find_unused_parameters", "gradient_as_bucket_view", "process_group"}
    given = passed_on(wrapper, written(found["reducer"]))
    assert given == {name: getattr(wrapper, name) for name in both - by_replacing}


@pytest.mark.parametrize("version", VERSIONS)
def test_each_option_of_a_version_is_followed_or_refused(version):
    assert set(VERSIONS[version]["wrapper"]) <= FOLLOWED | set(UNPLANNABLE)


def test_a_reducer_without_caps_is_one_line():
    reducer = [name for name in VERSIONS["2.13.0"]["reducer"] if name != "bucket_bytes_cap_list"]
    why = why_no_other_buckets(written(reducer))
    assert why.endswith("has reducers without bucket_bytes_cap_list, which this needs")


def test_caps_are_read_where_a_version_keeps_them():
    default = SimpleNamespace(bucket_bytes_cap=25 * MIB, bucket_bytes_cap_default=True)
    assert torch_caps_bytes(default) == (dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * MIB)
    chosen = SimpleNamespace(bucket_bytes_cap=MIB, bucket_bytes_cap_default=False)
    assert torch_caps_bytes(chosen) == (MIB, MIB)


def with_an_option_of_tomorrow(init):
    @wraps(init)
    def accepting(self, *args, of_tomorrow=False, **options):
        init(self, *args, **options)

    return accepting


def wrapped(group, options):
    model = seeded(lambda: nn.Linear(4, 2))
    wrapper = DistributedDataParallel(model, process_group=group, **options)
    return wrapper.findings().note


def test_an_unknown_option_keeps_torchs_buckets(monkeypatch, caplog):
    monkeypatch.setattr(TorchDDP, "__init__", with_an_option_of_tomorrow(TorchDDP.__init__))
    why = "what of_tomorrow means for buckets is not known here"
    with caplog.at_level(logging.WARNING):
        assert on_threads(2, wrapped, {"of_tomorrow": True}) == [why] * 2
    assert {record.getMessage() for record in caplog.records} == {
        f"keeping torch's own buckets: {why}"
    }


def test_defaults_are_nothing_to_follow():
    assert unfollowed_options({"bucket_cap_mb_list": None, "static_graph": True}) == []
    assert unfollowed_options({"bucket_cap_mb_list": [1]}) == ["bucket_cap_mb_list"]


class Manual(DistributedDataParallel):
    """As from torch 2.15 on: whether backward is ended by hand is told to the reducer."""

    told = ()

    @property
    def require_manual_backward_finalization(self):
        return True

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required):
        self.told = (*self.told, (self.reducer, required))


def ended_by_hand(group):
    wrapper = Manual(seeded(lambda: nn.Linear(4, 2)), process_group=group, plan=ONE_BUCKET)
    return wrapper.told == ((wrapper.reducer, True),)


def test_a_new_reducer_is_told_who_ends_backward():
    assert on_threads(2, ended_by_hand) == [True, True]
