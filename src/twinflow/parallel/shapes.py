"""The shape of a transformer for layouts on many GPUs: layers, width, heads, tokens, vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from twinflow.errors import invalid_value
from twinflow.planner.models import ModelCost

# Widths of published large GPT shapes, each with the smallest number of parameters for which it is used.
_WIDTHS: Final = (
    (0.0, 1024),
    (0.7e9, 1536),
    (2e9, 3072),
    (5e9, 4096),
    (12e9, 6144),
    (25e9, 8192),
    (60e9, 10240),
    (100e9, 12288),
    (250e9, 16384),
    (420e9, 20480),
    (800e9, 25600),
)
_HEAD_WIDTH: Final = 128
VOCAB_SIZE: Final = 51_200  # vocabulary of GPT-2, rounded up to a number that tensor ranks divide


@dataclass(frozen=True)
class Shape:
    """Equal layers between an embedding and a head that is tied to the embedding."""

    num_layers: int
    hidden: int
    num_heads: int
    sequence: int  # tokens in a sequence
    vocab_size: int = VOCAB_SIZE
    name: str = "GPT shape"
    layer_numel: int = 0  # 0: that of a GPT, 12 h^2 + 13 h
    keeps_scores: bool = False  # attention keeps its score matrices, as without fused kernels

    def __post_init__(self) -> None:
        for key in ("num_layers", "hidden", "num_heads", "sequence", "vocab_size"):
            if getattr(self, key) < 1:
                raise invalid_value(key, getattr(self, key), "a whole number >= 1")
        if not self.layer_numel:
            object.__setattr__(self, "layer_numel", 12 * self.hidden**2 + 13 * self.hidden)

    @property
    def numel(self) -> int:
        """Number of parameters. The tied head is not counted again."""
        return self.num_layers * self.layer_numel + self.end_numel

    @property
    def end_numel(self) -> int:
        """Parameters of the embedding."""
        return self.vocab_size * self.hidden

    def layer_flops(self, num_tokens: int) -> tuple[float, float]:
        """FLOPs of a layer's forward: matrix products with weights, and attention."""
        return 2.0 * self.layer_numel * num_tokens, 4.0 * self.sequence * self.hidden * num_tokens

    def model_flops(self, num_tokens: int) -> float:
        """FLOPs of forward and backward of the whole model, without recomputation."""
        products, attention = self.layer_flops(num_tokens)
        return 3.0 * (self.num_layers * (products + attention) + 2.0 * self.end_numel * num_tokens)


def shape_like(numel: float, sequence: int = 2048) -> Shape:
    """A GPT shape with about `numel` parameters: a published width and the depth for it. The depth of deep models is a
    multiple of 8."""
    hidden = max(pair for pair in _WIDTHS if numel >= pair[0])[1]
    layers = (numel - VOCAB_SIZE * hidden) / (12 * hidden**2 + 13 * hidden)
    step = 8 if layers >= 48 else 2
    num_layers = max(step, step * round(layers / step))
    heads = hidden // (_HEAD_WIDTH if hidden % _HEAD_WIDTH == 0 else 64)
    heads = 160 if hidden == 25600 else heads
    return Shape(num_layers, hidden, heads, sequence, name=f"GPT shape, {num_layers} x {hidden}")


def shape_of(model: ModelCost, sequence: int) -> Shape:
    """The shape of a planner model, with equal blocks. Heads are assumed to have width 128, or 64 in narrow models."""
    heads = max(1, model.attention_width // (_HEAD_WIDTH if model.attention_width >= 2048 else 64))
    num_layers = len(model.blocks)
    return Shape(
        num_layers=num_layers,
        hidden=model.hidden,
        num_heads=heads,
        sequence=sequence,
        vocab_size=model.vocab_size,
        name=model.name,
        layer_numel=round(sum(model.blocks) / num_layers),
    )
