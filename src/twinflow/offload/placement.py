# SPDX-License-Identifier: Apache-2.0
"""Placement of state by a ratio: which elements have their state on the host, and which on the device.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together. The place of a
bucket's state is the host, the device ("resident"), or the host with updates on the device ("streamed"). A block is a
member of the model's outermost ModuleLists and Sequentials, usually a transformer layer.

- `tail` is DeepSpeed's meaning of the ratio: the first part of the parameters has its state on the host, and the tail
  has its state on the device.
- `front` is the opposite: the first part has its state on the device.
- `auto` is `front` in the order in which a forward needs the weights. Most of the update then overlaps with the model.
  The gradients of the first layers come last and their weights are needed first, so the host would have least time for
  their update. Parameters outside all blocks, including the output head, come first in this order, because the
  forward waits for them at its start.
- `spread` has the state of the same number of blocks on the device, but evenly distributed over the model. Without
  clipping, the gradients of blocks on the host then leave the device over all of backward. If these blocks were
  neighbours, backward would wait there for their updates, because few gradients fit into the buffers on their way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from twinflow.offload.plan import HOST, RESIDENT, ROOT, STREAMED, BucketPlan, ParamSpec, Part
from twinflow.planner.placement import spread_blocks
from twinflow.rules.formats import BLOCK

PLACEMENTS: Final = ("auto", "front", "tail", "spread")  # which parameters have their state on the device


def place_by_ratio(
    params: Sequence[ParamSpec], order: Sequence[int], ratio: float, placement: str = "auto"
) -> list[list[Part]]:
    """The parts of each parameter with their places, so that `ratio` of all elements have their state on the host.

    The result is exact to 128 elements in each group (see below) if all parameters can be split. A parameter that
    cannot be split goes to the place of its larger part. `order` lists the parameters in the order of the model. Each
    group of parameters with the same `ParamSpec.shared` is cut separately, so that all ranks that share these
    parameters cut them in the same way.
    """
    assert sorted(order) == list(range(len(params))) and placement in PLACEMENTS
    if placement in ("auto", "spread"):
        order = by_need(params, order)
    if placement == "spread":
        order = spread(params, order, ratio)
    parts: list[list[Part]] = [[] for _ in params]
    for shared in dict.fromkeys(param.shared for param in params):
        own = [i for i in order if params[i].shared == shared]
        total = sum(params[i].numel for i in own)
        num_host = min(total, max(0, round(ratio * total)))
        shares = [(RESIDENT, total - num_host), (HOST, num_host)]
        found = cut(params, own, shares[::-1] if placement == "tail" else shares)
        for i in own:
            parts[i] = found[i]
    return parts


def whole_blocks(params: Sequence[ParamSpec], parts: Sequence[Sequence[Part]]) -> list[list[Part]]:
    """The parts, changed so that each block has one place: the one that has had more of its elements (of equal numbers:
    the host). Parameters outside of all blocks do not change.
    """
    return _whole(params, parts, [param.block if param.block != ROOT else None for param in params])


def whole_units(params: Sequence[ParamSpec], parts: Sequence[Sequence[Part]]) -> list[list[Part]]:
    """The parts, changed so that each unit of matrices has one place, as `whole_blocks` does it for blocks."""
    return _whole(params, parts, [param.unit for param in params])


def _whole(
    params: Sequence[ParamSpec], parts: Sequence[Sequence[Part]], keys: Sequence[int | None]
) -> list[list[Part]]:
    """The parts, changed so that parameters with the same key have one place. Those with the key None do not change."""
    resident: dict[int | None, int] = {}  # by key: elements on the device, minus elements on the host
    for key, cuts in zip(keys, parts, strict=True):
        more = sum(part.numel if part.place == RESIDENT else -part.numel for part in cuts)
        resident[key] = resident.get(key, 0) + more
    return [
        [*cuts] if key is None else [Part(0, param.numel, RESIDENT if resident[key] > 0 else HOST)]
        for param, cuts, key in zip(params, parts, keys, strict=True)
    ]


def clip(plans: Sequence[BucketPlan], params: Sequence[ParamSpec]) -> list[BucketPlan]:
    """The plans without the elements that this rank does not have. They were made for the rank with the most elements
    of each parameter, so that all ranks have the same buckets of matrices.
    """
    found: list[BucketPlan] = []
    for plan in plans:
        cuts = ((piece, min(piece.numel, params[piece.param].numel - piece.start)) for piece in plan.slices)
        slices = tuple(replace(piece, numel=numel) for piece, numel in cuts if numel > 0)
        if slices:
            found.append(replace(plan, index=len(found), slices=slices))
    return found


def stream(plans: Sequence[BucketPlan], share: float) -> list[BucketPlan]:
    """Changes the fraction `share` of the host's buckets with `can_alias`, evenly distributed, to STREAMED."""
    hosted = [plan.index for plan in plans if plan.place == HOST and plan.can_alias]
    chosen = {index for k, index in enumerate(hosted) if int((k + 1) * share) > int(k * share)}
    return [replace(plan, place=STREAMED) if plan.index in chosen else plan for plan in plans]


def by_need(params: Sequence[ParamSpec], order: Sequence[int]) -> list[int]:
    """The parameters in the order in which a forward needs them: those outside all blocks first, then by block."""
    return sorted(order, key=lambda i: -1 if params[i].block == ROOT else params[i].block)


def spread(params: Sequence[ParamSpec], order: Sequence[int], ratio: float) -> list[int]:
    """The parameters outside of all blocks, then the blocks that are on the device with this `ratio`, then the others,
    which are evenly distributed.
    """
    root = sum(param.numel for param in params if param.block == ROOT)
    total = sum(param.numel for param in params)
    here = ((1.0 - ratio) * total - root) / max(1, total - root)  # share of the blocks' elements on the device
    hosted = spread_blocks({param.block for param in params} - {ROOT}, here)
    return sorted(order, key=lambda i: params[i].block in hosted)


def cut(params: Sequence[ParamSpec], order: Sequence[int], shares: Sequence[tuple[str, int]]) -> list[list[Part]]:
    """The parts of each parameter. Elements are assigned in `order`. `shares`: places with their element counts."""
    parts: list[list[Part]] = [[] for _ in params]
    ends, end = [], 0
    for place, numel in shares:
        end += numel
        ends.append((place, end))
    passed = 0  # elements before this parameter
    for i in order:
        param, start = params[i], 0
        for place, end in ends[:-1]:
            stop = _stop(param, end - passed)
            if stop > start:
                parts[i].append(Part(start, stop - start, place))
                start = stop
        if start < param.numel:
            parts[i].append(Part(start, param.numel - start, ends[-1][0]))
        passed += param.numel
    return parts


def _stop(param: ParamSpec, wanted: int) -> int:
    """The position that is nearest to `wanted` at which a parameter may be cut: a multiple of 128, or an end."""
    if wanted <= 0 or wanted >= param.numel:
        return 0 if wanted <= 0 else param.numel
    if not param.can_split:
        return param.numel if 2 * wanted >= param.numel else 0
    stop = (wanted + BLOCK // 2) // BLOCK * BLOCK
    return min(stop, param.numel)
