"""What users import: it is described, the types of what it returns are public, its examples run."""

import doctest
import inspect
import os
import pickle
import re
import sys
import typing
from importlib import import_module
from pathlib import Path

import pytest
from commands import run
from pages import ROOT
from ranks import on_processes

import gradweave

MODULES = [
    "gradweave",
    "gradweave.bsp",
    "gradweave.hooks",
    "gradweave.lab",
    "gradweave.sparse_checkpoint",
    "gradweave.types",
    "gradweave.workloads",
]
PUBLIC = {
    f"{module}.{name}": getattr(import_module(module), name)
    for module in MODULES
    for name in import_module(module).__all__
}
RETURNED = "somebody else's call returns it"
RAISED = "it is raised by others"
NO_EXAMPLE = {
    **dict.fromkeys((name for name in PUBLIC if name.startswith("gradweave.types.")), RETURNED),
    "gradweave.CollectiveError": RAISED,
    "gradweave.FormatError": RAISED,
    "gradweave.LabError": RAISED,
    "gradweave.PlanMismatch": RAISED,
    "gradweave.RequestError": RAISED,
    "gradweave.UnknownCost": RAISED,
    "gradweave.bsp.BspLoop": "its three subclasses have one each",
    "gradweave.calibrate": "it needs two ranks; tests/measure/test_calibration.py calls it",
    "gradweave.hooks.gtopk": "torch calls it; SparseState has one",
    "gradweave.hooks.topk": "torch calls it; SparseState has one",
    "gradweave.lab.Job": RETURNED,
    "gradweave.lab.JobResult": RETURNED,
    "gradweave.lab.OutputLine": RETURNED,
    "gradweave.lab.RankExit": RETURNED,
    "gradweave.lab.Rates": RETURNED,
    "gradweave.lab.SentBytes": RETURNED,
    "gradweave.sparse_checkpoint.load": "that of save has it",
    "gradweave.workloads.GroupedReplay": RETURNED,
    "gradweave.workloads.Timer": "those of Replay's modes are its own",
    "gradweave.workloads.Scale": "shipped loaders know theirs",
    "gradweave.workloads.load_cifar10": "it needs CIFAR-10's files, which are not shipped",
    "gradweave.workloads.load_idx": "fashion_mnist_subset, which is shipped, has one",
}
# Each is a promise. Whoever adds one takes another away, or says here why there must be more.
MOST_NAMES = 39


def test_the_surface_is_small():
    assert len(gradweave.__all__) <= MOST_NAMES


def test_every_module_for_users_is_known():
    """Those of integrations need their libraries, and are looked at with them."""
    package = Path(gradweave.__file__).parent
    others = (package / "_src", package / "integrations", package / "__main__.py")
    present = {
        ".".join(file.relative_to(package.parent).with_suffix("").parts)
        for file in package.rglob("*.py")
        if not any(file.is_relative_to(other) for other in others)
    }
    assert {name.removesuffix(".__init__") for name in present} == set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_the_public_names_are_what_all_says(module):
    """As an editor or a notebook sees them that completes what is being typed."""
    public = import_module(module)
    assert public.__all__ == sorted(set(public.__all__))
    assert [name for name in dir(public) if not name.startswith("_")] == public.__all__
    for name in public.__all__:
        value = getattr(public, name)
        is_list = typing.get_origin(value) is typing.Literal  # of texts, which say it all
        assert is_list or (value.__doc__ or "").strip(), name


def test_the_list_of_names_is_all_that_there_is():
    assert dir(gradweave) == gradweave.__all__


ERRORS = [value for value in PUBLIC.values() if inspect.isclass(value)]
ERRORS = [kind for kind in ERRORS if issubclass(kind, gradweave.GradweaveError)]


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_are_named_as_users_import_them(kind):
    """In tracebacks; and a rank can send them to another process."""
    assert f"{kind.__module__}.{kind.__qualname__}" == f"gradweave.{kind.__name__}"
    copied = pickle.loads(pickle.dumps(kind("what")))  # noqa: S301
    assert (type(copied), str(copied)) == (kind, "what")


CHECKED = """
import gradweave

gradweave.make_plan
gradweave.DistributedDataParallel
gradweave.lab.ClusterSpec
gradweave.make_plam
gradweave.DistributedDataParalel
gradweave.labs
"""


@pytest.mark.long
def test_type_checkers_know_the_names_and_no_others(tmp_path):
    """Seconds with mypy's cache, a minute without."""
    (tmp_path / "names.py").write_text(CHECKED)
    done = run(sys.executable, "-m", "mypy", tmp_path / "names.py", cwd=ROOT)
    wrong = [line for line in done.stdout.splitlines() if "has no attribute" in line]
    assert [line.split(":")[1] for line in wrong] == ["7", "8", "9"], done.stdout


