"""How busy and how full the machine is, cheap enough to ask after every step."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from twinflow.monitor.metrics import host_memory_bytes


@dataclass(frozen=True)
class Load:
    """One look at the machine; zero where there is nothing to measure."""

    cores_busy: float  # CPU seconds of all threads of this process a second, since the look before
    host_bytes: int  # resident memory of this process
    host_available_bytes: int  # what the system could still give without swapping
    gpu_bytes: int  # allocated now
    gpu_peak_bytes: int  # most that was allocated since the look before


class LoadMeter:
    """Looks at the machine.

    A look starts the GPU's peak anew, so `torch.cuda.max_memory_allocated` no longer knows that of the whole run:
    `gpu_peak_bytes` does.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """`device`: the model's."""
        self._device = device if device is not None and device.type == "cuda" else None
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()
        self._cores_busy = 0.0
        self.gpu_peak_bytes = 0

    def look(self) -> Load:
        """The state now, and what happened since the look before."""
        gpu_bytes = gpu_peak_bytes = 0
        if self._device is not None:
            stats = torch.cuda.memory_stats(self._device)
            gpu_bytes = int(stats.get("allocated_bytes.all.current", 0))
            gpu_peak_bytes = int(stats.get("allocated_bytes.all.peak", 0))
            torch.cuda.reset_peak_memory_stats(self._device)
        self.gpu_peak_bytes = max(self.gpu_peak_bytes, gpu_peak_bytes)
        return Load(self._busy(), host_memory_bytes(), available_bytes(), gpu_bytes, gpu_peak_bytes)

    def _busy(self) -> float:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        elapsed_s = wall_s - self._wall_s
        if elapsed_s >= 1e-3:  # the CPU clock is too coarse for less
            self._cores_busy = (cpu_s - self._cpu_s) / elapsed_s
            self._wall_s, self._cpu_s = wall_s, cpu_s
        return self._cores_busy


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """The system's `MemAvailable`; 0 where it has none. The limit of a container is not in it."""
    try:
        text = meminfo.read_text(encoding="ascii")
    except OSError:
        return 0
    fields = text.partition("MemAvailable:")[2].split(None, 1)
    return int(fields[0]) * 1024 if fields else 0
