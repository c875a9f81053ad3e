"""Cut the shipped subset out of Fashion-MNIST: ``python benchmarks/make_data.py FOLDER``.

FOLDER holds the four files that https://github.com/zalandoresearch/fashion-mnist offers. The subset
is the first so many images of each class, in the order in which they are there. No time stands in
what is written, so that writing it again changes nothing.
"""

import gzip
import sys
from pathlib import Path

import torch

from gradweave._src.workloads.datasets import CLASSES, Images, load_idx

DATA = Path(__file__).parents[1] / "src" / "gradweave" / "workloads" / "data"
PER_CLASS = {"train": 200, "t10k": 50}


def first_of_each_class(images: Images, count: int) -> Images:
    places = [(images.labels == label).nonzero().flatten()[:count] for label in range(CLASSES)]
    return images.take(torch.cat(places).sort().values)


def write_idx(path: Path, elements: torch.Tensor) -> None:
    unsigned_bytes = 0x08
    sizes = b"".join(size.to_bytes(4, "big") for size in elements.shape)
    header = bytes([0, 0, unsigned_bytes, elements.dim()]) + sizes
    content = header + elements.to(torch.uint8).numpy().tobytes()
    path.write_bytes(gzip.compress(content, mtime=0))


def main(source: Path, target: Path = DATA) -> None:
    for split, count in PER_CLASS.items():
        names = (f"{split}-images-idx3-ubyte.gz", f"{split}-labels-idx1-ubyte.gz")
        subset = first_of_each_class(load_idx(*(source / name for name in names)), count)
        for name, elements in zip(names, (subset.pixels[:, 0], subset.labels), strict=True):
            write_idx(target / name, elements)
            size = (target / name).stat().st_size
            print(f"{name:30} {len(subset):5} {size:9,} bytes", file=sys.stderr)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
