import pytest

from gradweave import Bucket, Compression, Plan, Span, Timeline
from gradweave._src.compression import parse_compression
from gradweave._src.errors import RequestError
from gradweave._src.vocabulary import parse_bytes


def plan(*buckets):
    return Plan(
        planner="by hand",
        buckets=tuple(Bucket(tensors=names, collective="ring") for names in buckets),
    )


def test_plans_that_cannot_be():
    with pytest.raises(ValueError, match="buckets must not be empty"):
        plan()
    with pytest.raises(ValueError, match="tensors must not be empty"):
        plan(())
    with pytest.raises(ValueError, match="tensor 'a' stands in two places"):
        plan(("a", "b"), ("a",))


@pytest.mark.parametrize(
    ("buckets", "complaint"),
    [
        ([("c",), ("b",)], "1 tensors of trace 'small' are in no bucket, first 'a'"),
        ([("c", "b", "a", "x")], "the plan has 1 tensors that trace 'small' has not, first 'x'"),
        ([("b", "c"), ("a",)], "sends 'b' where backward of trace 'small' yields 'c'"),
    ],
)
def test_a_plan_of_another_model_is_refused(small_trace, buckets, complaint):
    with pytest.raises(ValueError, match=complaint):
        plan(*buckets).check_describes(small_trace)
    plan(("c",), ("b", "a")).check_describes(small_trace)


def span(lane, start_s, end_s):
    return Span(lane=lane, label="x", start_s=start_s, end_s=end_s, tensors=("x",))


def test_what_a_timeline_says():
    timeline = Timeline(
        spans=(
            span("forward", 0, 2),
            span("backward", 2, 4),
            span("backward", 4, 5),
            span("communication", 3, 4.5),
            span("communication", 4.5, 8),
        )
    )
    assert timeline.iteration_s == 8
    assert timeline.compute_s == 5
    assert timeline.communication_s == 5
    assert timeline.exposed_s == 3
    assert timeline.overlap == pytest.approx(2 / 5)
    assert timeline.efficiency == pytest.approx(5 / 8)
    assert timeline.speedup(16) == pytest.approx(10)


def test_spans_that_overlap_count_once():
    timeline = Timeline(
        spans=(
            span("backward", 0, 1),
            span("communication", 0.5, 3),
            span("communication", 1, 2),
            span("communication", 5, 6),
        )
    )
    assert timeline.communication_s == 3.5
    assert timeline.exposed_s == 3.0


def test_without_communication_nothing_is_exposed():
    timeline = Timeline(spans=(span("forward", 0, 1),))
    assert (timeline.exposed_s, timeline.overlap, timeline.efficiency) == (0, 1, 1)


def test_timelines_that_cannot_be():
    with pytest.raises(ValueError, match=r"end_s must not be before start_s 2.0, got 1.0"):
        span("forward", 2.0, 1.0)
    with pytest.raises(ValueError, match="spans must not be empty"):
        Timeline(spans=())


@pytest.mark.parametrize("text", ["topk:0", "gtopk:1.5", "gtopk:nan", "gtopk:x", "zip"])
def test_compressions_that_cannot_be(text):
    with pytest.raises(
        RequestError, match=r"density must be|could not convert|no compression 'zip'"
    ):
        parse_compression(text)


def test_compression_reads_what_it_prints():
    assert parse_compression("gtopk:0.005") == Compression(method="gtopk", density=0.005)
    assert str(parse_compression("topk")) == "topk:0.001"


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("7B", 7), ("2KB", 2000), ("2KiB", 2048), ("0.5MiB", 524288), ("1 GB", 10**9)],
)
def test_sizes(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1mb", "1e3", "0B"])
def test_what_is_no_size(text):
    with pytest.raises(RequestError, match="size"):
        parse_bytes(text)


def test_a_size_without_a_unit_is_refused_with_what_was_meant():
    with pytest.raises(RequestError, match=r"'25' .* write 25MiB, or 25B for bytes"):
        parse_bytes("25")
