"""What a step would take with faster ranks or links, by what was measured and by simulation."""

from collections.abc import Callable
from math import exp, log

from msgspec import Struct

from gradweave._src.errors import GradweaveError
from gradweave._src.network import Network
from gradweave._src.phases import Phases
from gradweave._src.plan import Plan
from gradweave._src.simulation import simulate
from gradweave._src.trace import Trace

# How many times as long as was learnt messages may take, at most and at least.
MOST_TIMES, LEAST_TIMES = 16.0, 0.25
HALVINGS = 16


class SentPerStep(Struct, frozen=True, kw_only=True):
    """What is sent in a step, and what is known of the network that it is sent on."""

    trace: Trace
    plan: Plan
    network: Network
    workers: int

    def exposed_s(self, slowest: Phases, *, times_as_long: float = 1.0) -> float:
        """Return how long messages are exposed that take so many times as long as on this network.

        ``slowest`` is the rank that computes longest, for which all messages wait. If messages take
        twice as long, they are exposed twice as long as they would be beside half the computing.
        """
        trace = self.trace
        forward_s, backward_s = (
            seconds / times_as_long if seconds and known_s else None
            for seconds, known_s in (
                (slowest.forward_s, trace.forward_s),
                (slowest.backward_s, trace.backward_s),
            )
        )
        rescaled = trace.rescaled(forward_s=forward_s, backward_s=backward_s)
        step = simulate(rescaled, self.plan, self.network, workers=self.workers)
        return step.exposed_s * times_as_long


# Predicts how long messages are exposed behind the rank that computes longest, where links take so
# many times as long as they do now.
Exposed = Callable[[Phases, float], float]


def exposed_beside(now: Phases, sent: SentPerStep | None) -> Exposed:
    """Return a function that predicts how long the slowest rank waits for messages.

    Its arguments are that rank's phases, and how many times as long as now links take; ``now`` is
    what was measured. Where it is known what is sent it simulates that: a shorter backward pass
    hides less, and shorter messages also wait less for each other. The network is taken to be as
    slow as it is now, not as it was learnt. Otherwise backward is taken to hide what it hides now.
    """

    def as_now(slowest: Phases, times_as_long: float) -> float:
        del slowest
        return now.network_s * times_as_long

    if sent is None:
        return as_now
    try:
        present = _times_as_long(sent, now)
        simulated_s = sent.exposed_s(now, times_as_long=present)
    except GradweaveError:  # a message without a price
        return as_now

    def by_simulation(slowest: Phases, times_as_long: float) -> float:
        exposed_s = sent.exposed_s(slowest, times_as_long=present * times_as_long)
        return max(0.0, now.network_s + exposed_s - simulated_s)

    return by_simulation


def _times_as_long(sent: SentPerStep, now: Phases) -> float:
    """Return by which factor messages are slower than learnt, judged by their exposed time."""
    low, high = log(LEAST_TIMES), log(MOST_TIMES)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if sent.exposed_s(now, times_as_long=exp(middle)) < now.network_s:
            low = middle
        else:
            high = middle
    return exp((low + high) / 2)
