"""What there is to train without a download: small models, small data sets, replayed traces."""

from gradweave._src.workloads.datasets import (
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
from gradweave._src.workloads.models import (
    CharLSTM,
    CharTransformer,
    SmallCNN,
    resnet20,
    vgg16,
)
from gradweave._src.workloads.replay import GroupedReplay, Replay, Timer

__all__ = [
    "Batches",
    "CharLSTM",
    "CharTransformer",
    "GroupedReplay",
    "Images",
    "Replay",
    "Scale",
    "SmallCNN",
    "Text",
    "Timer",
    "fashion_mnist_subset",
    "flipped_and_cropped",
    "load_cifar10",
    "load_idx",
    "load_text",
    "resnet20",
    "vgg16",
]
