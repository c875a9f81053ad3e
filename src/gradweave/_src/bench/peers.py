"""Torch's own runtimes, as ranks of a training benchmark run them, to compare with.

No ``from __future__ import annotations`` here: torch looks at a hook's annotations.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave._src.bench.buckets import bucket_bytes, check_buckets
from gradweave._src.bench.peer_plans import POWER_SGD, TORCH, power_sgd_rank
from gradweave._src.bench.trainee import BATCH, Running, Seen, Trainee, is_filled
from gradweave._src.bench.training import Case
from gradweave._src.comm.small_messages import largest
from gradweave._src.measure.spans import Sent, SpanRecorder, watch
from gradweave._src.torch_internals import unlisted_gloo_group
from gradweave._src.vocabulary import Operation

Runner = Callable[[Case, Trainee], AbstractContextManager[Running]]
Hook = Callable[[Any, Any], Sent]

# The earliest that torch allows: it compresses from the third step on.
POWER_SGD_BEGINS = 2
# All gradients of a replayed tensor are equal, so its matrix has one direction and others vanish:
# this is what torch recommends for them.
POWER_SGD_EPSILON = 1e-8
COMPUTED_STEPS = 3


class _Hooked(NamedTuple):
    """A communication hook, and the state that it is called with."""

    hook: Hook
    state: object


def _send(
    state: _Hooked,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Call the hook. torch refuses bf16_compress_hook without NCCL, by its name; gloo can do it."""
    return state.hook(state.state, bucket)


@contextmanager
def _wrapped(
    case: Case,
    trainee: Trainee,
    hooked: _Hooked | None = None,
    *,
    recorder: SpanRecorder | None = None,
) -> Iterator[Running]:
    recorder = recorder or trainee.recorder()
    ddp = TorchDDP(
        trainee.model,
        process_group=trainee.group,
        init_sync=False,
        bucket_cap_mb=case.bucket_cap_mb,
    )
    if case.noting:
        watch(ddp, recorder, None if hooked is None else partial(_send, hooked))
    elif hooked is not None:
        ddp.register_comm_hook(hooked, _send)
    yield Running(
        partial(trainee.iterate, ddp, recorder if case.noting else None),
        partial(trainee.timelines, recorder),
        partial(trainee.gradients_are, trainee.mean),
    )
    check_buckets(ddp, bucket_bytes(case.planned, trainee.bytes_of))


def _rounding(hook: Hook) -> Runner:
    def run(case: Case, trainee: Trainee) -> AbstractContextManager[Running]:
        return _wrapped(case, trainee, _Hooked(hook, trainee.group))

    return run


@contextmanager
def _power_sgd(case: Case, trainee: Trainee) -> Iterator[Running]:
    """Run PowerSGD, whose gradients are not the mean and need only be alike on all ranks."""
    with ThreadPoolExecutor(1) as thread:
        state = InTurn(_power_sgd_state(case, trainee.group), thread)
        with _wrapped(case, trainee, _Hooked(in_turn, state)) as run:

            def is_correct() -> bool:
                while not state.is_compressing:
                    run.step()
                return trainee.gradients_are_alike()

            yield Running(run.step, run.timelines, is_correct)


def computing_s(case: Case, trainee: Trainee) -> list[float]:
    """Return the seconds that PowerSGD computes for each bucket, on the slowest rank.

    Each rank is by itself here, so no message takes any time, and all compute at once.
    """
    alone = unlisted_gloo_group(HashStore(), rank=0, ranks=1, timeout=None)
    with ThreadPoolExecutor(1) as thread:
        state = InTurn(_power_sgd_state(case, alone), thread)
        ddp = TorchDDP(
            trainee.model,
            process_group=alone,
            init_sync=False,
            bucket_cap_mb=case.bucket_cap_mb,
        )
        ddp.register_comm_hook(state, in_turn)
        while not state.is_compressing:
            trainee.iterate(ddp, None)
        taken_s = []
        for _ in range(COMPUTED_STEPS):
            trainee.iterate(ddp, None)
            taken_s.append([state.taken_s[number] for number in sorted(state.taken_s)])
    return largest(trainee.group, np.median(taken_s, axis=0).tolist())


def _power_sgd_state(case: Case, group: dist.ProcessGroup) -> PowerSGDState:
    return PowerSGDState(
        group,
        matrix_approximation_rank=power_sgd_rank(case.runtime),
        start_powerSGD_iter=POWER_SGD_BEGINS,
        orthogonalization_epsilon=POWER_SGD_EPSILON,
    )


class InTurn:
    """PowerSGD's state, and the thread that its buckets take turns on."""

    def __init__(self, state: PowerSGDState, thread: ThreadPoolExecutor) -> None:
        self.state, self.thread = state, thread
        self.taken_s: dict[int, float] = {}  # in the last step, by bucket

    @property
    def is_compressing(self) -> bool:
        """Say whether the last step was compressed."""
        return bool(self.state.iter > POWER_SGD_BEGINS)


