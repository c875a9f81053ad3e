"""`gradweave demo`, made small: every part of it, in seconds."""

import pytest
from msgspec.structs import replace

from gradweave.cli import demo, main
from gradweave.lab import ClusterSpec


@pytest.mark.long
def test_the_demo(capsys, monkeypatch, tmp_path):
    """Half a minute: three jobs import torch, and the wrapper calibrates for real."""
    monkeypatch.setattr(demo, "SPEC", ClusterSpec(nodes=2, rate="1gbit"))
    monkeypatch.setattr(demo, "REAL", replace(demo.REAL, least_steps=4, batch_size=2))
    monkeypatch.setattr(demo, "RUNTIMES", {"torch-ddp": "torch's", "optimal": "ours"})
    monkeypatch.setattr(demo, "TRACE", "resnet20")
    monkeypatch.setattr(demo, "FORWARD_S", 0.01)
    monkeypatch.setattr(demo, "BACKWARD_S", 0.02)
    assert main(["demo", "--output", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "The largest difference in" in said
    assert "speed-up over torch-ddp" in said
    page = (tmp_path / "report.html").read_text()
    assert "optimal" in page
    assert "Gradweave's wrapper" in page
