"""Passes that become part of a graph, which replays them by no code of ours."""

import logging

import torch

from gradweave._src.device_order import is_capturing
from gradweave._src.runtime.reporting.step_clock import StepClock

logger = logging.getLogger(__name__)


class Captures:
    """Whether a pass becomes part of a graph: it is then neither timed nor planned.

    What a graph replays goes by no code of ours, so buckets stay what they are.
    """

    def __init__(self, device: torch.device, clock: StepClock) -> None:
        self._device, self._clock = device, clock
        self._has_told = False

    def has_begun(self, *, is_planning: bool) -> bool:
        """Return whether a graph is being captured; ask where a pass or a step begins or ends."""
        if torch.compiler.is_compiling() or not is_capturing(self._device):
            return False
        self._clock.looks_away()
        if is_planning and not self._has_told:
            self._has_told = True
            logger.warning(
                "a graph is captured before planning has ended: its buckets stay what they are; "
                "capture after the plan is settled, or give plan="
            )
        return True
