"""Ranks that wrap differently are told so in one line, all of them, and nobody waits."""

import logging
from threading import Event

import pytest
import torch
import torch.distributed as dist
from commands import python
from interleavings import every_end
from interrupting import interrupt_when_there
from msgspec.structs import replace
from ranks import on_processes, on_threads
from small_training import network, plan_of, trained
from test_plan_cache import RECIPE

from gradweave import DistributedDataParallel, ShardedDataParallel
from gradweave._src.comm.groups import common_place
from gradweave._src.comm.stores import cloned_store
from gradweave._src.errors import CollectiveError, GradweaveError, RequestError
from gradweave._src.runtime.wrapping import same_wrapping
from gradweave._src.runtime.wrapping.same_wrapping import (
    MOST_FIELDS,
    Comparison,
    differences,
    meet,
    refuse,
)

BOTH_PASSES = replace(plan_of(2, 3, collective="ring"), passes="both")


def made(kind, options, rank):
    with torch.random.fork_rng():
        return kind(network(), **options[rank])


def complaints(group, kind, cases):
    """What each case is refused with; the group is as good as before."""
    logging.getLogger("gradweave").setLevel(logging.ERROR)
    found = []
    for options in cases:
        with pytest.raises(RequestError) as caught:
            made(kind, options, group.rank())
        found.append(str(caught.value))
    made(kind, [{}, {}], group.rank())
    return found


BEGINNING, END = "ranks wrap differently: ", "; wrap the same model alike on every rank"
OF_BOTH = [
    ([{"planner": "wfbp"}, {}], "planner is 'wfbp' on rank 0 and 'optimal' on rank 1"),
    ([{"collective": "ring"}, {}], "collective is 'ring' on rank 0 and 'auto' on rank 1"),
    ([{}, {"record_steps": 6}], "record_steps is 5 on rank 0 and 6 on rank 1"),
    ([{"trial_steps": 0}, {}], "trial_steps is 0 on rank 0 and 4 on rank 1"),
    ([{"replan_when": 0.5}, {}], "replan_when is 0.5 on rank 0 and None on rank 1"),
    ([{"timeline": True}, {}], "timeline is True on rank 0 and False on rank 1"),
    ([{}, {"broadcast_buffers": False}], "broadcast_buffers is True on rank 0 and False on rank 1"),
]
OF_DDP = [
    ([{"precision": "fp16"}, {"precision": "bf16"}], "precision is 'fp16' on rank 0 and 'bf16' on"),
    ([{}, {"compression": "gtopk:0.1"}], "compression is None on rank 0 and GTopK on rank 1; com"),
    (
        [{"compression": "gtopk:0.2"}, {"compression": "gtopk:0.1"}],
        "compression's density is 0.2 on rank 0 and 0.1 on rank 1",
    ),
    ([{"bucket_cap_mb": 1}, {}], "bucket_cap_mb is 1 on rank 0 and None on rank 1"),
    ([{}, {"find_unused_parameters": True}], "find_unused_parameters is False on rank 0 and True"),
    ([{}, {"static_graph": True}], "static_graph is False on rank 0 and True on rank 1"),
    ([{"plan": plan_of(2, 3)}, {}], "plan is a plan of 2 messages by 'made' ("),
    ([{}, {"plan": RECIPE}], "plan is None on rank 0 and a recipe of 2 messages by 'made' ("),
    (
        [{}, {"plan": replace(RECIPE, workers=3)}],
        "plan is None on rank 0 and a recipe for something else on rank 1",
    ),
]
OF_SHARDED = [([{"plan": BOTH_PASSES}, {}], "plan is a plan of 2 messages by 'made' (")]


@pytest.mark.parametrize(
    ("kind", "cases"),
    [(DistributedDataParallel, OF_BOTH + OF_DDP), (ShardedDataParallel, OF_BOTH + OF_SHARDED)],
    ids=["ddp", "sharded"],
)
def test_every_option_is_compared(tmp_path, kind, cases):
    ranks = on_processes(2, complaints, kind, [options for options, _ in cases], scratch=tmp_path)
    assert ranks[0] == ranks[1]
    for found, (_, expected) in zip(ranks[0], cases, strict=True):
        assert found.startswith(BEGINNING + expected)
        assert found.endswith(END)
        assert "\n" not in found


