"""A tensor of which this rank has a part, as torch.distributed.checkpoint saves and loads it.

torch asks such an object for three methods: which parts there are to write, which to read, and
where the elements of a part are. So each rank writes and reads its own part, and with another
number of ranks each reads the part that it has then.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from gradweave._src.checkpoint.boxes import Box, memory_order
from gradweave._src.errors import RequestError


class PartOfTensor(torch.Tensor):
    """A tensor with the shape of the whole that holds only this rank's elements, in ``own``."""

    own: torch.Tensor  # flat
    boxes: tuple[Box, ...]
    order: tuple[int, ...]

    @classmethod
    def of(
        cls,
        own: torch.Tensor,
        boxes: Sequence[Box],
        *,
        shape: Sequence[int],
        strides: Sequence[int],
    ) -> Self:
        """Return the tensor of this shape, whose elements in ``boxes`` are those of ``own``."""
        part = own.new_zeros(()).expand(torch.Size(shape)).as_subclass(cls)
        part.own, part.boxes = own, tuple(boxes)
        part.order = tuple(memory_order(strides))
        return part

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Refuse to be copied like a whole tensor: elements of others would be zeros."""
        if func is torch.Tensor.copy_ and isinstance(args[1], PartOfTensor):
            raise RequestError(
                "only this rank's part of a tensor is here, and it was to be copied whole, as "
                "async_save does for a storage_writer that stages by itself; give async_save an "
                "async_stager, such as torch.distributed.checkpoint.staging.DefaultStager()"
            )
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        """Return the parts to write; torch calls this when it saves."""
        del value
        properties = TensorProperties.create_from_tensor(self.own)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the parts that are here; torch calls this when it loads."""
        return [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for box in self.boxes
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return one of these parts, to be read or written in place."""
        box = next(box for box in self.boxes if torch.Size(box.offsets) == index.offset)
        in_memory = [box.sizes[dim] for dim in self.order]
        flat = self.own[box.first : box.first + torch.Size(box.sizes).numel()]
        back = [self.order.index(dim) for dim in range(len(self.order))]
        return flat.view(in_memory).permute(back)
