"""Which layers a stage has: contiguous runs of them, as even as can be. Pure; layers are known by their facts alone.

A result is a tuple of bounds: stage i has the layers from `bounds[i]` up to `bounds[i + 1]`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from twinflow.errors import invalid_value

UNIFORM, PARAMETERS, PROFILE, TYPE = "uniform", "parameters", "profile", "type:"
METHODS: Final = (UNIFORM, PARAMETERS, PROFILE, TYPE + "REGEX")


@dataclass(frozen=True)
class LayerFacts:
    """What a partition can go by."""

    type_name: str
    num_params: int | None = None  # trainable ones; None where nobody counted
    seconds: float | None = None  # of a forward; None where nobody measured


def bounds(method: str, layers: Sequence[LayerFacts], num_stages: int) -> tuple[int, ...]:
    """The layers of every stage, by one of METHODS (case does not matter)."""
    kind = method.lower()
    if kind == UNIFORM:
        return partition_uniform(len(layers), num_stages)
    if kind == PARAMETERS:
        counted = [layer.num_params for layer in layers]
        assert None not in counted, "whoever partitions by parameters counts them first"
        return partition_balanced([count or 0 for count in counted], num_stages)
    if kind == PROFILE:
        return partition_balanced(_seconds(layers), num_stages)
    if kind.startswith(TYPE):
        return partition_balanced(_matches(method[len(TYPE) :], layers), num_stages)
    raise invalid_value("partition_method", method, METHODS)


def partition_uniform(num: int, parts: int) -> tuple[int, ...]:
    """As many layers for each part; the first ones have one more where it does not come out even."""
    _check_parts(num, parts)
    size, more = divmod(num, parts)
    return tuple(i * size + min(i, more) for i in range(parts + 1))


def partition_balanced(weights: Sequence[float], parts: int) -> tuple[int, ...]:
    """The parts whose largest sum of weights is the least possible, none of them empty.

    Of all such partitions it is the most even one: a huge embedding that is the largest part for sure does not make the
    others any less even. So first the least largest sum is found, then the least sum of squares within that limit.
    """
    _check_parts(len(weights), parts)
    values = np.asarray(weights, dtype=np.float64)
    if not np.isfinite(values).all() or (values < 0).any():
        raise invalid_value("weights of layers", list(weights), "finite numbers >= 0")
    sums = _range_sums(values)
    limit = _least_largest(sums, parts)
    shares = sums / (limit or 1.0)  # whose squares are in range, whatever the weights' unit
    return _most_even(np.where(sums <= limit, np.square(shares), np.inf), parts)


Matrix = npt.NDArray[np.float64]


def _range_sums(values: Matrix) -> Matrix:
    """[start, stop]: the sum of that range, infinite where it is empty.

    Each row is summed from its own start: differences of one running sum would round otherwise from range to range.
    """
    num = len(values)
    sums = np.full((num + 1, num + 1), np.inf)
    for start in range(num):
        sums[start, start + 1 :] = np.cumsum(values[start:])
    return sums


def _least_largest(sums: Matrix, parts: int) -> float:
    """The least possible largest sum over all layers."""
    best = sums[0]  # by stop, for as many parts as there have been
    for _ in range(parts - 1):
        best = np.maximum(best[:, None], sums).min(0)
    return float(best[-1])


def _most_even(costs: Matrix, parts: int) -> tuple[int, ...]:
    """The bounds of the parts whose costs sum up to the least."""
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
        remedy = "Give layer_seconds, one number a layer; profile_layers() measures them."
        raise invalid_value("partition_method", PROFILE, f"seconds of all {len(layers)} layers", remedy)
    return seconds


def _matches(pattern: str, layers: Sequence[LayerFacts]) -> list[int]:
    """1 for a layer whose class is meant, 0 for another."""
    try:
        compiled = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise invalid_value("partition_method", TYPE + pattern, f"a regular expression ({error})") from error
    found = [int(compiled.search(layer.type_name) is not None) for layer in layers]
    if not any(found):
        names = sorted({layer.type_name for layer in layers})
        raise invalid_value("partition_method", TYPE + pattern, f"an expression that finds some of {names}")
    return found


def _check_parts(num: int, parts: int) -> None:
    if parts < 1:
        raise invalid_value("stages", parts, "a whole number >= 1")
    if num < parts:
        remedy = "Use fewer stages, or split the model into more layers."
        raise invalid_value("stages", parts, f"at most {num}, the number of layers", remedy)
