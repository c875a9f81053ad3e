"""What users train: models of all kinds."""

import collections
import dataclasses
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def network(width=12, layers=3, *, inputs=6, outputs=2, seed=0):
    torch.manual_seed(seed)
    parts = [nn.Linear(inputs, width), nn.Tanh()]
    for _ in range(layers - 2):
        parts += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*parts, nn.Linear(width, outputs)).double()


def batch(step, rank, shape=(4, 6)):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def sgd(wrapped, **options):
    return torch.optim.SGD(wrapped.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})


def train(wrap, rank, wrapped, optimizer=None, *, shape=(4, 6)):
    """The plainest loop there is, to the end."""
    optimizer = optimizer or sgd(wrapped)
    for step in wrap.steps():
        take_step(wrapped, optimizer, batch(step, rank, shape))
    return {"model": wrapped}


def take_step(wrapped, optimizer, *inputs):
    optimizer.zero_grad()
    wrapped(*inputs).square().mean().backward()
    optimizer.step()


def plain_model(wrap, rank):
    return train(wrap, rank, wrap(network()))


def deep_model(wrap, rank):
    return train(wrap, rank, wrap(network(16, 12)))


def single_number(wrap, rank):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

        def forward(self, value):
            return value * self.scale

    return train(wrap, rank, wrap(Scaled()))


class WithEmptyParameters(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(0, dtype=torch.float64))
        self.network = network()
        self.middle = nn.Parameter(torch.zeros(3, 0, dtype=torch.float64))
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.last = nn.Parameter(torch.zeros(0, dtype=torch.float64))

    def forward(self, value):
        nothing = self.first.sum() + self.middle.sum() + self.last.sum()
        return self.network(value) * self.scale + nothing


def parameters_without_elements(wrap, rank):
    return train(wrap, rank, wrap(WithEmptyParameters()))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 6).double()
        self.hidden = network(outputs=6)
        self.decoder = nn.Linear(6, 20, bias=False).double()
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens):
        return self.decoder(self.hidden(self.embedding(tokens)))


def tied_weights(wrap, rank):
    wrapped = wrap(Tied())
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    for step in wrap.steps():
        generator = torch.Generator().manual_seed(10 * step + rank)
        tokens = torch.randint(0, 20, (4, 5), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
    return {"model": wrapped}


class Repeated(nn.Module):
    """The same layer, applied again and again."""

    def __init__(self):
        super().__init__()
        self.into, self.again, self.out = network(outputs=12), nn.Linear(12, 12), nn.Linear(12, 2)
        self.double()

    def forward(self, value):
        value = self.into(value)
        for _ in range(3):
            value = torch.tanh(self.again(value))
        return self.out(value)


def layer_used_again(wrap, rank):
    return train(wrap, rank, wrap(Repeated()))


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.into = nn.Parameter(torch.randn(6, 9, dtype=torch.complex128) * 0.2)
        self.out = nn.Parameter(torch.randn(9, 2, dtype=torch.complex128) * 0.2)

    def forward(self, value):
        return ((value.to(torch.complex128) @ self.into).tanh() @ self.out).abs()


def complex_weights(wrap, rank):
    return train(wrap, rank, wrap(Complex()))


class OfTwoTypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = network(outputs=6), network(seed=1).float()

    def forward(self, value):
        return self.narrow(self.wide(value).float()).double()


def weights_of_two_types(wrap, rank):
    return train(wrap, rank, wrap(OfTwoTypes()))


def sparse_embedding(wrap, rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 6, sparse=True).double(), network())
    wrapped = wrap(model)
    optimizer = sgd(wrapped, momentum=0.0)
    for step in wrap.steps():
        generator = torch.Generator().manual_seed(10 * step + rank)
        take_step(wrapped, optimizer, torch.randint(0, 20, (4,), generator=generator))
    return {"model": wrapped}


class WithAdapters(nn.Module):
    """A frozen model with small trained ones beside its layers."""

    def __init__(self):
        super().__init__()
        self.base = network(12, 5).requires_grad_(requires_grad=False)
        torch.manual_seed(1)
        self.adapters = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 2, bias=False), nn.Linear(2, 12, bias=False))
            for _ in range(4)
        ).double()

    def forward(self, value):
        adapters = iter(self.adapters)
        for layer in self.base:
            value = layer(value)
            if isinstance(layer, nn.Tanh):
                value = value + next(adapters)(value)
        return value


