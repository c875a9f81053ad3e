"""Operators give on the device what they give on the CPU, and let the host go on as on CUDA."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerator import sim
from torch.nn import functional as F  # noqa: N812 as everybody calls it

X = torch.arange(24, dtype=torch.float32).reshape(4, 6).sub(11.5).div(7)
Y = X.flip(0).contiguous()
IMAGES = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
FILTERS = torch.linspace(-1, 1, 4 * 3 * 3 * 3).reshape(4, 3, 3, 3)
TARGETS = torch.tensor([0, 5, 2, 3])
NUMBERS = torch.tensor([3, 1, 2, 1])
SIGNS = X > 0

# Each with its arguments; all of them leave the host free.
FREE: dict[str, tuple[Callable[..., Any], ...]] = {
    name: case if isinstance(case, tuple) else (case,)
    for name, case in {
        "arithmetic": (lambda x, y: (-x + y * 2 - x / 3).abs().sqrt() ** 1.5, X, Y),
        "in place": (lambda x, y: x.clone().add_(y, alpha=2).mul_(y).sub_(1).div_(2).neg_(), X, Y),
        "addcmul": (lambda x, y: torch.addcmul(x, y, y, value=0.5).addcdiv(x, y.abs() + 1), X, Y),
        "lerp": (lambda x, y: x.lerp(y, 0.3).clamp(-1, 1), X, Y),
        "where": (lambda x, y: torch.where(x > y, x, y).maximum(y * 2), X, Y),
        "comparison": (lambda x, y: (x == y) | (x < y) & (x >= 0), X, Y),
        "out=": (lambda x, y: torch.add(x, y, out=torch.empty(0, device=x.device)), X, Y),
        "reductions": (lambda x: torch.stack([x.sum(), x.mean(), x.norm(), x.amax(), x.std()]), X),
        "reduction of a dimension": (lambda x: [x.sum(1), x.amax(0), x.argmax(1), *x.max(1)], X),
        "norms": (lambda x: [torch.linalg.vector_norm(x), x.norm(dim=1), x.norm(float("inf"))], X),
        "truth": (lambda x: [x.isfinite().all(), (x > 1).any(), x.isnan()], X),
        "joining": (lambda x, y: [torch.cat([x, y]), torch.stack([x, y], 1)], X, Y),
        "index_select": (lambda x, n: x.index_select(0, n), X, NUMBERS),
        "gather": (lambda x, n: x.gather(0, n[:, None].expand(4, 6)), X, NUMBERS),
        "scatter": (lambda x, n: x.scatter_add(1, n[:, None], x[:, :1]), X, NUMBERS),
        "indexing": (lambda x, n: [x[n], x[:, 2], x[1:3, ::2], x[n, n]], X, NUMBERS),
        "index_put": (lambda x, n: x.clone().index_put_((n[:2], n[2:]), x[0, 0]), X, NUMBERS),
        "index_add": (lambda x, n: x.clone().index_add_(0, n, x), X, NUMBERS),
        "masked_fill": (lambda x, m: x.masked_fill(m, 0.5), X, SIGNS),
        "topk": (lambda x: [*x.topk(3), *x.sort(1), *x.kthvalue(2)], X),
        "cumsum": (lambda x: [x.cumsum(0), x.flip(1).cumsum(1), x.diff()], X),
        "histc": (lambda x: x.histc(5), X),
        "searchsorted": (lambda x: torch.searchsorted(x[0].contiguous(), x), X),
        "shapes": (lambda x: [x.t().contiguous(), x.reshape(3, 8), x.view(2, 12), x.roll(1)], X),
        "unfold": (lambda x: x.unfold(1, 3, 2) * 2, X),
        "types": (lambda x: [x.double(), x.to(torch.bfloat16), x.long(), x > 0], X),
        "complex": (lambda x: torch.view_as_real(torch.fft.rfft(x)), X),
        "making": (lambda x: [x.new_zeros(3), torch.full_like(x, 2), torch.ones_like(x)], X),
        "ranges": (lambda x: torch.arange(7, device=x.device) * 2, X),
        "eye": (lambda x: torch.eye(4, device=x.device).tril(), X),
        "matrices": (lambda x, y: [x @ y.t(), torch.bmm(x[None], y.t()[None])], X, Y),
        "addmm": (lambda x, y: [torch.addmm(x[:, :4], x, y.t()), x[0] @ y[0], x @ y[0]], X, Y),
        "linear": (lambda x, y: F.linear(x, y, x[:, 0]), X, Y),
        "einsum": (lambda x, y: torch.einsum("ij,kj->ik", x, y), X, Y),
        "activations": (lambda x: [F.relu(x), F.gelu(x), F.silu(x), x.tanh(), x.sigmoid()], X),
        "softmax": (lambda x: [x.softmax(1), x.log_softmax(0)], X),
        "cross entropy": (F.cross_entropy, X, TARGETS),
        "nll_loss": (F.nll_loss, X, TARGETS),
        "mse_loss": (lambda x, y: [F.mse_loss(x, y), F.smooth_l1_loss(x, y)], X, Y),
        "bce": (lambda x, m: F.binary_cross_entropy_with_logits(x, m.float()), X, SIGNS),
        "embedding": (lambda x, n: F.embedding(n, x), X, NUMBERS),
        "layer_norm": (lambda x: F.layer_norm(x, (6,)), X),
        "group_norm": (lambda x: F.group_norm(x, 3), IMAGES),
        "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), IMAGES),
        "conv2d": (lambda x, w: F.conv2d(x, w, stride=2, padding=1), IMAGES, FILTERS),
        "conv1d": (lambda x, w: F.conv1d(x[:, :, 0], w[:, :, 0]), IMAGES, FILTERS),
        "conv_transpose": (lambda x, w: F.conv_transpose2d(x, w.transpose(0, 1)), IMAGES, FILTERS),
        "pooling": (lambda x: [F.max_pool2d(x, 2), F.avg_pool2d(x, 2)], IMAGES),
        "adaptive pooling": (lambda x: [F.adaptive_avg_pool2d(x, k) for k in (1, 3)], IMAGES),
        "interpolate": (lambda x: F.interpolate(x, scale_factor=2), IMAGES),
        "padding": (lambda x: [F.pad(x, (1, 2)), F.pad(x, (1, 1, 1, 1), mode="reflect")], IMAGES),
        "channels last": (
            lambda x, w: F.relu(F.conv2d(x.to(memory_format=torch.channels_last), w)),
            IMAGES,
            FILTERS,
        ),
        "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), IMAGES),
        "foreach": (lambda x, y: torch._foreach_add([x, y], [y, x], alpha=2), X, Y),
        "foreach norms": (lambda x, y: torch._foreach_norm([x, y]), X, Y),
    }.items()
}
# What these return depends on the data, so the host waits once.
WAITING = {
    "nonzero": (lambda x: x.nonzero(), SIGNS),
    "masked_select": (lambda x: x.masked_select(x > 0), X),
    "mask": (lambda x: x[x > 0], X),
    "unique": (lambda x: x.unique(), NUMBERS),
    "bincount": (lambda x: x.bincount(), NUMBERS),
    "item": (lambda x: torch.tensor(x.sum().item()), X),
    "equal": (lambda x: torch.tensor(torch.equal(x, x)), X),
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    sim.set_device(0)
    sim.set_delays(2e-5)
    sim.reset()
    yield
    torch.accelerator.synchronize()
    assert sim.hazards() == []


def flattened(results: Any) -> list[torch.Tensor]:
    return list(results) if isinstance(results, (list, tuple)) else [results]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one.cpu(), other)


@pytest.mark.parametrize("name", FREE)
def test_the_host_is_left_free(name: str) -> None:
    function, *arguments = FREE[name]
    on_device = [argument.to("sim") for argument in arguments]
    sim.reset()
    found = flattened(function(*on_device))
    waits = sim.counters().host_waits
    assert_same(found, flattened(function(*arguments)))
    assert not waits


@pytest.mark.parametrize("name", WAITING)
def test_the_host_waits_once(name: str) -> None:
    function, *arguments = WAITING[name]
    on_device = [argument.to("sim") for argument in arguments]
    sim.reset()
    found = flattened(function(*on_device))
    waits = sim.counters().host_wait_count
    assert_same(found, flattened(function(*arguments)))
    assert waits == 1


DIFFERENTIABLE = [
    "arithmetic", "lerp", "where", "reductions", "norms", "joining", "index_select", "gather",
    "scatter", "indexing", "masked_fill", "cumsum", "shapes", "matrices", "addmm", "linear",
    "activations", "softmax", "cross entropy", "nll_loss", "mse_loss", "bce", "embedding",
    "layer_norm", "group_norm", "batch_norm", "conv2d", "conv1d", "conv_transpose", "pooling",
    "adaptive pooling", "interpolate", "padding", "channels last", "attention",
]  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients(name: str) -> None:
    function, *arguments = FREE[name]
    gradients = []
    for device in ("cpu", "sim"):
        inputs = [argument.clone().to(device) for argument in arguments]
        wanted = [each.requires_grad_() for each in inputs if each.is_floating_point()]
        sim.reset()
        results = [each for each in flattened(function(*inputs)) if each.requires_grad]
        sum(each.double().square().sum() for each in results).backward()
        waits = sim.counters().host_waits
        gradients.append([each.grad for each in wanted])
        assert not waits
    found, expected = gradients[1], gradients[0]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other)
