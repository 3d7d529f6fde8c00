"""Rates of one machine: measured (`probe.py`) or from a data sheet (`machines.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Rates:
    """Rates per second. Updates are those of AdamW with bf16 gradients and weights. The keys of mappings are state
    formats."""

    out_bytes: float  # copies from the device to page-locked host memory, alone
    in_bytes: float  # copies from the host to the device, alone
    duplex_bytes: float  # each direction while both copy
    host_params: Mapping[str, float]  # updates on the host, alone
    host_params_copying: Mapping[str, float]  # updates on the host while both directions copy at full rate
    device_bytes: float  # bytes of device memory that the fused update reads and writes
    flops: float  # matrix products in bf16, as in a training step; 0: unknown

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Rates:
        """The rates from the dictionary of `to_dict`. Raises KeyError or TypeError for other dictionaries."""
        return Rates(**values)
