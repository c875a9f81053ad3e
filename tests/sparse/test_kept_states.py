"""Checkpoints of residuals: killed, cut, changed or forged, they are whole or a line says why."""

import random
import resource

import pytest
import torch
from killed_writes import EVERY_CALL, after_kills
from mutations import NAMES, VALUES, mutated_bytes
from torch.serialization import get_crc32_options, set_crc32_options

from gradweave import FormatError, RequestError
from gradweave._src.errors import GradweaveError
from gradweave._src.sparse import checkpoint
from gradweave._src.sparse.state_form import require_state


def carried(rank):
    chance = torch.Generator().manual_seed(rank)
    values = {
        "a": torch.randn(300, generator=chance),
        "b": torch.randn(20, 30, generator=chance),
    }
    return {"scale": 1.0, "values": values}


def state(rank=0, ranks=1):
    return {
        "schema": "gradweave.sparse/2",
        "rank": rank,
        "ranks": ranks,
        "step": 3,
        "shapes": {"a": [300], "b": [20, 30]},
        "residuals": carried(rank),
        "velocities": carried(rank + 100),
    }


def are_equal(one, other):
    rest = [
        {k: v for k, v in s.items() if k not in {"residuals", "velocities"}} for s in (one, other)
    ]
    return rest[0] == rest[1] and all(
        one[kind]["scale"] == other[kind]["scale"]
        and all(torch.equal(v, other[kind]["values"][n]) for n, v in one[kind]["values"].items())
        for kind in ("residuals", "velocities")
    )


def loaded(folder):
    """The state, or what is said about it."""
    try:
        return checkpoint.load(folder, rank=0, ranks=1)
    except GradweaveError as error:
        return str(error)


def check(folder, contents):
    """How many are refused; whatever is not is what was written."""
    path = checkpoint.save(state(), folder)
    refused = 0
    for content in contents(path.read_bytes()):
        path.write_bytes(content)
        found = loaded(folder)
        if isinstance(found, str):
            assert found.startswith(f"{path}: ")
            assert found.isprintable()
            refused += 1
        else:
            assert are_equal(found, state())
    return refused


def flipped_bits(content, *, count, seed):
    chance = random.Random(seed)
    for _ in range(count):
        changed = bytearray(content)
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        yield bytes(changed)


def every_bit(content):
    for at in range(len(content)):
        for bit in range(8):
            yield content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


def test_bits_that_have_turned_round_are_noticed(tmp_path):
    """What is not noticed stood where nothing is read: all numbers are as they were."""
    count = 200
    refused = check(tmp_path, lambda content: flipped_bits(content, count=count, seed=1))
    assert refused > 0.8 * count


def test_changed_files_are_whole_or_a_line(tmp_path):
    count = 200
    assert check(tmp_path, lambda c: mutated_bytes(c, count=count, seed=1)) > 0.8 * count


@pytest.mark.long
def test_every_bit_and_many_changes(tmp_path):
    assert check(tmp_path, every_bit) > 0
    assert check(tmp_path, lambda c: mutated_bytes(c, count=20_000, seed=2)) > 0


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_file_that_was_cut_is_named(tmp_path, share):
    path = checkpoint.save(state(), tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(FormatError, match=r"sparse-0-of-1\.pt: not a file that torch\.save wrote"):
        checkpoint.load(tmp_path, rank=0, ranks=1)


def test_checksums_are_written_also_where_they_are_switched_off(tmp_path):
    before = get_crc32_options()
    set_crc32_options(compute_crc32=False)
    try:
        checkpoint.save(state(), tmp_path)
        assert not get_crc32_options()
    finally:
        set_crc32_options(before)
    assert are_equal(checkpoint.load(tmp_path, rank=0, ranks=1), state())


def forged(path, value):
    """A state in which something else stands in a place."""
    changed = state()
    *parents, last = path
    place = changed
    for key in parents:
        place = place[key]
    place[last] = value
    return changed


PLACES = [
    *([field] for field in state()),
    ["shapes", "a"],
    ["shapes", "c"],
    *([kind, part] for kind in ("residuals", "velocities") for part in ("scale", "values")),
    *([kind, "values", name] for kind in ("residuals", "velocities") for name in "abc"),
]
OTHERS = [*VALUES, torch.zeros(2), torch.zeros(300, dtype=torch.int64), torch.zeros(0), {"a": 1}]


@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_forged_states_are_a_line(tmp_path, place):
    """Also where a state comes from elsewhere: ranks that wait for this one must be told."""
    told = 0
    for value in OTHERS:
        changed = forged(place, value)
        try:
            require_state(changed)
        except RequestError as error:
            told += 1
            said = str(error)
            assert said.isprintable(), said
            assert len(said) < 1000
    assert told


@pytest.mark.parametrize("value", [None, 3, [], {}, "text"])
def test_what_is_no_state_is_a_line(tmp_path, value):
    torch.save(value, tmp_path / "sparse-0-of-1.pt")
    with pytest.raises(FormatError, match="not a state of sparsified training as this version"):
        checkpoint.load(tmp_path, rank=0, ranks=1)


def test_a_renamed_file_is_no_other_ranks(tmp_path):
    path = checkpoint.save(state(1, 2), tmp_path)
    path.rename(tmp_path / "sparse-0-of-2.pt")
    with pytest.raises(FormatError, match="the state of rank 1 of 2; has the file been renamed"):
        checkpoint.load(tmp_path, rank=0, ranks=2)


@pytest.mark.parametrize("other", ["shapes", "velocities"])
def test_states_of_different_models_are_not_added_up(tmp_path, other):
    checkpoint.save(state(0, 2), tmp_path)
    second = state(1, 2)
    if other == "shapes":
        second["shapes"] = {**second["shapes"], "c": [1]}
    else:
        del second["velocities"]
    checkpoint.save(second, tmp_path)
    with pytest.raises(RequestError, match="the states are not of one model"):
        checkpoint.load(tmp_path, rank=0, ranks=3)


def test_parameters_of_any_name_are_kept(tmp_path):
    shapes = {name: [2] for name in NAMES.values()}
    values = {name: torch.tensor([1.0, 2.0]) for name in shapes}
    given = {**state(), "shapes": shapes, "residuals": {"scale": 1.0, "values": values}}
    del given["velocities"]
    checkpoint.save(given, tmp_path)
    assert set(checkpoint.load(tmp_path, rank=0, ranks=1)["residuals"]["values"]) == set(shapes)


def test_a_full_disk_is_named_and_leaves_what_was_there(tmp_path):
    path = checkpoint.save(state(), tmp_path)
    larger = state()
    larger["shapes"]["a"] = [100_000]
    for kind in ("residuals", "velocities"):
        larger[kind]["values"]["a"] = torch.zeros(100_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            checkpoint.save(larger, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(path)
    assert are_equal(checkpoint.load(tmp_path, rank=0, ranks=1), state())
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("most", [12, pytest.param(EVERY_CALL, marks=pytest.mark.long)])
def test_a_kill_at_any_call_leaves_the_old_state_or_the_new_one(tmp_path, most):
    told = after_kills("state", tmp_path, most=most)
    assert set(told["found"]) == {"old", "new"}
    assert sum(told["found"].values()) > 0.5 * min(most, told["stops"])
    assert (told["left"], told["last"]) == (0, "new")
