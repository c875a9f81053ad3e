"""Streams, events and memory: what is missing is found every time, what is right never accused.

Each hazard is tried under a hundred draws of the delays, with the wait and without it.
"""

import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from accelerator import sim

DRAWS = 100
MiB = 1 << 20


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    sim.set_device(0)
    sim.set_delays(5e-5)
    sim.reset()
    yield
    sim.set_delays(0)
    torch.accelerator.synchronize()
    sim.reset()


@pytest.fixture
def side() -> torch.Stream:
    return torch.Stream(device="sim")


def main() -> torch.Stream:
    return torch.accelerator.current_stream()


def draws() -> Iterator[int]:
    """With each of these delays, after what came before is over and forgotten."""
    for seed in range(DRAWS):
        torch.accelerator.synchronize()
        sim.reset()
        sim.set_delays(5e-5, seed=seed)
        yield seed


def ones() -> torch.Tensor:
    return torch.ones(64, device="sim")


@pytest.mark.parametrize("waits", [True, False])
def test_reading_what_another_stream_writes(side: torch.Stream, *, waits: bool) -> None:
    for seed in draws():
        written = ones()
        if waits:
            side.wait_stream(main())
        with side:
            read = written + 1
        assert bool(sim.hazards()) is not waits, seed
        if not waits:
            assert "read before an earlier write has ended: aten::add" in sim.hazards()[0]
        main().wait_stream(side)
        del read


@pytest.mark.parametrize("waits", [True, False])
def test_writing_what_another_stream_still_reads(side: torch.Stream, *, waits: bool) -> None:
    for seed in draws():
        shared = ones()
        side.wait_stream(main())
        with side:
            total = shared.sum()
        if waits:
            main().wait_stream(side)
        shared.zero_()
        assert bool(sim.hazards()) is not waits, seed
        main().wait_stream(side)
        del total


@pytest.mark.parametrize("waits", [True, False])
def test_writing_what_another_stream_still_writes(side: torch.Stream, *, waits: bool) -> None:
    for seed in draws():
        shared = ones()
        side.wait_stream(main())
        with side:
            shared.add_(1)
        if waits:
            main().wait_event(side.record_event())
        shared.zero_()
        assert bool(sim.hazards()) is not waits, seed
        main().wait_stream(side)


@pytest.mark.parametrize("way", ["recorded", "waited for", "neither"])
def test_memory_freed_while_another_stream_reads_it(side: torch.Stream, way: str) -> None:
    for seed in draws():
        shared = ones()
        side.wait_stream(main())
        with side:
            total = shared.sum()
        if way == "recorded":
            shared.record_stream(side)
        if way == "waited for":
            main().wait_stream(side)
        del shared
        other = torch.empty(10_000, device="sim")  # any allocation might have got the memory
        assert bool(sim.hazards()) is (way == "neither"), seed
        if way == "neither":
            assert "freed before a use on another stream has ended" in sim.hazards()[0]
        main().wait_stream(side)
        del other, total


def test_recorded_memory_is_given_out_again_only_when_the_stream_is_through(
    side: torch.Stream,
) -> None:
    numel = MiB + 2000  # other tests leave no blocks of this size
    shared = torch.ones(numel, device="sim")
    address = shared.data_ptr()
    side.wait_stream(main())
    with sim.held(side):
        with side:
            total = shared.sum()
        shared.record_stream(side)
        del shared
        other = torch.empty(numel, device="sim")
        assert other.data_ptr() != address
    torch.accelerator.synchronize()
    assert torch.empty(numel, device="sim").data_ptr() == address
    assert total.item() == numel


def test_memory_goes_back_to_its_stream_at_once_and_is_poisoned() -> None:
    with sim.held():
        first = torch.zeros(MiB + 1000, device="sim")
        address = first.data_ptr()
        del first
        second = torch.empty(MiB + 1000, device="sim")
        assert second.data_ptr() == address
    assert second.isnan().all().item()


@pytest.mark.parametrize("waits", [True, False])
def test_memory_used_first_on_another_stream(side: torch.Stream, *, waits: bool) -> None:
    ones()  # leaves memory that was used on the current stream
    fresh = torch.empty(64, device="sim")
    if waits:
        side.wait_stream(main())
    with side:
        fresh.zero_()
    assert bool(sim.hazards()) is not waits
    main().wait_stream(side)


def test_neighbours_in_one_buffer_do_not_meet(side: torch.Stream) -> None:
    buffer = torch.zeros(4, 100, device="sim")
    side.wait_stream(main())
    with side:
        buffer[1].add_(1)
        buffer[:, 50:].mul_(2)
    buffer[0, :50].add_(1)
    buffer[2:, 10:50].mul_(2)
    assert sim.hazards() == []
    buffer[:, 49:51].add_(1)
    assert sim.hazards() != []
    main().wait_stream(side)


