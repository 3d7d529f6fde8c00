"""Checks that the parts of a tensor contain each of its elements exactly once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Elements [start, start + numel) of a flattened tensor of `dtype` and `shape`. `where`: the rank or file that has
    them, for errors.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    numel: int
    where: str


def check_cover(what: str, spans: Sequence[Span]) -> None:
    """Raises ValueError if the spans of the tensor `what` leave out elements, overlap, or belong to different
    tensors."""
    first = spans[0]
    for span in spans:
        if (span.dtype, span.shape) != (first.dtype, first.shape):
            one, other = (f"{s.dtype} {list(s.shape)} in {s.where}" for s in (first, span))
            raise ValueError(f"{what} is {one}, but {other}. All parts must belong to one tensor.")
    numel = math.prod(first.shape)
    end, last = 0, first
    for span in sorted(spans, key=lambda span: (span.start, span.numel)):
        if not span.numel:
            continue
        if span.start > end:
            raise _gap(what, end, span.start, numel)
        if span.start < end:
            stop = min(end, span.start + span.numel) - 1
            raise ValueError(
                f"{what}: Elements {span.start} to {stop} are in {last.where} and again in {span.where}. "
                "Each element must be in one part."
            )
        end, last = span.start + span.numel, span
    if end > numel:
        raise ValueError(f"{what}: {last.where} has elements up to {end - 1}, but the tensor has only {numel}.")
    if end < numel:
        raise _gap(what, end, numel, numel)


def _gap(what: str, start: int, stop: int, numel: int) -> ValueError:
    return ValueError(
        f"{what}: Elements {start} to {stop - 1} of {numel} are in no part. Each element must be in one part."
    )
