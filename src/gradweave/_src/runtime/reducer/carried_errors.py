"""What 8-bit messages have dropped, carried over to the next step: error feedback."""

from typing import NamedTuple

import torch


class BucketLayout(NamedTuple):
    """Parameters whose gradients lie one behind the other."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]


class CarriedErrors:
    """What one wrapper carries over for each parameter, whatever buckets that travels in.

    docs/precision.md says when some of it is lost: it is in no checkpoint, for example.
    """

    def __init__(self) -> None:
        self._of_parameter: dict[str, torch.Tensor] = {}  # parts of the buckets
        self._of_bucket: dict[BucketLayout, torch.Tensor] = {}

    @property
    def has_any(self) -> bool:
        return bool(self._of_parameter)

    def of_bucket(self, bucket: BucketLayout, gradient: torch.Tensor) -> torch.Tensor:
        """Return what is carried over for a flat gradient, to be changed in place."""
        if bucket not in self._of_bucket:
            flat = torch.zeros_like(gradient)
            for name, part in zip(bucket.names, flat.split_with_sizes(bucket.sizes), strict=True):
                if name in self._of_parameter:
                    part.copy_(self._of_parameter[name])
                self._of_parameter[name] = part
            self._forget_buckets_with(bucket.names)
            self._of_bucket[bucket] = flat
        return self._of_bucket[bucket]

    def give_back(self, bucket: BucketLayout, gradient: torch.Tensor) -> None:
        """Add what is carried over for these to a gradient of which nothing is dropped."""
        if self._of_parameter.keys().isdisjoint(bucket.names):
            return
        for name, part in zip(bucket.names, gradient.split_with_sizes(bucket.sizes), strict=True):
            if name in self._of_parameter:
                part.add_(self._of_parameter.pop(name))
        self._forget_buckets_with(bucket.names)

    def _forget_buckets_with(self, names: tuple[str, ...]) -> None:
        gone = set(names)
        self._of_bucket = {
            bucket: flat
            for bucket, flat in self._of_bucket.items()
            if gone.isdisjoint(bucket.names)
        }
