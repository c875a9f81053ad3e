"""The three BSP loops train as one worker does on everybody's batch."""

import inspect
from functools import cache

import pytest
import torch
from ranks import on_threads, seeded
from torch.nn.functional import cross_entropy

from gradweave._src.errors import RequestError
from gradweave._src.runtime.bsp import LOOPS
from gradweave._src.workloads.datasets import Batches, fashion_mnist_subset
from gradweave._src.workloads.models import SmallCNN

STEPS, BATCH = 12, 3
COLLECTIVES = ("linear-pipeline", "mst", "exchange", "native")


@cache
def shipped_images():
    return fashion_mnist_subset(train=True)


def cnn():
    return seeded(lambda: SmallCNN(width=2).double())


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model, images, indices):
    batch = images.take(indices)
    return cross_entropy(model(batch.normalised().double()), batch.labels)


def trained(group, twin, name, collective, options):
    images = shipped_images()
    order = Batches(examples=len(images), batch_size=BATCH, world=group.size(), rank=group.rank())
    model = cnn()
    if name == "bsp-overlap":
        options = {"make_group": lambda: twin, **options}
    loop = LOOPS[name](model, sgd(model), collective=collective, group=group, **options)
    for step in range(STEPS):
        loop.step(lambda step=step: loss_of(model, images, order.indices(step)))
    loop.close()
    assert not any(module._forward_pre_hooks for module in model.modules())
    return model.state_dict()


@cache
def alone(world):
    images = shipped_images()
    orders = [
        Batches(examples=len(images), batch_size=BATCH, world=world, rank=rank)
        for rank in range(world)
    ]
    model = cnn()
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, images, torch.cat([order.indices(step) for order in orders])).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(
    ("collective", "world"),
    [
        *((name, 3) for name in COLLECTIVES),
        ("mst", 1),
        pytest.param("mst", 2, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("name", LOOPS)
def test_as_one_worker(name, collective, world):
    expected = alone(world)
    for state in on_threads(world, trained, name, collective, {}, groups=2):
        for key, value in expected.items():
            torch.testing.assert_close(state[key], value, rtol=1e-9, atol=1e-12)


def drifting(group, twin, every):
    """Rank 1's weights are nudged, as roundings would do on another device."""
    del twin
    model = cnn()
    loop = LOOPS["bsp-allreduce"](model, sgd(model), group=group, broadcast_every=every)
    images = shipped_images()
    for step in range(4):
        loop.step(lambda step=step: loss_of(model, images, torch.tensor([step])))
        if step == 0 and group.rank() == 1:
            with torch.no_grad():
                model.head.bias.add_(1e-6)
    loop.close()
    return model.state_dict()


@pytest.mark.parametrize(("every", "same"), [(0, False), (2, True), (5, False)])
def test_weights_are_made_equal_now_and_then(every, same):
    first, second = on_threads(2, drifting, every, groups=2)
    assert all(torch.equal(first[name], value) for name, value in second.items()) == same


@pytest.mark.parametrize("name", LOOPS)
def test_every_option_can_be_looked_up(name):
    found = inspect.signature(LOOPS[name]).parameters
    assert list(found)[:4] == ["model", "optimizer", "collective", "group"]
    assert {one.kind for one in found.values()} <= {
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    }


def test_what_it_refuses():
    def complain(group):
        with pytest.raises(RequestError, match="negative"):
            LOOPS["bsp-allreduce"](cnn(), None, group=group, broadcast_every=-1)
        with pytest.raises(RequestError, match="no parameter"):
            LOOPS["bsp-overlap"](torch.nn.ReLU(), None, group=group)

    on_threads(1, complain)
