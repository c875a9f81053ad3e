"""How a gradient is made smaller before it travels: rounded, or thinned out."""

from collections.abc import Mapping
from typing import Literal, get_args

from msgspec import Struct

from gradweave._src.errors import RequestError
from gradweave._src.vocabulary import alternatives, parse_spec

# How the largest are exchanged, by the names of gradweave._src.sparse.exchange.EXCHANGES.
ExchangeName = Literal["topk", "gtopk", "gtopk-tree", "gtopk-tree-lossy", "gtopk-all-gather"]
EXCHANGE_NAMES: tuple[ExchangeName, ...] = get_args(ExchangeName)

# What every element is rounded to, by the names of gradweave._src.comm.rounding.WIRE_FORMATS.
RoundingName = Literal["bf16", "fp16", "int8"]
ROUNDING_NAMES: tuple[RoundingName, ...] = get_args(RoundingName)

# Each in one line, for people.
COMPRESSION_SUMMARIES: Mapping[str, str] = {
    "bf16": "every element rounded to bfloat16; sums are made in float32",
    "fp16": "every element rounded to float16; sums are made in float32",
    "int8": "every element rounded to 8 bits; what that drops is added to the next gradient",
    "topk": "only the largest gradients of each worker",
    "gtopk": "only the largest gradients of all workers",
    "gtopk-tree": "only the largest gradients of all workers, by the gTop-k paper's tree",
    "gtopk-tree-lossy": "the gTop-k paper's tree, with what it loses",
    "gtopk-all-gather": "only the largest gradients of all workers, found by all of them",
}

# Of 8-bit numbers so many share a scale of 4 bytes.
ELEMENTS_PER_SCALE = 256
# What is left of 4 bytes on the wire.
WIRE_SHARES: Mapping[RoundingName, float] = {
    "bf16": 1 / 2,
    "fp16": 1 / 2,
    "int8": 1 / 4 + 1 / ELEMENTS_PER_SCALE,
}
# Rounding to these drops so much that it is carried over to the next step.
KEEPS_ERRORS: frozenset[RoundingName] = frozenset({"int8"})
DEFAULT_DENSITY = 0.001

# What planning may change about results: nothing but the order of sums; what messages are rounded
# to; which elements travel. Or one rounding for all messages.
EXACT, ROUNDED, SPARSE = "exact", "rounded", "sparse"
PRECISIONS = (EXACT, ROUNDED, SPARSE, *ROUNDING_NAMES)
# What plans may round to where they may choose. float16 has no range for what bfloat16 sends.
ROUNDED_TO: tuple[RoundingName, ...] = ("bf16", "int8")


class Compression(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a message is made smaller: all elements are rounded, or only the largest of them travel.

    Attributes:
        method: "bf16", "fp16" or "int8", to which all elements are rounded; or an exchange of the
            largest, such as "gtopk" or "topk".
        density: the share that travels where elements are thinned out.

    Raises:
        RequestError: if there is no such method, or the density is not above 0 and at most 1, or
            not 1 where elements are rounded.

    Examples:
        >>> str(gradweave.Compression(method="gtopk", density=0.001))
        'gtopk:0.001'
    """

    method: ExchangeName | RoundingName
    density: float = 1.0

    def __post_init__(self) -> None:
        if self.method not in tuple(COMPRESSION_SUMMARIES):
            known = alternatives(str(self.method), COMPRESSION_SUMMARIES)
            raise RequestError(f"no compression {self.method!r}{known}")
        if not 0 < self.density <= 1:
            raise RequestError(f"density must be above 0 and at most 1, got {self.density}")
        if self.rounding is not None and self.density != 1:
            raise RequestError(f"{self.method} rounds all elements: density must be 1")

    def __str__(self) -> str:
        return self.method if self.rounding else f"{self.method}:{self.density:g}"

    @property
    def rounding(self) -> RoundingName | None:
        """The format to which elements are rounded; None where they are thinned out."""
        return next((name for name in ROUNDING_NAMES if name == self.method), None)

    @property
    def wire_share(self) -> float:
        """The share of float32 that is left on the wire, without indices."""
        return self.density if self.rounding is None else WIRE_SHARES[self.rounding]

    @property
    def exchange(self) -> ExchangeName | None:
        """The way in which the largest are exchanged; None where all elements are rounded."""
        return next((name for name in EXCHANGE_NAMES if name == self.method), None)


def check_precision(name: str) -> None:
    if name not in PRECISIONS:
        raise RequestError(f"no precision {name!r}{alternatives(name, PRECISIONS)}")


def compression_of(given: Compression | str | None) -> Compression | None:
    """Return what a caller means by ``compression``, given as a value or as text."""
    if isinstance(given, str):
        return parse_compression(given)
    if given is not None and not isinstance(given, Compression):
        raise RequestError(
            "compression must be a Compression or a text such as 'gtopk:0.001', got a "
            f"{type(given).__name__}"
        )
    return given


def parse_compression(text: str) -> Compression:
    """Read ``gtopk:0.001``, which keeps one element in a thousand, or ``bf16``: it rounds all."""
    spec = parse_spec(text)
    rounding = next((name for name in ROUNDING_NAMES if name == spec.name), None)
    exchange = next((name for name in EXCHANGE_NAMES if name == spec.name), None)
    if rounding is not None:
        if spec.argument is not None:
            raise RequestError(f"{text!r}: {rounding} rounds all elements; write {rounding} alone")
        return Compression(method=rounding)
    if exchange is None:
        known = alternatives(spec.name, COMPRESSION_SUMMARIES)
        raise RequestError(f"no compression {spec.name!r}{known}")
    try:
        density = DEFAULT_DENSITY if spec.argument is None else float(spec.argument)
        return Compression(method=exchange, density=density)
    except ValueError as error:
        raise RequestError(f"{text!r}: {error}; write it as {exchange}:0.001") from None
