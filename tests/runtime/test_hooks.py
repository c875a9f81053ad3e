"""Our hooks on torch's own wrapper: the same weights as with ours, bit for bit."""

import threading
from dataclasses import replace

import pytest
import torch
from ranks import on_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradweave
from gradweave import CollectiveError, RequestError
from gradweave._src import hooks
from gradweave._src.compression import Compression
from gradweave._src.plan import Bucket, Plan
from gradweave._src.runtime.ddp import DistributedDataParallel
from gradweave._src.sparse import checkpoint
from gradweave._src.sparse.settings import GTopK, TopK
from gradweave._src.sparse.warmup import Densities

WARMUP = Densities(warmup=(0.9, 0.3), final=0.1, steps_each=2)
NAMES = ["2.bias", "2.weight", "0.bias", "0.weight"]
TWO_BUCKETS = Plan(
    planner="made",
    buckets=tuple(
        Bucket(
            tensors=tuple(n),
            collective="native",
            compression=Compression(method="gtopk", density=0.1),
        )
        for n in (NAMES[:1], NAMES[1:])
    ),
)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))


def take_step(wrapped, optimizer, step, rank, accumulate=1):
    optimizer.zero_grad()
    torch.manual_seed(1000 * step + rank)
    for _ in range(accumulate - 1):
        with wrapped.no_sync():
            wrapped(torch.randn(4, 6)).square().mean().backward()
    wrapped(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()


def stock(settings, hook=hooks.gtopk, **options):
    ddp = TorchDDP(network(), **options)
    state = hooks.SparseState(ddp, settings)
    ddp.register_comm_hook(state, hook)
    return ddp, state, torch.optim.SGD(ddp.parameters(), lr=0.05)


def in_one_bucket(settings, hook):
    """In which torch changes the order after the first step."""
    whole = replace(settings, whole_model=True)
    return stock(settings, hook), DistributedDataParallel(network(), compression=whole)


def in_two_buckets(settings, hook):
    """In the order of declaration torch's hold from the first step on, as ours do."""
    mib_of = {name: parameter.nbytes / 2**20 for name, parameter in network().named_parameters()}
    caps = [sum(mib_of[name] for name in bucket.tensors) for bucket in TWO_BUCKETS.buckets][::-1]
    theirs = stock(settings, hook, bucket_cap_mb_list=caps, find_unused_parameters=True)
    ours = DistributedDataParallel(
        network(), plan=TWO_BUCKETS, compression=settings, find_unused_parameters=True
    )
    return theirs, ours


def compared(group, kind, make, accumulate):
    """Nine steps, beyond the end of the warm-up."""
    settings = kind(density=WARMUP, momentum=0.9)
    (ddp, state, optimizer), ours = make(settings, hooks.gtopk if kind is GTopK else hooks.topk)
    our_optimizer = torch.optim.SGD(ours.parameters(), lr=0.05)
    for step in range(9):
        take_step(ddp, optimizer, step, group.rank(), accumulate)
        take_step(ours, our_optimizer, step, group.rank(), accumulate)
    residuals, our_residuals = (
        one["residuals"]["values"] for one in (state.state_dict(), ours.sparse_state_dict())
    )
    assert any(value.any() for value in residuals.values())
    pairs = [*zip(ddp.parameters(), ours.parameters(), strict=True)]
    pairs += [(residuals[name], our_residuals[name]) for name in NAMES]
    return [torch.equal(*pair) for pair in pairs]


@pytest.mark.parametrize(
    ("world", "kind", "make", "accumulate"),
    [
        (2, GTopK, in_one_bucket, 1),
        (3, GTopK, in_one_bucket, 2),
        (3, GTopK, in_two_buckets, 1),
        (2, TopK, in_two_buckets, 1),
    ],
)
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_the_same_bits_as_with_our_wrapper(tmp_path, world, kind, make, accumulate):
    found = on_processes(world, compared, kind, make, accumulate, scratch=tmp_path)
    assert found == [[True] * 8] * world


class Beside(nn.Module):
    """Two layers whose gradients are whole numbers; torch sends them in two buckets."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Linear(30, 1, bias=False) for _ in range(2))

    def forward(self, value):
        return self.a(value) + self.b(2 * value)


def rebuilt(group):
    model = Beside()
    ddp = TorchDDP(model, bucket_cap_mb_list=[120 / 2**20] * 2)
    state = hooks.SparseState(ddp, GTopK(density=0.1))
    ddp.register_comm_hook(state, hooks.gtopk)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    applied, produced = torch.zeros(2, 30), torch.zeros(2, 30)
    for step in range(5):
        model.zero_grad()
        torch.manual_seed(100 * step + group.rank())
        batch = torch.randint(-9, 10, (1, 30)).float()
        ddp(batch).sum().backward()
        produced += torch.cat([batch, 2 * batch])
        applied += torch.cat([model.a.weight.grad, model.b.weight.grad]) * group.size()
        optimizer.step()
    left = state.state_dict()["residuals"]["values"]
    left = torch.cat([left["a.weight"], left["b.weight"]])
    return [one.tolist() for one in (applied, produced, left)]


def test_nothing_is_lost_when_torch_changes_its_buckets(tmp_path):
    results = on_processes(2, rebuilt, scratch=tmp_path)
    applied = torch.tensor(results[0][0])
    produced, left = (sum(torch.tensor(one[place]) for one in results) for place in (1, 2))
    assert left.any()
    assert torch.equal(applied + left, produced)


def resumed(group, folder):
    """In the middle, everything but the weights goes through files; one bucket, as torch makes."""
    ends = []
    for stop in (None, 3):
        model = network()
        ddp = TorchDDP(model)
        state = hooks.SparseState(ddp, GTopK(density=WARMUP))
        ddp.register_comm_hook(state, hooks.gtopk)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(6):
            if step == stop:
                checkpoint.save(state.state_dict(), folder)
                ddp = TorchDDP(model)
                state = hooks.SparseState(ddp, GTopK(density=WARMUP))
                state.load_state_dict(checkpoint.load(folder, rank=group.rank(), ranks=2))
                ddp.register_comm_hook(state, hooks.gtopk)
            take_step(ddp, optimizer, step, group.rank())
        ends.append([*model.parameters()])
    return [torch.equal(one, other) for one, other in zip(*ends, strict=True)]


def test_resuming(tmp_path):
    assert on_processes(2, resumed, tmp_path / "states", scratch=tmp_path) == [[True] * 4] * 2


def dies(group):
    """The state must not keep the wrapper alive, and leaves no thread behind."""
    ddp, state, optimizer = stock(GTopK(density=0.1))
    take_step(ddp, optimizer, 0, group.rank())
    del ddp, state, optimizer
    return [thread.name for thread in threading.enumerate() if "gradweave" in thread.name]


def test_a_state_ends_with_its_wrapper(tmp_path):
    assert on_processes(2, dies, scratch=tmp_path) == [[], []]


def misused(group):
    found = []
    ddp, _, optimizer = stock(TopK(density=0.001), hooks.gtopk)
    other, state, _ = stock(GTopK(density=0.001))
    foreign = TorchDDP(network())
    foreign.register_comm_hook(state, hooks.gtopk)
    with pytest.raises(RequestError) as caught:
        take_step(ddp, optimizer, 0, group.rank())
    found.append(str(caught.value))
    with pytest.raises(CollectiveError) as caught:
        foreign(torch.ones(1, 6)).sum().backward()
    found.append(str(caught.value))
    with pytest.raises(RuntimeError, match="register_comm_hook or register_builtin"):
        other.register_comm_hook(state, hooks.gtopk)
    return found


def test_misuse(tmp_path):
    for wrong_hook, wrong_model in on_processes(2, misused, scratch=tmp_path):
        assert wrong_hook == "this hook wants a state with GTopK(…), got TopK"
        assert "bucket 1 by gtopk: a gradient of another model than the" in wrong_model


def test_only_torchs_own_wrapper_takes_a_hook():
    ours = object.__new__(DistributedDataParallel)
    with pytest.raises(RequestError, match=r"for torch's own wrapper; .* compression=… instead$"):
        hooks.SparseState(ours, GTopK(0.1))
    with pytest.raises(RequestError, match=r"got a Sequential; wrap it first$"):
        hooks.SparseState(network(), GTopK(0.1))


def test_hooks_are_found_without_an_import_of_their_own():
    assert gradweave._src.hooks.gtopk is hooks.gtopk
