"""Plans outlast a run in a folder; whatever is wrong there is one line, and training goes on."""

import logging
import os
import pickle
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from small_training import MOST_STEPS, NAMES, QUICK, batch, network, on_two, plan_of
from test_course import stages

from gradweave import (
    CollectiveCost,
    Compression,
    DistributedDataParallel,
    GTopK,
    Line,
    Network,
    Recipe,
    RequestError,
    ShardedDataParallel,
    Tensor,
    Trace,
)
from gradweave._src import files
from gradweave._src.plan import Bucket, Plan
from gradweave._src.remembered import Remembered
from gradweave._src.runtime.wrapping import plan_cache
from gradweave._src.runtime.wrapping.options import Options
from gradweave._src.runtime.wrapping.plan_cache import CACHE_VARIABLE, PlanCache
from gradweave._src.session.findings import Findings, Stage
from gradweave._src.session.task import PlanningTask

KINDS = {
    "dense": (DistributedDataParallel, {}),
    "ring": (DistributedDataParallel, {"collective": "ring"}),
    "sparse": (DistributedDataParallel, {"compression": GTopK(density=0.1)}),
    "sharded": (ShardedDataParallel, {}),
}


class Lines(logging.Handler):
    """What the cache warns of on this rank, from now on."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.said = []
        plan_cache.logger.addHandler(self)

    def emit(self, record):
        self.said.append(record.getMessage())


def steps(wrapped, group, most, *, until_settled=False):
    """How many were taken."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    for step in range(most):
        if until_settled and wrapped.findings().stage == "settled":
            return step
        optimizer.zero_grad()
        wrapped(batch(step, group.rank())).square().mean().backward()
        optimizer.step()
    assert not until_settled, wrapped.explain()
    return most


def settled(group, kind, options):
    wrapped = kind(network(), **QUICK, **options)
    steps(wrapped, group, MOST_STEPS, until_settled=True)
    return wrapped


def twice(group, name, folder):
    kind, options = KINDS[name]
    lines = Lines()
    first = settled(group, kind, {"cache": folder, **options})
    again = kind(network(), cache=str(folder), **QUICK, **options)
    at_once = again.plan == first.plan, again.findings().is_remembered, again.findings().is_given
    recipes = first.recipe() == again.recipe()
    steps(again, group, 3)
    elsewhere = kind(network(), cache=folder, planner="wfbp", **QUICK, **options)
    return at_once, recipes, again.explain(), elsewhere.findings().is_remembered, lines.said


@pytest.mark.parametrize("name", KINDS)
def test_a_second_run_begins_with_the_plan(tmp_path, name):
    """Seconds: whole courses of planning. A folder that is missing is made."""
    folder = tmp_path / "made" / "for us"
    for at_once, same, explained, elsewhere, said in on_two(twice, name, folder, scratch=tmp_path):
        assert at_once == (True, True, False)
        assert same
        assert explained.split("\n")[0].endswith(", remembered from an earlier run.")
        assert not elsewhere
        assert said == []
    (file,) = folder.iterdir()
    remembered = files.read(file, Remembered)
    assert file.name == f"{remembered.key.digest}.json"
    assert remembered.key.hosts == (0, 0)
    assert remembered.key.passes == ("both" if name == "sharded" else "backward")


SIZES = {"4.weight": 10, "2.bias": 5, "2.weight": 45, "0.bias": 9, "0.weight": 54}
PLAN = plan_of(2, 3)
RECIPE = Recipe(
    workers=2,
    device="cpu",
    plan=PLAN,
    trace=Trace(
        name="made",
        origin="measured",
        source="made up",
        batch_size=4,
        tensors=tuple(
            Tensor(name=name, elements=SIZES[name], bytes_per_element=4, ready_s=1.0, forward_s=0.0)
            for name in NAMES
        ),
    ),
    network=Network(
        name="made",
        source="made up",
        costs=(
            CollectiveCost(
                operation="all-reduce",
                collective="native",
                workers=2,
                cost=Line(startup_s=1e-3, s_per_byte=1e-9),
            ),
        ),
    ),
    step_s=1.0,
)


