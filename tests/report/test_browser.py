"""The page in a real browser: Debian's chromium, headless, driven over WebDriver."""

import base64
import json
from itertools import pairwise, product
from pathlib import Path

import pytest
from msgspec.structs import replace
from report_cases import (
    HOSTILE,
    as_json,
    curve_as_json,
    curve_cases,
    drawn_trace,
    measured_network,
    planner_cases,
    write_run,
)
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from gradweave._src.compression import ROUNDING_NAMES, Compression
from gradweave._src.costs import Line
from gradweave._src.planning import find_planner, make_plan
from gradweave._src.planning.optimal import optimal
from gradweave._src.report.folders import read_folders
from gradweave._src.report.page import make_page
from gradweave._src.report.pricing import price_of
from gradweave._src.simulation import simulate

pytestmark = pytest.mark.xdist_group("browser")  # some tests ask for it by a name that is given
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
WIDTHS = (1280, 390)
PICTURES_IN_SHORT = {("small", 390, "light"), ("trained", 1280, "light")}
# A busy machine is no failure, a page that hangs is one.
READY_WITHIN_S = 30.0


class Page:
    """A page in the browser, after its scripts have run."""

    def __init__(self, browser: webdriver.Chrome, path: Path, text: str) -> None:
        self.browser, self.url = browser, path.as_uri()
        path.write_text(text, encoding="utf-8")
        self.open(width=1280)

    def open(
        self, *, width: int, height: int = 900, theme: str = "light", media: str = "screen"
    ) -> None:
        for kind in ("browser", "performance"):
            self.browser.get_log(kind)
        self.size(width, height)
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.browser.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"media": media, "features": features}
        )
        self.browser.get(self.url)
        WebDriverWait(self.browser, READY_WITHIN_S).until(
            lambda _: self.run("return document.documentElement.dataset.ready") == "true"
        )

    def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def run(self, script: str, *arguments: object):
        return self.browser.execute_script(script, *arguments)

    def find(self, selector: str):
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def show(self, selector: str):
        """In the middle of the window, and drawn."""
        element = self.find(selector)
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        self.frames()
        return element

    def frames(self) -> None:
        self.browser.execute_async_script(
            "const done = arguments[0];"
            "requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 0)));"
        )

    def press(self, *keys: str) -> None:
        ActionChains(self.browser).send_keys(*keys).perform()
        self.frames()

    def point_at(self, element) -> None:
        ActionChains(self.browser).move_to_element(element).perform()
        self.frames()

    def whole(self, width: int) -> None:
        """All of it in the window, so that everything is drawn."""
        for _ in range(2):  # what is drawn makes it longer
            self.size(width, self.run("return document.documentElement.scrollHeight"))
            self.frames()

    def keep(self, name: str) -> None:
        """A picture of the window, for people."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        shot = self.browser.execute_cdp_cmd(
            "Page.captureScreenshot", {"captureBeyondViewport": True}
        )
        (SCREENSHOTS / name).write_bytes(base64.b64decode(shot["data"]))

    def tip(self) -> str:
        return self.run("return tip.hidden ? '' : tip.innerText")

    def requests(self) -> list[str]:
        entries = self.browser.get_log("performance")
        messages = [json.loads(entry["message"])["message"] for entry in entries]
        return [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pages")


@pytest.fixture
def small(browser, folder, small_page) -> Page:
    return Page(browser, folder / "small.html", small_page)


@pytest.fixture
def trained(browser, folder, trained_page) -> Page:
    return Page(browser, folder / "trained.html", trained_page)


@pytest.fixture
def hostile(browser, folder, hostile_page) -> Page:
    return Page(browser, folder / "hostile.html", hostile_page)


@pytest.fixture
def large(browser, folder, large_page) -> Page:
    return Page(browser, folder / "large.html", large_page)


def test_it_loads_itself_and_nothing_else(small):
    small.whole(1280)
    assert len(small.browser.find_elements(By.CSS_SELECTOR, ".panel .canvas")) == 6
    assert small.browser.get_log("browser") == []
    assert set(small.requests()) <= {small.url, "data:,"}


def test_pointing_at_a_message_shows_its_tensors(small, small_run):
    (run,) = read_folders([small_run])
    first = run.run.plans["optimal"].buckets[0].tensors[0]
    small.show(".panel:nth-of-type(6)")
    message = small.show(".panel:last-of-type .message")
    small.point_at(message)
    assert "Message 1: all-reduce 1 by native" in small.tip()
    assert first in small.tip()
    assert " ms" in small.tip()


def test_the_keyboard_shows_the_same(small, small_run):
    (run,) = read_folders([small_run])
    first = run.run.plans["optimal"].buckets[0].tensors[0]
    small.show(".panel:last-of-type")
    small.show(".panel:last-of-type .zoom button:last-child").click()
    small.press(Keys.TAB)
    assert "Forward pass" in small.tip()
    small.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert first in small.tip()
    by_keyboard = small.tip()
    small.point_at(small.browser.switch_to.active_element)
    assert small.tip() == by_keyboard
    small.press(Keys.ENTER)
    names = small.run("return document.querySelector('dialog').innerText")
    assert all(name in names for name in run.run.plans["optimal"].buckets[0].tensors)
    small.press(Keys.ESCAPE)
    assert small.run("return document.querySelector('dialog').open") is False


@pytest.mark.parametrize("picture", [".strip .bucket", ".chart.wide [tabindex='0']"])
def test_charts_and_plans_can_be_reached_too(small, picture):
    small.show(".plans .strip")
    part = small.show(picture)
    small.point_at(part)
    pointed = small.tip()
    assert pointed
    small.run("arguments[0].focus()", part)
    assert small.tip() == pointed
    small.press(Keys.ARROW_RIGHT)
    assert small.tip() not in {"", pointed}


WIDTHS_OF_TIMELINES = (
    "return [...document.querySelectorAll('.panel .canvas')].map((c) => c.clientWidth)"
)
LEFT_OF_TIMELINES = (
    "return [...document.querySelectorAll('.panel .scroll')].map((s) => s.scrollLeft)"
)


def test_zooming_one_timeline_zooms_all_of_the_run(small):
    small.whole(1280)
    before = small.run(WIDTHS_OF_TIMELINES)
    assert len(before) == 6
    small.show(".panel .zoom button:nth-child(2)").click()
    assert small.run(WIDTHS_OF_TIMELINES) == [2 * width for width in before]
    small.press(Keys.TAB, Keys.TAB, "+")
    assert small.run(WIDTHS_OF_TIMELINES) == [4 * width for width in before]
    small.run("document.querySelector('.panel .scroll').scrollLeft = 500")
    small.frames()
    assert small.run(LEFT_OF_TIMELINES) == pytest.approx([500] * 6, abs=1)
    small.press("0")
    assert small.run(WIDTHS_OF_TIMELINES) == before


AT_POINTER = """
const box = document.querySelector('.panel .canvas').getBoundingClientRect();
return (arguments[0] - box.left) / box.width;
"""
WHEEL = """
const scroll = document.querySelector('.panel .scroll');
const x = arguments[0];
scroll.dispatchEvent(new WheelEvent(
  'wheel', {deltaY: -1, ctrlKey: true, clientX: x, cancelable: true, bubbles: true}));
