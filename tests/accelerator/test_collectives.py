"""The process group behaves like NCCL's: on streams of its own, and the host goes on."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerator import sim
from accelerator.worlds import on_devices

WORLD = 2


def mine(group: dist.ProcessGroup, *shape: int) -> torch.Tensor:
    """Rank r has r + 1 everywhere."""
    return torch.full(shape or (6,), group.rank() + 1.0, device="sim")


Results = list[tuple[torch.Tensor, list[float]]]


def reductions(group: dist.ProcessGroup) -> Results:
    results: Results = []
    for op, expected in (
        (dist.ReduceOp.SUM, 3.0),
        (dist.ReduceOp.AVG, 1.5),
        (dist.ReduceOp.MAX, 2.0),
        (dist.ReduceOp.PRODUCT, 2.0),
    ):
        x = mine(group)
        dist.all_reduce(x, op)
        results.append((x, [expected] * 6))
    x = mine(group)
    dist.reduce(x, 0)
    results.append((x, [3.0 if group.rank() == 0 else 2.0] * 6))
    for op, total in ((dist.ReduceOp.SUM, 3.0), (dist.ReduceOp.AVG, 1.5)):
        x = torch.empty(2, device="sim")
        dist.reduce_scatter_tensor(x, torch.arange(4.0, device="sim") * (group.rank() + 1), op)
        results.append((x, [2 * group.rank() * total, (2 * group.rank() + 1) * total]))
    x = torch.empty(2, device="sim")
    dist.reduce_scatter(x, [mine(group, 2), mine(group, 2) * 2])
    results.append((x, [3.0 * (group.rank() + 1)] * 2))
    return results


def copies(group: dist.ProcessGroup) -> Results:
    x = mine(group)
    dist.broadcast(x, 1)
    results = [(x, [2.0] * 6)]
    x = torch.empty(4, device="sim")
    dist.all_gather_into_tensor(x, mine(group, 2))
    results.append((x, [1.0, 1.0, 2.0, 2.0]))
    gathered = [torch.empty(2, device="sim") for _ in range(WORLD)]
    dist.all_gather(gathered, mine(group, 2))
    results.append((torch.stack(gathered)[:, 0], [1.0, 2.0]))
    is_root = group.rank() == 0
    targets = [torch.empty(2, device="sim") for _ in range(WORLD)] if is_root else None
    dist.gather(mine(group, 2), targets, dst=0)
    if targets:
        results.append((torch.stack(targets)[:, 0], [1.0, 2.0]))
    x = torch.empty(2, device="sim")
    dist.scatter(x, [mine(group, 2), mine(group, 2) * 5] if is_root else None, src=0)
    results.append((x, [1.0 if is_root else 5.0] * 2))
    x = torch.empty(4, device="sim")
    dist.all_to_all_single(x, mine(group, 4))
    results.append((x, [1.0, 1.0, 2.0, 2.0]))
    return results


def messages(group: dist.ProcessGroup) -> Results:
    peer = 1 - group.rank()
    x = torch.empty(6, device="sim")
    operations = [dist.P2POp(dist.isend, mine(group), peer), dist.P2POp(dist.irecv, x, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    results = [(x, [peer + 1.0] * 6)]
    if group.rank() == 0:
        dist.send(mine(group), 1)
    else:
        x = torch.empty(6, device="sim")
        dist.recv(x, 0)
        results.append((x, [1.0] * 6))
    return results


def coalesced(group: dist.ProcessGroup) -> Results:
    reduced = [mine(group), mine(group) * 3]
    with dist._coalescing_manager(group, async_ops=True) as all_reduces:
        for x in reduced:
            dist.all_reduce(x)
    all_reduces.wait()
    gathered = [torch.empty(2, device="sim") for _ in range(2)]
    with dist._coalescing_manager(group, async_ops=True) as all_gathers:
        for x in gathered:
            dist.all_gather_into_tensor(x, mine(group, 1))
    all_gathers.wait()
    return [
        (reduced[0], [3.0] * 6),
        (reduced[1], [9.0] * 6),
        *((x, [1.0, 2.0]) for x in gathered),
    ]


def test_every_collective(tmp_path: Path) -> None:
    on_devices(WORLD, every_collective, scratch=tmp_path)


def every_collective(group: dist.ProcessGroup) -> None:
    torch.accelerator.synchronize()
    sim.reset()
    results = [each for kind in (reductions, copies, messages, coalesced) for each in kind(group)]
    assert sim.counters().host_waits == {}
    for x, expected in results:
        assert x.tolist() == expected
    only_devices = dist.new_group(backend="simccl")
    sim.reset()
    dist.barrier(only_devices)
    assert sim.counters().host_waits == {"barrier": 1}


@pytest.mark.parametrize("waits", [True, False])
def test_results_must_be_waited_for(tmp_path: Path, *, waits: bool) -> None:
    on_devices(WORLD, reading_results, waits, scratch=tmp_path)


def reading_results(group: dist.ProcessGroup, waits: bool) -> None:  # noqa: FBT001
    for seed in range(100):
        sim.set_delays(5e-5, seed=seed)
        x = mine(group)
        work = dist.all_reduce(x, async_op=True)
        if waits:
            work.wait()
        y = x * 2
        assert bool(sim.hazards(strict=True)) is not waits, seed
        work.wait()
        torch.accelerator.synchronize()
        del y
        sim.reset()


def test_futures_carry_the_order(tmp_path: Path) -> None:
    on_devices(WORLD, futures, scratch=tmp_path)


def futures(group: dist.ProcessGroup) -> None:
    torch.accelerator.synchronize()
    sim.reset()
    before = mine(group)
    with sim.held():  # so that nothing of this rank has begun
        work = dist.all_reduce(before * 1, async_op=True)
        future = work.get_future()
        assert future.done()  # when the stream gets there is another matter
        result = future.then(lambda done: done.value()[0] * 2).wait()
        assert not work.is_completed()
        assert not torch.accelerator.current_stream().query()
        assert sim.counters().host_waits == {}
    assert result.tolist() == [6.0] * 6
    assert work.is_completed()
    assert sim.hazards(strict=True) == []


def test_inputs_may_be_freed_at_once(tmp_path: Path) -> None:
    on_devices(WORLD, freeing, scratch=tmp_path)


def freeing(group: dist.ProcessGroup) -> None:
    for seed in range(20):
        sim.set_delays(2e-4, seed=seed)
        out = torch.empty(12, device="sim")
        work = dist.all_gather_into_tensor(out, mine(group), async_op=True)
        other = torch.zeros(6, device="sim")
        work.wait()
        assert out.tolist() == [1.0] * 6 + [2.0] * 6
        del other


@pytest.mark.parametrize("same", [True, False])
def test_two_communicators_need_one_order(tmp_path: Path, *, same: bool) -> None:
    on_devices(WORLD, two_communicators, same, scratch=tmp_path)


def two_communicators(group: dist.ProcessGroup, same: bool) -> None:  # noqa: FBT001
    first = dist.new_group(backend="simccl")
    second = dist.new_group(backend="simccl")
    in_order = [first, second] if same or group.rank() == 0 else [second, first]
    tensors = [mine(group) for _ in in_order]
    works = [
        dist.all_reduce(x, group=each, async_op=True)
        for x, each in zip(tensors, in_order, strict=True)
    ]
    for work in works:
        work.wait()
    torch.accelerator.synchronize()
    found = sim.hazards()
    if same:
        assert found == []
    else:
        assert found
        assert all(each.startswith("launch order: before all_reduce") for each in found)
    sim.reset()


def test_different_collectives_do_not_match(tmp_path: Path) -> None:
    on_devices(WORLD, mismatched, scratch=tmp_path)


def mismatched(group: dist.ProcessGroup) -> None:
    work = dist.all_reduce(mine(group, 3 + group.rank()), async_op=True)
    with pytest.raises(RuntimeError, match=r"do not match: rank 0 launched all_reduce 3 Float"):
        torch.accelerator.synchronize()
    assert not work.is_success()
    sim.reset()


def test_a_collective_that_another_rank_leaves_out_ends_with_an_error(tmp_path: Path) -> None:
    on_devices(WORLD, left_out, scratch=tmp_path, timeout=timedelta(seconds=3))


def left_out(group: dist.ProcessGroup) -> None:
    if group.rank() == 0:
        work = dist.all_reduce(mine(group), async_op=True)
        with pytest.raises(RuntimeError, match="kernel of the simulated device failed"):
            torch.accelerator.synchronize()
        assert work.exception() is not None
    sim.reset()


def test_ranks_may_be_threads() -> None:
    store = dist.HashStore()

    def rank_main(rank: int) -> list[float]:
        sim.set_device(rank)
        group = dist.ProcessGroup(store, rank, WORLD)
        custom = dist.ProcessGroup.BackendType.CUSTOM
        backend = sim.communicator(
            store, rank, WORLD, name="threads", timeout=timedelta(seconds=20)
        )
        group._set_default_backend(custom)
        group._register_backend(torch.device("sim"), custom, backend)
        x = mine(group)
        for _ in range(3):
            work = group.allreduce([x])
            work.wait()
            x = x.clone()
        return x.tolist()

    with ThreadPoolExecutor(WORLD) as threads:
        results = list(threads.map(rank_main, range(WORLD)))
    assert results == [[12.0] * 6] * WORLD
    assert [launch.what for launch in sim.launches()] == ["all_reduce 6 Float 0"] * 6
    assert sim.hazards(strict=True) == []
    sim.reset()


def test_tensors_of_the_cpu_are_refused(tmp_path: Path) -> None:
    on_devices(WORLD, refused, scratch=tmp_path)


def refused(group: dist.ProcessGroup) -> None:
    only_devices = dist.new_group(backend="simccl")
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(3), group=only_devices)
    with pytest.raises(RuntimeError, match="must be contiguous"):
        dist.all_reduce(mine(group, 3, 3).t()[1:])
