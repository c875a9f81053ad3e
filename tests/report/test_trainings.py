"""Folders that save_run() has written: alone, side by side, and with parts that are missing."""

import json
import re
import shutil

import pytest
from drawn_timelines import assert_drawn_as_measured
from msgspec.structs import replace
from report_cases import (
    HOSTILE,
    WORKERS,
    drawn_trace,
    measured_network,
    write_run,
    write_training,
)
from selenium.webdriver.common.by import By
from test_browser import Page
from test_page import Elements, data_of
from test_report_cli import assert_one_line

from gradweave import FormatError
from gradweave._src import files
from gradweave._src.cli import main
from gradweave._src.costs import Line
from gradweave._src.network import CollectiveCost, Network
from gradweave._src.report.drawing import WIDE
from gradweave._src.report.folders import read_folders
from gradweave._src.report.page import make_page
from gradweave._src.report.perfetto import trace_events
from gradweave._src.report.sentences import about_learnt, side_by_side
from gradweave._src.report.training_charts import MOST_POINTS, StepTimes, step_times, thinned
from gradweave._src.results import Losses, LossSeries, Results
from gradweave._src.training_record import Account, Steps


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """Wrapped with timeline=True."""
    path = tmp_path_factory.mktemp("trainings") / "mine"
    return write_training(path, drawn_trace(30), measured_network())


@pytest.fixture(scope="module")
def torchs(tmp_path_factory):
    path = tmp_path_factory.mktemp("trainings") / "torch"
    return write_training(path, drawn_trace(30, seed=1), measured_network(), runtime="torch-ddp")


@pytest.fixture(scope="module")
def unknown(tmp_path_factory):
    """Neither timelines nor a network."""
    path = tmp_path_factory.mktemp("trainings") / "unknown"
    return write_training(path, drawn_trace(30), None, noted=False)


def words_of(page):
    return " ".join(" ".join(Elements(page).words).split())


def test_a_page_of_a_training(mine):
    page = make_page(read_folders([mine]))
    words = words_of(page)
    assert "gradweave took " in words
    assert "Chosen: 3 messages by native." in words
    assert "4 nodes with 1 worker each. Network lab" in words
    for phase in ("planning", "trying", "settled"):
        assert f">{phase}</text>" in page
    assert "400.0" in words  # backward of rank 0, in milliseconds
    assert "Trainings side by side" not in words
    assert "Whether it still learns" in words
    (run,) = data_of(page)["runs"]
    assert run["runtimes"][0]["measured"] is not None


def test_several_trainings_stand_side_by_side(mine, torchs, tmp_path):
    bench = write_run(tmp_path / "bench", drawn_trace(5), measured_network())
    words = words_of(make_page(read_folders([mine, torchs, bench])))
    assert "Trainings side by side" in words
    assert "mine: gradweave" in words
    assert "torch: torch-ddp" in words
    assert re.search(r"\w+ is \d\.\d\dx as fast as \w+: [\d.]+ instead of [\d.]+ ms an iter", words)
    assert "open circles were measured on 4 workers, dots are simulated with what messages by" in (
        words
    )
    assert "which is rough" not in words
    assert "Who has learnt how much, and when" in words


def test_trainings_with_the_same_messages_are_not_called_faster(mine, torchs):
    ours, theirs = (folder.run for folder in read_folders([mine, torchs]))
    runtime = theirs.results.rows[0].runtime
    (plan,) = (ours.plans[row.runtime] for row in ours.results.rows)
    assert "x as fast as" in side_by_side({"ours": ours, "theirs": theirs})
    assert "x as fast as" in side_by_side({"ours": ours, "theirs": replace(theirs, plans={})})
    same = replace(theirs, plans={runtime: replace(plan, planner="ddp")})
    said = side_by_side({"ours": ours, "theirs": same})
    assert "send the same messages, so something else makes the difference" in said
    assert "as fast as" not in said


def test_prices_that_training_alone_has_shown_are_called_rough(mine, tmp_path):
    learnt = replace(measured_network(), name="learnt in training")
    alone = write_training(tmp_path / "alone", drawn_trace(30), learnt)
    rough = "start from what training's own messages have shown, which is rough."
    assert about_learnt(read_folders([mine])) is None
    assert about_learnt(read_folders([alone])) == f"These {rough}"
    assert about_learnt(read_folders([alone, mine])) == f"Of alone these {rough}"


def test_trainings_of_one_name_are_told_apart(mine, tmp_path):
    shutil.copytree(mine, tmp_path / "mine")
    page = make_page(read_folders([mine, tmp_path / "mine"]))
    assert "mine (2): gradweave" in words_of(page)


def test_one_training_is_compared_with_nothing(mine, tmp_path):
    bench = write_run(tmp_path / "bench", drawn_trace(5), measured_network())
    assert "side by side" not in make_page(read_folders([mine, bench]))


def test_a_training_that_noted_nothing(unknown):
    page = make_page(read_folders([unknown]))
    words = words_of(page)
    assert "What messages cost is not known" in words
    assert "How long each step took" in words
    assert "What happens with more workers" not in words
    assert "What else could be done" not in words
    assert 'id="what-if"' not in page
    (run,) = data_of(page)["runs"]
    assert run["price"] is None
    assert (run["runtimes"][0]["measured"], run["runtimes"][0]["predicted"]) == (None, None)
    assert json.loads(trace_events(read_folders([unknown])))["traceEvents"] == []


def test_what_if_is_asked_of_those_that_know(mine, unknown):
    page = make_page(read_folders([unknown, mine]))
    assert '<option value="1">mine</option>' in page
    assert '<option value="0">' not in page


