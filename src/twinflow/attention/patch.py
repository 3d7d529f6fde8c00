# SPDX-License-Identifier: Apache-2.0
"""`sparsify` replaces the attention of an existing model by sparse attention, and `unsparsify` restores it.

Three kinds of layers are supported. For models of transformers, sparse attention is registered in the attention
interface under its own name. Layers with `num_heads` and `set_attention(fn)`, such as those of twinflow's GPT, get the
sparse attention through `set_attention`. A `SparseSelfAttention` gets the pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from twinflow.attention.function import PatternAttention, check_causal
from twinflow.attention.huggingface import dense_transformers, heads_of_layers, sparse_transformers, transformers_models
from twinflow.attention.module import SparseSelfAttention
from twinflow.attention.patterns import DenseSparsityConfig, SparsityConfig, pattern_from_config
from twinflow.errors import invalid_value

Pattern = SparsityConfig | Sequence[SparsityConfig] | Mapping[int, SparsityConfig]
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # q, k, v [B, H, n, D] and dropout
Model = TypeVar("Model", bound=nn.Module)


def sparsify(model: Model, pattern: Pattern, *, backend: str = "auto", heads: tuple[int, int] | None = None) -> Model:
    """Replace the attention of a model by sparse attention, for training and for generation. Returns the model.

    `pattern` is one pattern for all layers, a list with one pattern per layer, or a dict from layer to pattern. Layers
    that are not in the dict are dense. `heads` is the range of the pattern's heads that this rank has under tensor
    parallelism. Raises ValueError for a model or a pattern that does not fit.
    """
    if not isinstance(model, nn.Module):
        raise invalid_value("model", model, "an nn.Module", "Build the model first, and pass it.")
    found, hooks, own = transformers_models(model), _hooks(model), _own(model)
    if not found and not hooks and not own:
        raise _nothing_to_change(model)
    for_hooks = _by_layer(pattern, [int(layer.num_heads) for layer in hooks])
    made = [_for_hook(layer, its, backend, heads) for layer, its in zip(hooks, for_hooks, strict=True)]
    for_own = _by_layer(pattern, [layer.sparsity_config.num_heads for layer in own])
    for part in found:
        sparse_transformers(part, _by_layer(pattern, heads_of_layers(part)), backend, heads)
    for layer, attend in zip(hooks, made, strict=True):
        layer.set_attention(attend)
    for layer, its in zip(own, for_own, strict=True):
        layer.set_pattern(its)
    return model


def unsparsify(model: Model) -> Model:
    """Undo `sparsify` in transformers models and by `set_attention(None)`. A SparseSelfAttention keeps its pattern."""
    for part in transformers_models(model):
        dense_transformers(part)
    for layer in _hooks(model):
        layer.set_attention(None)
    return model


def apply_section(model: nn.Module, section: Mapping[str, Any]) -> None:
    """Apply the `sparse_attention` section of a config. The mode "dense" changes only layers of the class
    SparseSelfAttention.
    """
    is_dense = section.get("mode", "fixed") == "dense"
    own = _own(model)
    counts = {layer.sparsity_config.num_heads for layer in own}
    if not is_dense:
        counts |= {count for part in transformers_models(model) for count in heads_of_layers(part)}
        counts |= {int(layer.num_heads) for layer in _hooks(model)}
    if len(counts) > 1:
        numbers = " or ".join(map(str, sorted(counts)))
        raise ValueError(
            f"The layers of the model have {numbers} heads, but sparse_attention in the config needs the same number "
            "of heads in all layers. Remove sparse_attention from the config, and call twinflow.attention.sparsify "
            "with a pattern per layer."
        )
    if not counts and not is_dense:
        raise _nothing_to_change(model)
    pattern = pattern_from_config(section, counts.pop() if counts else 1)
    if not is_dense:
        sparsify(model, pattern)
        return
    for layer in own:
        layer.set_pattern(pattern)


def _hooks(model: nn.Module) -> list[Any]:
    """Layers whose attention function can be set."""
    return [part for part in model.modules() if hasattr(part, "set_attention") and hasattr(part, "num_heads")]


def _own(model: nn.Module) -> list[SparseSelfAttention]:
    return [part for part in model.modules() if isinstance(part, SparseSelfAttention)]


def _for_hook(layer: Any, pattern: SparsityConfig, backend: str, heads: tuple[int, int] | None) -> Attend:
    is_causal = bool(getattr(layer, "is_causal", True))
    check_causal(pattern, is_causal)
    attend = PatternAttention(pattern, getattr(layer, "max_tokens", 1), backend=backend, heads=heads)
    return partial(attend, is_causal=is_causal)


def _by_layer(pattern: Pattern, num_heads: Sequence[int]) -> list[SparsityConfig]:
    """One pattern per layer, checked against the number of heads of the layer."""
    num_layers = len(num_heads)
    if isinstance(pattern, SparsityConfig):
        patterns = [pattern] * num_layers
    elif isinstance(pattern, Mapping):
        patterns = _filled(pattern, num_layers)
    elif isinstance(pattern, Sequence) and not isinstance(pattern, str):
        if num_layers and len(pattern) != num_layers:
            allowed = f"{num_layers}, one for each layer of the model"
            raise invalid_value("The number of patterns", len(pattern), allowed)
        patterns = list(pattern)[:num_layers]
    else:
        allowed = "a SparsityConfig, a list of them, or a dict from layer to SparsityConfig"
        raise ValueError(f"pattern is of type {type(pattern).__name__}, but must be {allowed}.")
    for its, count in zip(patterns, num_heads, strict=True):
        if not isinstance(its, SparsityConfig):
            raise ValueError(f"The pattern of a layer is of type {type(its).__name__}, but must be a SparsityConfig.")
        if its.num_heads != count:
            allowed = f"{count}, the number of heads of the layer"
            remedy = f"Build the pattern with num_heads={count}."
            raise invalid_value("pattern.num_heads", its.num_heads, allowed, remedy)
    return patterns


def _filled(patterns: Mapping[int, SparsityConfig], num_layers: int) -> list[SparsityConfig]:
    for layer in patterns:
        if num_layers and layer not in range(num_layers):
            raise invalid_value("A key of the dict of patterns", layer, f"a layer number from 0 to {num_layers - 1}")
    if not patterns:
        raise invalid_value("pattern", patterns, "a dict with at least one layer and its pattern")
    some = next(iter(patterns.values()))
    dense = DenseSparsityConfig(some.num_heads, some.block)
    return [patterns.get(layer, dense) for layer in range(num_layers)]


def _nothing_to_change(model: nn.Module) -> ValueError:
    return ValueError(
        f"Sparse attention cannot be applied to a model of the class {type(model).__name__}. The model must be a model "
        "of transformers, have layers with num_heads and set_attention(fn), or contain SparseSelfAttention. Build the "
        "model with twinflow.attention.SparseSelfAttention."
    )
