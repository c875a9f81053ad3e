"""One model's sparsified training, step by step: what a communication hook needs."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradweave.comm.agree import gather_long_text
from gradweave.errors import RequestError
from gradweave.sparse.exchanger import Exchanger
from gradweave.sparse.select import compile_kernels
from gradweave.sparse.settings import Sparse
from gradweave.sparse.step import Sparsifier
from gradweave.sparse.warmup import MomentumCorrection

SCHEMA = "gradweave.sparse/1"


class SparseTraining:
    """Averages the buckets of a model; each step is settled when the next one begins.

    Nobody tells whether the optimizer has taken a step. It counts as taken unless a gradient of any
    rank was not finite, or the ``grad_scaler`` has lowered its scale and no parameter has changed:
    then it has skipped the step for what it saw elsewhere, such as in another model's gradients.
    """

    def __init__(
        self,
        settings: Sparse,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        momentum = None
        if settings.momentum is not None:
            momentum = MomentumCorrection(
                parameters, momentum=settings.momentum, masking=settings.masking
            )
        self.sparsifier = Sparsifier(
            Exchanger(group),
            parameters,
            exchange=settings.exchange,
            selection=settings.selection,
            momentum=momentum,
            clip_norm=settings.clip_norm,
            dense_below=settings.dense_below,
        )
        self.settings, self.group = settings, group
        self.step = 0  # that has begun last, from 1 on
        self._parameters, self._grad_scaler = parameters, grad_scaler
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._begun_with = self._scale_and_version()
        for dtype in {parameter.dtype for parameter in parameters.values()}:
            compile_kernels(dtype)

    def begin_step(self) -> None:
        """Before the first bucket; what the optimizer does with the step before is over."""
        if self._was_taken():
            self.sparsifier.commit()
        else:
            self.sparsifier.rollback()
        self.step += 1
        self._begun_with = self._scale_and_version()
        self.sparsifier.follow_scale(self._begun_with[0])

    def names_of(self, parameters: Sequence[nn.Parameter]) -> list[str]:
        if any(parameter not in self._names for parameter in parameters):
            raise RequestError(
                "a gradient of another model than the one this was made for; make one for each"
            )
        return [self._names[parameter] for parameter in parameters]

    def average(self, message: torch.Tensor, names: Sequence[str]) -> None:
        """In place, a flat bucket of these parameters; blocks until that is done."""
        self.sparsifier.reduce(
            names,
            message,
            density=self.settings.density_at(self.step - 1),
            divide_by=self.group.size(),
        )

    def state_dict(self) -> dict[str, Any]:
        """This rank's, after the optimizer's step: plain numbers, texts and tensors."""
        return {
            "schema": SCHEMA,
            "rank": self.group.rank(),
            "ranks": self.group.size(),
            "step": self.step,
            "elements": self._elements(),
            **self.sparsifier.state_dict(taken=self._was_taken()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Between two steps, on every rank. What one rank cannot load, none does."""
        self._agree_on(state)
        self.sparsifier.rollback()
        self.sparsifier.load_state_dict(state)
        self.step = state["step"]
        self._begun_with = self._scale_and_version()

    def _agree_on(self, state: Mapping[str, Any]) -> None:
        """That all ranks can load theirs, and that they are of one step."""
        complaint = ""
        try:
            self._check(state)
        except RequestError as error:
            complaint = str(error)
        said = f"{complaint}\n{state.get('step')}"
        everyone = gather_long_text(self.group, said, device=torch.device("cpu"))
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
        """That it is one of this model and this rank."""
        if state.get("schema") != SCHEMA:
            raise RequestError(
                f"the state is none of sparsified training: schema {state.get('schema')!r}, "
                f"expected {SCHEMA!r}"
            )
        found, own = state["elements"], self._elements()
        if found != own:
            name = next(n for n in (*own, *found) if own.get(n) != found.get(n))
            raise RequestError(
                f"the state has {found.get(name, 'no')} elements for {name!r}, the model has "
                f"{own.get(name, 'none')}; it is another model's"
            )
        mine = (self.group.rank(), self.group.size())
        if (state["rank"], state["ranks"]) != mine:
            raise RequestError(
                f"the state is that of rank {state['rank']} of {state['ranks']}, and this is rank "
                f"{mine[0]} of {mine[1]}; gradweave.sparse.checkpoint.load redistributes states"
            )
        self.sparsifier.check(state)

    def _elements(self) -> dict[str, int]:
        return {name: parameter.numel() for name, parameter in self._parameters.items()}

    def _was_taken(self) -> bool:
        scale, version = self._begun_with
        now_scale, now_version = self._scale_and_version()
        return now_scale >= scale or now_version != version

    def _scale_and_version(self) -> tuple[float, int]:
        """The loss scale, and a number that grows when a parameter is changed in place."""
        scale = 1.0 if self._grad_scaler is None else self._grad_scaler.get_scale()
        return scale, sum(parameter._version for parameter in self._parameters.values())  # noqa: SLF001
