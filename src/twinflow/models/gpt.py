# SPDX-License-Identifier: Apache-2.0
"""A GPT-2 style decoder, and functions that compute its size and cost.

`cost_of`, `count_params`, `flops_per_token` and `activation_bytes` need only a `GPTConfig`, so that a plan can be made
without building the model. Tests compare them with the real module. Every layer initialises its weights in
`reset_parameters`, so that a model on the meta device can be materialised one layer at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from twinflow.activations.selective import selective_contexts
from twinflow.errors import incompatible, invalid_value
from twinflow.loss import chunked_cross_entropy
from twinflow.offload.hooks import in_backward
from twinflow.parallel.sequence import SequenceRanks
from twinflow.parallel.specs import Part
from twinflow.planner.formats import is_recomputed
from twinflow.planner.models import ModelCost, gpt_cost

RECOMPUTE: Final = ("none", "selective", "full")
# Standard deviation of GPT-2's initial weight matrices and embeddings.
INIT_STD: Final = 0.02


@dataclass(frozen=True)
class GPTConfig:
    """Shape and options of a `GPT`. Raises ValueError for values with which no model can be built."""

    vocab_size: int
    context: int
    num_layers: int
    hidden: int
    num_heads: int
    dropout: float = 0.0
    tied: bool = True  # the output head uses the token embedding's weight
    # What backward computes again. "none": nothing. "selective": everything in a block except matrix products and
    # attention. "full": whole blocks, of which only the input is kept. A number N: N whole blocks, and the others as
    # with "selective".
    recompute: str | int = "none"
    num_experts: int = 0  # experts in each block instead of an MLP; 0: an MLP
    num_experts_per_tok: int = 2  # experts to which a token is sent
    router_loss: float = 0.01  # weight of the load-balancing loss of the routers

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "num_layers", "hidden", "num_heads"):
            if getattr(self, name) < 1:
                raise invalid_value(name, getattr(self, name), "a whole number >= 1")
        if self.hidden % self.num_heads:
            divisors = [n for n in range(self.num_heads, 0, -1) if self.hidden % n == 0]
            remedy = f"Use num_heads={divisors[0]}, or another hidden size."
            raise invalid_value("hidden", self.hidden, f"a multiple of num_heads, which is {self.num_heads}", remedy)
        if not 0.0 <= self.dropout < 1.0:
            raise invalid_value("dropout", self.dropout, "a number >= 0 and < 1")
        if self.num_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            allowed = f"a number from 1 to num_experts, which is {self.num_experts}"
            raise invalid_value("num_experts_per_tok", self.num_experts_per_tok, allowed)
        is_count = type(self.recompute) is int and 0 <= self.recompute <= self.num_layers
        if self.recompute not in RECOMPUTE and not is_count:
            allowed = f"{', '.join(RECOMPUTE)}, or a number of blocks from 0 to {self.num_layers}"
            raise invalid_value("recompute", self.recompute, allowed)

    @property
    def expert_inner(self) -> int:
        """Width of an expert, with which a token uses as many weights as with an MLP."""
        return 4 * self.hidden // self.num_experts_per_tok

    @property
    def num_recomputed(self) -> int:
        """Number of blocks that backward computes again as a whole."""
        return self.recompute if isinstance(self.recompute, int) else self.num_layers * (self.recompute == "full")

    @property
    def is_selective(self) -> bool:
        """Whether backward computes the cheap operations of the other blocks again."""
        return self.recompute == "selective" or isinstance(self.recompute, int)

    def is_recomputed(self, block: int) -> bool:
        """Whether backward computes this block again as a whole."""
        return is_recomputed(block, self.num_recomputed, self.num_layers)


# GPT-2's vocabulary of 50,257 tokens, padded to a multiple of 128 as in Megatron: matrix units work best on such sizes.
GPT2_VOCAB_SIZE: Final = 50_304

# `tiny` and `small` are byte-level models with 256 symbols. The loss of `tiny` decreases within minutes on two cores.
# `small` needs a larger machine. Papers on training with offload report results for the GPT-2 shapes.
PRESETS: Final[Mapping[str, GPTConfig]] = MappingProxyType(
    {
        "tiny": GPTConfig(vocab_size=256, context=128, num_layers=4, hidden=128, num_heads=4),
        "tiny-moe": GPTConfig(256, context=128, num_layers=4, hidden=128, num_heads=4, num_experts=8),
        "small": GPTConfig(vocab_size=256, context=256, num_layers=6, hidden=384, num_heads=6),
        "gpt-350m": GPTConfig(GPT2_VOCAB_SIZE, context=2048, num_layers=24, hidden=1024, num_heads=16),
        "gpt2-1.5b": GPTConfig(GPT2_VOCAB_SIZE, context=1024, num_layers=48, hidden=1600, num_heads=25),
        "gpt2-10b": GPTConfig(GPT2_VOCAB_SIZE, context=1024, num_layers=50, hidden=4096, num_heads=32),
        "gpt2-13b": GPTConfig(GPT2_VOCAB_SIZE, context=1024, num_layers=65, hidden=4096, num_heads=32),
    }
)

# Default number of sequences per forward.
PRESET_BATCH: Final[Mapping[str, int]] = MappingProxyType(
    {"tiny": 8, "tiny-moe": 8, "small": 8, "gpt-350m": 8, "gpt2-1.5b": 8, "gpt2-10b": 10, "gpt2-13b": 4}
)


def cost_of(config: GPTConfig, name: str = "GPT", dtype_bytes: int = 2) -> ModelCost:
    """Elements, FLOPs and activations of `GPT(config)`, with weights of `dtype_bytes`."""
    c = config
    sizes = (c.vocab_size, c.context, c.num_layers, c.hidden, c.num_heads)
    experts = (c.num_experts, c.num_experts_per_tok, c.expert_inner) if c.num_experts else None
    return gpt_cost(name, *sizes, tied=c.tied, width=dtype_bytes, has_dropout=c.dropout > 0.0, experts=experts)


def count_params(config: GPTConfig) -> int:
    """Number of trainable parameters of `GPT(config)`. A tied weight counts once."""
    return cost_of(config).numel


def flops_per_token(config: GPTConfig) -> int:
    """FLOPs of one forward and backward per token, for sequences of full length.

    Only matrix products count: 2 FLOPs per weight in forward and 4 in backward. Attention counts the whole square of
    scores, including the masked half, as is usual when model FLOPs are compared.
    """
    return int(cost_of(config).model_flops(config.context))


def activation_bytes(config: GPTConfig, batch: int, tokens: int, dtype_bytes: int = 2) -> int:
    """Estimate of the peak memory of a training step, without weights, their gradients and optimizer state.

    The step has `batch` sequences of `tokens` tokens in a dtype of `dtype_bytes`.
    """
    activations = cost_of(config, dtype_bytes=dtype_bytes).activations
    return activations.peak_bytes(config.num_layers, batch * tokens, config.num_recomputed, config.is_selective)


class GPTOutput(NamedTuple):
    """Output of `GPT.forward`: the loss if targets were given, otherwise the logits."""

    logits: Tensor | None  # [batch, tokens, vocab]
    loss: Tensor | None  # mean cross entropy in nats, fp32 or wider


class Linear(nn.Linear):
    """A linear layer with normally distributed initial weights of deviation `std` and a bias of zero."""

    def __init__(
        self, num_in: int, num_out: int, std: float = INIT_STD, bias: bool = True, device: str | None = None
    ) -> None:
        self.std = std  # set first, because the constructor of nn.Linear calls reset_parameters
        super().__init__(num_in, num_out, bias, device)

    def reset_parameters(self) -> None:
        _draw(self.weight, self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """An embedding with the initial distribution of GPT-2."""

    def reset_parameters(self) -> None:
        _draw(self.weight, INIT_STD)


def _draw(weight: Tensor, std: float) -> None:
    # On the meta device normal_ has no effect, but makes torch load its compiler, which takes two seconds.
    if not weight.is_meta:
        nn.init.normal_(weight, std=std)


class Head(Linear):
    """The output layer. It computes the logits, or the loss in chunks, so that not all logits are in memory at once."""

    def forward(self, input: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits of `input` [..., hidden], or the mean cross entropy if `targets` [...] are given."""
        if targets is None:
            return super().forward(input)
        return chunked_cross_entropy(input.flatten(0, -2), self.weight, targets.flatten())


