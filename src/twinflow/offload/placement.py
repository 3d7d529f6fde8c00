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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from twinflow.offload.plan import HOST, RESIDENT, ROOT, STREAMED, BucketPlan, ParamSpec, Part
from twinflow.rules.formats import BLOCK

PLACEMENTS: Final = ("auto", "front", "tail")  # which end of the parameters has its state on the device


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
    if placement == "auto":
        order = by_need(params, order)
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
    resident: dict[int, int] = {}  # by block: elements on the device, minus elements on the host
    for param, cuts in zip(params, parts, strict=True):
        more = sum(part.numel if part.place == RESIDENT else -part.numel for part in cuts)
        resident[param.block] = resident.get(param.block, 0) + more
    return [
        [*cuts] if param.block == ROOT else [Part(0, param.numel, RESIDENT if resident[param.block] > 0 else HOST)]
        for param, cuts in zip(params, parts, strict=True)
    ]


def stream(plans: Sequence[BucketPlan], share: float) -> list[BucketPlan]:
    """Changes the fraction `share` of the host's buckets with `can_alias`, evenly distributed, to STREAMED."""
    hosted = [plan.index for plan in plans if plan.place == HOST and plan.can_alias]
    chosen = {index for k, index in enumerate(hosted) if int((k + 1) * share) > int(k * share)}
    return [replace(plan, place=STREAMED) if plan.index in chosen else plan for plan in plans]


def by_need(params: Sequence[ParamSpec], order: Sequence[int]) -> list[int]:
    """The parameters in the order in which a forward needs them: those outside all blocks first, then by block."""
    return sorted(order, key=lambda i: -1 if params[i].block == ROOT else params[i].block)


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
