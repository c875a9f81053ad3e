"""The import arrow, and that the pure layers start fast."""

import ast
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
import torch
from commands import run
from syntax import nodes

import gradweave
from gradweave import RequestError
from gradweave._src import torch_internals

PUBLIC = Path(gradweave.__file__).parent
PACKAGE = PUBLIC / "_src"

# Left may import right, never the other way round. One layer is one set.
LAYERS: list[set[str]] = [
    {"cli"},
    {"selftest"},
    {"bench"},
    {"report"},
    {"integrations"},
    {"checkpoint", "hooks"},
    {"runtime"},
    {"measure", "sparse"},
    {"comm", "lab", "workloads"},
    {"step_hooks"},
    {"clocks"},
    {"torch_internals", "session", "device_order"},
    {"advice", "doctor"},
    {"simulation", "glossary"},
    {"planning", "collectives"},
    {"presets"},
    {"runs", "formats"},
    {"files"},
    {"remembered"},
    {"training_record", "recipe"},
    {"documents"},
    {"upgrades"},
    {"network", "phases", "plan", "results", "timeline"},
    {"trace"},
    {"costs", "travel"},
    {"compression", "checks", "notebook", "partials"},
    {"vocabulary", "in_time"},
    {"errors"},
]
WITH_TORCH = {
    "bench",
    "checkpoint",
    "clocks",
    "comm",
    "device_order",
    "hooks",
    "integrations",
    "measure",
    "runtime",
    "selftest",
    "sparse",
    "step_hooks",
    "torch_internals",
    "workloads",
}
PURE = set().union(*LAYERS) - WITH_TORCH


@cache
def modules() -> dict[str, list[Path]]:
    """Files by the part of the package they belong to."""
    parts: dict[str, list[Path]] = {}
    for file in PACKAGE.rglob("*.py"):
        part = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        parts.setdefault(part, []).append(file)
    return parts


@cache
def imported(file: Path) -> set[str]:
    """Full names of what a file imports, wherever in the file it does so."""
    names: set[str] = set()
    for node in nodes(file):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names.add(str(node.module))
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def own_parts(file: Path) -> set[str]:
    ours = "gradweave._src."
    parts = {name.removeprefix(ours).split(".")[0] for name in imported(file) if ours in name}
    return parts & set(modules())


def test_every_part_has_its_layer():
    assert set().union(*LAYERS) == set(modules()) - {"__init__"}


def test_the_page_has_the_same_arrow():
    """Down to what is beside and below ``costs``, which it names in a sentence."""
    page = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text()
    arrow = page.partition("## One arrow\n\n```\n")[2].partition("\n```")[0]
    drawn = [set(layer.strip().split(", ")) for layer in arrow.split("──▶")]
    last = next(place for place, layer in enumerate(LAYERS) if "costs" in layer)
    assert drawn == [*LAYERS[:last], {"costs"}]


def test_imports_follow_the_arrow():
    depth = {part: place for place, layer in enumerate(LAYERS) for part in layer}
    for part, sources in modules().items():
        if part == "__init__":
            continue
        for file in sources:
            for used in own_parts(file) - {part}:
                assert depth[used] > depth[part], f"{file} imports {used}"


# The wrappers and the packages that they are put together from, from left to right as above.
OF_RUNTIME = [
    {"ddp", "sharded", "bsp"},
    {"reducer", "flat"},
    {"reporting"},
    {"driving"},
    {"wrapping"},
]


def test_the_wrappers_parts_follow_an_arrow_of_their_own():
    runtime = PACKAGE / "runtime"
    depth = {part: place for place, layer in enumerate(OF_RUNTIME) for part in layer}
    files = [file for file in runtime.rglob("*.py") if file != runtime / "__init__.py"]
    part_of = {file: file.relative_to(runtime).parts[0].removesuffix(".py") for file in files}
    assert set(part_of.values()) == set(depth)
    for file, part in part_of.items():
        for name in imported(file):
            used = name.removeprefix("gradweave._src.runtime.").split(".")[0]
            if used in depth and used not in (name, part):
                assert depth[used] > depth[part], f"{file} imports {name}"


def test_what_decides_knows_no_torch():
    for part in PURE:
        for file in modules()[part]:
            assert not {name for name in imported(file) if name.split(".")[0] == "torch"}, file


def defined_privately(tree: Iterable[ast.AST]) -> set[str]:
    """Names that are defined there: by themselves, in classes, or as attributes of ``self``."""
    own: set[str] = set()
    for node in tree:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
        elif isinstance(node, ast.Assign):
            own |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own |= {node.attr} if getattr(node.value, "id", "") == "self" else set()
    return own


