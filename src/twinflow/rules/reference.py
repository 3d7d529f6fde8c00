# SPDX-License-Identifier: Apache-2.0
"""Update, sum of squares, accumulation and cast in plain torch, one operation at a time. The native library is tested
against these functions, and they run if the native library is not available.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twinflow.rules.rules import flush, fp32
from twinflow.rules.segment import Segment, decode_master, decode_state, encode_master, encode_state

_SLICE = 1 << 20  # elements per operation, a multiple of 128; it limits the size of temporaries
SUM_CHUNK = 16384  # elements of one fp64 partial sum; this number and _LANES define the bits of the result
_LANES = 16


@torch.no_grad()
def update(segments: Sequence[Segment]) -> None:
    """Apply one step of its rule to each segment: reads state and gradient, writes new state and weight."""
    for segment in segments:
        for start in range(0, segment.grad.numel(), _SLICE):
            numel = min(_SLICE, segment.grad.numel() - start)
            store = segment.store.narrow(start, numel)
            target = store if segment.target is None else segment.target.narrow(start, numel)
            gradient = segment.grad.narrow(0, start, numel).float() * fp32(segment.factor)
            states = decode_state(store, 0), decode_state(store, 1)
            master, *new_states = segment.rule.apply(decode_master(store), *states, gradient, segment.hyper)
            for which, values in enumerate(new_states):
                if values is not None:
                    encode_state(target, which, values, segment.first_index + start, segment.key)
            encode_master(target, master, segment.first_index + start, segment.key)


def sum_squares(tensors: Sequence[Tensor]) -> list[float]:
    """The sum of squares of each tensor in fp64. Each chunk is summed in 16 lanes, in order. Then the second half of
    the lanes is added to the first half until one lane is left. Magnitudes below 2**-100 count as 0.
    """
    totals = [0.0] * len(tensors)
    for i, tensor in enumerate(tensors):
        x = flush(tensor.reshape(-1).float()).double()
        for chunk in torch.split(x, SUM_CHUNK) if x.numel() else ():
            rows = torch.nn.functional.pad(chunk, (0, -chunk.numel() % _LANES)).view(-1, _LANES)
            # cumsum adds the rows in order. sum() would add them pairwise.
            lanes = rows.square().cumsum(0)[-1]
            while lanes.numel() > 1:
                half = lanes.numel() // 2
                lanes = lanes[:half] + lanes[half:]
            totals[i] += lanes.item()
    return totals


@torch.no_grad()
def accumulate(into: Tensor, values: Tensor) -> None:
    """Add `values` to `into` in fp32."""
    into.view(-1).add_(values.reshape(-1).float())


@torch.no_grad()
def cast(into: Tensor, values: Tensor) -> None:
    """Copy `values` to `into`. They are converted to fp32 and then rounded to nearest in the dtype of `into`."""
    into.view(-1).copy_(values.reshape(-1).float())
