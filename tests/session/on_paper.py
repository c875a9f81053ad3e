"""A session on paper: whoever owns it carries out its commands without processes or torch."""

from itertools import count

from hypothesis import strategies as st
from strategies import traces

from gradweave import Tensor, Trace
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
from gradweave._src.session.trials import HOPELESS_AFTER_STEPS
from gradweave._src.travel import Travel

# So dear that merging small tensors gains a good part of a step of a second.
STARTUP_S = 0.2
# What a collective's start-up is beside the backend's own; of others, twice as much.
STARTUPS = {"native": 1.0, "ring": 0.5}
MOST_SCRIPTED = 100  # commands of a session that ends by itself
MOST_TIMED = 3  # steps of a visit; more are as good as these
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
        self.probed_s = 0.0
        self.probing_share = 1.0  # of what messages beside the training may take
        self.startup_s = STARTUP_S
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
                is_cut = len(reply.steps_s) < min(MOST_TIMED, command.steps)
                timed = len(reply.steps_s) if is_cut else command.steps
                self.steps += command.settling_steps + timed
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
                allowed_bytes = int(self.probing_share * command.within_bytes)
                sent_bytes = max(allowed_bytes, sent_surely(command))
                taken_s = self.probing_share * command.within_s
                self.probed_bytes += sent_bytes
                self.probed_s += taken_s
                return Probed(
                    tuple(
                        self.sample(size, way.collective, operation=way.operation)
                        for size in command.sizes_bytes
                        for way in command.ways
                    ),
                    taken_s=taken_s,
                    sent_bytes=sent_bytes,
                )
            case FindCandidates():
                return Candidates(tuple(self.candidates(command)))
            case TimeSteps():
                taken_s = self.steps_s(command)
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

    def steps_s(self, command):
        """What steps take; no more than are needed of those that are hopeless."""
        taken_s = []
        for _ in range(min(MOST_TIMED, command.steps)):
            taken_s.append(self.draw(times_s))
            is_hopeless = command.hopeless_s is not None and min(taken_s) > command.hopeless_s
            if is_hopeless and len(taken_s) == HOPELESS_AFTER_STEPS:
                break
        return tuple(taken_s)

    def samples(self):
        """Of messages on the network, one by one."""
        if not self.notes_messages:
            return ()
        sizes = iter([tensor.nbytes for tensor in self.trace.tensors])
        return tuple(
            self.sample(sum(next(sizes) for _ in range(length)), way)
            for length, way in zip(self.sent, self.ways, strict=True)
        )

    @property
    def ways(self):
        """How each bucket travels that is sent now."""
        if self.installed is SimpleBuckets.ORIGINAL:
            return [self.session.task.collective] * len(self.sent)
        buckets = self.installed.buckets
        return [str(Travel(bucket.collective, bucket.compression)) for bucket in buckets]

    def sample(self, nbytes, collective, operation="all-reduce"):
        return MessageSample(
            operation=operation,
            collective=collective,
            sizes_bytes=(nbytes,),
            taken_s=self.startup_s * STARTUPS.get(collective, 2.0) + 1e-6 * nbytes,
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
    sizes = command.sizes_bytes[: command.required_sizes]
    return MESSAGES_PER_PROBE * len(command.ways) * sum(sizes)


def owner(data, task=None):
    task = data.draw(TASKS) if task is None else task
    trace = data.draw(traces(most=5)).with_bytes_per_element(4)
    return Owner(Session(task), trace, data.draw)


def scripted(trace, step_s_of, *, change=lambda _: None, **task):
    """A session on paper whose steps take what the function of its owner says.

    ``change`` may change the owner before it begins.
    """
    driven = Owner(Session(PlanningTask(workers=4, **task)), trace, None)
    driven.draw = lambda strategy: step_s_of(driven) if strategy is times_s else Recorded(trace)
    change(driven)
    driven.run(stop_after=MOST_SCRIPTED)
    assert len(driven.commands) < MOST_SCRIPTED
    return driven


def equal_tensors(tensors, nbytes, *, apart_s=0.1):
    """Of a model; each is ready ``apart_s`` after the one before."""
    return Trace(
        name="equal",
        origin="measured",
        source="made up",
        batch_size=1,
        tensors=tuple(
            Tensor(
                name=f"t{number}",
                elements=nbytes // 4,
                bytes_per_element=4,
                ready_s=apart_s * (number + 1),
                forward_s=0.01,
            )
            for number in range(tensors)
        ),
    )
