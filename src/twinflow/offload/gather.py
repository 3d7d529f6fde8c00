"""Gradients into flat device buffers, and their norms: functions that run on the stream that made the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from twinflow import native
from twinflow.device import hide_from_children
from twinflow.gpu import collect
from twinflow.offload.plan import Slice, padded
from twinflow.rules.formats import BLOCK

if TYPE_CHECKING:
    from twinflow.offload.bucket import Task

Pieces = Sequence[tuple[Slice, Tensor]]


def add(into: Tensor, pieces: Pieces, is_first: bool, rows: Tensor | None = None) -> None:
    """Put (the first) or add (the others) pieces of a gradient into a bucket's buffer.

    Where there are `rows`, here and below, the norms of what is written go there in the same pass (gpu/collect.py).
    """
    for piece, values in pieces:
        if rows is not None:
            collect.put(into, rows, piece.offset, values, None if is_first else into)
            continue
        target = into[piece.offset : piece.offset + piece.numel]
        target.copy_(values) if is_first else target.add_(values)


def add_last(flat: Tensor, total: Tensor, pieces: Pieces, rows: Tensor | None = None) -> None:
    """The last of several gradients: the sum goes straight to the buffer that travels, rounded once, in one pass."""
    for piece, values in pieces:
        if rows is not None:
            collect.put(flat, rows, piece.offset, values, total)
            continue
        where = slice(piece.offset, piece.offset + piece.numel)
        torch.add(total[where], values, out=flat[where])


def cast(flat: Tensor, total: Tensor, slices: Sequence[Slice], rows: Tensor | None = None) -> None:
    """Slices of an fp32 sum into the flat buffer that travels, rounded to its dtype."""
    for piece in slices:
        if rows is not None:
            collect.put_total(flat, rows, piece.offset, piece.numel, total)
            continue
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
        return measure_parts(norm, [(0, flat)], flat.numel())
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


def measure_rows(norm: Tensor, rows: Tensor, empty: Sequence[Slice]) -> None:
    """The same where the norms of all blocks are known, but for slices without a gradient."""
    for piece in empty:
        rows[piece.offset // BLOCK : (piece.offset + padded(piece.numel)) // BLOCK].zero_()
    collect.norm_of(norm, rows)


def add_on_device(total: Tensor, grads: Tensor, new: Sequence[Slice], known: Sequence[Slice]) -> None:
    """Add a task's gradients to its bucket's total in fp32; slices that are `new` to it start anew."""
    add(total, [(piece, grads[piece.offset : piece.offset + piece.numel]) for piece in new], is_first=True)
    add(total, [(piece, grads[piece.offset : piece.offset + piece.numel]) for piece in known], is_first=False)


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


class TakenGradient(Tensor):
    """What `.grad` holds after the runtime has taken a gradient: no memory, and an error for whoever reads it.

    With None there, torch's clip_grad_norm_ would return 0 and clip nothing, without a word.
    """

    @staticmethod
    def __new__(cls, like: Tensor) -> TakenGradient:
        """A stand-in of the same shape."""
        made: TakenGradient = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        return made

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        return f"TakenGradient(shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Any operation on it is a mistake, but taking a reference."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise RuntimeError(
            f"{func.__name__}: this gradient has been taken by TwinOptimizer(early=True), which clips, unscales and "
            "accumulates by itself (max_grad_norm=, loss_scale=, accumulation_steps=). To work on .grad, build it with "
            "early=False"
        )
