# SPDX-License-Identifier: Apache-2.0
"""Means over ranks with compressed communication and error feedback.

A bucket is a flat tensor with the elements of several parameters.

The rank that sends a value keeps the quantization error and adds it to its next value. Over time, the mean of the
results approaches the mean of the inputs.

A bucket is divided into one part for each rank, which is the owner of that part. All ranks send their encoded
version of a part to its owner (`compressed_reduce_scatter`). The owner encodes the mean again, with its own error, and
sends it to all ranks (`compressed_all_reduce`). Alternatively, the owner computes new values from the mean, and sends
the encoded difference between the new values and those that all ranks have (`publish`). All ranks, including the owner,
decode the same bytes. Their results are therefore bitwise equal.
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
    """The module with `encode`, `mean` and `decode` for tensors on this device."""
    if device.type == "cpu":
        return on_host
    return on_gpu if device.type == "cuda" and on_gpu.is_usable(device) else reference


@dataclass(frozen=True)
class Coding:
    """How values are encoded: a code, a factor, and the exponents k of elements' factors 2**k (codes/reference.py)."""

    code: Code
    exponents: Tensor | None = None  # k + 127 for each element of a whole bucket; None: no factors 2**k
    factor: float = 1.0  # the input is multiplied by it
    has_feedback: bool = True  # False drops the errors, to measure the effect of the feedback.

    def part(self, group: Group) -> Tensor | None:
        """The exponents of the part that this rank owns, or None if there are no exponents."""
        return None if self.exponents is None else own_part(group, self.exponents)


@dataclass(frozen=True)
class Errors:
    """A rank's quantization errors: of values sent to owners (`worker`), of the mean sent as an owner (`server`)."""

    worker: Tensor
    server: Tensor | None
    said: Tensor | None = None  # buffer that keeps the encoded rows that were sent last, for `take_back`

    @classmethod
    def zeros(cls, numel: int, world: int, device: torch.device, has_server: bool = True) -> Errors:
        """Zero errors of a bucket of `numel` elements, a multiple of `world`. `has_server`: `server` is not None."""
        assert numel % world == 0, (numel, world)
        server = torch.zeros(numel // world, device=device) if has_server else None
        return cls(torch.zeros(numel, device=device), server)


def own_part(group: Group, whole: Tensor) -> Tensor:
    """The part of a flat tensor that this rank owns."""
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
    """Sets `part` to this rank's part of the compressed mean of factor * whole + base_factor * base over all ranks."""
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
    """Sets `out` to the compressed mean of factor * whole + base_factor * base over all ranks. The result is bitwise
    equal on all ranks. `out` may be `whole` or `base`.
    """
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
    """Adds the encoded difference between the owners' values and `published` to `published`, equally on all ranks.

    `own`: this rank's part of the values. No error tensor is needed, because the next difference contains the error.
    """
    packing, code = packing_for(own.device), coding.code
    packed = torch.empty(group.world, code.row_bytes(own.numel()), dtype=torch.uint8, device=own.device)
    here = packed[group.rank : group.rank + 1]
    told, which = own_part(group, published), coding.part(group)
    packing.encode(code, here, own, base=told, base_factor=-1.0, exponents=which, is_scaled=False)
    group.all_gather(packed.view(-1))
    packing.decode(code, published, packed, exponents=coding.exponents, is_scaled=False, is_added=True)


def take_back(code: Code, error: Tensor, said: Tensor, exponents: Tensor, wheres: Iterable[slice]) -> None:
    """Adds the decoded rows `said`, which were sent, to `error` in the slices `wheres`, so that their values are sent
    again. Quantization blocks with values that were not finite are skipped, because they did not change the error.
    """
    scales = said[:, : code.scale_bytes(error.numel() // said.shape[0])].view(torch.float32)
    scales.nan_to_num_(0.0)
    told = torch.empty_like(error)
    packing_for(error.device).decode(code, told, said, exponents=exponents, is_scaled=False)
    for where in wheres:
        error[where] += told[where]


def _to_owners(
    group: Group, whole: Tensor, coding: Coding, errors: Errors, base: Tensor | None, base_factor: float
) -> Tensor:
    """Encodes factor * whole + base_factor * base, and sends each part to its owner. Returns the received rows."""
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
