"""Files good and bad, the shipped subset, and which rank gets what."""

import gzip
from importlib.resources import files as package_files
from pathlib import Path

import make_data
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from gradweave._src.errors import FormatError, RequestError
from gradweave._src.workloads.datasets import (
    CIFAR10,
    FASHION_MNIST,
    Batches,
    Images,
    Scale,
    Text,
    fashion_mnist_subset,
    flipped_and_cropped,
    load_cifar10,
    load_idx,
    load_text,
)

FULL = Path(__file__).parents[3] / "shared" / "data" / "fashion-mnist"

WORLDS = range(1, 10)


def idx(*sizes, elements=None, magic=None):
    """An idx file of bytes that count up from 0."""
    count = torch.Size(sizes).numel()
    header = magic or bytes([0, 0, 8, len(sizes)])
    content = bytes(at % 10 for at in range(count)) if elements is None else bytes(elements)
    return header + b"".join(size.to_bytes(4, "big") for size in sizes) + content


@pytest.fixture
def written(tmp_path):
    def write(images, labels):
        (tmp_path / "images").write_bytes(images)
        (tmp_path / "labels").write_bytes(labels)
        return tmp_path / "images", tmp_path / "labels"

    return write


@pytest.mark.parametrize("packed", [bytes, gzip.compress])
def test_idx_files_are_read(written, packed):
    images = load_idx(*written(packed(idx(3, 2, 4)), packed(idx(3, elements=[7, 0, 9]))))
    assert images.pixels.shape == (3, 1, 2, 4)
    assert images.pixels.dtype == torch.uint8
    assert images.pixels.flatten().tolist() == [at % 10 for at in range(24)]
    assert images.labels.dtype == torch.int64
    assert images.labels.tolist() == [7, 0, 9]
    assert len(images) == 3


@pytest.mark.parametrize(
    ("images", "complaint"),
    [
        (b"", "images: found magic number nothing, expected 00000803"),
        (idx(6), "images: found magic number 00000801, expected 00000803 for unsigned bytes"),
        (idx(3, 2, 1, magic=b"\x00\x00\x0d\x03"), "found magic number 00000d03, expected 00000803"),
        (idx(3, 2, 1)[:11], "images: found 11 bytes, expected a header of 16; is the file trunc"),
        (idx(3, 2, 1)[:-1], "images: found 5 bytes after the header, expected 6 for 3 x 2 x 1;"),
        (idx(3, 2, 1) + b"x", "images: found 7 bytes after the header, expected 6 for 3 x 2 x 1"),
        (idx(2**32 - 1, 2**32 - 1, 2, elements=[1]), "images: found 1 bytes after the header, exp"),
        (idx(0, 28, 28), "images: found 0 x 28 x 28 elements, expected at least one"),
        (gzip.compress(idx(3, 2, 1), mtime=0)[:-9], "images: found broken gzip data .*truncated"),
        (b"\x1f\x8b\x07", "images: found broken gzip data .*, expected a whole gzip file"),
        (gzip.compress(idx(3, 2, 1), mtime=0)[:12] + bytes(30), "images: found broken gzip data"),
    ],
)
def test_images_that_are_not(written, images, complaint):
    with pytest.raises(FormatError, match=complaint) as raised:
        load_idx(*written(images, idx(3)))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("labels", "complaint"),
    [
        (idx(3, 2, 1), "labels: found magic number 00000803, expected 00000801"),
        (idx(2), "labels: found 2 labels, expected 3, one for each image of .*images"),
        (idx(3, elements=[0, 10, 200]), "labels: found label 10 for image 1, expected 0 to 9"),
    ],
)
def test_labels_that_are_not(written, labels, complaint):
    with pytest.raises(FormatError, match=complaint):
        load_idx(*written(idx(3, 2, 1), labels))


def cifar10_record(label, red, green, blue):
    return bytes([label]) + bytes([red]) * 1024 + bytes([green]) * 1024 + bytes([blue]) * 1024


