"""The notebook runs from its first cell to its last, and is kept without what it printed."""

import json
from pathlib import Path

import nbclient
import nbformat
import pytest
from pages import ROOT

NOTEBOOK = ROOT / "examples" / "from_model_to_page.ipynb"


def test_it_is_kept_without_outputs():
    kept = json.loads(NOTEBOOK.read_text())
    for cell in kept["cells"]:
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None
        assert cell["metadata"] == {}
    assert set(kept["metadata"]) == {"kernelspec", "language_info"}


def shown(cell, kind="text/plain"):
    """What a cell printed, and what it showed in this form."""
    printed = [output.text for output in cell.outputs if output.output_type == "stream"]
    return "".join(printed + [o.data[kind] for o in cell.outputs if kind in o.get("data", {})])


@pytest.fixture
def executed(tmp_path):
    """Beside its script, as in examples/, so that its run does not stay there."""
    (tmp_path / "train_cluster.py").symlink_to(ROOT / "examples" / "train_cluster.py")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()
    return tmp_path, {cell.source: cell for cell in notebook.cells if cell.cell_type == "code"}


@pytest.mark.long
def test_it_runs(executed):
    """A minute: it trains on two emulated nodes."""
    folder, cells = executed
    assert "<svg" in shown(cells["timeline"], "text/html")
    (training,) = [cell for source, cell in cells.items() if "gradweave lab" in source]
    assert "[rank 0] 2 ranks, loss 2." in shown(training)
    page = Path(folder, "runs", "mine", "report.html").read_text()
    assert "conv1.weight" in page
