"""README's commands, in their order, as somebody would paste them after `make demo`."""

import re

import pytest
from commands import run
from pages import ROOT, blocks, make_checkout, section

README = (ROOT / "README.md").read_text()
(COMMANDS,) = (block.text for block in blocks(section(README, "From the command line")))


def test_the_environment_comes_first_and_torch_is_named():
    assert COMMANDS.startswith("source .venv/bin/activate\n")
    (needed,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert f"torch [{needed} or newer]" in section(README, "Install")


@pytest.mark.long
def test_the_commands_run_in_their_order(tmp_path):
    """Minutes: some calibrate, some train, all start anew."""
    checkout = make_checkout(tmp_path)
    done = run("bash", "-exc", COMMANDS, cwd=checkout, most_s=1200)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    for name in ("trace.json", "network.json", "plan.json", "runs/mine/results.json"):
        assert (checkout / name).is_file()
    page = (checkout / "report.html").read_text()
    assert "resnet50" in page  # of `bench training`
    assert "SmallCNN" in done.stdout  # of `record`
