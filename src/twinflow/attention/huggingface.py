# SPDX-License-Identifier: Apache-2.0
"""Sparse attention for the attention interface of transformers.

transformers looks up two functions by the name of an implementation: the attention itself, and a function that creates
the mask of a whole forward. The mask function of this module returns only the padding, as [batch, keys], instead of a
square mask. Causality is part of the layout. This module uses transformers only if the user's model has imported it.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twinflow.attention.extras import documents_of
from twinflow.attention.function import PatternAttention, check_causal
from twinflow.attention.patterns import SparsityConfig
from twinflow.errors import incompatible, invalid_value

_BEFORE = "_twinflow_attention_before"  # attribute of a model: its previous implementation, and the handle of our hook
_NEEDS = ("AttentionInterface", "AttentionMaskInterface")
_REBUILD = "Build the model with twinflow.attention.SparseSelfAttention."
# Arguments of an attention that change its result and are not supported here.
_REFUSED = {  # argument -> (reason, remedy)
    "output_attentions": (
        "the probabilities are never stored",
        "To read the probabilities, use unsparsify() and eager attention.",
    ),
    "position_bias": ("the kernels do not add a position bias of the model", "Use a model without a position bias."),
}


def transformers_models(model: nn.Module) -> list[Any]:
    """The outermost models of transformers within a model."""
    transformers = sys.modules.get("transformers")
    kind = getattr(transformers, "PreTrainedModel", None)
    if kind is None:
        return []
    found: list[Any] = []
    inside: set[int] = set()
    for part in model.modules():
        if isinstance(part, kind) and id(part) not in inside:
            found.append(part)
            inside |= {id(module) for module in part.modules()}
    return found


def heads_of_layers(model: Any) -> list[int]:
    """Number of query heads of each layer of a model of transformers."""
    counts = []
    for name in ("num_attention_heads", "num_hidden_layers"):
        count = getattr(model.config, name, None)
        if not isinstance(count, int):
            remedy = (
                "Patterns need layers with equal numbers of heads. If the model consists of several models, such as "
                "one for text, call twinflow.attention.sparsify for that submodule."
            )
            raise invalid_value(f"{type(model).__name__}.config.{name}", count, "a whole number", remedy)
        counts.append(count)
    return [counts[0]] * counts[1]


def sparse_transformers(
    model: Any, patterns: Sequence[SparsityConfig], backend: str, heads: tuple[int, int] | None
) -> None:
    """Replace the attention of a model, with one pattern per layer."""
    is_causal = _check_model(model, patterns)
    max_tokens = getattr(model.config, "max_position_embeddings", None) or 1
    made = {its: PatternAttention(its, int(max_tokens), backend=backend, heads=heads) for its in patterns}
    window = getattr(model.config, "sliding_window", None)
    if isinstance(window, int) and window > 0:
        for attend in made.values():  # now, because torch.compile could not trace it
            attend.source(is_causal, window if is_causal else window + 1)
    attention = TransformersAttention(tuple(made[its] for its in patterns))
    said = repr((patterns, backend, heads, max_tokens))
    name = f"twinflow_{hashlib.blake2b(said.encode(), digest_size=8).hexdigest()}"
    transformers = sys.modules["transformers"]
    transformers.AttentionInterface.register(name, attention)
    transformers.AttentionMaskInterface.register(name, padding_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        reason = "its set_attn_implementation() had no effect"
        raise _not_applicable(type(model).__name__, reason, _REBUILD)
    if not hasattr(model, _BEFORE):
        setattr(model, _BEFORE, (before, model.register_forward_pre_hook(_refuse_outputs, with_kwargs=True)))


def dense_transformers(model: Any) -> None:
    """Restore the attention implementation that a model had before."""
    if hasattr(model, _BEFORE):
        before, handle = getattr(model, _BEFORE)
        model.set_attn_implementation(before)
        handle.remove()
        delattr(model, _BEFORE)


def _refuse_outputs(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Hook that raises ValueError if probabilities are requested. Not all models pass this request to their layers."""
    if kwargs.get("output_attentions"):
        raise _refusal("output_attentions", True)


def _refusal(name: str, value: object) -> ValueError:
    shown = "a tensor" if isinstance(value, Tensor) else value
    return incompatible(f"{name}={shown}", "sparse attention", *_REFUSED[name])


def _not_applicable(model: str, reason: str, remedy: str) -> ValueError:
    return ValueError(f"Sparse attention cannot be applied to {model}, because {reason}. {remedy}")


