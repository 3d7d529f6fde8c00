"""Gradients into flat device buffers, and their norms: functions that run on the stream that made the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twinflow import native
from twinflow.offload.plan import Slice
from twinflow.rules.formats import BLOCK

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


def measure(norm: Tensor, sources: Sequence[tuple[int, Tensor]], numel: int) -> None:
    """The norm of a bucket's gradients, in fp64, into `norm`. `sources` are its gradients with their offsets.

    Rows of 128 elements are summed in fp32 and rows in fp64, so that it does not matter how a bucket is put together.
    """
    if norm.device.type == "cpu":
        total = sum(native.sum_squares([source for _, source in sources]))
        norm.copy_(torch.tensor(total, dtype=torch.float64).sqrt())
        return
    rows = torch.zeros(numel // BLOCK, dtype=torch.float32, device=norm.device)
    for offset, source in sources:
        first, num_whole = offset // BLOCK, source.numel() // BLOCK
        whole = source[: num_whole * BLOCK].view(num_whole, BLOCK)
        rows[first : first + num_whole] = torch.linalg.vector_norm(whole, dim=1, dtype=torch.float32)
        if source.numel() % BLOCK:
            rows[first + num_whole] = torch.linalg.vector_norm(source[num_whole * BLOCK :], dtype=torch.float32)
    norm.copy_(torch.linalg.vector_norm(rows, dtype=torch.float64))


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