"""


def test_what_is_under_the_pointer_stays_there(small):
    small.show(".panel")
    x = 420
    before = small.run(AT_POINTER, x)
    for _ in range(6):
        small.run(WHEEL, x)
        small.frames()
    assert small.run(WIDTHS_OF_TIMELINES)[0] > 3 * 1000
    assert small.run(AT_POINTER, x) == pytest.approx(before, abs=0.003)


DRAWN_IN_VIEW = """
const panel = document.querySelectorAll('.panel')[arguments[0]];
const view = panel.querySelector('.scroll').getBoundingClientRect();
return [...panel.querySelectorAll('.span')].filter((bar) => {
  const box = bar.getBoundingClientRect();
  return box.right > view.left + 1 && box.left < view.right - 1;
}).length;
"""


@pytest.mark.long
def test_nobody_zooms_into_emptiness(browser, folder, tmp_path):
    """Beside a slow runtime a fast one fills the left of a common scale alone."""
    network = measured_network()
    runtimes = {"optimal": "optimal", "naive": "naive", "single": "single"}
    path = write_run(tmp_path / "run", drawn_trace(40), network, runtimes=runtimes)
    page = Page(browser, folder / "emptiness.html", make_page(read_folders([path])))
    page.whole(1280)
    alike = page.find("[name=alike]")
    if not alike.is_selected():
        alike.click()
    for _ in range(5):
        page.show(".panel .zoom button:nth-child(2)").click()
        page.frames()
        assert page.run(DRAWN_IN_VIEW, 0) > 0
    page.run("document.querySelector('.panel .scroll').scrollLeft = 1e9")
    page.frames()
    assert page.run(DRAWN_IN_VIEW, 0) == 0, "the case shows nothing"
    page.find(".panel .zoom button:nth-child(2)").click()
    page.frames()
    assert page.run(DRAWN_IN_VIEW, 0) > 0


BEGINS_OF_BACKWARD = """
return [...document.querySelectorAll('.panel .block.backward')].map((block) => block.style.left);
"""


@pytest.mark.long
def test_own_scales_where_one_would_squeeze_the_others(browser, folder, tmp_path):
    network = measured_network()
    dear = tuple(
        replace(entry, cost=Line(startup_s=0.05, s_per_byte=0.0)) for entry in network.costs
    )
    runtimes = {"optimal": "optimal", "single": "single", "wfbp": "wfbp"}
    for name, costs, is_alike in (("even", network.costs, True), ("uneven", dear, False)):
        path = write_run(
            tmp_path / name,
            drawn_trace(80),
            replace(network, costs=costs),
            runtimes=runtimes,
        )
        runs = read_folders([path])
        page = Page(browser, folder / f"{name}.html", make_page(runs))
        page.whole(1280)
        assert page.find("[name=alike]").is_selected() == is_alike
        before = page.run(BEGINS_OF_BACKWARD)
        page.find("[name=alike]").click()
        page.frames()
        assert page.run(BEGINS_OF_BACKWARD) != before


def test_each_rank_has_a_strip(small, small_run):
    (run,) = read_folders([small_run])
    small.show(".panel")
    rows = small.browser.find_elements(By.CSS_SELECTOR, ".panel:first-of-type .row.rank")
    assert [row.text for row in rows] == ["rank 0", "rank 1"]
    first, late = run.run.measured["torch-ddp"]
    usual = (first.compute_s + late.compute_s) / 2  # to see that it is not even near
    assert late.compute_s > 1.1 * usual
    part = small.show(".panel:first-of-type .row.rank:last-child .whole")
    small.point_at(part)
    assert "Rank 1" in small.tip()
    assert "1.20 times the median rank's" in small.tip()
    small.run("arguments[0].focus()", part)
    assert "1.20 times the median rank's" in small.tip()


def test_a_run_that_lacks_timelines_is_drawn_too(browser, folder, trained_run):
    (whole,) = read_folders([trained_run])
    run = replace(
        whole.run,
        measured={"gradweave": whole.run.measured["gradweave"]},
        predicted={"torch-ddp": whole.run.predicted["torch-ddp"]},
        plans={"torch-ddp": whole.run.plans["torch-ddp"]},
    )
    page = Page(browser, folder / "bare.html", make_page([replace(whole, run=run)]))
    page.whole(1280)
    assert len(browser.find_elements(By.CSS_SELECTOR, ".panel .canvas")) == 2
    assert len(browser.find_elements(By.CSS_SELECTOR, ".panel .message")) > 0
    assert browser.get_log("browser") == []


SLIDERS = {
    "workers": [Keys.END],
    "bandwidth": [Keys.PAGE_UP, Keys.PAGE_UP, Keys.ARROW_RIGHT],
    "startup": [Keys.PAGE_DOWN, Keys.ARROW_LEFT],
    "speed": [Keys.PAGE_UP],
}


def shown_plan(page: Page) -> tuple[list[int], float]:
    data = page.run("return {...document.getElementById('what-if').dataset}")
    return json.loads(data["plan"]), float(data["iteration"])


def start_value(page: Page, name: str) -> float:
    """What a slider stands for in the run, with the three digits that it shows."""
    return float(page.run(f"return asking.scales.{name}.start"))


def python_plan(page: Page, run, planner: str = "optimal") -> tuple[list[int], float]:
    """What Python computes with the values that the page shows."""
    workers, bandwidth, startup_ms, speed = (
        float(page.find(f"#what-if-{name}").get_attribute("data-value")) for name in SLIDERS
    )
    price = price_of(run.network, 4).among(
        int(workers),
        startups=startup_ms / start_value(page, "startup"),
        per_byte=start_value(page, "bandwidth") / bandwidth,
    )
    network = price.network("asked")
    faster = tuple(
        replace(t, ready_s=t.ready_s / speed, forward_s=t.forward_s / speed)
        for t in run.trace.tensors
    )
    trace = replace(run.trace, tensors=faster)
    wire = page.find("#what-if [name=wire]").get_property("value")
    plan = make_plan(
        trace,
        network,
        workers=int(workers),
        planner=planner,
        collective=price.collective,
        compression=Compression(method=wire) if wire in ROUNDING_NAMES else None,
    )
    return list(plan.lengths), simulate(trace, plan, network, workers=int(workers)).iteration_s


def test_what_if_begins_with_the_predictions_of_the_run(small, small_run):
    (run,) = read_folders([small_run])
    small.show("#what-if .controls")
    table = small.run(
        "return [...document.querySelectorAll('.comparison tr')].map((row) =>"
        " [row.children[0].innerText, row.children[2].innerText])"
    )
    runtimes = {"ddp": "torch-ddp"}
    for planner, shown in table:
        predicted = run.run.predicted[runtimes.get(planner, planner)]
        assert shown == f"{1e3 * predicted.iteration_s:,.1f} ms"


def test_numbers_below_each_other_have_equally_many_digits(small):
    small.show("#what-if .controls")
    columns = ["measured", "predicted", "error", "exposed", "speed-up", "a step, ms"]
    cells_of = [f"[data-name='{name}']" for name in columns]
    for cells in ("#what-if .comparison td:nth-child(3)", *cells_of):
        texts = [cell.text for cell in small.browser.find_elements(By.CSS_SELECTOR, cells)]
        assert len(texts) >= 5
        assert len({len(text.partition(".")[2]) for text in texts}) == 1, texts


@pytest.mark.parametrize(
    "moved",
    [
        ["workers"],
        *(pytest.param([one], marks=pytest.mark.long) for one in ("bandwidth", "startup", "speed")),
        [*SLIDERS],
    ],
)
def test_a_slider_moves_the_plan_to_what_python_computes(small, small_run, moved):
    (run,) = read_folders([small_run])
    small.show("#what-if .controls")
    before = shown_plan(small)
    assert before[0] == python_plan(small, run.run)[0]
    for name in moved:
        small.show(f"#what-if-{name}")
        small.run("arguments[0].focus()", small.find(f"#what-if-{name}"))
        small.press(*SLIDERS[name])
    lengths, iteration_s = python_plan(small, run.run)
    assert shown_plan(small) == (lengths, pytest.approx(iteration_s))
    assert shown_plan(small) != before
    note = small.find("#what-if .caption").text
    assert f"{len(lengths)} message" in note
    small.find("#what-if [name=reset]").click()
    assert shown_plan(small) == before


def test_gradients_can_be_rounded_on_the_wire_by_keyboard(small, small_run):
    (run,) = read_folders([small_run])
    small.show("#what-if .controls")
    before = shown_plan(small)
    small.run("document.querySelector('#what-if-speed').focus()")
    small.press(Keys.PAGE_UP, Keys.TAB)  # so fast that the network decides
    for wire in ("bf16", "int8"):
        small.press(Keys.ARROW_DOWN)
        assert small.find("#what-if [name=wire]").get_property("value") == wire
        lengths, iteration_s = python_plan(small, run.run)
        assert shown_plan(small) == (lengths, pytest.approx(iteration_s))
        small.point_at(small.show("#what-if .message"))
        assert f"{wire} all-reduce by native" in small.tip()
    small.find("#what-if [name=reset]").click()
    assert shown_plan(small) == before


def test_other_planners_can_be_looked_at(small, small_run):
    (run,) = read_folders([small_run])
    for planner in ("wfbp", "single", "ddp", "mgwfbp"):
        Select(small.find("#what-if [name=planner]")).select_by_visible_text(planner)
        small.frames()
        lengths, iteration_s = python_plan(small, run.run, planner)
        assert shown_plan(small) == (lengths, pytest.approx(iteration_s))


def test_the_planner_agrees_with_python_here_too(small):
    cases = planner_cases(500, seed=5, most_tensors=40)
    found = small.run(
        "return arguments[0].map((c) => [optimalForLine(c.trace, c.line, c.tolerance),"
        " PLANNERS.mgwfbp(c.trace, c.line)]);",
        [as_json(case) for case in cases],
    )
    mgwfbp = find_planner("mgwfbp")
    assert found == [
        [optimal(trace, line, tolerance=tolerance), mgwfbp(trace, line)]
        for trace, line, tolerance in cases
    ]
    measured = curve_cases(300, seed=8, most_tensors=40)
    found = small.run(
        "return arguments[0].map((c) => PLANNERS.optimal(c.trace, curve(c.bytes, c.seconds)));",
        [curve_as_json(case) for case in measured],
    )
    assert found == [optimal(trace, curve) for trace, curve in measured]


def test_hostile_names_stay_text(hostile):
    hostile.show(".panel:last-of-type")
    message = hostile.show(".panel:last-of-type .message")
    hostile.point_at(message)
    assert f"{HOSTILE} 0" in hostile.tip()
    for strip in (".plans .bucket", "#what-if .bucket"):
        hostile.show(".plans .strip")
        hostile.point_at(hostile.show(strip))
        assert HOSTILE in hostile.tip()
    assert "owned" not in hostile.browser.title.removeprefix("Gradweave: ")
    assert hostile.browser.find_elements(By.TAG_NAME, "img") == []
    assert hostile.browser.get_log("browser") == []
    assert set(hostile.requests()) <= {hostile.url, "data:,"}


def test_odd_runs_are_drawn_too(browser, folder, odd_page):
    odd = Page(browser, folder / "odd.html", odd_page)
    odd.show(".panel:last-of-type")
    odd.point_at(odd.show(".panel:last-of-type .message"))
    assert "by gtopk:0.001" in odd.tip()
    odd.show(".plans .strip")
    assert browser.get_log("browser") == []


def test_forward_is_drawn_in_parts_where_it_waits(browser, folder, tmp_path):
    trace = drawn_trace(20).rescaled(parameter_scale=20)
    path = write_run(tmp_path / "run", trace, measured_network(), runtimes={"sharded": "wfbp"})
    runs = read_folders([path])
    page = Page(browser, folder / "sharded.html", make_page(runs))
    page.show(".panel")
    forward = [s for s in runs[0].run.predicted["sharded"].spans if s.lane == "forward"]
    waits = sum(after.start_s > before.end_s for before, after in pairwise(forward))
    assert waits > 0
    measured_parts = 1
    parts = browser.find_elements(By.CSS_SELECTOR, ".panel .block.forward")
    assert len(parts) == measured_parts + waits + 1
    assert browser.get_log("browser") == []


MOVED = """
const slider = document.getElementById('what-if-startup');
slider.value = 0;
slider.dispatchEvent(new Event('input'));
"""


@pytest.mark.long
def test_a_large_model_opens_and_responds(large):
    """2,000 tensors under six runtimes: a page that hangs would give no answer."""
    large.show("#what-if .controls")
    before = shown_plan(large)
    large.run(MOVED)
    large.frames()
    assert shown_plan(large) != before
    assert large.browser.get_log("browser") == []


def is_dark(page: Page) -> bool:
    return page.run("return getComputedStyle(document.body).color.match(/\\d+/)[0] > 128")


CUT = """
return [...document.querySelectorAll('.table, .chart, .legend, .controls, .caption, .panel-head')]
  .filter((one) => one.offsetParent !== null && one.scrollWidth > one.clientWidth + 1)
  .map((one) => one.className + ': ' + one.innerText.slice(0, 60));
