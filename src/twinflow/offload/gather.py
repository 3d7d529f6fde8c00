"""Gradients into flat device buffers, and their norms: functions that run on the stream that made the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twinflow import native
from twinflow.device import hide_from_children
from twinflow.gpu import collect
from twinflow.offload.plan import Slice
from twinflow.rules.formats import BLOCK

if TYPE_CHECKING:
    from twinflow.offload.bucket import Task

# a place in a bucket, a part of a gradient, whether it is the first that comes there
Piece = tuple[Slice, Tensor, bool]


def put(into: Tensor, pieces: Sequence[Piece]) -> None:
    """Parts of gradients to their places in a bucket's buffer: one call for all of them."""
    targets = [into.narrow(0, piece[0].offset, piece[0].numel) for piece in pieces]
    torch._foreach_copy_(targets, [piece[1] for piece in pieces])


def add(into: Tensor, pieces: Sequence[Piece]) -> None:
    """Put (the first) or add (the others) parts of gradients into a bucket's buffer."""
    first = [piece for piece in pieces if piece[2]]
    if first:
        put(into, first)
    others = [piece for piece in pieces if not piece[2]]
    if others:
        targets = [into.narrow(0, cut.offset, cut.numel) for cut, _, _ in others]
        torch._foreach_add_(targets, [values for _, values, _ in others])


def add_last(flat: Tensor, total: Tensor, pieces: Sequence[Piece]) -> None:
    """The last of several gradients: the sum goes straight to the buffer that travels, rounded once."""
    for cut, values, _ in pieces:
        where = slice(cut.offset, cut.offset + cut.numel)
        torch.add(total[where], values, out=flat[where])


def cast(flat: Tensor, total: Tensor, slices: Sequence[Slice]) -> None:
    """Slices of an fp32 sum into the flat buffer that travels, rounded to its dtype."""
    for piece in slices:
        where = slice(piece.offset, piece.offset + piece.numel)
        flat[where].copy_(total[where])


def clear(flat: Tensor, slices: Sequence[Slice]) -> None:
    """Zeros where there is no gradient."""
    for piece in slices:
        flat[piece.offset : piece.offset + piece.numel].zero_()


def measure(norm: Tensor, flat: Tensor) -> None:
    """The norm of a bucket's gradients in fp64 into `norm`; `flat` holds zeros where there is no gradient.

    Always of a whole bucket, so that it is the same to the last bit however the gradients came together.
    """
    if collect.is_usable(norm.device):
        rows = torch.empty(flat.numel() // BLOCK, dtype=torch.float32, device=norm.device)
        collect.put_norms(rows, 0, flat)
        return collect.norm_of(norm, rows)
    if norm.device.type == "cpu":
        norm.copy_(torch.tensor(native.sum_squares([flat])[0], dtype=torch.float64).sqrt())
        return
    rows = torch.linalg.vector_norm(flat.view(-1, BLOCK), dim=1, dtype=torch.float32)  # fp64 here would be slow
    norm.copy_(torch.linalg.vector_norm(rows, dtype=torch.float64))


def measure_parts(norm: Tensor, sources: Sequence[tuple[int, Tensor]], numel: int) -> None:
    """The same for gradients that lie in tensors of their own, or only in parts of a flat buffer."""
    if collect.is_usable(norm.device):
        rows = collect.new_rows(numel, norm.device)
        for offset, source in sources:
            collect.put_norms(rows, offset, source)
        return collect.norm_of(norm, rows)
    flat = torch.zeros(numel, dtype=sources[0][1].dtype, device=norm.device)
    for offset, source in sources:
        flat[offset : offset + source.numel()] = source
    measure(norm, flat)


def add_on_device(total: Tensor, grads: Tensor, new: Sequence[Slice], known: Sequence[Slice]) -> None:
    """Add a task's gradients to its bucket's total in fp32; slices that are `new` to it start anew."""
    pieces = [(piece, piece in new) for piece in (*new, *known)]
    add(total, [(cut, grads[cut.offset : cut.offset + cut.numel], is_first) for cut, is_first in pieces])


def measure_total(norm: Tensor, total: Tensor, cuts: Sequence[Slice], is_whole: bool) -> None:
    """The norm of a total on the device, of the slices that are in it, on its way to the host."""
    parts = [total] if is_whole else [total[c.offset : c.offset + c.numel] for c in cuts]
    if total.device.type == "cpu":
        norm.copy_(torch.tensor(sum(native.sum_squares(parts)), dtype=torch.float64).sqrt())
        return
    # In fp64 throughout, as the host measures its totals: where it is clipped, the factor must be the same.
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
    norm.copy_(norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms)), non_blocking=True)


def add_on_host(task: Task) -> None:
    """Add a task's gradients to its bucket's total in fp32; measure the total where it is the last of a step."""
    bucket, grads = task.bucket, task.grads
    if bucket.total is None:
        bucket.total = hide_from_children(native.huge_zeros(bucket.plan.numel, dtype=torch.float32))
    total = bucket.total
    for i in task.present:
        piece = bucket.slices[i]
        assert grads is not None
        values, into = (t.narrow(0, piece.offset, piece.numel) for t in (grads, total))
        native.accumulate(into, values) if i in bucket.added else native.cast(into, values)
    if task.job.norms is not None:
        cuts = [bucket.slices[i] for i in sorted(bucket.added.union(task.present))]
        sums = native.sum_squares([total.narrow(0, piece.offset, piece.numel) for piece in cuts])
        task.job.norms[bucket.plan.index] = sum(sums) ** 0.5
