import os
from datetime import timedelta

import pytest
import torch
from ranks import on_processes, on_threads
from torch.nn.parallel import DistributedDataParallel as DDP


def _sum_of_ranks(group):
    tensor = torch.full((6,), float(group.rank()))
    group.allreduce([tensor]).wait()
    return tensor.tolist()


def _ddp_gradient(group):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    wrapped = DDP(model, process_group=group)
    inputs = torch.full((1, 4), float(group.rank() + 1))
    wrapped(inputs).sum().backward()
    return model.weight.grad.tolist()


def _second_rank_fails(group):
    if group.rank() == 1:
        raise ValueError("no such bucket")


def _second_rank_fails_while_the_first_waits(group):
    if group.rank() == 1:
        raise ValueError("no such bucket")
    group.allreduce([torch.ones(1)]).wait()


def _second_rank_dies(group):
    if group.rank() == 1:
        os.write(2, b"no memory left")
        os._exit(3)


def _with(group, tensor):
    return tensor + group.rank()


def _prepared(rank):
    if rank == 1:
        raise ValueError("no such device")


def _returns_what_cannot_be_sent(group):
    return lambda: group


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_threads_form_a_world(world):
    assert on_threads(world, _sum_of_ranks) == [[sum(range(world))] * 6] * world


@pytest.mark.parametrize("world", [2, 3, 4])
def test_processes_form_a_world(world, tmp_path):
    assert on_processes(world, _sum_of_ranks, scratch=tmp_path) == [[sum(range(world))] * 6] * world


@pytest.mark.parametrize("world", [2, 4])
def test_ddp_on_threads(world):
    mean = (world + 1) / 2
    assert on_threads(world, _ddp_gradient) == [[[mean] * 4] * 2] * world


@pytest.mark.parametrize("repeat", range(2))
def test_ddp_on_processes(repeat, tmp_path):
    assert on_processes(2, _ddp_gradient, scratch=tmp_path) == [[[1.5] * 4] * 2] * 2


def test_a_failing_rank_is_named(tmp_path):
    with pytest.raises(AssertionError, match=r"(?s)rank 1 failed.*no such bucket"):
        on_processes(2, _second_rank_fails, scratch=tmp_path)


def test_a_dead_rank_is_named(tmp_path):
    with pytest.raises(AssertionError, match=r"(?s)rank 1 died.*no memory left"):
        on_processes(2, _second_rank_dies, scratch=tmp_path)


def test_a_rank_that_fails_before_it_joins_is_named(tmp_path):
    with pytest.raises(AssertionError, match=r"(?s)rank 1 failed.*no such device"):
        on_processes(2, _sum_of_ranks, scratch=tmp_path, prepare=_prepared)


def test_what_cannot_be_returned_is_a_failure(tmp_path):
    with pytest.raises(AssertionError, match=r"(?s)rank 0 failed.*pickle"):
        on_processes(1, _returns_what_cannot_be_sent, scratch=tmp_path)


def test_tensors_go_to_ranks_and_come_back(tmp_path):
    found = on_processes(2, _with, torch.ones(3), scratch=tmp_path)
    assert [one.tolist() for one in found] == [[1.0] * 3, [2.0] * 3]


def test_the_first_failure_is_reported_not_its_echo(tmp_path):
    with pytest.raises(AssertionError, match=r"(?s)rank 1 failed.*no such bucket"):
        on_processes(2, _second_rank_fails_while_the_first_waits, scratch=tmp_path)


def test_threads_report_the_first_failure():
    with pytest.raises(AssertionError, match="rank 1 failed") as caught:
        on_threads(2, _second_rank_fails_while_the_first_waits, timeout=timedelta(seconds=2))
    assert isinstance(caught.value.__cause__, ValueError)
