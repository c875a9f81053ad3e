"""What a user says to sparsify: ``GTopK(0.001)``, or ``"gtopk:0.001"``."""

from dataclasses import dataclass, field
from typing import ClassVar

from gradweave._src.compression import Compression, ExchangeName, parse_compression
from gradweave._src.errors import RequestError
from gradweave._src.sparse.exchange import find_exchange
from gradweave._src.sparse.select import check_selection, find_selection
from gradweave._src.sparse.warmup import Densities, check_clip_norm, check_momentum


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparse:
    """Only the largest gradients travel; the rest waits in residuals.

    ``GTopK`` and ``TopK`` say what each field means.
    """

    _exchanges: ClassVar[str]  # how the names of exchanges with this result begin

    density: float | Densities = field(kw_only=False)
    exchange: ExchangeName
    selection: str | None = None
    momentum: float | None = None
    masking: bool = True
    clip_norm: float | None = None
    dense_below: int = 0
    whole_model: bool = False

    def __post_init__(self) -> None:
        find_exchange(self.exchange)
        if not self.exchange.startswith(self._exchanges):
            raise RequestError(
                f"{type(self).__name__} goes by exchanges {self._exchanges}…, not by "
                f"{self.exchange!r}; take the class of that name"
            )
        if not isinstance(self.density, Densities):
            Densities(warmup=(), final=self.density)
        if self.selection is not None:
            find_selection(self.selection)
        if self.momentum is not None:
            check_momentum(self.momentum)
        if self.clip_norm is not None:
            check_clip_norm(self.clip_norm)
        if not self.dense_below >= 0:
            raise RequestError(
                f"dense_below must be a number of elements, 0 or more, got {self.dense_below}"
            )

    def density_at(self, step: int) -> float:
        """Return the share of elements that travels in this step."""
        return self.density.at(step) if isinstance(self.density, Densities) else self.density

    def compression_at(self, step: int) -> Compression:
        """Return the compression of this step as plans have it."""
        return Compression(method=self.exchange, density=self.density_at(step))


@dataclass(frozen=True, slots=True, kw_only=True)
class GTopK(Sparse):
    """Only the k largest of the sums over all ranks travel; the rest waits in residuals.

    Give it as ``compression`` of DistributedDataParallel; docs/sparsification.md says when that
    pays.

    Args:
        density: the share that travels: a number, or ``Densities`` by training step, which warm up
            as the paper does where they are told how many steps an epoch has.
        exchange: how ranks exchange them: "gtopk" (a butterfly), "gtopk-tree", "gtopk-tree-lossy"
            or "gtopk-all-gather".
        selection: "radix" (exact, on CPUs with numba), "threshold" (exact, on the device),
            "torch-topk" (exact, on any device), "sampled" or "gaussian" (approximate); default: the
            fastest exact one.
        momentum: corrected momentum before selection; the optimizer's own must be 0 then.
        masking: whether momentum restarts where a rank's own elements have been applied.
        clip_norm: the norm of the mean gradient without its loss scale; each rank clips each bucket
            before selection, to its share of that.
        dense_below: parameters with fewer elements travel whole, such as bias and normalisation.
        whole_model: select over all parameters at once, as the paper does, instead of per bucket.

    Raises:
        RequestError: if a number is out of range, or an exchange or selection is unknown; by the
            wrapper, if a selection needs numba, which is not installed.

    Examples:
        >>> gradweave.GTopK(0.001).compression_at(step=0)
        Compression(method='gtopk', density=0.001)
    """

    _exchanges: ClassVar[str] = "gtopk"

    exchange: ExchangeName = "gtopk"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK(Sparse):
    """Only the k largest of each rank travel, and all of them are applied.

    The rest waits in residuals. Give it as ``compression`` of DistributedDataParallel.

    Args:
        density: the share that travels: a number, or ``Densities`` by training step.
        selection: how the largest are found, as for ``GTopK``.
        momentum: corrected momentum before selection; the optimizer's own must be 0 then.
        masking: whether momentum restarts where a rank's own elements have been applied.
        clip_norm: the norm of the mean gradient without its loss scale, as for ``GTopK``.
        dense_below: parameters with fewer elements travel whole, such as bias and normalisation.
        whole_model: select over all parameters at once instead of per bucket.

    Raises:
        RequestError: if a number is out of range, or a selection is unknown; by the wrapper, if a
            selection needs numba, which is not installed.

    Examples:
        >>> gradweave.TopK(0.01).density_at(step=0)
        0.01
    """

    _exchanges: ClassVar[str] = "topk"

    exchange: ExchangeName = field(default="topk", init=False)


def settings_of(given: Sparse | Compression | str) -> Sparse:
    """Return the settings that a user means by a ``compression`` in any of its forms."""
    if isinstance(given, Sparse):
        if given.selection is not None:
            check_selection(given.selection)
        return given
    compression = parse_compression(given) if isinstance(given, str) else given
    if not isinstance(compression, Compression):
        what = "the class itself" if isinstance(given, type) else f"a {type(given).__name__}"
        raise RequestError(
            f"compression must be GTopK(…), TopK(…) or a text such as 'gtopk:0.001', got {what}"
        )
    if compression.rounding is not None:
        raise RequestError(
            f"{compression} rounds all elements instead of leaving some out; write "
            f"precision={str(compression)!r} instead of compression"
        )
    return settings_for(compression)


def settings_for(compression: Compression) -> GTopK | TopK:
    """Return the settings that do what a plan's compression says."""
    if compression.exchange == "topk":
        return TopK(compression.density)
    assert compression.exchange is not None, "rounded messages have no such settings"
    return GTopK(compression.density, exchange=compression.exchange)
