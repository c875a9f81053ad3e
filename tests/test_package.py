"""The package: what is in it, and that it works where nothing else of the repository is."""

import re
import runpy
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import commands
import pytest

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")

TRAINING = """
import torch, torch.distributed as dist
import gradweave
from gradweave import DistributedDataParallel, GTopK, TrainingState

dist.init_process_group("gloo")

def train():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64) for _ in range(6)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    steps = 0
    while steps < 300 and model.findings().stage != "settled":  # on all ranks after the same step
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        steps += 1
    TrainingState(model, optimizer).save("checkpoint")
    print(gradweave.__file__, model.findings().stage, flush=True)

train()
dist.destroy_process_group()
"""


def test_the_readmes_links_survive_outside():
    """Each leads to a file that is there, and names the repository."""
    made = runpy.run_path(str(ROOT / "setup.py"), run_name="read")
    text = (ROOT / "README.md").read_text()
    before, after = LINK.findall(text), LINK.findall(made["with_absolute_links"](text))
    repository = made["PROJECT"]["urls"]["Repository"]
    relative = [link for link in before if not re.match(r"\w+:|#", link)]
    assert len(relative) > 10
    for link in relative:
        assert (ROOT / link.partition("#")[0]).exists(), link
    assert all(re.match(r"https?:|#", link) for link in after)
    assert f"{repository}/raw/HEAD/docs/images/before-after.svg" in after
    assert f"{repository}/blob/HEAD/docs/precision.md#what-it-gains" in after


def run(*command, cwd):
    """Outside of this checkout, but for what ``cwd`` says."""
    done = commands.run(*command, cwd=cwd, environment={"PYTHONPATH": ""})
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.long
def test_it_is_used_from_an_empty_environment(tmp_path):
    """A minute: it is built, checked, installed and trained with.

    Of this environment the new one sees everything but what is installed by links to this checkout:
    torch and the rest are not installed again.
    """
    dist = tmp_path / "dist"
    made = run("make", "package", f"DIST={dist}", f"PYTHON={sys.executable}", cwd=ROOT)
    assert made.count("PASSED") == 2
    (wheel,) = dist.glob("gradweave-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src" / "gradweave"
    sources = {f for f in package.rglob("*") if f.is_file() and f.parent.name != "__pycache__"}
    assert {str(file.relative_to(package.parent)) for file in sources} <= names
    assert not [name for name in names if not name.startswith("gradweave")]

    venv.create(tmp_path / "empty", with_pip=True)
    binaries = tmp_path / "empty" / "bin"
    python = str(binaries / "python")
    installed = Path(
        run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path).strip()
    )
    (installed / "torch_of_the_tests.pth").write_text(sysconfig.get_path("purelib"))
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", str(wheel), cwd=tmp_path)

    gradweave = str(binaries / "gradweave")
    asked = ("--trace", "alexnet", "--network", "k80-10gbe", "--workers", "4")
    planned = run(gradweave, "plan", *asked, cwd=tmp_path)
    assert "optimal" in planned
    (tmp_path / "train.py").write_text(TRAINING)
    torchrun = (python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    trained = run(*torchrun, "train.py", cwd=tmp_path)
    assert trained.count(f"{installed / 'gradweave' / '__init__.py'} settled") == 2
    assert (tmp_path / "checkpoint" / ".metadata").exists()
    shown = "from importlib.metadata import metadata; print(metadata('gradweave'))"
    metadata = run(python, "-c", shown, cwd=tmp_path)
    assert "Author: The Gradweave authors" in metadata
    assert "](docs/" not in metadata
