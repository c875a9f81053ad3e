"""Both wrappers in a world of any size, in one process: what grows with the world?

    python benchmarks/fake_world.py 8 100000

Nobody else is there. torch's own ``fake`` process group stands for all other ranks of
ShardedDataParallel; torch's own wrapper cannot end a backward pass on it (torch 2.13: futures of
its messages are empty, which torch's reducer takes for an error), so DistributedDataParallel has
one here whose messages hold what they were given. Other ranks say in the store what this one says.
Prints one line for each wrapper and world: seconds and memory to wrap, seconds of planning, of a
step when planning has ended, and how much of the store was used.
"""

import argparse
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo  # so that no wrapper pays for the import
import torch.distributed as dist
from msgspec import Struct
from torch import nn
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.testing._internal.distributed import fake_pg  # noqa: F401 registers the backend

import gradweave

MOST_STEPS = 600
SETTLED_STEPS = 20


class EchoStore(Store):
    """A store in which all say what one rank says; it counts how often it was asked."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.world, self.asked, self.keys_asked = world, 0, 0
        self.values: dict[str, bytes] = {}
        self.most_kept = 0

    def _said(self, key: str) -> bytes | None:
        topic, _, name = key.rpartition("/")
        if key not in self.values and name.isdecimal():
            key = f"{topic}/0"
        return self.values.get(key)

    def _count(self, keys: int = 1) -> None:
        self.asked += 1
        self.keys_asked += keys
        self.most_kept = max(self.most_kept, len(self.values))

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self.values[key] = value
        self._count()

    def get(self, key: str) -> bytes | None:  # type: ignore[override]
        self._count()
        return self._said(key)

    def add(self, key: str, value: int) -> int:
        total = int(self.values.get(key, b"0")) + value * self.world
        self.values[key] = str(total).encode()
        self._count()
        return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:  # type: ignore[override]
        self._count()
        if self.values.get(key, b"") == expected:
            self.values[key] = desired
        return self.values.get(key, expected)

    def check(self, keys: list[str]) -> bool:
        self._count(len(keys))
        return all(self._said(key) is not None for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes | None]:  # type: ignore[override]
        self._count(len(keys))
        return [self._said(key) for key in keys]

    def deleteKey(self, key: str) -> bool:  # noqa: N802 torch's name
        self._count()
        return self.values.pop(key, None) is not None

    def wait(self, keys: list[str], *timeout: Any) -> None:
        pass

    def clone(self) -> "EchoStore":
        return self


class EchoGroup(dist.ProcessGroup):
    """A group whose other ranks all have what this one has; sums stay as they are."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._store = store

    def get_group_store(self) -> Store:
        return self._store

    def _get_backend(self, _device: torch.device) -> dist.ProcessGroup:  # type: ignore[override]
        return self  # which has no time-out to tell

    def getBackendName(self) -> str:  # noqa: N802 torch's name
        return "echo"

    def allreduce(self, tensors: list[torch.Tensor], *_options: Any) -> dist.Work:  # type: ignore[override]
        return _over(tensors)

    def broadcast(self, tensors: list[torch.Tensor], *_options: Any) -> dist.Work:  # type: ignore[override]
        return _over(tensors)

    def allgather(self, outputs: Any, inputs: list[torch.Tensor], *_options: Any) -> dist.Work:  # type: ignore[override]
        for output in outputs[0]:
            output.copy_(inputs[0])
        return _over(outputs)

    def _allgather_base(
        self, output: torch.Tensor, mine: torch.Tensor, *_options: Any
    ) -> dist.Work:
        output.view(self.size(), -1).copy_(mine.view(1, -1).expand(self.size(), -1))
        return _over([output])

    def barrier(self, *_options: Any) -> dist.Work:
        return _over([torch.zeros(1)])


def _over(result: object) -> dist.Work:
    future: torch.futures.Future[object] = torch.futures.Future()
    future.set_result(result)
    make: Any = torch._C._distributed_c10d  # noqa: SLF001 torch's own Python groups use it
    work: dist.Work = make._create_work_from_future(future)  # noqa: SLF001
    return work


def _made(store: Store, rank: int, size: int, _timeout: object) -> EchoGroup:
    return EchoGroup(store, rank, size)


dist.Backend.register_backend("echo", _made, devices=["cpu"])


class Found(Struct, frozen=True, kw_only=True):
    """One wrapper in one world."""

    wrapper: str
    world: int
    wrapping_s: float
    wrapping_bytes: int | None  # Python's, at most; None: not asked for
    planning_steps: int
    planning_s: float
    step_s: float
    keys_asked: int  # of the store, in all
    keys_kept: int  # at most at a time


@contextmanager
def fake_world(backend: str, world: int) -> Iterator[EchoStore]:
    store = EchoStore(world)
    dist.init_process_group(backend, rank=0, world_size=world, store=store)
    try:
        yield store
    finally:
        dist.destroy_process_group()


def wrapped(wrapper: str) -> Any:
    """Wrap a model whose layers 100,000 ranks divide evenly."""
    model = nn.Sequential(
        nn.Linear(250, 400, bias=False), nn.ReLU(), nn.Linear(400, 250, bias=False)
    )
    if wrapper == "sharded":
        return gradweave.ShardedDataParallel(model, collective="native")
    return gradweave.DistributedDataParallel(model, collective="native")


BACKENDS = {"ddp": "echo", "sharded": "fake"}


def measure(
    wrapper: str, world: int, *, traces_memory: bool, settled_steps: int = SETTLED_STEPS
) -> Found:
    with fake_world(BACKENDS[wrapper], world) as store:
        if traces_memory:
            tracemalloc.start()
        started_s = time.perf_counter()
        model = wrapped(wrapper)
        wrapping_s = time.perf_counter() - started_s
        peak = tracemalloc.get_traced_memory()[1] if traces_memory else None
        tracemalloc.stop()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.randn(4, 250)

        def step() -> None:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()

        started_s, steps = time.perf_counter(), 0
        while model.metrics()["stage"] != "settled" and steps < MOST_STEPS:
            step()
            steps += 1
        planning_s = time.perf_counter() - started_s
        started_s = time.perf_counter()
        for _ in range(settled_steps):
            step()
        step_s = (time.perf_counter() - started_s) / settled_steps
        return Found(
            wrapper=wrapper,
            world=world,
            wrapping_s=wrapping_s,
            wrapping_bytes=peak,
            planning_steps=steps,
            planning_s=planning_s,
            step_s=step_s,
            keys_asked=store.keys_asked,
            keys_kept=store.most_kept,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("worlds", nargs="*", type=int, default=[8, 100_000])
    parser.add_argument("--memory", action="store_true", help="trace Python's memory, slowly")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for wrapper in BACKENDS:
        measure(wrapper, 2, traces_memory=False)  # the first pays for what torch loads
        for world in options.worlds:
            found = measure(wrapper, world, traces_memory=options.memory)
            memory = f", {found.wrapping_bytes / 2**20:.1f} MiB" if found.wrapping_bytes else ""
            print(
                f"{wrapper:7} world {world:>7,}: wrapped in {found.wrapping_s * 1e3:.0f} ms"
                f"{memory}; planned in {found.planning_steps} steps, {found.planning_s:.2f} s; "
                f"a step {found.step_s * 1e3:.2f} ms; {found.keys_asked} keys asked for, at most "
                f"{found.keys_kept} kept"
            )


if __name__ == "__main__":
    main()