"""
COLLIDING = """
const found = [];
const apart = (marks) => {
  const named = marks.filter((mark) => mark.textContent.trim() !== '');
  const boxes = named.map((mark) => [mark.getBoundingClientRect(), mark]);
  for (const [a, one] of boxes) {
    for (const [b, other] of boxes) {
      const meets = a.left < b.right - 0.5 && b.left < a.right - 0.5
        && a.top < b.bottom - 2.5 && b.top < a.bottom - 2.5;
      if (one !== other && a.width > 0 && meets) {
        found.push(one.textContent + ' | ' + other.textContent);
      }
    }
  }
};
for (const axis of document.querySelectorAll('.axis')) {
  apart([...axis.querySelectorAll('.tick')]);
}
for (const chart of document.querySelectorAll('.chart svg')) {
  apart([...chart.querySelectorAll('.role-axis-label text, .role-legend-label text')]);
}
return found;
"""


@pytest.mark.parametrize(
    ("name", "width", "theme"),
    [
        pytest.param(*one, marks=[] if one in PICTURES_IN_SHORT else pytest.mark.long)
        for one in product(["small", "trained"], WIDTHS, ["light", "dark"])
    ],
)
def test_it_fits_and_is_kept_as_a_picture(request, name, width, theme):
    page = request.getfixturevalue(name)
    page.open(width=width, theme=theme)
    page.whole(width)
    assert page.run("return document.documentElement.scrollWidth") <= width
    assert page.run(CUT) == []
    assert page.run(COLLIDING) == []
    assert is_dark(page) == (theme == "dark")
    page.keep(f"report-{name}-{width}-{theme}.png")


ON_PAPER = """
const panels = [...document.querySelectorAll('.panel')];
const hidden = [...document.querySelectorAll('.scroll, .table')]
  .filter((one) => getComputedStyle(one).overflowX !== 'visible');
