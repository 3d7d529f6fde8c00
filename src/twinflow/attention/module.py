# SPDX-License-Identifier: Apache-2.0
"""Layers with sparse attention, with DeepSpeed's names and arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from twinflow.attention.function import PatternAttention
from twinflow.attention.layout import Layout
from twinflow.attention.patterns import FixedSparsityConfig, SparsityConfig, check_count
from twinflow.errors import invalid_value

MASK_MODES = ("add", "mul")
REMOVED = -1e4  # an additive mask removes keys for which its value is at most this


class SparseSelfAttention(nn.Module):
    """Self-attention over the blocks that a pattern keeps.

    The pattern is `sparsity_config`. A layout lists the kept blocks for one sequence length. Each instance builds
    layouts when they are needed and caches the most recent ones. A sequence that is shorter than `max_seq_length` uses
    the top left corner of the layout for `max_seq_length`.
    """

    def __init__(
        self,
        sparsity_config: SparsityConfig | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        max_seq_length: int = 2048,
        *,
        backend: str = "auto",
        heads: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        for name, mode in (("key_padding_mask_mode", key_padding_mask_mode), ("attn_mask_mode", attn_mask_mode)):
            if mode not in MASK_MODES:
                raise invalid_value(name, mode, MASK_MODES)
        check_count("max_seq_length", max_seq_length, 1)
        pattern = FixedSparsityConfig(num_heads=4) if sparsity_config is None else sparsity_config
        self.key_padding_mask_mode = key_padding_mask_mode
        self.attn_mask_mode = attn_mask_mode
        self.max_seq_length = max_seq_length
        self.attend = PatternAttention(pattern, max_seq_length, backend=backend, heads=heads)

    @property
    def sparsity_config(self) -> SparsityConfig:
        return self.attend.pattern

    def set_pattern(self, pattern: SparsityConfig) -> None:
        old = self.attend
        self.attend = PatternAttention(pattern, self.max_seq_length, backend=old.backend, heads=old.heads)

    def get_layout(self, seq_len: int) -> Layout:
        """The layout for `seq_len` tokens."""
        start, stop = self.attend.heads or (0, self.sparsity_config.num_heads)
        return self.attend.layout(self._length(seq_len), stop - start)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Self-attention of query, key and value [batch, heads, tokens, head_dim] in any float dtype. The result has
        the shape of query.

        `rpe` (relative position embedding) broadcasts to [batch, heads, tokens, tokens], is added to the scaled scores,
        and gets a gradient if it requires one. `key_padding_mask` is [batch, tokens] (further dimensions of size one
        are removed), and `attn_mask` is [tokens, tokens]. In mode "add" a mask is added to the scores, with 0 for
        tokens that are used. In mode "mul" a mask is 1 for tokens that are used and 0 for others.
        """
        num_tokens = self._length(query.shape[2])
        if key.shape != query.shape and key.shape == query.transpose(-1, -2).shape:
            key = key.transpose(-1, -2)  # DeepSpeed also accepts a transposed key
        if key.shape != query.shape or value.shape != query.shape:
            shapes = f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
            raise ValueError(
                f"query, key and value have the shapes {shapes}, but must have equal shapes, because this is "
                "self-attention. For other shapes, use twinflow.attention.sparse_attention."
            )
        extras: dict[str, Any] = {}
        biases = [] if rpe is None else [rpe]
        if attn_mask is not None:
            mask = _as_2d("attn_mask", attn_mask, (num_tokens, num_tokens))
            if self.attn_mask_mode == "mul":
                extras["mask"] = mask != 0
            else:
                biases.append(_additive("attn_mask", mask))
        if key_padding_mask is not None:
            mask = _as_2d("key_padding_mask", key_padding_mask, (query.shape[0], num_tokens))
            if self.key_padding_mask_mode == "mul":
                extras["key_padding"] = mask != 0
            else:
                _add_padding(extras, biases, _additive("key_padding_mask", mask))
        if biases:
            extras["bias"] = sum(biases[1:], biases[0])
        return self.attend(query, key, value, **extras)

    def extra_repr(self) -> str:
        return f"{self.sparsity_config}, max_seq_length={self.max_seq_length}"

    def _length(self, seq_len: int) -> int:
        if seq_len > self.max_seq_length:
            remedy = "Build SparseSelfAttention with a larger max_seq_length."
            allowed = f"at most max_seq_length, which is {self.max_seq_length}"
            raise invalid_value("The sequence length", seq_len, allowed, remedy)
        return seq_len


