# SPDX-License-Identifier: Apache-2.0
"""The shape of a transformer for predictions on many GPUs: layers, width, heads, tokens, vocabulary."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Final

from twinflow.errors import invalid_value
from twinflow.planner.models import ModelCost

# Widths of published large GPT shapes, and the numbers of parameters from which the next width is used.
_WIDTHS: Final = (1024, 1536, 3072, 4096, 6144, 8192, 10240, 12288, 16384, 20480, 25600)
_NEXT_WIDTH: Final = (0.7e9, 2e9, 5e9, 12e9, 25e9, 60e9, 100e9, 250e9, 420e9, 800e9)
_HEAD_WIDTH: Final = 128
VOCAB_SIZE: Final = 51_200  # vocabulary of GPT-2, rounded up to a number that tensor ranks divide


@dataclass(frozen=True)
class Shape:
    """Equal layers between an embedding and a head of the same size."""

    num_layers: int
    hidden: int
    num_heads: int
    sequence: int  # tokens in a sequence
    vocab_size: int = VOCAB_SIZE
    name: str = "GPT shape"
    layer_numel: int = 0  # 0: that of a GPT, 12 h^2 + 13 h
    keeps_scores: bool = False  # attention keeps its score matrices, as without fused kernels
    tied: bool = True  # the head has the weight of the embedding
    num_kv_heads: int = 0  # heads of keys and values. 0: as many as heads
    inner: int = 0  # width of the MLP. 0: 4 h
    tensor_units: int = 0  # tensor ranks divide it. 1: they cannot split the model. 0: only the sizes above count
    joins_last: bool = False  # the last layer is on the stage of the head
    idle_numel: int = 0  # elements of a layer in experts that a token does not use

    def __post_init__(self) -> None:
        for key in ("num_layers", "hidden", "num_heads", "sequence", "vocab_size"):
            if getattr(self, key) < 1:
                raise invalid_value(key, getattr(self, key), "a whole number >= 1")
        if not self.layer_numel:
            object.__setattr__(self, "layer_numel", 12 * self.hidden**2 + 13 * self.hidden)

    @property
    def numel(self) -> int:
        """Number of parameters. A tied head is not counted again."""
        return self.num_layers * self.layer_numel + self.ends_numel(True, True)

    @property
    def end_numel(self) -> int:
        """Number of parameters of the embedding. The head has as many."""
        return self.vocab_size * self.hidden

    def ends_numel(self, has_embedding: bool, has_head: bool) -> int:
        """Number of parameters of embedding and head on a rank. A rank with both has a tied weight once."""
        num_ends = has_embedding + has_head
        return self.end_numel * (min(1, num_ends) if self.tied else num_ends)

    @property
    def tensor_sizes(self) -> dict[str, int]:
        """The sizes that the number of tensor ranks must divide: the engine splits evenly, and never inside a head."""
        return {
            "the number of attention heads": self.num_heads,
            "the number of heads of keys and values": self.num_kv_heads or self.num_heads,
            "the width of the MLP": self.inner or 4 * self.hidden,
            "the size of the vocabulary": self.vocab_size if self.vocab_size > 1 else 0,  # 1: no embedding
            "the common divisor of all sizes that the model's tensor-parallel plan splits": self.tensor_units,
        }

    def layer_flops(self, num_tokens: int) -> tuple[float, float]:
        """FLOPs of a layer's forward: matrix products with weights, and attention."""
        return 2.0 * (self.layer_numel - self.idle_numel) * num_tokens, 4.0 * self.sequence * self.hidden * num_tokens

    def model_flops(self, num_tokens: int) -> float:
        """FLOPs of forward and backward of the whole model, without recomputation."""
        products, attention = self.layer_flops(num_tokens)
        return 3.0 * (self.num_layers * (products + attention) + 2.0 * self.end_numel * num_tokens)


def shape_like(numel: float, sequence: int = 2048) -> Shape:
    """A GPT shape with about `numel` parameters: a published width and the depth for it. The depth of deep models is a
    multiple of 8."""
    hidden = _WIDTHS[bisect_right(_NEXT_WIDTH, numel)]
    layers = (numel - VOCAB_SIZE * hidden) / (12 * hidden**2 + 13 * hidden)
    step = 8 if layers >= 48 else 2
    num_layers = max(step, step * round(layers / step))
    heads = 160 if hidden == 25600 else hidden // _HEAD_WIDTH
    return Shape(num_layers, hidden, heads, sequence, name=f"GPT shape, {num_layers} x {hidden}")


def shape_of(model: ModelCost, sequence: int) -> Shape:
    """The shape of a planner model, with equal blocks. If the number of heads is not known, heads are assumed to have
    width 128, or 64 in narrow models, and the name says so.
    """
    name, heads = model.name, model.num_heads
    if not heads:
        width = _HEAD_WIDTH if model.attention_width >= 2048 else 64
        heads = max(1, model.attention_width // width)
        name += f" (assuming heads of width {width})"
    return Shape(
        num_layers=len(model.blocks),
        hidden=model.hidden,
        num_heads=heads,
        sequence=sequence,
        vocab_size=model.vocab_size,
        name=name,
        layer_numel=round(sum(model.blocks) / len(model.blocks)),
        tied=model.head_numel < model.head_products,  # the parameters of a tied head are those of the embedding
        num_kv_heads=model.num_kv_heads,
        inner=model.inner,
        tensor_units=model.tensor_units,
        joins_last=model.joins_last,
        idle_numel=round(sum(model.idle) / len(model.blocks)),
    )
