"""A GPT-2 style decoder, with the arithmetic of its size and cost beside it.

`count_params`, `flops_per_token` and `activation_bytes` are plain arithmetic on a `GPTConfig`, so that a plan can be
made for a model that was never built; the tests hold them against the real module. Every layer initialises itself in
its `reset_parameters`, so that a model made on the meta device can be given its weights one layer at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from twinflow.errors import invalid_value
from twinflow.loss import LOSS_CHUNK, chunked_cross_entropy
from twinflow.models.stages import gpt_parts
from twinflow.parallel.specs import Part

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
    checkpoint_activations: bool = False  # keep only each block's input, and run its forward again in backward

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "num_layers", "hidden", "num_heads"):
            if getattr(self, name) < 1:
                raise invalid_value(name, getattr(self, name), "a whole number >= 1")
        if self.hidden % self.num_heads:
            raise invalid_value("hidden", self.hidden, f"a multiple of num_heads, which is {self.num_heads}")
        if not 0.0 <= self.dropout < 1.0:
            raise invalid_value("dropout", self.dropout, "a number >= 0 and < 1")


# GPT-2's 50,257 symbols, padded to a multiple of 128 for the sake of the matrix units, as Megatron does.
GPT2_VOCAB_SIZE: Final = 50_304

# Byte-level shapes (256 symbols): `tiny` learns visibly within minutes on two cores, `small` wants a real machine. The
# GPT-2 shapes are those that papers on training with offload report.
PRESETS: Final[Mapping[str, GPTConfig]] = MappingProxyType(
    {
        "tiny": GPTConfig(vocab_size=256, context=128, num_layers=4, hidden=128, num_heads=4),
        "small": GPTConfig(vocab_size=256, context=256, num_layers=6, hidden=384, num_heads=6),
        "gpt-350m": GPTConfig(GPT2_VOCAB_SIZE, context=2048, num_layers=24, hidden=1024, num_heads=16),
        "gpt2-1.5b": GPTConfig(GPT2_VOCAB_SIZE, context=1024, num_layers=48, hidden=1600, num_heads=25),
        "gpt2-10b": GPTConfig(GPT2_VOCAB_SIZE, context=1024, num_layers=50, hidden=4096, num_heads=32),
        "gpt2-13b": GPTConfig(GPT2_VOCAB_SIZE, context=1024, num_layers=65, hidden=4096, num_heads=32),
    }
)

# Sequences a forward, where the user names no number.
PRESET_BATCH: Final[Mapping[str, int]] = MappingProxyType(
    {"tiny": 8, "small": 8, "gpt-350m": 8, "gpt2-1.5b": 8, "gpt2-10b": 10, "gpt2-13b": 4}
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


def block_bytes(config: GPTConfig, num_tokens: int, dtype_bytes: int) -> int:
    """What one block keeps for its backward: 16 values for each token and hidden unit, and the statistics in fp32.

    The inputs of both norms (2), of qkv and of up (2), q, k and v (3), what attention gives (1), and both sides of the
    GELU (8). Fused attention is assumed, which keeps a sum for each head and token and not the square.
    """
    statistics = 2 * 2 + config.num_heads  # mean and deviation of two norms
    masks = 2 * config.hidden if config.dropout else 0  # a byte each
    return num_tokens * (16 * config.hidden * dtype_bytes + 4 * statistics + masks)


def activation_bytes(config: GPTConfig, batch: int, tokens: int, checkpointing: bool, dtype_bytes: int = 2) -> int:
    """Estimate of the largest memory that a training step takes beyond weights, their gradients and optimizer state.

    For `batch` sequences of `tokens` in a dtype of `dtype_bytes`. To what the blocks keep (one input each when
    `checkpointing`) comes the larger of two moments: the loss, with the gradients of its inputs and a chunk of logits,
    and the backward of one block, with as much again for the gradients inside it.
    """
    num_tokens, h = batch * tokens, config.hidden
    stream = num_tokens * h * dtype_bytes  # the residual stream once
    block = block_bytes(config, num_tokens, dtype_bytes)
    kept = config.num_layers * (stream if checkpointing else block)
    ends = stream + 8 * num_tokens + 2 * 8 * num_tokens  # the last norm's input and statistics; tokens and targets
    if config.dropout:
        ends += num_tokens * h
    wide = max(dtype_bytes, 4)
    logits = min(num_tokens, LOSS_CHUNK) * config.vocab_size * (wide + dtype_bytes)
    loss = 2 * stream + config.vocab_size * h * wide + logits  # hidden, its gradient and that of the head's weight
    backward = block * (2 if checkpointing else 1)
    return kept + ends + max(loss, backward)


class GPTOutput(NamedTuple):
    """What a forward returns: logits without targets, the loss with them."""

    logits: Tensor | None  # [batch, tokens, vocab]
    loss: Tensor | None  # mean cross entropy in nats, fp32 or wider


class Linear(nn.Linear):
    """A linear layer that starts with weights of a given deviation and no bias."""

    def __init__(
        self, num_in: int, num_out: int, std: float = INIT_STD, bias: bool = True, device: str | None = None
    ) -> None:
        self.std = std  # first: the constructor below calls reset_parameters
        super().__init__(num_in, num_out, bias, device)

    def reset_parameters(self) -> None:
        """Draw the weights."""
        _draw(self.weight, self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """An embedding that starts as GPT-2's do."""

    def reset_parameters(self) -> None:
        """Draw the weights."""
        _draw(self.weight, INIT_STD)


