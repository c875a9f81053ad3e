"""Links and how they are arranged: what the closed forms compute with."""

from itertools import accumulate
from math import prod
from operator import mul
from typing import get_args

from msgspec import Struct

from gradweave._src.checks import require_not_negative, require_one_of, require_positive
from gradweave._src.errors import RequestError
from gradweave._src.vocabulary import Topology


class Link(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a link costs: a message of M bytes takes ``latency_s + s_per_byte * M``.

    Attributes:
        latency_s: seconds that any message takes; the papers' alpha.
        s_per_byte: seconds for each byte, 8e-9 for 1 Gbit/s; the papers' beta.
        sum_s_per_byte: seconds to add one received byte; the papers' gamma.

    Raises:
        RequestError: if a number is negative or not finite.

    Examples:
        >>> link = gradweave.Link(latency_s=100e-6, s_per_byte=8e-9)
    """

    latency_s: float
    s_per_byte: float
    sum_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        require_not_negative(self, "latency_s", "s_per_byte", "sum_s_per_byte")


# What a transfer costs through gloo on Gigabit Ethernet, until somebody has measured it: choosing
# a block size needs some such number, and depends on it by its square root only.
GIGABIT_ETHERNET = Link(latency_s=100e-6, s_per_byte=8e-9)


class Level(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tier of a network: how many members a group has, and the link each of them has.

    A member of the innermost tier is a worker; of the next tier a whole group of workers, which
    share its link.

    Attributes:
        members: how many there are; None at the outermost tier, where all others are.
        link: the link of each member.

    Raises:
        RequestError: if ``members`` is not positive.

    Examples:
        >>> link = gradweave.Link(latency_s=100e-6, s_per_byte=8e-9)
        >>> gradweave.Level(members=8, link=link).members
        8
    """

    members: int | None
    link: Link

    def __post_init__(self) -> None:
        if self.members is not None:
            require_positive(self, "members")


class Links(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tiers of a network, innermost first, from which the papers' formulas price messages.

    Attributes:
        levels: the tiers; the last one alone has no number of members.
        topology: "fat-tree", in which all workers below a link share it, or "torus", in which only
            the workers of one innermost group do.

    Raises:
        RequestError: if there is no tier, a number of members is where none may be, or there is no
            such topology.

    Examples:
        >>> inside = gradweave.Link(latency_s=10e-6, s_per_byte=1e-10)
        >>> outside = gradweave.Link(latency_s=100e-6, s_per_byte=8e-9)
        >>> links = gradweave.Links(
        ...     levels=(
        ...         gradweave.Level(members=8, link=inside),
        ...         gradweave.Level(members=None, link=outside),
        ...     )
        ... )
        >>> links.factors(32)
        (8, 4)
    """

    levels: tuple[Level, ...]
    topology: Topology = "fat-tree"

    def __post_init__(self) -> None:
        require_one_of(self, topology=get_args(Topology))
        if not self.levels:
            raise RequestError("levels must not be empty")
        *inner, outermost = self.levels
        if outermost.members is not None or any(level.members is None for level in inner):
            raise RequestError("members must be null at the outermost level and only there")

    def slowest(self, workers: int) -> Link:
        """Return the worst latency and rate between workers, for algorithms that know no tiers."""
        reached = accumulate((level.members or workers for level in self.levels), mul, initial=1)
        links = [
            level.link
            for level, inside in zip(self.levels, reached, strict=False)
            if inside < workers or inside == 1
        ]
        return Link(
            latency_s=max(link.latency_s for link in links),
            s_per_byte=max(link.s_per_byte for link in links),
            sum_s_per_byte=max(link.sum_s_per_byte for link in links),
        )

    @property
    def smallest_whole(self) -> int:
        """How many workers fill all tiers but the outermost: any multiple of it fills them too."""
        return prod(level.members or 1 for level in self.levels)

    @property
    def sizes_text(self) -> str:
        """The sizes in words, such as ``4, 10 and any number of members``."""
        inner = ", ".join(str(level.members) for level in self.levels[:-1])
        return f"{inner} and any number of members" if inner else "any number of members"

    def factors(self, workers: int) -> tuple[int, ...] | None:
        """Return group sizes, innermost first, whose product is ``workers``; None if none fit."""
        sizes: list[int] = []
        for level in self.levels:
            remaining = workers // prod(sizes)
            members = remaining if level.members is None else min(level.members, remaining)
            if remaining % members:
                return None
            sizes.append(members)
        return tuple(sizes)


def flat(link: Link) -> Links:
    return Links(levels=(Level(members=None, link=link),))
