"""When gradients are ready and what messages cost, measured beside the training."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from msgspec.structs import replace
from torch import nn

from gradweave import collectives
from gradweave.comm import Communicator
from gradweave.comm.agree import broadcast_text, group_device, largest
from gradweave.comm.lanes import LANES
from gradweave.measure.backward import Iteration, Observer, observing, recording_of
from gradweave.measure.network import calibrate
from gradweave.network import Network
from gradweave.planning import BOTH_PASSES_COLLECTIVE, OPERATIONS
from gradweave.runtime.calibration import Calibration, Ended
from gradweave.runtime.options import AUTO, Options
from gradweave.runtime.window import ComputeWindow
from gradweave.trace import Trace
from gradweave.words import KIB, MIB, Passes

RECORD_WARMUP = 2
CALIBRATION_REPEATS = 3
LEAST_CALIBRATED_BYTES, MOST_CALIBRATED_BYTES = 64 * KIB, 16 * MIB
# Beside the backend's own: what is worth the thread it needs, for small messages and for tiers.
AUTO_COLLECTIVES = ("native", "recursive-doubling")
AUTO_TIERED = "blueconnect"


class Survey:
    """Each ``yield`` is one synchronised training step; all ranks take part."""

    def __init__(
        self,
        options: Options,
        *,
        module: nn.Module,
        parameters: dict[str, nn.Parameter],
        group: dist.ProcessGroup,
        make_group: Callable[[], dist.ProcessGroup],
        keeps_declared_order: bool,
        passes: Passes,
    ) -> None:
        self.batch_size = 1  # of the present step
        self._options, self._module, self._parameters = options, module, parameters
        self._group, self._make_group = group, make_group
        self._keeps_declared_order, self._passes = keeps_declared_order, passes
        self._device = group_device(group)
        self._calibration_groups: list[dist.ProcessGroup] = []
        self._on_pass: Callable[[], None] = _nothing

    def begin_pass(self) -> None:
        """Of the step's forward passes the one whose gradients travel begins."""
        self._on_pass()

    def measured(self) -> Generator[None, None, tuple[Trace, Network] | str]:
        """While the model trains in one bucket. Or, in words, why there is none of both."""
        observed, calibration = yield from self._observed_and_calibrated()
        if self._any(calibration.failure is not None):
            return f"calibrating failed: {calibration.failure or 'on another rank'}"
        if self._any(not observed):
            return "no step had a backward pass"
        trace = self._trace(observed)
        return trace if isinstance(trace, str) else (trace, calibration.network())

    def _observed_and_calibrated(
        self,
    ) -> Generator[None, None, tuple[list[Iteration], Calibration]]:
        observed: list[Iteration] = []
        window = ComputeWindow(self._parameters)
        calibration = Calibration(self._calibration(window), end=window.end)
        with (
            calibration,
            observing(self._module, self._parameters) as observer,
            window.watching(on_last=observer.end),
        ):

            def on_pass() -> None:
                observer.begin()
                window.open()

            self._on_pass = on_pass
            steps = 0
            try:
                while steps < RECORD_WARMUP + self._options.record_steps or self._any(
                    calibration.is_running
                ):
                    yield
                    window.close()
                    if steps >= RECORD_WARMUP and (iteration := _complete(observer)):
                        observed.append(iteration)
                    steps += 1
            finally:
                self._on_pass = _nothing
        return observed, calibration

    def _calibration(self, window: ComputeWindow) -> Callable[[], Network]:
        if not self._calibration_groups:
            lanes = LANES if self._passes == "both" else 1
            self._calibration_groups = [self._make_group() for _ in range(lanes)]
        communicator, *other_lanes = map(Communicator, self._calibration_groups)
        device = self._device
        total_bytes = sum(parameter.nbytes for parameter in self._parameters.values())
        ways = collectives.ways(OPERATIONS[self._passes], self._collectives(communicator))

        @contextmanager
        def turn() -> Iterator[None]:
            """While all ranks compute; the first that ends ends it for all."""
            window.wait()
            ended = [float(window.has_ended)]
            if largest(communicator.group, ended, device=device) != [0.0]:
                raise Ended
            yield

        return lambda: calibrate(
            communicator.group,
            name="calibrated in training",
            ways=ways,
            largest_bytes=min(max(total_bytes, LEAST_CALIBRATED_BYTES), MOST_CALIBRATED_BYTES),
            repeats=CALIBRATION_REPEATS,
            beside={"compute": turn},
            communicator=communicator,
            other_lanes=other_lanes,
        )

    def _collectives(self, communicator: Communicator) -> tuple[str, ...]:
        if self._options.compression is not None:
            return ("native",)
        if self._options.collective != AUTO:
            return (self._options.collective,)
        if self._passes == "both":
            return (BOTH_PASSES_COLLECTIVE,)
        is_tiered = len(communicator.topology.factors) > 1
        return (*AUTO_COLLECTIVES, AUTO_TIERED) if is_tiered else AUTO_COLLECTIVES

    def _trace(self, observed: list[Iteration]) -> Trace | str:
        """In the order in which torch will bucket: rank 0's, or that of declaration.

        Or, in words, why there is none.
        """
        recording = recording_of(
            observed,
            self._parameters,
            name=type(self._module).__name__,
            batch_size=self.batch_size,
            group=self._group,
        )
        if self._keeps_declared_order:
            order = list(reversed(self._parameters))
        else:
            if self._any(recording.reordered > 0):
                return "gradients do not come in the same order in every step"
            own = "\n".join(observed[0].ready_s)
            order = broadcast_text(self._group, own, device=self._device).split("\n")
        if set(order) != set(self._parameters):
            return "some parameters get no gradient"
        by_name = {tensor.name: tensor for tensor in recording.trace.tensors}
        tensors, latest_s = [], 0.0
        for name in order:
            latest_s = max(latest_s, by_name[name].ready_s)
            tensors.append(replace(by_name[name], ready_s=latest_s))
        return replace(recording.trace, tensors=tuple(tensors))

    def _any(self, mine: bool) -> bool:  # noqa: FBT001
        (anyone,) = largest(self._group, [float(mine)], device=self._device)
        return anyone > 0


def _nothing() -> None:
    pass


def _complete(observer: Observer) -> Iteration | None:
    """None where the step had no backward, such as an evaluation in training mode."""
    if not observer.has_gradients:
        return None
    return observer.iteration()
