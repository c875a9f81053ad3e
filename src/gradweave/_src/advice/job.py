"""A job, and the best plans for it: as torch's wrapper would send, and as ours could."""

from collections.abc import Iterable, Sequence
from functools import cached_property

from msgspec import Struct

from gradweave._src.compression import Compression, RoundingName
from gradweave._src.costs import FORMULAS
from gradweave._src.errors import GradweaveError, RequestError
from gradweave._src.network import Network
from gradweave._src.plan import Plan
from gradweave._src.planning import (
    BOTH_PASSES_COLLECTIVE,
    FOR_ROUNDED,
    FOR_SMALL_MESSAGES,
    FOR_TIERS,
    OPERATIONS,
    is_compressible,
    make_plan,
    priced_share,
)
from gradweave._src.planning.baselines import UNIFORM_MIB
from gradweave._src.planning.joint import plan_among
from gradweave._src.simulation import simulate
from gradweave._src.timeline import Timeline
from gradweave._src.trace import Trace
from gradweave._src.travel import Travel
from gradweave._src.vocabulary import Operation

# Plans that differ by less count as equally fast: predictions are no better than that.
EQUALLY_FAST = 0.01

# Without a tolerance, so that no uniform buckets look better than planned ones.
PLANNER = "optimal:0"


class Choice(Struct, frozen=True, kw_only=True):
    """Collectives among which each message may choose, and the argument that asks for them."""

    collectives: tuple[str, ...]
    argument: str | None = None  # None: wrappers choose among these by themselves


class PricedPlan(Struct, frozen=True, kw_only=True):
    """A plan, what a step by it looks like, and what its messages could choose from."""

    plan: Plan
    timeline: Timeline
    choice: Choice

    @property
    def step_s(self) -> float:
        return self.timeline.iteration_s


