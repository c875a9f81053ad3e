"""Whether a timeline in the browser is the one in the run's folder."""

import pytest
from selenium.webdriver.common.by import By


def assert_drawn_as_measured(page, number, run):
    """The messages of the only runtime of this run, counted from 1, where they were measured."""
    (row,) = run.results.rows
    measured = run.measured[row.runtime][0]
    sent = sorted(
        (span for span in measured.spans if span.lane == "communication"),
        key=lambda span: span.end_s,
    )
    page.show(f"#run-{number} .panel")
    messages = f"#run-{number} .panel .group:first-child .message"
    shown = page.run(
        "return [...document.querySelectorAll(arguments[0])].map("
        "(bar) => [parseFloat(bar.style.left), parseFloat(bar.style.width)]);",
        messages,
    )
    assert len(shown) == len(sent) > 0
    shown_beside = [*run.measured[row.runtime], run.predicted[row.runtime]]
    whole_s, free_s = max(timeline.iteration_s for timeline in shown_beside), 0.0
    for (left, width), span in zip(shown, sent, strict=True):
        begin_s = min(span.end_s, max(span.start_s, free_s))  # when the one before it is done
        free_s = span.end_s
        assert left == pytest.approx(100 * begin_s / whole_s, abs=1e-3)
        assert left + width == pytest.approx(100 * span.end_s / whole_s, abs=1e-3)
    longest = max(range(len(sent)), key=lambda place: shown[place][1])  # others may be a line
    page.show(messages)
    page.point_at(page.browser.find_elements(By.CSS_SELECTOR, messages)[longest])
    assert any(tensor in page.tip() for tensor in sent[longest].tensors)
