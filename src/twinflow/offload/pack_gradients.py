# SPDX-License-Identifier: Apache-2.0
"""Packing of gradients into flat device buffers, and the norms of the packed gradients.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together.

The functions queue work on the current stream of the calling thread and do not wait for the device. The collector runs
them on the stream that made the gradients, and `DeviceWork` runs them on the stream of updates. They need no lock. Only
the thread that takes gradients uses `Views`, which the collector owns.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from twinflow import native
from twinflow.gpu import collect
from twinflow.offload.plan import Slice
from twinflow.rules.formats import BLOCK

Form = tuple[tuple[int, torch.Size], ...]  # offset in a buffer and shape of each view
# A slice of a bucket, the part of a gradient that goes there, and whether it is the first gradient for this slice.
Piece = tuple[Slice, Tensor, bool]


class Views:
    """Caches the views of each flat buffer until the buffer is freed. Making a view takes longer than a small copy."""

    def __init__(self) -> None:
        self._found: dict[int, dict[int, list[Tensor]]] = {}  # by id of the buffer, then by number of the form
        self._numbers: dict[Form, int] = {}

    def number(self, form: Form) -> int:
        """Return a number for a form (offsets and shapes). Most buckets that use a buffer have the same form."""
        return self._numbers.setdefault(form, len(self._numbers))

    def of(self, flat: Tensor, number: int, form: Form) -> list[Tensor]:
        """Return one view of the buffer for each offset and shape of the form."""
        key = id(flat)
        by_form = self._found.get(key)
        if by_form is None:
            by_form = self._found[key] = {}
            weakref.finalize(flat, self._found.pop, key, None).atexit = False
        if number not in by_form:
            data = flat.data  # a view of `flat` itself would keep the buffer alive
            by_form[number] = [data[at : at + shape.numel()].view(shape) for at, shape in form]
        return by_form[number]


class Whole:
    """Sources and targets for the copy of all gradients of a bucket into a flat buffer at once."""

    def __init__(self, slices: Sequence[Slice], shapes: Mapping[int, torch.Size], views: Views) -> None:
        self._views = views
        self._cuts: list[tuple[int, slice | None]] = []  # parameter, and its elements in this bucket; None: all
        form: list[tuple[int, torch.Size]] = []
        for piece in slices:
            is_all = piece.numel == shapes[piece.param].numel()
            cut = None if is_all else slice(piece.start, piece.start + piece.numel)
            self._cuts.append((piece.param, cut))
            form.append((piece.offset, shapes[piece.param] if is_all else torch.Size([piece.numel])))
        self._form = tuple(form)
        self._number = views.number(self._form)

    def targets(self, flat: Tensor) -> list[Tensor]:
        """Return the views of the buffer that the gradients are copied to, one for each slice."""
        return self._views.of(flat, self._number, self._form)

    def parts(self, grads: Mapping[int, Tensor]) -> list[Tensor]:
        """Return the part of a gradient that belongs to each slice. `grads`: by index of the parameter."""
        found = [grads[index] if cut is None else grads[index].reshape(-1)[cut] for index, cut in self._cuts]
        return [part.detach() for part in found] if torch.is_grad_enabled() else found


def put(into: Tensor, pieces: Sequence[Piece]) -> None:
    """Copy parts of gradients to their places in a bucket's buffer, in one call."""
    targets = [into.narrow(0, piece[0].offset, piece[0].numel) for piece in pieces]
    torch._foreach_copy_(targets, [piece[1] for piece in pieces])


def add(into: Tensor, pieces: Sequence[Piece]) -> None:
    """Add parts of gradients to a bucket's buffer. The first part for a slice overwrites the old values."""
    first = [piece for piece in pieces if piece[2]]
    if first:
        put(into, first)
    others = [piece for piece in pieces if not piece[2]]
    if others:
        targets = [into.narrow(0, cut.offset, cut.numel) for cut, _, _ in others]
        torch._foreach_add_(targets, [values for _, values, _ in others])


def add_last(flat: Tensor, total: Tensor, pieces: Sequence[Piece]) -> None:
    """Add the last of several gradients to the fp32 sum, and round the result once into the flat buffer."""
    for cut, values, _ in pieces:
        where = slice(cut.offset, cut.offset + cut.numel)
        torch.add(total[where], values, out=flat[where])


def cast(flat: Tensor, total: Tensor, slices: Sequence[Slice]) -> None:
    """Copy slices of an fp32 sum into the flat buffer, rounded to its dtype."""
    for piece in slices:
        where = slice(piece.offset, piece.offset + piece.numel)
        flat[where].copy_(total[where])


def clear(flat: Tensor, slices: Sequence[Slice]) -> None:
    """Write zeros to slices that have no gradient."""
    for piece in slices:
        flat[piece.offset : piece.offset + piece.numel].zero_()


def measure(norm: Tensor, flat: Tensor) -> None:
    """Write the norm of a bucket's gradients to `norm` in fp64. `flat` holds zeros where there is no gradient.

    The norm is always computed over the whole bucket, so its bits do not depend on the order of the gradients.
    """
    if collect.is_usable(norm.device):
        rows = torch.empty(flat.numel() // BLOCK, dtype=torch.float32, device=norm.device)
        collect.put_norms(rows, 0, flat)
        return collect.norm_of(norm, rows)
    if norm.device.type == "cpu":
        norm.copy_(torch.tensor(native.sum_squares([flat])[0], dtype=torch.float64).sqrt())
        return
    rows = torch.linalg.vector_norm(flat.view(-1, BLOCK), dim=1, dtype=torch.float32)  # fp64 would be slow here
    norm.copy_(torch.linalg.vector_norm(rows, dtype=torch.float64))


def measure_many(norms: Tensor, flats: Sequence[tuple[int, Tensor]]) -> None:
    """Write the norms of several buckets to the elements of `norms`. `flats`: index of the element, and the buffer."""
    if collect.is_usable(norms.device) and all(flat.dtype == flats[0][1].dtype for _, flat in flats):
        return collect.measure_many(norms, flats)
    for index, flat in flats:
        measure(norms[index], flat)


def measure_parts(norm: Tensor, sources: Sequence[tuple[int, Tensor]], numel: int) -> None:
    """Write the norm of gradients that are separate tensors or parts of a flat buffer to `norm`.

    `sources`: pairs of the offset in the bucket and the values. `numel`: number of elements of the bucket.
    """
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
    """Add a task's gradients to the fp32 sum of its bucket. In the slices `new`, the sum is overwritten instead."""
    pieces = [(piece, piece in new) for piece in (*new, *known)]
    add(total, [(cut, grads[cut.offset : cut.offset + cut.numel], is_first) for cut, is_first in pieces])


def measure_total(norm: Tensor, total: Tensor, cuts: Sequence[Slice], is_whole: bool) -> None:
    """Write the norm of `total`, a bucket's sum, to `norm`. `cuts`: slices with gradients. `is_whole`: all slices."""
    parts = [total] if is_whole else [total[c.offset : c.offset + c.numel] for c in cuts]
    if total.device.type == "cpu":
        norm.copy_(torch.tensor(sum(native.sum_squares(parts)), dtype=torch.float64).sqrt())
        return
    # fp64, as for totals on the host: the clipping factor must not depend on where the totals are.
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
    norm.copy_(norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms)), non_blocking=True)