def test_a_network_of_halves_of_all_reduces(tmp_path):
    """As sharded training learns it."""
    line = Line(startup_s=0.01, s_per_byte=1e-8)
    costs = tuple(
        CollectiveCost(operation=one, collective="ring", workers=WORKERS, cost=line)
        for one in ("reduce-scatter", "all-gather")
    )
    path = write_training(tmp_path / "run", drawn_trace(5), measured_network(), runtime="sharded")
    files.write(path / "network.json", Network(name="halves", source="learnt", costs=costs))
    page = make_page(read_folders([path]))
    assert "Network halves" in page
    assert "<h3>What a message costs</h3>" not in page


def test_perfetto_has_a_process_for_each_rank(mine):
    events = json.loads(trace_events(read_folders([mine])))["traceEvents"]
    titles = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    ranks = [f"measured, rank {rank}" for rank in range(WORKERS)]
    assert titles == [f"mine: gradweave, {what}" for what in (*ranks, "predicted, every rank")]


def test_hostile_accounts_stay_text(tmp_path):
    trace = drawn_trace(4, name=HOSTILE)
    path = write_training(tmp_path / "run", trace, measured_network(), text=HOSTILE)
    other = write_training(tmp_path / HOSTILE[:9], trace, measured_network(), runtime=HOSTILE)
    elements = Elements(make_page(read_folders([path, other])))
    assert "img" not in [tag for tag, _ in elements.tags]
    assert HOSTILE in " ".join(elements.words)


def test_the_command_line_takes_them(capsys, tmp_path, mine, unknown):
    page, trace = tmp_path / "report.html", tmp_path / "trace.json"
    argv = ["report", str(mine), str(unknown), "--output", str(page), "--perfetto", str(trace)]
    assert main([*argv, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["run"], row["network"], row["workers"]) for row in rows] == [
        ("mine", "lab", WORKERS),
        ("unknown", None, WORKERS),
    ]
    assert page.exists()
    assert trace.exists()


def broken_training(kind, path):
    match kind:
        case "half of the steps":
            text = (path / "steps.json").read_text()
            (path / "steps.json").write_text(text[: len(text) // 2])
        case "other ranks":
            steps = files.read(path / "steps.json", Steps)
            files.write(path / "steps.json", replace(steps, phases=steps.phases[:2]))
        case "older account":
            text = (path / "findings.json").read_text()
            (path / "findings.json").write_text(text.replace("account/1", "account/0"))
        case "no plan":
            (path / "gradweave" / "plan.json").unlink()
        case "no length":
            results = files.read(path / "results.json", Results)
            rows = tuple(replace(row, iteration_s=0.0) for row in results.rows)
            files.write(path / "results.json", replace(results, rows=rows))
        case "stopped":
            (path / "results.json").unlink()


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        ("half of the steps", "steps.json: not complete JSON"),
        ("other ranks", "runtime 'gradweave' has 4 workers, and steps.json 2"),
        ("older account", "schema: expected 'gradweave.account/1', found 'gradweave.account/0'"),
        ("no plan", "plan.json"),
        ("no length", "runtime 'gradweave' has an iteration without length"),
        ("stopped", "has no results.json; name a folder of a run that ended"),
    ],
)
def test_a_bad_training_is_one_line(capsys, tmp_path, mine, kind, complaint):
    path = tmp_path / "run"
    shutil.copytree(mine, path)
    broken_training(kind, path)
    assert_one_line(capsys, tmp_path, [str(path)], complaint)


def test_a_stopped_save_is_no_run(tmp_path, mine):
    """What was to become a run lies in a hidden folder inside."""
    shutil.copytree(mine, tmp_path / "run" / ".x.partial")
    with pytest.raises(FormatError, match="has no results"):
        read_folders([tmp_path / "run"])


def test_many_steps_and_losses_are_drawn_thinly(mine):
    (folder,) = read_folders([mine])
    many = StepTimes("mine", (0.5, 0.5, 0.1) * 4001, folder.run.steps.stages)
    svg = step_times([many], WIDE)
    assert svg.count("aria-label") < 2 * MOST_POINTS
    assert "mine: steps 1 to 31, in the median 500.0 ms" in svg
    count = 10 * MOST_POINTS
    series = LossSeries(
        label="a",
        steps=tuple(range(count)),
        losses=tuple(map(float, range(count))),
        wall_s=tuple(map(float, range(count))),
    )
    (thin,) = thinned(Losses(series=(series,))).series
    assert len(thin.steps) == MOST_POINTS
    assert (thin.steps[0], thin.steps[-1]) == (0, count - 1)
    assert thin.losses == tuple(map(float, thin.steps))


def test_accounts_come_back_as_they_were(mine):
    (folder,) = read_folders([mine])
    account = folder.run.account
    assert files.loads(files.dumps(account), Account, origin="text") == account


def test_the_timeline_in_the_browser_is_the_data(browser, tmp_path, mine):
    (folder,) = folders = read_folders([mine])
    page = Page(browser, tmp_path / "training.html", make_page(folders))
    assert_drawn_as_measured(page, 1, folder.run)
    assert browser.get_log("browser") == []


@pytest.fixture(scope="module")
def page_of_three(mine, torchs, unknown):
    return make_page(read_folders([mine, torchs, unknown]))


@pytest.mark.parametrize("width", [pytest.param(1280, marks=pytest.mark.long), 390])
def test_trainings_fit_the_page(browser, tmp_path, page_of_three, width):
    page = Page(browser, tmp_path / "trainings.html", page_of_three)
    page.open(width=width)
    page.size(width, page.run("return document.documentElement.scrollHeight"))
    page.frames()
    assert page.run("return document.documentElement.scrollWidth") <= width
    assert page.find("#run-3 .panel .hint").text == "No timeline was measured or predicted."
    assert browser.find_elements(By.CSS_SELECTOR, "#compared .chart svg")
    assert browser.get_log("browser") == []
