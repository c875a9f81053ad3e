"""Communication hooks for torch's own DistributedDataParallel.

    state = SparseState(ddp, GTopK(0.001))
    ddp.register_comm_hook(state, gtopk)

No ``from __future__ import annotations`` here: torch looks at a hook's annotations.
"""

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradweave._src.comm.own_group import OwnGroup
from gradweave._src.compression import Compression
from gradweave._src.errors import RequestError
from gradweave._src.runtime.ddp import DistributedDataParallel
from gradweave._src.runtime.reducer.transports import BucketSender, SparseTransport, send_bucket
from gradweave._src.runtime.wrapping.parameters import check_compressible, planned_parameters
from gradweave._src.sparse.settings import GTopK, Sparse, TopK, settings_of
from gradweave._src.sparse.training import SparseTraining
from gradweave._src.torch_internals import is_in_join

__all__ = ["SparseState", "gtopk", "topk"]


class SparseState:
    """What a hook carries over from step to step; made on every rank, one for each wrapper.

    A step is settled when the first bucket of the next one comes.

    Args:
        ddp: a model in torch's own wrapper.
        settings: GTopK(0.001) or TopK(0.001), or a text, "gtopk:0.001".
        grad_scaler: the GradScaler of the training loop. When it changes the loss scale, elements
            that were kept back are rescaled.
        group: a gloo group of the same ranks that nothing else uses (default: a new one).

    Raises:
        RequestError: if ``ddp`` is no wrapper of torch's own, the model cannot be compressed, or
            ``whole_model`` is asked for.

    Examples:
        >>> ddp = torch.nn.parallel.DistributedDataParallel(model)
        >>> state = gradweave.hooks.SparseState(ddp, gradweave.GTopK(0.01))
        >>> ddp.register_comm_hook(state, gradweave.hooks.gtopk)
        >>> ddp(batch).sum().backward()
    """

    def __init__(
        self,
        ddp: TorchDDP,
        settings: GTopK | TopK | Compression | str,
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        _check_is_torchs(ddp)
        check_compressible(ddp.module, skips_unused=ddp.skip_all_reduce_unused_params)
        asked = settings_of(settings)
        if asked.whole_model:
            raise RequestError(
                "torch's wrapper makes its own buckets, and each is selected from by itself; leave "
                "out whole_model, or use gradweave.DistributedDataParallel"
            )
        make_group = None if group is None else (lambda: group)
        own_group = OwnGroup(ddp.process_group, make_group, backend="gloo")
        own_group.thread()
        self.settings = asked
        # Not the wrapper itself, which has this state: it must die before its process group.
        self._training = training = SparseTraining(
            asked,
            planned_parameters(ddp),
            own_group.group,
            grad_scaler=grad_scaler,
            may_be_idle=partial(is_in_join, weakref.ref(ddp)),
        )
        weakref.finalize(self, own_group.close).atexit = False
        self.sender = BucketSender(
            SparseTransport(self._training, own_group),
            rank=ddp.process_group.rank(),
            step=lambda: training.step,
            writes_unused=ddp.find_unused_parameters,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, after a step; ``gradweave.sparse_checkpoint`` keeps it."""
        return self._training.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned, between two steps, on every rank."""
        self._training.load_state_dict(state)


def _check_is_torchs(ddp: object) -> None:
    # Of `gradweave run` it is what the script takes for torch's, and plans no more with a hook.
    stands_for_torchs = getattr(ddp, "stands_for_torchs", False)
    if isinstance(ddp, DistributedDataParallel) and not stands_for_torchs:
        raise RequestError(
            "SparseState is for torch's own wrapper; give gradweave.DistributedDataParallel "
            "compression=… instead"
        )
    if not isinstance(ddp, TorchDDP):
        raise RequestError(
            "SparseState takes a model in torch.nn.parallel.DistributedDataParallel, got a "
            f"{type(ddp).__name__}; wrap it first"
        )


def gtopk(
    state: SparseState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Send the k largest of the sums over all ranks; a hook for a state with GTopK(…).

    Give it to ``register_comm_hook`` of torch's wrapper, which calls it for every bucket.

    Raises:
        RequestError: if the state is one of another class.
    """
    return _send(state, bucket, GTopK)


def topk(
    state: SparseState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Send the k largest of each rank; a hook for a state with TopK(…).

    Give it to ``register_comm_hook`` of torch's wrapper, which calls it for every bucket.

    Raises:
        RequestError: if the state is one of another class.
    """
    return _send(state, bucket, TopK)


def _send(
    state: SparseState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
    kind: type[Sparse],
) -> torch.futures.Future[torch.Tensor]:
    if not isinstance(state.settings, kind):
        raise RequestError(
            f"this hook wants a state with {kind.__name__}(…), got {type(state.settings).__name__}"
        )
    state.sender.raise_failure()
    return send_bucket(state.sender, bucket)
