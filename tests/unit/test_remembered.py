"""What a plan is remembered under: everything it depends on, and nothing of this machine."""

from pathlib import Path
from threading import Barrier, Thread

import msgspec
import pytest
from msgspec.structs import replace

from gradweave import FormatError, PlanMismatch, Recipe, RequestError
from gradweave._src import files
from gradweave._src.plan import Bucket, Plan
from gradweave._src.remembered import ParameterKey, PlanKey, Remembered, numbered

GOLDEN = Path(__file__).parents[1] / "golden"
GOLDEN_FILE = GOLDEN / "remembered-3.json"


@pytest.fixture(scope="module")
def remembered():
    return files.read(GOLDEN_FILE, Remembered)


OTHERS = {
    "parameters": [
        (ParameterKey(name="a", shape=(5, 50), dtype="torch.float32"),),
        lambda parameters: parameters[::-1],
        lambda parameters: (replace(parameters[0], name="d"), *parameters[1:]),
        lambda parameters: (replace(parameters[0], shape=(50, 5)), *parameters[1:]),
        lambda parameters: (replace(parameters[0], dtype="torch.float64"), *parameters[1:]),
    ],
    "hosts": [(0, 0)],
    "devices": [("cpu", "NVIDIA H100")],
    "backend": ["nccl"],
    "passes": ["both"],
    "planner": ["wfbp"],
    "collective": ["ring"],
    "compression": ["GTopK(density=0.001)"],
    "precision": ["rounded"],
    "caps_bytes": [(1, 2)],
    "find_unused_parameters": [True],
    "static_graph": [True],
    "gradient_as_bucket_view": [True],
    "gradweave": ["0.0.9"],
    "torch": ["2.14.0"],
}


def test_every_ingredient_is_tried_below():
    assert tuple(OTHERS) == PlanKey.__struct_fields__


@pytest.mark.parametrize(
    ("name", "other"), [(name, other) for name, others in OTHERS.items() for other in others]
)
def test_another_ingredient_is_another_key(remembered, name, other):
    key = remembered.key
    changed = replace(key, **{name: other(getattr(key, name)) if callable(other) else other})
    assert changed.digest != key.digest
    assert key.why_not(changed) == changed.why_not(key) == f"it was made for other {name}"


def test_equal_keys_have_one_name_everywhere(remembered):
    """Pinned: with another name nothing would be found that earlier runs have left."""
    copy = msgspec.json.decode(msgspec.json.encode(remembered.key), type=PlanKey)
    assert copy.why_not(remembered.key) is None
    digest = "3b9468aa4c4e4c0015b9e06498f6e91d57293143e8c278f362074f6754d5de2b"
    assert copy.digest == remembered.key.digest == digest


def test_hosts_are_numbered_as_they_appear():
    assert numbered(["b", "a", "b", "c", "a"]) == (0, 1, 0, 2, 1)
    assert numbered(["x", "y", "x", "z", "y"]) == (0, 1, 0, 2, 1)


def one_bucket(*tensors, passes="backward"):
    return Plan(
        planner="made", passes=passes, buckets=(Bucket(tensors=tensors, collective="native"),)
    )


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"workers": 3}, "it was made for 3 workers, not 2"),
        ({"device": "H100"}, "it was made on H100, not cpu"),
        ({"plan": one_bucket("c", "b", "a", passes="both")}, "its plan is for both"),
        ({"plan": one_bucket("c", "b")}, "1 parameters of the model are in no bucket, first 'a'"),
        ({"plan": one_bucket("c", "b", "a", "x")}, "1 tensors that the model has not, first 'x'"),
        ({"plan": one_bucket("b", "c", "a")}, "the plan sends 'b' where backward of trace"),
    ],
)
def test_a_recipe_for_something_else_is_refused(remembered, change, complaint):
    other = replace(remembered.recipe, **change)
    with pytest.raises(PlanMismatch, match=complaint):
        Remembered(key=remembered.key, recipe=other)
    document = files.dumps(remembered)
    document = document.replace(dumped(remembered.recipe), dumped(other))
    with pytest.raises(FormatError, match=complaint):
        files.loads(document, Remembered, origin="text")


def dumped(recipe: Recipe) -> str:
    """As it stands inside of a file."""
    lines = files.dumps(recipe).splitlines()[2:-1]
    return "".join(line.strip() + (" " if line.endswith(",") else "") for line in lines)


def test_ranks_without_a_device_are_no_key(remembered):
    with pytest.raises(RequestError, match="hosts and devices must be one for each rank, got 2"):
        replace(remembered.key, devices=("cpu",))


def test_two_writers_at_once_leave_one_whole_file(remembered, tmp_path):
    """Whoever reads meanwhile finds one or the other, and never anything else."""
    path = tmp_path / "plan.json"
    versions = [
        replace(remembered, recipe=replace(remembered.recipe, step_s=s)) for s in (1.0, 2.0)
    ]
    files.write(path, versions[0])
    together = Barrier(2)

    def write(version):
        together.wait()
        for _ in range(100):
            files.write(path, version)

    writers = [Thread(target=write, args=(version,)) for version in versions]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert files.read(path, Remembered) in versions
    for writer in writers:
        writer.join()
    assert files.read(path, Remembered) in versions
    assert list(tmp_path.iterdir()) == [path]
