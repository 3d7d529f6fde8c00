# SPDX-License-Identifier: Apache-2.0
"""Segments: contiguous elements of one parameter, and the buffers for their master weight and states."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol

import torch
from torch import Tensor

from twinflow.errors import incompatible, invalid_value
from twinflow.rules import formats
from twinflow.rules.formats import BLOCK, FORMATS, MASTERS, SCALED, Key
from twinflow.rules.rule import Hyper, Rule

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8, "4bit": torch.uint8}
Pair = tuple[Tensor | None, Tensor | None]


class Zeros(Protocol):
    """Allocates a buffer of zeros: torch.zeros, or a function that also uses huge pages."""

    def __call__(self, numel: int, /, *, dtype: torch.dtype) -> Tensor: ...


@dataclass(frozen=True)
class Store:
    """Flat buffers of one segment: master weight, weight of the model, states and their scales.

    A split master has its upper halves in `weight`, which is bf16, and its lower halves in `master`, which is int16.
    Without a master, `master` is the bf16 weight itself, and `weight` is None. The first state of the 4-bit format has
    the codes of both states, and the second is None.
    """

    format: str
    master: Tensor
    weight: Tensor | None = None
    states: Pair = (None, None)
    scales: Pair = (None, None)

    @property
    def is_split(self) -> bool:
        """Whether the master weight is stored as two halves."""
        return self.master.dtype == torch.int16

    @property
    def has_master(self) -> bool:
        """False if bf16 weights are the only copy."""
        return self.master.dtype != torch.bfloat16

    def has_state(self, which: int) -> bool:
        """Whether the store has the first (0) or the second (1) state."""
        return self.states[0 if self.format == "4bit" else which] is not None

    def narrow(self, start: int, numel: int) -> Store:
        """Views of the elements [start, start + numel). `start` must be a multiple of 128."""
        if start % BLOCK:
            raise invalid_value("start", start, f"a multiple of {BLOCK}")
        first_block, num_blocks = start // BLOCK, -(-numel // BLOCK)

        return replace(
            self,
            master=self.master.narrow(0, start, numel),
            weight=self.weight.narrow(0, start, numel) if self.weight is not None else None,
            states=_each(self.states, lambda state: state.narrow(0, start, numel)),
            scales=_each(self.scales, lambda scale: scale.narrow(0, first_block, num_blocks)),
        )

    def empty_like(self) -> Store:
        """New buffers of the same sizes, not initialised. An update that writes to them leaves this store unchanged."""
        weight = torch.empty_like(self.weight) if self.weight is not None else None
        states, scales = (_each(pair, torch.empty_like) for pair in (self.states, self.scales))
        return Store(self.format, torch.empty_like(self.master), weight, states, scales)


_ALIGN: Final = 512  # in one buffer, every tensor of a store starts at a multiple of this number of bytes


def room_of(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of a buffer that contains tensors like these, one after the other."""
    return sum(_room(tensor) for tensor in tensors if tensor is not None)


