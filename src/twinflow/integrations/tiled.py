# SPDX-License-Identifier: Apache-2.0
"""One call for long sequences: MLPs, norms and the loss of a model are computed for some tokens at a time ("tiles"),
and attention for some heads at a time.

Attention needs all tokens. Its backward needs several times the memory of the queries, so that the attention of very
long sequences is computed for a part of the heads at a time. The kernels then also stay below 2**31 elements.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from twinflow.activations.tiled import TILE, TileHandle, has_experts, is_norm, tile_modules
from twinflow.activations.wrap import class_of
from twinflow.conflicts import conflict
from twinflow.errors import invalid_value
from twinflow.integrations.chunked_loss import ChunkedLoss, chunk_loss
from twinflow.offload.blocks import find_blocks

_MLPS: Final = ("MLP", "FeedForward", "FFN", "Mlp")
HEADS_NUMEL: Final = 1 << 29  # elements of the queries whose attention is computed at a time
# The first two keep only their input, so tiles would not save memory. The others work on several tokens.
_OTHER_NORMS: Final = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.LocalResponseNorm)


class TiledSequence:
    """The tiled modules and the loss in chunks of a model. `remove` restores the model."""

    def __init__(self, tiles: TileHandle, loss: ChunkedLoss | None, undo: Sequence[Callable[[], None]]) -> None:
        self.names = tiles.names  # the tiled modules
        self.has_loss = loss is not None  # the loss of a Hugging Face model is computed in chunks
        self._tiles = tiles
        self._loss = loss
        self._undo = list(undo)

    def remove(self) -> None:
        """Restores the forwards of the modules, and the loss."""
        self._tiles.remove()
        if self._loss is not None:
            self._loss.remove()
            self._loss = None
        while self._undo:
            self._undo.pop()()


def tile_sequence(
    model: nn.Module, tile: int = TILE, *, modules: Sequence[str] | None = None, loss: bool | None = None
) -> TiledSequence:
    """Computes MLPs and loss of `model` for at most `tile` tokens at a time from now on, and norms for at most four
    times as many, also in backward.

    `modules`: names of the classes to tile, whose output for a token must depend on this token only. Without it, these
    are the MLPs of the model's blocks, and the norms that are not one of torch's. `loss`: whether the loss of a model
    of transformers is computed in chunks (`chunk_loss`); None: if the model allows it. The loss of twinflow's GPT
    always is. Results equal those without tiles up to the rounding of sums.

        handle = tile_sequence(model)
        model(input_ids=tokens, labels=tokens).loss.backward()
        handle.remove()

    Raises ValueError if there is nothing to tile, and for a module that is tiled or compiled already.
    """
    found = dict(_chosen(model, modules))
    if not found:
        expected = "a model whose blocks have an MLP, or a list of classes of the model in `modules`"
        raise invalid_value("The model of tile_sequence()", type(model).__name__, expected)
    lazy = None
    if loss or (loss is None and _has_causal_loss(model)):
        lazy = chunk_loss(model)
    try:
        tiles = tile_modules(found, tile)
        heads = split_heads(model)
        undo = [] if heads is None else [heads]
        if any(has_experts(module) for module in found.values()):
            undo.append(model.register_forward_pre_hook(_refuse_router_logits, with_kwargs=True).remove)
        return TiledSequence(tiles, lazy, undo)
    except ValueError:
        if lazy is not None:
            lazy.remove()
        raise


def _refuse_router_logits(model: nn.Module, args: object, kwargs: Mapping[str, object]) -> None:
    """Raises ValueError if the loss of a model uses what its routers compute. Tiles compute it without gradients."""
    if kwargs.get("output_router_logits", getattr(getattr(model, "config", None), "output_router_logits", False)):
        raise conflict("Tiled sequences", "router loss")


def split_heads(model: Any) -> Callable[[], None] | None:
    """Computes the attention of a model of transformers for some heads at a time if the sequence is very long. Returns
    a function that restores the attention; None for other models, and for eager and sparse attention.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return None
    before = model.config._attn_implementation
    if before not in ("sdpa", "flash_attention_2", "flash_attention_3"):
        return None
    name = f"twinflow_heads_{before}"
    inner = transformers.AttentionInterface()[before]
    transformers.AttentionInterface.register(name, _SomeHeads(inner))
    transformers.AttentionMaskInterface.register(name, transformers.AttentionMaskInterface()[before])
    model.set_attn_implementation(name)

    def restore() -> None:
        if model.config._attn_implementation == name:
            model.set_attn_implementation(before)

    return restore


class _SomeHeads:
    """The attention function that transformers calls for each layer."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self._inner = inner

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        num_groups = groups_of(query.numel(), key.shape[1])
        has_heads = attention_mask is not None and attention_mask.dim() == 4 and attention_mask.shape[1] > 1
        if num_groups == 1 or has_heads or kwargs.get("s_aux") is not None:
            found: tuple[Tensor, Any] = self._inner(module, query, key, value, attention_mask, **kwargs)
            return found
        # The backward of a split is one concatenation.
        parts = [torch.split(tensor, tensor.shape[1] // num_groups, 1) for tensor in (query, key, value)]
        outs = [self._inner(module, *heads, attention_mask, **kwargs)[0] for heads in zip(*parts, strict=True)]
        return torch.cat(outs, 2), None


def groups_of(numel: int, num_kv_heads: int) -> int:
    """The number of groups of heads for queries of `numel` elements, a divisor of the number of heads of keys."""
    wanted = -(-numel // HEADS_NUMEL)
    return next((count for count in range(wanted, num_kv_heads) if num_kv_heads % count == 0), num_kv_heads)


def _chosen(model: nn.Module, classes: Sequence[str] | None) -> Iterator[tuple[str, nn.Module]]:
    if classes is not None:
        present = {class_of(module) for module in model.modules()}
        for name in classes:
            if name not in present:
                raise invalid_value("A class in modules=", name, sorted(present))
        yield from ((name, module) for name, module in model.named_modules() if class_of(module) in classes)
        return
    blocks = find_blocks(model, is_trained=False)
    inside = {id(part) for block in blocks for part in block.module.modules()}
    for block in blocks:
        for name, child in block.module.named_children():
            if class_of(child).endswith(_MLPS) or _needs_tiles(child):
                yield f"{block.name}.{name}", child
    yield from ((name, part) for name, part in model.named_modules() if id(part) not in inside and _needs_tiles(part))


def _needs_tiles(module: nn.Module) -> bool:
    return is_norm(module) and not isinstance(module, _OTHER_NORMS)


def _has_causal_loss(model: nn.Module) -> bool:
    """Whether `chunk_loss` can compute the loss of a model."""
    get_head = getattr(model, "get_output_embeddings", None)
    loss: object = getattr(model, "loss_function", None)
    head = get_head() if callable(get_head) else None
    is_plain = isinstance(head, nn.Linear) and head.bias is None and "forward" not in vars(head)
    return is_plain and getattr(loss, "__name__", "") == "ForCausalLMLoss"
