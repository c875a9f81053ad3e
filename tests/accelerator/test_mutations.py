"""Leave out each wait and each record of memory of ours: the simulated device must notice.

One launch of processes goes through the whole list. What a case needs is made once, and then used
in many runs, each with delays of its own. A wait that is left out is a hazard whatever the delays,
for the device compares what is known to have happened before what; so a few runs stand for a
hundred, which GRADWEAVE_MUTATION_RUNS=100 makes.
"""

import ast
import os
from collections import Counter
from pathlib import Path

import ranks
import torch
import torch.distributed as dist
from accelerator import sim, trainings
from accelerator.probing import QUEUED, Prober
from accelerator.trainings import here, plan_of
from accelerator.worlds import on_devices
from torch import nn

import gradweave
from gradweave import DistributedDataParallel, ShardedDataParallel
from gradweave._src import device_order
from gradweave._src.comm.communicator import Communicator
from gradweave._src.comm.own_group import OwnGroup
from gradweave._src.comm.small_messages import broadcast_bytes
from gradweave._src.comm.staging import HostCopy
from gradweave._src.comm.worker import CommunicationThread
from gradweave._src.device_order import Order
from gradweave._src.runtime.reducer.carried_errors import CarriedErrors
from gradweave._src.runtime.reducer.transports import DenseTransport
from gradweave._src.sparse.residual import Carried
from gradweave._src.vocabulary import Way

RUNS = int(os.environ.get("GRADWEAVE_MUTATION_RUNS", "5"))
RUN_TAKES_S = 10  # at most, of all cases, where others use the machine
LEAST_NOTICED = 0.99
SOURCES = Path(gradweave.__file__).parent / "_src"

# Each case is made on every rank of a group, and returns a run of it. Some runs return what went
# wrong where the device cannot see it.


def train_sharded(group):
    """Two steps: parameters arrive in the second."""
    options = {"plan": plan_of(2, 2, 1, passes="both")}
    return training(group, ShardedDataParallel(trainings.network(here(group)), **options))


def train_ring(group):
    """On torch's wrapper, messages of ours."""
    options = {"plan": plan_of(2, 3, collective="ring")}
    return training(group, DistributedDataParallel(trainings.network(here(group)), **options))


def training(group, wrapped):
    optimizer = trainings.optimizer_of(wrapped)
    data = trainings.batches(here(group), group.rank(), 2)

    def two_steps():
        for one in data:
            trainings.take_step(wrapped, optimizer, [one])

    return two_steps


def send_and_drop(group):
    """Memory of a message that nobody keeps is used again at once, by whoever asks."""
    thread = CommunicationThread(Communicator(group))

    def send():
        for _ in range(2):
            thread.submit("all-reduce", torch.ones(512, device=here(group)), collective="ring")
            torch.zeros(512, device=here(group))

    return send


def sent_by(operation, elements):
    def case(group):
        communicator = Communicator(group)

        def send():
            message = torch.ones(elements, device=here(group))
            stream = torch.Stream(device=here(group))
            stream.wait_stream(torch.accelerator.current_stream())
            with stream:
                communicator.run(operation, message, collective="native")
            torch.accelerator.current_stream().wait_stream(stream)
            message.add_(1.0)

        return send

    return case


def change_plan(group):
    """What optimizers know moves to other buckets."""
    model = trainings.network(here(group))
    wrapped = ShardedDataParallel(model, plan=plan_of(2, 3, passes="both"))
    optimizer = trainings.optimizer_of(wrapped)
    data = trainings.batches(here(group), group.rank(), 1)

    def move():
        trainings.take_step(wrapped, optimizer, data)
        wrapped.optimizer_state_dict(optimizer)

    return move


def send_buffers(group):
    norm = nn.BatchNorm1d(6).to(here(group))
    return lambda: broadcast_bytes(norm.buffers(), group)


def clip(group):
    model = trainings.network(here(group))
    wrapped = ShardedDataParallel(model, plan=plan_of(2, 3, passes="both"))
    optimizer = trainings.optimizer_of(wrapped)
    (data,) = trainings.batches(here(group), group.rank(), 1)

    def clipped():
        optimizer.zero_grad()
        wrapped(data).square().mean().backward()
        wrapped.clip_grad_norm_(1.0)
        optimizer.step()

    return clipped


def probe(group):
    """No memory is shared here; messages must not meet those of the step before all the same."""
    prober = Prober(group)
    return lambda: prober.probe((Way("all-reduce", "native"),), within_bytes=0)[1]


def read_copy(group):
    """What the host reads is not seen by the device, but it is poison where it comes too early."""

    def read():
        ones = torch.ones(64, device=here(group))
        for _ in range(QUEUED):
            torch.zeros(1, device=here(group))
        found = HostCopy(ones).read()
        return [] if torch.equal(found, torch.ones(64)) else [f"the host has read {found}"]

    return read


def lay_out_loaded(group):
    """A checkpoint's residuals are made for each parameter, on the stream that trains.

    Buckets of several copy them, while the backward pass asks for more memory.
    """
    lane, parameters, load = loaded_residuals(group)

    def train():
        carried = load()
        with lane:
            carried.begin(list(parameters))
        torch.zeros(64, device=here(group))
        torch.accelerator.current_stream().wait_stream(lane)

    return train


