"""Which gradients travel together, by which collective, how compressed, beside which passes."""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import get_args

import numpy as np
from msgspec import Struct

from gradweave._src import notebook
from gradweave._src.checks import first_twice, require_one_of
from gradweave._src.compression import Compression
from gradweave._src.costs.cost import FloatArray
from gradweave._src.errors import PlanMismatch, RequestError
from gradweave._src.trace import Trace
from gradweave._src.travel import ROUNDED_BY, Travel
from gradweave._src.vocabulary import Passes, count_text


class Bucket(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Gradients that travel as one message.

    Attributes:
        tensors: their names, in the order in which backward yields them.
        collective: by which they travel.
        compression: how they are rounded or thinned out; None leaves them as they are.

    Raises:
        RequestError: if there is no tensor, or the collective's name says how to round.

    Examples:
        >>> gradweave.Bucket(tensors=("fc.bias", "fc.weight"), collective="native").is_sparse
        False
    """

    tensors: tuple[str, ...]
    collective: str
    compression: Compression | None = None

    def __post_init__(self) -> None:
        if not self.tensors:
            raise RequestError("tensors must not be empty")
        if ROUNDED_BY in self.collective:
            raise RequestError(f"collective must not say how to round, got {self.collective!r}")

    @property
    def travel(self) -> Travel:
        """How the bucket travels: its collective and its compression."""
        return Travel(self.collective, self.compression)

    @property
    def is_sparse(self) -> bool:
        """Whether only some of its elements travel."""
        return self.compression is not None and self.compression.rounding is None


class Plan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which gradients travel together: each in exactly one bucket, buckets in sending order.

    ``make_plan`` makes one, and so do wrappers while a model trains.

    Attributes:
        planner: who made it.
        buckets: the messages.
        overlap: whether they travel beside the passes; False sends everything afterwards.
        passes: "backward", or "both" where parameters are gathered beside the next forward.

    Raises:
        RequestError: if there is no bucket, a tensor stands twice, both passes are compressed, or
            ``passes`` is neither of the two.

    Examples:
        >>> bucket = gradweave.Bucket(tensors=("fc.bias", "fc.weight"), collective="native")
        >>> gradweave.Plan(planner="mine", buckets=(bucket,)).lengths
        (2,)
    """

    planner: str
    buckets: tuple[Bucket, ...]
    overlap: bool = True
    passes: Passes = "backward"

    def __post_init__(self) -> None:
        require_one_of(self, passes=get_args(Passes))
        if not self.buckets:
            raise RequestError("buckets must not be empty")
        if self.passes == "both" and any(bucket.compression for bucket in self.buckets):
            raise RequestError("buckets: compression thins out all-reduces; both passes have none")
        twice = first_twice(name for bucket in self.buckets for name in bucket.tensors)
        if twice is not None:
            raise RequestError(
                f"buckets: tensor {twice!r} stands in two places; it can travel once"
            )

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many tensors each bucket holds."""
        return tuple(len(bucket.tensors) for bucket in self.buckets)

    @property
    def summary(self) -> str:
        """What the plan does, in a few words."""
        ways = ", ".join(dict.fromkeys(str(bucket.travel) for bucket in self.buckets))
        beside = "backward" if self.passes == "backward" else "both passes"
        return (
            f"{count_text(sum(self.lengths), 'gradient')} in "
            f"{count_text(len(self.buckets), 'message')} by {ways}, "
            f"{'beside' if self.overlap else 'after'} {beside}"
        )

    def rows(self) -> list[dict[str, object]]:
        """Return a row for each message, in sending order, for a data frame."""
        return [
            {
                "message": number,
                "tensors": len(bucket.tensors),
                "first_tensor": bucket.tensors[0],
                "last_tensor": bucket.tensors[-1],
                "collective": bucket.collective,
                "compression": None if bucket.compression is None else str(bucket.compression),
            }
            for number, bucket in enumerate(self.buckets, 1)
        ]

    def __repr__(self) -> str:
        return f"Plan({self.planner!r}, {self.summary})"

    def _repr_html_(self) -> str:
        return notebook.table(repr(self), self.rows())

    def bucket_bytes(self, trace: Trace) -> FloatArray:
        """Return the bytes of each bucket's gradients as the model has them, whatever travels."""
        starts = np.concatenate([[0], np.cumsum(self.lengths)[:-1]])
        return np.add.reduceat(trace.nbytes, starts)

    def check_fits(self, elements: Mapping[str, int]) -> None:
        """Raise PlanMismatch unless it is for a model whose parameters have so many elements.

        Parameters without elements send nothing, and may be left out.
        """
        planned = {name for bucket in self.buckets for name in bucket.tensors}
        needed = {name for name, count in elements.items() if count}
        if missing := sorted(needed - planned):
            raise PlanMismatch(
                f"{len(missing)} parameters of the model are in no bucket, first {missing[0]!r}; "
                "this is a plan for another model"
            )
        if extra := sorted(planned - set(elements)):
            raise PlanMismatch(
                f"the plan has {len(extra)} tensors that the model has not, first {extra[0]!r}; "
                "this is a plan for another model"
            )

    def check_describes(self, trace: Trace) -> None:
        """Raise PlanMismatch unless the buckets are the trace's tensors, in the trace's order."""
        planned = [name for bucket in self.buckets for name in bucket.tensors]
        traced = [tensor.name for tensor in trace.tensors]
        if planned == traced:
            return
        if missing := sorted(set(traced) - set(planned)):
            raise PlanMismatch(
                f"{len(missing)} tensors of trace {trace.name!r} are in no bucket, "
                f"first {missing[0]!r}; plan for this trace again"
            )
        if extra := sorted(set(planned) - set(traced)):
            raise PlanMismatch(
                f"the plan has {len(extra)} tensors that trace {trace.name!r} has not, "
                f"first {extra[0]!r}; plan for this trace again"
            )
        place = next(i for i, (a, b) in enumerate(zip(planned, traced, strict=True)) if a != b)
        raise PlanMismatch(
            f"the plan sends {planned[place]!r} where backward of trace {trace.name!r} "
            f"yields {traced[place]!r}; plan for this trace again"
        )


def merge(
    trace: Trace,
    lengths: Iterable[int],
    *,
    planner: str,
    collective: str,
    compression: Compression | None = None,
    overlap: bool = True,
    passes: Passes = "backward",
) -> Plan:
    """Return the plan whose buckets hold so many tensors each, in backward order."""
    names = iter([tensor.name for tensor in trace.tensors])
    buckets = tuple(
        Bucket(tensors=tuple(islice(names, length)), collective=collective, compression=compression)
        for length in lengths
    )
    plan = Plan(planner=planner, buckets=buckets, overlap=overlap, passes=passes)
    plan.check_describes(trace)
    return plan
