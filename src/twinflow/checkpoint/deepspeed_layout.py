"""The places of a parameter's values in the flat tensors of a DeepSpeed checkpoint.

Stages 1 and 2 concatenate the parameters of a group, split the result into equal parts and give one to each rank.
Padding at the end makes the length divisible. Some files include the padding and others do not, so tensors of masters
and of states may differ in length. Newer versions may also pad after each parameter.

Stage 3 splits each parameter into equal parts, pads the last one and concatenates the parts of all parameters on a
rank.
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
    """A range of the values of a saved tensor."""

    tensor: SavedTensor
    start: int
    numel: int


@dataclass(frozen=True)
class Values:
    """A tensor that is assembled from spans."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    spans: tuple[Span, ...]

    def read(self) -> Tensor:
        """The values in new memory. At most one span is in memory besides them."""
        whole = torch.empty(math.prod(self.shape), dtype=self.dtype)
        at = 0
        for span in self.spans:
            whole[at : at + span.numel] = span.tensor.read_range(span.start, span.numel)
            at += span.numel
        assert at == whole.numel()
        return whole.view(self.shape)


def of_tensor(tensor: SavedTensor, dtype: torch.dtype | None = None) -> Values:
    """A saved tensor as it is, or with another dtype."""
    return Values(tensor.shape, dtype or tensor.dtype, (Span(tensor, 0, tensor.numel),))


def in_row(shapes: Shapes, paddings: Sequence[int], row: Sequence[SavedTensor], what: str) -> dict[str, Values]:
    """Stages 1 and 2: the parameters of one group, from its parts on all ranks."""
    if len(paddings) != len(shapes):
        raise ValueError(
            f"{what}: There are {len(paddings)} paddings for {len(shapes)} parameters. The checkpoint is damaged."
        )
    found: dict[str, Values] = {}
    at = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        numel = math.prod(shape)
        found[name] = Values(shape, torch.float32, _cut(row, at, numel, f"{what}: {name}"))
        at += numel + padding
    total, slack = sum(part.numel for part in row), 2 * len(row)
    # The padding makes the length a multiple of twice the number of ranks. A larger rest means wrong shapes.
    if -(-total // slack) != -(-at // slack):
        raise ValueError(
            f"{what}: The parameters need {at} values, but there are {total}. Shapes and values do not belong together."
        )
    return found


def in_parts(shapes: Shapes, ranks: Sequence[Sequence[SavedTensor]], what: str) -> dict[str, Values]:
    """Stage 3: all parameters, from the concatenated parts of each rank, which may be split into several tensors."""
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
        raise ValueError(
            f"{what}: The parameters of a rank need {at} values, but ranks have {sorted(totals)}. "
            "The files do not belong to one model."
        )
    return found


def trim(spans: Sequence[Span], numel: int) -> tuple[Span, ...]:
    """The first `numel` values of the spans. ValueError if there are fewer."""
    kept = []
    for span in spans:
        take = min(span.numel, numel)
        if take:
            kept.append(Span(span.tensor, span.start, take))
        numel -= take
    if numel:
        raise ValueError(
            f"{numel} values of a parameter are missing in the parts of the ranks. The files do not belong to one "
            "model."
        )
    return tuple(kept)


def _cut(row: Sequence[SavedTensor], start: int, numel: int, what: str) -> tuple[Span, ...]:
    """Values `start` to `start + numel` of concatenated tensors."""
    spans = []
    at = 0
    for tensor in row:
        first, last = max(start, at), min(start + numel, at + tensor.numel)
        if first < last:
            spans.append(Span(tensor, first - at, last - first))
        at += tensor.numel
    if sum(span.numel for span in spans) != numel:
        raise ValueError(
            f"{what} needs values up to {start + numel}, but there are {at}. Shapes and values do not belong together."
        )
    return tuple(spans)
