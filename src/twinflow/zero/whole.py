# SPDX-License-Identifier: Apache-2.0
"""Whole tensors of weights of which ranks have parts: rows of `fully_shard`, or parts of weights on the hosts.

A piece is a range of a flattened parameter that this rank has. Ranks first tell each other which pieces they have, and
then gather one parameter at a time on the hosts. No rank needs memory for two whole parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from twinflow.dist.agree import gather_json
from twinflow.dist.group import Group
from twinflow.dist.sharded import is_dtensor
from twinflow.offload.bucket import local_of
from twinflow.offload.host_params import Piece
from twinflow.offload.param_offload import ParamOffload

_Spans = list[tuple[int, int]]  # start and number of elements of the pieces of one rank


class Parts(NamedTuple):
    """A tensor of which this rank has `pieces`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[Piece]


def parts_of(tensor: Tensor, param_offload: ParamOffload | None = None) -> Parts | None:
    """The pieces of a tensor that this rank has; None for a tensor that each rank has whole."""
    if param_offload is not None and param_offload.params.holds(tensor):
        return Parts(tuple(tensor.shape), tensor.dtype, param_offload.params.pieces(tensor))
    if not is_dtensor(tensor):
        return None
    local = local_of(tensor).detach()

    def write(values: Tensor) -> None:
        local_of(tensor).copy_(values.view(local.shape))

    rows = Piece(first_of(tensor), local.numel(), lambda: local_of(tensor).detach().reshape(-1), write)
    return Parts(tuple(tensor.shape), tensor.dtype, [rows])


def first_of(tensor: Tensor) -> int:
    """The start of this rank's rows in a flattened parameter."""
    if not is_dtensor(tensor):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # slow: dist/sharded.py

    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    rows_end = tensor.shape[0] if tensor.dim() else 1
    return min(offsets[0] if offsets else 0, rows_end) * (tensor.numel() // max(1, rows_end))


def gather_all(parts: Sequence[Parts], group: Group) -> Iterator[Tensor]:
    """Each tensor as a whole, on the host of every rank, in the order of `parts`. All ranks must use all of them."""
    for part, spans in zip(parts, _spans(parts, group), strict=True):
        rows = group.gather_rows(_row(part, spans))
        yield _join(part, spans, rows)


def gather_on_first(parts: Sequence[Parts], group: Group) -> Iterator[Tensor | None]:
    """Each tensor as a whole on the host of the first rank, and None on other ranks. As `gather_all` otherwise."""
    for part, spans in zip(parts, _spans(parts, group), strict=True):
        rows = group.gather(_row(part, spans))
        yield _join(part, spans, rows) if rows is not None else None


def _spans(parts: Sequence[Parts], group: Group) -> list[list[_Spans]]:
    """For each tensor, the spans of each rank."""
    own = [[(piece.start, piece.numel) for piece in part.pieces] for part in parts]
    said = gather_json(group, own) if own else []
    return [[one[i] for one in said] for i in range(len(parts))]


def _row(part: Parts, spans: Sequence[_Spans]) -> Tensor:
    """This rank's pieces, padded to the size of the rank that has most."""
    row = torch.zeros(max(_numel(one) for one in spans), dtype=part.dtype)
    at = 0
    for piece in part.pieces:
        row[at : at + piece.numel] = piece.read()
        at += piece.numel
    return row


def _join(part: Parts, spans: Sequence[_Spans], rows: Tensor) -> Tensor:
    whole = torch.empty(math.prod(part.shape), dtype=part.dtype)
    assert sum(map(_numel, spans)) == whole.numel(), "ranks do not have all parts of a weight"
    for row, one in zip(rows, spans, strict=True):
        at = 0
        for start, numel in one:
            whole[start : start + numel] = row[at : at + numel]
            at += numel
    return whole.view(part.shape)


def _numel(spans: _Spans) -> int:
    return sum(numel for _, numel in spans)