def wrapped_by_another(group):
    kind = (DistributedDataParallel, ShardedDataParallel)[group.rank()]
    with pytest.raises(RequestError) as caught:
        kind(network())
    return str(caught.value)


def test_another_wrapper_is_named_first(tmp_path):
    """And nothing else is, for it has other options."""
    both = "wrapper is DistributedDataParallel on rank 0 and ShardedDataParallel on rank 1"
    assert on_processes(2, wrapped_by_another, scratch=tmp_path) == [BEGINNING + both + END] * 2


def different_at_home(group, folder):
    """What each rank may have as it likes."""
    options = {"cache": "", "gradient_as_bucket_view": True} if group.rank() else {"cache": folder}
    steps, _ = trained(DistributedDataParallel(network(), **options), group.rank(), steps=3)
    sharded = ShardedDataParallel(network(), updates_by_bucket=group.rank() == 0)
    return steps, sharded.findings().stage


def test_what_each_rank_may_have_for_itself(tmp_path):
    ranks = on_processes(2, different_at_home, str(tmp_path / "cache"), scratch=tmp_path)
    assert [steps for steps, _ in ranks] == [3, 3]


def refused(group, kind, options):
    with pytest.raises(GradweaveError) as caught:
        made(kind, [{}, options], group.rank())
    return str(caught.value)


@pytest.mark.parametrize("kind", [DistributedDataParallel, ShardedDataParallel])
@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"record_steps": 0}, "record_steps must be at least 1, got 0"),
        ({"plan": "none.json"}, "plan: there is no file none.json"),
    ],
)
def test_what_one_rank_refuses_ends_the_others_waiting(tmp_path, kind, options, complaint):
    """Long before the group's time-out, which would name nobody."""
    told = f"another rank could not wrap its model: rank 1: {complaint}"
    assert on_processes(2, refused, kind, options, scratch=tmp_path) == [told, complaint]


def with_an_unknown_option(group, kind, option):
    """On rank 1; what both are told, and that the group is as good as before."""
    with pytest.raises((TypeError, RequestError)) as caught:
        made(kind, [{}, {option: 3}], group.rank())
    made(kind, [{}, {}], group.rank())
    return str(caught.value)


@pytest.mark.parametrize("kind", [DistributedDataParallel, ShardedDataParallel])
@pytest.mark.parametrize("option", ["record_step", "colour"])
def test_what_one_rank_misspells_ends_the_others_waiting(tmp_path, kind, option):
    """The latter resembles nothing, and Python or torch refuses it."""
    both = on_processes(2, with_an_unknown_option, kind, option, scratch=tmp_path)
    assert all(option in told for told in both)


def given_by_position(group):
    arguments = [plan_of(2, 3)] if group.rank() else []
    with pytest.raises(RequestError) as caught:
        DistributedDataParallel(network(), *arguments)
    return str(caught.value)


def test_what_is_refused_by_its_position_is_told(tmp_path):
    complaint = "behind the model stand torch's own arguments; write plan= before the Plan"
    told = f"another rank could not wrap its model: rank 1: {complaint}"
    assert on_processes(2, given_by_position, scratch=tmp_path) == [told, complaint]


def caught_and_gone_on(group, kind, bad):
    """A script that catches what is refused, sends messages of its own and wraps once more."""
    for options in bad:
        with pytest.raises(RequestError):
            made(kind, options, group.rank())
        for elements in (64, 4):
            message = torch.full((elements,), float(group.rank() + 1))
            dist.all_reduce(message)
            assert set(message.tolist()) == {3.0}
    return made(kind, [{}, {}], group.rank()).findings().stage


@pytest.mark.parametrize("kind", [DistributedDataParallel, ShardedDataParallel])
def test_what_was_refused_leaves_nothing_in_the_users_group(tmp_path, kind):
    bad = [[{}, {"record_steps": 0}], [{"record_steps": 0}, {}], [{}, {"record_steps": 6}]]
    stages = on_processes(2, caught_and_gone_on, kind, bad, scratch=tmp_path)
    assert stages == ["not begun"] * 2


