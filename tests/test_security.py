"""What docs/security.md says of sources: nothing is unpickled, evaluated or given to a shell."""

import ast
from pathlib import Path

import pytest
from syntax import nodes

import gradweave

PACKAGE = Path(gradweave.__file__).parent
ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path
    for folder in (PACKAGE, ROOT / "examples", ROOT / "benchmarks")
    for path in folder.rglob("*.py")
)

# Modules that make objects, and so anything, of bytes.
UNPICKLING = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
EVALUATING = {"eval", "exec", "compile", "__import__"}
SHELLS = {("os", "system"), ("os", "popen"), ("subprocess", "getoutput")}
# torch's ways to send objects pickle them, and receivers unpickle.
SENDING_OBJECTS = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
LISTENING = {"create_server", "listen", "bind"}

# Where something is done all the same, and why.
ALLOWED = {
    "doctor/probe.py": {"listens"},  # for as long as it looks
    "lab/cluster.py": {"listens"},  # on loopback, to find a port that is free
    "benchmarks/lab_rates.py": {"listens"},  # inside of the lab
    "examples/elastic_training.py": {"sends objects"},  # a path, as torch's own examples do
    "integrations/script.py": {"runs a script"},  # as `gradweave run` is asked to
    "measure/models.py": {"imports by name"},  # the model that `gradweave record` is asked for
    "selftest/devices.py": {"imports by name"},  # what `gradweave selftest` is asked to import
    "__init__.py": {"imports by name"},  # our own modules, here and below
    "integrations/__init__.py": {"imports by name"},
    "comm/rounding/eight_bits.py": {"imports by name"},
    "sparse/vectors.py": {"imports by name"},
}


def name_of(path):
    homes = (PACKAGE / "_src", PACKAGE, ROOT)
    return str(path.relative_to(next(home for home in homes if path.is_relative_to(home))))


def imported(node):
    """The modules that a statement imports; none where it is another one."""
    match node:
        case ast.Import(names=names):
            return {alias.name for alias in names}
        case ast.ImportFrom(module=module):
            return {str(module)}
    return set()


def called(node):
    """``torch.load`` as ("torch", "load"), ``eval`` as ("", "eval")."""
    function = node.func
    if isinstance(function, ast.Attribute):
        return getattr(function.value, "id", getattr(function.value, "attr", "")), function.attr
    return "", getattr(function, "id", "")


def keyword(node, name):
    found = [one.value for one in node.keywords if one.arg == name]
    return found[0].value if found and isinstance(found[0], ast.Constant) else None


def is_unsafe_load(owner, name, node):
    return (owner, name) == ("torch", "load") and keyword(node, "weights_only") is not True


# What a call may be, by whom and what it calls.
CALLS = {
    "evaluates text": lambda owner, name, _: not owner and name in EVALUATING,
    "calls a shell": lambda owner, name, _: (owner, name) in SHELLS,
    "gives text to a shell": lambda _, __, node: any(one.arg == "shell" for one in node.keywords),
    "unpickles a file": is_unsafe_load,
    "sends objects": lambda _, name, __: name in SENDING_OBJECTS,
    "makes a name that others may take": lambda _, name, __: name == "mktemp",
    "listens": lambda _, name, __: name in LISTENING,
    "runs a script": lambda owner, _, __: owner == "runpy",
    "imports by name": lambda _, name, __: name == "import_module",
}


def complaints(path):
    """What a reader of the page should not find."""
    found = set()
    for node in nodes(path):
        found |= {f"imports {name}" for name in imported(node) if name.split(".")[0] in UNPICKLING}
        if isinstance(node, ast.Call):
            found |= {what for what, is_one in CALLS.items() if is_one(*called(node), node)}
    return found - ALLOWED.get(name_of(path), set())


def test_nothing_is_unpickled_evaluated_or_given_to_a_shell():
    assert len(SOURCES) > 200
    for path in SOURCES:
        assert not complaints(path), path


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=False)",
        "eval('1')",
        "exec('1')",
        "import os\nos.system('true')",
        "import subprocess\nsubprocess.run('true', shell=True)",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        "import tempfile\ntempfile.mktemp()",
        "import socket\nsocket.socket().bind(('', 0))",
    ],
)
def test_what_should_not_be_there_would_be_found(tmp_path, line, monkeypatch):
    monkeypatch.setattr("test_security.ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(line)
    assert complaints(path)


def test_the_page_names_what_it_promises():
    page = (ROOT / "docs" / "security.md").read_text()
    for word in ("weights_only=True", "printable", "file_name", "`.metadata`", "gradweave doctor"):
        assert word in page
