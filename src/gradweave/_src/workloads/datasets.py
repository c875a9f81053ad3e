"""Real data from files, and which of it a rank trains on in which step. Nothing is downloaded.

images = fashion_mnist_subset(train=True)
batches = Batches(examples=len(images), batch_size=32, world=4, rank=1)
batch = images.take(batches.indices(step))
loss = cross_entropy(model(batch.normalised()), batch.labels)
"""

import gzip
import math
import os
import zlib
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files as package_files
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from gradweave._src.errors import FormatError, RequestError

FilePath = str | os.PathLike[str]

CLASSES = 10  # of Fashion-MNIST and of CIFAR-10 alike


class Scale(NamedTuple):
    """How bright the pixels of a data set are, where black is 0 and white is 1.

    Attributes:
        mean: the mean of each channel.
        std: the standard deviation of each channel.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]


# Over all training images of each.
FASHION_MNIST = Scale(mean=(0.2860,), std=(0.3530,))
CIFAR10 = Scale(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Images:
    """Images as they are in their file, and what each one shows.

    Attributes:
        pixels: uint8 by image, channel, row and column.
        labels: int64, the class of each image.
        scale: mean and deviation of each channel, for ``normalised``.

    Raises:
        RequestError: if pixels, labels and scale do not fit each other.

    Examples:
        >>> images = gradweave.workloads.fashion_mnist_subset(train=False)
        >>> images.take(torch.tensor([0, 1])).normalised().shape
        torch.Size([2, 1, 28, 28])
    """

    pixels: torch.Tensor
    labels: torch.Tensor
    scale: Scale

    def __post_init__(self) -> None:
        if self.pixels.dtype != torch.uint8 or self.pixels.dim() != len("NCHW"):
            raise RequestError(
                "pixels must be uint8 by image, channel, row and column, got "
                f"{self.pixels.dtype} of shape {tuple(self.pixels.shape)}"
            )
        if self.labels.dtype != torch.int64 or self.labels.shape != self.pixels.shape[:1]:
            raise RequestError(
                f"labels must be {len(self.pixels)} int64, one for each image, got "
                f"{self.labels.dtype} of shape {tuple(self.labels.shape)}"
            )
        channels = self.pixels.shape[1]
        if (len(self.scale.mean), len(self.scale.std)) != (channels, channels):
            raise RequestError(f"a scale for {channels} channels is needed, got {self.scale}")

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: torch.Tensor) -> "Images":
        """Return the images with these numbers."""
        return Images(pixels=self.pixels[indices], labels=self.labels[indices], scale=self.scale)

    def normalised(self) -> torch.Tensor:
        """Return floats whose mean is about 0 and whose deviation about 1, as models want them."""
        mean, std = (torch.tensor(numbers).view(-1, 1, 1) for numbers in self.scale)
        return (self.pixels / 255 - mean) / std


def load_idx(
    images_path: FilePath, labels_path: FilePath, *, scale: Scale = FASHION_MNIST
) -> Images:
    """Read Fashion-MNIST's own files, or others of that form, gzipped or not.

    Args:
        images_path: the file of images.
        labels_path: the file of labels.
        scale: mean and deviation of the pixels (default: Fashion-MNIST's).

    Raises:
        FormatError: if a file is not of that form, or the two do not fit each other.
    """
    return _images_from_idx(
        Path(images_path).read_bytes(),
        Path(labels_path).read_bytes(),
        origins=(str(images_path), str(labels_path)),
        scale=scale,
    )


def fashion_mnist_subset(*, train: bool) -> Images:
    """Return the shipped 2,000 images for training or 500 for testing, equally many of each class.

    Examples:
        >>> len(gradweave.workloads.fashion_mnist_subset(train=True))
        2000
    """
    folder = package_files("gradweave._src.workloads") / "data"
    split = "train" if train else "t10k"
    names = (f"{split}-images-idx3-ubyte.gz", f"{split}-labels-idx1-ubyte.gz")
    images, labels = ((folder / name).read_bytes() for name in names)
    return _images_from_idx(images, labels, origins=names, scale=FASHION_MNIST)


def load_cifar10(path: FilePath, *more: FilePath) -> Images:
    """Read CIFAR-10's binary records, one file's after the other's.

    Raises:
        FormatError: if a file is not one of whole records.
    """
    records = torch.cat([_cifar10_records(one) for one in (path, *more)])
    return Images(
        pixels=records[:, 1:].reshape(-1, *_CIFAR10_SHAPE),
        labels=records[:, 0].long(),
        scale=CIFAR10,
    )


def flipped_and_cropped(
    images: Images, indices: torch.Tensor, *, seed: int, epoch: int, padding: int = 4
) -> Images:
    """Return images of which about half are mirrored, and all moved by up to ``padding`` pixels.

    What happens to an image depends on seed, epoch and the image's number alone, so it is the same
    on whichever rank the image is.

    Args:
        images: all of them.
        indices: which to return.
        seed: with ``epoch``, what decides.
        epoch: in which other things happen to each image.
        padding: how far an image may move each way.

    Examples:
        >>> images = gradweave.workloads.fashion_mnist_subset(train=False)
        >>> some = gradweave.workloads.flipped_and_cropped(
        ...     images, torch.tensor([3, 5]), seed=0, epoch=1
        ... )
        >>> len(some)
        2
    """
    generator = np.random.default_rng((seed, epoch, _AUGMENTING))
    moves = torch.from_numpy(generator.integers(2 * padding + 1, size=(len(images), 2)))
    mirrored = torch.from_numpy(generator.integers(2, size=(len(images), 1)))
    top, left = moves[indices].tensor_split(2, dim=1)

    chosen = images.take(indices)
    count, channels, height, width = chosen.pixels.shape
    rows, columns = top + torch.arange(height), left + torch.arange(width)
    columns = torch.where(mirrored[indices] == 1, columns.flip(1), columns)
    moved = pad(chosen.pixels, [padding] * 4)[
        torch.arange(count)[:, None, None, None],
        torch.arange(channels)[:, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]
    return Images(pixels=moved, labels=chosen.labels, scale=images.scale)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Text:
    """A text as numbers, the places of its characters in its vocabulary; ``load_text`` reads one.

    Attributes:
        vocabulary: each of its characters once, in order of code points.
        codes: int64, the place of each character in the vocabulary.

    Examples:
        >>> text = gradweave.workloads.Text(vocabulary="ab", codes=torch.tensor([0, 1, 1, 0, 1]))
        >>> inputs, targets = text.windows(2)
        >>> inputs.tolist(), targets.tolist()
        ([[0, 1], [1, 0]], [[1, 1], [0, 1]])
    """

    vocabulary: str
    codes: torch.Tensor

    def windows(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the text in pieces, one a row, and for each character the one that follows it.

        Raises:
            RequestError: if the text is shorter than a piece and one character.
        """
        count = (len(self.codes) - 1) // length if length > 0 else 0
        if count == 0:
            raise RequestError(
                f"windows must have 1 to {len(self.codes) - 1} characters for a text of "
                f"{len(self.codes)}, got {length}"
            )
        end = count * length
        return self.codes[:end].view(count, length), self.codes[1 : end + 1].view(count, length)


def load_text(path: FilePath) -> Text:
    """Read a text in UTF-8 as a data set of characters.

    Raises:
        FormatError: if it is empty, or not UTF-8.

    Examples:
        >>> _ = pathlib.Path("play.txt").write_text("to be or not to be")
        >>> gradweave.workloads.load_text("play.txt").vocabulary
        ' benort'
    """
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{path}: found {error.reason} at byte {error.start}, expected text in UTF-8"
        ) from None
    if not text:
        raise FormatError(f"{path}: found an empty file, expected text")
    points, codes = np.unique(
        np.frombuffer(text.encode("utf-32-le"), dtype="<u4"), return_inverse=True
    )
    return Text(vocabulary="".join(map(chr, points)), codes=torch.from_numpy(codes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Which examples a rank trains on in which step, in a new order every epoch.

    All ranks' batches of one step, in rank order, are the batch that one worker with
    ``world * batch_size`` would have. Examples too few for one more step wait for the next epoch.

    Attributes:
        examples: how many there are.
        batch_size: examples of one rank in a step.
        world: how many ranks there are.
        rank: whose batches these are.
        seed: what the orders depend on; the same on all ranks.

    Raises:
        RequestError: if a number is out of range, or there are too few examples for a step.

    Examples:
        >>> batches = gradweave.workloads.Batches(examples=100, batch_size=8, world=4, rank=1)
        >>> batches.steps_per_epoch, len(batches.indices(0))
        (3, 8)
    """

    examples: int
    batch_size: int
    world: int = 1
    rank: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise RequestError(f"a batch has at least one example, got {self.batch_size}")
        if not 0 <= self.rank < self.world:
            raise RequestError(f"rank {self.rank} is none of a world of {self.world}")
        if self.seed < 0:
            raise RequestError(f"a seed is not negative, got {self.seed}")
        if self.steps_per_epoch < 1:
            raise RequestError(
                f"{self.examples} examples are too few for {self.world} batches of "
                f"{self.batch_size}; take smaller batches"
            )

    @property
    def steps_per_epoch(self) -> int:
        """How many steps an epoch has."""
        return self.examples // (self.world * self.batch_size)

    def epoch(self, step: int) -> int:
        """Return the epoch of a step."""
        return step // self.steps_per_epoch

    def indices(self, step: int) -> torch.Tensor:
        """Return the numbers of the examples of a step, as int64, for any step from 0 on."""
        order = _shuffled(self.examples, seed=self.seed, epoch=self.epoch(step))
        place = (step % self.steps_per_epoch * self.world + self.rank) * self.batch_size
        return torch.from_numpy(order[place : place + self.batch_size].copy())


_SHUFFLING, _AUGMENTING = 0, 1  # each draws from a stream of its own


@lru_cache(maxsize=2)  # the steps of an epoch share one order, in training and in testing
def _shuffled(
    examples: int, *, seed: int, epoch: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.random.default_rng((seed, epoch, _SHUFFLING)).permutation(examples)


def _images_from_idx(
    images: bytes, labels: bytes, *, origins: tuple[str, str], scale: Scale
) -> Images:
    pixels = _idx_array(images, dimensions=3, origin=origins[0])
    numbers = _idx_array(labels, dimensions=1, origin=origins[1])
    if len(numbers) != len(pixels):
        raise FormatError(
            f"{origins[1]}: found {len(numbers)} labels, expected {len(pixels)}, one for each "
            f"image of {origins[0]}"
        )
    _check_labels(numbers, origin=origins[1])
    return Images(pixels=pixels.unsqueeze(1), labels=numbers.long(), scale=scale)


def _idx_array(content: bytes, *, dimensions: int, origin: str) -> torch.Tensor:
    """Return the array in a file of IDX's form.

    That has two zero bytes, the type of an element, the number of dimensions, their sizes,
    elements.
    """
    content = _gunzipped(content, origin=origin)
    unsigned_bytes = 0x08
    magic = bytes([0, 0, unsigned_bytes, dimensions])
    if content[:4] != magic:
        raise FormatError(
            f"{origin}: found magic number {content[:4].hex() or 'nothing'}, expected "
            f"{magic.hex()} for unsigned bytes in {dimensions} dimensions"
        )
    header = 4 + 4 * dimensions
    if len(content) < header:
        raise FormatError(
            f"{origin}: found {len(content)} bytes, expected a header of {header}; "
            "is the file truncated?"
        )
    shape = tuple(int.from_bytes(content[at : at + 4], "big") for at in range(4, header, 4))
    sizes = " x ".join(map(str, shape))
    if 0 in shape:
        raise FormatError(f"{origin}: found {sizes} elements, expected at least one")
    if len(content) - header != math.prod(shape):
        raise FormatError(
            f"{origin}: found {len(content) - header} bytes after the header, expected "
            f"{math.prod(shape)} for {sizes}; is the file truncated?"
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=header).view(shape)


def _gunzipped(content: bytes, *, origin: str) -> bytes:
    """Return what is inside of gzipped content; other content is returned unchanged."""
    if not content.startswith(b"\x1f\x8b"):
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FormatError(
            f"{origin}: found broken gzip data ({error}), expected a whole gzip file; "
            "is it truncated?"
        ) from None


_CIFAR10_SHAPE = (3, 32, 32)
_CIFAR10_RECORD = 1 + math.prod(_CIFAR10_SHAPE)


def _cifar10_records(path: FilePath) -> torch.Tensor:
    """Return one record a row: the label, then all red, all green, all blue bytes."""
    content = Path(path).read_bytes()
    if not content or len(content) % _CIFAR10_RECORD:
        raise FormatError(
            f"{path}: found {len(content)} bytes, expected CIFAR-10 records of {_CIFAR10_RECORD} "
            "each; is the file truncated?"
        )
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, _CIFAR10_RECORD)
    _check_labels(records[:, 0], origin=str(path))
    return records


def _check_labels(labels: torch.Tensor, *, origin: str) -> None:
    wrong = (labels >= CLASSES).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise FormatError(
            f"{origin}: found label {int(labels[at])} for image {at}, expected 0 to {CLASSES - 1}"
        )
