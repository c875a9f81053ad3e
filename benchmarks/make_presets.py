"""Write the shipped traces and networks: ``make presets``.

Traces. Tensor sizes are exact: the papers' models are built by pytorchcv without allocating
anything, today's are listed in layers.py. No public trace of these models was found, so their times
are *estimated*: an iteration takes as long as its multiply-accumulates take at the speed of the one
measured trace, or as long as a paper says, forward : backward = 1 : 2, and a layer's share is its
share of the multiply-accumulates. Gradients of a weight that is used twice, such as an embedding
that is the head, too, are complete when the earlier use has had its backward.

Networks. The numbers that the papers print.

``googlenet-k80`` and ``mpi-10gbe-measured`` are measurements: data, not computed here.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import layers
import torch
from layers import Layer
from pytorchcv.model_provider import get_model
from torch import nn

from gradweave import CollectiveCost, Network, Tensor, Trace, load_trace
from gradweave._src import files
from gradweave._src.costs import Level, Line, Link, Links, flat

PRESETS = Path(__file__).parents[1] / "src" / "gradweave" / "_src" / "presets"

# googlenet-k80: 1.43 G multiply-accumulates forward, 64 images, backward 205.3 ms and forward half
# of it. A multiply-accumulate is two operations; backward does twice the work of forward.
GOOGLENET_MACS = 1.43e9


def k80_flops() -> float:
    measured = load_trace("googlenet-k80")
    return 2 * 3 * GOOGLENET_MACS * measured.batch_size / measured.compute_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What to build, and what is known about how fast it trains."""

    name: str
    pytorchcv: str | None = None  # None: built below
    listed: Callable[[], list[Layer]] | None = None  # instead of being built
    image: int = 224
    batch_size: int
    bytes_per_element: int = 4
    iteration_s: float | None = None  # printed by a paper; None: from the speed of googlenet-k80


GTOPK = "gTop-k paper, Table VI, P102-100"
MODELS = [
    Model(name="resnet50", pytorchcv="resnet50", batch_size=32),
    Model(name="resnet152", pytorchcv="resnet152", batch_size=128),
    Model(name="densenet161", pytorchcv="densenet161", batch_size=64),
    Model(name="densenet201", pytorchcv="densenet201", batch_size=64),
    Model(name="inceptionv4", pytorchcv="inceptionv4", batch_size=128),
    Model(name="alexnet", pytorchcv="alexnet", batch_size=64, iteration_s=0.369),
    Model(
        name="resnet20", pytorchcv="resnet20_cifar10", image=32, batch_size=128, iteration_s=0.146
    ),
    Model(name="vgg16", image=32, batch_size=128, iteration_s=0.097),
    Model(
        name="bert-base",
        listed=partial(layers.bert, layers=12, width=768, tokens=128),
        batch_size=32,
    ),
    Model(
        name="bert-large",
        listed=partial(layers.bert, layers=24, width=1024, tokens=128),
        batch_size=32,
    ),
    Model(
        name="gpt2", listed=partial(layers.gpt2, layers=12, width=768, tokens=1024), batch_size=8
    ),
    Model(
        name="vit-b16",
        listed=partial(layers.vit, layers=12, width=768, image=224, patch=16),
        batch_size=64,
    ),
    Model(
        name="llama-1b",
        listed=partial(
            layers.llama,
            layers=16,
            width=2048,
            heads=32,
            shared_heads=8,
            hidden=8192,
            tokens=1024,
        ),
        batch_size=4,
        bytes_per_element=2,
    ),
    Model(
        name="recommender",
        listed=partial(layers.recommender, rows=1_000_000, width=64, tables=8),
        batch_size=2048,
    ),
]


def estimated_trace(model: Model) -> Trace:
    found = layers_in_forward_order(model) if model.listed is None else model.listed()
    macs = sum(layer.macs for layer in found)
    if model.iteration_s is None:
        iteration_s = 2 * 3 * macs * model.batch_size / k80_flops()
        total = f"{macs / 1e9:.2f} G multiply-accumulates at the speed of googlenet-k80"
    else:
        iteration_s = model.iteration_s
        total = f"iteration time of the {GTOPK}"
    s_per_mac = iteration_s / 3 / macs
    tensors, ready_s, forward_macs = [], 0.0, 0
    for layer in reversed(found):
        ready_s += 2 * layer.macs * s_per_mac
        forward_macs += layer.macs  # with that of layers behind it that have no parameters
        for place, (name, shape) in enumerate(reversed(layer.parameters)):
            tensors.append(
                Tensor(
                    name=name,
                    elements=prod(shape),
                    bytes_per_element=model.bytes_per_element,
                    ready_s=round(ready_s, 9),
                    forward_s=round(forward_macs * s_per_mac, 9) if place == 0 else 0.0,
                    shape=shape,
                )
            )
            forward_macs = 0
    return Trace(
        name=model.name,
        origin="estimated",
        source=f"{total}, spread over layers by their share, forward : backward = 1 : 2",
        batch_size=model.batch_size,
        tensors=tuple(tensors),
    )