def _check_model(model: Any, patterns: Sequence[SparsityConfig]) -> bool:
    """Whether the model is causal. Raises ValueError unless the attention of all layers of the model can be replaced by
    these patterns.
    """
    name, config = type(model).__name__, model.config
    transformers = sys.modules["transformers"]
    if not all(hasattr(transformers, part) for part in _NEEDS) or not hasattr(model, "set_attn_implementation"):
        version = getattr(transformers, "__version__", "unknown")
        raise invalid_value(
            "The version of transformers",
            version,
            f"a version with {' and '.join(_NEEDS)}",
            'Run `pip install "transformers>=5"`.',
        )
    # In some models, such as GIT, only some of the layers use the interface. They declare no other implementation.
    declared = ("_supports_sdpa", "_supports_flex_attn", "_supports_attention_backend")
    if not model._can_set_attn_implementation() or not any(getattr(model, part, False) for part in declared):
        raise _not_applicable(name, "its layers do not use transformers' attention interface", _REBUILD)
    if not any("Attention" in type(part).__name__ for part in model.modules()):
        raise _not_applicable(name, "it has no attention layers", _REBUILD)
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        reason = "patterns are for self-attention, and not for attention from a decoder to an encoder"
        raise _not_applicable(name, reason, "Use an encoder-only or a decoder-only model.")
    if getattr(config, "output_attentions", False):
        raise _refusal("output_attentions", True)
    is_causal = any(getattr(part, "is_causal", False) is True for part in model.modules())
    for pattern in patterns:
        check_causal(pattern, is_causal)
    return is_causal


class TransformersAttention:
    """The attention function that transformers calls for each layer."""

    def __init__(self, layers: Sequence[PatternAttention]) -> None:
        self.layers = tuple(layers)
        self.is_one = len(set(self.layers)) == 1

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attention of query [batch, heads, queries, head_dim] to key and value [batch, kv_heads, keys, head_dim].

        `softcap` and `s_aux`, which are the sinks of heads, are part of some models. The sliding window of a layer
        comes with its mask, see `padding_mask`. Returns the result as [batch, queries, heads, head_dim], and None in
        place of the probabilities.
        """
        for name in _REFUSED:
            if kwargs.get(name) is not None and kwargs[name] is not False:
                raise _refusal(name, kwargs[name])
        attend = self._attend_of(module)
        causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
        if attention_mask is not None and attention_mask.dim() == 3:
            # The cache of a sliding window has dropped the first keys. Zeros take their places, so that all other keys
            # are at their positions in the pattern. The mask removes them.
            num_dropped = attention_mask.shape[2] - key.shape[2]
            key, value = (torch.nn.functional.pad(tensor, (0, 0, num_dropped, 0)) for tensor in (key, value))
            attention_mask = attention_mask[:, None]
        window = None
        if attention_mask is not None and attention_mask.dim() == 5:
            window = attention_mask.shape[3]
            attention_mask = attention_mask[:, 0, 0, 0]
        extras: dict[str, Any] = mask_extras(attention_mask, causal, query.shape[2], key.shape[2])
        starts, has_own = kwargs.get("cu_seq_lens_k"), "mask" in extras or "documents" in extras
        if starts is not None and not has_own and query.shape[2] == key.shape[2]:
            # Positions in all rows of the batch, one after the other, as transformers passes them to flash attention.
            shape = (key.shape[0], key.shape[2])
            extras["documents"] = documents_of(starts, shape[0] * shape[1]).view(shape)
        if "mask" in extras:
            # A mask of scores includes causality, with exceptions in some models, whose image tokens see each other.
            causal = attend.pattern.is_causal
        if softcap is not None:
            extras["softcap"] = float(softcap)
        if s_aux is not None:
            extras["sinks"] = s_aux
        out = attend(query, key, value, dropout, is_causal=causal, window=window, scale=scaling, **extras)
        return out.transpose(1, 2).contiguous(), None

    def _attend_of(self, module: nn.Module) -> PatternAttention:
        if self.is_one:
            return self.layers[0]
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer >= len(self.layers):
            allowed = f"a layer number from 0 to {len(self.layers) - 1}"
            remedy = "Use one pattern for all layers."
            raise invalid_value(f"{type(module).__name__}.layer_idx", layer, allowed, remedy)
        return self.layers[layer]


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask function that transformers calls once per forward, and once more for layers with a sliding window.
    Returns the padding as bool [batch, keys], with True for tokens that are used, or None if there is no padding.

    With a sliding window the padding is [batch, 1, 1, window, keys], where dimension 3 has a stride of zero. Its size
    tells the attention of a layer which window its mask has, because not all models pass the window to the attention.
    Packed sequences (`position_ids` that start again) are returned as the number of the sequence of each token, int32
    [batch, keys]. For any other mask a square mask of transformers is returned, [batch, 1, queries, keys]. If the cache
    of a sliding window has dropped the first keys, the mask also has columns for these, and is [batch, queries, all
    keys].
    """
    masking = sys.modules["transformers.masking_utils"]
    if isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length:
        raise ValueError(
            f"The cache has {kv_length} keys from position {kv_offset}, and the {q_length} queries start at position "
            f"{q_offset}. With sparse attention, the last key must be at the position of the last query. "
            "Remove cache_implementation, because the default dynamic cache has this form."
        )
    plain = (masking.causal_mask_function, masking.bidirectional_mask_function)
    documents = _packed(mask_function, plain) if attention_mask is None and not kv_offset else None
    if documents is not None and q_length == kv_length:
        return documents
    distance = None if kv_offset else _window(kwargs)
    if distance is not None and distance < kv_length:
        if attention_mask is None:
            attention_mask = torch.ones(batch_size, kv_length, dtype=torch.bool, device=kwargs.get("device"))
        padding = attention_mask[:, :kv_length].to(torch.bool)
        return padding[:, None, None, None].expand(-1, 1, 1, distance, -1)
    if distance is None and (kv_offset or mask_function not in plain):
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        square: Tensor = masking.sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **kwargs
        )
        return torch.nn.functional.pad(square[:, 0], (kv_offset, 0)) if kv_offset else square
    if attention_mask is None or (_can_read(attention_mask) and bool(attention_mask.all())):
        return None
    return attention_mask[:, :kv_length].to(torch.bool)


