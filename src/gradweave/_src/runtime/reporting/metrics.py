"""A wrapper's numbers after any step: at once, and without asking other ranks or a device."""

from gradweave._src.measure.spans import SpanRecorder
from gradweave._src.runtime.reporting.step_clock import StepClock
from gradweave._src.timeline import Timeline

Metrics = dict[str, float | int | str]


class LiveNumbers:
    """Knows a wrapper's clock and recorder; what is predicted is worked out once."""

    def __init__(self, clock: StepClock, recorder: SpanRecorder | None) -> None:
        self._clock, self._recorder = clock, recorder
        self._predicted: Timeline | None = None
        self._predicted_s = self._communication_s = 0.0

    def of(self, *, stage: str, messages: int | None, predicted: Timeline | None) -> Metrics:
        """Return the numbers that are known by now; docs/runtime.md says what each means."""
        if predicted is not None and predicted is not self._predicted:
            self._predicted = predicted
            self._predicted_s = predicted.iteration_s
            self._communication_s = predicted.communication_s
        clock = self._clock
        metrics: Metrics = {"step": clock.steps}
        if (last_s := clock.last_step_s) is not None:
            metrics["step_s"] = last_s
        phases = clock.last_phases()
        if phases is not None:
            metrics["exposed_s"] = phases.network_s
            if (overlap := self._overlap(phases.network_s, predicted)) is not None:
                metrics["overlap"] = overlap
        if messages is not None:
            metrics["messages"] = messages
        metrics["stage"] = stage
        if predicted is not None:
            metrics["predicted_s"] = self._predicted_s
        return metrics

    def _overlap(self, exposed_s: float, predicted: Timeline | None) -> float | None:
        """Return the hidden share of what messages take, as it was seen or else as predicted."""
        communication_s = None if self._recorder is None else self._recorder.communication_s()
        if communication_s is None and predicted is not None:
            communication_s = self._communication_s
        if communication_s is None:
            return None
        if communication_s == 0:
            return 1.0
        return min(1.0, max(0.0, 1.0 - exposed_s / communication_s))
