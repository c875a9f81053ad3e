"""Scripts by torchrun: as they are, with the lines that our page says, and unchanged with ours."""

import re
from pathlib import Path

import commands
import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
PAGE = ROOT / "docs" / "integrations.md"
# A section of the page, the script it is tried on, and what that needs.
SECTIONS = {
    "torch": ("plain_torch.py", "torch"),
    "Lightning": ("with_lightning.py", "lightning"),
    "Accelerate": ("with_accelerate.py", "accelerate"),
    "Transformers": ("with_transformers.py", "transformers"),
}
MOST_LINES = 3
# Of gloo's threads that want Python's lock when a script has ended: now and then, and also where a
# script has torch's class and nothing of ours (pytorch issue 190489).
TORCHS_ABORT = "terminate called without an active exception"
TRIES = 3


def section(title):
    """From its heading to the next."""
    (text,) = re.findall(rf"(?ms)^## {title}\n(.*?)(?=^## |\Z)", PAGE.read_text())
    return text


def changed(script, title):
    """What the section's first diff makes of the script, and how many lines that adds."""
    (diff, *_) = re.findall(r"(?ms)^```diff\n(.*?)^```", section(title))
    added = 0
    for hunk in diff.split("\n\n"):
        lines = hunk.strip("\n").split("\n")
        before = "\n".join(line[1:] for line in lines if line[0] in " -")
        after = "\n".join(line[1:] for line in lines if line[0] in " +")
        assert script.count(before) == 1, before
        script = script.replace(before, after)
        added += sum(line[0] == "+" for line in lines)
    return script, added


def torchrun(*command, folder):
    """What two ranks print, and say."""
    folder.mkdir()
    asking_nobody = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    for _ in range(TRIES):
        done = commands.torchrun(*command, cwd=folder, environment=asking_nobody)
        if TORCHS_ABORT not in done.stderr:
            break
    assert done.returncode == 0, done.stderr[-4000:]
    (losses,) = re.findall(r"(?m)^losses (.*)$", done.stdout)
    return losses, done.stderr


@pytest.mark.parametrize("title", SECTIONS)
def test_a_script_of_others(tmp_path, title):
    """Tens of seconds: two ranks import the library, three times."""
    name, library = SECTIONS[title]
    pytest.importorskip(library)
    script = SCRIPTS / name
    expected, _ = torchrun(script, folder=tmp_path / "torchs")
    text, added = changed(script.read_text(), title)
    assert 1 <= added <= MOST_LINES
    (tmp_path / name).write_text(text)
    losses, said = torchrun(tmp_path / name, folder=tmp_path / "ours")
    assert losses == expected
    assert "planning ended: " in said
    losses, said = torchrun("-m", "gradweave", "run", script, folder=tmp_path / "unchanged")
    assert losses == expected
    assert len(re.findall(r"(?m)^gradweave \(\w+\):\nMeasured: \d+ gradients", said)) == 1
