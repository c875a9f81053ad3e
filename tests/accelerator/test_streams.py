"""Streams, events and memory: what is missing is found every time, what is right never accused."""

from collections.abc import Iterator

import pytest
import torch
from accelerator import sim


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    sim.set_device(0)
    sim.set_delays(1e-4)
    yield
    sim.set_delays(0)
    torch.accelerator.synchronize()
    sim.reset()


def main() -> torch.Stream:
    return torch.accelerator.current_stream()


@pytest.fixture
def side() -> torch.Stream:
    return torch.Stream(device="sim")


@pytest.mark.parametrize("waits", [True, False])
def test_reading_what_another_stream_writes(side: torch.Stream, *, waits: bool) -> None:
    for seed in range(100):
        sim.reset()
        sim.set_delays(1e-4, seed=seed)
        written = torch.ones(100, device="sim")
        if waits:
            side.wait_stream(main())
        with side:
            read = written + 1
        main().wait_stream(side)
        assert bool(sim.hazards()) is not waits
        del read


@pytest.mark.parametrize("waits", [True, False])
def test_writing_what_another_stream_still_reads(side: torch.Stream, *, waits: bool) -> None:
    for seed in range(100):
        sim.reset()
        sim.set_delays(1e-4, seed=seed)
        shared = torch.ones(100, device="sim")
        side.wait_stream(main())
        with side:
            total = shared.sum()
        if waits:
            main().wait_stream(side)
        shared.zero_()
        assert bool(sim.hazards()) is not waits
        main().wait_stream(side)
        del total
