"""What helps sparsified training to converge: dense first steps, corrected momentum, clipping.

Deep Gradient Compression (Lin, Han, Mao, Wang, Dally: ICLR 2018) introduced all of it; the
densities are the gTop-k paper's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

import torch

from gradweave._src.errors import RequestError
from gradweave._src.sparse.residual import Carried, Flat, carried_type
from gradweave._src.sparse.vectors import elements_kept

PAPER_WARMUP = (0.25, 0.0725, 0.015, 0.004)
PAPER_DENSITY = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Densities:
    """One density after the other, each for ``steps_each`` steps, then the last one for good.

    The paper's densities last an epoch each.

    Args:
        warmup: the densities at first; an empty tuple begins with the last one.
        final: the last one.
        steps_each: the steps of an epoch, or 1, if you pass epochs instead of steps to ``at()``. A
            warm-up needs it.

    Raises:
        RequestError: if a density is not above 0 and at most 1, or a warm-up has no ``steps_each``.

    Examples:
        >>> densities = gradweave.Densities(steps_each=100)
        >>> densities.at(0), densities.at(1000)
        (0.25, 0.001)
    """

    warmup: tuple[float, ...] = PAPER_WARMUP
    final: float = PAPER_DENSITY
    steps_each: int | None = None

    def __post_init__(self) -> None:
        for density in (*self.warmup, self.final):
            elements_kept(1, density)
        if self.steps_each is None:
            if self.warmup:
                raise RequestError(
                    "a warm-up needs to know how many steps an epoch has: "
                    "density=Densities(steps_each=…), or a number for none"
                )
        elif self.steps_each < 1:
            raise RequestError(f"steps_each must be at least 1, got {self.steps_each}")

    def at(self, position: int) -> float:
        """Return the density at this step."""
        stage = self._stage(position)
        return self.warmup[stage] if stage < len(self.warmup) else self.final

    def learning_rate_factor(self, position: int) -> float:
        """Return a factor that rises to 1 by equal amounts, once per density of the warm-up.

        It fits ``torch.optim.lr_scheduler.LambdaLR``.
        """
        stages = len(self.warmup) + 1
        return min(1.0, (self._stage(position) + 1) / stages)

    def _stage(self, position: int) -> int:
        return position // (self.steps_each or 1)


def clip_local_norm(gradient: torch.Tensor, elements: Mapping[str, int], *, limit: float) -> None:
    """Clip a flat gradient of these parameters to at most this norm, in place, before selection.

    Norms of parameters are taken one by one and put together by name, so that the same parameters
    in another order are clipped alike, bit for bit.
    """
    check_clip_norm(limit)
    kind = carried_type(gradient.dtype)
    norms = {
        name: torch.linalg.vector_norm(part, dtype=kind)
        for name, part in zip(elements, torch.split(gradient, list(elements.values())), strict=True)
    }
    if norms:
        norm = torch.linalg.vector_norm(torch.stack([norms[name] for name in sorted(norms)]))
        gradient.mul_(torch.clamp(limit / norm, max=1.0))


def local_norm_limit(limit: float, *, ranks: int, share: float) -> float:
    """Return the norm to which one rank is clipped so that the mean over ranks keeps to ``limit``.

    The mean of P gradients of one length that have nothing to do with each other is sqrt(P) times
    shorter. A bucket with a share of the model's elements gets sqrt(share) of the model's limit, so
    that squares add up to the limit's, however parameters are put into buckets.
    """
    return limit * sqrt(ranks * share)


def check_clip_norm(limit: float) -> None:
    if not (limit > 0 and isfinite(limit)):
        raise RequestError(f"clip_norm must be positive and finite, got {limit}")


def check_momentum(momentum: float) -> None:
    if not 0 <= momentum < 1:
        raise RequestError(f"momentum must be at least 0 and below 1, got {momentum}")


class MomentumCorrection:
    """Momentum before selection instead of after it: the optimizer's own must be 0.

    Each rank sums its velocity, u = momentum * u + gradient, into its residual instead of the
    gradient, so that what is applied late has gathered the momentum of all the steps it waited.
    With ``masking``, momentum restarts from zero where a rank's own elements were applied, because
    it would carry their old direction on.
    """

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], *, momentum: float = 0.9, masking: bool = True
    ) -> None:
        check_momentum(momentum)
        self.momentum, self.masking = momentum, masking
        self.velocities = Carried(parameters)

    def begin(self, names: Sequence[str], gradient: torch.Tensor) -> Flat:
        """Return the velocity with this gradient, whose ``pending`` is what to select from."""
        flat = self.velocities.begin(names)
        torch.mul(flat.kept, self.momentum, out=flat.pending).add_(gradient)
        return flat

    def applied(self, velocity: Flat, indices: torch.Tensor) -> None:
        """Restart momentum, with ``masking``, where this rank's elements have been applied."""
        if self.masking:
            velocity.pending[indices] = 0
