"""A run of elements in memory is a few boxes, whatever the shape and the memory format."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from gradweave._src.checkpoint.boxes import boxes_of


@st.composite
def runs(draw):
    """A tensor without gaps, its dimensions in any order in memory, and a part of its elements."""
    sizes = draw(st.lists(st.integers(1, 4), max_size=4))
    order = draw(st.permutations(range(len(sizes))))
    numbers = torch.arange(torch.Size(sizes).numel()).view([sizes[dim] for dim in order])
    tensor = numbers.permute([order.index(dim) for dim in range(len(sizes))])
    edges = sorted(draw(st.tuples(*[st.integers(0, numbers.numel())] * 2)))
    return tensor, *edges


@given(runs())
def test_boxes_have_the_elements_of_the_run_and_no_others(run):
    tensor, first, last = run  # whose elements say where in memory they are
    found = []
    for box in boxes_of(tensor.shape, tensor.stride(), first, last):
        part = tensor
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        inside = sorted(part.flatten().tolist())
        assert inside == list(range(first + box.first, first + box.first + len(inside)))
        found += inside
    assert found == list(range(first, last))


@given(runs())
def test_boxes_are_few(run):
    tensor, first, last = run
    assert len(boxes_of(tensor.shape, tensor.stride(), first, last)) <= max(1, 2 * tensor.dim() - 1)
