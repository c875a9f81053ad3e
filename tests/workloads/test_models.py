"""The published sizes, and that all of them learn."""

from functools import partial
from importlib.resources import files as package_files

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad

from gradweave._src.workloads.datasets import Batches, fashion_mnist_subset, load_text
from gradweave._src.workloads.models import (
    MODELS,
    CharLSTM,
    CharTransformer,
    SmallCNN,
    resnet20,
    vgg16,
)


@pytest.fixture(autouse=True)
def one_thread_and_seed():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


IMAGE = (1, 3, 32, 32)
SIZES = {  # parameters and one input
    "small-cnn": (206_922, (1, 1, 28, 28)),
    "resnet20": (269_722, IMAGE),  # He et al.: 0.27 M
    "resnet20-grey": (269_434, (1, 1, 28, 28)),
    "vgg16": (14_728_266, IMAGE),  # the gTop-k paper: 14.7 M
    "char-lstm": (280_897, None),
    "char-transformer": (2_706_624, None),
}


@pytest.mark.parametrize("name", MODELS)
def test_sizes(name):
    """The first model without storage makes torch import for a second."""
    expected, shape = SIZES[name]
    with torch.device("meta"):
        model = MODELS[name]().eval()
        inputs = torch.zeros(2, 7, dtype=torch.int64) if shape is None else torch.zeros(shape)
        scores = model(inputs)
    assert parameters(model) == expected
    assert scores.shape == ((2, 65, 7) if shape is None else (1, 10))


def test_options():
    with torch.device("meta"):
        assert resnet20(1, 7)(torch.zeros(2, 1, 28, 28)).shape == (2, 7)
        assert vgg16(1, 7, width=4)(torch.zeros(2, 1, 32, 32)).shape == (2, 7)
        assert SmallCNN(3, 7, width=4)(torch.zeros(2, 3, 28, 28)).shape == (2, 7)
        assert CharLSTM(9, width=4)(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 9, 5)
        codes = torch.zeros(2, 5, dtype=torch.int64)
        assert CharTransformer(9, width=8, layers=1, heads=2)(codes).shape == (2, 9, 5)
        assert parameters(vgg16(width=8)) < 14_728_266 / 50


def batch_norms(model):
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


def test_normalization_is_an_option():
    assert len(batch_norms(resnet20())) == 19
    assert batch_norms(resnet20(normalization=False)) == []


def test_without_normalization_images_do_not_influence_each_other():
    """So the gradient of a joined batch is the mean of the workers' gradients."""
    model = resnet20(1, width=4, normalization=False).double()
    images = fashion_mnist_subset(train=True).take(torch.arange(8))

    def gradient(part):
        model.zero_grad()
        batch = images.take(part)
        cross_entropy(model(batch.normalised().double()), batch.labels).backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    halves = [gradient(part) for part in torch.arange(8).split(4)]
    torch.testing.assert_close(gradient(torch.arange(8)), sum(halves) / 2)


def test_without_normalization_scores_begin_of_normal_size():
    """Nine plain blocks would multiply the deviation by about 2^4.5."""
    images = fashion_mnist_subset(train=True).take(torch.arange(16)).normalised()
    with torch.no_grad():
        assert resnet20(1, normalization=False)(images).std() < 3


def shrinkage(model, inputs, targets, *, learning_rate):
    """The loss over the examples' twelfth pass as a part of that over their first."""
    batches = Batches(examples=len(inputs), batch_size=len(inputs) // 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    losses = []
    for step in range(12 * batches.steps_per_epoch):
        chosen = batches.indices(step)
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs[chosen]), targets[chosen])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-2:]) / sum(losses[:2])


def halved(pixels):
    return pixels[:, :, ::2, ::2]  # enough to learn from, and four times as fast


def enlarged(pixels):
    return pad(pixels, [2, 2, 2, 2])  # to 32 x 32


@pytest.mark.parametrize(
    ("build", "resized"),
    [
        (SmallCNN, torch.clone),
        (lambda: resnet20(1, width=8), halved),
        (lambda: resnet20(1, width=8, normalization=False), halved),
        (lambda: vgg16(1, width=4), enlarged),
    ],
    ids=["small-cnn", "resnet20", "resnet20-plain", "vgg16"],
)
def test_images_are_learnt(build, resized):
    images = fashion_mnist_subset(train=True).take(torch.arange(64))
    inputs = resized(images.normalised())
    assert shrinkage(build(), inputs, images.labels, learning_rate=0.002) < 0.8


@pytest.mark.parametrize(
    ("build", "learning_rate"),
    [
        (partial(CharLSTM, width=32), 0.02),
        (partial(CharTransformer, width=32, layers=2, heads=4, window=20), 0.01),
    ],
    ids=["char-lstm", "char-transformer"],
)
def test_text_is_learnt(build, learning_rate):
    text = load_text(package_files("gradweave._src.workloads") / "data" / "LICENSE-fashion-mnist")
    model = build(len(text.vocabulary))
    assert shrinkage(model, *text.windows(20), learning_rate=learning_rate) < 0.8


def test_a_transformer_does_not_look_ahead():
    model = CharTransformer(9, width=16, layers=2, heads=2).eval()
    codes = torch.randint(9, (3, 12))
    changed = codes.clone()
    changed[:, 7:] = (codes[:, 7:] + 1) % 9
    with torch.no_grad():
        before, after = model(codes), model(changed)
    assert torch.equal(before[:, :, :7], after[:, :, :7])
    assert not torch.equal(before[:, :, 7:], after[:, :, 7:])
