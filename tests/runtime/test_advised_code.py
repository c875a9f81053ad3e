"""Advised lines of code are Python that names arguments which exist."""

import ast
import inspect

import pytest
import torch

import gradweave
from gradweave import load_network, load_trace
from gradweave._src.advice import advise

pytestmark = pytest.mark.xdist_group("advised code")  # what is advised is found once
PARSED_BY_PYTHON = ("torch.nn", "gradweave.", "model = ", "with ")


@pytest.fixture(
    scope="module",
    params=[
        ("vgg16", "resnet50"),
        pytest.param(("vgg16", "resnet50", "bert-base"), marks=pytest.mark.long),
    ],
    ids=len,
)
def lines(request):
    """Of many jobs, so that other collectives are asked for too."""
    networks = {"k80-10gbe": 16, "gtopk-1gbe": 16, "blueconnect-2x4-p100-pcie-10gbe": 8}
    return {
        option.code
        for name, workers in networks.items()
        for trace in request.param
        for option in advise(load_trace(trace), load_network(name), workers=workers).options
    }


def calls(lines):
    """Wrappers, and the names of what they are given."""
    wrappers = {
        "torch.nn.parallel.DistributedDataParallel": torch.nn.parallel.DistributedDataParallel,
        "gradweave.DistributedDataParallel": gradweave.DistributedDataParallel,
        "gradweave.ShardedDataParallel": gradweave.ShardedDataParallel,
    }
    for line in lines:
        if not line.startswith(PARSED_BY_PYTHON):
            continue
        for node in ast.walk(ast.parse(line)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in wrappers:
                yield wrappers[ast.unparse(node.func)], {k.arg for k in node.keywords}


def test_arguments_exist(lines):
    given = list(calls(lines))
    assert {wrapper.__module__.split(".")[0] for wrapper, _ in given} == {"torch", "gradweave"}
    assert any("collective" in names for _, names in given)
    for wrapper, names in given:
        assert names <= set(inspect.signature(wrapper).parameters)


def test_precisions_can_be_asked_for(lines):
    asked = [wrapper for wrapper, names in calls(lines) if "precision" in names]
    assert set(asked) == {gradweave.DistributedDataParallel}


def test_only_starting_more_workers_is_no_python(lines):
    others = [line for line in lines if not line.startswith(PARSED_BY_PYTHON)]
    assert all(line.startswith("torchrun with ") for line in others)
