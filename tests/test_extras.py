"""What works with the four core dependencies alone, and what is said where an extra is missing."""

import json
import re
import sys
import tomllib
from importlib import import_module

import pytest
from commands import run
from pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL_MODULES = ("pyroute2", "altair", "jinja2", "vl_convert", "numba")
WITHOUT = f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL_MODULES!r}))\n"


def names(requirements):
    return {re.split(r"[<>=\[ ]", requirement)[0] for requirement in requirements}


def test_the_core_needs_four_packages():
    assert names(PROJECT["dependencies"]) == {"msgspec", "numpy", "rich", "torch"}


def test_whoever_develops_has_all_extras():
    extras = PROJECT["optional-dependencies"]
    (ours,) = (text for text in extras["dev"] if text.startswith("gradweave["))
    for extra in set(extras) - {"dev", "integrations"}:  # whose environment is another
        assert extra in re.findall(r"\w+", ours)


def test_everything_but_the_extras_works_without_them():
    """Seconds, for it imports torch."""
    code = """
import json
import gradweave, gradweave.hooks, gradweave.lab, gradweave.sparse_checkpoint, gradweave.workloads
gradweave.DistributedDataParallel
trace, network = gradweave.load_trace("alexnet"), gradweave.load_network("k80-10gbe")
plan = gradweave.make_plan(trace, network, workers=4)
gradweave.simulate(trace, plan, network, workers=4)
gradweave.advise(trace, network, workers=4)
print(json.dumps(plan.planner))
"""
    done = run(sys.executable, "-c", WITHOUT + code)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == "optimal"


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["lab", "--nodes", "2", "--", "true"], "lab"),
        (["doctor", "--nodes", "2"], "lab"),
        (["report", "nowhere"], "plots"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_a_missing_extra_is_one_line(arguments, extra):
    code = f"from gradweave._src.cli import main; sys.exit(main({arguments!r}))"
    done = run(sys.executable, "-c", WITHOUT + code)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"gradweave {arguments[0]}: ")
    assert line.endswith(f"which is not installed; pip install 'gradweave[{extra}]'")


def test_loopback_needs_no_extra(tmp_path):
    """Neither here nor in the process that holds the cluster, which finds this pyroute2."""
    (tmp_path / "pyroute2.py").write_text("raise ModuleNotFoundError('pyroute2')")
    arguments = ["lab", "--nodes", "2", "--loopback", "--", "sh", "-c", "echo rank $RANK"]
    code = f"from gradweave._src.cli import main; sys.exit(main({arguments!r}))"
    done = run(sys.executable, "-c", WITHOUT + code, environment={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0] rank 0", "[rank 1] rank 1"]


@pytest.mark.parametrize("name", ["accelerate", "lightning", "pytorch_lightning", "transformers"])
def test_a_missing_library_is_one_line(monkeypatch, name):
    module = f"gradweave.integrations.{name}"
    monkeypatch.setitem(sys.modules, name, None)
    for imported in ("gradweave.integrations", module):
        monkeypatch.delitem(sys.modules, imported, raising=False)
    with pytest.raises(ModuleNotFoundError) as caught:
        import_module(module)
    assert str(caught.value) == (
        f"{module} needs {name}, which is not installed; pip install {name.replace('_', '-')}"
    )
    assert caught.value.name == name
    integrations = import_module("gradweave.integrations")
    assert name not in integrations.__all__
    assert name not in dir(integrations)
    with pytest.raises(AttributeError, match="which is not installed; pip install"):
        getattr(integrations, name)
    with pytest.raises(ModuleNotFoundError, match="which is not installed; pip install"):
        exec(f"from gradweave.integrations import {name}")  # noqa: S102
    exec("from gradweave.integrations import *")  # noqa: S102


def test_there_are_no_other_integrations():
    integrations = import_module("gradweave.integrations")
    with pytest.raises(AttributeError, match=r"'gradweave.integrations' has no attribute 'keras'"):
        integrations.keras  # noqa: B018