def residual_std(config: GPTConfig) -> float:
    """Initial deviation of the layers that add to the residual stream. It keeps the variance of the stream independent
    of the number of blocks, each of which adds two branches.
    """
    return INIT_STD / math.sqrt(2 * config.num_layers)


Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # q, k, v [batch, heads, tokens, width], dropout


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Torch's scaled_dot_product_attention with a causal mask."""
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


class Attention(nn.Module):
    """Causal multi-head self-attention. `attend` computes it, and can be replaced by a sparse function."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.max_tokens = config.context
        self.dropout = config.dropout
        self.attend: Attend = causal_attention
        self.qkv = Linear(config.hidden, 3 * config.hidden)
        self.out = Linear(config.hidden, config.hidden, residual_std(config))

    def set_attention(self, attend: Attend | None) -> None:
        """Replace the attention function, as `twinflow.attention.sparsify` does. None restores torch's attention."""
        self.attend = causal_attention if attend is None else attend

    def forward(self, x: Tensor) -> Tensor:
        """Causal self-attention over `x` [batch, tokens, hidden]."""
        # A tensor rank has a part of the heads, so their width follows from the projection, not from `x`.
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = self.attend(q, k, v, self.dropout if self.training else 0.0)
        mixed: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return mixed


class MLP(nn.Module):
    """The feed-forward layers of a block: linear, GELU, linear."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = Linear(config.hidden, 4 * config.hidden)
        self.down = Linear(4 * config.hidden, config.hidden, residual_std(config))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return y


class Experts(nn.Module):
    """A router and experts: linear, GELU, linear. The weights of all experts are in one tensor for each layer.

    Each token goes to the experts with the largest probabilities, which weigh their outputs. `balance` is the
    load-balancing loss of the last forward: the number of experts times the sum, over experts, of the share of tokens
    times the mean probability. It is 1 if all experts are used equally.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        num, inner = config.num_experts, config.expert_inner
        self.num_chosen = config.num_experts_per_tok
        self.std = residual_std(config)
        self.balance: Tensor | None = None
        self.router = Linear(config.hidden, num, bias=False)
        self.up = nn.Parameter(torch.empty(num, inner, config.hidden))
        self.down = nn.Parameter(torch.empty(num, config.hidden, inner))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the experts. The router initialises itself."""
        _draw(self.up, INIT_STD)
        _draw(self.down, self.std)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        probabilities = self.router(rows).softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32))
        weights, chosen = probabilities.topk(self.num_chosen, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        y = torch.zeros_like(rows)
        shares = []
        for expert, (up, down) in enumerate(zip(self.up.unbind(), self.down.unbind(), strict=True)):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            inner = F.gelu(F.linear(rows[token], up), approximate="tanh")
            y = y.index_add(0, token, F.linear(inner, down) * weights[token, place, None])
            shares.append(len(token) / chosen.numel())
        balance = probabilities.mean(0) @ probabilities.new_tensor(shares) * len(shares)
        if not in_backward():  # activation checkpointing runs this again
            self.balance = balance
        return y.view(x.shape)


class Block(nn.Module):
    """One pre-norm transformer layer. Attention and MLP are each added to the residual stream.

    `is_selective`: backward computes everything again except matrix products and attention.
    """

    def __init__(self, config: GPTConfig, is_selective: bool = False) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden)
        self.mlp = Experts(config) if config.num_experts else MLP(config)
        self.dropout = nn.Dropout(config.dropout)
        self.is_selective = is_selective

    def forward(self, x: Tensor) -> Tensor:
        if not (self.is_selective and self.training and torch.is_grad_enabled()):
            return self.layers(x)
        # Inside of the block, so that the checkpoint is a part of the graph if the block is compiled.
        has_dropout = self.dropout.p > 0
        again: Tensor = checkpoint(
            self.layers, x, use_reentrant=False, preserve_rng_state=has_dropout, context_fn=selective_contexts
        )
        return again

    def layers(self, x: Tensor) -> Tensor:
        """The forward without a checkpoint."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x


