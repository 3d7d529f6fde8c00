"""Where a parameter's values lie in the flat tensors of a DeepSpeed checkpoint.

Stages 1 and 2 lay the parameters of a group in one row, cut it into equal parts, and give each rank one. What fills the
row up to a length that can be cut stands at its end; some files keep it, others do not, so that rows of masters and of
states may differ in length. Newer versions may also fill up after each parameter.

Stage 3 cuts each parameter into equal parts, fills up the last, and lays a rank's parts of all parameters in a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinflow.checkpoint.torch_files import SavedTensor

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Span:
    """A run of a saved tensor's values."""

    tensor: SavedTensor
    start: int
    numel: int


@dataclass(frozen=True)
class Values:
    """A tensor put together from spans."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    spans: tuple[Span, ...]

    def read(self) -> Tensor:
        """The values, in memory of their own; beside them there is one span at a time."""
        whole = torch.empty(math.prod(self.shape), dtype=self.dtype)
        at = 0
        for span in self.spans:
            whole[at : at + span.numel] = span.tensor.read_range(span.start, span.numel)
            at += span.numel
        assert at == whole.numel()
        return whole.view(self.shape)


def of_tensor(tensor: SavedTensor, dtype: torch.dtype | None = None) -> Values:
    """A saved tensor as it is, or in another dtype."""
    return Values(tensor.shape, dtype or tensor.dtype, (Span(tensor, 0, tensor.numel),))


def in_row(shapes: Shapes, paddings: Sequence[int], row: Sequence[SavedTensor], what: str) -> dict[str, Values]:
    """Stages 1 and 2: the parameters of one group, from the ranks' parts of its row."""
    if len(paddings) != len(shapes):
        raise ValueError(f"{what}: {len(paddings)} paddings for {len(shapes)} parameters; the checkpoint is damaged")
    found: dict[str, Values] = {}
    at = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        numel = math.prod(shape)
        found[name] = Values(shape, torch.float32, _cut(row, at, numel, f"{what}: {name}"))
        at += numel + padding
    total, slack = sum(part.numel for part in row), 2 * len(row)
    # Rows are filled up to a multiple of twice the ranks. More is left over only where the shapes are another model's.
    if -(-total // slack) != -(-at // slack):
        raise ValueError(
            f"{what}: its parameters take {at} values of {total}; shapes and values do not belong together"
        )
    return found


def in_parts(shapes: Shapes, ranks: Sequence[Sequence[SavedTensor]], what: str) -> dict[str, Values]:
    """Stage 3: all parameters, from each rank's row, which may be cut into several tensors."""
    found: dict[str, Values] = {}
    at = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        part = -(-numel // len(ranks))
        spans = [span for row in ranks for span in _cut(row, at, part, f"{what}: {name}")]
        found[name] = Values(shape, torch.float32, trim(spans, numel))
        at += part
    totals = {sum(tensor.numel for tensor in row) for row in ranks}
    if totals != {at}:
        raise ValueError(f"{what}: a rank's parameters take {at} values, there are {sorted(totals)}; not of one model")
    return found


def trim(spans: Sequence[Span], numel: int) -> tuple[Span, ...]:
    """The first `numel` values of the spans."""
    kept = []
    for span in spans:
        take = min(span.numel, numel)
        if take:
            kept.append(Span(span.tensor, span.start, take))
        numel -= take
    if numel:
        raise ValueError(f"the ranks' parts of a parameter are {numel} values short; not of one model")
    return tuple(kept)


def _cut(row: Sequence[SavedTensor], start: int, numel: int, what: str) -> tuple[Span, ...]:
    """Values `start` to `start + numel` of tensors that lie in a row."""
    spans = []
    at = 0
    for tensor in row:
        first, last = max(start, at), min(start + numel, at + tensor.numel)
        if first < last:
            spans.append(Span(tensor, first - at, last - first))
        at += tensor.numel
    if sum(span.numel for span in spans) != numel:
        raise ValueError(f"{what} would end at value {start + numel} of {at}; shapes and values do not belong together")
    return tuple(spans)
