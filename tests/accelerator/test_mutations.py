"""Leave out each wait and each record of memory of ours: the simulated device must notice.

One launch of processes goes through the whole list. A wait that is left out is a hazard whatever
the delays, for the device compares what is known to have happened before what; so a few runs stand
for a hundred, which GRADWEAVE_MUTATION_RUNS=100 makes.
"""

import ast
import os
from collections import Counter
from pathlib import Path

import ranks
import torch
import torch.distributed as dist
from accelerator import sim, trainings
from accelerator.probing import probed
from accelerator.trainings import here, plan_of
from accelerator.worlds import on_devices
from torch import nn

import gradweave
from gradweave import ShardedDataParallel
from gradweave._src import device_order
from gradweave._src.comm import Communicator
from gradweave._src.comm.small_messages import broadcast_bytes
from gradweave._src.comm.worker import CommunicationThread
from gradweave._src.device_order import Order
from gradweave._src.vocabulary import Way

RUNS = int(os.environ.get("GRADWEAVE_MUTATION_RUNS", "2"))
RUN_TAKES_S = 30  # at most, where others use the machine
SOURCES = Path(gradweave.__file__).parent / "_src"


def train_sharded(*lengths, collective="native"):
    def train(group):
        options = {"plan": plan_of(*lengths, collective=collective, passes="both")}
        trainings.sharded(group, options=options, steps=3)

    return train


def train_ring(group):
    """On torch's wrapper, messages of ours."""
    options = {"plan": plan_of(2, 3, collective="ring")}
    trainings.ours(group, options=options, steps=3)


def send_and_drop(group):
    """Memory of a message that nobody keeps is used again at once, by whoever asks."""
    thread = CommunicationThread(Communicator(group))
    for _ in range(4):
        thread.submit("all-reduce", torch.ones(512, device=here(group)), collective="ring")
        torch.zeros(512, device=here(group))
    thread.close()


def run(operation, elements):
    def send(group):
        message = torch.ones(elements, device=here(group))
        stream = torch.Stream(device=here(group))
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            Communicator(group).run(operation, message, collective="native")
        torch.accelerator.current_stream().wait_stream(stream)
        message.add_(1.0)

    return send


def change_plan(group):
    """What optimizers know moves to other buckets."""
    model = trainings.network(here(group))
    wrapped = ShardedDataParallel(model, plan=plan_of(2, 3, passes="both"))
    optimizer = trainings.optimizer_of(wrapped)
    data = trainings.batches(here(group), group.rank(), 2)
    trainings.take_step(wrapped, optimizer, data)
    wrapped.optimizer_state_dict(optimizer)


def send_buffers(group):
    norm = nn.BatchNorm1d(6).to(here(group))
    broadcast_bytes(norm.buffers(), group)


def clip(group):
    model = trainings.network(here(group))
    wrapped = ShardedDataParallel(model, plan=plan_of(2, 3, passes="both"))
    (data,) = trainings.batches(here(group), group.rank(), 1)
    wrapped(data).square().mean().backward()
    wrapped.clip_grad_norm_(1.0)


def probe(group):
    """No memory is shared here; messages must not meet those of the step before all the same."""
    return probed(group, (Way("all-reduce", "native"),))[1]


CASES = {
    Order.LANE_AFTER_WRITER: train_sharded(2, 2, 1),
    Order.MESSAGE_KEPT: send_and_drop,
    Order.ALL_REDUCED: run("all-reduce", 64),
    Order.BROADCAST: run("broadcast", 64),
    Order.REDUCED: run("reduce", 64),
    Order.REDUCE_SCATTERED: run("reduce-scatter", 64),
    Order.PADDED_REDUCE_SCATTERED: run("reduce-scatter", 63),
    Order.ALL_GATHERED: run("all-gather", 64),
    Order.PADDED_ALL_GATHERED: run("all-gather", 63),
    Order.LANE_AFTER_TRANSFERS: train_ring,
    Order.OPTIMIZER_AFTER_GRADIENTS: train_sharded(2, 2, 1),
    Order.MODULE_AFTER_PARAMETERS: train_sharded(2, 2, 1),
    Order.STATE_AFTER_GATHER: change_plan,
    Order.BUFFERS_AFTER_BROADCAST: send_buffers,
    Order.NORM_AFTER_SUM: clip,
    Order.PROBES_AFTER_STEP: probe,
}
# Not of messages but of what compression keeps. Copies that are read too early make selected
# gradients wrong (test_sparse_on_device.py); what is carried over is not left out by any test yet.
OF_COMPRESSION = {Order.HOST_AFTER_COPY: 1, Order.CARRIED_KEPT: 3}


def hazards_of(case, group, seed):
    sim.set_delays(1e-4, seed=1000 * seed + group.rank())
    sim.reset()
    early = case(group) or []
    torch.accelerator.synchronize()
    found = [*early, *sim.hazards(strict=True)]
    sim.reset()
    return found


def noticed(group, runs):
    """By order: how many hazards there are with it, and in how many runs there are without."""
    found = {}
    do = device_order.carry_out
    for order, case in CASES.items():
        kept = sum(len(hazards_of(case, group, seed)) for seed in range(runs))
        device_order.carry_out = lambda one, act, left_out=order: (
            None if one is left_out else do(one, act)
        )
        try:
            seen = [bool(hazards_of(case, group, seed)) for seed in range(runs)]
        finally:
            device_order.carry_out = do
        everyone = torch.tensor(seen, dtype=torch.int64)
        dist.all_reduce(everyone, dist.ReduceOp.MAX, group)  # some are seen on one rank only
        found[order.name] = kept, int(everyone.sum())
    return found


def test_whatever_is_left_out_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "MOST_S", ranks.MOST_S + RUN_TAKES_S * RUNS)
    for found in on_devices(2, noticed, RUNS, scratch=tmp_path):
        assert found == {order.name: (0, RUNS) for order in CASES}


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
    places = dict.fromkeys(CASES, 1) | OF_COMPRESSION
    assert Counter(used) == {order.name: count for order, count in places.items()}
    assert set(places) == set(Order)


ELSEWHERE = {"wait_stream", "wait_event", "record_stream"}


def test_nothing_is_ordered_elsewhere():
    for file in SOURCES.rglob("*.py"):
        if file.name == "device_order.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                assert node.attr not in ELSEWHERE, (file, node.lineno)