def cache_of(folder):
    """The one of a wrapper with this folder; ranks do not look at each other's files."""
    cache = DistributedDataParallel(network(), cache=folder)._plan_cache
    cache._path.parent.mkdir(parents=True, exist_ok=True)
    return cache


def remembered_by(cache):
    return Remembered(key=cache._key, recipe=RECIPE)


def changed(old, new):
    """Writes a file in which one text stands for another."""

    def write(cache):
        text = files.dumps(remembered_by(cache))
        assert old in text
        cache._path.write_text(text.replace(old, new))

    return write


def of_another_model(cache):
    other = replace(cache._key, parameters=cache._key.parameters[::-1])
    files.write(cache._path, Remembered(key=other, recipe=RECIPE))


def half(cache):
    text = files.dumps(remembered_by(cache))
    cache._path.write_text(text[: len(text) // 2])


FAULTS = {
    "truncated": (half, "not complete JSON ("),
    "empty": (lambda cache: cache._path.touch(), "not complete JSON (Expecting value"),
    "zeros": (lambda cache: cache._path.write_bytes(bytes(100)), "not complete JSON (Expecting"),
    "binary": (lambda cache: cache._path.write_bytes(b"\xff"), "not a text file"),
    "version": (
        changed("remembered/3", "remembered/4"),
        "schema: expected 'gradweave.remembered/3', found 'gradweave.remembered/4'",
    ),
    "kind": (
        lambda cache: files.write(cache._path, RECIPE),
        "this is a recipe, not a remembered plan",
    ),
    "renamed": (of_another_model, "it was made for other parameters"),
    "field": (changed('"workers": 2, "dev', '"workers": "2", "dev'), "recipe.workers: Expected"),
    "tensors": (
        changed('["4.weight", "2.bias"]', '["4.weight"]'),
        "1 parameters of the model are in no bucket",
    ),
    "collective": (
        changed('"native", "compression"', '"sorcery", "compression"'),
        "no collective 'sorcery'",
    ),
    "price": (
        changed('"native", "compression"', '"ring", "compression"'),
        "network 'made' does not know",
    ),
}


def faulty(group, folder):
    """What is said on this rank of each fault, and whether a plan holds."""
    found = {}
    for fault, (make, _) in FAULTS.items():
        cache = cache_of(folder / fault)
        if group.rank() == 0:
            make(cache)
        lines = Lines()
        wrapped = DistributedDataParallel(network(), cache=folder / fault)
        steps(wrapped, group, 2)
        found[fault] = lines.said, wrapped.plan
        plan_cache.logger.removeHandler(lines)
    return found


def test_a_file_that_will_not_do_is_one_line(tmp_path):
    first, second = on_two(faulty, tmp_path, scratch=tmp_path)
    assert second == dict.fromkeys(FAULTS, ([], None))
    for fault, (_, why) in FAULTS.items():
        ((line,), plan), (file,) = first[fault], (tmp_path / fault).iterdir()
        assert line.startswith(f"planning anew: remembered plan {file}: {why}")
        assert "\n" not in line
        assert plan is None


def replaced(group, folder):
    cache = cache_of(folder)
    if group.rank() == 0:
        half(cache)
    wrapped = settled(group, DistributedDataParallel, {"cache": folder})
    group.barrier().wait()
    return files.read(cache._path, Remembered).recipe == wrapped.recipe()


def test_a_file_that_will_not_do_is_replaced(tmp_path):
    """Seconds: a whole course of planning."""
    assert on_two(replaced, tmp_path / "c", scratch=tmp_path) == [True, True]


def is_a_file(folder, cache):
    cache._path.parent.rmdir()
    folder.touch()


def read_only(folder, cache):
    """Also for who may do anything."""

    def refused(path, text):
        raise PermissionError(13, "Permission denied", str(path))

    plan_cache.files.write = refused


def link_to_itself(folder, cache):
    cache._path.symlink_to(cache._path)


ALONE = "planning anew, and remembering nothing"
NO_FOLDER = "cache: {} is a file, not a folder; plans are not kept"


def out_of_sight(folder, cache):
    """As on a mount that is stale, or below a folder that may not be entered."""

    def refused(path):
        raise OSError(116, "Stale file handle", str(path))

    Path.is_file = refused


PLACES = {
    "folder is a file": (is_a_file, NO_FOLDER, ""),
    "file is a folder": (lambda folder, cache: cache._path.mkdir(), ALONE, "Is a directory"),
    "link to itself": (link_to_itself, ALONE, "Too many levels of symbolic links"),
    "out of sight": (out_of_sight, ALONE, "Stale file handle"),
    "read-only": (read_only, "the next run plans anew", "not written: Permission denied"),
}


def misplaced(group, fault, folder):
    cache = cache_of(folder)
    group.barrier().wait()
    if group.rank() == 0:
        PLACES[fault][0](folder, cache)
    lines = Lines()
    wrapped = DistributedDataParallel(network(), cache=folder)
    steps(wrapped, group, 2)
    for _ in range(2):
        wrapped._plan_cache.keep(CHOSEN)
    steps(wrapped, group, 2)
    return lines.said, str(cache._path)


@pytest.mark.parametrize("fault", PLACES)
def test_a_folder_that_will_not_do_is_one_line(tmp_path, fault):
    (said, path), (nothing, _) = on_two(misplaced, fault, tmp_path / "c", scratch=tmp_path)
    _, then, why = PLACES[fault]
    line = f"{then}: remembered plan {path}: {why}" if why else then.format(tmp_path / "c")
    assert said == [line]
    assert nothing == []


def seen_by_rank_0_only(group, folder, variable):
    """Others have an empty folder, or none, or were not told."""
    if group.rank() == 0:
        files.write((cache := cache_of(folder))._path, remembered_by(cache))
    else:
        cache_of(folder / "of rank 1")
    found = []
    for others in (folder / "of rank 1", "", None):
        mine = folder if group.rank() == 0 else others
        if variable:
            os.environ[CACHE_VARIABLE] = str(mine or "")
            mine = None
        wrapped = DistributedDataParallel(network(), cache=mine)
        found.append(wrapped.plan == PLAN)
        steps(wrapped, group, 3)
        os.environ.pop(CACHE_VARIABLE, None)
    # The other way round nothing is remembered, and nobody waits for anybody.
    wrapped = DistributedDataParallel(network(), cache=folder if group.rank() else None)
    steps(wrapped, group, 2)
    return [*found, wrapped._plan_cache is not None]


@pytest.mark.parametrize("variable", [False, True])
def test_what_rank_0_reads_holds_for_all(tmp_path, variable):
    results = on_two(seen_by_rank_0_only, tmp_path / "c", variable, scratch=tmp_path)
    assert results == [[True, True, True, False]] * 2


def other_names_on_rank_1(group, folder):
    """torch compares shapes only."""
    cache = cache_of(folder)
    if group.rank() == 0:
        files.write(cache._path, remembered_by(cache))
    model = network()
    if group.rank() == 1:
        model = torch.nn.Sequential()
        for name, part in network().named_children():
            model.add_module(f"another{name}", part)
    lines = Lines()
    wrapped = DistributedDataParallel(model, cache=folder)
    return lines.said, wrapped.findings().is_remembered


def test_a_rank_with_another_model_speaks_for_all(tmp_path):
    (said, first), (nothing, second) = on_two(other_names_on_rank_1, tmp_path, scratch=tmp_path)
    (line,) = said
    assert line.endswith("it was made for other parameters (rank 1)")
    assert nothing == []
    assert not first
    assert not second


def given_too(group, folder):
    cache = cache_of(folder)
    if group.rank() == 0:
        cache._path.write_text("broken")
    lines = Lines()
    wrapped = DistributedDataParallel(network(), plan=plan_of(5), cache=folder)
    steps(wrapped, group, 3)
    os.environ[CACHE_VARIABLE] = str(folder)
    off = DistributedDataParallel(network(), cache="")
    os.environ.pop(CACHE_VARIABLE)
    return wrapped.plan == plan_of(5), off._plan_cache, lines.said, cache._path.read_text()


def test_a_plan_that_is_given_wins_and_an_empty_name_is_none(tmp_path):
    results = on_two(given_too, tmp_path / "c", scratch=tmp_path)
    assert results == [(True, None, [], "broken")] * 2


def watched(group, folder, step_s, options):
    """The recipe says that steps took a second."""
    cache = cache_of(folder)
    if group.rank() == 0:
        files.write(cache._path, remembered_by(cache))
    wrapped = DistributedDataParallel(network(), cache=folder, **QUICK, **options)
    found = stages(wrapped, group, [step_s] * 40)
    has_left = not wrapped.findings().is_remembered
    while wrapped.findings().stage != "settled":
        found += stages(wrapped, group, [step_s])
    group.barrier().wait()
    return found[0], has_left, files.read(cache._path, Remembered).recipe.step_s


@pytest.mark.parametrize(
    ("step_s", "options", "drifts"),
    [(1.2, {}, False), (1.5, {}, True), (1.5, {"replan_when": 0.6}, False)],
)
def test_a_remembered_plan_is_watched(tmp_path, step_s, options, drifts):
    """And what is planned then takes its place."""
    results = on_two(watched, tmp_path / "c", step_s, options, scratch=tmp_path)
    kept_s = pytest.approx(step_s if drifts else 1.0)
    assert results == [("settled", drifts, kept_s)] * 2


def compiled_and_copied(group, folder):
    cache = cache_of(folder)
    if group.rank() == 0:
        files.write(cache._path, remembered_by(cache))
    wrapped = DistributedDataParallel(network(), cache=folder)
    again = pickle.loads(pickle.dumps(wrapped))  # noqa: S301 torch's wrapper can be pickled
    wrapped.module.compile(backend="eager")
    steps(wrapped, group, 6)
    return wrapped.plan == PLAN, wrapped._driver is None, again.plan


def test_a_compiled_model_keeps_its_remembered_plan_and_a_copy_has_none(tmp_path):
    """Seconds: every rank imports a compiler."""
    results = on_two(compiled_and_copied, tmp_path / "c", scratch=tmp_path)
    assert results == [(True, True, None)] * 2


def hook_of_the_users(state, bucket):
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def remembering_a_ring(group, folder, how):
    """A plan whose messages go by our own hook, of which the user knows nothing."""
    cache = cache_of(folder)
    if group.rank() == 0:
        (native,) = RECIPE.network.costs
        both = replace(RECIPE.network, costs=(native, replace(native, collective="ring")))
        recipe = replace(RECIPE, plan=plan_of(2, 3, collective="ring"), network=both)
        ring = Remembered(key=cache._key, recipe=recipe)
        files.write(cache._path, ring)
    wrapped = DistributedDataParallel(network(), cache=folder)
    was_remembered = wrapped.findings().is_remembered
    if how == "hook":
        wrapped.register_comm_hook(None, hook_of_the_users)
        steps(wrapped, group, 3)
    else:
        with wrapped.join(divide_by_initial_world_size=False):
            steps(wrapped, group, 3 + group.rank())
    return was_remembered, wrapped.plan, wrapped.explain()


@pytest.mark.parametrize(
    ("how", "why"),
    [("hook", "there is a communication hook"), ("join", "planning ends where join() begins")],
)
@pytest.mark.filterwarnings("ignore")
def test_a_remembered_plan_makes_way_for_what_the_user_does(tmp_path, how, why):
    expected = (True, None, f"Torch's own buckets stay: {why}.")
    assert on_two(remembering_a_ring, tmp_path / "c", how, scratch=tmp_path) == [expected] * 2


class WithEmpty(torch.nn.Sequential):
    """Also has a parameter without elements, which is in no trace."""

    def __init__(self):
        super().__init__(*network())
        self.empty = torch.nn.Parameter(torch.zeros(0, 3))

    def forward(self, value):
        return super().forward(value) + self.empty.sum()


def sharded_with_empty(group, folder):
    remembered = []
    for _ in range(2):
        wrapped = ShardedDataParallel(WithEmpty(), cache=folder, **QUICK)
        remembered.append(wrapped.findings().is_remembered)
        steps(wrapped, group, MOST_STEPS, until_settled=True)
    return remembered


def test_parameters_without_elements_do_not_keep_from_remembering(tmp_path):
    found = on_two(sharded_with_empty, tmp_path / "c", scratch=tmp_path)
    assert found == [[False, True]] * 2


def watched_for_life(group, folder, options):
    cache = cache_of(folder)
    if group.rank() == 0:
        files.write(cache._path, remembered_by(cache))
    wrapped = DistributedDataParallel(network(), cache=folder, **options)
    stages(wrapped, group, [1.0] * 70)
    return wrapped._driver is None


@pytest.mark.parametrize(("options", "is_over"), [({}, True), ({"replan_when": 0.5}, False)])
def test_a_remembered_plan_is_watched_briefly_unless_asked_for(tmp_path, options, is_over):
    found = on_two(watched_for_life, tmp_path / "c", options, scratch=tmp_path)
    assert found == [is_over] * 2


DENSITIES = (Compression(method="gtopk", density=0.5), Compression(method="gtopk", density=0.1))


def sparse_plan(compression):
    buckets = (Bucket(tensors=tuple(NAMES), collective="native", compression=compression),)
    return Plan(planner="made", buckets=buckets)


CHOSEN = Findings(
    stage=Stage.SETTLED,
    plan=PLAN,
    trace=RECIPE.trace,
    network=RECIPE.network,
    step_s=1.0,
    planning_steps=20,
)
UNKEPT = {
    "given": replace(CHOSEN, is_given=True, planning_steps=None),
    "remembered": replace(CHOSEN, is_remembered=True, planning_steps=None),
    "given up": replace(CHOSEN, plan=None, note="no"),
    "abandoned": replace(CHOSEN, note="other ranks cannot be reached", planning_steps=None),
    "trying": replace(CHOSEN, stage=Stage.TRYING),
    "for a while": replace(CHOSEN, plan=sparse_plan(DENSITIES[0])),
}


def key_of(golden):
    """As if that had been this model's."""
    parameters = tuple(
        replace(golden.key.parameters[0], name=name, shape=(SIZES[name],)) for name in NAMES
    )
    return replace(golden.key, parameters=parameters)


@pytest.fixture(scope="module")
def key():
    golden = Path(__file__).parents[1] / "golden" / "remembered-3.json"
    return key_of(files.read(golden, Remembered))


def at(step):
    return DENSITIES[step > 100]


def opened(folder, key, *, is_rank_0=True, compression_at=None):
    task = PlanningTask(workers=2, compression_at=compression_at)
    return PlanCache(str(folder), key, task, is_rank_0=is_rank_0, check=lambda plan: None)


@pytest.mark.parametrize("name", UNKEPT)
def test_only_what_was_chosen_for_good_is_kept(tmp_path, key, name):
    cache = opened(tmp_path, key, compression_at=at if name == "for a while" else None)
    cache.keep(UNKEPT[name])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("found", "compression_at"),
    [(CHOSEN, None), (replace(CHOSEN, plan=sparse_plan(DENSITIES[1])), at)],
)
def test_it_is_kept_once_and_by_rank_0(tmp_path, key, found, compression_at):
    opened(tmp_path, key, is_rank_0=False, compression_at=compression_at).keep(found)
    assert list(tmp_path.iterdir()) == []
    cache = opened(tmp_path, key, compression_at=compression_at)
    cache.keep(found)
    (file,) = tmp_path.iterdir()
    assert files.read(file, Remembered).recipe.plan == found.plan
    file.unlink()
    cache.keep(found)
    assert list(tmp_path.iterdir()) == []
    cache.keep(replace(found, plan=replace(found.plan, planner="again")))
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("cache", [3, False, b"folder"])
def test_what_is_no_folder_is_refused(cache):
    with pytest.raises(RequestError, match="cache must be a folder, or empty for none, got "):
        Options(cache=cache)
