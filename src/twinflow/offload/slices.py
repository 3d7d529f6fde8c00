# SPDX-License-Identifier: Apache-2.0
"""Conversion of the state of one slice to fp32 tensors and back, on the device of its buffers.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together. A store has the
buffers of one bucket's optimizer state. Master weights are the fp32 copies of the parameters, to which updates are
applied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from twinflow import native
from twinflow.rules import Rule, formats
from twinflow.rules.formats import BLOCK, SCALED, rounds_to
from twinflow.rules.segment import Store, decode_state, encode_saved
from twinflow.state_dict import tensor_of

_CHUNK = 1 << 22  # elements that are converted at once; it limits the memory of temporary tensors


def read(rule: Rule, store: Store) -> dict[str, Tensor]:
    """Master and states as flat fp32 tensors by name, and the scales of states that have them.

    With the scales, `write` restores the same codes. Tensors that are fp32 in the store are returned as views.
    """
    keys = ["master", *(name for name in rule.states if name is not None)]
    values = {key: found.float() for key in keys if (found := read_one(rule, store, key)) is not None}
    scales = {f"{name}_scale": scale for name, scale in zip(rule.states, store.scales, strict=True)}
    return values | {name: scale for name, scale in scales.items() if scale is not None}


def read_one(rule: Rule, store: Store, key: str) -> Tensor | None:
    """The value that `read` returns under `key`, except that a bf16 state or weight is not converted to fp32."""
    if key == "master":
        return _master(store)
    which = rule.states.index(key.removesuffix("_scale"))
    if key.endswith("_scale"):
        return store.scales[which]
    return decode_state(store, which) if store.format in SCALED else store.states[which]


def write(rule: Rule, whole: Store, values: Mapping[str, object]) -> None:
    """Writes values that `read` has returned into a store, which may have another format than the one read.

    Scales are valid only for the format in which they were read.
    """
    for at, store in _chunks(whole):
        numel, device = store.master.numel(), store.master.device
        set_master(store, tensor_of(values, "master")[at : at + numel].to(device).float())
        for which, name in enumerate(rule.states):
            if name is not None and name in values and store.has_state(which):
                scale = tensor_of(values, f"{name}_scale") if f"{name}_scale" in values else None
                cut = scale[at // BLOCK : -(-(at + numel) // BLOCK)].to(device) if scale is not None else None
                encode_saved(store, which, tensor_of(values, name)[at : at + numel].to(device).float(), cut)


def write_master(whole: Store, values: Tensor, keep: bool) -> None:
    """Sets the master to the parameter's values. With `keep`, elements that round to these values do not change."""
    for at, store in _chunks(whole):
        given = _on(store.master.device, values[at : at + store.master.numel()])
        if not keep:
            set_master(store, given)
        elif not (store.is_split and _are_same(store.weight, given)):
            set_master(store, _adopted(_master(store), given))


def keeps_master(whole: Store, values: Tensor) -> bool:
    """Whether `write_master` with `keep` would change nothing."""
    parts = ((_master(store), values[at : at + store.master.numel()]) for at, store in _chunks(whole))
    return all(bool(rounds_to(master.float(), _on(master.device, given)).all()) for master, given in parts)


def _adopted(master: Tensor, given: Tensor) -> Tensor:
    """`given` as fp32, or `master` in elements that round to it. On the host, an fp32 `master` is overwritten."""
    if master.dtype == torch.bfloat16:  # the weights themselves
        return given.float()
    if master.device.type != "cpu":
        return torch.where(rounds_to(master, given), master, given.float())
    native.adopt(master, given)
    return master


def _are_same(weight: Tensor | None, given: Tensor) -> bool:
    """Whether all bits are equal: this takes a fraction of the time of `_adopted`, and is usual before a first step."""
    assert weight is not None
    return weight.dtype == given.dtype and torch.equal(weight.view(torch.int16), given.view(torch.int16))


def _on(device: torch.device, values: Tensor) -> Tensor:
    """`values` on another device. Copies from a GPU are several times as fast into page-locked memory, which torch
    keeps for the next call.
    """
    if device.type != "cpu" or not values.is_cuda:
        return values.to(device)
    return torch.empty_like(values, device=device, pin_memory=True).copy_(values)


def mend_lower(whole: Store) -> None:
    """Sets the lower half of a split master to zero in elements whose upper half the user has changed.

    An upper half counts as changed if the halves, joined and split again, give another upper half.
    """
    for _, store in _chunks(whole):
        assert store.weight is not None
        upper = split(join(store.weight, store.master))[0]
        same = upper.view(torch.int16) == store.weight.view(torch.int16)
        store.master.masked_fill_(~same, 0)


def clear(store: Store, value: float) -> None:
    """Fills all states and scales with `value`."""
    for tensor in (*store.states, *store.scales):
        if tensor is not None:
            tensor.fill_(value)


def set_master(store: Store, values: Tensor) -> None:
    """Sets the master to `values`. They are split if the master is stored in two halves, and rounded to nearest if bf16
    weights have no master.
    """
    if not store.is_split:
        store.master.copy_(values)
        return
    assert store.weight is not None
    if values.dtype == store.weight.dtype:  # the lower half of a bf16 value is 0
        store.weight.copy_(values)
        store.master.zero_()
        return
    upper, lower = split(values.float())
    store.weight.copy_(upper)
    store.master.copy_(lower)


def rounded(store: Store) -> Tensor:
    """The master weights, rounded to the dtype of the weight."""
    assert store.weight is not None
    return store.weight if store.is_split else store.master.to(store.weight.dtype)


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Splits fp32 values into an upper half (bf16) and a lower half (16 bits)."""
    return native.split(values) if values.device.type == "cpu" else formats.split(values)


def join(upper: Tensor, lower: Tensor) -> Tensor:
    """Joins two halves to fp32 values; the inverse of `split`."""
    return native.join(upper, lower) if upper.device.type == "cpu" else formats.join(upper, lower)


def _master(store: Store) -> Tensor:
    if not store.is_split:
        return store.master
    assert store.weight is not None
    return join(store.weight, store.master)


def _chunks(store: Store) -> Iterator[tuple[int, Store]]:
    for at in range(0, store.master.numel(), _CHUNK):
        yield at, store.narrow(at, min(_CHUNK, store.master.numel() - at))
