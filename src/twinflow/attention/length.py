# SPDX-License-Identifier: Apache-2.0
"""Padding of inputs to whole blocks, and extension of position embeddings to longer sequences."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twinflow.attention.patch import sparsify
from twinflow.attention.patterns import FixedSparsityConfig, SparsityConfig, check_count
from twinflow.errors import invalid_value


class Padded(NamedTuple):
    """The result of `pad_to_block_size`, in DeepSpeed's order."""

    pad_len: int
    input_ids: Tensor | None
    attention_mask: Tensor | None
    token_type_ids: Tensor | None
    position_ids: Tensor | None
    inputs_embeds: Tensor | None


def pad_to_block_size(
    block_size: int,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    pad_token_id: int = 0,
    model_embeddings: Any = None,
) -> Padded:
    """Pad the inputs of a model on the right to a multiple of `block_size`. The mask is 0 for padding.

    A mask is created if there is padding and no mask was given. Embeddings are padded with the embedding of the padding
    token if `model_embeddings` is given, and with zeros otherwise. The attention of this package accepts any length.
    This function is for models and kernels that need whole blocks.
    """
    given = input_ids if input_ids is not None else inputs_embeds
    if given is None:
        raise ValueError("input_ids and inputs_embeds are None, but one of them must be a tensor. Pass input_ids.")
    if block_size < 1:
        raise invalid_value("block_size", block_size, "a whole number >= 1")
    batch, tokens = given.shape[:2]
    pad_len = -tokens % block_size
    if not pad_len:
        return Padded(0, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
    if inputs_embeds is not None:
        inputs_embeds = torch.cat(
            [inputs_embeds, _pad_embeds(inputs_embeds, pad_len, pad_token_id, model_embeddings)], 1
        )
    if attention_mask is None:
        attention_mask = torch.ones(batch, tokens, dtype=torch.int64, device=given.device)
    if position_ids is not None:  # the position of padding does not matter; every position table has this row
        position_ids = F.pad(position_ids, (0, pad_len), value=int(pad_token_id))
    return Padded(
        pad_len,
        None if input_ids is None else F.pad(input_ids, (0, pad_len), value=pad_token_id),
        F.pad(attention_mask, (0, pad_len), value=0),
        None if token_type_ids is None else F.pad(token_type_ids, (0, pad_len), value=0),
        position_ids,
        inputs_embeds,
    )


def _pad_embeds(embeds: Tensor, pad_len: int, pad_token_id: int, model_embeddings: Any) -> Tensor:
    if model_embeddings is None:
        return embeds.new_zeros(embeds.shape[0], pad_len, embeds.shape[2])
    ids = torch.full((embeds.shape[0], pad_len), pad_token_id, dtype=torch.int64, device=embeds.device)
    padding: Tensor = model_embeddings(ids)
    return padding.to(embeds.dtype)


def unpad_sequence_output(pad_len: int, sequence_output: Tensor) -> Tensor:
    """Remove the last `pad_len` tokens from an output [batch, tokens, ...]."""
    return sequence_output[:, :-pad_len] if pad_len else sequence_output


def extend_position_embedding(model: nn.Module, max_position: int) -> nn.Module:
    """Extend a model of transformers to sequences of `max_position` tokens, in place. Returns the model.

    A learned table (BERT, RoBERTa, GPT-2) is repeated, so that the distances between nearby positions keep the learned
    meaning. The rows that RoBERTa reserves for padding are kept. A rotary model has no table, and only its config
    changes. Call this function before `sparsify` and before an optimizer is built. Raises ValueError for other models.
    """
    check_count("max_position", max_position, 1)
    config: Any = getattr(model, "config", None)
    known = getattr(config, "max_position_embeddings", None)
    if not isinstance(known, int):
        name = f"{type(model).__name__}.config.max_position_embeddings"
        raise invalid_value(name, known, "a whole number", "Extend the position embedding of the model yourself.")
    holders = [part for part in model.modules() if _table(part) is not None]
    offset = 0
    for holder in holders:
        table = _table(holder)
        assert table is not None
        offset = 0 if table.padding_idx is None else table.padding_idx + 1
        _extend_table(table, max_position, offset)
        _extend_buffers(holder, max_position + offset)
    if not holders:
        if not any("rotary" in type(part).__name__.lower() for part in model.modules()):
            raise ValueError(
                f"The positions of a {type(model).__name__} cannot be extended. The model must have "
                "position_embeddings (BERT, RoBERTa), wpe (GPT-2) or rotary positions. Extend the position embedding "
                "of the model yourself."
            )
        if max_position < known:
            raise invalid_value("max_position", max_position, f"at least {known}, which the model already supports")
    config.max_position_embeddings = max_position + offset
    return model


def _table(part: nn.Module) -> nn.Embedding | None:
    """The position embedding of a module of a known kind, or None."""
    for name in ("position_embeddings", "wpe"):
        table = getattr(part, name, None)
        if type(table) is nn.Embedding:
            return table
    return None


@torch.no_grad()
def _extend_table(table: nn.Embedding, max_position: int, offset: int) -> None:
    weight = table.weight
    num_old = weight.shape[0] - offset
    if max_position < num_old:
        raise invalid_value("max_position", max_position, f"at least {num_old}, which the model already supports")
    rows = offset + torch.arange(max_position, device=weight.device) % num_old
    rows = torch.cat([torch.arange(offset, device=weight.device), rows])
    table.weight = nn.Parameter(weight[rows], requires_grad=weight.requires_grad)
    table.num_embeddings = offset + max_position


def _extend_buffers(holder: nn.Module, num_rows: int) -> None:
    """Extend the buffers position_ids and token_type_ids of BERT and RoBERTa to the length of the table."""
    for name, is_counted in (("position_ids", True), ("token_type_ids", False)):
        old = getattr(holder, name, None)
        if isinstance(old, Tensor):
            new = torch.arange(num_rows, device=old.device) if is_counted else torch.zeros(num_rows, device=old.device)
            setattr(holder, name, new.to(old.dtype)[None])


class SparseAttentionUtils:
    """The functions of this package as static methods with DeepSpeed's names."""

    extend_position_embedding = staticmethod(extend_position_embedding)
    pad_to_block_size = staticmethod(pad_to_block_size)
    unpad_sequence_output = staticmethod(unpad_sequence_output)

    @staticmethod
    def update_tokenizer_model_max_length(tokenizer: Any, max_position: int) -> Any:
        """Set the maximum length of a tokenizer of transformers. Returns the tokenizer."""
        tokenizer.model_max_length = max_position
        tokenizer.init_kwargs["model_max_length"] = max_position
        return tokenizer

    @staticmethod
    def replace_model_self_attention_with_sparse_self_attention(
        model: nn.Module, max_position: int, sparsity_config: SparsityConfig | None = None
    ) -> nn.Module:
        """Call `extend_position_embedding` if necessary, and then `sparsify`. The default pattern is
        FixedSparsityConfig.
        """
        config: Any = model.config
        if config.max_position_embeddings < max_position:
            extend_position_embedding(model, max_position)
        pattern = sparsity_config or FixedSparsityConfig(num_heads=config.num_attention_heads)
        return sparsify(model, pattern)
