# SPDX-License-Identifier: Apache-2.0
"""Reads a checkpoint of DeepSpeed's pipelines: a file for each layer, and for each pipeline rank one of its optimizer.

DeepSpeed names the parameters of layer i "i.NAME" and those of tied layers "tied_modules.KEY.NAME". Here they are
"layers.i.NAME", and tied layers have the name of their first use. No file says which layers have which key. With ZeRO
stage 1 (or bf16) the optimizer's parameters have names, and a layer whose own names are missing is tied to the key with
the same weights. Stage 0 saves states in the order of the parameters without names; the tied ones come first on every
pipeline rank. The layers of each rank then follow from the shapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from twinflow.checkpoint.deepspeed_files import (
    MISMATCH,
    Files,
    Group,
    Read,
    Saved,
    TorchState,
    Values,
    dict_in,
    of_tensor,
    read_row,
    unmatched,
    zero_stage,
)
from twinflow.checkpoint.torch_files import load_torch_file

OWN: Final = re.compile(r"(\d+)\.(.+)")
TIED: Final = re.compile(r"tied_modules\.([^.]+)\.(.+)")
TIED_NOTE: Final = (
    "Stage 0 of a pipeline saves no names. Optimizer states were assigned to layers by order and shapes, on the "
    "assumption that no layer is used twice on a pipeline rank."
)
Layers = Mapping[int, Mapping[str, Any]]  # the state dict of each layer


def read_pipeline(files: Files, weights_only: bool = False) -> Saved:
    """Reads the files. Tensors stay mapped from them. `weights_only`: the optimizer of stage 0 is not read."""
    heads = [dict_in(load_torch_file(rank.model[0]), rank.model[0], "module") for rank in files.pipe]
    ranks = heads[0].get("mp_world_size")
    if isinstance(ranks, int) and ranks != len(heads):
        raise ValueError(f"The pipeline had {ranks} ranks, but there are files of {len(heads)}. Copy all files.")
    layers = {i: dict_in(load_torch_file(path), path) for i, path in sorted(files.layers.items())}
    key = "optimizer_state_dict"
    states = [[dict_in(dict_in(load_torch_file(p), p, key)[key], p) for p in rank.optim] for rank in files.pipe]
    stages = {zero_stage(rank, own) for rank, own in zip(files.pipe, states, strict=True)}
    if len(stages) != 1:
        raise ValueError(f"The pipeline ranks have the ZeRO stages {sorted(stages)}. {MISMATCH}")
    reads: list[Read] = []
    further: list[int] = []  # layers that are further uses of a tied layer
    notes: tuple[str, ...] = ()
    if files.optim:
        for rank, head, own in zip(files.pipe, heads, states, strict=True):
            reads.append(read_row(rank, {**head, "module": {}}, own))
        uses = _tied(reads, layers)
        reads = [_renamed(read, partial(_name, uses=uses)) for read in reads]
        further = [index for own in uses.values() for index in own[1:]]
    elif heads[0].get("optimizer") and not weights_only:
        reads, further, notes = _read_torch(files, heads, layers)
    groups, masters, found = _joined(reads) if reads else ((), {}, {})
    named = {i: layer for i, layer in layers.items() if i not in further}
    every = {f"layers.{i}.{name}": value for i, layer in named.items() for name, value in layer.items()}
    tensors = {name: value for name, value in every.items() if isinstance(value, Tensor)}
    missing = [name for name in masters if name not in tensors]
    if missing:
        raise ValueError(f"No file of a layer has {missing[0]!r}, which has optimizer state. {MISMATCH}")
    weights = {name: masters.get(name) or of_tensor(value) for name, value in tensors.items()}
    model = {**heads[0], "module": {name: value for name, value in every.items() if name not in tensors}}
    first = states[0][0] if files.optim else heads[0].get("optimizer") or {}
    return Saved(stages.pop(), model, first, weights, {}, groups, masters, found, notes)


# Stage 1, and bf16 without a stage.


def _tied(reads: Sequence[Read], layers: Layers) -> dict[str, list[int]]:
    """The layers of each key of tied layers that have files, in order."""
    masters = {name: values for _, own, _ in reversed(reads) for name, values in own.items()}
    known = {int(match[1]) for match in map(OWN.fullmatch, masters) if match is not None}
    keys: dict[str, dict[str, Values]] = {}
    for name, values in masters.items():
        match = TIED.fullmatch(name)
        if match is not None:
            keys.setdefault(match[1], {})[match[2]] = values
    uses: dict[str, list[int]] = {}
    for index, layer in layers.items():
        own = [key for key, values in keys.items() if index not in known and _has(layer, values)]
        if len(own) > 1:
            raise ValueError(f"Layer {index} may be one of the tied layers {own[0]!r} or {own[1]!r}, which are equal")
        for key in own:
            uses.setdefault(key, []).append(index)
    lost = [key for key in keys if key not in uses]
    if lost:
        raise ValueError(
            f"No file of a layer has the weights of the tied layers with the key {lost[0]!r}. DeepSpeed writes no file "
            "for a layer with forward_fn: the first layer with this key must have none"
        )
    return uses


def _name(name: str, uses: Mapping[str, Sequence[int]]) -> str:
    """twinflow's name of a parameter."""
    own, tied = OWN.fullmatch(name), TIED.fullmatch(name)
    if own is not None:
        return f"layers.{int(own[1])}.{own[2]}"
    if tied is None:
        raise ValueError(f"The optimizer has a parameter {name!r}, which is not one of a layer. {MISMATCH}")
    return f"layers.{uses[tied[1]][0]}.{tied[2]}"


