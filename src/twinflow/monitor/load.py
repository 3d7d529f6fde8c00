"""CPU load and memory use of the process and the machine. A measurement is cheap enough for every step."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from twinflow.monitor.metrics import host_memory_bytes


@dataclass(frozen=True)
class Load:
    """One measurement. Fields that cannot be measured are zero."""

    cores_busy: float  # CPU seconds of all threads of this process per second, since the previous measurement
    host_bytes: int  # resident memory of this process
    host_available_bytes: int  # memory that the system could still allocate without swapping
    gpu_bytes: int  # allocated now
    gpu_peak_bytes: int  # peak of allocated memory since the previous measurement


class LoadMeter:
    """Measures load and memory use.

    Each measurement resets the peak that torch records for the GPU. `torch.cuda.max_memory_allocated` therefore no
    longer returns the peak of the whole run; `gpu_peak_bytes` does.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """`device`: the device of the model."""
        self._device = device if device is not None and device.type == "cuda" else None
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()
        self._cores_busy = 0.0
        self.gpu_peak_bytes = 0

    def look(self) -> Load:
        """Measure the current memory use, and the load and peak since the previous measurement."""
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
        if elapsed_s >= 1e-3:  # The CPU clock is too coarse for shorter intervals.
            self._cores_busy = (cpu_s - self._cpu_s) / elapsed_s
            self._wall_s, self._cpu_s = wall_s, cpu_s
        return self._cores_busy


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """The system's `MemAvailable`, or 0 if the system does not report it. Limits of containers are not considered."""
    try:
        text = meminfo.read_text(encoding="ascii")
    except OSError:
        return 0
    fields = text.partition("MemAvailable:")[2].split(None, 1)
    return int(fields[0]) * 1024 if fields else 0
