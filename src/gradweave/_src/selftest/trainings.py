"""Small models, the data of each rank, and trainings of them that can be compared."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Wrap = Callable[[nn.Module], Any]

MOST_STEPS = 300
FEATURES = 24


def small_model(device: torch.device) -> nn.Module:
    """Return a small model, the same on every rank, with tensors of different sizes."""
    torch.manual_seed(0)
    layers = [nn.Linear(FEATURES, 48), nn.Tanh(), nn.Linear(48, 40), nn.Tanh(), nn.Linear(40, 8)]
    return nn.Sequential(*layers).to(device)


def batch(step: int, rank: int, device: torch.device) -> torch.Tensor:
    """Return other numbers for each step and rank, from the host's generator on any device."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, FEATURES, generator=generator).to(device)


class Training:
    """SGD with momentum, step by step; with ``passes``, gradients of several add up."""

    def __init__(self, wrapped: Any, rank: int, device: torch.device, *, passes: int = 1) -> None:
        self.wrapped, self.steps = wrapped, 0
        self._rank, self._device, self._passes = rank, device, passes
        self._optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)

    def step(self, inputs: torch.Tensor | None = None) -> None:
        self._optimizer.zero_grad()
        for further in range(1, self._passes):
            with self.wrapped.no_sync():
                self._backward(batch(10_000 * further + self.steps, self._rank, self._device))
        self._backward(batch(self.steps, self._rank, self._device) if inputs is None else inputs)
        self._optimizer.step()
        self.steps += 1

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def settle(self) -> None:
        """Train until a plan has been chosen, on every rank in the same step."""
        while self.wrapped.findings().stage != "settled":
            if self.steps == MOST_STEPS:
                raise AssertionError(
                    f"no plan after {MOST_STEPS} steps, but {self.wrapped.findings().stage}"
                )
            self.step()

    def weights(self) -> list[torch.Tensor]:
        """Return copies on the host of all parameters, whole."""
        state = self.wrapped.state_dict()
        return [state[name].detach().cpu() for name in sorted(state)]

    def _backward(self, inputs: torch.Tensor) -> None:
        self.wrapped(inputs).square().mean().backward()
