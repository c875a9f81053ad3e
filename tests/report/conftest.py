import json
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import vl_convert
from needs import missing
from report_cases import (
    drawn_trace,
    measured_network,
    write_hostile_run,
    write_losses,
    write_odd_run,
    write_run,
    write_trained_run,
)
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from gradweave._src.report.folders import read_folders
from gradweave._src.report.page import make_page


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """All that need the browser share one, in one of the processes that run tests."""
    for item in items:
        if "browser" in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group("browser"))


@pytest.fixture(scope="session", autouse=True)
def every_chart_is_drawn_once() -> Iterator[None]:
    """Of pages that tests make again and again, most charts are the same."""
    draw = vl_convert.vegalite_to_svg

    @cache
    def drawn(chart: str, vl_version: str) -> str:
        return draw(json.loads(chart), vl_version=vl_version)

    def draw_once(chart: dict[str, Any], *, vl_version: str) -> str:
        return drawn(json.dumps(chart), vl_version)

    with patch.object(vl_convert, "vegalite_to_svg", draw_once):
        yield


@pytest.fixture(scope="session")
def browser() -> Iterator[webdriver.Chrome]:
    """Without one tests are skipped, except where CI is set: there they must run."""
    driver, program = shutil.which("chromedriver"), shutil.which("chromium")
    if driver is None or program is None:
        missing("no browser: install chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with webdriver.Chrome(options=options, service=Service(driver)) as chrome:
        yield chrome


@pytest.fixture(scope="session")
def small_run(tmp_path_factory) -> Path:
    path = write_run(tmp_path_factory.mktemp("runs") / "small", drawn_trace(40), measured_network())
    write_losses(path)
    return path


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory) -> Path:
    return write_trained_run(tmp_path_factory.mktemp("runs") / "trained")


@pytest.fixture(scope="session")
def hostile_run(tmp_path_factory) -> Path:
    return write_hostile_run(tmp_path_factory.mktemp("runs") / "<img src=x onerror=alert(1)>")


@pytest.fixture(scope="session")
def large_run(tmp_path_factory) -> Path:
    """2,000 tensors under six runtimes."""
    return write_run(
        tmp_path_factory.mktemp("runs") / "large", drawn_trace(2000), measured_network()
    )


@pytest.fixture(scope="session")
def odd_run(tmp_path_factory) -> Path:
    return write_odd_run(tmp_path_factory.mktemp("runs") / "odd")


@pytest.fixture(scope="session")
def odd_page(odd_run) -> str:
    return make_page(read_folders([odd_run]))


@pytest.fixture(scope="session")
def small_page(small_run) -> str:
    return make_page(read_folders([small_run]))


@pytest.fixture(scope="session")
def trained_page(trained_run) -> str:
    return make_page(read_folders([trained_run]))


@pytest.fixture(scope="session")
def hostile_page(hostile_run) -> str:
    return make_page(read_folders([hostile_run]))


@pytest.fixture(scope="session")
def large_page(large_run) -> str:
    return make_page(read_folders([large_run]))
