"""Every kernel in plain torch, one operation at a time: the truth the native library is held against, and what runs
when that library is not there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twinflow.rules.numerics import flush, fp32
from twinflow.rules.segment import Segment, decode_master, decode_state, encode_master, encode_state

_SLICE = 1 << 20  # elements at a time, so that temporaries stay small; a multiple of 128
SUM_CHUNK = 16384  # elements of one fp64 partial sum (part of the result's definition, as is the number of lanes)
_LANES = 16


@torch.no_grad()
def update(segments: Sequence[Segment]) -> None:
    """One step of each segment's rule: state and gradient in, new state and weight out."""
    for segment in segments:
        for start in range(0, segment.grad.numel(), _SLICE):
            _update_slice(segment, start, min(_SLICE, segment.grad.numel() - start))


def _update_slice(segment: Segment, start: int, numel: int) -> None:
    store = segment.store.narrow(start, numel)
    target = store if segment.target is None else segment.target.narrow(start, numel)
    gradient = segment.grad.narrow(0, start, numel).float() * fp32(segment.factor)
    states = decode_state(store, 0), decode_state(store, 1)
    master, first, second = segment.rule.apply(decode_master(store), *states, gradient, segment.hyper)
    index = segment.first_index + start
    for which, values in enumerate((first, second)):
        if values is not None:
            encode_state(target, which, values, index, segment.key)
    encode_master(target, master)


def sum_squares(tensors: Sequence[Tensor]) -> list[float]:
    """Each tensor's sum of squares in fp64: chunks of 16 lanes, each lane summed in order, lanes folded in halves."""
    return [_sum_squares(tensor) for tensor in tensors]


def _sum_squares(tensor: Tensor) -> float:
    x = flush(tensor.reshape(-1).float()).double()
    total = 0.0
    for chunk in torch.split(x, SUM_CHUNK) if x.numel() else ():
        rows = torch.nn.functional.pad(chunk, (0, -chunk.numel() % _LANES)).view(-1, _LANES)
        # cumsum over rows adds in order; sum() would add pairwise
        lanes = rows.square().cumsum(0)[-1]
        while lanes.numel() > 1:
            half = lanes.numel() // 2
            lanes = lanes[:half] + lanes[half:]
        total += lanes.item()
    return total


@torch.no_grad()
def accumulate(into: Tensor, values: Tensor) -> None:
    """into += values, in fp32."""
    into.view(-1).add_(values.reshape(-1).float())


@torch.no_grad()
def cast(into: Tensor, values: Tensor) -> None:
    """Into = values, rounded to nearest through fp32."""
    into.view(-1).copy_(values.reshape(-1).float())
