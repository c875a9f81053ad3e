"""One bucket after the other: select, exchange, and keep what was not applied."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradweave.errors import RequestError
from gradweave.sparse.exchange import Exchanged, find_exchange
from gradweave.sparse.exchanger import Exchanger
from gradweave.sparse.residual import Carried, tensors
from gradweave.sparse.select import default_selection, select
from gradweave.sparse.vectors import elements_kept, part_by
from gradweave.sparse.warmup import MomentumCorrection, clip_local_norm


class Sparsifier:
    """Replaces gradients by the largest sums over all ranks; the rest waits in residuals.

    For every step, on every rank: ``reduce`` for each bucket in the same order, then either
    ``commit``, before the next step's first bucket, or ``rollback`` if the optimizer has skipped
    the step. ``reduce`` blocks until the exchange is over and releases the GIL where it takes long.

    What is applied, over all steps, and all residuals together are the sum of all gradients (or
    velocities, with ``momentum``), before division.
    """

    def __init__(
        self,
        exchanger: Exchanger,
        parameters: Mapping[str, torch.Tensor],
        *,
        exchange: str = "gtopk-butterfly",
        selection: str | None = None,
        momentum: MomentumCorrection | None = None,
        clip_norm: float | None = None,
    ) -> None:
        find_exchange(exchange)
        self.exchanger, self.exchange, self.selection = exchanger, exchange, selection
        self.momentum, self.clip_norm = momentum, clip_norm
        self.residuals = Carried(parameters)

    @torch.no_grad()
    def reduce(
        self,
        names: Sequence[str],
        gradient: torch.Tensor,
        *,
        density: float,
        divide_by: float = 1.0,
    ) -> Exchanged:
        """In place: a flat bucket of these parameters becomes what is applied, zero elsewhere.

        Where the gradient of any rank has NaN or Inf, it becomes NaN on all of them, so that
        GradScaler skips the step everywhere.
        """
        k = elements_kept(gradient.numel(), density)
        if self.clip_norm is not None:
            clip_local_norm(gradient, limit=self.clip_norm, ranks=self.exchanger.group.size())
        velocity = self.momentum.begin(names, gradient) if self.momentum else None
        residual = self.residuals.begin(names)
        selected = select(
            residual,
            velocity.pending if velocity else gradient,
            k=k,
            method=self.selection or default_selection(gradient.device),
        )
        done = self.exchanger.run(selected, exchange=self.exchange, k=k, numel=gradient.numel())
        residual.finite = done.finite
        if not done.finite:
            gradient.fill_(torch.nan)
            return done
        residual.give_back(done.returned)
        if self.momentum and velocity:
            own = part_by(selected, done.applied.indices).inside
            self.momentum.applied(velocity, own.indices)
        write(done, gradient, divide_by=divide_by)
        return done

    def commit(self) -> bool:
        """The step was taken. False: it was not finite somewhere, and has been rolled back."""
        finite = self.residuals.commit()
        if self.momentum and finite:
            self.momentum.velocities.commit()
        elif self.momentum:
            self.momentum.velocities.rollback()
        return finite

    def rollback(self) -> None:
        """The step was skipped: residuals and velocities are bit for bit as before."""
        for carried in self._carried().values():
            carried.rollback()

    def follow_scale(self, scale: float) -> None:
        """Before the first bucket of a step whose loss is scaled by ``scale``."""
        for carried in self._carried().values():
            carried.follow_scale(scale)

    def state_dict(self, *, taken: bool | None = None) -> dict[str, Any]:
        """This rank's, after ``commit`` or ``rollback``.

        Or, with ``taken``, as it will be when the open step is committed, or rolled back.
        """
        if taken:
            taken = self.residuals.finite
        return {kind: carried.state_dict(taken=taken) for kind, carried in self._carried().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Of a sparsifier with momentum where this one has it, and without where not."""
        if ("velocities" in state) != (self.momentum is not None):
            has, needs = ("no ", "") if self.momentum else ("", "no ")
            raise RequestError(
                f"the state has {has}velocities, and this needs {needs}momentum; set momentum as "
                "where the state was saved"
            )
        for kind, carried in self._carried().items():
            carried.load_state_dict(state[kind])

    def _carried(self) -> dict[str, Carried]:
        velocities = {"velocities": self.momentum.velocities} if self.momentum else {}
        return {"residuals": self.residuals, **velocities}


def write(done: Exchanged, gradient: torch.Tensor, *, divide_by: float) -> None:
    """What is applied, into a flat bucket; zeros elsewhere."""
    indices, values = tensors(done.applied, gradient.device)
    gradient.zero_()
    gradient[indices] = (values / divide_by).to(gradient.dtype)
