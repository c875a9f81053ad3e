"""Types that calls take and return and nobody makes by hand, for annotations and to look them up.

Importing this module imports torch.
"""

from gradweave._src.advice import Advice, Option, Unpriced
from gradweave._src.costs import Cost
from gradweave._src.measure.backward import Recording, Spread
from gradweave._src.phases import Phases
from gradweave._src.remembered import ParameterKey, PlanKey, Remembered
from gradweave._src.results import Losses, LossSeries, Result, Results, StageBegin
from gradweave._src.runtime.flat.shards import OwnedPart
from gradweave._src.runtime.reporting.account import PlanningAccount
from gradweave._src.runtime.reporting.watched import Watched
from gradweave._src.session.candidates import Candidate
from gradweave._src.session.compression_worth import Verdict
from gradweave._src.session.findings import Findings, Stage
from gradweave._src.session.slow_ranks import SlowRank
from gradweave._src.session.trials import Trial, Visit
from gradweave._src.training_record import Account, Steps, TriedPlan
from gradweave._src.travel import Travel
from gradweave._src.vocabulary import Operation

__all__ = [
    "Account",
    "Advice",
    "Candidate",
    "Cost",
    "Findings",
    "LossSeries",
    "Losses",
    "Operation",
    "Option",
    "OwnedPart",
    "ParameterKey",
    "Phases",
    "PlanKey",
    "PlanningAccount",
    "Recording",
    "Remembered",
    "Result",
    "Results",
    "SlowRank",
    "Spread",
    "Stage",
    "StageBegin",
    "Steps",
    "Travel",
    "Trial",
    "TriedPlan",
    "Unpriced",
    "Verdict",
    "Visit",
    "Watched",
]
