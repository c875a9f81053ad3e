"""One bucket after the other: select, exchange, and keep what was not applied."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gradweave._src.comm.staging import HostCopy, upload
from gradweave._src.errors import RequestError
from gradweave._src.sparse.dense import places_below, put_back, take_out
from gradweave._src.sparse.exchange import Exchanged, find_exchange
from gradweave._src.sparse.exchanger import Exchanger
from gradweave._src.sparse.residual import Carried, keep, places_of, without
from gradweave._src.sparse.select import default_selection, select
from gradweave._src.sparse.vectors import SparseVector, elements_kept, like, part_by
from gradweave._src.sparse.warmup import MomentumCorrection, clip_local_norm, local_norm_limit


class _Outcome(NamedTuple):
    """What a bucket becomes when its exchange is over: these values at these indices."""

    applied: torch.Tensor
    averages: torch.Tensor
    averaged_whole: torch.Tensor  # of small parameters, one behind the other
    returned: torch.Tensor
    returned_values: torch.Tensor
    own_applied: torch.Tensor


class Sparsifier:
    """Replaces gradients by the largest sums over all ranks; the rest waits in residuals.

    For every step, on every rank: ``reduce`` for each bucket in the same order, then either
    ``commit``, before the next step's first bucket, or ``rollback`` if the optimizer has skipped
    the step. A step made of several passes, whose gradients add up, has a ``commit`` for each, and
    all but the last are ``waiting``. ``reduce`` blocks until the exchange is over and releases the
    GIL where it takes long. On an accelerator it waits there for copies of what is selected and of
    small parameters, and for nothing else: it should have a thread of its own.

    Parameters with fewer than ``dense_below`` elements travel whole; nothing of them is left.

    What is applied, over all steps, and all residuals together are the sum of all gradients (or
    velocities, with ``momentum``), before division.
    """

    def __init__(
        self,
        exchanger: Exchanger,
        parameters: Mapping[str, torch.Tensor],
        *,
        exchange: str = "gtopk",
        selection: str | None = None,
        momentum: MomentumCorrection | None = None,
        clip_norm: float | None = None,
        dense_below: int = 0,
    ) -> None:
        find_exchange(exchange)
        self.exchanger, self.exchange, self.selection = exchanger, exchange, selection
        self.momentum, self.clip_norm = momentum, clip_norm
        self.dense_below = dense_below
        self._elements = {name: parameter.numel() for name, parameter in parameters.items()}
        self.residuals = Carried(parameters)

    @torch.no_grad()
    def reduce(
        self,
        names: Sequence[str],
        gradient: torch.Tensor,
        *,
        density: float,
        divide_by: float = 1.0,
        frozen: Collection[str] = (),
        dense: bool = False,
    ) -> Exchanged:
        """Replace a flat bucket of these parameters by what is applied, with zeros elsewhere.

        Of ``frozen`` ones nothing is sent, and what is carried over for them stays. The message is
        as long as with them, so that ranks may differ in what they freeze. Of a ``dense`` bucket
        all elements travel, with all that was carried over for them, and nothing is left.

        Where the gradient of any rank has NaN or Inf, or what is applied is too large for its type,
        it becomes NaN on all of them, so that GradScaler skips the step everywhere.
        """
        elements = {name: self._elements.get(name, 0) for name in names}
        below = gradient.numel() + 1 if dense else self.dense_below
        places = places_below(elements.values(), below)
        numel = gradient.numel() - sum(place.stop - place.start for place in places)
        k = elements_kept(numel, density)
        held_back = [place for name, place in places_of(elements).items() if name in frozen]
        for place in held_back:
            gradient[place] = 0
        residual = self.residuals.begin(names)
        self._clip(gradient, elements)
        velocity = self.momentum.begin(names, gradient) if self.momentum else None
        candidates = velocity.pending if velocity else gradient
        for place in held_back:
            candidates[place] = 0
        own = take_out(candidates, places)
        # Small parameters travel meanwhile; with zeros in their places they are not selected.
        sent_whole = own.clone()
        left_out = [*held_back]
        if dense:
            sent_whole += take_out(without(residual, held_back).kept.clone(), places)
            left_out = [*held_back, *places]
        summed = HostCopy(sent_whole).read()
        wait_for_sum = self.exchanger.start_sum(summed) if places else None
        method = self.selection or default_selection(gradient.device)
        selected = select(without(residual, left_out), candidates, k=k, method=method)
        keep(residual, held_back)
        done = Exchanged(selected, like(selected))
        if k:
            done = self.exchanger.run(selected, exchange=self.exchange, k=k, numel=gradient.numel())
        if wait_for_sum:
            wait_for_sum()
        averages, averaged_whole = (
            (sums / divide_by).to(gradient.dtype)
            for sums in (torch.from_numpy(done.applied.values), summed)
        )
        residual.finite = done.finite and _are_finite(averages, averaged_whole)
        if not residual.finite:
            gradient.fill_(torch.nan)
            return Exchanged(like(selected, finite=False), like(selected))
        there = _Outcome(
            torch.from_numpy(done.applied.indices),
            averages,
            averaged_whole,
            torch.from_numpy(done.returned.indices),
            torch.from_numpy(done.returned.values),
            torch.from_numpy(_own_applied(selected, done).indices),
        )
        there = _Outcome(*upload(there, gradient.device))
        gradient.zero_()
        gradient[there.applied] = there.averages
        put_back(there.averaged_whole, gradient, places)
        residual.pending.index_add_(0, there.returned, there.returned_values)
        if self.momentum and velocity:
            self.momentum.applied(velocity, there.own_applied)
            put_back(own, velocity.pending, places)
            keep(velocity, held_back)
        return done

    def _clip(self, gradient: torch.Tensor, elements: Mapping[str, int]) -> None:
        if self.clip_norm is None or not elements or not gradient.numel():
            return
        limit = local_norm_limit(
            self.clip_norm * self.residuals.scale,
            ranks=self.exchanger.group.size(),
            share=gradient.numel() / sum(self._elements.values()),
        )
        clip_local_norm(gradient, elements, limit=limit)

    def commit(self, *, discarded: Collection[str] = (), waiting: Collection[str] = ()) -> bool:
        """Keep what the step leaves; False where it was not finite, and has been rolled back.

        It is rolled back, too, for parameters whose gradients were ``discarded``. Parameters that
        are ``waiting`` for the optimizer can still be rolled back to the state before.
        """
        finite = self.residuals.commit(discarded=discarded, waiting=waiting)
        if self.momentum and finite:
            self.momentum.velocities.commit(discarded=discarded, waiting=waiting)
        elif self.momentum:
            self.momentum.velocities.rollback()
        return finite

    def rollback(self) -> None:
        """Undo a step that was skipped: residuals and velocities are bit for bit as before."""
        for carried in self._carried().values():
            carried.rollback()

    def follow_scale(self, scale: float) -> None:
        """Follow the loss scale of a step; call it before the first bucket of the step."""
        for carried in self._carried().values():
            carried.follow_scale(scale)

    def state_dict(self, *, discarded: Collection[str] | None = None) -> dict[str, Any]:
        """Return this rank's state, after ``commit`` or ``rollback``.

        With ``discarded`` it is as it will be when the open step is committed like that.
        """
        if discarded is not None and not self.residuals.finite:
            discarded = self._elements
        return {
            kind: carried.state_dict(discarded=discarded)
            for kind, carried in self._carried().items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state, which must be one with momentum if and only if this one has it."""
        self.check(state)
        for kind, carried in self._carried().items():
            carried.load_state_dict(state[kind])

    def check(self, state: Mapping[str, Any]) -> None:
        """Check that a state can be loaded."""
        if ("velocities" in state) != (self.momentum is not None):
            has, needs = ("no ", "") if self.momentum else ("", "no ")
            raise RequestError(
                f"the state has {has}velocities, and this needs {needs}momentum; set momentum as "
                "where the state was saved"
            )
        for name, value in state["residuals"]["values"].items():
            if self._elements.get(name, self.dense_below) < self.dense_below and value.any():
                raise RequestError(
                    f"the state has residuals of {name!r}, which travels whole here; set "
                    "dense_below as where the state was saved"
                )
        for kind, carried in self._carried().items():
            carried.check(state[kind])

    def _carried(self) -> dict[str, Carried]:
        velocities = {"velocities": self.momentum.velocities} if self.momentum else {}
        return {"residuals": self.residuals, **velocities}


def _own_applied(selected: SparseVector, done: Exchanged) -> SparseVector:
    """Return which of a rank's own elements are in the result, as far as it can know.

    An index may be in the result through other ranks, and the rank's own element dropped half-way.
    """
    in_result = part_by(selected, done.applied.indices).inside
    return part_by(in_result, done.returned.indices).outside


def _are_finite(*tensors: torch.Tensor) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
