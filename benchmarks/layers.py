"""Layers of today's models as make_presets.py needs them: exact tensors, and what they compute.

Names and shapes are those of the published checkpoints (Hugging Face's classes; torchvision's for
the vision transformer), so the numbers of parameters are the published ones. A layer's
multiply-accumulates are for one sample: for a model of text, one sequence.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer with its own parameters, if any, and its multiply-accumulates for one sample."""

    parameters: tuple[tuple[str, Shape], ...]  # name and shape, in declaration order
    macs: int


def bert(*, layers: int, width: int, tokens: int) -> list[Layer]:
    """Return the layers of BertModel with the uncased vocabulary.

    The paper is "BERT: Pre-training of Deep Bidirectional Transformers".
    """
    vocabulary, positions, types = 30_522, 512, 2
    found = [
        Layer((("embeddings.word_embeddings.weight", (vocabulary, width)),), 0),
        Layer((("embeddings.position_embeddings.weight", (positions, width)),), 0),
        Layer((("embeddings.token_type_embeddings.weight", (types, width)),), 0),
        _norm("embeddings.LayerNorm", width, tokens),
    ]
    for number in range(layers):
        name = f"encoder.layer.{number}"
        attention = f"{name}.attention"
        found += [
            _linear(f"{attention}.self.query", width, width, tokens),
            _linear(f"{attention}.self.key", width, width, tokens),
            _linear(
                f"{attention}.self.value", width, width, tokens, more=_attention(tokens, width)
            ),
            _linear(f"{attention}.output.dense", width, width, tokens),
            _norm(f"{attention}.output.LayerNorm", width, tokens),
            _linear(f"{name}.intermediate.dense", width, 4 * width, tokens),
            _linear(f"{name}.output.dense", 4 * width, width, tokens),
            _norm(f"{name}.output.LayerNorm", width, tokens),
        ]
    return [*found, _linear("pooler.dense", width, width, 1)]


def gpt2(*, layers: int, width: int, tokens: int) -> list[Layer]:
    """Return the layers of GPT2LMHeadModel.

    The head has the embedding's weights, so it computes and has none of its own.
    """
    vocabulary, positions = 50_257, 1024
    found = [
        Layer((("transformer.wte.weight", (vocabulary, width)),), 0),
        Layer((("transformer.wpe.weight", (positions, width)),), 0),
    ]
    for number in range(layers):
        name = f"transformer.h.{number}"
        found += [
            _norm(f"{name}.ln_1", width, tokens),
            _conv1d(
                f"{name}.attn.c_attn", width, 3 * width, tokens, more=_attention(tokens, width)
            ),
            _conv1d(f"{name}.attn.c_proj", width, width, tokens),
            _norm(f"{name}.ln_2", width, tokens),
            _conv1d(f"{name}.mlp.c_fc", width, 4 * width, tokens),
            _conv1d(f"{name}.mlp.c_proj", 4 * width, width, tokens),
        ]
    return [
        *found,
        _norm("transformer.ln_f", width, tokens),
        Layer((), tokens * width * vocabulary),
    ]


