"""What one machine does in a second: measured (probe.py) or from a data sheet (machines.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Rates:
    """All in units a second. Updates are AdamW's, gradients and weights bf16; `states` formats are the keys."""

    out_bytes: float  # device to page-locked host memory, alone
    in_bytes: float  # the other way, alone
    duplex_bytes: float  # each way, both at once
    host_params: Mapping[str, float]  # updates on the host, alone
    host_params_copying: Mapping[str, float]  # the same while both copies run at full rate
    device_bytes: float  # device memory read and written by the fused update
    flops: float  # of matrix products in bf16, as a training step achieves them; 0: not known

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Rates:
        """What `to_dict` gave; KeyError or TypeError where it is something else."""
        return Rates(**values)
