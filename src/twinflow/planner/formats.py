"""Bytes of optimizer state for each parameter, by state format, weight dtype and place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from twinflow.errors import invalid_value

STATES: Final = ("fp32", "bf16", "int8")
WEIGHT_BYTES: Final = {"bf16": 2, "fp16": 2, "fp32": 4}
# Bytes of two moments. int8 has a scale of 4 bytes for 128 codes.
MOMENT_BYTES: Final = {"fp32": 8.0, "bf16": 4.0, "int8": 2.0 + 8.0 / 128.0}
HOST_BYTES_MOVED: Final = {"fp32": 26.0, "bf16": 18.0, "int8": 14.125}  # DRAM traffic of an update on the host


@dataclass(frozen=True)
class StateBytes:
    """Bytes of state for each parameter, without the weight on the GPU."""

    host: float  # host memory, if the CPU updates
    resident: float  # GPU memory
    streamed: float  # host memory, if the GPU updates


def state_bytes(states: str, weights: str = "bf16", delayed: bool = False, num_moments: int = 2) -> StateBytes:
    """Bytes of a state format in each place. `num_moments`: two for AdamW, one for Lion.

    A bf16 weight is the upper half of its fp32 master. The host keeps a copy of it and the lower half. On the GPU only
    the lower half is added. An fp16 weight has a separate fp32 master. An fp32 weight is its own master.
    """
    if states not in STATES:
        raise invalid_value("states", states, STATES)
    if weights not in WEIGHT_BYTES:
        raise invalid_value("weights", weights, WEIGHT_BYTES)
    moments = MOMENT_BYTES[states] * num_moments / 2
    beside = {"bf16": 2.0, "fp16": 4.0, "fp32": 0.0}[weights]  # bytes of the master beside the weight
    late = WEIGHT_BYTES[weights] if delayed else 0.0  # new weights that wait for the next step
    return StateBytes(host=4.0 + moments, resident=beside + moments + late, streamed=beside + moments)
