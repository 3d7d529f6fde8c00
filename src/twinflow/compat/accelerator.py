"""`deepspeed.accelerator.get_accelerator()`: the GPU, or the CPU if there is no GPU."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from twinflow.monitor.metrics import host_memory_bytes


class Accelerator:
    """torch.cuda or torch.cpu with the method names of DeepSpeed's accelerator.

    A name that DeepSpeed shares with torch.cuda or torch.cpu, such as `synchronize`, is looked up in the torch module.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._torch: Any = getattr(torch, name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return getattr(self._torch, name)
        except AttributeError:
            message = f"The accelerator {self._name} has no attribute {name!r}, and torch.{self._name} has none either."
            raise AttributeError(message) from None

    def device_name(self, device_index: int | None = None) -> str:
        """The name of a device, such as "cuda:1"."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        return self.device_name(self.current_device() if self._name == "cuda" else None)

    def current_device(self) -> int:
        """The index of the current device. On a CPU: the local rank."""
        return torch.cuda.current_device() if self._name == "cuda" else int(os.environ.get("LOCAL_RANK", "0"))

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        """A context in which the device with this index is the current one."""
        return torch.cuda.device(device_index) if self._name == "cuda" else nullcontext()

    def is_synchronized_device(self) -> bool:
        """Whether operations finish before the call returns."""
        return self._name == "cpu"

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._name

    def communication_backend_name(self) -> str:
        """The backend for torch.distributed."""
        return "nccl" if self._name == "cuda" else "gloo"

    def is_bf16_supported(self) -> bool:
        return torch.cuda.is_bf16_supported() if self._name == "cuda" else True

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Dtypes that weights can have."""
        return [torch.float32, torch.float16, torch.bfloat16]

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        """A page-locked copy of the tensor. Without a GPU: the tensor itself."""
        return tensor.pin_memory() if self._name == "cuda" else tensor

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes in use on the GPU. On a CPU: resident memory of this process."""
        return torch.cuda.memory_allocated(device_index) if self._name == "cuda" else host_memory_bytes()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Peak number of bytes in use on the GPU. On a CPU: peak resident memory of this process."""
        if self._name == "cuda":
            return torch.cuda.max_memory_allocated(device_index)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def total_memory(self, device_index: int | None = None) -> int:
        """Memory of the GPU or of the host in bytes."""
        if self._name == "cuda":
            return torch.cuda.get_device_properties(device_index or 0).total_memory
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Resets the peak of the GPU. On a CPU this does nothing: a Linux process cannot reset its own peak."""
        if self._name == "cuda":
            torch.cuda.reset_peak_memory_stats(device_index)

    def empty_cache(self) -> None:
        """Returns cached GPU memory to the system."""
        if self._name == "cuda":
            torch.cuda.empty_cache()

    def manual_seed(self, seed: int) -> Any:
        """Seeds the generator of the current device."""
        return torch.cuda.manual_seed(seed) if self._name == "cuda" else torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        """Seeds the generators of all devices."""
        return torch.cuda.manual_seed_all(seed) if self._name == "cuda" else torch.manual_seed(seed)

    def random(self) -> Any:
        """The module torch.random."""
        return torch.random

    def range_push(self, message: str) -> None:
        """Begins a named NVTX range."""
        if self._name == "cuda":
            torch.cuda.nvtx.range_push(message)  # type: ignore[no-untyped-call]

    def range_pop(self) -> None:
        """Ends the innermost NVTX range."""
        if self._name == "cuda":
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Calls `callback` at once."""
        return callback()


def get_accelerator() -> Accelerator:
    """The accelerator of this process: the GPU, or the CPU if there is no GPU."""
    return Accelerator("cuda" if torch.cuda.is_available() else "cpu")
