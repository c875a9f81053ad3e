"""Text from outside is one harmless line wherever it is shown, and a harmless name of a file."""

from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutations import LONG, NAMES, SURROGATE

from gradweave._src.plan import Bucket, Plan
from gradweave._src.runs import RunFolder
from gradweave._src.session.explain import explanation
from gradweave._src.session.findings import Findings, Stage
from gradweave._src.vocabulary import LONGEST_LINE, all_printable, file_name, printable, quoted

texts = st.text(st.characters(exclude_categories=()), max_size=300)


@given(text=texts, most=st.integers(10, 400))
def test_any_text_is_one_line_that_is_not_too_long(text, most):
    shown = printable(text, most=most)
    assert shown.isprintable()
    assert len(shown) <= most
    assert printable(shown, most=most) == shown
    shown.encode()


@given(text=texts)
def test_what_can_be_shown_is_shown_as_it_is(text):
    assert (printable(text) == text) == text.isprintable()


def test_what_is_left_out_is_the_middle():
    shown = printable("begin" + "n" * LONG + "end")
    assert shown.startswith("begin")
    assert shown.endswith("end")
    assert "…" in shown
    assert len(shown) <= LONGEST_LINE


def test_different_names_stay_different():
    assert printable("a\x1b[2J\u202e\n") == r"a\x1b[2J\u202e\n"
    assert quoted("a'\x1b") == '''"a'\\x1b"'''
    inside = {"a": ["\x07", ("\x08", 3.5, None)]}
    assert all_printable(inside) == {"a": [r"\x07", [r"\x08", 3.5, None]]}


@given(name=texts)
def test_any_name_makes_a_file_in_its_folder(name):
    made = file_name(f"{name}-2-nodes")
    assert PurePosixPath("out", made).parent == PurePosixPath("out")
    assert made not in {"", ".", ".."}
    assert not made.startswith(".")
    assert made.isprintable()
    assert len(made.encode()) < 200


@pytest.mark.parametrize("name", ["gradweave", "fixed:25MiB", "gtopk:0.001", "a b", "ring+bf16"])
def test_ordinary_names_are_what_they_always_were(name):
    assert file_name(name) == name.replace(":", "-")


@pytest.mark.parametrize("name", [*NAMES.values(), SURROGATE, "..", ".", "\0", ""])
def test_runtimes_cannot_leave_the_folder_of_a_run(tmp_path, name):
    folder = RunFolder(tmp_path)._of(name)
    assert folder.parent == tmp_path
    assert folder.resolve().parent == tmp_path.resolve()
    folder.mkdir()


def test_names_that_were_changed_are_told_apart():
    made = {file_name(f"{'n' * 300}{number}\n") for number in range(50)}
    assert len(made) == 50


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_an_explanation_has_lines_of_its_own_alone(name):
    """A plan may be from a file, and hosts are called what somebody has called them."""
    plan = Plan(planner=name, buckets=(Bucket(tensors=("a",), collective="native"),))
    found = Findings(stage=Stage.SETTLED, plan=plan)
    said = explanation(found, workers=2, who_is_slow=[f"rank 1 on {name} is slow"])
    first, second = said.split("\n")
    assert "planned by" in first
    assert first.isprintable()
    assert second.startswith("rank 1 on ")
    assert second.isprintable()