UNTOLD = (
    "Torch's own buckets stay: ranks of a gloo group cannot be told of plans through its store."
)


NOT_ONE = "record_steps must be at least 1, got 0"


def without_store(group, ranks, options):
    """What ranks are told whose store nobody can use beside the group, as with MPI."""
    if group.rank() in ranks:
        same_wrapping.cloned_store = lambda _: None
    try:
        return made(DistributedDataParallel, options, group.rank()).explain()
    except RequestError as error:
        found = str(error)
    message = torch.full((64,), float(group.rank() + 1))
    dist.all_reduce(message)
    assert set(message.tolist()) == {3.0}
    return found


@pytest.mark.parametrize(
    ("ranks", "options", "found"),
    [
        ([1], [{}, {}], [UNTOLD] * 2),
        ([0, 1], [{}, {}], [UNTOLD] * 2),
        (
            [0, 1],
            [{}, {"record_steps": 6}],
            [f"{BEGINNING}record_steps is 5 on rank 0 and 6 on rank 1{END}"] * 2,
        ),
        (
            [0, 1],
            [{}, {"record_steps": 0}],
            [f"another rank could not wrap its model: rank 1: {NOT_ONE}", NOT_ONE],
        ),
        (
            [0, 1],
            [{"record_steps": 0}] * 2,
            [NOT_ONE] * 2,
        ),
    ],
    ids=["of one rank", "of no rank", "and differently", "and refused", "and refused by all"],
)
def test_a_store_that_cannot_be_used(tmp_path, ranks, options, found):
    """Whether ranks can tell each other of plans is decided once, and for all.

    Where they are refused, the users' group is as good as before.
    """
    assert on_processes(2, without_store, ranks, options, scratch=tmp_path) == found


def out_of_reach(group):
    if group.rank() == 1:
        same_wrapping.cloned_store = no_way
    with pytest.raises(CollectiveError) as caught:
        made(DistributedDataParallel, [{}, {}], group.rank())
    return str(caught.value)


def no_way(*_):
    raise dist.DistNetworkError("no way to node0:29500\nand its stack")


def test_a_store_that_is_out_of_reach(tmp_path):
    told = (
        "rank 1 cannot reach the store of the process group: no way to node0:29500; look at its "
        "connection to the host of the store"
    )
    assert on_processes(2, out_of_reach, scratch=tmp_path) == [told] * 2


def of_another_version(group):
    same_wrapping.__version__ = f"0.{group.rank()}"
    with pytest.raises(RequestError) as caught:
        made(DistributedDataParallel, [{}, {"record_steps": 6}], group.rank())
    return str(caught.value)


def test_another_version_is_named_first(tmp_path):
    both = "gradweave's version is 0.0 on rank 0 and 0.1 on rank 1"
    assert on_processes(2, of_another_version, scratch=tmp_path) == [BEGINNING + both + END] * 2


def met(group, digests):
    """Whether all are alike, and how many keys are left."""
    store = group.get_group_store()
    before = store.num_keys()
    are_alike = meet(group, common_place(group, cloned_store(group)), digests[group.rank()])
    group.barrier().wait()
    return are_alike, store.num_keys() - before


@pytest.mark.parametrize(("digests", "are_alike"), [("aaa", True), ("aba", False), ("abc", False)])
def test_comparing_leaves_no_keys(digests, are_alike):
    assert on_threads(3, met, digests) == [(are_alike, 0)] * 3


def only_rank_0_comes(group):
    place = common_place(group, cloned_store(group))
    if group.rank():
        return ""
    with pytest.raises(CollectiveError) as caught:
        meet(group, place, "a")
    return str(caught.value)


def test_a_rank_that_does_not_come_ends_waiting(monkeypatch):
    monkeypatch.setattr(same_wrapping, "timeout_s", lambda _: 0.2)
    told = "rank 0 cannot learn whether all ranks wrap alike: 1 of 3 ranks have come in time"
    assert on_threads(3, only_rank_0_comes) == [told, "", ""]


