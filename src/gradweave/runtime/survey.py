"""When gradients are ready, recorded on every rank while the model trains."""

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack

from msgspec import Struct
from msgspec.structs import replace
from torch import nn

from gradweave.measure.backward import (
    Iteration,
    RankTimes,
    observing,
    rank_times,
    slowest_rank,
    trace_of,
)
from gradweave.network import Network
from gradweave.runtime.activity import Activity
from gradweave.runtime.calibration import Calibration
from gradweave.session.commands import Failed, Measured, Unplannable
from gradweave.trace import Trace

WARMUP_STEPS = 2
# Calibrating may take long beside short steps; the last ones are enough then.
MOST_RECORDED_STEPS = 64


class RankSurvey(Struct, frozen=True, kw_only=True, tag=True):
    """What one rank has recorded; the network is what all ranks have measured together."""

    times: RankTimes
    order: tuple[str, ...]  # in which gradients came first
    is_reordered: bool  # they came in another order later
    iterations: int
    batch_size: int
    network: Network | None


class Survey(Activity):
    """Records steps until there are enough, and a calibration beside them is done."""

    def __init__(
        self,
        module: nn.Module,
        parameters: dict[str, nn.Parameter],
        calibration: Calibration,
        *,
        least_steps: int,
        keeps_declared_order: bool = False,
    ) -> None:
        self._name, self._parameters, self._calibration = (
            type(module).__name__,
            parameters,
            calibration,
        )
        self._keeps_declared_order = keeps_declared_order
        self._least_steps, self._steps = least_steps, 0
        self._observed: deque[Iteration] = deque(maxlen=max(least_steps, MOST_RECORDED_STEPS))
        self._batch_size = 1
        self._open = ExitStack()
        self._open.callback(calibration.close)
        self._observer = self._open.enter_context(
            observing(module, parameters, on_last=calibration.computing_ends)
        )

    def forward_begins(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._observer.begin()
        self._calibration.computing_begins()

    def step_over(self) -> None:
        self._calibration.computing_ends()
        iteration = self._observer.iteration()
        self._observer.begin()
        self._steps += 1
        if self._steps > WARMUP_STEPS and iteration is not None and iteration.ready_s:
            self._observed.append(iteration)

    def part(self) -> RankSurvey | Failed | None:
        """What this rank has found; None while it goes on."""
        if self._calibration.is_running or self._steps < WARMUP_STEPS + self._least_steps:
            return None
        if self._calibration.failure is not None:
            return Failed(self._calibration.failure)
        if not self._observed:
            return Failed("no step had a backward pass")
        orders = [tuple(one.ready_s) for one in self._observed]
        return RankSurvey(
            times=rank_times(list(self._observed), self._parameters),
            order=orders[0],
            is_reordered=any(order != orders[0] for order in orders),
            iterations=len(orders),
            batch_size=self._batch_size,
            network=self._calibration.network,
        )

    def agreed(self, parts: Sequence[RankSurvey]) -> Measured | Unplannable:
        """What the ranks have found together, in the order in which torch would send.

        That is rank 0's, or, turned round, that of declaration.
        """
        network = parts[0].network
        order = parts[0].order
        if self._keeps_declared_order:
            order = tuple(reversed(self._parameters))
        elif any(part.is_reordered for part in parts):
            return Unplannable("gradients do not come in the same order in every step", order)
        if set(order) != set(self._parameters):
            return Unplannable("some parameters get no gradient", order)
        if network is None:
            return Unplannable("calibrating was ended", order)
        trace = trace_of(
            slowest_rank([part.times for part in parts]),
            self._parameters,
            name=self._name,
            batch_size=parts[0].batch_size,
            iterations=parts[0].iterations,
        )
        return Measured(_in_order(trace, order), network)

    def close(self) -> None:
        self._open.close()


def _in_order(trace: Trace, order: Sequence[str]) -> Trace:
    """Gradients wait for those that are sent before them."""
    by_name = {tensor.name: tensor for tensor in trace.tensors}
    tensors, latest_s = [], 0.0
    for name in order:
        if name in by_name:  # it has elements
            latest_s = max(latest_s, by_name[name].ready_s)
            tensors.append(replace(by_name[name], ready_s=latest_s))
    return replace(trace, tensors=tuple(tensors))
