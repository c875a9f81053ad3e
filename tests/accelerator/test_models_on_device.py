"""Small models learn on the device what they learn on the CPU."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from accelerator import sim
from torch import nn

STEPS = 4

Make = Callable[[], nn.Module]


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.GELU(), nn.Linear(16, 5))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, bias=False),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 12)
        layer = nn.TransformerEncoderLayer(12, 3, 24, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(12, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        words = images.flatten(1)[:, :7].abs().mul(10).long().clamp(max=31)
        return self.head(self.layers(self.words(words)).mean(1))


MODELS: dict[str, Make] = {
    "perceptron": perceptron,
    "convolutions": convolutions,
    "transformer": Transformer,
}
OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "Adam": partial(torch.optim.Adam, lr=0.01),
    "AdamW one by one": partial(torch.optim.AdamW, lr=0.01, foreach=False),
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    sim.set_device(0)
    sim.set_delays(2e-5)
    sim.reset()
    yield
    torch.accelerator.synchronize()
    assert sim.hazards(strict=True) == []


def trained(make: Make, make_optimizer: Callable, device: str) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(0)
    model = make().double().to(device)
    optimizer = make_optimizer(model.parameters())
    batches = torch.Generator().manual_seed(1)
    losses = []
    for step in range(STEPS):
        images = torch.randn(4, 3, 8, 8, generator=batches, dtype=torch.float64).pin_memory()
        labels = torch.randint(5, (4,), generator=batches).pin_memory()
        if step == 1:
            waited = sim.counters().host_waits  # the first step makes the optimizer's state
        optimizer.zero_grad()
        outputs = model(images.to(device, non_blocking=True))
        loss = nn.functional.cross_entropy(outputs, labels.to(device, non_blocking=True))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert sim.counters().host_waits == waited
    return model, [loss.item() for loss in losses]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_training(name: str, optimizer: str) -> None:
    expected, expected_losses = trained(MODELS[name], OPTIMIZERS[optimizer], "cpu")
    found, losses = trained(MODELS[name], OPTIMIZERS[optimizer], "sim")
    assert losses == pytest.approx(expected_losses, rel=1e-9)
    for one, other in zip(found.state_dict().values(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(one.cpu(), other)


def test_channels_last_stays() -> None:
    model = convolutions().to("sim", memory_format=torch.channels_last)
    images = torch.randn(2, 3, 8, 8).to("sim", memory_format=torch.channels_last)
    inner = model[:4](images)
    assert inner.is_contiguous(memory_format=torch.channels_last)
    inner.sum().backward()
    gradient = model[0].weight.grad
    assert gradient.is_contiguous(memory_format=torch.channels_last)


def test_scaled_gradients() -> None:
    model = perceptron().to("sim")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("sim", init_scale=4.0, growth_interval=1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    images = torch.randn(4, 3, 8, 8, device="sim")
    for factor, scale in ((1.0, 8.0), (float("inf"), 4.0)):
        optimizer.zero_grad()
        scaler.scale(model(images).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale
        changed = [
            not torch.equal(one, other)
            for one, other in zip(before, model.parameters(), strict=True)
        ]
        assert all(changed) is (factor == 1.0)
        before = [parameter.detach().clone() for parameter in model.parameters()]


def test_automatic_casts() -> None:
    model = perceptron().to("sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        outputs = model(torch.randn(4, 3, 8, 8, device="sim"))
        assert outputs.dtype == torch.bfloat16
        loss = outputs.softmax(1).sum()
    assert loss.dtype == torch.float32
    loss.backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


def test_clipping_leaves_the_host_free() -> None:
    model = perceptron().to("sim")
    model(torch.randn(4, 3, 8, 8, device="sim")).sum().backward()
    torch.accelerator.synchronize()
    sim.reset()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    assert sim.counters().host_waits == {}
    assert norm.item() > 0.5
    assert nn.utils.get_total_norm([p.grad for p in model.parameters()]).item() <= 0.5001


def test_saving_and_copying() -> None:
    import copy  # noqa: PLC0415
    import io  # noqa: PLC0415

    model = convolutions().to("sim:1")
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, map_location="cpu")
    twin = copy.deepcopy(model)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded[name], value.cpu())
        assert torch.equal(twin.state_dict()[name], value)
    file.seek(0)
    assert torch.load(file)["0.weight"].device == torch.device("sim:1")