class BertSparseSelfAttention(nn.Module):
    """The self-attention of a BERT layer with sparse attention, including the projections to query, key and value.

    `config` must have hidden_size and num_attention_heads, and may have max_position_embeddings. The default pattern is
    FixedSparsityConfig.
    """

    def __init__(self, config: Any, sparsity_config: SparsityConfig | None = None, *, backend: str = "auto") -> None:
        super().__init__()
        heads, hidden = int(config.num_attention_heads), int(config.hidden_size)
        if hidden % heads:
            allowed = f"a multiple of config.num_attention_heads, which is {heads}"
            raise invalid_value("config.hidden_size", hidden, allowed)
        pattern = FixedSparsityConfig(num_heads=heads) if sparsity_config is None else sparsity_config
        if pattern.num_heads != heads:
            remedy = f"Build sparsity_config with num_heads={heads}, which is config.num_attention_heads."
            raise invalid_value("sparsity_config.num_heads", pattern.num_heads, [heads], remedy)
        self.num_attention_heads = heads
        self.attention_head_size = hidden // heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        longest = int(getattr(config, "max_position_embeddings", 2048))
        self.sparse_self_attention = SparseSelfAttention(pattern, max_seq_length=longest, backend=backend)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Self-attention from [batch, tokens, hidden] to [batch, tokens, hidden]. The mask is additive
        [batch, 1, 1, tokens] as in BERT, or a bool or integer mask [batch, tokens] with 1 for tokens that are used.
        """
        batch, tokens, hidden = hidden_states.shape
        heads = batch, tokens, self.num_attention_heads, self.attention_head_size
        parts = (layer(hidden_states).view(heads).transpose(1, 2) for layer in (self.query, self.key, self.value))
        q, k, v = parts
        if attention_mask is not None and not attention_mask.is_floating_point():
            removed = attention_mask.reshape(batch, tokens) == 0
            attention_mask = torch.zeros(removed.shape, dtype=q.dtype, device=q.device).masked_fill(removed, -torch.inf)
        out: Tensor = self.sparse_self_attention(q, k, v, key_padding_mask=attention_mask)
        return out.transpose(1, 2).reshape(batch, tokens, hidden)


def _as_2d(name: str, mask: Tensor, shape: tuple[int, int]) -> Tensor:
    """The mask without surplus dimensions of size one."""
    found, wanted = ([size for size in sizes if size != 1] for sizes in (mask.shape, shape))
    if found != wanted or mask.dim() < 2:
        raise invalid_value(
            f"{name}.shape", tuple(mask.shape), f"{shape}, optionally with further dimensions of size one"
        )
    return mask.reshape(shape)


def _additive(name: str, mask: Tensor) -> Tensor:
    if not mask.is_floating_point():
        remedy = f'For a mask of 0 and 1, build SparseSelfAttention with {name}_mode="mul".'
        allowed = "a float dtype, because the mask is added to the scores"
        raise invalid_value(f"{name}.dtype", mask.dtype, allowed, remedy)
    return mask


def _add_padding(extras: dict[str, Any], biases: list[Tensor], mask: Tensor) -> None:
    """Convert an additive mask of keys to a bias. If there is another bias and the mask only removes keys, convert it
    to key_padding instead, because the sum of both biases would have the size of all scores.
    """
    removed = mask <= REMOVED
    if biases and not mask.requires_grad and bool((removed | (mask == 0)).all()):
        extras["key_padding"] = ~removed
    else:
        biases.append(mask[:, None, None, :])