def _window(kwargs: dict[str, Any]) -> int | None:
    """The distance that the keys of a mask must be below, or None for a mask that is not just a sliding window.

    `local_size` is the window of the config or the size of chunks. transformers allows to skip only masks without a
    further condition. A window of transformers includes its last key if the mask is not causal.
    """
    size, config = kwargs.get("local_size"), kwargs.get("config")
    if size is None or size != getattr(config, "sliding_window", None):
        return None
    if size == getattr(config, "attention_chunk_size", None):
        return None
    if kwargs.get("allow_is_causal_skip"):
        return int(size)
    return int(size) + 1 if kwargs.get("allow_is_bidirectional_skip") else None


def _packed(mask_function: Any, plain: tuple[Any, ...]) -> Tensor | None:
    """The number of the sequence of each token, if the mask is one of `plain` and packed sequences. transformers makes
    such a mask from `position_ids`. None for any other mask, and while a graph is compiled.
    """
    if torch.compiler.is_compiling():
        return None
    parts = _free(mask_function, "and_masks").get("mask_functions")
    if not isinstance(parts, tuple) or len(parts) != 2 or parts[0] not in plain:
        return None
    found = _free(parts[1], "packed_sequence_mask_function").get("packed_sequence_mask")
    return found.to(torch.int32) if isinstance(found, Tensor) and found.dim() == 2 else None


def _free(function: Any, maker: str) -> dict[str, Any]:
    """The variables of a function that `maker` in transformers has returned."""
    cells = getattr(function, "__closure__", None)
    is_made = getattr(function, "__module__", "") == "transformers.masking_utils"
    if not cells or not is_made or not function.__qualname__.startswith(f"{maker}.<locals>."):
        return {}
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def mask_extras(mask: Tensor | None, is_causal: bool, num_queries: int, num_keys: int) -> dict[str, Tensor]:
    """Convert a mask of transformers to fields of Extras. A mask of causality and padding becomes key_padding, and the
    numbers of packed sequences from `padding_mask` become documents."""
    if mask is None:
        return {}
    if mask.dim() == 2 and mask.dtype == torch.int32:
        return {"documents": mask[:, :num_keys]}
    if mask.dim() == 2:
        return {"key_padding": mask[:, :num_keys] != 0}
    if mask.dim() != 4:
        raise invalid_value(
            "attention_mask.shape", tuple(mask.shape), "[batch, keys] or [batch, heads or 1, queries, keys]"
        )
    mask = mask[..., :num_keys]
    if mask.is_floating_point():
        removed = mask <= torch.finfo(mask.dtype).min / 2
        # A bias that is learned may be all zero at the start. It is kept, so that it gets its gradient.
        if mask.requires_grad or not _can_read(mask) or bool((mask.masked_fill(removed, 0.0) != 0).any()):
            return {"bias": mask.masked_fill(removed, 0.0), "mask": ~removed}
        mask = ~removed
    kept = mask != 0
    if kept.shape[1] == 1 and _can_read(mask):
        last = kept[:, 0, -1]  # the last query sees all keys except padding
        if kept.shape[2] == 1:
            return {"key_padding": last}
        seen = last[:, None].expand(-1, num_queries, -1)
        if is_causal:
            seen = seen.tril(num_keys - num_queries)
        if torch.equal(kept[:, 0], seen):
            return {"key_padding": last}
    return {"mask": kept}


def _can_read(mask: Tensor) -> bool:
    """Whether the host may read values of a mask. It cannot while a graph is compiled, or captured on the GPU."""
    return not (torch.compiler.is_compiling() or (mask.is_cuda and torch.cuda.is_current_stream_capturing()))