def views_in(raw: Tensor, tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Consecutive parts of the bytes `raw`, with the lengths and dtypes of these tensors; None for None."""
    found: list[Tensor | None] = []
    at = 0
    for like in tensors:
        found.append(None if like is None else raw[at : at + like.numel() * like.element_size()].view(like.dtype))
        at += 0 if like is None else _room(like)
    return found


def _room(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN


def _each(pair: Pair, change: Callable[[Tensor], Tensor]) -> Pair:
    first, second = (change(tensor) if tensor is not None else None for tensor in pair)
    return first, second


@dataclass(frozen=True)
class Segment:
    """One update of a segment: it reads `store` and writes `target`, or writes `store` if `target` is None."""

    rule: Rule
    hyper: Hyper
    grad: Tensor
    store: Store
    factor: float = 1.0  # multiplies the gradient; combines unscaling and clipping
    key: Key = (0, 0)  # formats.rounding_key(step, parameter), for stochastic rounding
    first_index: int = 0  # position of element 0 in its parameter
    target: Store | None = None
    name: str = "segment"


def state_numels(rule: Rule, format: str, numel: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Numbers of elements of the two states and of their two scales. 4-bit codes of both states are in the first."""
    first, second = (numel if name else 0 for name in rule.states)
    blocks = -(-numel // BLOCK) if format in SCALED else 0
    return (first, 0 if format == "4bit" else second), (blocks if first else 0, blocks if second else 0)


def new_states(rule: Rule, format: str, numel: int, zeros: Zeros = torch.zeros) -> tuple[Pair, Pair]:
    """The two states and their two scales, filled with zeros. A state that the rule does not have is None."""
    check_format(rule, format)
    numels, blocks = state_numels(rule, format, numel)

    def make(counts: tuple[int, int], dtype: torch.dtype, names: tuple[str | None, str | None]) -> Pair:
        a, b = (zeros(n, dtype=dtype) if name else None for n, name in zip(counts, names, strict=True))
        return (a, b)

    names = (rule.states[0], None) if format == "4bit" else rule.states
    scales = make(blocks, torch.float32, rule.states) if format in SCALED else (None, None)
    return make(numels, _STATE_DTYPES[format], names), scales


def splits_master(format: str, weight_dtype: torch.dtype | None) -> bool:
    """Whether the master is split by default: for bf16 weights in all formats but fp32."""
    return format != "fp32" and weight_dtype == torch.bfloat16


def new_store(
    rule: Rule,
    format: str,
    values: Tensor,
    weight: Tensor | None = None,
    *,
    split: bool | None = None,
    master: str = "fp32",
) -> Store:
    """A store with states of zeros for the flat fp32 `values`. `values` becomes the master itself unless the master is
    split.

    Updates write the rounded weight to the flat tensor `weight`. This function writes `weight` only if the master is
    split. `split`: whether a bf16 weight holds the upper halves of the master. Default: the result of `splits_master`.
    With the master "none", the bf16 `weight` gets the rounded values and is the only copy.
    """
    zeros = partial(torch.zeros, device=values.device)
    if check_master(master) == "none":
        if weight is None or weight.dtype != torch.bfloat16:
            raise no_master("The weight", weight.dtype if weight is not None else None)
        weight.copy_(formats.to_bf16(values))
        return Store(format, weight, None, *new_states(rule, format, values.numel(), zeros))
    store = Store(format, values, weight, *new_states(rule, format, values.numel(), zeros))
    dtype = weight.dtype if weight is not None else None
    if not (splits_master(format, dtype) if split is None else split):
        return store
    if weight is None or dtype != torch.bfloat16:
        remedy = "Pass a bf16 weight, which stores the upper halves of the split master."
        raise invalid_value("The dtype of weight", dtype, [torch.bfloat16], remedy)
    upper, lower = formats.split(values)
    weight.copy_(upper)
    return replace(store, master=lower)


def check_format(rule: Rule, format: str) -> None:
    """Raise ValueError for an unknown state format, or one that the rule does not support."""
    if format not in FORMATS:
        raise invalid_value("states", format, FORMATS)
    if format not in rule.formats:
        raise invalid_value(
            "states", format, rule.formats, f"Use one of these formats, which the rule {rule.name!r} supports."
        )


def check_master(master: object) -> str:
    """Raise ValueError unless `master` is "fp32" or "none"."""
    if not isinstance(master, str) or master not in MASTERS:
        raise invalid_value("master", master, MASTERS)
    return master


def is_own_master(dtype: torch.dtype, master: str) -> bool:
    """Whether weights of this dtype are their own master, so that the state has no other copy of them."""
    return dtype == torch.float32 or master == "none"


def no_master(name: str, dtype: torch.dtype | None) -> ValueError:
    """The error for a weight that needs an fp32 master but shall have none."""
    return incompatible(
        f"{name}, of dtype {dtype},",
        'master="none"',
        "only bf16 weights can be rounded stochastically, and so be trained without an fp32 copy",
        'Convert the model with .bfloat16(), or use master="fp32".',
    )


def check_tensor(label: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], numel: int | None = None) -> None:
    """Raise ValueError unless the tensor is dense, contiguous, on the CPU, of one of `dtypes` and of length `numel`."""
    if tensor.layout != torch.strided:
        raise invalid_value(f"{label} layout", tensor.layout, [torch.strided], "Convert the tensor with .to_dense().")
    if tensor.device.type != "cpu":
        raise invalid_value(f"{label} device", str(tensor.device), ["cpu"], "Move the tensor with .cpu().")
    if tensor.dtype not in dtypes:
        raise invalid_value(f"{label} dtype", tensor.dtype, dtypes, "Convert the tensor with .to(dtype).")
    if numel is not None and tensor.numel() != numel:
        raise invalid_value(f"{label} length", tensor.numel(), [numel])
    if not tensor.is_contiguous():
        raise ValueError(
            f"{label} has the strides {tensor.stride()}, but must be contiguous. Convert the tensor with .contiguous()."
        )


def check_segment(segment: Segment) -> None:
    """Raise ValueError, with its name, for the first wrong tensor or number of the segment. Nothing is modified."""
    numel = segment.grad.numel()
    check_format(segment.rule, segment.store.format)
    check_tensor(f"{segment.name}: gradient", segment.grad, FLOATS, numel)
    if not math.isfinite(segment.factor):
        raise invalid_value(f"{segment.name}: factor", segment.factor, "a finite number")
    if segment.first_index % BLOCK or segment.first_index < 0:
        raise invalid_value(f"{segment.name}: first_index", segment.first_index, f"a multiple of {BLOCK} that is >= 0")
    if len(segment.hyper) != segment.rule.num_scalars:
        allowed = f"a tuple of {segment.rule.num_scalars} numbers, as the rule's hyper() returns"
        raise invalid_value(f"{segment.name}: hyper", segment.hyper, allowed)
    _check_store(segment, segment.store, "", numel)
    if segment.target is not None:
        _check_store(segment, segment.target, "target ", numel)
        _check_pairing(segment, segment.store, segment.target)


def _check_store(segment: Segment, store: Store, prefix: str, numel: int) -> None:
    label = f"{segment.name}: {prefix}"
    if store.weight is not None:
        check_tensor(f"{label}weight", store.weight, FLOATS, numel)
    check_tensor(f"{label}master", store.master, (torch.float32, torch.int16, torch.bfloat16), numel)
    if not store.has_master and store.weight is not None:
        remedy = "Pass the bf16 weights as the master, and None as the weight."
        raise invalid_value(f"{label}weight", "a tensor", [None], remedy)
    if store.is_split and (store.weight is None or store.weight.dtype != torch.bfloat16):
        dtype = store.weight.dtype if store.weight is not None else None
        remedy = "Pass a bf16 weight, which stores the upper halves of the split master."
        raise invalid_value(f"{label}weight dtype", dtype, [torch.bfloat16], remedy)
    numels, blocks = state_numels(segment.rule, store.format, numel)
    for i, name in enumerate(segment.rule.states):
        state, scale = store.states[i], store.scales[i]
        # If a rule may have no states, its first scalar is the option that decides this.
        stateless = segment.rule.state_option is not None and state is None and segment.hyper[0] == 0.0
        if name is not None and not stateless and not (store.format == "4bit" and i == 1):
            if state is None:
                raise invalid_value(f"{label}{name}", None, "a tensor", "Make the store with new_store().")
            check_tensor(f"{label}{name}", state, (_STATE_DTYPES[store.format],), numels[i])
        if blocks[i]:
            if scale is None:
                raise invalid_value(f"{label}scales of {name}", None, "a tensor", "Make the store with new_store().")
            check_tensor(f"{label}scales of {name}", scale, (torch.float32,), blocks[i])


def _check_pairing(segment: Segment, store: Store, target: Store) -> None:
    """Raise ValueError unless each buffer of the target has the kind, but not the memory, of that of the store."""
    if target.format != store.format:
        remedy = "Make the target with store.empty_like()."
        raise invalid_value(f"{segment.name}: target format", target.format, [store.format], remedy)
    ours, theirs = ([s.master, s.weight, *s.states, *s.scales] for s in (store, target))
    for name, a, b in zip(("master", "weight", *segment.rule.states, "scale", "scale"), ours, theirs, strict=True):
        if (a is None) != (b is None) or (a is not None and b is not None and a.dtype != b.dtype):
            kinds = ["None" if tensor is None else f"a tensor of {tensor.dtype}" for tensor in (b, a)]
            raise ValueError(
                f"{segment.name}: target {name} is {kinds[0]}, but must be {kinds[1]}, as in the store. Make the "
                "target with store.empty_like()."
            )
        if a is not None and b is not None and _overlap(a, b):
            raise ValueError(
                f"{segment.name}: target {name} shares memory with the store, but must have its own memory. Make the "
                "target with store.empty_like()."
            )


def _overlap(a: Tensor, b: Tensor) -> bool:
    (a_first, a_bytes), (b_first, b_bytes) = ((t.data_ptr(), t.numel() * t.element_size()) for t in (a, b))
    return a_first < b_first + b_bytes and b_first < a_first + a_bytes


def decode_state(store: Store, which: int) -> Tensor | None:
    """The first (which=0) or second (which=1) state as fp32; None if the store does not have it."""
    state, scale = store.states[0 if store.format == "4bit" else which], store.scales[which]
    if state is None or store.format not in SCALED:
        return state.float() if state is not None else None
    assert scale is not None
    if store.format == "4bit":
        return formats.decode_moment4(state, scale) if which == 0 else formats.decode_variance4(state, scale)
    return formats.decode_e4m3(state, scale) if which == 0 else formats.decode_e5m3(state, scale)


def encode_state(store: Store, which: int, values: Tensor, first_index: int = 0, key: Key = (0, 0)) -> None:
    """Write fp32 `values` to a state of the store, in its format. Does nothing if the store lacks this state."""
    state, scale = store.states[0 if store.format == "4bit" else which], store.scales[which]
    if state is None:
        return
    if store.format == "4bit":
        assert scale is not None
        encode = formats.encode_moment4 if which == 0 else formats.encode_variance4
        codes, scales = encode(values, first_index, key)
        _put_4bit(state, which, codes)
        scale.copy_(scales)
    elif store.format == "int8":
        assert scale is not None
        encode = formats.encode_e4m3 if which == 0 else formats.encode_e5m3
        codes, scales = encode(values, first_index, key)
        state.copy_(codes)
        scale.copy_(scales)
    elif store.format == "bf16":
        state.copy_(formats.to_bf16(values) if which == 0 else formats.to_bf16_stochastic(values, first_index, key))
    else:
        state.copy_(values)


def _put_4bit(state: Tensor, which: int, codes: Tensor) -> None:
    """Write the codes of one state to its half of each byte."""
    state.bitwise_and_(0xF0 if which == 0 else 0x0F).bitwise_or_(codes if which == 0 else codes << 4)


def encode_saved(store: Store, which: int, values: Tensor, scale: Tensor | None) -> None:
    """Write fp32 `values` that were decoded from this format before. With their `scale`, the codes are the same again.

    A new encoding would compute the scale from the largest decoded value, and its last bit might differ.
    """
    state, own_scale = store.states[0 if store.format == "4bit" else which], store.scales[which]
    if scale is None or own_scale is None or state is None:
        return encode_state(store, which, values)
    own_scale.copy_(scale)
    each = scale.repeat_interleave(BLOCK)[: values.numel()]
    # the value of a code, with a rounding error far below the distance between two codes
    ratio = torch.where(each > 0, values / each, 0.0)
    if store.format == "4bit":
        code = formats.nearest4(ratio, which)
        return _put_4bit(state, which, torch.where(each.isnan(), 0, code).to(torch.uint8))
    codes = ratio.to(torch.float8_e4m3fn).view(torch.uint8) if which == 0 else ratio.half().view(torch.int16) >> 7
    state.copy_(codes)


def decode_master(store: Store) -> Tensor:
    """The master weight, or the weight if there is no master, as fp32."""
    if not store.is_split:
        return store.master.float()
    assert store.weight is not None
    return formats.join(store.weight, store.master)


def encode_master(store: Store, values: Tensor, first_index: int = 0, key: Key = (0, 0)) -> None:
    """Write fp32 `values` as the master, and the rounded values as the weight if the store has one. Without a master,
    the weight is rounded stochastically.
    """
    if not store.has_master:
        store.master.copy_(formats.to_bf16_weight(values, first_index, key))
        return
    if store.is_split:
        assert store.weight is not None
        upper, lower = formats.split(values)
        store.weight.copy_(upper)
        store.master.copy_(lower)
        return
    store.master.copy_(values)
    if store.weight is not None:
        store.weight.copy_(formats.to_bf16(values) if store.weight.dtype == torch.bfloat16 else values)