class Job:
    """A model on so many workers of a network."""

    def __init__(self, trace: Trace, network: Network, *, workers: int) -> None:
        self.trace, self.network, self.workers = trace, network, workers

    def on(self, workers: int) -> "Job":
        """Return the same model on so many workers, each with a batch as large as before."""
        return Job(self.trace, self.network, workers=workers)

    @cached_property
    def torch_default(self) -> PricedPlan:
        """Return the plan in the buckets of torch's wrapper as it comes."""
        return self._by_default(self._plan_by("ddp"))

    @cached_property
    def torch_best_cap(self) -> PricedPlan:
        """Return the plan with the best caps that a patient user would try, torch's among them."""
        default = self.torch_default
        # Many caps make the same buckets, of which the first stands for all.
        different = {default.plan.lengths: default}
        for size in UNIFORM_MIB:
            plan = self._plan_by(f"fixed:{size:g}MiB")
            if plan.lengths not in different:
                different[plan.lengths] = self._by_default(plan)
        return min(different.values(), key=lambda one: one.step_s)

    @cached_property
    def exact(self) -> PricedPlan:
        """Return the best buckets by the best collectives, with gradients as they are."""
        return _first_or_faster(self._among(choice, (None,)) for choice in self._choices())

    def rounded(self, roundings: Sequence[RoundingName | None]) -> PricedPlan:
        """Return the best plan that rounds each message to one of these, or not at all for None."""
        if not is_compressible(self.trace):
            raise RequestError("rounding is priced for gradients of 4 bytes only")
        return self._among(self.exact.choice, roundings)

    def sparse(self, compression: Compression) -> PricedPlan:
        """Return the best plan that sends only the largest gradients wherever that is faster."""
        priced_share(self.trace, compression)  # raises where there is no price
        default = self.network.default_collective
        travels = (Travel(default, compression), Travel(default))
        plan = plan_among(self.trace, self.network, travels, workers=self.workers, planner=PLANNER)
        return self._planned(plan, Choice(collectives=(default,)))

    @cached_property
    def both_passes(self) -> PricedPlan:
        """The best plan that reduce-scatters in backward and all-gathers in the next forward."""
        known = self._known(*OPERATIONS["both"])
        first = [name for name in known if name == BOTH_PASSES_COLLECTIVE]
        # If there is none, planning for the default one raises an error that says what is missing.
        names = dict.fromkeys([*first, *known] or [BOTH_PASSES_COLLECTIVE])
        return _first_or_faster(map(self._for_both, names))

    def _plan_by(self, planner: str) -> Plan:
        return make_plan(self.trace, self.network, workers=self.workers, planner=planner)

    def _by_default(self, plan: Plan) -> PricedPlan:
        return self._planned(plan, Choice(collectives=(self.network.default_collective,)))

    def _among(self, choice: Choice, roundings: Sequence[RoundingName | None]) -> PricedPlan:
        travels = [Travel(by) for by in choice.collectives] if None in roundings else []
        travels += [
            Travel(self._rounding_collective, Compression(method=rounding))
            for rounding in roundings
            if rounding is not None
        ]
        plan = plan_among(
            self.trace, self.network, tuple(travels), workers=self.workers, planner=PLANNER
        )
        return self._planned(plan, choice)

    def _for_both(self, name: str) -> PricedPlan:
        plan = make_plan(
            self.trace,
            self.network,
            workers=self.workers,
            planner=PLANNER,
            collective=name,
            passes="both",
        )
        is_default = name == BOTH_PASSES_COLLECTIVE
        choice = Choice(collectives=(name,), argument=None if is_default else name)
        return self._planned(plan, choice)

    def _planned(self, plan: Plan, choice: Choice) -> PricedPlan:
        timeline = simulate(self.trace, plan, self.network, workers=self.workers)
        return PricedPlan(plan=plan, timeline=timeline, choice=choice)

    def _choices(self) -> list[Choice]:
        """Return first what wrappers choose by themselves, then all else that has a price."""
        known = self._known("all-reduce")
        default = self.network.default_collective
        rivals = (FOR_SMALL_MESSAGES, FOR_TIERS) if self._is_tiered else (FOR_SMALL_MESSAGES,)
        by_itself = (default, *(name for name in rivals if name in known and name != default))
        others = [name for name in known if name not in by_itself]
        return [
            Choice(collectives=by_itself),
            *(Choice(collectives=(name,), argument=name) for name in others),
        ]

    @property
    def _rounding_collective(self) -> str:
        """The collective by which wrappers send what they round, or the nearest known to it."""
        usual = FOR_TIERS if self._is_tiered else FOR_ROUNDED
        measured = [travel.collective for travel in self.network.travels if travel.compression]
        known = [*measured, *(by for by in self._known("all-reduce") if by == usual)]
        return next(iter(known), self.network.default_collective)

    @property
    def _is_tiered(self) -> bool:
        """Whether the network has several tiers, or a collective for tiers was measured on it."""
        links = self.network.links
        if links is None:
            return FOR_TIERS in self.network.collectives
        return sum(size > 1 for size in links.factors(self.workers) or ()) > 1

    def _known(self, *operations: Operation) -> list[str]:
        """Return the collectives for which the network can price all of these operations."""
        formulas = [name for operation, name in FORMULAS if operation == operations[0]]
        names = dict.fromkeys([*self.network.collectives, *formulas])
        return [name for name in names if self._has_price(name, operations)]

    def _has_price(self, name: str, operations: Sequence[Operation]) -> bool:
        try:
            for operation in operations:
                self.network.cost(operation, name, workers=self.workers)
        except GradweaveError:
            return False
        return True


def _first_or_faster(found: Iterable[PricedPlan]) -> PricedPlan:
    """Return the first, unless a later one is faster by more than predictions are uncertain."""
    best, *others = found
    for one in others:
        if one.step_s < (1 - EQUALLY_FAST) * best.step_s:
            best = one
    return best
