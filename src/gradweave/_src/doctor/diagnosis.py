"""A checkup with what follows from it."""

from msgspec import Struct

from gradweave._src.doctor.checkup import Checkup
from gradweave._src.doctor.price import Price, price_of
from gradweave._src.doctor.verdicts import Finding, verdicts


class Diagnosis(Struct, frozen=True, kw_only=True):
    """What was found out, what is wrong, and what torch's wrapper would cost."""

    checkup: Checkup
    findings: tuple[Finding, ...]
    price: Price | None

    @property
    def summary(self) -> str:
        ranks, hosts = len(self.checkup.ranks), len(self.checkup.hosts)
        return (
            f"{ranks} rank{'s' * (ranks != 1)} on {hosts} host{'s' * (hosts != 1)}, looked over "
            f"in {self.checkup.took_s:.1f} s"
        )


def diagnose(checkup: Checkup) -> Diagnosis:
    return Diagnosis(
        checkup=checkup,
        findings=verdicts(checkup),
        price=price_of(checkup.all_reduces, workers=len(checkup.ranks)),
    )
