# SPDX-License-Identifier: Apache-2.0
"""`split_sequence`: makes a model work on sequences whose tokens are on several ranks.

Models of transformers get an attention function under its own name in transformers' attention interface. It exchanges
tokens for heads and calls the attention function that the model had before (ulysses), or it is the ring. The loss
function of the model computes the mean over all ranks. Models with layers that have `num_heads` and
`set_attention(fn)`, such as twinflow's GPT, get their attention functions through it. Such a model has the method
`set_sequence(ranks)`. It takes the positions of its tokens from `ranks.positions`, and its loss from `ranks.mean`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache, partial
from itertools import count, pairwise
from typing import Any, Final, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from twinflow.attention.function import PatternAttention
from twinflow.attention.huggingface import TransformersAttention, transformers_models
from twinflow.conflicts import conflict
from twinflow.dist.group import TIMEOUT
from twinflow.errors import invalid_value, wrong_state
from twinflow.loss import IGNORE_INDEX
from twinflow.offload.hooks import in_backward
from twinflow.parallel.ring import Step, plan_steps, ring_attention
from twinflow.parallel.sequence import DOCUMENTS, MODES, SequenceRanks, check_heads, make_groups
from twinflow.parallel.ulysses import gathered_attention, ulysses_attention

_REMEDY = "Call sparsify() and tile_sequence() before split_sequence()."
_NUMBERS: Final = count()  # of the names in transformers' attention interface, which are never used again


@runtime_checkable
class TakesSequence(Protocol):
    """A model that computes positions and loss itself."""

    def set_sequence(self, ranks: SequenceRanks | None) -> None: ...


class SplitSequence:
    """A model whose sequences are split over ranks. `remove` restores the model."""

    def __init__(self, ranks: SequenceRanks, undo: Sequence[Callable[[], object]]) -> None:
        self.ranks = ranks
        self._undo = list(undo)

    def remove(self) -> None:
        """Restores attention, loss and positions of the model."""
        while self._undo:
            self._undo.pop()()


def split_sequence(
    model: nn.Module,
    size: int,
    mode: str = "ulysses",
    *,
    device: torch.device | None = None,
    timeout: timedelta = TIMEOUT,
) -> SplitSequence:
    """Splits each sequence over `size` ranks from now on. A collective call: every rank has to make it.

    `mode`: "ulysses" exchanges tokens for heads around attention, "ring" sends keys and values around the ranks.
    `device`: that of the model's forward; None: that of its parameters. Use `split` of the result's `ranks` for each
    batch, and train with an optimizer that averages gradients over all ranks. Raises ValueError for a model whose
    attention cannot be split.

        handle = split_sequence(model, size=4)
        batch = handle.ranks.split({"input_ids": tokens, "labels": tokens})
        model(**batch).loss.backward()
    """
    if mode not in MODES:
        raise invalid_value("mode", mode, MODES)
    found, own = transformers_models(model), _hooks(model)
    if not found and not (own and isinstance(model, TakesSequence)):
        raise ValueError(
            f"The sequences of a model of the class {type(model).__name__} cannot be split over ranks. The model must "
            "be a causal language model of transformers, or have the method set_sequence() and layers with num_heads "
            "and set_attention(fn), as twinflow's GPT has."
        )
    for part in found:
        _check_transformers(part, mode, size)
    for layer in own:
        _check_hook(layer, mode, size)
    is_sparse = any(_is_sparse(layer.attend) for layer in own) or any(_is_sparse_model(part) for part in found)
    where = device or next((param.device for param in model.parameters()), torch.device("cpu"))
    group, sums, calls, data = make_groups(size, where, timeout)
    is_zigzag = mode == "ring" and not is_sparse and size > 1
    ranks = SequenceRanks(group, sums, calls, mode, data, is_zigzag, is_causal=_is_causal(found))
    undo: list[Callable[[], object]] = []
    for part in found:
        undo += _split_transformers(part, ranks)
    if own:
        undo += _split_hooks(model, own, ranks)
    return SplitSequence(ranks, undo)


# Models with layers that have `set_attention`.


def _hooks(model: nn.Module) -> list[Any]:
    return [part for part in model.modules() if hasattr(part, "set_attention") and hasattr(part, "num_heads")]


def _is_sparse(attend: object) -> bool:
    return isinstance(attend, partial) and isinstance(attend.func, PatternAttention)


def _check_hook(layer: Any, mode: str, size: int) -> None:
    if mode == "ulysses":
        check_heads(int(layer.num_heads), size)
        if _is_sparse(layer.attend):
            _check_pattern(layer.attend.func, size)
    elif getattr(layer, "dropout", 0.0) and not _is_sparse(layer.attend):
        raise conflict("Sequence parallelism", "ring dropout", dropout=layer.dropout)


def _split_hooks(model: Any, layers: Sequence[Any], ranks: SequenceRanks) -> list[Callable[[], object]]:
    before = [layer.attend for layer in layers]
    made = [_LayerAttention(attend, ranks) for attend in before]
    for layer, attend in zip(layers, made, strict=True):
        layer.set_attention(attend)
    model.set_sequence(ranks)

    def check(_: nn.Module, args: tuple[Any, ...]) -> None:
        if any(layer.attend is not attend for layer, attend in zip(layers, made, strict=True)):
            raise wrong_state(
                "The model cannot run on a part of a sequence",
                "its attention was replaced after its sequences were split",
                _REMEDY,
            )
        if args and isinstance(args[0], Tensor):
            ranks.check_inputs(args[0])

    handle: RemovableHandle = model.register_forward_pre_hook(check)
    restore = [partial(layer.set_attention, attend) for layer, attend in zip(layers, before, strict=True)]
    return [handle.remove, partial(model.set_sequence, None), *restore]


class _LayerAttention:
    """The attention function of a layer with `set_attention`."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor, float], Tensor], ranks: SequenceRanks) -> None:
        self._attend, self._ranks = attend, ranks

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        ranks, group = self._ranks, self._ranks.group
        if ranks.mode == "ulysses":
            return ulysses_attention(q, k, v, group, lambda q, k, v: self._attend(q, k, v, dropout))
        if _is_sparse(self._attend):
            return gathered_attention(q, k, v, group, lambda q, k, v: self._attend(q, k, v, dropout))
        return ring_attention(q, k, v, group, steps_of(ranks, q.shape[2]))


