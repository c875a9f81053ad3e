"""Whether others keep the machine busy, from what the kernel counts."""

import pytest

from gradweave._src.cli import main
from gradweave._src.measure import neighbours
from gradweave._src.measure.neighbours import Neighbours, Reading, busy_note


def note(all_s, own_s, *, seconds=10.0, cores=2):
    began = Reading(100.0, 5000.0, 3.0)
    ended = Reading(100.0 + seconds, 5000.0 + all_s, 3.0 + own_s)
    return busy_note(began, ended, cores=cores)


def test_what_we_compute_ourselves_is_nobodys_noise():
    assert note(20.0, 20.0) is None
    assert note(20.0, 18.5) is None  # others took less than a tenth of both cores


def test_others_are_told_of():
    assert note(20.0, 10.0) == (
        "other processes kept 1.0 of 2 cores busy meanwhile, so times may be too long; "
        "measure again when they are idle"
    )
    assert note(20.0, 10.0, cores=16) is None


def test_a_moment_says_nothing():
    assert note(1.0, 0.0, seconds=0.4) is None


def test_where_the_kernel_does_not_tell(monkeypatch, tmp_path):
    monkeypatch.setattr(neighbours, "STAT", tmp_path / "none")
    assert Neighbours().note() is None


def test_the_kernels_columns(monkeypatch, tmp_path):
    """user nice system idle iowait irq softirq steal: idle and iowait are not busy."""
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 10 20 99999 5000 3 4 7 0 0\ncpu0 1 2 3\n")
    monkeypatch.setattr(neighbours, "STAT", stat)
    monkeypatch.setattr("os.sysconf", lambda _: 100)
    assert neighbours._reading().all_s == pytest.approx(1.44)


def test_record_tells_of_them(capsys, monkeypatch, tmp_path):
    readings = iter([Reading(0.0, 0.0, 0.0), Reading(10.0, 20.0, 1.0)])
    monkeypatch.setattr(neighbours, "_reading", lambda: next(readings))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    source = "import torch\ndef make(): return torch.nn.Linear(3, 2)\n"
    (tmp_path / "among_neighbours.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    argv = ["record", "--model", "among_neighbours:make", "--input", "2x3", "--iterations", "2"]
    assert main(argv) == 0
    assert "note: other processes kept 1.9 of 2 cores busy" in capsys.readouterr().err