def members(kind):
    """The methods and properties of a class that are ours, by their names."""
    for name in dir(kind):
        found = inspect.getattr_static(kind, name)
        if isinstance(found, property):
            found = found.fget
        elif isinstance(found, classmethod | staticmethod):
            found = found.__func__
        is_ours = inspect.isfunction(found) and found.__module__.startswith("gradweave")
        if is_ours and not name.startswith("_"):
            yield name, found


def callables():
    """Everything public that can be called or asked, by its whole name."""
    for name, value in PUBLIC.items():
        if inspect.isclass(value):
            yield from ((f"{name}.{member}", found) for member, found in members(value))
        elif inspect.isroutine(value):
            yield name, value


def classes(hint):
    """The classes that an annotation is made of."""
    parts = (*typing.get_args(hint), *getattr(hint, "__constraints__", ()))
    found = set().union(*map(classes, parts), set())
    return found | ({hint} if isinstance(hint, type) else set())


def is_public(kind):
    ours = kind.__module__.startswith("gradweave")
    return not ours or any(kind is value for value in PUBLIC.values())


def test_what_public_calls_return_is_public():
    for name, function in callables():
        for kind in classes(typing.get_type_hints(function).get("return")):
            assert is_public(kind), f"{name} returns {kind}"


# Whose parameters have other types, and why.
TAKES_OTHERS = {
    "gradweave.TrainingState.__init__": "hooks.SparseState, by what it needs of that alone",
    "gradweave.lab.Job.__init__": RETURNED,
    "gradweave.types.PlanningAccount.__init__": RETURNED,
}


def makers():
    """What makes values of public classes, where it is ours."""
    for name, value in PUBLIC.items():
        made_by = getattr(value, "__init__", None)
        if inspect.isclass(value) and inspect.isfunction(made_by):
            yield f"{name}.__init__", made_by


def test_what_public_calls_take_is_public():
    for name, function in (*callables(), *makers()):
        hints = typing.get_type_hints(function)
        taken = {k: v for k, v in hints.items() if k != "return"}
        others = [k for k, v in taken.items() if not all(map(is_public, classes(v)))]
        assert not others or name in TAKES_OTHERS, f"{name} takes {others}"


def test_what_public_values_hold_is_public():
    for name, value in PUBLIC.items():
        if inspect.isclass(value):
            fields = {k: v for k, v in typing.get_type_hints(value).items() if k[0] != "_"}
            for field, hint in fields.items():
                assert all(map(is_public, classes(hint))), f"{name}.{field}: {hint}"


def test_every_public_method_says_what_it_does():
    for name, function in callables():
        assert (function.__doc__ or "").strip(), name


def has_example(name):
    return ">>> " in (PUBLIC[name].__doc__ or "")


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_example_or_a_reason(name):
    assert has_example(name) != (name in NO_EXAMPLE), name


@pytest.mark.parametrize("name", [n for n, v in PUBLIC.items() if inspect.isroutine(v)])
def test_every_argument_is_described(name):
    """One or two speak for themselves in the sentence that says what the call does."""
    wanted = inspect.signature(PUBLIC[name]).parameters
    _, found, described = (PUBLIC[name].__doc__ or "").partition("Args:\n")
    if found or len(wanted) > 2:
        for parameter in wanted:
            assert f"    {parameter}:" in described, parameter


def fields_of(kind):
    """The names of what such a value holds, which nobody else describes."""
    return [name for name in typing.get_type_hints(kind) if not name.startswith("_")]


TYPES = {name: value for name, value in PUBLIC.items() if name.startswith("gradweave.types.")}


@pytest.mark.parametrize("name", [n for n, v in TYPES.items() if inspect.isclass(v)])
def test_every_field_of_what_calls_return_is_described(name):
    _, _, described = (PUBLIC[name].__doc__ or "").partition("Attributes:\n")
    for field in fields_of(PUBLIC[name]):
        assert re.search(rf"(?m)^        {field}: ", described), field


def failed_examples(group, names, folder):
    """The examples as a user types them, on one rank; each beside a small model of its own."""
    import torch  # noqa: PLC0415 in the rank

    del group
    os.chdir(folder)
    said = []
    for name in names:
        model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2))
        given = {
            "gradweave": gradweave,
            "torch": torch,
            "pathlib": import_module("pathlib"),
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "batch": torch.ones(4, 6),
        }
        test = doctest.DocTestParser().get_doctest(PUBLIC[name].__doc__, given, name, None, None)
        runner = doctest.DocTestRunner(verbose=False)
        runner.run(test, out=said.append)
    return said


def test_the_examples_run(tmp_path):
    """Seconds: several of them wrap a model."""
    names = [name for name in PUBLIC if has_example(name)]
    assert len(names) > 40
    (said,) = on_processes(1, failed_examples, names, tmp_path, scratch=tmp_path)
    assert not said, "".join(said)