def steps_of(ranks: SequenceRanks, num_local: int, starts: tuple[int, ...] | None = None) -> Sequence[Step]:
    """The steps of the ring for `num_local` tokens on each rank. `starts`: of packed sequences, and the end."""
    total = num_local * ranks.size
    chunks = tuple(tuple(ranks.chunks(total, rank)) for rank in range(ranks.size))
    return _planned_steps(chunks, ranks.rank, (0, total) if starts is None else starts)


_planned_steps = lru_cache(maxsize=4)(plan_steps)  # all layers of a forward have the same steps


# Models of transformers.


def _is_causal(models: Sequence[nn.Module]) -> bool:
    return not models or any(getattr(part, "is_causal", False) is True for model in models for part in model.modules())


def _sparse_attention_of(model: Any) -> TransformersAttention | None:
    functions = sys.modules["transformers"].AttentionInterface()
    name = model.config._attn_implementation
    found = functions.get(name)
    return found if isinstance(found, TransformersAttention) else None


def _is_sparse_model(model: Any) -> bool:
    return _sparse_attention_of(model) is not None


def _check_pattern(attend: PatternAttention, size: int) -> None:
    pattern = attend.pattern
    if attend.heads is None and size > 1 and pattern.different_layout_per_head:
        raise conflict("Sequence parallelism", "head patterns")


def _check_transformers(model: Any, mode: str, size: int) -> None:
    """Raises ValueError for models whose result would differ from that of one process."""
    name, config = type(model).__name__, model.config
    head = model.get_output_embeddings()
    loss = getattr(model, "loss_function", None)
    if head is None or getattr(loss, "__qualname__", type(loss).__qualname__) not in _LOSSES:
        raise conflict("Sequence parallelism", "other model", name=name)
    if getattr(config, "output_router_logits", False):
        raise conflict("Sequence parallelism", "router loss")
    if config.get_text_config() is not config:
        raise conflict("Sequence parallelism", "modalities", name=name)
    if not model._can_set_attn_implementation() or getattr(config, "is_encoder_decoder", False):
        raise conflict("Sequence parallelism", "own attention", name=name)
    if getattr(config, "add_cross_attention", False):
        raise conflict("Sequence parallelism", "own attention", name=name)
    mixers = sorted({type(part).__name__ for part in model.modules() if _mixes_tokens(part)})
    if mixers:
        raise conflict("Sequence parallelism", "mixing layers", name=name, layers=", ".join(mixers))
    if "position_ids" not in inspect.signature(type(model).forward).parameters or _has_own_positions(model):
        raise conflict("Sequence parallelism", "own positions", name=name)
    sparse = _sparse_attention_of(model)
    if mode == "ulysses":
        check_heads(int(config.num_attention_heads), size)
        for attend in sparse.layers if sparse is not None else ():
            _check_pattern(attend, size)
        return
    if not _is_causal([model]):
        raise conflict("Sequence parallelism", "ring bidirectional", name=name)
    if sparse is None and _window_of(config):
        raise conflict("Sequence parallelism", "ring window", name=name)
    dropout = getattr(config, "attention_dropout", 0.0)
    if sparse is None and dropout:
        raise conflict("Sequence parallelism", "ring dropout", dropout=dropout)


