"""Gradients into flat device buffers, and their norms: functions that run on the stream that made the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twinflow import native
from twinflow.offload.plan import Slice

Pieces = Sequence[tuple[Slice, Tensor]]


def add(into: Tensor, pieces: Pieces, is_first: bool) -> None:
    """Put (the first) or add (the others) pieces of a gradient into a bucket's buffer."""
    for piece, values in pieces:
        target = into[piece.offset : piece.offset + piece.numel]
        target.copy_(values) if is_first else target.add_(values)


def cast(flat: Tensor, total: Tensor, slices: Sequence[Slice]) -> None:
    """Slices of an fp32 sum into the flat buffer that travels, rounded to its dtype."""
    for piece in slices:
        where = slice(piece.offset, piece.offset + piece.numel)
        flat[where].copy_(total[where])


def find(sources: Sequence[tuple[int, Tensor]], piece: Slice) -> Tensor:
    """One slice's gradient, from a whole flat buffer or from a tensor of its own."""
    for start, source in sources:
        if start <= piece.offset and piece.offset + piece.numel <= start + source.numel():
            return source[piece.offset - start : piece.offset - start + piece.numel]
    raise AssertionError("a slice without a source")


def measure(norms: Tensor, views: Sequence[tuple[int, Tensor]]) -> None:
    """Each gradient's norm in fp64 into its place in `norms`. Slices are fixed, so norms do not depend on timing."""
    if norms.device.type == "cpu":
        sums = native.sum_squares([view for _, view in views])
        values = [torch.tensor(total, dtype=torch.float64).sqrt() for total in sums]
    else:
        values = [torch.linalg.vector_norm(view, dtype=torch.float64) for _, view in views]
    for (i, _), value in zip(views, values, strict=True):
        norms[i].copy_(value)


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
