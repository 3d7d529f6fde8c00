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
        """Number of parameters of the embedding. The head is tied to it, so the last stage has as many."""
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
    hidden = _WIDTHS[bisect_right(_NEXT_WIDTH, numel)]
    layers = (numel - VOCAB_SIZE * hidden) / (12 * hidden**2 + 13 * hidden)
    step = 8 if layers >= 48 else 2
    num_layers = max(step, step * round(layers / step))
    heads = 160 if hidden == 25600 else hidden // _HEAD_WIDTH
    return Shape(num_layers, hidden, heads, sequence, name=f"GPT shape, {num_layers} x {hidden}")


def shape_of(model: ModelCost, sequence: int) -> Shape:
    """The shape of a planner model, with equal blocks. Heads are assumed to have width 128, or 64 in narrow models."""
    heads = max(1, model.attention_width // (_HEAD_WIDTH if model.attention_width >= 2048 else 64))
    layer_numel = round(sum(model.blocks) / len(model.blocks))
    return Shape(len(model.blocks), model.hidden, heads, sequence, model.vocab_size, model.name, layer_numel)