# Loss functions of causal language models: that of transformers, and that of chunk_loss().
_LOSSES = ("ForCausalLMLoss", "ChunkedLoss._loss")
# Parts of the names of layers outside of the attention interface whose output depends on several tokens: they pass a
# state from token to token, or choose the keys of each query.
_MIXERS = (
    "Mamba",
    "DeltaNet",
    "DeltaAttention",
    "LinearAttention",
    "LightningAttention",
    "RecurrentBlock",
    "ShortConv",
    "Rwkv",
    "LSTM",
    "Indexer",
    "Compressor",
    "DogeAttention",
)
_MIXING = (nn.RNNBase, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d)


def _mixes_tokens(part: nn.Module) -> bool:
    return isinstance(part, _MIXING) or any(kind in type(part).__name__ for kind in _MIXERS)


def _has_own_positions(model: nn.Module) -> bool:
    """Whether learned positions begin after the index of padding, as in RoBERTa, or layers scale their queries by
    positions that they count themselves, as in Llama 4.
    """
    embeddings = (part for name, part in model.named_modules() if name.endswith("position_embeddings"))
    if any(getattr(part, "padding_idx", None) is not None for part in embeddings):
        return True
    return any(getattr(part, "attn_temperature_tuning", False) and not part.use_rope for part in model.modules())


def _check_rope(ropes: Sequence[Any], ranks: SequenceRanks, num_local: int, is_packed: bool) -> None:
    """Raises ValueError if ranks would choose different frequencies. A rotary embedding whose frequencies depend on the
    length of the sequence takes the highest position of its rank for it.
    """
    total = num_local * ranks.size
    for rope in ropes:
        shortest = total // ranks.size if is_packed else min(ranks.chunks(total, i)[-1][1] for i in range(ranks.size))
        for kind, limit in _limits_of(rope):
            if total > limit and (kind == "dynamic" or is_packed or shortest <= limit):
                raise conflict("Sequence parallelism", "length of rope", kind=kind, limit=limit, total=total)


def _limits_of(rope: Any) -> list[tuple[str, int]]:
    """The kinds of frequencies of a rotary embedding that depend on the length of the sequence, with the length above
    which they change.
    """
    kinds, params = rope.rope_type, rope.config.rope_parameters
    pairs = [(kinds, params)] if isinstance(kinds, str) else [(kind, params[layer]) for layer, kind in kinds.items()]
    found = []
    for kind, options in pairs:
        if kind == "longrope":
            found.append((kind, int(options["original_max_position_embeddings"])))
        elif "dynamic" in kind:
            found.append(("dynamic", int(rope.original_max_seq_len)))
    return found


