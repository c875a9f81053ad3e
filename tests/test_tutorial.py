"""docs/tutorial.md as it stands, from its first command to its last."""

import pytest
from commands import run
from pages import ROOT, blocks, make_checkout

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
FILES = {block.title: block.text for block in blocks(PAGE) if block.language == "python"}
COMMANDS = [
    block.text
    for block in blocks(PAGE)
    if block.language == "sh" and not block.title.startswith(("not run: ", "run in "))
]


def test_every_file_is_used():
    assert FILES
    for name in FILES:
        assert name in "".join(COMMANDS)


def test_what_was_printed_is_shown():
    (shown,) = [block.text for block in blocks(PAGE) if "\nMeasured: " in block.text]
    for line in ("Tried: ", "Chosen: ", "A step is ", "A step waits for ", "Planning took "):
        assert f"\n{line}" in shown


@pytest.mark.long
def test_the_commands_run_in_their_order(tmp_path):
    """Minutes: four trainings and a calibration, on clusters of two nodes."""
    checkout = make_checkout(tmp_path)
    for name, text in FILES.items():
        (checkout / name).write_text(text)
    done = run("bash", "-exc", "\n".join(COMMANDS), cwd=checkout, most_s=1200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert done.stdout.count("[rank 0] loss ") == 4
    # The last run may still be planning again when it ends, and has nothing to tell then.
    assert done.stdout.count("[rank 0] Measured: ") >= 2
    assert "remembered from an earlier run" in done.stdout or "planning again" in done.stderr
    page = (checkout / "report.html").read_text()
    assert "Trainings side by side" in page
    assert (checkout / "network.json").is_file()