def _has(layer: Mapping[str, Any], values: Mapping[str, Values]) -> bool:
    """Whether a layer has these masters, rounded to the dtype of its weights."""
    for name, master in values.items():
        own = layer.get(name)
        if not isinstance(own, Tensor) or tuple(own.shape) != master.shape:
            return False
    return all(torch.equal(master.read().to(layer[name].dtype), layer[name]) for name, master in values.items())


def _renamed(read: Read, name_of: Callable[[str], str]) -> Read:
    groups, masters, states = read
    return (
        tuple(Group(group.options, tuple(map(name_of, group.names))) for group in groups),
        {name_of(name): values for name, values in masters.items()},
        {name_of(name): entry for name, entry in states.items()},
    )


def _joined(reads: Sequence[Read]) -> Read:
    """All pipeline ranks together. Copies of a tied weight are equal; that of the first rank is used."""
    counts = {len(groups) for groups, _, _ in reads}
    if len(counts) != 1:
        raise ValueError(f"The pipeline ranks have different numbers of parameter groups, {sorted(counts)}")
    groups = tuple(
        Group(own[0].options, tuple(dict.fromkeys(name for group in own for name in group.names)))
        for own in zip(*(groups for groups, _, _ in reads), strict=True)
    )
    masters = {name: values for _, own, _ in reversed(reads) for name, values in own.items()}
    states = {name: entry for _, _, own in reversed(reads) for name, entry in own.items()}
    return groups, masters, states


# Stage 0.


Shape = tuple[int, ...] | None  # None: a parameter without optimizer state
Params = Mapping[int, Mapping[str, Shape]]  # the shapes of the parameters of each layer


def _read_torch(
    files: Files, heads: Sequence[Mapping[str, Any]], layers: Layers
) -> tuple[list[Read], list[int], tuple[str, ...]]:
    states = [TorchState.of(head["optimizer"], rank.model[0]) for head, rank in zip(heads, files.pipe, strict=True)]
    if any(state.flats is not None or len(state.base["param_groups"]) != 1 for state in states):
        raise unmatched("which parameters are in a group, so there must be one group, and no fused fp16 optimizer")
    buffers = {name for head in heads for name in head.get("buffer_names") or []}
    params: dict[int, dict[str, Shape]] = {}
    for index, layer in layers.items():
        tensors = {name: value for name, value in layer.items() if isinstance(value, Tensor)}
        params[index] = {n: tuple(t.shape) for n, t in tensors.items() if f"{index}.{n}" not in buffers}
    wanted = [state.shapes for state in states]
    plain = [(list[int](), order) for order in _orders(wanted, params, [], list(params))]
    tied = [
        (uses, order)
        for uses in _ties(layers, params)
        for order in _orders(wanted, params, uses, [i for i in params if i not in uses])
    ]
    found = plain or tied
    if len(found) != 1:
        raise unmatched("names, and the shapes fit no order of the layers, or several")
    uses, orders = found[0]
    names = [[f"layers.{i}.{name}" for i, name in order] for order in orders]
    notes = (TIED_NOTE,) if any(other != orders for _, other in tied) else ()
    return [state.read(own) for state, own in zip(states, names, strict=True)], uses[1:], notes


def _ties(layers: Layers, params: Params) -> Iterator[list[int]]:
    """The lists of layers that can be one tied layer: each layer with all later ones that equal it."""
    for index in params:
        if params[index]:
            same = [other for other in params if other > index and params[other] == params[index]]
            yield [index, *(other for other in same if _equal(layers[index], layers[other], params[other]))]


def _equal(one: Mapping[str, Any], other: Mapping[str, Any], names: Iterable[str]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in names)


Order = list[tuple[int, str]]  # layers and names of parameters, in the order of an optimizer


def _orders(
    wanted: Sequence[Sequence[Shape]], params: Params, uses: Sequence[int], left: Sequence[int]
) -> Iterator[list[Order]]:
    """All ways to give layers to pipeline ranks whose optimizers have parameters of the shapes `wanted`. `left`: the
    layers that are not tied, in order. `uses`: the layers that are tied, whose parameters come first on a rank.
    """
    if not wanted:
        if not any(params[i] for i in left):
            yield []
        return
    for start in [[], uses[:1]] if uses else [[]]:
        order: Order = [(i, name) for i in start for name in params[i]]
        taken = 0
        while len(order) < len(wanted[0]) and taken < len(left):
            order += [(left[taken], name) for name in params[left[taken]]]
            taken += 1
        here = left[:taken]
        if not start and any(here[0] < use < here[-1] for use in uses if here):
            continue  # the rank has a layer whose parameters it does not have
        shapes = [params[i][name] for i, name in order]
        if len(shapes) == len(wanted[0]) and all(w in (None, s) for w, s in zip(wanted[0], shapes, strict=True)):
            for rest in _orders(wanted[1:], params, uses, left[taken:]):
                yield [order, *rest]