def _window_of(config: Any) -> bool:
    """Whether some layers see only a window of the sequence."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return any(kind != "full_attention" for kind in kinds)
    return isinstance(getattr(config, "sliding_window", None), int) and getattr(config, "use_sliding_window", True)


def _split_transformers(model: Any, ranks: SequenceRanks) -> list[Callable[[], object]]:
    transformers = sys.modules["transformers"]
    before = model.config._attn_implementation
    attention = _TransformersAttention(before, ranks)
    name = f"twinflow_sequence_{next(_NUMBERS)}"
    transformers.AttentionInterface.register(name, attention)
    transformers.AttentionMaskInterface.register(name, attention.mask)
    model.set_attn_implementation(name)
    loss = model.loss_function
    model.loss_function = _SequenceLoss(loss, ranks)
    ropes = [part for part in model.modules() if hasattr(part, "rope_type") and _limits_of(part)]

    def check(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if model.config._attn_implementation != name:
            raise wrong_state(
                "The model cannot run on a part of a sequence",
                "its attention was replaced after its sequences were split",
                _REMEDY,
            )
        tokens = kwargs.get("input_ids", args[0] if args else kwargs.get("inputs_embeds"))
        if kwargs.get("position_ids") is None:
            raise wrong_state(
                "The model cannot run on a part of a sequence",
                "it was called without position_ids",
                "Divide the batch with engine.sequence.split(batch), or let the loader of the engine do it.",
            )
        if kwargs.get("attention_mask") is not None and ranks.is_causal:
            raise conflict("Sequence parallelism", "left padding")
        if kwargs.get("output_router_logits"):
            raise conflict("Sequence parallelism", "router loss")
        if isinstance(tokens, Tensor):
            _check_arguments(kwargs, tokens)
            _check_rope(ropes, ranks, tokens.shape[1], kwargs.get(DOCUMENTS) is not None)
            ranks.check_inputs(tokens)
        attention.begin(kwargs.get(DOCUMENTS))

    handle: RemovableHandle = model.register_forward_pre_hook(check, with_kwargs=True)

    def restore() -> None:
        model.set_attn_implementation(before)
        if isinstance(model.loss_function, _SequenceLoss):
            model.loss_function = loss
        # The interface cannot remove a name. Without the attention, it does not keep the groups of the ranks alive.
        transformers.AttentionInterface.register(name, _removed)
        transformers.AttentionMaskInterface.register(name, _removed)

    return [handle.remove, restore]


def _check_arguments(kwargs: Mapping[str, Any], tokens: Tensor) -> None:
    """Raises ValueError for tensors that are not divided with the tokens."""
    for name, value in kwargs.items():
        if not isinstance(value, Tensor) or value.dim() == 0 or name in _NOT_DIVIDED:
            continue
        if value.shape[:2] != tokens.shape[:2] or (name == "position_ids" and value.dim() > 2):
            raise conflict("Sequence parallelism", "argument", argument=name, shape=tuple(value.shape))


# The starts of packed sequences, and the divisor of the loss, which has an error of its own.
_NOT_DIVIDED = (DOCUMENTS, "cu_seq_lens_k", "num_items_in_batch")


def _removed(*_: object, **__: object) -> Any:
    """Takes the place of the attention of a model whose sequences are no longer split."""
    raise wrong_state(
        "The model cannot run on a part of a sequence",
        "the split of its sequences was removed",
        "Call split_sequence() for this model, or its method set_attn_implementation().",
    )


class _SequenceLoss:
    """The loss function of a causal language model, as the mean over all ranks."""

    def __init__(self, inner: Callable[..., Tensor], ranks: SequenceRanks) -> None:
        self._inner, self._ranks = inner, ranks

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = IGNORE_INDEX,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if num_items_in_batch is not None:
            raise conflict("Sequence parallelism", "num_items_in_batch")
        if shift_labels is None:
            raise wrong_state(
                "The loss of a part of a sequence cannot be computed",
                "the model was called without shift_labels, and the label of a rank's last token is on another rank",
                "Divide the batch with engine.sequence.split(batch).",
            )
        total = self._inner(
            logits=logits,
            labels=labels,
            vocab_size=vocab_size,
            num_items_in_batch=1,  # the sum of the losses
            ignore_index=ignore_index,
            shift_labels=shift_labels,
            **kwargs,
        )
        return self._ranks.mean(total, (shift_labels != ignore_index).sum())


class _Layer:
    """A layer, for an attention function that reads its number of query heads for each head of keys."""

    def __init__(self, layer: nn.Module, num_groups: int, sinks: Tensor | None) -> None:
        self._layer = layer
        self.num_key_value_groups = num_groups
        self.defined_in = type(layer).__module__
        if sinks is not None:
            self.sinks = sinks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)  # `sinks` too, unless the rank has some heads only


class _TransformersAttention:
    """The attention function that transformers calls for each layer, and its mask function."""

    def __init__(self, inner: str, ranks: SequenceRanks) -> None:
        transformers = sys.modules["transformers"]
        functions = transformers.AttentionInterface()
        self._inner: Callable[..., Any] = functions.get(inner, _eager)
        self._inner_mask = transformers.AttentionMaskInterface()[inner]
        self._is_sparse = isinstance(self._inner, TransformersAttention)
        self._ranks = ranks
        self._is_packed = False  # the present forward has packed sequences
        self._read: tuple[Tensor, int, tuple[int, ...]] | None = None  # starts: tensor, its version, its values

    def begin(self, documents: Tensor | None) -> None:
        """Called before a forward. `documents`: the starts of packed sequences."""
        self._is_packed = documents is not None
        if self._is_packed and self._is_sparse:
            raise conflict("Sequence parallelism", "packed sparse")

    def _starts(self, documents: Tensor) -> tuple[int, ...]:
        """The starts of packed sequences, and the end, as numbers. Read once for all layers, because the read of a
        tensor on the device waits for the device. Layers that backward runs again may have those of another forward.
        """
        if documents.is_inference():  # such a tensor has no version, so a change of its values would not be noticed
            return tuple(documents.tolist())
        read = self._read
        if read is None or read[0] is not documents or read[1] != documents._version:
            self._read = read = documents, documents._version, tuple(documents.tolist())
        return read[2]

    def mask(
        self, batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0, **kwargs: Any
    ) -> Any:
        """The mask of whole sequences, which the inner attention function gets. None with packed sequences."""
        ranks = self._ranks
        if q_length != kv_length:
            raise conflict("Sequence parallelism", "cache")
        if self._is_packed and kwargs.get("local_size") is not None:
            raise conflict("Sequence parallelism", "packed window")
        if self._is_packed or (ranks.mode == "ring" and not self._is_sparse):
            return None
        if kwargs.get("attention_mask") is not None:  # of a bidirectional model
            kwargs["attention_mask"] = self._gathered(kwargs["attention_mask"])
        if ranks.mode == "ulysses":
            total = q_length * ranks.size
            return self._inner_mask(batch_size, total, total, q_offset, kv_offset, **kwargs)
        start = ranks.rank * q_length
        return self._inner_mask(batch_size, q_length, start + q_length, start, kv_offset, **kwargs)

    def _gathered(self, mask: Tensor) -> Tensor:
        group = self._ranks.group
        rows = mask.new_empty((group.world, *mask.shape), dtype=torch.uint8)
        rows[group.rank] = mask
        group.all_gather(rows.view(-1))
        return rows.transpose(0, 1).flatten(1, 2).to(mask.dtype)

    def _is_of_whole_sequences(self, mask: Any, num_local: int) -> bool:
        """Whether a mask can be the one of `mask`, and not one that a layer has made from the tokens of this rank."""
        ranks = self._ranks
        if self._is_packed or (ranks.mode == "ring" and not self._is_sparse):
            return False  # `mask` has returned None
        num_keys = num_local * (ranks.size if ranks.mode == "ulysses" else ranks.rank + 1)
        return not isinstance(mask, Tensor) or mask.shape[-1] == num_keys

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attention of query [batch, heads, tokens of a rank, head_dim]. Returns [batch, tokens, heads, head_dim]."""
        ranks, group = self._ranks, self._ranks.group
        if query.shape[2] != key.shape[2]:
            raise conflict("Sequence parallelism", "cache")
        documents: Tensor | None = kwargs.pop(DOCUMENTS, None)
        kwargs.pop("cu_seq_lens_k", None)
        if self._is_packed and documents is None and not in_backward():
            raise conflict("Sequence parallelism", "packed model", name=type(module).__name__)
        kwargs.pop("position_ids", None)  # those of this rank's tokens, with which some functions look for packing
        if attention_mask is not None and not self._is_of_whole_sequences(attention_mask, query.shape[2]):
            raise conflict("Sequence parallelism", "own mask", name=type(module).__name__)
        if ranks.mode == "ring" and not self._is_sparse:
            _refuse_in_ring(module, kwargs)
            steps = steps_of(ranks, query.shape[2], None if documents is None else self._starts(documents))
            return ring_attention(query, key, value, group, steps, scaling).transpose(1, 2).contiguous(), None
        sinks: Tensor | None = kwargs.get("s_aux")

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            own = sinks
            if sinks is not None and q.shape[1] != len(sinks):
                own = sinks[group.rank * q.shape[1] : (group.rank + 1) * q.shape[1]]
                kwargs["s_aux"] = own
            layer = _Layer(module, q.shape[1] // k.shape[1], own)
            options = {"scaling": scaling, "dropout": dropout, **kwargs}
            if documents is None:
                out = self._inner(layer, q, k, v, attention_mask, **options)[0]
            else:
                lengths = [stop - start for start, stop in pairwise(self._starts(documents))]
                parts = [torch.split(tensor, lengths, 2) for tensor in (q, k, v)]
                out = torch.cat([self._inner(layer, *one, None, **options)[0] for one in zip(*parts, strict=True)], 1)
            found: Tensor = out.transpose(1, 2)
            return found

        exchange = ulysses_attention if ranks.mode == "ulysses" else gathered_attention
        return exchange(query, key, value, group, attend).transpose(1, 2).contiguous(), None


def _eager(layer: _Layer, *args: Any, **kwargs: Any) -> Any:
    """The eager attention of a layer, which is a function of the module that defines the layer."""
    return sys.modules[layer.defined_in].eager_attention_forward(layer, *args, **kwargs)


def _refuse_in_ring(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raises ValueError for options of an attention that the ring does not have."""
    for option in ("softcap", "s_aux", "sliding_window", "position_bias"):
        if kwargs.get(option) is not None:
            raise conflict("Sequence parallelism", "ring option", option=option, name=type(module).__name__)
