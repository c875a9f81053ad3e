import pytest


@pytest.fixture(autouse=True)
def _any_width(monkeypatch):
    """Tables are as wide as they need to be, whatever terminal the tests run in."""
    monkeypatch.delenv("COLUMNS", raising=False)