def _draw(weight: Tensor, std: float) -> None:
    if not weight.is_meta:  # where torch would load its compiler, for two seconds and nothing
        nn.init.normal_(weight, std=std)


class Head(Linear):
    """From hidden units to logits, or straight to the loss, for which all logits at once are never made."""

    def forward(self, input: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits of `input` [..., hidden]; with `targets` [...], their mean cross entropy instead."""
        if targets is None:
            return super().forward(input)
        return chunked_cross_entropy(input.flatten(0, -2), self.weight, targets.flatten())


def residual_std(config: GPTConfig) -> float:
    """Each block adds two branches to the residual stream; this keeps its variance from growing with depth."""
    return INIT_STD / math.sqrt(2 * config.num_layers)


Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # q, k, v [batch, heads, tokens, width], dropout


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Torch's own attention over everything up to each token."""
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.max_tokens = config.context
        self.dropout = config.dropout
        self.attend: Attend = causal_attention
        self.qkv = Linear(config.hidden, 3 * config.hidden)
        self.out = Linear(config.hidden, config.hidden, residual_std(config))

    def set_attention(self, attend: Attend | None) -> None:
        """Use another causal attention from now on, as `twinflow.attention.sparsify` does; None: torch's own."""
        self.attend = causal_attention if attend is None else attend

    def forward(self, x: Tensor) -> Tensor:
        """Mix each position with the ones before it; `x` is [batch, tokens, hidden]."""
        batch, tokens, hidden = x.shape
        heads = (batch, tokens, self.num_heads, hidden // self.num_heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(x).split(hidden, dim=-1))
        dropout = self.dropout if self.training else 0.0
        y = self.attend(q, k, v, dropout)
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(batch, tokens, hidden))
        return mixed


class MLP(nn.Module):
    """The position-wise half of a block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = Linear(config.hidden, 4 * config.hidden)
        self.down = Linear(4 * config.hidden, config.hidden, residual_std(config))

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
        self.token_embedding = Embedding(config.vocab_size, config.hidden)
        self.position_embedding = Embedding(config.context, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        # The unit that offload moves is a block: keep them in one ModuleList, called one after the other.
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden)
        # A tied head never has memory of its own, not even for a moment.
        self.head = Head(config.hidden, config.vocab_size, bias=False, device="meta" if config.tied else None)
        if config.tied:
            self.head.weight = self.token_embedding.weight

    def init_weights(self) -> None:
        """Draw all weights anew, in the order in which the constructor drew them."""
        for module in self.modules():
            if isinstance(module, (Linear, Embedding, nn.LayerNorm)) and not (module is self.head and self.config.tied):
                module.reset_parameters()

    def pipeline_parts(self) -> list[Part]:
        """What a pipeline is made of: `twinflow.parallel.split_model`."""
        return gpt_parts(self)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> GPTOutput:
        """Logits for `tokens` [batch, tokens]; with `targets` (same shape) their loss instead, without logits."""
        num_tokens = tokens.shape[1]
        if num_tokens > self.config.context:
            allowed = f"at most the model's context, which is {self.config.context}"
            raise invalid_value("length of tokens", num_tokens, allowed, "Shorten the input or build a longer model.")
        positions = torch.arange(num_tokens, device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        run_again = self.config.checkpoint_activations and self.training and torch.is_grad_enabled()
        for block in self.blocks:
            if run_again:
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=self.config.dropout > 0)
            else:
                x = block(x)
        x = self.norm(x)
        return GPTOutput(self.head(x), None) if targets is None else GPTOutput(None, self.head(x, targets))
