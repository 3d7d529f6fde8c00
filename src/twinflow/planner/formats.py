"""Bytes a parameter of optimizer state takes, by format, by weight dtype and by where it lives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from twinflow.errors import invalid_value

STATES: Final = ("fp32", "bf16", "int8")
WEIGHT_BYTES: Final = {"bf16": 2, "fp16": 2, "fp32": 4}
MOMENT_BYTES: Final = {"fp32": 8.0, "bf16": 4.0, "int8": 2.0 + 8.0 / 128.0}  # two; int8: a scale for 128 codes, twice
HOST_BYTES_MOVED: Final = {"fp32": 26.0, "bf16": 18.0, "int8": 14.125}  # DRAM traffic of an update on the host


@dataclass(frozen=True)
class StateBytes:
    """Bytes a parameter beside the weight on the GPU."""

    host: float  # RAM, where the CPU updates
    resident: float  # GPU memory
    streamed: float  # RAM, where the GPU updates


def state_bytes(states: str, weights: str = "bf16", delayed: bool = False, num_moments: int = 2) -> StateBytes:
    """What a format takes in each place; AdamW has two moments, Lion one.

    A bf16 weight is the upper half of its master: on the host it is kept again, beside the lower half; on the GPU only
    the lower half comes to it. fp16 weights have an fp32 master of their own, fp32 weights are their master.
    """
    if states not in STATES:
        raise invalid_value("states", states, STATES)
    if weights not in WEIGHT_BYTES:
        raise invalid_value("weights", weights, WEIGHT_BYTES)
    moments = MOMENT_BYTES[states] * num_moments / 2
    beside = {"bf16": 2.0, "fp16": 4.0, "fp32": 0.0}[weights]  # of the master, where the weight itself is at hand
    late = WEIGHT_BYTES[weights] if delayed else 0.0  # new weights that wait for their step
    return StateBytes(host=4.0 + moments, resident=beside + moments + late, streamed=beside + moments)