return {
  panels: panels.length,
  drawn: panels.filter((panel) => panel.querySelectorAll('.message').length > 0).length,
  strips: [...document.querySelectorAll('.strip')].filter((s) => s.querySelector('.bucket')).length,
  hidden: hidden.length,
  widths: [...new Set([...document.querySelectorAll('.panel')].map((panel) =>
    Math.round(panel.clientWidth - panel.querySelector('.canvas').clientWidth)))],
};
"""


@pytest.mark.parametrize("name", ["small", pytest.param("trained", marks=pytest.mark.long)])
def test_on_paper_everything_is_drawn_and_light(request, name):
    """Also what nobody has scrolled to, and what was zoomed."""
    page = request.getfixturevalue(name)
    page.open(width=1280, theme="dark", height=400)
    page.find("[name=theme]").click()
    page.find("[name=theme]").click()  # dark by the switch, too
    page.show(".panel")
    page.show(".panel .zoom button:nth-child(2)").click()
    printed = page.browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    pdf = base64.b64decode(printed["data"])
    assert pdf.startswith(b"%PDF")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    (SCREENSHOTS / f"report-{name}-printed.pdf").write_bytes(pdf)
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    page.size(794, 1123)  # A4 in pixels
    page.frames()
    found = page.run(ON_PAPER)
    assert found["drawn"] == found["panels"] > 0
    assert found["strips"] == found["panels"] + 1
    assert found["hidden"] == 0
    assert found["widths"] == [0]
    assert not is_dark(page)
    page.whole(794)
    assert page.run(COLLIDING) == []
    page.keep(f"report-{name}-printed.png")
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "screen"})


def test_light_and_dark_can_be_switched(small):
    colour = "return getComputedStyle(document.body).backgroundColor"
    before = small.run(colour)
    small.find("[name=theme]").click()
    assert small.run(colour) != before
    small.find("[name=theme]").click()
    assert small.run(colour) == before
