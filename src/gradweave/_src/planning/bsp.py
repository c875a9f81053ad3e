"""What the Linear Pipeline paper's three training loops send, and when."""

from collections.abc import Mapping
from itertools import groupby
from typing import NamedTuple

from gradweave._src.errors import RequestError
from gradweave._src.plan import Plan, merge
from gradweave._src.trace import Trace
from gradweave._src.vocabulary import Operation, alternatives, parse_spec

DEFAULT_COLLECTIVE = "linear-pipeline"
COLLECTIVES = (DEFAULT_COLLECTIVE, "mst", "exchange", "native")

# What is done with gradients, and afterwards with weights.
LOOPS: Mapping[str, tuple[Operation, ...]] = {
    "bsp-reduce-broadcast": ("reduce", "broadcast"),
    "bsp-allreduce": ("all-reduce",),
    "bsp-overlap": ("reduce", "broadcast"),
}


class Loop(NamedTuple):
    """A loop by a collective, such as ``bsp-overlap:mst``."""

    name: str
    collective: str

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The operations of every iteration."""
        return LOOPS[self.name]

    @property
    def updates_at_root(self) -> bool:
        """Whether the root alone updates; otherwise every rank does."""
        return "reduce" in self.operations

    def plan(self, trace: Trace) -> Plan:
        """Put everything into one message, or into one for each layer that is to overlap."""
        names = [tensor.name for tensor in trace.tensors]
        layers = groupby(names, owner)
        is_overlapped = self.name == "bsp-overlap"
        lengths = [len(list(layer)) for _, layer in layers] if is_overlapped else [len(names)]
        return merge(
            trace,
            lengths,
            planner=self.name,
            collective=self.collective,
            overlap=is_overlapped,
            passes="both" if "broadcast" in self.operations else "backward",
        )


def owner(tensor: str) -> str:
    """Return the name of a tensor's module; a tensor of the model itself has its own name."""
    return tensor.rpartition(".")[0] or tensor


def find_loop(text: str) -> Loop:
    name, collective = parse_spec(text)
    if name not in LOOPS:
        raise RequestError(f"no loop {name!r}{alternatives(name, LOOPS)}")
    by = collective or DEFAULT_COLLECTIVE
    if by not in COLLECTIVES:
        known = alternatives(by, COLLECTIVES)
        raise RequestError(f"{text}: no collective {collective!r} for it{known}")
    return Loop(name, by)
