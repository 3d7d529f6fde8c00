# SPDX-License-Identifier: Apache-2.0
"""Assigns contiguous layers to stages as evenly as possible, from facts about the layers. No layer is built.

A result is a tuple of bounds: stage i has the layers from `bounds[i]` up to `bounds[i + 1]`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from twinflow.errors import incompatible, invalid_value

UNIFORM, PARAMETERS, PROFILE, TYPE = "uniform", "parameters", "profile", "type:"
_NAME: Final = "partition_method (pipeline.partition in a config)"
METHODS: Final = (UNIFORM, PARAMETERS, PROFILE, TYPE + "REGEX")


@dataclass(frozen=True)
class LayerFacts:
    """The properties of a layer that a partition method uses."""

    type_name: str
    num_params: int | None = None  # trainable parameters; None: not counted
    seconds: float | None = None  # time of a forward; None: not measured


def bounds(method: str, layers: Sequence[LayerFacts], num_stages: int) -> tuple[int, ...]:
    """The bounds of all stages by one of METHODS. The case of `method` does not matter."""
    kind = method.lower()
    if kind == UNIFORM:
        return partition_uniform(len(layers), num_stages)
    if kind == PARAMETERS:
        counted = [layer.num_params for layer in layers]
        assert None not in counted, "the caller counts the parameters before it partitions by parameters"
        return partition_balanced([count or 0 for count in counted], num_stages)
    if kind == PROFILE:
        return partition_balanced(_seconds(layers), num_stages)
    if kind.startswith(TYPE):
        return partition_balanced(_matches(method[len(TYPE) :], layers), num_stages)
    raise invalid_value(_NAME, method, METHODS)


def partition_uniform(num: int, parts: int) -> tuple[int, ...]:
    """Bounds of parts with equal numbers of layers. If `parts` does not divide `num`, the first parts have one more."""
    _check_parts(num, parts)
    size, more = divmod(num, parts)
    return tuple(i * size + min(i, more) for i in range(parts + 1))


def partition_balanced(weights: Sequence[float], parts: int) -> tuple[int, ...]:
    """Bounds of the parts whose largest sum of weights is minimal. No part is empty.

    Of all such partitions the most even one is chosen: a huge embedding that determines the largest sum does not make
    the other parts uneven. So the minimal largest sum is found first, and then the minimal sum of squares within that
    limit.
    """
    _check_parts(len(weights), parts)
    values = np.asarray(weights, dtype=np.float64)
    if not np.isfinite(values).all() or (values < 0).any():
        raise invalid_value("The list of layer weights", list(weights), "a list of finite numbers >= 0")
    sums = _range_sums(values)
    limit = _least_largest(sums, parts)
    shares = sums / (limit or 1.0)  # scaled, so that the squares do not overflow
    return _most_even(np.where(sums <= limit, np.square(shares), np.inf), parts)


Matrix = npt.NDArray[np.float64]


def _range_sums(values: Matrix) -> Matrix:
    """A matrix whose entry [start, stop] is the sum of the values in this range, or infinity for an empty range.

    Each row is summed from its own start, because differences of one running sum would have different rounding errors.
    """
    num = len(values)
    sums = np.full((num + 1, num + 1), np.inf)
    for start in range(num):
        sums[start, start + 1 :] = np.cumsum(values[start:])
    return sums


def _least_largest(sums: Matrix, parts: int) -> float:
    """The smallest possible value of the largest sum of a part."""
    best = sums[0]  # minimal largest sum by stop, for the number of parts so far
    for _ in range(parts - 1):
        best = np.maximum(best[:, None], sums).min(0)
    return float(best[-1])


def _most_even(costs: Matrix, parts: int) -> tuple[int, ...]:
    """The bounds of the parts with the minimal sum of costs. `costs[start, stop]` is the cost of a part."""
    best, starts = costs[0], []
    for _ in range(parts - 1):
        totals = best[:, None] + costs
        starts.append(totals.argmin(0))
        best = totals.min(0)
    found = [len(costs) - 1]
    for start in reversed(starts):
        found.append(int(start[found[-1]]))
    return (0, *reversed(found))


def _seconds(layers: Sequence[LayerFacts]) -> list[float]:
    seconds = [layer.seconds for layer in layers if layer.seconds is not None]
    if len(seconds) < len(layers):
        reason = f"the times of all {len(layers)} layers are needed"
        remedy = "Pass layer_seconds with one number for each layer. profile_layers() measures these numbers."
        raise incompatible(f"partition_method={PROFILE!r}", "layers without measured times", reason, remedy)
    return seconds


def _matches(pattern: str, layers: Sequence[LayerFacts]) -> list[int]:
    """1 for each layer whose class name contains a match of the pattern (in any case), 0 for the others."""
    try:
        compiled = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        expected = f"{TYPE!r} followed by a valid regular expression"
        remedy = f"Correct the expression. Python reports: {error}."
        raise invalid_value(_NAME, TYPE + pattern, expected, remedy) from error
    found = [int(compiled.search(layer.type_name) is not None) for layer in layers]
    if not any(found):
        names = sorted({layer.type_name for layer in layers})
        expected = f"{TYPE!r} followed by a regular expression that matches some of {names}"
        raise invalid_value(_NAME, TYPE + pattern, expected)
    return found


def _check_parts(num: int, parts: int) -> None:
    if parts < 1:
        raise invalid_value("The number of stages", parts, "a whole number >= 1")
    if num < parts:
        remedy = "Use fewer stages, or split the model into more layers."
        raise invalid_value("The number of stages", parts, f"at most {num}, the number of layers", remedy)
