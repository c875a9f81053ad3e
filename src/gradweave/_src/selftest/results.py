"""What a self-test found, in a form that can be pasted into an issue."""

from typing import Literal

from msgspec import Struct

Outcome = Literal["passed", "failed", "skipped"]


class Check(Struct, frozen=True, kw_only=True):
    """One thing that was tried on all ranks, and what came of it in a line."""

    name: str
    outcome: Outcome
    line: str


class Surroundings(Struct, frozen=True, kw_only=True):
    """The surroundings of a self-test, which whoever answers the paste would ask for first."""

    device: str
    backend: str
    ranks: int
    device_names: tuple[str, ...]  # by rank
    versions: dict[str, str]


class Selftest(Struct, frozen=True, kw_only=True):
    surroundings: Surroundings
    checks: tuple[Check, ...]

    @property
    def has_passed(self) -> bool:
        return all(check.outcome != "failed" for check in self.checks)

    @property
    def summary(self) -> str:
        passed, failed, skipped = (
            sum(check.outcome == outcome for check in self.checks)
            for outcome in ("passed", "failed", "skipped")
        )
        where = f"{self.surroundings.ranks} ranks on {self.surroundings.device}"
        return f"{where}: {passed} passed, {failed} failed, {skipped} skipped"


class Noted(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What rank 0 writes down as it goes, so that whoever started it knows where it ended."""

    surroundings: Surroundings | None = None
    began: str | None = None  # a check
    ended: Check | None = None
