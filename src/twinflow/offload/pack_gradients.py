"""Packing of gradients into flat device buffers, and their norms: functions for the stream that made the gradients."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from twinflow import native
from twinflow.gpu import collect
from twinflow.offload.plan import Slice
from twinflow.rules.formats import BLOCK

Form = tuple[tuple[int, torch.Size], ...]  # offsets in a buffer, and what begins there
# a place in a bucket, a part of a gradient, whether it is the first that comes there
Piece = tuple[Slice, Tensor, bool]


class Views:
    """Views of flat buffers, kept for as long as the buffer is: to make one takes longer than a small copy."""

    def __init__(self) -> None:
        self._found: dict[int, dict[int, list[Tensor]]] = {}  # by the buffer, and the number of their form
        self._numbers: dict[Form, int] = {}

    def number(self, form: Form) -> int:
        """Buffers pass from bucket to bucket, most of which have one form."""
        return self._numbers.setdefault(form, len(self._numbers))

    def of(self, flat: Tensor, number: int, form: Form) -> list[Tensor]:
        """One for each offset and shape of the form."""
        key = id(flat)
        by_form = self._found.get(key)
        if by_form is None:
            by_form = self._found[key] = {}
            weakref.finalize(flat, self._found.pop, key, None).atexit = False
        if number not in by_form:
            data = flat.data  # what is a view for torch would keep the buffer
            by_form[number] = [data[at : at + shape.numel()].view(shape) for at, shape in form]
        return by_form[number]


class Whole:
    """A bucket all of whose gradients come together."""

    def __init__(self, slices: Sequence[Slice], shapes: Mapping[int, torch.Size], views: Views) -> None:
        self._views = views
        self._cuts: list[tuple[int, slice | None]] = []  # a parameter, and what of it is here if it is not all
        form: list[tuple[int, torch.Size]] = []
        for piece in slices:
            is_all = piece.numel == shapes[piece.param].numel()
            cut = None if is_all else slice(piece.start, piece.start + piece.numel)
            self._cuts.append((piece.param, cut))
            form.append((piece.offset, shapes[piece.param] if is_all else torch.Size([piece.numel])))
        self._form = tuple(form)
        self._number = views.number(self._form)

    def targets(self, flat: Tensor) -> list[Tensor]:
        """Where each slice's gradient goes."""
        return self._views.of(flat, self._number, self._form)

    def parts(self, grads: Mapping[int, Tensor]) -> list[Tensor]:
        """What goes there, of the gradient of each parameter."""
        found = [grads[index] if cut is None else grads[index].reshape(-1)[cut] for index, cut in self._cuts]
        return [part.detach() for part in found] if torch.is_grad_enabled() else found


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


def measure_many(norms: Tensor, flats: Sequence[tuple[int, Tensor]]) -> None:
    """`measure` for several buckets, each into an element of `norms`."""
    if collect.is_usable(norms.device) and all(flat.dtype == flats[0][1].dtype for _, flat in flats):
        return collect.measure_many(norms, flats)
    for index, flat in flats:
        measure(norms[index], flat)


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
