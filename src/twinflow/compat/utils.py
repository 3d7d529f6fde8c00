# SPDX-License-Identifier: Apache-2.0
"""`deepspeed.utils`, `deepspeed.runtime.utils`, `RepeatingLoader` and `deepspeed.accelerator.get_accelerator()`."""

from __future__ import annotations

import logging
import os
import random
import resource
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from twinflow.monitor.metrics import host_memory_bytes
from twinflow.parallel import partition
from twinflow.zero.experts import with_all_experts

logger = logging.getLogger("twinflow")


class Accelerator:
    """torch.cuda with the method names of DeepSpeed's accelerator.

    A name that DeepSpeed shares with torch.cuda, such as `synchronize` or `manual_seed`, is looked up in that module.
    """

    _name = "cuda"

    def __getattr__(self, name: str) -> Any:
        found = None if name.startswith("_") else getattr(getattr(torch, self._name), name, None)
        if found is None:
            text = f"Neither the accelerator {self._name} nor the module torch.{self._name} has an attribute {name!r}."
            raise AttributeError(text)
        return found

    def device_name(self, device_index: int | None = None) -> str:
        """The name of a device, such as "cuda:1"."""
        return self._name if device_index is None else f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        """A context in which the device with this index is the current one."""
        return torch.cuda.device(device_index)

    def is_synchronized_device(self) -> bool:
        """Whether operations finish before the call returns."""
        return self._name == "cpu"

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._name

    def communication_backend_name(self) -> str:
        """The backend for `torch.distributed.init_process_group`: "nccl" with a GPU, "gloo" without one."""
        return "nccl" if self._name == "cuda" else "gloo"

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Dtypes that weights can have."""
        return [torch.float32, torch.float16, torch.bfloat16]

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        """A page-locked copy of the tensor. Without a GPU: the tensor itself."""
        return tensor.pin_memory() if self._name == "cuda" else tensor

    def total_memory(self, device_index: int | None = None) -> int:
        """Memory of the GPU or of the host in bytes."""
        return torch.cuda.get_device_properties(device_index or 0).total_memory

    def random(self) -> Any:
        return torch.random

    def range_push(self, message: str) -> None:
        """Begins a named NVTX range. Does nothing without a GPU."""
        if self._name == "cuda":
            torch.cuda.nvtx.range_push(message)  # type: ignore[no-untyped-call]

    def range_pop(self) -> None:
        """Ends the innermost NVTX range."""
        if self._name == "cuda":
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def use_host_timers(self) -> bool:
        """Whether times are measured on the host, because operations finish before the call returns."""
        return self.is_synchronized_device()

    resolves_data_dependency = use_host_timers
    handles_memory_backpressure = use_host_timers

    def default_generator(self, device_index: int) -> torch.Generator:
        """The random generator of a device."""
        return torch.cuda.default_generators[device_index]

    def available_memory(self, device_index: int | None = None) -> int:
        """Free memory of the GPU or of the host in bytes."""
        return torch.cuda.mem_get_info(device_index)[0]

    def is_fp64_supported(self) -> bool:
        return True

    def is_triton_supported(self) -> bool:
        """Whether Triton kernels can run on the device."""
        return self._name == "cuda" and torch.cuda.get_device_capability() >= (8, 0)

    def create_graph(self) -> Any:
        """A CUDA graph, to be captured with `capture_to_graph`."""
        return torch.cuda.CUDAGraph()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        """A context whose operations are captured into a graph."""
        return torch.cuda.graph(graph, pool, stream)

    def replay_graph(self, graph: Any) -> None:
        graph.replay()

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor is in page-locked memory."""
        return tensor.is_pinned()

    def get_compile_backend(self) -> str:
        """The default backend of torch.compile."""
        return "inductor"

    def visible_devices_envs(self) -> list[str]:
        """The environment variable that says which devices a process sees."""
        return ["CUDA_VISIBLE_DEVICES"]

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Calls `callback` at once. DeepSpeed may defer it until CUDA is initialized."""
        return callback()


class CpuAccelerator(Accelerator):
    """The accelerator of a process without a GPU. It has the functions of torch.cuda that torch.cpu does not have."""

    _name = "cpu"

    def device_name(self, device_index: int | None = None) -> str:
        return "cpu"

    def current_device(self) -> int:
        """The local rank, as in DeepSpeed's accelerator for CPUs, because a CPU has no device index."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        return nullcontext()

    def is_bf16_supported(self) -> bool:
        return True

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Resident memory of this process in bytes."""
        return host_memory_bytes()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Peak resident memory of this process in bytes."""
        return max(host_memory_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)

    def total_memory(self, device_index: int | None = None) -> int:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    memory_reserved = memory_allocated
    memory_cached = memory_allocated
    max_memory_reserved = max_memory_allocated
    max_memory_cached = max_memory_allocated

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """Nothing: torch counts no memory of the host."""
        return {}

    def available_memory(self, device_index: int | None = None) -> int:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.default_generator

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        """The state of torch's random generator."""
        return torch.get_rng_state()

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        """Sets the state of torch's random generator."""
        torch.set_rng_state(new_state)

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def default_stream(self, device_index: int | None = None) -> Any:
        return torch.cpu.current_stream()

    def is_current_stream_capturing(self) -> bool:
        return False

    def create_graph(self) -> None:
        """Nothing: operations on a CPU are not captured, but run in `capture_to_graph`."""

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        return nullcontext()

    def replay_graph(self, graph: Any) -> None:
        """Raises NotImplementedError, because nothing was captured."""
        raise NotImplementedError("replay_graph() is not available on a CPU. Call the function instead.")

    def __getattr__(self, name: str) -> Any:
        """Constructors of tensors, such as FloatTensor, are in torch itself."""
        return getattr(torch, name) if name.endswith("Tensor") else super().__getattr__(name)

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Does nothing: a Linux process cannot reset its own peak."""

    reset_max_memory_allocated = reset_peak_memory_stats
    reset_max_memory_cached = reset_peak_memory_stats

    def empty_cache(self) -> None:
        """Does nothing: there is no cache."""

    def manual_seed(self, seed: int) -> Any:
        return torch.manual_seed(seed)

    manual_seed_all = manual_seed


def get_accelerator() -> Accelerator:
    """The accelerator of this process: the GPU, or the CPU if there is no GPU."""
    return Accelerator() if torch.cuda.is_available() else CpuAccelerator()


def is_current_accelerator_supported() -> bool:
    """True: twinflow runs on the GPU and on the CPU."""
    return True


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs a message on the given ranks. All ranks log if `ranks` is empty or contains -1."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, f"[rank {rank}] {message}")


@cache
def log_dist_once(message: str, ranks: tuple[int, ...] | None = None, level: int = logging.INFO) -> None:
    """Logs a message on the given ranks the first time that it is called with it."""
    log_dist(message, ranks, level)


def instrument_w_nvtx(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that marks the calls of a function as NVTX ranges. Without a GPU they are not marked."""

    @wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        accelerator = get_accelerator()
        accelerator.range_push(function.__qualname__)
        try:
            return function(*args, **kwargs)
        finally:
            accelerator.range_pop()

    return marked