def classes_in(file: Path) -> list[ast.ClassDef]:
    return [node for node in nodes(file) if isinstance(node, ast.ClassDef)]


def inherited(file: Path, classes: Iterable[ast.ClassDef]) -> set[str]:
    """Names of the classes of ours that these classes of a file are derived from."""
    own: set[str] = set()
    bases = {base.id for one in classes for base in one.bases if isinstance(base, ast.Name)}
    of_base = {one.name: (file, one) for one in classes_in(file) if one.name in bases}
    for name in imported(file):
        module, _, imports = name.rpartition(".")
        home = PUBLIC.joinpath(*module.split(".")[1:]).with_suffix(".py")
        if imports in bases and module.startswith("gradweave.") and home.is_file():
            of_base |= {one.name: (home, one) for one in classes_in(home) if one.name == imports}
    for home, base in of_base.values():
        own |= defined_privately(ast.walk(base)) | inherited(home, [base])
    return own


def private_names(file: Path) -> set[str]:
    """Names with an underscore that a file uses and does not define: somebody else's."""
    own = {"_", "_src"} | defined_privately(nodes(file))
    own |= inherited(file, classes_in(file))
    used = {
        node.attr
        for node in nodes(file)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") != "argparse"
    }
    for name in imported(file):
        used |= set(name.split("."))
    for node in nodes(file):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in LOOK_UP:
            used |= {a.value for a in node.args if isinstance(a, ast.Constant)}
    used = {name for name in used if isinstance(name, str) and name.startswith("_")}
    return {name for name in used - own if not name.startswith("__")}


# Of Python's standard library: not private in spite of their names, and what only argparse knows.
OTHERS_PRIVATE = {"_exit", "_replace", "_option_string_actions"}
# Of the libraries that a file puts our wrapper into, and of nobody else's.
LIBRARIES_PRIVATE = {
    "lightning_strategies.py": {
        "_ddp_kwargs",
        "_determine_ddp_device_ids",
        "_pl_static_graph_delay_done",
    }
}
LOOK_UP = {"getattr", "hasattr", "setattr", "delattr", "attrgetter"}
HOME_OF_PRIVATE_NAMES = "torch_internals.py"


def test_torchs_private_names_have_one_home():
    for file in PACKAGE.rglob("*.py"):
        if file.name != HOME_OF_PRIVATE_NAMES:
            allowed = OTHERS_PRIVATE | LIBRARIES_PRIVATE.get(file.name, set())
            assert not private_names(file) - allowed, file
    home = PACKAGE / HOME_OF_PRIVATE_NAMES
    assert {"_check_reducer_finalized", "_version"} <= private_names(home)


LIBRARIES = {"accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "transformers"}


def test_other_peoples_libraries_are_imported_where_they_are_used():
    """Each by the file of its name, so that nobody needs one whose library is not there."""
    for file in PACKAGE.rglob("*.py"):
        found = {name.split(".")[0] for name in imported(file)} & LIBRARIES
        is_its_own = file.parent.name == "integrations"
        assert not found or (is_its_own and file.stem in found), file
    for file in (PACKAGE / "integrations").glob("*.py"):
        named = {name.split(".")[-1] for name in imported(file) if "integrations." in name}
        assert not named & LIBRARIES or file.stem == "transformers", file  # which has Accelerate


def test_a_missing_private_name_is_one_line():
    assert torch_internals.missing(torch_internals.FOR_OTHER_BUCKETS) is None
    assert torch_internals.missing(torch_internals.FOR_BACKWARD_CALLBACKS) is None
    line = f"torch {torch.__version__} has no torch.distributed.Reducer._gone, which this needs"
    assert torch_internals.missing(["distributed.Reducer._gone"]) == line
    with pytest.raises(RequestError, match="use a version of torch that gradweave supports"):
        torch_internals.require(["distributed.Reducer._gone"])


def test_the_command_line_starts_without_torch():
    code = (
        "import sys; from gradweave._src.cli import main; "
        "code = main(['plan', '--trace', 'alexnet', '--network', 'k80-10gbe', '--workers', '4']); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = run(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr


def test_what_is_inside_does_not_look_outside():
    """Of the modules for users, what is below ``_src`` needs none; the version is the exception."""
    for file in PACKAGE.rglob("*.py"):
        for name in imported(file):
            outside = name.split(".")[0] == "gradweave" and name.split(".")[1:2] != ["_src"]
            assert not outside or name in {"gradweave", "gradweave.__version__"}, (file, name)