def discard_loaded(group):
    """Buckets of one use what was loaded as it is; the next step discards it, and has others."""
    lane, parameters, load = loaded_residuals(group)

    def train():
        carried = load()
        with lane:
            for name in parameters:
                flat = carried.begin([name])
                flat.pending.copy_(flat.kept)
        torch.accelerator.current_stream().wait_stream(lane)
        with lane:
            carried.commit(discarded=set(parameters))
            carried.begin(list(parameters))
        torch.zeros(64, device=here(group))
        torch.accelerator.current_stream().wait_stream(lane)

    return train


def loaded_residuals(group):
    """A stream that sends, parameters, and what loads their residuals before it does."""
    parameters = {name: torch.zeros(64, device=here(group)) for name in ("weight", "bias")}
    state = Carried(parameters).state_dict()
    lane = torch.Stream(device=here(group))

    def load():
        carried = Carried(parameters)
        carried.load_state_dict(state)
        lane.wait_stream(torch.accelerator.current_stream())
        return carried

    return lane, parameters, load


def give_up_rounding(group):
    """Somebody drops the wrapper in the middle of a step, and goes on with something else."""
    own = OwnGroup(group, None)
    weight = nn.Parameter(torch.zeros(64, device=here(group)))

    def give_up():
        transport = DenseTransport(
            group,
            ways=(),
            named="ring+int8",
            own_group=own,
            carried=CarriedErrors(),
            names={weight: "weight"},
        )
        gradient = torch.ones(64, device=here(group))
        done = transport.average(gradient, [weight], bucket=0, before=lambda: None)
        del transport
        torch.zeros(64, device=here(group))
        done.wait()

    return give_up


CASES = {
    Order.LANE_AFTER_WRITER: train_sharded,
    Order.MESSAGE_KEPT: send_and_drop,
    Order.ALL_REDUCED: sent_by("all-reduce", 64),
    Order.BROADCAST: sent_by("broadcast", 64),
    Order.REDUCED: sent_by("reduce", 64),
    Order.REDUCE_SCATTERED: sent_by("reduce-scatter", 64),
    Order.PADDED_REDUCE_SCATTERED: sent_by("reduce-scatter", 63),
    Order.ALL_GATHERED: sent_by("all-gather", 64),
    Order.PADDED_ALL_GATHERED: sent_by("all-gather", 63),
    Order.LANE_AFTER_TRANSFERS: train_ring,
    Order.OPTIMIZER_AFTER_GRADIENTS: train_sharded,
    Order.MODULE_AFTER_PARAMETERS: train_sharded,
    Order.STATE_AFTER_GATHER: change_plan,
    Order.BUFFERS_AFTER_BROADCAST: send_buffers,
    Order.NORM_AFTER_SUM: clip,
    Order.PROBES_AFTER_STEP: probe,
    Order.HOST_AFTER_COPY: read_copy,
    Order.RESIDUALS_KEPT: discard_loaded,
    Order.OLD_RESIDUALS_KEPT: lay_out_loaded,
    Order.ERRORS_KEPT: give_up_rounding,
}


def hazards_of(run, group, seed):
    sim.set_delays(1e-4, seed=1000 * seed + group.rank())
    early = run() or []
    torch.accelerator.synchronize()
    found = [*early, *sim.hazards(strict=True)]
    sim.reset()
    return found


def noticed(group, runs):
    """By order: the hazards there are with it, and in how many runs there are some without."""
    found = {}
    do = device_order.carry_out
    for order, case in CASES.items():
        run = case(group)
        kept = [hazard for seed in range(runs) for hazard in hazards_of(run, group, seed)]
        device_order.carry_out = lambda one, act, left_out=order: (
            None if one is left_out else do(one, act)
        )
        try:
            seen = [bool(hazards_of(run, group, seed)) for seed in range(runs)]
        finally:
            device_order.carry_out = do
        everyone = torch.tensor(seen, dtype=torch.int64)
        dist.all_reduce(everyone, dist.ReduceOp.MAX, group)  # some are seen on one rank only
        found[order.name] = kept, int(everyone.sum())
    return found


def test_whatever_is_left_out_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "MOST_S", ranks.MOST_S + RUN_TAKES_S * RUNS)
    for found in on_devices(2, noticed, RUNS, scratch=tmp_path):
        counts = {name: count for name, (_, count) in found.items()}
        print(f"noticed in so many of {RUNS} runs: {counts}")  # noqa: T201 with -s, for the docs
        assert {name: kept for name, (kept, _) in found.items() if kept} == {}
        assert set(found) == {order.name for order in CASES}
        assert min(counts.values()) >= LEAST_NOTICED * RUNS, counts


def names_of_orders(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "Order":
            yield node.attr


def test_the_list_has_all_orders_and_each_is_of_one_place():
    used = [
        name
        for file in SOURCES.rglob("*.py")
        if file.name != "device_order.py"
        for name in names_of_orders(ast.parse(file.read_text()))
    ]
    assert Counter(used) == {order.name: 1 for order in CASES}
    assert set(CASES) == set(Order)


ELSEWHERE = {"wait_stream", "wait_event", "record_stream"}


def test_nothing_is_ordered_elsewhere():
    for file in SOURCES.rglob("*.py"):
        if file.name == "device_order.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                assert node.attr not in ELSEWHERE, (file, node.lineno)
