"""Sparse messages through the wrapper."""

import pytest
import torch
from ranks import on_processes
from torch import nn

from gradweave._src.plan import Bucket, Plan
from gradweave._src.runtime.ddp import DistributedDataParallel
from gradweave._src.session.task import LAST_STEP
from gradweave._src.sparse.settings import GTopK, TopK


def sparse(group, settings, plan):
    """Gradients that are integers: what is applied and what is left are all there ever were."""
    model = nn.Linear(40, 1, bias=False)
    nn.init.zeros_(model.weight)
    given = {} if plan is None else {"plan": plan}
    wrapped = DistributedDataParallel(model, compression=settings, **given)
    applied, produced = torch.zeros(40), torch.zeros(40)
    for step in range(12):
        model.zero_grad()
        torch.manual_seed(100 * step + group.rank())
        batch = torch.randint(-9, 10, (1, 40)).float()
        wrapped(batch).sum().backward()
        produced += batch[0]
        applied += model.weight.grad[0] * group.size()
        model.weight.data -= model.weight.grad
    wrapped._sparse.sparsifier.commit()
    (residual,) = wrapped._sparse.sparsifier.state_dict()["residuals"]["values"].values()
    return applied.tolist(), residual.flatten().tolist(), produced.tolist()


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", [GTopK, TopK])
@pytest.mark.parametrize("whole_model", [True, False])
def test_sparsification_loses_nothing(tmp_path, world, kind, whole_model):
    settings = kind(density=0.1, whole_model=whole_model)
    plan = None
    if not whole_model:
        thinned = settings.compression_at(LAST_STEP)
        bucket = Bucket(tensors=("weight",), collective="native", compression=thinned)
        plan = Plan(planner="made", buckets=(bucket,))
    results = on_processes(world, sparse, settings, plan, scratch=tmp_path)
    applied = results[0][0]
    assert all(one == applied for one, _, _ in results)
    left = [sum(values) for values in zip(*(residual for _, residual, _ in results), strict=True)]
    produced = [sum(values) for values in zip(*(made for _, _, made in results), strict=True)]
    assert [a + b for a, b in zip(applied, left, strict=True)] == produced
