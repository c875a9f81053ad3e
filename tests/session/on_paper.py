"""A session on paper: whoever owns it carries out its commands without processes or torch."""

from itertools import count

from hypothesis import strategies as st
from strategies import traces

from gradweave._src.compression import Compression
from gradweave._src.costs import Line
from gradweave._src.session.candidates import shortlist, travels_for, unplanned_lengths
from gradweave._src.session.commands import (
    Candidates,
    CompressionPrice,
    Failed,
    FindCandidates,
    Install,
    PriceCompression,
    Probe,
    Probed,
    Record,
    Recorded,
    SimpleBuckets,
    StepsTaken,
    StepsTimed,
    TakeSteps,
    TimeSteps,
    Told,
    Unplannable,
)
from gradweave._src.session.findings import Stage
from gradweave._src.session.learning import MESSAGES_PER_PROBE, MessageSample
from gradweave._src.session.session import Session
from gradweave._src.session.task import AGREEING_STEPS, PlanningTask

# So dear that merging small tensors gains a good part of a step of a second.
STARTUP_S = 0.2
times_s = st.floats(0.9, 1.1)


def density_at(step):
    return Compression(method="gtopk", density=0.5 if step < 5 else 0.1)


TASKS = st.builds(
    PlanningTask,
    workers=st.just(4),
    trial_steps=st.sampled_from([0, 3]),
    replan_when=st.sampled_from([None, 0.05]),
    compression_at=st.sampled_from([None, density_at]),
    keeps_declared_order=st.booleans(),
)


class Owner:
    """Carries out commands on paper, and remembers what is installed."""

    def __init__(self, session, trace, draw):
        self.session, self.trace, self.draw = session, trace, draw
        self.installed, self.commands, self.stages = SimpleBuckets.ORIGINAL, [], []
        self.steps_at = []  # each of these stages was seen
        self.taken = self.steps = 0
        self.elapsed_s = 0.0
        self.notes_messages = False
        self.probed_bytes = 0  # at most
        self.visits_s = {}  # by plan, what the steps of its visits took

    def run(self, *, stop_after=None):
        """Until the session is over, or stopped while its command of this number is under way.

        Buckets are installed between two steps, at once, as a driver does it: a stop finds either
        the old ones or the new ones, and never comes in the place of an Install.
        """
        command = self.session.begin()
        for number in count(1):
            self.stages.append(self.session.findings.stage)
            self.steps_at.append(self.steps)
            if command is None:
                return
            self.commands.append(command)
            is_late = stop_after is not None and number >= stop_after
            if is_late and not isinstance(command, Install):
                command = self.session.stop("enough")
                if command is not None:
                    self.installed = command.buckets
                self.stages.append(self.session.findings.stage)
                return
            command = self.session.reply(self.told(command))

    def told(self, command):
        """What came of it; whatever takes steps is told with their number."""
        reply = self.carry_out(command)
        if reply is None or isinstance(reply, StepsTaken):
            return reply
        self.steps += AGREEING_STEPS
        match command:
            case Record():
                self.steps += 2 + command.steps
            case TimeSteps():
                self.steps += command.settling_steps + command.steps
            case Probe():
                self.steps += 3 * len(command.sizes_bytes)
        return Told(reply=reply, steps=self.steps, elapsed_s=self.elapsed_s)

    def carry_out(self, command):  # noqa: PLR0911
        match command:
            case Install():
                self.installed, self.notes_messages = command.buckets, command.notes_messages
                return None
            case Record():
                order = tuple(tensor.name for tensor in self.trace.tensors)
                return self.draw(
                    st.sampled_from(
                        [Recorded(self.trace)] * 9 + [Unplannable("no", order), Failed("broken")]
                    )
                )
            case Probe():
                assert self.session.findings.stage is not Stage.SETTLED
                self.probed_bytes += max(command.within_bytes, sent_surely(command))
                return Probed(
                    tuple(sample(size) for size in command.sizes_bytes),
                    sent_bytes=max(command.within_bytes, sent_surely(command)),
                )
            case FindCandidates():
                return Candidates(tuple(self.candidates(command)))
            case TimeSteps():
                taken_s = tuple(self.draw(times_s) for _ in range(min(2, command.steps)))
                self.elapsed_s += sum(taken_s)
                if self.session.findings.stage is not Stage.SETTLED:
                    self.visits_s.setdefault(self.sent, []).append(taken_s)
                return StepsTimed(taken_s, self.samples())
            case TakeSteps():
                self.taken += command.steps
                return StepsTaken(self.taken)
            case PriceCompression():
                return CompressionPrice(1e-9, Line(startup_s=1e-4, s_per_byte=1e-10))

    @property
    def sent(self):
        """How many tensors each bucket has that is sent now."""
        if self.installed is SimpleBuckets.ORIGINAL:
            return tuple(self.baseline_lengths())
        return tuple(len(bucket.tensors) for bucket in self.installed.buckets)

    def samples(self):
        """Of messages on the network, one by one."""
        sizes = iter([tensor.nbytes for tensor in self.trace.tensors])
        return tuple(
            sample(sum(next(sizes) for _ in range(length)))
            for length in (self.sent if self.notes_messages else ())
        )

    def baseline_lengths(self):
        return unplanned_lengths(
            [tensor.nbytes for tensor in self.trace.tensors],
            caps_bytes=self.session.task.baseline_caps_bytes,
            is_declared=self.session.task.keeps_declared_order,
        )

    def candidates(self, command):
        return shortlist(
            command.trace,
            command.network,
            workers=4,
            planner=self.session.task.planner,
            travels=travels_for(self.session.task, command.network, command.compression),
            baseline_lengths=self.baseline_lengths(),
        )


def sent_surely(command):
    """How many bytes a probe sends in any case."""
    sizes = command.sizes_bytes[: command.surely]
    return MESSAGES_PER_PROBE * len(command.ways) * sum(sizes)


def sample(nbytes):
    return MessageSample(
        operation="all-reduce",
        collective="native",
        sizes_bytes=(nbytes,),
        taken_s=STARTUP_S + 1e-6 * nbytes,
    )


def owner(data, task=None):
    task = data.draw(TASKS) if task is None else task
    trace = data.draw(traces(most=5)).with_bytes_per_element(4)
    return Owner(Session(task), trace, data.draw)


def scripted(trace, step_s_of, **task):
    """A session on paper whose steps take what the function of its owner says."""
    driven = Owner(Session(PlanningTask(workers=4, **task)), trace, None)
    driven.draw = lambda strategy: step_s_of(driven) if strategy is times_s else Recorded(trace)
    driven.run()
    return driven