def adapters_of_a_frozen_model(wrap, rank):
    return train(wrap, rank, wrap(WithAdapters()))


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.one, self.other = network(), network(seed=1), network(seed=2)
        self.never = nn.Linear(3, 3).double()

    def forward(self, value, which):
        result = self.always(value)
        if which & 1:
            result = result + self.one(value)
        if which & 2:
            result = result * self.other(value)
        return result


def branches_that_differ_by_rank(wrap, rank):
    wrapped = wrap(Branching(), find_unused_parameters=True)
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        take_step(wrapped, optimizer, batch(step, rank), (5 * step + 3 * rank) % 4)
    return {"model": wrapped}


def branches_with_accumulation_into_views(wrap, rank):
    wrapped = wrap(Branching(), find_unused_parameters=True, gradient_as_bucket_view=True)
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        optimizer.zero_grad(set_to_none=False)
        with wrapped.no_sync():
            wrapped(batch(step, rank), (3 * step + rank) % 4).square().mean().backward()
        wrapped(batch(step, rank), (5 * step + 3 * rank) % 4).square().mean().backward()
        optimizer.step()
    return {"model": wrapped}


class Convolutional(nn.Module):
    """With running statistics, and a buffer that each pass replaces."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(2, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3),
            nn.BatchNorm2d(4),
            nn.Flatten(),
            nn.Linear(16, 2),
        ).double()
        self.register_buffer("passes", torch.zeros((), dtype=torch.float64))

    def forward(self, value):
        self.passes = self.passes + 1
        return self.layers(value)


IMAGES = (4, 2, 6, 6)


def buffers_are_broadcast(wrap, rank):
    wrapped = wrap(Convolutional())
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        take_step(wrapped, optimizer, batch(step, rank, IMAGES))
        if step % 10 == 5:
            wrapped.eval()
            with torch.no_grad():
                wrapped(batch(step, rank, IMAGES))
            wrapped.train()
    return {"model": wrapped}


def own_buffers_on_each_rank(wrap, rank):
    return train(wrap, rank, wrap(Convolutional(), broadcast_buffers=False), shape=IMAGES)


def channels_last(wrap, rank):
    model = Convolutional().to(memory_format=torch.channels_last)
    wrapped = wrap(model, gradient_as_bucket_view=True)
    came_out = train(wrap, rank, wrapped, shape=IMAGES)
    strides = [list(parameter.stride()) for parameter in wrapped.parameters()]
    return came_out | {"strides": strides}


def weight_norm(wrap, rank):
    model = network()
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.spectral_norm(model[2])
    return train(wrap, rank, wrap(model))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cells, self.out = nn.LSTM(6, 5, num_layers=2).double(), nn.Linear(5, 2).double()

    def forward(self, value):
        return self.out(self.cells(value)[0])


def recurrent_with_changing_lengths(wrap, rank):
    """Batches and sequences differ between ranks and steps."""
    wrapped = wrap(Recurrent())
    optimizer = sgd(wrapped)
    for step in wrap.steps():
        shape = (1 + (step + rank) % 5, 1 + (step + 2 * rank) % 4, 6)
        take_step(wrapped, optimizer, batch(step, rank, shape))
    return {"model": wrapped}


def dropout(wrap, rank):
    """Nobody else draws from the user's generator."""
    model = network()
    model.insert(2, nn.Dropout(0.3))
    wrapped = wrap(model)
    torch.manual_seed(7 + rank)
    return train(wrap, rank, wrapped) | {"next number": torch.rand(())}


def scripted_model(wrap, rank):
    return train(wrap, rank, wrap(torch.jit.script(network())))


def other_default_type(wrap, rank):
    torch.set_default_dtype(torch.float64)
    try:
        return train(wrap, rank, wrap(network()))
    finally:
        torch.set_default_dtype(torch.float32)


