"""The Python of docs/lab.md and of docs/debug-a-hang.md, in clusters of their own."""

import pytest
from pages import ROOT, blocks

SOURCES = [
    block.text
    for page in ("lab.md", "debug-a-hang.md")
    for block in blocks((ROOT / "docs" / page).read_text())
    if block.language == "python" and not block.title.startswith("not run: ")
]


def test_there_is_some():
    assert len(SOURCES) == 2


@pytest.mark.parametrize("source", SOURCES)
def test_it_runs(namespaces, tmp_path, monkeypatch, capsys, source):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import time; time.sleep(2)\n")
    exec(source, {})  # noqa: S102 our own page
    assert capsys.readouterr().out
