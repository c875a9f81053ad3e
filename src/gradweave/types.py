"""The types that calls return and nobody makes by hand, for annotations and to look them up.

Importing this module imports torch.
"""

from gradweave._src.advice import Advice, Option, Unpriced
from gradweave._src.costs import Cost
from gradweave._src.measure.backward import Recording, Spread
from gradweave._src.runtime.account import PlanningAccount
from gradweave._src.runtime.shards import OwnedPart
from gradweave._src.runtime.watched import Watched
from gradweave._src.session.candidates import Candidate
from gradweave._src.session.compression import Verdict
from gradweave._src.session.findings import Findings, Stage
from gradweave._src.session.slow_ranks import SlowRank
from gradweave._src.session.trials import Trial, Visit
from gradweave._src.travel import Travel

__all__ = [
    "Advice",
    "Candidate",
    "Cost",
    "Findings",
    "Option",
    "OwnedPart",
    "PlanningAccount",
    "Recording",
    "SlowRank",
    "Spread",
    "Stage",
    "Travel",
    "Trial",
    "Unpriced",
    "Verdict",
    "Visit",
    "Watched",
]
