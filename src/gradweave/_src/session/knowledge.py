"""What a planning session knows by now, for all of its parts."""

from typing import Any

from msgspec.structs import replace

from gradweave._src.errors import RequestError
from gradweave._src.network import Network
from gradweave._src.plan import Plan
from gradweave._src.session.findings import Findings
from gradweave._src.session.learning import NONE_SEEN, MessageSample, learnt_network
from gradweave._src.session.task import PlanningTask
from gradweave._src.simulation import simulate
from gradweave._src.timeline import Timeline
from gradweave._src.trace import Trace
from gradweave._src.travel import parse_travel


class Knowledge:
    """What a session's parts have found out so far; ``findings`` are what others see of it."""

    def __init__(self, task: PlanningTask) -> None:
        self.task = task
        roundings = [parse_travel(way).compression for way in task.roundings]
        self._formats = tuple(dict.fromkeys(one.method for one in roundings if one is not None))
        self.findings = Findings(is_whole=task.is_whole_model, may_round_to=self._formats)
        self.samples: list[MessageSample] = []  # what messages have cost
        self.probed_s = 0.0  # taken by messages beside the training, in all
        self.probed_bytes = 0  # sent in such messages since planning began
        self._last_step = task.most_steps

    def note(self, **changes: Any) -> None:
        """Change fields of the findings."""
        self.findings = replace(self.findings, **changes)

    def begin_planning(self) -> None:
        """Forget everything but how far training has come."""
        before = self.findings
        self.samples, self.probed_bytes = [], 0
        self.findings = Findings(
            steps=before.steps, elapsed_s=before.elapsed_s, may_round_to=self._formats
        )
        self.allow(self.task.most_steps)

    def allow(self, steps: int) -> None:
        """Let planning take so many more steps from here."""
        self._last_step = self.findings.steps + steps
        self.note(most_steps=self._last_step)

    def has_time_for(self, steps: int) -> bool:
        """Return whether planning may take so many more steps."""
        return self.findings.steps + steps <= self._last_step

    @property
    def trace(self) -> Trace:
        assert self.findings.trace is not None, "it is recorded before anything else is asked for"
        return self.findings.trace

    @property
    def model_bytes(self) -> int:
        """The bytes of all gradients."""
        return int(self.trace.nbytes.sum())

    def learnt_network(self) -> Network:
        """Return what messages cost, judged by those that were seen so far."""
        network = learnt_network(
            self.samples, workers=self.task.workers, model_bytes=self.model_bytes
        )
        if network is None:
            raise RequestError(NONE_SEEN)
        return network

    def predicted(self, plan: Plan) -> Timeline:
        """Return what a plan is predicted to take by what is known now."""
        network = self.findings.network
        assert network is not None, "plans are made of what messages cost"
        return simulate(self.trace, plan, network, workers=self.task.workers)
