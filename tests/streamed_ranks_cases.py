# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of streamed state with weights on the hosts of several ranks."""

from __future__ import annotations

from typing import Any

import torch
from param_offload_support import gpt, loss_of

from twinflow.optim.twin import Tuning, TwinOptimizer
from twinflow.optim.whole import whole_weights
from twinflow.zero import Zero


def train(rank: int, world: int, streamed: float, dtype: torch.dtype, delays: dict[str, float], options: Any) -> Any:
    """Losses of this rank, and the whole weights after some of the steps."""
    tuning = Tuning(bucket_numel=4096, streamed=streamed)
    model = gpt(dtype)()
    optimizer = TwinOptimizer(
        model, lr=1e-2, early=True, offload_params=True, zero=Zero(stage=3, parks=True), tuning=tuning, **options
    )
    for stream, seconds in delays.items():
        optimizer.runtime.device.delay(stream, seconds)
    places = {bucket.plan.place for bucket in optimizer.runtime.buckets if bucket.offloads_params}
    losses, seen = [], []
    parts = options.get("accumulation_steps", 1)
    for step in range(4 * parts):
        loss = loss_of(model, step * world + rank)
        (loss / parts).backward()
        losses.append(loss.item())
        if (step + 1) % parts == 0:
            optimizer.step()
            optimizer.zero_grad()
            if step // parts % 2:  # read while the device still updates, and let the other steps overlap
                seen.append({name: value.double().sum().item() for name, value in whole_weights(optimizer)})
    optimizer.close()
    return {"losses": losses, "seen": seen, "places": sorted(places)}
