"""gTop-k, Tables VI and VII: the four models that the paper trains."""

from dataclasses import dataclass

from gradweave import load_trace

from .gtopk_exchange import DENSITY, METHODS, Method, exchange_s

# gTop-k, Fig. 10 and Table VII.
WORKERS = (4, 8, 16, 32)
LARGEST = WORKERS[-1]

# gTop-k, Table III: one lane of PCI Express, "maximum bandwidth of 250 MB/s".
PCIE_BYTES_PER_S = 250e6
MB = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What the paper prints about one model, and how large its gradients are."""

    name: str
    preset: str
    batch: int  # Table VI
    compute_s: float  # Table VI, one GPU
    paper_images_per_s: tuple[int, int, int]  # Table VII: dense, top-k, gTop-k on 32 GPUs
    paper_ratios: tuple[str, str]  # Table VII, as printed: gTop-k over dense and over top-k

    @property
    def parameters(self) -> int:
        return sum(tensor.elements for tensor in load_trace(self.preset).tensors)

    @property
    def gradient_bytes(self) -> int:
        return 4 * self.parameters

    def exchange_s(self, method: Method, workers: int) -> float:
        return exchange_s(method, nbytes=self.gradient_bytes, workers=workers)

    def efficiency(self, method: Method, workers: int) -> float:
        return self.compute_s / (self.compute_s + self.exchange_s(method, workers))

    def images_per_s(self, method: Method) -> float:
        """Return the images per second that are predicted on 32 workers."""
        return LARGEST * self.batch / (self.compute_s + self.exchange_s(method, LARGEST))

    def paper_images(self, method: Method) -> int:
        return dict(zip(METHODS, self.paper_images_per_s, strict=True))[method]

    def paper_efficiency(self, method: Method) -> float:
        """Return the paper's efficiency: Table VII over 32 times Table VI."""
        return self.paper_images(method) * self.compute_s / (LARGEST * self.batch)

    def paper_iteration_s(self, method: Method) -> float:
        return LARGEST * self.batch / self.paper_images(method)

    def copied_s(self, method: Method) -> float:
        """Return the time to copy messages out of the GPU and into it over one lane of PCIe."""
        pairs = 2 * DENSITY * self.gradient_bytes
        nbytes = {
            "dense": 2 * self.gradient_bytes,
            "top-k": pairs + LARGEST * pairs,
            "gTop-k": 2 * pairs,
        }[method]
        return nbytes / PCIE_BYTES_PER_S

    def unexplained_s(self, method: Method) -> float:
        known_s = self.compute_s + self.exchange_s(method, LARGEST) + self.copied_s(method)
        return self.paper_iteration_s(method) - known_s

    def unexplained_s_per_mb(self, method: Method) -> float:
        return self.unexplained_s(method) / (self.gradient_bytes / MB)


MODELS = (
    Model(
        name="VGG-16",
        preset="vgg16",
        batch=128,
        compute_s=0.097,
        paper_images_per_s=(403, 2016, 3020),
        paper_ratios=("7.5x", "1.5x"),
    ),
    Model(
        name="ResNet-20",
        preset="resnet20",
        batch=128,
        compute_s=0.146,
        paper_images_per_s=(9212, 22272, 25280),
        paper_ratios=("2.7x", "1.1x"),
    ),
    Model(
        name="AlexNet",
        preset="alexnet",
        batch=64,
        compute_s=0.369,
        paper_images_per_s=(39, 296, 505),
        paper_ratios=("12.8x", "1.7x"),
    ),
    Model(
        name="ResNet-50",
        preset="resnet50",
        batch=256,
        compute_s=4.842,
        paper_images_per_s=(343, 978, 1251),
        paper_ratios=("3.65x", "1.3x"),
    ),
)
