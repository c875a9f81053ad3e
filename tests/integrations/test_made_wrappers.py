"""Whose recipe a wrapper begins with."""

import pytest
from launched import network, on_two

from gradweave import DistributedDataParallel, RequestError
from gradweave._src.integrations.made_wrappers import MadeWrappers
from gradweave._src.runtime.reporting.account import PlanningAccount


class Found:
    """An account, and the recipe in it."""

    def __init__(self, text):
        self.text = text

    def recipe_text(self):
        return self.text


class Wrapper:
    """Notes what it is given."""

    def __init__(self, finds=""):
        self.found, self.given = Found(finds), []

    def account(self):
        return self.found

    def adopt(self, text):
        self.given.append(text)


def added(made, *wrappers):
    for wrapper in wrappers:
        made.add(wrapper)
    return [wrapper.given[-1] for wrapper in wrappers]


def test_places_have_recipes():
    made = MadeWrappers()
    made.recall(["a", "b"])
    assert added(made, *(three := [Wrapper("x"), Wrapper(), Wrapper("z")])) == ["a", "b", None]
    assert made.recipes() == ["x", "", "z"]
    made.recall(["c"])
    made.adopt_recalled()
    assert [wrapper.given for wrapper in three] == [["a", "c"], ["b", None], [None, None]]


def test_those_that_come_again_have_what_the_first_ones_found():
    made = MadeWrappers()
    first = Wrapper("x")
    added(made, first)
    made.begin_again()
    assert made.last is first.found  # until another is made
    assert added(made, Wrapper("y"), Wrapper()) == ["x", None]
    assert len(made.accounts) == 2
    made.begin_again()
    assert added(made, Wrapper()) == ["y"]


def test_what_was_recalled_counts_before_what_was_found():
    made = MadeWrappers()
    added(made, Wrapper("x"))
    made.recall(["of a checkpoint"])
    made.begin_again()
    assert added(made, Wrapper("y")) == ["of a checkpoint"]
    made.begin_again()
    assert added(made, Wrapper()) == ["y"]


def test_where_nothing_was_found_the_last_recipes_stay():
    made = MadeWrappers()
    made.recall(["a"])
    added(made, Wrapper())
    made.begin_again()
    assert added(made, Wrapper()) == ["a"]


def test_where_nothing_is_planned_there_is_no_text():
    account = PlanningAccount(
        None, None, why_unplanned="one worker", workers=1, device="cpu", baseline="torch"
    )
    assert account.recipe_text() == ""


def test_nothing_is_told_before_a_model_is_wrapped():
    with pytest.raises(RequestError, match="no model was wrapped yet"):
        _ = MadeWrappers().last


class Noting(DistributedDataParallel):
    """Notes what it is asked to adopt, and adopts it."""

    def adopt(self, recipe):
        self.given = [*getattr(self, "given", ()), recipe]
        return super().adopt(recipe)


def adopted_where_one_is_gone(rank):
    made = MadeWrappers()
    wrappers = [Noting(network()) for _ in range(3)]
    for wrapper in wrappers:
        made.add(wrapper)
    del wrapper
    if rank == 1:
        wrappers[1] = None
        made.recall(())  # whose recipes do not count
    else:
        made.recall(["a", "b", "c"])
    made.adopt_recalled()
    return [wrapper and wrapper.given for wrapper in wrappers]


def test_a_wrapper_that_one_rank_has_lost_is_left_alone_on_all(tmp_path):
    """Or the others would wait for it: adopting is something that all ranks do."""
    here, there = on_two(adopted_where_one_is_gone, scratch=tmp_path)
    assert here == [[None, "a"], [None], [None, "c"]]
    assert there == [[None, None], None, [None, None]]
