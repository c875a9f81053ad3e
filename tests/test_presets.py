"""The shipped traces and networks against where they come from."""

import csv

import make_presets
import numpy as np
import pytest

from gradweave import load_network, load_trace
from gradweave._src import files
from gradweave._src.costs import Curve

# FACTS of the papers: tensors, parameters, and seconds per iteration at the measured trace's speed.
PUBLISHED = {
    "resnet50": (161, 25.5e6, 0.42),
    "resnet152": (467, 60.1e6, 5.0),
    "densenet161": (484, 28.6e6, None),
    "densenet201": (604, 20e6, 0.94),
    "inceptionv4": (449, 42.6e6, 2.65),
    "alexnet": (16, 62e6, 0.369),
    "vgg16": (54, 14.7e6, 0.097),
    "resnet20": (65, 0.27e6, 0.146),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_and_times_are_the_published_ones(name):
    tensors, parameters, iteration_s = PUBLISHED[name]
    trace = load_trace(name)
    assert len(trace.tensors) == tensors
    assert sum(t.elements for t in trace.tensors) == pytest.approx(parameters, rel=0.02)
    assert trace.backward_s == pytest.approx(2 * trace.forward_s, rel=1e-3)
    if iteration_s is not None:
        assert trace.compute_s == pytest.approx(iteration_s, rel=0.03)


# What is known of the checkpoints whose tensors today's traces have, from their model cards.
TODAY = {
    "bert-base": (199, 109_482_240),
    "bert-large": (391, 335_141_888),
    "gpt2": (148, 124_439_808),
    "vit-b16": (152, 86_567_656),
    "llama-1b": (146, 1_235_814_400),
}


@pytest.mark.parametrize("name", TODAY)
def test_todays_models_have_the_published_sizes(name):
    trace = load_trace(name)
    tensors, parameters = TODAY[name]
    assert len(trace.tensors) == tensors
    assert sum(tensor.elements for tensor in trace.tensors) == parameters
    assert {tensor.bytes_per_element for tensor in trace.tensors} == {
        2 if name == "llama-1b" else 4
    }
    assert trace.backward_s == pytest.approx(2 * trace.forward_s, rel=1e-3)


@pytest.mark.parametrize("name", ["gpt2", "llama-1b"])
def test_a_tied_embedding_is_complete_last_and_needed_first(name):
    """Though the head, which has its weights, is the first to have its backward."""
    trace = load_trace(name)
    embedding, first = trace.tensors[-1], trace.tensors[0]
    assert embedding.elements == max(tensor.elements for tensor in trace.tensors)
    assert embedding.ready_s == trace.backward_s
    # The head's time is there all the same: before the first gradient, and at the end of forward.
    assert first.ready_s > 0.05 * trace.backward_s
    assert first.forward_s > 0.05 * trace.forward_s


@pytest.mark.parametrize("model", make_presets.MODELS, ids=lambda model: model.name)
def test_the_script_writes_the_shipped_traces(model):
    assert make_presets.estimated_trace(model) == load_trace(model.name)


@pytest.mark.parametrize("network", make_presets.NETWORKS, ids=lambda network: network.name)
def test_the_script_writes_the_shipped_networks(network):
    assert files.dumps(network) == files.dumps(load_network(network.name))


def test_the_measured_trace_is_the_measurement(measurements):
    with (measurements / "googlenet-k80.csv").open() as file:
        rows = list(csv.DictReader(file))[::-1]
    trace = load_trace("googlenet-k80")
    sizes = [int(row["weight_numel"]) + int(row["bias_numel"]) for row in rows]
    backward_s = np.array([float(row["backward_us"]) for row in rows]) * 1e-6
    assert [tensor.elements for tensor in trace.tensors] == sizes
    assert trace.ready_s == pytest.approx(np.cumsum(backward_s))
    assert [tensor.forward_s for tensor in trace.tensors] == pytest.approx(backward_s / 2)


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_the_measured_network_is_the_measurement(measurements, workers):
    with (measurements / f"allreduce-10gbe-{workers}nodes.csv").open() as file:
        rows = list(csv.DictReader(file))
    curve = load_network("mpi-10gbe-measured").cost("all-reduce", "native", workers=workers)
    assert isinstance(curve, Curve)
    assert list(curve.nbytes) == [int(row["bytes"]) for row in rows]
    assert curve.measured_s == pytest.approx([float(row["latency_us"]) * 1e-6 for row in rows])
