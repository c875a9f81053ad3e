"""Small models for real training. Each takes a batch and returns what ``cross_entropy`` takes."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn
from torch.nn.functional import linear, pad, relu, scaled_dot_product_attention

# GPT-2's; with torch's own the scores of a tied head would begin far too large.
EMBEDDING_STD = 0.02


class SmallCNN(nn.Sequential):
    """A model of two convolutions and two linear layers, for images of 28 x 28.

    Args:
        channels: channels of an image.
        classes: how many scores it returns.
        width: channels of the first convolution; the second has twice as many.

    Examples:
        >>> gradweave.workloads.SmallCNN()(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(self, channels: int = 1, classes: int = 10, *, width: int = 16) -> None:
        super().__init__(
            OrderedDict(
                conv1=nn.Conv2d(channels, width, 3, padding=1),
                relu1=nn.ReLU(),
                pool1=nn.MaxPool2d(2),
                conv2=nn.Conv2d(width, 2 * width, 3, padding=1),
                relu2=nn.ReLU(),
                pool2=nn.MaxPool2d(2),
                flatten=nn.Flatten(),
                hidden=nn.Linear(2 * width * 7 * 7, 128),
                relu3=nn.ReLU(),
                head=nn.Linear(128, classes),
            )
        )


class BasicBlock(nn.Module):
    """Two convolutions beside a shortcut without parameters, as He et al. have it for CIFAR-10."""

    def __init__(self, before: int, width: int, *, stride: int, normalization: bool) -> None:
        super().__init__()
        self.conv1 = _convolution(before, width, stride=stride, normalization=normalization)
        self.conv2 = _convolution(width, width, stride=1, normalization=normalization)
        self.stride = stride
        self.new_channels = width - before

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        shortcut = features[:, :, :: self.stride, :: self.stride]
        shortcut = pad(shortcut, [0, 0, 0, 0, 0, self.new_channels])
        return relu(self.conv2(relu(self.conv1(features))) + shortcut)


def resnet20(
    channels: int = 3, classes: int = 10, *, width: int = 16, normalization: bool = True
) -> nn.Sequential:
    """Return the ResNet-20 of He et al., 2015, section 4.2, for images of about 32 x 32.

    It has three stages of three blocks.

    Args:
        channels: channels of an image.
        classes: how many scores it returns.
        width: channels of the first stage; the others have two and four times as many channels.
        normalization: batch normalisation sees one worker's images, so with it training on several
            workers is not the training on one that has all of their images; without it, it is.

    Examples:
        >>> gradweave.workloads.resnet20()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    model = nn.Sequential(
        OrderedDict(
            stem=_convolution(channels, width, stride=1, normalization=normalization),
            relu=nn.ReLU(),
            stage1=_stage(width, width, stride=1, normalization=normalization),
            stage2=_stage(width, 2 * width, stride=2, normalization=normalization),
            stage3=_stage(2 * width, 4 * width, stride=2, normalization=normalization),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            head=nn.Linear(4 * width, classes),
        )
    )
    _initialize(model)
    if not normalization:
        _calm_blocks(model)
    return model


def _stage(before: int, width: int, *, stride: int, normalization: bool) -> nn.Sequential:
    return nn.Sequential(
        BasicBlock(before, width, stride=stride, normalization=normalization),
        BasicBlock(width, width, stride=1, normalization=normalization),
        BasicBlock(width, width, stride=1, normalization=normalization),
    )


def _convolution(before: int, width: int, *, stride: int, normalization: bool) -> nn.Sequential:
    conv = nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=not normalization)
    return nn.Sequential(conv, nn.BatchNorm2d(width)) if normalization else nn.Sequential(conv)


def _initialize(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def _calm_blocks(model: nn.Module) -> None:
    """Make the branches of blocks smaller, so that variance stays near the input's.

    Nine blocks would double it nine times. Fixup initialisation (Zhang et al., 2019) divides by the
    square root of the number of blocks.
    """
    blocks = [module for module in model.modules() if isinstance(module, BasicBlock)]
    with torch.no_grad():
        for block in blocks:
            for parameter in block.conv2.parameters():
                parameter.div_(len(blocks) ** 0.5)


def vgg16(channels: int = 3, classes: int = 10, *, width: int = 64) -> nn.Sequential:
    """Return VGG-16 as it is used for 32 x 32: thirteen normalised convolutions, one linear layer.

    Args:
        channels: channels of an image.
        classes: how many scores it returns.
        width: channels of the first convolutions; the last ones have eight times as many.

    Examples:
        >>> gradweave.workloads.vgg16(width=8)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    layers: list[nn.Module] = []
    before = channels
    for factor, convolutions in ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3)):
        for _ in range(convolutions):
            after = factor * width
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
            before = after
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(
        OrderedDict(
            features=nn.Sequential(*layers),
            flatten=nn.Flatten(),
            head=nn.Linear(before, classes),
        )
    )