def interrupted(group):
    """Rank 0 waits when somebody hits Ctrl-C: rank 1, which comes then, does not go on alone."""
    place = common_place(group, cloned_store(group))
    if group.rank() == 0:
        interrupt_when_there(place, "come")
        with pytest.raises(KeyboardInterrupt):
            meet(group, place, "a")
        assert place.check(["over"])  # rank 1 can learn it though the script ends now
        group.barrier().wait()
        return ""
    group.barrier().wait()
    with pytest.raises(CollectiveError) as caught:
        meet(group, place, "a")
    return str(caught.value)


def test_who_is_interrupted_has_not_come(tmp_path):
    _, said = on_processes(2, interrupted, scratch=tmp_path)
    assert said == (
        "rank 1 cannot learn whether all ranks wrap alike: it was interrupted on rank 0"
    )


def refused_by_rank_1(group):
    """How many keys are left when all have been told."""
    store, place = group.get_group_store(), common_place(group, cloned_store(group))
    before = store.num_keys()
    group.barrier().wait()
    if group.rank() == 1:
        refuse(place, "rank 1: no", group.size())
    else:
        with pytest.raises(RequestError, match="another rank could not wrap its model: rank 1: no"):
            meet(group, place, str(group.rank()))
    group.barrier().wait()
    return store.num_keys() - before


def test_a_refusal_leaves_no_keys():
    assert on_threads(3, refused_by_rank_1) == [0] * 3


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_giving_up_is_one_decision(ranks):
    """In every order in which ranks that wait no longer ask the store."""
    found = set()

    def come(store):
        try:
            return Comparison(store, "a", rank=0, ranks=ranks).hold(0.0, Event())
        except TimeoutError:
            return "given up"

    for order, results, store in every_end(lambda: [come] * ranks):
        found.add(tuple(results))
        assert len(set(results)) == 1, order
        assert store.num_keys() == 0, order
    assert found == {("given up",) * ranks, (True,) * ranks}


def without_the_other(group):
    same_wrapping.common_place = lost
    with pytest.raises(CollectiveError) as caught:
        made(DistributedDataParallel, [{}, {}], group.rank())
    return str(caught.value)


def lost(*_):
    raise RuntimeError("Connection closed by peer\nand more")


def test_a_rank_that_is_gone_is_one_line(tmp_path):
    told = "cannot meet the others to wrap a model: Connection closed by peer"
    found = on_processes(2, without_the_other, scratch=tmp_path)
    assert found == [f"rank {rank} {told}" for rank in range(2)]


def given_twice(group):
    with pytest.raises(TypeError) as caught:
        DistributedDataParallel(network(), None, device_ids=[0])
    return str(caught.value)


def test_what_is_given_by_position_and_by_name(tmp_path):
    told = "DistributedDataParallel got multiple values for argument 'device_ids'"
    assert on_processes(2, given_twice, scratch=tmp_path) == [told] * 2


IN_A_FAKE_WORLD = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed import fake_pg
from gradweave import ShardedDataParallel
dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=4)
print(ShardedDataParallel(torch.nn.Linear(2, 2)).findings().stage)
"""


def test_a_fake_groups_ranks_are_not_waited_for():
    """Its store may be a real one, in which nobody else will ever say anything."""
    done = python("-c", IN_A_FAKE_WORLD)
    assert (done.stdout, done.returncode) == ("not begun\n", 0), done.stderr


def test_what_is_said_of_many_ranks_and_fields():
    said = [{"a": "1"}, {"a": "2"}, {"a": "1"}, {}]
    assert differences(said) == "a is 1 on ranks 0, 2, 2 on rank 1 and not given on rank 3"
    many = [{"a": "0"}, *({"a": "1"} for _ in range(20))]
    assert differences(many) == (
        "a is 0 on rank 0 and 1 on ranks 1, 2, 3, 4, 5, 6, 7, 8 and 12 more"
    )
    fields = [{f"field {number}": rank for number in range(10)} for rank in "ab"]
    assert differences(fields).count(" is ") == MOST_FIELDS
    assert differences(fields).endswith("; and 7 more")
    assert len(differences([{"a": "x" * 10_000}, {"a": "y" * 10_000}])) < 400