def in_turn(
    state: InTurn,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Run torch's hook for PowerSGD on one bucket after the other.

    It sends the second and third message of a bucket from the threads that gloo calls back on, and
    waits there. Two buckets at once leave gloo without a thread, for ever; and with more threads
    ranks would send in different orders.
    """
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    def send() -> None:
        started_s = time.perf_counter()
        try:
            sent = powerSGD_hook(state.state, bucket).wait()
        except Exception as error:  # noqa: BLE001 it belongs to whatever waits for the future
            done.set_exception(error)  # type: ignore[arg-type]
            return
        state.taken_s[bucket.index()] = time.perf_counter() - started_s
        done.set_result(sent)

    state.thread.submit(send)
    return done


@contextmanager
def _zero(case: Case, trainee: Trainee) -> Iterator[Running]:
    """Run ZeRO: every rank updates a share of the parameters, and broadcasts it in one message."""
    # Importing it compiles what nobody needs here, which takes a second and warns.
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415

    before = [(parameter, parameter.data) for parameter in trainee.model.parameters()]
    zero = ZeroRedundancyOptimizer(
        trainee.model.parameters(),
        Seen,
        process_group=trainee.group,
        parameters_as_bucket_view=True,
    )
    assert isinstance(zero.optim, Seen)
    seen, recorder = zero.optim, trainee.recorder()
    parameters = list(trainee.model.parameters())
    with _wrapped(case, trainee, recorder=recorder) as wrapped:

        def step() -> None:
            wrapped.step()
            began = recorder.mark()
            zero.step()
            if case.noting:
                nbytes = sum(parameter.nbytes for parameter in parameters)
                recorder.done(began, parameters, nbytes, operation="broadcast")

        def is_correct() -> bool:
            """Return whether gradients have their mean, and what a rank writes comes to all."""
            seen.expected = trainee.mean
            step()
            seen.expected = None
            written = (is_filled(parameter, trainee.mean) for parameter in parameters)
            return wrapped.is_correct() and trainee.on_all(seen.is_correct, *written)

        yield Running(step, wrapped.timelines, is_correct)
    for parameter, data in before:
        parameter.data = data


@contextmanager
def _fsdp2(case: Case, trainee: Trainee) -> Iterator[Running]:
    """Run fully_shard: parameters are gathered for each pass, and gradients scattered after it."""
    recorder = trainee.recorder()
    model = trainee.model.in_groups(case.planned.lengths)
    mesh = DeviceMesh.from_group(trainee.group, "cpu")
    parameters = {name: parameter for parameter, name in trainee.names.items()}
    for group, bucket in zip(model.groups, reversed(case.planned.buckets), strict=True):
        sharded = fully_shard(group, mesh=mesh)
        if case.noting:
            noted = [parameters[name] for name in bucket.tensors]
            gather, scatter = (_Noted(one, recorder, noted) for one in MESSAGES)
            sharded.set_custom_all_gather(gather)  # type: ignore[arg-type]
            sharded.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]
    fully_shard(model, mesh=mesh)

    def step() -> None:
        model.zero_grad()
        recorder.begin()
        loss = model(BATCH)
        recorder.backward()
        loss.backward()
        recorder.ready()

    def is_correct() -> bool:
        """Return whether shards of gradients have their mean, and what ranks write is gathered.

        A rank that has no part of a small parameter has no part of its gradient.
        """
        shards = [(_local(p), _local(p.grad)) for p in model.parameters()]
        is_averaged = trainee.on_all(*(is_filled(mean, trainee.mean) for _, mean in shards))
        with torch.no_grad():
            for shard, _ in shards:
                shard.fill_(trainee.group.rank() + 1)
        total = 0.0
        is_gathered = []
        for group in model.groups:
            assert isinstance(group, FSDPModule)
            group.unshard()
            total += sum(float(p.detach().double().sum()) for p in group.parameters())
            is_gathered += [bool(parameter.all()) for parameter in group.parameters()]
            group.reshard()
        return trainee.is_alike(total) and trainee.on_all(is_averaged, *is_gathered)

    yield Running(step, partial(trainee.timelines, recorder), is_correct)


class _Noted:
    """A message of fully_shard's, as it sends them on a host, with the time noted."""

    def __init__(
        self, operation: Operation, recorder: SpanRecorder, parameters: list[nn.Parameter]
    ) -> None:
        self._operation, self._recorder, self._parameters = operation, recorder, parameters
        self._nbytes = sum(parameter.nbytes for parameter in parameters)

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **options: Any
    ) -> dist.Work | None:
        began = self._recorder.mark()
        work = MESSAGES[self._operation](output_tensor, input_tensor, **options)
        self._recorder.done(began, self._parameters, self._nbytes, operation=self._operation)
        return work


# torch 2.13 has new names for them, and warns of the old ones.
MESSAGES: Mapping[Operation, Callable[..., dist.Work | None]] = {
    "all-gather": getattr(dist, "all_gather_single", dist.all_gather_into_tensor),
    "reduce-scatter": getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor),
}


def _local(tensor: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


PEERS: Mapping[str, Runner] = {
    TORCH: _wrapped,
    "torch-fp16": _rounding(fp16_compress_hook),
    "torch-bf16": _rounding(bf16_compress_hook),
    POWER_SGD: _power_sgd,
    "zero": _zero,
    "fsdp2": _fsdp2,
}