def vit(*, layers: int, width: int, image: int, patch: int) -> list[Layer]:
    """Return the layers of torchvision's VisionTransformer for a thousand classes."""
    patches = (image // patch) ** 2
    tokens = 1 + patches
    kernel = (width, 3, patch, patch)
    found = [
        Layer((("class_token", (1, 1, width)),), 0),
        Layer((("conv_proj.weight", kernel), ("conv_proj.bias", (width,))), patches * prod(kernel)),
        Layer((("encoder.pos_embedding", (1, tokens, width)),), tokens * width),
    ]
    for number in range(layers):
        name = f"encoder.layers.encoder_layer_{number}"
        attention = f"{name}.self_attention"
        projected = tokens * 3 * width * width + _attention(tokens, width)
        found += [
            _norm(f"{name}.ln_1", width, tokens),
            Layer(
                (
                    (f"{attention}.in_proj_weight", (3 * width, width)),
                    (f"{attention}.in_proj_bias", (3 * width,)),
                ),
                projected,
            ),
            _linear(f"{attention}.out_proj", width, width, tokens),
            _norm(f"{name}.ln_2", width, tokens),
            _linear(f"{name}.mlp.0", width, 4 * width, tokens),
            _linear(f"{name}.mlp.3", 4 * width, width, tokens),
        ]
    head = _linear("heads.head", width, 1000, 1)
    return [*found, _norm("encoder.ln", width, tokens), head]


def llama(
    *, layers: int, width: int, heads: int, shared_heads: int, hidden: int, tokens: int
) -> list[Layer]:
    """Return the layers of LlamaForCausalLM, with a tied head as the smaller ones have it."""
    vocabulary = 128_256
    narrow = width * shared_heads // heads
    found = [Layer((("model.embed_tokens.weight", (vocabulary, width)),), 0)]
    for number in range(layers):
        name = f"model.layers.{number}"
        found += [
            _scale(f"{name}.input_layernorm", width, tokens),
            _matrix(f"{name}.self_attn.q_proj", width, width, tokens),
            _matrix(f"{name}.self_attn.k_proj", width, narrow, tokens),
            _matrix(
                f"{name}.self_attn.v_proj", width, narrow, tokens, more=_attention(tokens, width)
            ),
            _matrix(f"{name}.self_attn.o_proj", width, width, tokens),
            _scale(f"{name}.post_attention_layernorm", width, tokens),
            _matrix(f"{name}.mlp.gate_proj", width, hidden, tokens),
            _matrix(f"{name}.mlp.up_proj", width, hidden, tokens),
            _matrix(f"{name}.mlp.down_proj", hidden, width, tokens),
        ]
    return [*found, _scale("model.norm", width, tokens), Layer((), tokens * width * vocabulary)]


def recommender(*, rows: int, width: int, tables: int) -> list[Layer]:
    """Return layers like those of "Deep Learning Recommendation Model" (2019).

    There are one large table, small ones and two MLPs. It is no published checkpoint. Every sample
    looks up one row of each table.
    """
    dense = 13  # as many numbers has a sample of Criteo's data, besides its categories
    small_rows = 10_000
    found = list(_mlp("bottom", (dense, 512, 256, width)))
    sizes = [rows, *[small_rows] * (tables - 1)]
    found += [
        Layer(((f"tables.{number}.weight", (size, width)),), width)
        for number, size in enumerate(sizes)
    ]
    vectors = tables + 1
    pairs = vectors * (vectors - 1) // 2
    return [
        *found,
        Layer((), vectors * vectors * width),
        *_mlp("top", (pairs + width, 1024, 512, 1)),
    ]


def _mlp(name: str, widths: tuple[int, ...]) -> Iterator[Layer]:
    for number, (before, after) in enumerate(pairwise(widths)):
        yield _linear(f"{name}.{number}", before, after, 1)


def _attention(tokens: int, width: int) -> int:
    """Return the multiply-accumulates of scores and weighted sums.

    In backward both come before gradients of the projections.
    """
    return 2 * tokens * tokens * width


def _linear(name: str, before: int, after: int, tokens: int, *, more: int = 0) -> Layer:
    tensors = ((f"{name}.weight", (after, before)), (f"{name}.bias", (after,)))
    return Layer(tensors, tokens * before * after + more)


def _conv1d(name: str, before: int, after: int, tokens: int, *, more: int = 0) -> Layer:
    """Return a linear layer whose weights GPT-2 keeps the other way round."""
    tensors = ((f"{name}.weight", (before, after)), (f"{name}.bias", (after,)))
    return Layer(tensors, tokens * before * after + more)


def _matrix(name: str, before: int, after: int, tokens: int, *, more: int = 0) -> Layer:
    return Layer(((f"{name}.weight", (after, before)),), tokens * before * after + more)


def _norm(name: str, width: int, tokens: int) -> Layer:
    return Layer(((f"{name}.weight", (width,)), (f"{name}.bias", (width,))), tokens * width)


def _scale(name: str, width: int, tokens: int) -> Layer:
    return Layer(((f"{name}.weight", (width,)),), tokens * width)