def noop_decorator(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that returns the function unchanged. DeepSpeed uses it for decorators that a device lacks."""
    return function


def ensure_directory_exists(filename: str) -> None:
    """Creates the folder of a file."""
    os.makedirs(os.path.dirname(filename), exist_ok=True)


class RepeatingLoader:
    """Batches of a loader without end: the loader starts again after its last batch."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]


@contextmanager
def OnDevice(dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> Iterator[None]:
    """A context in which modules get a dtype and a device. On `meta` they have no memory until `initialize`."""
    if not enabled:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def clone_tensors_for_torch_save(item: Any, device: str | torch.device = "cpu") -> Any:
    """Copies of the tensors in nested dicts, lists and tuples. torch.save writes only the elements of a copy, but the
    whole storage of a view.

    The Trainer and Accelerate pass the state dict of a model on all ranks before rank 0 saves it. With expert ranks, it
    has the experts of this rank. The copies are whole.
    """
    call = "clone_tensors_for_torch_save()"
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone().to(device), with_all_experts(item, call))


def set_random_seed(seed: int) -> None:
    """Seeds the generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (scripts draw from numpy's global generator)
    torch.manual_seed(seed)


def move_to_device(item: Any, device: str | torch.device, criterion_func: Any = None) -> Any:
    """Moves tensors in nested dicts, lists and tuples to a device: all, or those for which `criterion_func` is true."""

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device) if criterion_func is None or criterion_func(tensor) else tensor

    return tree_map_only(Tensor, move, item)


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Bounds of parts with equal numbers of items. If `num_items` is not divisible, the first parts have one more."""
    return list(partition.partition_uniform(num_items, num_parts))


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Bounds of parts such that the largest sum of weights is as small as possible."""
    return list(partition.partition_balanced(weights, num_parts))


def see_memory_usage(message: str, force: bool = False) -> None:
    """Logs the memory of the device if `force` is true, as in DeepSpeed."""
    if force:
        device, gb = get_accelerator(), 1e9
        now, most = device.memory_allocated() / gb, device.max_memory_allocated() / gb
        logger.info(f"{message} | memory {now:.2f} GB, at most {most:.2f} GB")


# Leaf modules of ZeRO stage 3, which DeepSpeed gathers whole. Here nothing is marked, because blocks are always
# gathered whole.


def set_z3_leaf_modules(model: Any, leaf_module_classes: Sequence[Any], raise_if_not_found: bool = True) -> list[Any]:
    """The modules of these classes, given as classes or as their names."""
    names = tuple(kind for kind in leaf_module_classes if isinstance(kind, str))
    kinds = tuple(kind for kind in leaf_module_classes if isinstance(kind, type))
    found = [part for part in model.modules() if isinstance(part, kinds) or type(part).__name__ in names]
    return _need(found, "of the classes", leaf_module_classes, raise_if_not_found)


def set_z3_leaf_modules_by_name(model: Any, module_names: Sequence[str], raise_if_not_found: bool = True) -> list[Any]:
    """The modules with these names."""
    found = [part for name, part in model.named_modules() if name in module_names]
    return _need(found, "with the names", module_names, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(model: Any, suffixes: Sequence[str], raise_if_not_found: bool = True) -> list[Any]:
    """The modules whose names end with one of these texts."""
    found = [part for name, part in model.named_modules() if name.endswith(tuple(suffixes))]
    return _need(found, "with the suffixes", suffixes, raise_if_not_found)


def _need(found: list[Any], what: str, wanted: Sequence[Any], raise_if_not_found: bool) -> list[Any]:
    if not found and raise_if_not_found:
        remedy = "Check the model, or set raise_if_not_found=False."
        raise ValueError(f"The model has no module {what} {list(wanted)}. {remedy}")
    return found


def unset_z3_leaf_modules(model: Any, leaf_module_classes: Sequence[Any]) -> list[Any]:
    """No modules, because none is marked."""
    return []


def get_z3_leaf_modules(model: Any) -> list[Any]:
    """No modules, because none is marked."""
    return []


def set_z3_leaf_module(model: Any, flag: bool) -> None:
    """Accepted without effect: every block is gathered whole, whether it is marked or not."""


def z3_leaf_module(model: Any) -> bool:
    """False, because no module is marked."""
    return False


def z3_leaf_parameter(param: Any) -> bool:
    """False, because no module is marked."""
    return False