class CharLSTM(nn.Module):
    """A model that tells the next character from those before it in its window, by two LSTM layers.

    It takes codes as (window, place) and returns scores as (window, character, place).

    Args:
        vocabulary: how many characters there are.
        width: numbers in an embedding and in each layer's state.

    Examples:
        >>> gradweave.workloads.CharLSTM(vocabulary=30)(torch.zeros(2, 16, dtype=torch.int64)).shape
        torch.Size([2, 30, 16])
    """

    def __init__(self, vocabulary: int = 65, *, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the scores of the characters that follow."""
        hidden, _ = self.lstm(self.embedding(codes))
        scores: torch.Tensor = self.head(hidden)
        return scores.transpose(1, 2)


class TransformerBlock(nn.Module):
    """Attention to what came before, then two linear layers, each beside a shortcut (GPT-2)."""

    def __init__(self, width: int, *, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.projection = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attended(self._attention(self.before_attention(hidden)))
        mlp: torch.Tensor = self.mlp(self.before_mlp(hidden))
        return hidden + mlp

    def _attention(self, hidden: torch.Tensor) -> torch.Tensor:
        # (window, place, width) to three of (window, head, place, width of a head), and back.
        query, key, value = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.projection(hidden).chunk(3, dim=2)
        )
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class CharTransformer(nn.Module):
    """A model that tells the next character from those before it in its window, by a small GPT-2.

    It takes codes as (window, place), at most ``window`` of them, and returns scores as (window,
    character, place). As in GPT-2 the head is the embedding, whose gradient is complete last and
    which forward needs first.

    Args:
        vocabulary: how many characters there are.
        width: numbers in an embedding; a multiple of ``heads``.
        layers: how many blocks of attention and linear layers it has.
        heads: how many heads each attention has.
        window: the longest window, in characters.

    Examples:
        >>> small = gradweave.workloads.CharTransformer(vocabulary=30, width=24, layers=1)
        >>> small(torch.zeros(2, 16, dtype=torch.int64)).shape
        torch.Size([2, 30, 16])
    """

    def __init__(
        self,
        vocabulary: int = 65,
        *,
        width: int = 192,
        layers: int = 6,
        heads: int = 6,
        window: int = 128,
    ) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(window, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads=heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.characters, self.places):
            nn.init.normal_(embedding.weight, std=EMBEDDING_STD)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the scores of the characters that follow."""
        places = torch.arange(codes.shape[1], device=codes.device)
        hidden = self.norm(self.blocks(self.characters(codes) + self.places(places)))
        return linear(hidden, self.characters.weight).transpose(1, 2)


MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "small-cnn": SmallCNN,
    "resnet20": resnet20,
    "resnet20-grey": partial(resnet20, 1),
    "vgg16": vgg16,
    "char-lstm": CharLSTM,
    "char-transformer": CharTransformer,
}