@pytest.mark.parametrize("how", ["stream", "event", "device", "item", "query"])
def test_the_host_may_order_streams_too(side: torch.Stream, how: str) -> None:
    written = ones()
    event = main().record_event()
    if how == "stream":
        main().synchronize()
    if how == "event":
        event.synchronize()
    if how == "device":
        torch.accelerator.synchronize()
    if how == "item":
        written[0].item()
    while how == "query" and not event.query():
        time.sleep(1e-4)
    with side:
        read = written + 1
    main().wait_stream(side)
    assert sim.hazards() == []
    assert sim.hazards(strict=True) == []
    del read


def test_events_order_what_came_before_them_only(side: torch.Stream) -> None:
    first, second = ones(), ones()
    event = main().record_event()
    second.add_(1)
    side.wait_event(event)
    with side:
        early = first + 1
        assert sim.hazards() == []
        late = second + 1
    assert len(sim.hazards()) == 1
    main().wait_stream(side)
    del early, late


def test_what_another_thread_has_waited_for_is_known_to_it_alone_if_strict(
    side: torch.Stream,
) -> None:
    from threading import Thread  # noqa: PLC0415

    written = ones()
    thread = Thread(target=torch.accelerator.synchronize, args=(0,))
    thread.start()
    thread.join()
    with side:
        read = written + 1
    assert sim.hazards() == []
    assert len(sim.hazards(strict=True)) == 1
    main().wait_stream(side)
    del read


def test_a_stream_that_was_waited_for_is_done() -> None:
    """Often enough to meet its thread between telling that it is and noting it."""
    sim.set_delays(0)
    for _ in range(1000):
        ones()
        torch.accelerator.synchronize()
        assert main().query()


def test_the_host_runs_ahead() -> None:
    sim.keep_kernels()
    with sim.held():
        x = ones()
        for _ in range(10):
            x = x + 1
        event = main().record_event()
        returned_ns = time.monotonic_ns()
        assert not main().query()
        assert not event.query()
    torch.accelerator.synchronize()
    assert main().query()
    assert event.query()
    sim.keep_kernels(keep=False)
    kernels = [kernel for kernel in sim.kernels() if kernel.op == "aten::add"]
    assert len(kernels) == 10
    assert kernels[0].launched_ns < returned_ns < kernels[0].start_ns
    assert x[0].item() == 11
    for before, after in pairwise(kernels):
        assert before.launched_ns <= before.start_ns < before.end_ns <= after.start_ns


def test_events_time_the_stream_and_not_the_host() -> None:
    sim.set_delays(0.01, jitter=0.5, seed=3)
    sim.keep_kernels()
    events = [torch.Event(device="sim", enable_timing=True) for _ in range(11)]
    x = ones()
    for event in events:
        event.record()
        x = x + 1
    torch.accelerator.synchronize()
    sim.keep_kernels(keep=False)
    adds = [kernel for kernel in sim.kernels() if kernel.op == "aten::add"]
    # Event n + 1 stands between the kernels n and n + 1.
    for event, before, after in zip(events[2:], adds[1:-1], adds[2:], strict=True):
        elapsed_ns = events[1].elapsed_time(event) * 1e6
        assert before.end_ns - adds[1].start_ns <= elapsed_ns <= after.start_ns - adds[0].end_ns


def test_an_event_without_timing_has_no_time() -> None:
    first, second = torch.Event(device="sim"), torch.Event(device="sim")
    first.record()
    second.record()
    second.synchronize()
    with pytest.raises(ValueError, match="enable_timing=True"):
        first.elapsed_time(second)


def test_delays_are_drawn_from_the_seed() -> None:
    def delays_ns(seed: int) -> list[int]:
        torch.accelerator.synchronize()
        sim.reset()
        sim.set_delays(1e-4, jitter=0.5, seed=seed)
        x = ones()
        for _ in range(5):
            x.add_(1)
        torch.accelerator.synchronize()
        return [kernel.delay_ns for kernel in sim.kernels()]

    sim.keep_kernels()
    first, second, first_again = delays_ns(1), delays_ns(2), delays_ns(1)
    sim.keep_kernels(keep=False)
    assert first == first_again != second
    assert len(set(first)) == 6
    assert all(50_000 <= delay_ns <= 150_000 for delay_ns in first + second)


def test_what_makes_the_host_wait_is_counted() -> None:
    x = ones()
    pinned = torch.empty(64).pin_memory()
    sim.reset()
    pinned.copy_(x, non_blocking=True)
    x.copy_(pinned, non_blocking=True)
    x.add_(1)
    main().record_event().query()
    assert sim.counters().host_wait_count == 0
    assert sim.counters().bytes_to_host == sim.counters().bytes_to_device == x.nbytes
    x.cpu()
    x.copy_(torch.zeros(64))
    x.copy_(torch.zeros(64), non_blocking=True)
    torch.zeros(64).copy_(x, non_blocking=True)
    x.sum().item()
    main().synchronize()
    main().record_event().synchronize()
    torch.accelerator.synchronize()
    assert sim.counters().host_waits == {
        "copy to the host": 1,
        "copy from the host": 1,
        "copy from memory that is not pinned": 1,
        "copy to memory that is not pinned": 1,
        "item": 1,
        "stream.synchronize": 1,
        "event.synchronize": 1,
        "device.synchronize": 1,
    }


