"""Calibrating beside the job itself, which is recorded where it will run."""

from threading import active_count

import pytest
from msgspec.structs import replace
from ranks import on_threads

from gradweave import load_trace
from gradweave._src.bench.calibration import CalibrationQuestion, ReplayedJob
from gradweave._src.bench.calibration_job import calibrated, recorded
from gradweave._src.bench.replayed_load import replaying
from gradweave._src.compression import parse_compression
from gradweave._src.vocabulary import Way

TRACE = load_trace("resnet20").rescaled(forward_s=2e-3, backward_s=4e-3, parameter_scale=0.1)
JOB = ReplayedJob(trace=TRACE, mode="waiting")
QUESTION = CalibrationQuestion(
    name="here",
    ways=(Way("all-reduce", "native"),),
    largest_bytes=8192,
    repeats=1,
    compressions=(parse_compression("gtopk:0.01"),),
    job=JOB,
)


def test_all_ranks_record_the_same_job_in_the_order_of_backward():
    first, second = on_threads(2, lambda group: recorded(JOB, group))
    assert first == second
    assert [t.name for t in first.trace.tensors] == [t.name for t in TRACE.tensors]
    assert [t.nbytes for t in first.trace.tensors] == [t.nbytes for t in TRACE.tensors]
    assert first.trace.backward_s >= TRACE.backward_s
    assert first.copy_s_per_byte > 0


@pytest.mark.long
def test_messages_are_timed_beside_the_job_alone():
    network, nobody = on_threads(2, lambda group: calibrated(QUESTION, group, advance=int))
    assert nobody is None
    measured = {entry.collective: entry.beside for entry in network.costs}
    assert measured == {"native": "compute", "gtopk:0.01": "nothing"}
    assert network.selection_s_per_element > 0


def test_the_load_ends_with_its_block_however_long_its_pass_would_be():
    before = active_count()
    endless = replace(JOB, trace=TRACE.rescaled(backward_s=1e6))
    with replaying(endless) as thread:
        assert thread.is_alive()
    assert not thread.is_alive()
    assert active_count() == before
