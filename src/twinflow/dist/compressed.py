"""Means over all ranks that travel in few bits, with error feedback.

What a code cannot say is not lost: it stays with the rank that sent it, as its error, and goes into what it sends next.
Over time the mean of the results is the mean of what was given.

A bucket has as many parts as there are ranks, and each part an owner. All ranks send their version of a part to its
owner, packed (`compressed_reduce_scatter`). The owner's mean then goes to all, packed again, with an error of the
owner's own (`compressed_all_reduce`); or the owner does something else with it, and tells the others how far its part
of a tensor has moved from what they have (`publish`). All ranks decode the same bytes, the owner too: what they have is
the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from twinflow.codes import Code, reference
from twinflow.dist.group import Group
from twinflow.gpu import packing as on_gpu
from twinflow.native import packing as on_host


def packing_for(device: torch.device) -> ModuleType:
    """The passes `encode`, `mean` and `decode` for tensors there."""
    if device.type == "cpu":
        return on_host
    return on_gpu if device.type == "cuda" and on_gpu.is_usable(device) else reference


@dataclass(frozen=True)
class Coding:
    """A code, and how elements are brought to one size before they share a scale (codes/reference.py)."""

    code: Code
    exponents: Tensor | None = None  # of a whole bucket
    factor: float = 1.0  # of what is given
    has_feedback: bool = True  # without it errors are dropped: to see what they are for

    def part(self, group: Group) -> Tensor | None:
        """The exponents of this rank's part."""
        return None if self.exponents is None else own_part(group, self.exponents)


@dataclass(frozen=True)
class Errors:
    """What a rank has not said yet: of everything it sends to owners, and of the part that it owns."""

    worker: Tensor
    server: Tensor | None
    said: Tensor | None = None  # where the rows that owners get are kept, for one who may have to take them back

    @classmethod
    def zeros(cls, numel: int, world: int, device: torch.device, has_server: bool = True) -> Errors:
        """Of a bucket of `numel` elements, a multiple of the number of ranks."""
        assert numel % world == 0, (numel, world)
        server = torch.zeros(numel // world, device=device) if has_server else None
        return cls(torch.zeros(numel, device=device), server)


def own_part(group: Group, whole: Tensor) -> Tensor:
    """This rank's part of a flat tensor."""
    size = whole.numel() // group.world
    return whole[group.rank * size : (group.rank + 1) * size]


def compressed_reduce_scatter(
    group: Group,
    part: Tensor,
    whole: Tensor,
    coding: Coding,
    errors: Errors,
    base: Tensor | None = None,
    base_factor: float = 0.0,
) -> None:
    """`part` = this rank's part of the mean of factor * whole + base_factor * base over all ranks."""
    packing = packing_for(whole.device)
    packing.mean(coding.code, part, _to_owners(group, whole, coding, errors, base, base_factor), coding.part(group))


def compressed_all_reduce(
    group: Group,
    out: Tensor,
    whole: Tensor,
    coding: Coding,
    errors: Errors,
    base: Tensor | None = None,
    base_factor: float = 0.0,
) -> None:
    """`out`, which may be an input = the mean of factor * whole + base_factor * base: the same bits on all ranks."""
    packing, code = packing_for(whole.device), coding.code
    rows = _to_owners(group, whole, coding, errors, base, base_factor)
    assert errors.server is not None
    mean = torch.empty_like(errors.server)
    packing.mean(code, mean, rows)
    packed = torch.empty(group.world, rows.shape[1], dtype=torch.uint8, device=whole.device)
    own = packed[group.rank : group.rank + 1]
    packing.encode(code, own, mean, errors.server, exponents=coding.part(group), is_scaled=False)
    if not coding.has_feedback:
        errors.server.zero_()
    group.all_gather(packed.view(-1))
    packing.decode(code, out, packed, exponents=coding.exponents)


def publish(group: Group, published: Tensor, own: Tensor, coding: Coding) -> None:
    """Bring `published`, which all ranks have alike, nearer to what the owners have: this rank owns `own`.

    What is left of the difference is in the next one: it needs no error of its own.
    """
    packing, code = packing_for(own.device), coding.code
    packed = torch.empty(group.world, code.row_bytes(own.numel()), dtype=torch.uint8, device=own.device)
    here = packed[group.rank : group.rank + 1]
    told, which = own_part(group, published), coding.part(group)
    packing.encode(code, here, own, base=told, base_factor=-1.0, exponents=which, is_scaled=False)
    group.all_gather(packed.view(-1))
    packing.decode(code, published, packed, exponents=coding.exponents, is_scaled=False, is_added=True)


def take_back(code: Code, error: Tensor, said: Tensor, exponents: Tensor, wheres: Iterable[slice]) -> None:
    """`error` in these places as if `said`, the rows that made it what it is, had not been sent. Blocks that held
    what is not finite have left it as it was."""
    scales = said[:, : code.scale_bytes(error.numel() // said.shape[0])].view(torch.float32)
    scales.nan_to_num_(0.0)
    told = torch.empty_like(error)
    packing_for(error.device).decode(code, told, said, exponents=exponents, is_scaled=False)
    for where in wheres:
        error[where] += told[where]


def _to_owners(
    group: Group, whole: Tensor, coding: Coding, errors: Errors, base: Tensor | None, base_factor: float
) -> Tensor:
    """All ranks' versions of this rank's part, packed."""
    size = whole.numel() // group.world
    assert size * group.world == whole.numel()
    packed = errors.said
    if packed is None:
        packed = torch.empty(group.world, coding.code.row_bytes(size), dtype=torch.uint8, device=whole.device)
    packing_for(whole.device).encode(
        coding.code,
        packed,
        whole,
        errors.worker,
        factor=coding.factor,
        base=base,
        base_factor=base_factor,
        exponents=coding.exponents,
    )
    if not coding.has_feedback:
        errors.worker.zero_()
    return group.exchange(packed)