def test_where_the_host_waited_is_known() -> None:
    sim.trace_host_waits()
    try:
        ones().sum().item()
    finally:
        sim.trace_host_waits(trace=False)
    ((why, stack),) = sim.host_wait_stacks()
    assert why == "item"
    assert "test_where_the_host_waited_is_known" in stack


def test_a_copy_to_the_host_that_is_read_too_early_shows_poison() -> None:
    for seed in draws():
        pinned = torch.empty(64, pin_memory=True).zero_()
        assert pinned.is_pinned()
        with sim.held():
            pinned.copy_(ones(), non_blocking=True)
            event = main().record_event()
            assert pinned.isnan().all(), seed
        event.synchronize()
        assert (pinned == 1).all(), seed


def test_pinned_memory_that_is_changed_too_early_does_damage() -> None:
    pinned = torch.ones(64).pin_memory()
    with sim.held():
        x = pinned.to("sim", non_blocking=True)
        pinned.zero_()
    assert x.sum().item() == 0


def test_pinned_memory_is_given_out_again_only_when_copies_are_through() -> None:
    pinned = torch.ones(MiB).pin_memory()
    address = pinned.data_ptr()
    with sim.held():
        x = pinned.to("sim", non_blocking=True)
        del pinned
        other = torch.empty(MiB, pin_memory=True)
        assert other.data_ptr() != address
    assert x.sum().item() == MiB
    assert torch.empty(MiB, pin_memory=True).data_ptr() == address


def test_a_pinned_buffer_may_go_both_ways_on_one_stream() -> None:
    pinned = torch.full((64,), 3.0).pin_memory()
    with sim.held():
        x = pinned.to("sim", non_blocking=True)
        pinned.copy_(x * 2, non_blocking=True)
    main().synchronize()
    assert (pinned == 6).all()
    assert (x == 3).all().item()


@pytest.mark.parametrize("waits", [True, False])
def test_pinned_memory_between_streams(side: torch.Stream, *, waits: bool) -> None:
    pinned = torch.empty(64, pin_memory=True)
    pinned.copy_(ones(), non_blocking=True)
    if waits:
        side.wait_stream(main())
    with side:
        back = pinned.to("sim", non_blocking=True)
    assert bool(sim.hazards()) is not waits
    main().wait_stream(side)
    del back


def test_devices_have_streams_and_memory_of_their_own() -> None:
    assert torch.accelerator.device_count() == 4
    x = ones()
    y = x.to("sim:1")
    assert y.device.index == 1
    assert sim.hazards() == []
    with pytest.raises(RuntimeError, match="xpected all tensors"):
        x + y
    with pytest.raises(RuntimeError, match="xpected all tensors"):
        x + torch.ones(64)
    with sim.device(1):
        assert torch.accelerator.current_device_index() == 1
        assert torch.accelerator.current_stream() == torch.accelerator.current_stream(1)


def test_an_error_of_a_kernel_is_raised_by_the_next_wait() -> None:
    table = torch.zeros(3, device="sim")
    table[torch.tensor([7], device="sim")]
    with pytest.raises(RuntimeError, match="kernel of the simulated device failed earlier"):
        torch.accelerator.synchronize()
    assert len(sim.errors()) == 1
    torch.accelerator.synchronize()


def test_memory_is_counted() -> None:
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    x = torch.empty(MiB, device="sim")
    assert torch.accelerator.memory_allocated() == sim.memory_allocated() == before + 4 * MiB
    del x
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() == before + 4 * MiB


def test_generators() -> None:
    torch.manual_seed(3)
    first = torch.randn(8, device="sim"), torch.rand(8, device="sim")
    torch.manual_seed(3)
    second = torch.randn(8, device="sim"), torch.rand(8, device="sim")
    assert all(map(torch.equal, first, second))
    assert not torch.equal(torch.randn(8, device="sim"), first[0])
    state = sim.get_rng_state()
    drawn = torch.nn.functional.dropout(torch.ones(1000, device="sim"), 0.25)
    sim.set_rng_state(state)
    assert torch.equal(drawn, torch.nn.functional.dropout(torch.ones(1000, device="sim"), 0.25))
    assert 600 < (drawn > 0).sum().item() < 900
    own = torch.Generator(device="sim").manual_seed(5)
    again = torch.Generator(device="sim").manual_seed(5)
    one, other = torch.empty(8, device="sim"), torch.empty(8, device="sim")
    assert torch.equal(one.normal_(generator=own), other.normal_(generator=again))
