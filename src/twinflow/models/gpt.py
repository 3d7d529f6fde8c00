"""A GPT-2 style decoder, with the arithmetic of its size and cost beside it.

`count_params` and `flops_per_token` are plain arithmetic on a `GPTConfig`, so that a plan can be made for a model that
was never built; the tests hold them against the real module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twinflow.errors import bad_value

# GPT-2's standard deviation for every weight matrix and embedding at the start.
INIT_STD: Final = 0.02


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT."""

    vocab_size: int
    context: int
    num_layers: int
    hidden: int
    num_heads: int
    dropout: float = 0.0
    tied: bool = True  # the output head uses the token embedding's weight

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "num_layers", "hidden", "num_heads"):
            if getattr(self, name) < 1:
                raise bad_value(name, getattr(self, name), "a whole number >= 1")
        if self.hidden % self.num_heads:
            raise bad_value("hidden", self.hidden, f"a multiple of num_heads, which is {self.num_heads}")
        if not 0.0 <= self.dropout < 1.0:
            raise bad_value("dropout", self.dropout, "a number >= 0 and < 1")


# Byte-level shapes (256 symbols). `tiny` learns visibly within minutes on two cores; `small` wants a real machine.
PRESETS: Final[Mapping[str, GPTConfig]] = MappingProxyType(
    {
        "tiny": GPTConfig(vocab_size=256, context=128, num_layers=4, hidden=128, num_heads=4),
        "small": GPTConfig(vocab_size=256, context=256, num_layers=6, hidden=384, num_heads=6),
    }
)


def count_params(config: GPTConfig) -> int:
    """Number of trainable parameters of `GPT(config)`; a tied head counts once."""
    h = config.hidden
    norms = 2 * (2 * h)
    attention = (3 * h * h + 3 * h) + (h * h + h)
    mlp = (4 * h * h + 4 * h) + (4 * h * h + h)
    embeddings = (config.vocab_size + config.context) * h
    head = 0 if config.tied else config.vocab_size * h
    return config.num_layers * (norms + attention + mlp) + 2 * h + embeddings + head


def flops_per_token(config: GPTConfig) -> int:
    """Floating point operations of one forward and backward, for each token of a full context.

    Matrix products only: 2 a weight forward and 4 backward. Attention counts the whole square, masked half included,
    as is the custom when model FLOPs are compared.
    """
    h = config.hidden
    matmul_weights = config.num_layers * 12 * h * h + config.vocab_size * h
    attention_products = config.num_layers * 2 * config.context * h
    return 6 * (matmul_weights + attention_products)


class GPTOutput(NamedTuple):
    """What a forward returns."""

    logits: Tensor  # [batch, tokens, vocab]
    loss: Tensor | None  # mean cross entropy in nats, when targets were given


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Mix each position with the ones before it; `x` is [batch, tokens, hidden]."""
        batch, tokens, hidden = x.shape
        heads = (batch, tokens, self.num_heads, hidden // self.num_heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(x).split(hidden, dim=-1))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(batch, tokens, hidden))
        return mixed


class MLP(nn.Module):
    """The position-wise half of a block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, 4 * config.hidden)
        self.down = nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Widen, GELU, narrow."""
        y: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return y


class Block(nn.Module):
    """One pre-norm layer: attention and MLP, each added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Residual stream in, residual stream out."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x


class GPT(nn.Module):
    """Token and position embeddings, `blocks`, a final norm and a head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden)
        self.position_embedding = nn.Embedding(config.context, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        # The unit that offload moves is a block: keep them in one ModuleList, called one after the other.
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.token_embedding.weight
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """GPT-2's start: small normal weights, zero biases, residual projections scaled down by depth."""
        residual_std = INIT_STD / math.sqrt(2 * self.config.num_layers)
        for name, param in self.named_parameters():
            if param.dim() < 2:
                nn.init.constant_(param, 1.0 if name.endswith("norm.weight") else 0.0)
            else:
                # Each block adds two branches to the residual stream; this keeps its variance from growing with depth.
                adds_to_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
                nn.init.normal_(param, std=residual_std if adds_to_residual else INIT_STD)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> GPTOutput:
        """Logits for `tokens` [batch, tokens], and the loss against `targets` (same shape) when given."""
        num_tokens = tokens.shape[1]
        if num_tokens > self.config.context:
            allowed = f"at most the model's context, which is {self.config.context}"
            raise bad_value("length of tokens", num_tokens, allowed, "Shorten the input or build a longer model.")
        positions = torch.arange(num_tokens, device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return GPTOutput(logits, None)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))  # a loss in bf16 would have two digits
        return GPTOutput(logits, F.cross_entropy(wide.flatten(0, 1), targets.flatten()))