def test_cifar10_records_are_read_one_file_after_the_other(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(cifar10_record(3, 10, 20, 30) + cifar10_record(9, 0, 128, 255))
    second.write_bytes(cifar10_record(0, 1, 2, 3))
    assert load_cifar10(first).labels.tolist() == [3, 9]
    images = load_cifar10(first, second)
    assert images.pixels.shape == (3, 3, 32, 32)
    assert images.pixels[:, :, 5, 7].tolist() == [[10, 20, 30], [0, 128, 255], [1, 2, 3]]
    assert images.labels.tolist() == [3, 9, 0]
    assert images.scale == CIFAR10


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "found 0 bytes, expected CIFAR-10 records of 3073 each"),
        (cifar10_record(1, 2, 3, 4)[:-1], "found 3072 bytes, expected .*; is the file truncated"),
        (cifar10_record(1, 2, 3, 4) + cifar10_record(11, 2, 3, 4), "found label 11 for image 1"),
    ],
)
def test_cifar10_records_that_are_not(tmp_path, content, complaint):
    path = tmp_path / "batch.bin"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=f"batch.bin: {complaint}"):
        load_cifar10(path)


@pytest.mark.parametrize(("train", "count"), [(True, 2000), (False, 500)])
def test_the_shipped_subset(train, count):
    images = fashion_mnist_subset(train=train)
    assert images.pixels.shape == (count, 1, 28, 28)
    assert torch.bincount(images.labels).tolist() == [count // 10] * 10
    assert (images.pixels.min(), images.pixels.max()) == (0, 255)
    assert images.pixels.flatten(1).unique(dim=0).shape[0] == count  # no image twice
    normalised = images.normalised()
    assert normalised.dtype == torch.float32
    assert normalised.mean().item() == pytest.approx(0, abs=0.02)
    assert normalised.std().item() == pytest.approx(1, abs=0.02)


def test_the_subset_begins_as_fashion_mnist_does():
    assert fashion_mnist_subset(train=True).labels[:10].tolist() == [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]
    assert fashion_mnist_subset(train=False).labels[:10].tolist() == [9, 2, 1, 1, 6, 1, 4, 6, 5, 7]


def test_the_subset_comes_with_its_licence():
    folder = package_files("gradweave._src.workloads") / "data"
    licence = (folder / "LICENSE-fashion-mnist").read_text("utf-8")
    assert licence.startswith("The MIT License (MIT)")
    assert "2017 Zalando SE, https://tech.zalando.com" in licence


def test_the_script_cuts_the_first_of_each_class(tmp_path, monkeypatch):
    monkeypatch.setattr(make_data, "PER_CLASS", {"train": 2, "t10k": 1})
    labels = [*range(10), 0, 0, *range(9, 0, -1)]
    for split in make_data.PER_CLASS:
        pixels = idx(len(labels), 1, 1, elements=range(len(labels)))
        (tmp_path / f"{split}-images-idx3-ubyte.gz").write_bytes(pixels)
        (tmp_path / f"{split}-labels-idx1-ubyte.gz").write_bytes(idx(21, elements=labels))
    cut = tmp_path / "cut"
    cut.mkdir()
    make_data.main(tmp_path, cut)
    train = load_idx(cut / "train-images-idx3-ubyte.gz", cut / "train-labels-idx1-ubyte.gz")
    assert train.pixels.flatten().tolist() == [*range(11), *range(12, 21)]
    assert train.labels.tolist() == [*range(10), 0, *range(9, 0, -1)]
    test = load_idx(cut / "t10k-images-idx3-ubyte.gz", cut / "t10k-labels-idx1-ubyte.gz")
    assert test.pixels.flatten().tolist() == list(range(10))
    before = (cut / "train-images-idx3-ubyte.gz").read_bytes()
    make_data.main(tmp_path, cut)
    assert (cut / "train-images-idx3-ubyte.gz").read_bytes() == before


@pytest.mark.skipif(not FULL.is_dir(), reason="the full Fashion-MNIST is not beside this checkout")
def test_the_script_cuts_the_shipped_subset():
    """Of the test images alone: reading all of the training images takes most of a second."""
    names = ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")
    cut = make_data.first_of_each_class(load_idx(*(FULL / name for name in names)), 50)
    shipped = fashion_mnist_subset(train=False)
    assert torch.equal(cut.pixels, shipped.pixels)
    assert torch.equal(cut.labels, shipped.labels)


def made_up(count=6, channels=3, side=5):
    pixels = torch.arange(count * channels * side * side).remainder(251).to(torch.uint8) + 1
    scale = Scale(mean=(0.5,) * channels, std=(0.25,) * channels)
    return Images(
        pixels=pixels.view(count, channels, side, side), labels=torch.arange(count), scale=scale
    )


def test_normalising_is_by_channel():
    images = Images(
        pixels=torch.tensor([0, 255], dtype=torch.uint8).view(1, 2, 1, 1),
        labels=torch.tensor([0]),
        scale=Scale(mean=(0.5, 0.0), std=(0.25, 0.5)),
    )
    assert images.normalised().flatten().tolist() == [-2.0, 2.0]


def test_images_check_themselves():
    pixels, labels = torch.zeros(2, 1, 3, 3, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(RequestError, match=r"pixels must be uint8 by image, .* got torch.float32"):
        Images(pixels=pixels.float(), labels=labels, scale=FASHION_MNIST)
    with pytest.raises(RequestError, match=r"labels must be 2 int64, .* of shape \(1,\)"):
        Images(pixels=pixels, labels=labels[:1], scale=FASHION_MNIST)
    with pytest.raises(RequestError, match="a scale for 1 channels is needed"):
        Images(pixels=pixels, labels=labels, scale=CIFAR10)


def every_move(image, padding):
    """All pictures that mirroring and cropping can make of one image."""
    height, width = image.shape[1:]
    padded = torch.nn.functional.pad(image, [padding] * 4)
    for top in range(2 * padding + 1):
        for left in range(2 * padding + 1):
            crop = padded[:, top : top + height, left : left + width]
            yield from (crop, crop.flip(2))


def test_flips_and_crops_are_all_there_is():
    images = made_up()
    seen = set()
    for epoch in range(40):
        changed = flipped_and_cropped(images, torch.arange(6), seed=1, epoch=epoch, padding=1)
        assert changed.labels.tolist() == images.labels.tolist()
        for before, after in zip(images.pixels, changed.pixels, strict=True):
            moves = [torch.equal(after, move) for move in every_move(before, 1)]
            assert sum(moves) == 1
            seen.add(moves.index(True))
    assert seen == set(range(18))


def test_flips_and_crops_do_not_depend_on_who_asks():
    images = made_up()
    together = flipped_and_cropped(images, torch.arange(6), seed=3, epoch=2)
    alone = flipped_and_cropped(images, torch.tensor([4, 1]), seed=3, epoch=2)
    assert torch.equal(alone.pixels, together.pixels[[4, 1]])
    assert alone.labels.tolist() == [4, 1]
    for other in ({"seed": 4, "epoch": 2}, {"seed": 3, "epoch": 3}):
        changed = flipped_and_cropped(images, torch.arange(6), **other)
        assert not torch.equal(changed.pixels, together.pixels)


def text_of(tmp_path, content):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    return load_text(path)


@given(written=st.text(st.sampled_from("ab\r\n é漢😀"), min_size=1))
def test_text_comes_back_from_its_codes(written, tmp_path_factory):
    text = text_of(tmp_path_factory.mktemp("text"), written.encode())
    assert text.vocabulary == "".join(sorted(set(written)))
    assert text.codes.dtype == torch.int64
    assert "".join(text.vocabulary[code] for code in text.codes) == written


def test_text_that_is_not(tmp_path):
    with pytest.raises(FormatError, match=r"text.txt: found an empty file, expected text"):
        text_of(tmp_path, b"")
    with pytest.raises(
        FormatError, match=r"text.txt: found invalid .* at byte 2, expected text in"
    ):
        text_of(tmp_path, b"ab\xff")


def test_windows_are_the_text_and_its_next_characters(tmp_path):
    text = text_of(tmp_path, b"abcdefgh")
    inputs, targets = text.windows(3)
    assert inputs.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert targets.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert text.windows(7)[1].tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    for length in (0, -1, 8):
        with pytest.raises(RequestError, match="must have 1 to 7 characters for a text of 8, got"):
            text.windows(length)


@given(characters=st.integers(2, 60), length=st.integers(1, 59))
def test_windows_leave_out_less_than_one(characters, length):
    assume(length < characters)
    inputs, targets = Text(vocabulary="", codes=torch.arange(characters)).windows(length)
    assert inputs.flatten().tolist() == list(range(inputs.numel()))
    assert torch.equal(targets, inputs + 1)
    assert characters - 1 - length < inputs.numel() <= characters - 1


@st.composite
def tasks(draw):
    """A world, one rank's batch size and examples for at least one step."""
    world, batch_size = draw(st.sampled_from(WORLDS)), draw(st.integers(1, 5))
    examples = world * batch_size + draw(st.integers(0, 100))
    return world, {"examples": examples, "seed": draw(st.integers(0, 2**32))}, batch_size


@given(task=tasks(), step=st.integers(0, 300))
def test_all_ranks_batches_are_the_one_workers_batch(task, step):
    world, shared, batch_size = task
    alone = Batches(batch_size=world * batch_size, **shared)
    ranks = [
        Batches(batch_size=batch_size, world=world, rank=rank, **shared) for rank in range(world)
    ]
    assert all(rank.steps_per_epoch == alone.steps_per_epoch for rank in ranks)
    assert all(rank.epoch(step) == alone.epoch(step) for rank in ranks)
    batches = [rank.indices(step) for rank in ranks]
    assert all(batch.shape == (batch_size,) for batch in batches)
    assert torch.equal(torch.cat(batches), alone.indices(step))


@given(task=tasks(), epoch=st.integers(0, 3))
def test_an_epoch_has_no_example_twice_and_drops_less_than_a_step(task, epoch):
    world, shared, batch_size = task
    ranks = [
        Batches(batch_size=batch_size, world=world, rank=rank, **shared) for rank in range(world)
    ]
    steps = range(epoch * ranks[0].steps_per_epoch, (epoch + 1) * ranks[0].steps_per_epoch)
    assert {ranks[0].epoch(step) for step in steps} == {epoch}
    used = torch.cat([rank.indices(step) for rank in ranks for step in steps]).tolist()
    assert len(set(used)) == len(used)
    assert set(used) <= set(range(shared["examples"]))
    assert 0 <= shared["examples"] - len(used) < world * batch_size


def test_epochs_and_seeds_have_orders_of_their_own():
    batches = Batches(examples=100, batch_size=50)
    orders = {tuple(batches.indices(step).tolist()) for step in (0, 2, 4)}
    orders.add(tuple(Batches(examples=100, batch_size=50, seed=1).indices(0).tolist()))
    assert len(orders) == 4
    assert torch.equal(batches.indices(2), Batches(examples=100, batch_size=50).indices(2))


def test_changing_a_batch_does_not_change_the_next():
    batches = Batches(examples=10, batch_size=10)
    batches.indices(0).zero_()
    assert sorted(batches.indices(0).tolist()) == list(range(10))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"batch_size": 0}, "a batch has at least one example, got 0"),
        ({"batch_size": 1, "world": 2, "rank": 2}, "rank 2 is none of a world of 2"),
        ({"batch_size": 1, "world": 0}, "rank 0 is none of a world of 0"),
        ({"batch_size": 1, "seed": -1}, "a seed is not negative, got -1"),
        ({"batch_size": 4, "world": 3}, "10 examples are too few for 3 batches of 4; take smaller"),
    ],
)
def test_batches_that_cannot_be(options, complaint):
    with pytest.raises(RequestError, match=complaint):
        Batches(examples=10, **options)