def layers_in_forward_order(model: Model) -> list[Layer]:
    """Return the layers as a forward pass over shapes alone meets them."""
    found: list[Layer] = []
    with torch.device("meta"):
        module = build(model)
        for name, part in module.named_modules():
            if list(part.parameters(recurse=False)):
                part.register_forward_hook(_recorder(name, found))
        module.eval()(torch.zeros(1, 3, model.image, model.image))
    return found


def build(model: Model) -> nn.Module:
    if model.pytorchcv is None:
        return vgg16_for_small_images()
    module: nn.Module = get_model(model.pytorchcv)
    if model.name == "inceptionv4":  # made for 299 x 299; the journal trains it at 224 x 224
        features = module.get_submodule("features")
        features.register_module("final_pool", nn.AdaptiveAvgPool2d(1))
    return module


def vgg16_for_small_images() -> nn.Module:
    """Build VGG-16 as used on CIFAR-10: thirteen normalised convolutions and one linear layer."""
    parts: list[nn.Module] = []
    before = 3
    for width in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
        if width == 0:
            parts.append(nn.MaxPool2d(2))
            continue
        parts += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        before = width
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(512, 10))


def _recorder(name: str, found: list[Layer]):  # type: ignore[no-untyped-def]
    def record(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        del inputs
        own = module.named_parameters(recurse=False)
        parameters = tuple((f"{name}.{own_name}", tuple(p.shape)) for own_name, p in own)
        found.append(Layer(parameters, _macs(module, output)))

    return record


def _macs(module: nn.Module, output: torch.Tensor) -> int:
    match module:
        case nn.Conv2d() | nn.Linear():
            return output.numel() * module.weight[0].numel()
        case nn.BatchNorm2d():
            return output.numel()
    raise TypeError(f"no count of multiply-accumulates for {module}")


def gbit(rate: float) -> float:
    """Return the seconds per byte at so many Gbit/s."""
    return 8 / (rate * 1e9)


def gbytes(rate: float) -> float:
    """Return the seconds per byte at so many GB/s."""
    return 1 / (rate * 1e9)


def flat_network(name: str, *, latency_s: float, s_per_byte: float, source: str) -> Network:
    link = Link(latency_s=latency_s, s_per_byte=s_per_byte)
    return Network(name=name, source=source, links=flat(link))


def tiered_network(
    name: str, *, members: Iterable[int], s_per_byte: Iterable[float], latency_s: float, source: str
) -> Network:
    """Return a network of tiers, innermost first, with one latency as in BlueConnect's model."""
    levels = tuple(
        Level(members=count, link=Link(latency_s=latency_s, s_per_byte=per_byte))
        for count, per_byte in zip([*members, None], s_per_byte, strict=True)
    )
    return Network(name=name, source=source, links=Links(levels=levels))


def fitted_network(name: str, fits: dict[int, tuple[float, float]], *, source: str) -> Network:
    """Return a network of fitted lines (a, b), which are given by number of workers."""
    return Network(
        name=name,
        source=source,
        costs=tuple(
            CollectiveCost(
                operation="all-reduce",
                collective="native",
                workers=workers,
                cost=Line(startup_s=a, s_per_byte=b),
            )
            for workers, (a, b) in fits.items()
        ),
    )


# INFOCOM: 90.52, 271.56, 633.64 us for a ring of 2, 4, 8 nodes, which is 2 (N-1) alpha.
ETHERNET_10G_LATENCY_S = 45.26e-6
# The journal's 56 Gb InfiniBand fits have a = 42.04, 97.54, 235.8 us for 4, 8, 16 workers.
INFINIBAND_LATENCY_S = 7e-6
BLUECONNECT_LATENCY = "the paper prints no latency: {} us here"

NETWORKS = [
    flat_network(
        "k80-10gbe",
        latency_s=45.25e-6,
        s_per_byte=1.2 / (9 * 2**30 / 8),
        source="MG-WFBP authors' published simulator of the 10 GbE K80 cluster, gamma = 0",
    ),
    fitted_network(
        "cluster1-16xk80-10gbe",
        {16: (9.72e-4, 1.97e-9)},
        source="MG-WFBP journal, Fig. 4(a): 8 nodes, one K80 card (two GPUs) each, 10 GbE",
    ),
    fitted_network(
        "cluster2-16xv100-10gbe",
        {16: (9.08e-4, 7.4e-10)},
        source="MG-WFBP journal, Fig. 4(b): 4 nodes of 4 V100, 10 GbE",
    ),
    fitted_network(
        "cluster3-16xv100-56gbib",
        {16: (2.36e-4, 4.06e-10)},
        source="MG-WFBP journal, Fig. 4(c): 4 nodes of 4 V100, 56 Gb/s InfiniBand",
    ),
    fitted_network(
        "v100-56gbib-fits",
        {
            2: (2.555e-6, 9.84e-11),
            4: (4.204e-5, 2.059e-10),
            8: (9.754e-5, 3.057e-10),
            16: (2.358e-4, 4.059e-10),
        },
        source="MG-WFBP authors' table of fits, 56 Gb/s InfiniBand",
    ),
    fitted_network(
        "v100-10gbe-fits",
        {8: (5.230e-4, 8.571e-10), 16: (9.081e-4, 7.396e-10)},
        source="MG-WFBP authors' table of fits, 10 GbE",
    ),
    flat_network(
        "gtopk-1gbe",
        latency_s=0.436e-3,
        s_per_byte=9e-9,
        source="gTop-k paper, Fig. 8: point to point on 1 GbE",
    ),
    tiered_network(
        "blueconnect-2x4-p100-pcie-10gbe",
        members=[4],
        s_per_byte=[gbytes(15.75), gbit(10)],
        latency_s=ETHERNET_10G_LATENCY_S,
        source="BlueConnect, Fig. 5(a): PCIe gen3 x16 at its nominal 15.75 GB/s inside, 10 GbE "
        "between; " + BLUECONNECT_LATENCY.format("45.26"),
    ),
    tiered_network(
        "blueconnect-2x4-p100-nvlink-100gbib",
        members=[4],
        s_per_byte=[gbytes(32), gbit(100)],
        latency_s=INFINIBAND_LATENCY_S,
        source="BlueConnect, Fig. 5(b): NVLink at 32 GB/s inside, 100 Gb/s InfiniBand between; "
        + BLUECONNECT_LATENCY.format("7"),
    ),
    tiered_network(
        "blueconnect-48x4-p100-nvlink-100gbib",
        members=[4, 16],
        s_per_byte=[gbytes(32), gbit(100), gbit(16 * 100)],
        latency_s=INFINIBAND_LATENCY_S,
        source="BlueConnect, Fig. 6: NVLink at 32 GB/s inside, 100 Gb/s InfiniBand between nodes, "
        "16 nodes a rack, uplinks as wide as the nodes below them; "
        + BLUECONNECT_LATENCY.format("7"),
    ),
    tiered_network(
        "blueconnect-3x2x2-example",
        members=[3, 2],
        s_per_byte=[gbytes(32), gbit(100), gbit(200)],
        latency_s=INFINIBAND_LATENCY_S,
        source="BlueConnect, Figs. 1 and 4: 3 GPUs, 2 nodes, 2 switches; "
        + BLUECONNECT_LATENCY.format("7"),
    ),
    *(
        tiered_network(
            f"tiers-{rate}gbe",
            members=[4, 10, 25],
            # Ten hosts share half of what they could send, and so do 25 racks.
            s_per_byte=[gbytes(15.75), gbit(rate), gbit(5 * rate), gbit(62.5 * rate)],
            latency_s=15e-6,
            source=f"nominal: 4 GPUs a host on PCIe gen3 x16, {rate} Gbit/s a host, 10 hosts a "
            "rack, 25 racks a pod; uplinks of racks and pods half as wide as what is below; 15 us",
        )
        for rate in (1, 10, 100)
    ),
]


def main(folder: Path = PRESETS) -> None:
    for network in NETWORKS:
        files.write(folder / "networks" / f"{network.name}.json", network)
    for model in MODELS:
        trace = estimated_trace(model)
        files.write(folder / "traces" / f"{trace.name}.json", trace)
        parameters = sum(tensor.elements for tensor in trace.tensors)
        print(
            f"{trace.name:12} {len(trace.tensors):4} tensors {parameters:11,} parameters "
            f"{trace.compute_s:.3f} s",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
