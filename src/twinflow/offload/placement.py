"""Twin-Flow's ratio: which elements have their state on the host, and which on the device. Plain arithmetic.

`tail` is the meaning that DeepSpeed gave to the ratio: the first part of the parameters has its state on the host, the
tail stays on the device. `front` is the other way round. What hides most is `front` in the order in which weights are
needed (`auto`): the input side's gradients come last and its weights are needed first, so the host would have the least
time for them. Parameters outside all blocks are needed when the forward starts, the output head's too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from twinflow.offload.plan import HOST, RESIDENT, ROOT, STREAMED, BucketPlan, ParamSpec, Part
from twinflow.rules.formats import BLOCK

PLACEMENTS: Final = ("auto", "front", "tail")  # the end that stays on the device


def place_by_ratio(
    params: Sequence[ParamSpec], order: Sequence[int], ratio: float, placement: str = "auto"
) -> list[list[Part]]:
    """Of each parameter its parts and their places, so that `ratio` of all elements have their state on the host.

    Exact to 128 elements, but for parameters that cannot be split: those go where most of them would be. `order` lists
    the parameters as the model has them. Parameters that are shared with ranks that have other ones beside them are cut
    for themselves, so that all ranks cut them alike.
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


def stream(plans: Sequence[BucketPlan], share: float) -> list[BucketPlan]:
    """The buckets, with a share of those on the host streamed, evenly spread over them."""
    hosted = [plan.index for plan in plans if plan.place == HOST and plan.can_alias]
    chosen = {index for k, index in enumerate(hosted) if int((k + 1) * share) > int(k * share)}
    return [replace(plan, place=STREAMED) if plan.index in chosen else plan for plan in plans]


def by_need(params: Sequence[ParamSpec], order: Sequence[int]) -> list[int]:
    """The parameters in the order in which a forward needs them: those outside all blocks, then block after block."""
    return sorted(order, key=lambda i: -1 if params[i].block == ROOT else params[i].block)


def cut(params: Sequence[ParamSpec], order: Sequence[int], shares: Sequence[tuple[str, int]]) -> list[list[Part]]:
    """Of each parameter its parts: along `order`, so many elements for each place in turn."""
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
    """Where to cut a parameter so that about `wanted` of its elements come before: at a multiple of 128, or an end."""
    if wanted <= 0 or wanted >= param.numel:
        return 0 if wanted <= 0 else param.numel
    if not param.can_split:
        return param.numel if 2 * wanted >= param.numel else 0
    stop = (wanted + BLOCK // 2) // BLOCK * BLOCK
    return min(stop, param.numel)
