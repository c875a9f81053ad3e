"""One model's sparsified training, step by step: what a communication hook needs."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from gradweave._src.comm.small_messages import gather_long_text, largest
from gradweave._src.comm.staging import HostCopy
from gradweave._src.errors import RequestError
from gradweave._src.sparse.exchanger import Exchanger
from gradweave._src.sparse.gradient_fates import Fate, GradientFates
from gradweave._src.sparse.select import (
    compile_kernels,
    default_selection,
    warn_of_slow_selection,
)
from gradweave._src.sparse.settings import Sparse
from gradweave._src.sparse.state_form import SCHEMA, require_state
from gradweave._src.sparse.step import Sparsifier
from gradweave._src.sparse.warmup import MomentumCorrection
from gradweave._src.torch_internals import HOST, named_range


class _Known(NamedTuple):
    """What a rank knows when a step begins."""

    scale: Callable[[], float]  # of an accelerator: waits until its copy has arrived
    is_idle: bool  # has run out of data, and does not know the scale
    fates: Mapping[str, Fate]  # of the gradients of the step before, by parameter
    was_idle: bool  # had run out in the step before, and does not know fates


class _Settled(NamedTuple):
    """What has become of the step before."""

    was_taken: bool
    scale: float
    fates: Mapping[str, Fate]


class SparseTraining:
    """Averages the buckets of a model; each step is settled when the next one begins.

    Nobody tells whether the optimizer has taken a step. It counts as taken unless a gradient of any
    rank was not finite, or the ``grad_scaler`` has lowered its scale and no optimizer has taken a
    step: then it has skipped that for what it saw elsewhere, such as in another model's gradients.
    For a parameter whose gradient was discarded before any optimizer could use it, the step is
    rolled back.

    ``may_be_idle`` says whether ranks may run out of data; those that have follow the others.
    """

    def __init__(
        self,
        settings: Sparse,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
        may_be_idle: Callable[[], bool] = lambda: False,
    ) -> None:
        exchanger = Exchanger(group)
        _require_same(group, f"{settings}, {'with' if grad_scaler else 'without'} a grad_scaler")
        momentum = None
        if settings.momentum is not None:
            momentum = MomentumCorrection(
                parameters, momentum=settings.momentum, masking=settings.masking
            )
        self.sparsifier = Sparsifier(
            exchanger,
            parameters,
            exchange=settings.exchange,
            selection=settings.selection,
            momentum=momentum,
            clip_norm=settings.clip_norm,
            dense_below=settings.dense_below,
        )
        self.settings, self.group = settings, group
        self.step = 0  # the one that has begun last, counted from 1
        self._parameters, self._grad_scaler = parameters, grad_scaler
        self._names = {parameter: name for name, parameter in parameters.items()}
        self.fates = GradientFates(parameters)
        self.may_be_idle = may_be_idle
        self._scale_before = self._scale()
        self._was_idle = False
        self._unsettled: _Known | None = None
        for dtype in {parameter.dtype for parameter in parameters.values()}:
            compile_kernels(dtype)
        chosen = {default_selection(parameter.device) for parameter in parameters.values()}
        if settings.selection is None and "torch-topk" in chosen and group.rank() == 0:
            warn_of_slow_selection()

    def begin_step(self, *, is_idle: bool = False) -> None:
        """Begin a step before its first bucket, when the optimizer is done with the step before.

        A rank that is idle has run out of data: it sends its residuals, and takes no steps itself.
        """
        self._unsettled = self._known(self.fates.begin(), is_idle=is_idle)
        self._was_idle = is_idle
        self.step += 1

    def names_of(self, parameters: Sequence[nn.Parameter]) -> list[str]:
        if any(parameter not in self._names for parameter in parameters):
            raise RequestError(
                "a gradient of another model than the one this was made for; make one for each"
            )
        return [self._names[parameter] for parameter in parameters]

    def average(
        self,
        message: torch.Tensor,
        names: Sequence[str],
        *,
        frozen: Collection[str] = (),
        dense: bool = False,
    ) -> None:
        """Average a flat bucket of these parameters in place, and block until that is done.

        Of those that are ``frozen`` nothing is sent, and their residuals stay. A ``dense`` bucket
        is not thinned out: it takes along all that is left of earlier steps.
        """
        if self._unsettled is not None:
            self._settle(self._unsettled)
            self._unsettled = None
        with named_range("gradweave: %s of %d elements", self.settings.exchange, message.numel()):
            self.sparsifier.reduce(
                names,
                message,
                density=self.settings.density_at(self.step - 1),
                divide_by=self.group.size(),
                frozen=frozen,
                dense=dense,
            )

    def settle(self, *, is_idle: bool) -> None:
        """Settle the last step before another begins, on every rank, when nothing travels."""
        self._settle(self._known(self.fates.now(), is_idle=is_idle))

    def _known(self, fates: Mapping[str, Fate], *, is_idle: bool) -> _Known:
        return _Known(self._scale_reading(), is_idle, fates, self._was_idle)

    def _settle(self, mine: _Known) -> None:
        scale = mine.scale()
        was_taken = self._was_taken(mine.fates, scale)
        self._scale_before = scale
        agreed = self._agreed(mine, _Settled(was_taken, scale, mine.fates))
        if agreed.was_taken:
            self.sparsifier.commit(
                discarded=_with_fate(Fate.DISCARDED, agreed.fates),
                waiting=_with_fate(Fate.WAITING, agreed.fates),
            )
        else:
            self.sparsifier.rollback()
        self.sparsifier.follow_scale(agreed.scale)

    def _agreed(self, known: _Known, mine: _Settled) -> _Settled:
        """Return what ranks that still have data know; scalers of others are not up to date."""
        if self._grad_scaler is None and not self.may_be_idle():
            return mine
        said = [-torch.inf] * 4
        if not known.is_idle:
            said = [mine.was_taken, -mine.was_taken, mine.scale, -mine.scale]
        said += [-torch.inf if known.was_idle else fate for fate in mine.fates.values()]
        everyone = largest(self.group, said)
        anyone, not_all, largest_scale, negated, *fates = everyone
        if anyone != -not_all:
            raise RequestError(
                "some ranks have taken the last step and others have skipped it; let GradScaler "
                "see the same gradients on every rank"
            )
        if largest_scale != -negated:
            raise RequestError(
                f"loss scales go from {-negated:g} to {largest_scale:g}, here {mine.scale:g}; "
                "load the state_dict of one rank's GradScaler on all of them"
            )
        agreed = {
            name: Fate(int(fate)) for name, fate in zip(mine.fates, fates, strict=True) if fate >= 0
        }
        return mine._replace(was_taken=bool(anyone), scale=largest_scale, fates=agreed)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state after the optimizer's step: plain numbers, texts and tensors.

        Gradients that are still there count as applied, also if the optimizer has yet to use them.
        """
        fates = self.fates.now()
        is_skipped = not self._was_taken(fates, self._scale())
        discarded = set(fates) if is_skipped else _with_fate(Fate.DISCARDED, fates)
        return {
            "schema": SCHEMA,
            "rank": self.group.rank(),
            "ranks": self.group.size(),
            "step": self.step,
            "shapes": self._shapes(),
            **self.sparsifier.state_dict(discarded=discarded),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state between two steps, on every rank. If one rank cannot, none does."""
        self._agree_on(state)
        self.sparsifier.rollback()
        self.sparsifier.load_state_dict(state)
        self.step, self._unsettled = state["step"], None
        self._scale_before = self._scale()
        self.fates.forget()

    def _agree_on(self, state: Mapping[str, Any]) -> None:
        """Raise on all ranks unless all can load their states, and these are of one step."""
        complaint = ""
        try:
            self._check(state)
        except RequestError as error:
            complaint = str(error)
        step = None if complaint else state["step"]
        said = f"{complaint}\n{step}"
        everyone = gather_long_text(self.group, said)
        complaints, steps = zip(*(one.rsplit("\n", 1) for one in everyone), strict=True)
        if complaint:
            raise RequestError(complaint)
        if any(complaints):
            rank = next(rank for rank, text in enumerate(complaints) if text)
            raise RequestError(f"rank {rank} cannot load its state: {complaints[rank]}")
        if len(set(steps)) > 1:
            raise RequestError(
                f"ranks load states of different steps, rank {self.group.rank()} that of step "
                f"{state['step']}; take a checkpoint that all ranks have finished"
            )

    def _check(self, state: Mapping[str, Any]) -> None:
        """Raise RequestError unless the state is one of this model and this rank."""
        require_state(state)
        found, own = state["shapes"], self._shapes()
        if found != own:
            name = next(n for n in (*own, *found) if own.get(n) != found.get(n))
            raise RequestError(
                f"the state has {_shape(found.get(name))} for {name!r}, the model has "
                f"{_shape(own.get(name))}; it is another model's"
            )
        mine = (self.group.rank(), self.group.size())
        if (state["rank"], state["ranks"]) != mine:
            raise RequestError(
                f"the state is that of rank {state['rank']} of {state['ranks']}, and this is rank "
                f"{mine[0]} of {mine[1]}; gradweave.sparse_checkpoint.load redistributes states"
            )
        self.sparsifier.check(state)

    def _shapes(self) -> dict[str, list[int]]:
        return {name: list(parameter.shape) for name, parameter in self._parameters.items()}

    def _was_taken(self, fates: Mapping[str, Fate], scale: float) -> bool:
        return scale >= self._scale_before or Fate.APPLIED in fates.values()

    def _scale_reading(self) -> Callable[[], float]:
        """Begin to read the scale as it is now, without waiting for an accelerator."""
        device = next(iter(self._parameters.values())).device if self._parameters else HOST
        if self._grad_scaler is None or device == HOST:
            scale = self._scale()
            return lambda: scale
        # Where scalers keep it is private to torch, so it is read from what they make of a one.
        scaled_one: torch.Tensor = self._grad_scaler.scale(torch.ones((), device=device))
        copy = HostCopy(scaled_one)
        return lambda: float(copy.read())

    def _scale(self) -> float:
        return 1.0 if self._grad_scaler is None else self._grad_scaler.get_scale()


def _with_fate(fate: Fate, fates: Mapping[str, Fate]) -> set[str]:
    return {name for name, found in fates.items() if found is fate}


def _require_same(group: dist.ProcessGroup, settings: str) -> None:
    everyone = gather_long_text(group, settings)
    for rank, text in enumerate(everyone):
        if text != everyone[0]:
            raise RequestError(
                f"ranks sparsify differently: rank 0 with {everyone[0]}, rank {rank} with {text}; "
                "take the same settings on every rank"
            )


def _shape(shape: list[int] | None) -> str:
    return "no parameter" if shape is None else f"shape {tuple(shape)}"