class GPT(nn.Module):
    """A GPT: token and position embeddings, `blocks`, a final norm and a head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = Embedding(config.vocab_size, config.hidden)
        self.position_embedding = Embedding(config.context, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        # Offload works block by block: all blocks are in one ModuleList and are called in its order.
        self.blocks = nn.ModuleList(
            Block(config, config.is_selective and not config.is_recomputed(i)) for i in range(config.num_layers)
        )
        self.norm = nn.LayerNorm(config.hidden)
        # The meta device avoids allocating a weight that is replaced at once.
        self.head = Head(config.hidden, config.vocab_size, bias=False, device="meta" if config.tied else None)
        if config.tied:
            self.head.weight = self.token_embedding.weight
        self._sequence: SequenceRanks | None = None
        # Mean of `Experts.balance` over the blocks in the last forward with a loss. None without experts.
        self.balance: Tensor | None = None

    def set_sequence(self, ranks: SequenceRanks | None) -> None:
        """Set the ranks that share each sequence, as `twinflow.parallel.split_sequence` does. None: this rank alone."""
        self._refuse_experts("sequence_parallel_size", ranks is not None)
        self._sequence = ranks

    def _refuse_experts(self, what: str, is_used: bool = True) -> None:
        if is_used and self.config.num_experts:
            reason = "the load-balancing loss needs all tokens and all blocks"
            raise incompatible(what, "the experts of twinflow's GPT", reason, "Use data-parallel ranks (ZeRO).")

    def init_weights(self) -> None:
        """Initialise all weights again, in the order of the constructor. The same seed gives the same weights."""
        for module in self.modules():
            if isinstance(module, (Linear, Embedding, Experts, nn.LayerNorm)) and not (
                module is self.head and self.config.tied
            ):
                module.reset_parameters()

    def pipeline_parts(self) -> list[Part]:
        """The parts into which `twinflow.parallel.split_model` splits the model for pipeline stages."""
        self._refuse_experts("A pipeline")
        first: dict[str, nn.Module] = {
            "token_embedding": self.token_embedding,
            "position_embedding": self.position_embedding,
            "dropout": self.dropout,
        }
        return [
            Part(first, partial(_embed, self.token_embedding, self.position_embedding, self.dropout)),
            *(
                Part({f"blocks.{i}": block}, self._runner(i, block), is_block=True)
                for i, block in enumerate(self.blocks)
            ),
            Part({"norm": self.norm, "head": self.head}, partial(_finish, self.norm, self.head), is_loss=True),
        ]

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> GPTOutput:
        """Logits for `tokens` [batch, tokens]. If `targets` of the same shape are given: their loss, without logits."""
        x: Tensor = _embed(self.token_embedding, self.position_embedding, self.dropout, tokens, self._sequence)
        for i, block in enumerate(self.blocks):
            x = self._runner(i, block)(x)
        x = self.norm(x)
        if targets is None:
            return GPTOutput(self.head(x), None)
        loss: Tensor = self.head(x, targets)
        loss = self._balanced(loss)
        return GPTOutput(None, loss if self._sequence is None else self._sequence.mean_of(loss, targets))

    def _balanced(self, loss: Tensor) -> Tensor:
        """In training, the loss with the load-balancing loss of the routers."""
        found = [module for module in self.modules() if isinstance(module, Experts)]
        balances = [module.balance for module in found if module.balance is not None]
        for module in found:
            module.balance = None  # it refers to the graph
        if not balances:
            return loss
        balance = torch.stack(balances).mean()
        self.balance = balance.detach()
        return loss + self.config.router_loss * balance.to(loss.dtype) if self.training else loss

    def _runner(self, index: int, block: nn.Module) -> Callable[[Tensor], Any]:
        return partial(_run_again, block) if self.config.is_recomputed(index) else block


def _embed(
    tokens: nn.Module, positions: nn.Embedding, dropout: nn.Module, ids: Tensor, sequence: SequenceRanks | None = None
) -> Any:
    num_tokens = ids.shape[1] * (1 if sequence is None else sequence.size)
    if num_tokens > positions.num_embeddings:
        allowed = f"at most the model's context, which is {positions.num_embeddings}"
        raise invalid_value(
            "The number of tokens in a sequence",
            num_tokens,
            allowed,
            "Shorten the input, or build the model with a larger context.",
        )
    places = (
        torch.arange(num_tokens, device=ids.device)
        if sequence is None
        else sequence.positions(ids.shape[1], ids.device)
    )
    return dropout(tokens(ids) + positions(places))


def _run_again(block: Any, x: Tensor) -> Any:
    """Run a block, with activation checkpointing if it is in training mode and gradients are enabled."""
    if block.training and torch.is_grad_enabled():
        return checkpoint(block, x, use_reentrant=False, preserve_rng_state=block.dropout.p > 0)
    return block(x)


def _finish(norm: nn.Module, head: nn.Module, x: Tensor, targets: Tensor | None) -> Any:
    return head(norm(x)) if targets is None else head(norm(x), targets)
