"""`deepspeed.utils`, `deepspeed.runtime.utils` and `RepeatingLoader`."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from twinflow.compat.accelerator import get_accelerator
from twinflow.engine.values import to_device
from twinflow.parallel import partition

logger = logging.getLogger("twinflow")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs a message on the given ranks. All ranks log if `ranks` is empty or contains -1."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, f"[rank {rank}] {message}")


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


class OnDevice:
    """A context in which modules are created with a dtype on a device. With `meta`, they have no memory until
    `initialize` fills them.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self._dtype = dtype
        self._device = device
        self._enabled = enabled
        self._exit = ExitStack()

    def __enter__(self) -> OnDevice:
        if self._enabled:
            self._exit.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)
            self._exit.enter_context(torch.device(self._device))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()


def clone_tensors_for_torch_save(item: Any, device: str | torch.device = "cpu") -> Any:
    """Copies of the tensors in nested dicts, lists and tuples. A copy holds only the memory of its own elements, unlike
    a view.
    """
    if isinstance(item, Tensor):
        return item.detach().clone().to(device)
    if isinstance(item, Mapping):
        return type(item)({key: clone_tensors_for_torch_save(value, device) for key, value in item.items()})  # type: ignore[call-arg]
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    return item


def set_random_seed(seed: int) -> None:
    """Seeds the generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (scripts draw from numpy's global generator)
    torch.manual_seed(seed)


def move_to_device(item: Any, device: str | torch.device, criterion_func: Any = None) -> Any:
    """Moves the tensors in nested dicts, lists and tuples to a device. With `criterion_func`: only tensors for which it
    is true.
    """
    if isinstance(item, Tensor):
        return item.to(device) if criterion_func is None or criterion_func(item) else item
    if criterion_func is None:
        return to_device(item, torch.device(device))
    if isinstance(item, dict):
        return {key: move_to_device(value, device, criterion_func) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        return type(item)(move_to_device(value, device, criterion_func) for value in item)
    return item


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Bounds of parts that have the same number of items."""
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


def set_z3_leaf_modules(model: Any, leaf_module_classes: Sequence[Any], raise_if_not_found: bool = True) -> list[Any]:
    """Returns the modules of these classes and marks nothing: twinflow always gathers blocks whole."""
    names = tuple(kind for kind in leaf_module_classes if isinstance(kind, str))
    kinds = tuple(kind for kind in leaf_module_classes if isinstance(kind, type))
    found = [part for part in model.modules() if isinstance(part, kinds) or type(part).__name__ in names]
    if not found and raise_if_not_found:
        raise ValueError(
            f"The model has no module of the classes {list(leaf_module_classes)}. Give classes, or class names, of "
            "modules of the model, or set raise_if_not_found=False."
        )
    return found
