"""How a gradient is thinned out before it travels."""

from typing import Literal, get_args

from msgspec import Struct

from gradweave.errors import RequestError
from gradweave.vocabulary import parse_spec

# How the largest are exchanged, by the names of gradweave.sparse.exchange.EXCHANGES.
ExchangeName = Literal["topk", "gtopk", "gtopk-tree", "gtopk-tree-lossy", "gtopk-all-gather"]
EXCHANGE_NAMES: tuple[ExchangeName, ...] = get_args(ExchangeName)


class Compression(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Only the share ``density`` of the elements travels: each worker's largest, or the world's."""

    method: ExchangeName
    density: float

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be above 0 and at most 1, got {self.density}")

    def __str__(self) -> str:
        return f"{self.method}:{self.density:g}"


def parse_compression(text: str) -> Compression:
    """``gtopk:0.001`` keeps one element in a thousand."""
    spec = parse_spec(text)
    method = next((name for name in EXCHANGE_NAMES if name == spec.name), None)
    if method is None:
        raise RequestError(f"no compression {spec.name!r}; there are {', '.join(EXCHANGE_NAMES)}")
    try:
        return Compression(
            method=method, density=float("0.001" if spec.argument is None else spec.argument)
        )
    except ValueError as error:
        raise RequestError(f"{text!r}: {error}; write it as {method}:0.001") from None
