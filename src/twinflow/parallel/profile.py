"""Measures the layers of a pipeline for partition_method="profile"."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from twinflow.errors import invalid_value
from twinflow.parallel.pipeline import PipelineModule, single


@torch.no_grad()
def profile_layers(module: PipelineModule, *inputs: Any, repeats: int = 3) -> tuple[float, ...]:
    """Seconds of each layer's forward, the minimum of some runs: `layer_seconds` for partition_method="profile".

    The module must have all layers, so build it with num_stages=1.
    """
    if module.num_ranks > 1:
        raise invalid_value(
            "the number of ranks", module.num_ranks, [1], "To measure the module, build it with num_stages=1."
        )
    value, found = single(inputs), []
    for call in module.calls():
        seconds, output = zip(*(_timed(call, value) for _ in range(repeats)), strict=True)
        value = single(output[0]) if isinstance(output[0], tuple) else output[0]
        found.append(min(seconds))
    return tuple(found)


def _timed(call: Callable[[Any], Any], value: Any) -> tuple[float, Any]:
    start = perf_counter()
    output = call(value)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return perf_counter() - start, output
