"""Names that do something to whoever shows them: on pages, in charts, for Perfetto, notebooks."""

import json
import re
import xml.etree.ElementTree as ET

import pytest
from checkups import checkup
from msgspec.structs import replace
from mutations import LONG, NAMES, mutated_documents
from report_cases import (
    drawn_trace,
    measured_network,
    write_losses,
    write_run,
    write_training,
)

from gradweave import FormatError
from gradweave._src import files
from gradweave._src.doctor import diagnose
from gradweave._src.errors import GradweaveError
from gradweave._src.report.checkup_page import make_checkup_page
from gradweave._src.report.document import document
from gradweave._src.report.folders import read_folders
from gradweave._src.report.page import make_page
from gradweave._src.report.perfetto import trace_events
from gradweave._src.report.sentences import about, about_lossy, headline
from gradweave._src.results import Results

# All that is hostile in one name, for pages take seconds.
ALL_AT_ONCE = "".join(name for what, name in NAMES.items() if what != "is long")


def write_named(path, name):
    """A run in which every text is this one."""
    trace = drawn_trace(4, name=name)
    tensors = tuple(replace(t, name=f"{name}{i}") for i, t in enumerate(trace.tensors))
    trace = replace(trace, tensors=tensors, source=name)
    network = replace(measured_network(name), source=name)
    write_run(path, trace, network, runtimes={name: "wfbp"})
    results = files.read(path / "results.json", Results)
    wrong = tuple(replace(row, correct=False) for row in results.rows)
    files.write(path / "results.json", replace(results, command=name, rows=wrong))
    write_losses(path, label=name)
    return path


def check_page(page, name):
    assert all(line.isprintable() for line in page.split("\n"))
    assert "<script>alert" not in page
    drawn = re.findall(r"<svg .*?</svg>", page, re.DOTALL)
    assert drawn
    for one in drawn:
        ET.fromstring(one)  # noqa: S314 our own page
    if "\x1b" in name:
        assert r"\x1b" in page


def check_events(text):
    assert text.isprintable()
    assert json.loads(text)["traceEvents"]


def check_named(path, name):
    folders = read_folders([write_named(path, name)])
    check_page(make_page(folders), name)
    check_events(trace_events(folders))


def test_a_page_shows_hostile_names_as_text(tmp_path):
    check_named(tmp_path / "run", ALL_AT_ONCE)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_page_shows_each_hostile_name_as_text(tmp_path, name):
    check_named(tmp_path / "run", name)


def test_long_names_make_no_large_page(tmp_path):
    sizes = []
    for number, name in enumerate(("n", "n" * LONG)):
        folders = read_folders([write_named(tmp_path / str(number), name)])
        sizes.append(len(trace_events(folders)) + len(json.dumps(document(folders))))
    assert sizes[1] < 100 * LONG + sizes[0]


def test_a_training_shows_hostile_names_as_text(tmp_path):
    """Its explanation too, which has lines of its own."""
    for folder in ("a", "b\x1b[2J\u202e"):
        write_training(
            tmp_path / folder,
            drawn_trace(4, name=ALL_AT_ONCE),
            measured_network(),
            runtime=ALL_AT_ONCE,
            text=f"first\nsecond {ALL_AT_ONCE}",
        )
    page = make_page(read_folders([tmp_path]))
    check_page(page, ALL_AT_ONCE)
    assert '<p class="about">first</p>' in page


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_checkup_shows_hostile_names_as_text(name):
    named = {"host": name, "interface": name}
    page = make_checkup_page(diagnose(checkup(3, changed={1: named})))
    assert all(line.isprintable() for line in page.split("\n"))
    assert "<script>" not in page


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_notebook_shows_hostile_names_as_text(tmp_path, name):
    folders = read_folders([write_named(tmp_path / "run", name)])
    run = folders[0].run
    for value in (run.trace, run.network, run.plans[name], run.predicted[name]):
        shown = value._repr_html_()
        assert shown.isprintable()
        assert "<script>" not in shown


FILES = ("results.json", "trace.json", "network.json", "losses.json")


def check_changed_run(path, name, *, count, seed, pages):
    """A file of a run has changed: a page, or one line that says why there is none."""
    write_run(path, drawn_trace(3), measured_network(), runtimes={"single": "single"})
    write_losses(path)
    file = path / name
    text = file.read_text()
    for number, changed in enumerate(mutated_documents(text, count=count, seed=seed)):
        file.write_bytes(changed.encode(errors="replace"))
        try:
            (folder,) = read_folders([path])
        except (FormatError, FileNotFoundError):
            continue
        try:
            check_events(trace_events([folder]))
            json.dumps(document([folder]))
            assert about(folder)
            assert headline(folder.run)
            about_lossy(folder)
            if number < pages:
                make_page([folder])
        except GradweaveError as error:
            assert "\n" not in str(error)  # noqa: PT017 most are pages


@pytest.mark.parametrize("name", [*FILES, "single/plan.json", "single/measured.json"])
def test_changed_runs_are_pages_or_a_line(tmp_path, name):
    check_changed_run(tmp_path / "run", name, count=100, seed=1, pages=0)


@pytest.mark.long
@pytest.mark.parametrize("name", [*FILES, "single/plan.json", "single/measured.json"])
def test_many_changed_runs_are_pages_or_a_line(tmp_path, name):
    check_changed_run(tmp_path / "run", name, count=500, seed=2, pages=30)
