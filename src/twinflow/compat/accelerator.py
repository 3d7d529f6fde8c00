"""`deepspeed.accelerator.get_accelerator()`: the GPU, or the CPU where there is none."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Accelerator:
    """torch.cuda or torch.cpu under DeepSpeed's names; what they have themselves is found there."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._torch: Any = getattr(torch, name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return getattr(self._torch, name)
        except AttributeError:
            raise AttributeError(f"the accelerator {self._name} has no {name!r}, nor has torch.{self._name}") from None

    def device_name(self, device_index: int | None = None) -> str:
        """Like cuda:1."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        """The one in use."""
        return self.device_name(self.current_device() if self._name == "cuda" else None)

    def current_device(self) -> int:
        """Its number."""
        return torch.cuda.current_device() if self._name == "cuda" else int(os.environ.get("LOCAL_RANK", "0"))

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        """A context on another one."""
        return torch.cuda.device(device_index) if self._name == "cuda" else nullcontext()

    def is_synchronized_device(self) -> bool:
        """Whether nothing runs beside Python."""
        return self._name == "cpu"

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Whether a tensor is there."""
        return tensor.device.type == self._name

    def communication_backend_name(self) -> str:
        """For the process group."""
        return "nccl" if self._name == "cuda" else "gloo"

    def is_bf16_supported(self) -> bool:
        """Whether bf16 is computed in."""
        return torch.cuda.is_bf16_supported() if self._name == "cuda" else True

    def is_fp16_supported(self) -> bool:
        """Whether fp16 is computed in."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Of weights."""
        return [torch.float32, torch.float16, torch.bfloat16]

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        """A page-locked copy, where there is a GPU to copy to."""
        return tensor.pin_memory() if self._name == "cuda" else tensor

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes in use; on a CPU, by this process."""
        return torch.cuda.memory_allocated(device_index) if self._name == "cuda" else _resident_bytes("VmRSS")

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most so far."""
        return torch.cuda.max_memory_allocated(device_index) if self._name == "cuda" else _resident_bytes("VmHWM")

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes there are."""
        if self._name == "cuda":
            return torch.cuda.get_device_properties(device_index or 0).total_memory
        return os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Count the most from here; Linux does not let a process do that for itself."""
        if self._name == "cuda":
            torch.cuda.reset_peak_memory_stats(device_index)

    def empty_cache(self) -> None:
        """Give memory that torch holds back to the system."""
        if self._name == "cuda":
            torch.cuda.empty_cache()

    def manual_seed(self, seed: int) -> Any:
        """Of the device's random numbers."""
        return torch.cuda.manual_seed(seed) if self._name == "cuda" else torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        """Of all devices."""
        return torch.cuda.manual_seed_all(seed) if self._name == "cuda" else torch.manual_seed(seed)

    def random(self) -> Any:
        """torch.random."""
        return torch.random

    def range_push(self, message: str) -> None:
        """Begin a named range in a profile."""
        if self._name == "cuda":
            torch.cuda.nvtx.range_push(message)  # type: ignore[no-untyped-call]

    def range_pop(self) -> None:
        """End it."""
        if self._name == "cuda":
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Call it: nothing is put off."""
        return callback()


def _resident_bytes(key: str) -> int:
    """Of this process, as Linux tells; 0 elsewhere."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)


def get_accelerator() -> Accelerator:
    """The GPU, or the CPU where there is none."""
    return Accelerator("cuda" if torch.cuda.is_available() else "cpu")
