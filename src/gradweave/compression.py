"""How a gradient is thinned out before it travels."""

from typing import Literal

from msgspec import Struct

from gradweave.errors import RequestError
from gradweave.words import parse_spec

# gtopk is the paper's, up a tree and down again; gtopk-butterfly is what the runtime does.
Method = Literal["topk", "gtopk", "gtopk-butterfly"]
METHODS: tuple[Method, ...] = ("topk", "gtopk", "gtopk-butterfly")


class Compression(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Only the share ``density`` of the elements travels: each worker's largest, or the world's."""

    method: Method
    density: float

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be above 0 and at most 1, got {self.density}")

    def __str__(self) -> str:
        return f"{self.method}:{self.density:g}"


def parse_compression(text: str) -> Compression:
    """``gtopk:0.001`` keeps one element in a thousand."""
    spec = parse_spec(text)
    method = next((method for method in METHODS if method == spec.name), None)
    if method is None:
        raise RequestError(f"no compression {spec.name!r}; there are {', '.join(METHODS)}")
    try:
        return Compression(
            method=method, density=float("0.001" if spec.argument is None else spec.argument)
        )
    except ValueError as error:
        raise RequestError(f"{text!r}: {error}; write it as {method}:0.001") from None