class Checkpointed(nn.Module):
    """Each layer is used twice, and computed again in backward."""

    def __init__(self, *, use_reentrant, has_unused=False):
        super().__init__()
        torch.manual_seed(0)
        self.use_reentrant = use_reentrant
        self.into, self.out = nn.Linear(6, 8), nn.Linear(8, 2)
        self.hidden = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        if has_unused:
            self.unused = nn.Linear(3, 3)
        self.double()

    def forward(self, value):
        value = self.into(value)
        for layer in self.hidden:
            value = checkpoint(layer, value, use_reentrant=self.use_reentrant)
            value = checkpoint(layer, value, use_reentrant=self.use_reentrant)
        return self.out(value)


def checkpoints(wrap, rank):
    return train(wrap, rank, wrap(Checkpointed(use_reentrant=False)))


def checkpoints_of_a_static_graph(wrap, rank):
    model = Checkpointed(use_reentrant=False, has_unused=True)
    return train(wrap, rank, wrap(model, static_graph=True))


def reentrant_checkpoints_of_a_static_graph(wrap, rank):
    return train(wrap, rank, wrap(Checkpointed(use_reentrant=True), static_graph=True))


def unused_beside_reentrant_checkpoints(wrap, rank):
    model = Checkpointed(use_reentrant=True, has_unused=True)
    return train(wrap, rank, wrap(model, static_graph=True))


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    cache: object = None


class Mapping(collections.OrderedDict):
    def __getattr__(self, name):
        return self[name]


class Opaque:
    """What torch cannot look into."""

    def __init__(self, logits):
        self.logits = logits


class Named(NamedTuple):
    logits: torch.Tensor
    number: int


OUTPUTS = {
    "dict": (lambda y: {"logits": y, "none": None, "text": "x"}, lambda out: out["logits"]),
    "nested tuple": (lambda y: (None, y, [y * 2, None]), lambda out: out[2][0]),
    "dataclass": (Result, lambda out: out.logits),
    "mapping": (lambda y: Mapping(logits=y, hidden=(y, None)), lambda out: out.logits),
    "opaque": (Opaque, lambda out: out.logits),
    "namedtuple": (lambda y: Named(y, 3), lambda out: out.logits),
}


class Returning(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.network, self.kind = network(), kind

    def forward(self, *, value, flag: Any = None):
        return OUTPUTS[self.kind][0](self.network(value))


def outputs_of_all_kinds(wrap, rank):
    wrapped = {kind: wrap(Returning(kind)) for kind in OUTPUTS}
    optimizers = {kind: sgd(each) for kind, each in wrapped.items()}
    for step in wrap.steps():
        for kind, (_, logits_of) in OUTPUTS.items():
            optimizers[kind].zero_grad()
            output = wrapped[kind](value=batch(step, rank), flag="x")
            logits_of(output).square().mean().backward()
            optimizers[kind].step()
    return wrapped


def hooks_of_the_user(wrap, rank):
    """On modules and parameters, made before wrapping."""
    model, accumulated = network(), []
    model[0].register_forward_hook(lambda _, inputs, output: output * 1.01)
    model[2].register_full_backward_hook(lambda _, grads, outputs: (grads[0] * 0.99,))
    for parameter in model[0].parameters():
        parameter.register_hook(lambda grad: grad * 2)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: accumulated.append(1))
    came_out = train(wrap, rank, wrap(model))
    return came_out | {"accumulated": len(accumulated)}


HABITS = [
    plain_model,
    deep_model,
    single_number,
    parameters_without_elements,
    tied_weights,
    layer_used_again,
    complex_weights,
    weights_of_two_types,
    sparse_embedding,
    adapters_of_a_frozen_model,
    branches_that_differ_by_rank,
    branches_with_accumulation_into_views,
    buffers_are_broadcast,
    own_buffers_on_each_rank,
    channels_last,
    weight_norm,
    recurrent_with_changing_lengths,
    dropout,
    scripted_model,
    other_default_type,
    checkpoints,
    checkpoints_of_a_static_graph,
    reentrant_checkpoints_of_a_static_graph,
    unused_beside_reentrant_checkpoints,
    outputs_of_all_kinds,
    hooks_of_the_user,
]
