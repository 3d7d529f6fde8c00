"""`deepspeed.zero`: models that are made, read or changed where ranks may have only parts of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from twinflow.compat.owners import OWNERS
from twinflow.errors import invalid_value

_WHOLE = (
    "Read it with deepspeed.utils.safe_get_full_fp32_param(param), or change it before initialize(). "
    "engine.save_checkpoint() and `twinflow export` write whole weights"
)


class Init:
    """A context in which models are made as always: `initialize` gives each rank its part.

    DeepSpeed partitions while the model is made. For a model that does not fit one host, give `initialize` a function
    that makes it, or make it under `torch.device("meta")`.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
    ) -> None:
        if remote_device not in (None, "none", "cpu"):
            raise invalid_value("remote_device", remote_device, (None, "none", "cpu"), "Nothing goes to NVMe.")
        if dtype not in (None, torch.get_default_dtype()):
            remedy = "Set bf16 or fp16 in the config: initialize() casts the model."
            raise invalid_value("dtype", dtype, [None, torch.get_default_dtype()], remedy)
        for name, value in (("data_parallel_group", data_parallel_group), ("mpu", mpu)):
            if value is not None:
                raise invalid_value(name, type(value).__name__, "None", "initialize() makes the groups of ranks.")

    def __enter__(self) -> Init:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class GatheredParameters:
    """A context in which parameters are whole, on ranks that have all of them: updates that are due are in them.

    What `modifier_rank` writes to them there, all ranks have afterwards.
    """

    def __init__(
        self,
        params: Tensor | nn.Module | Iterable[Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        listed = params.parameters() if isinstance(params, nn.Module) else params
        self._params = ([listed] if isinstance(listed, Tensor) else list(listed)) if enabled else []
        self._modifier = modifier_rank

    def __enter__(self) -> None:
        for param in self._params:
            found = OWNERS.find(param)
            if isinstance(param, DTensor) or (found is not None and found[0].offloads_params):
                what = (
                    "of which this rank has rows (stage 3)" if isinstance(param, DTensor) else "that live on the host"
                )
                raise invalid_value("params", f"weights {what}", "weights that are whole on this rank", _WHOLE)
            if found is not None and found[0].runtime.job is None:
                found[0].wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None or self._modifier is None:
            return
        for param in self._params:
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.broadcast(param.data, self._modifier)
            # Writes to `.data` are not counted: so every rank's masters follow, where they do not round to it already.
            torch.autograd.graph.increment_version(param)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing to do where ranks have whole weights. Where they may not, a weight cannot be used outside its module."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        remedy = "Use zero_optimization.stage 2, or use the weight in the forward of the module that owns it."
        raise invalid_value("ranks with register_external_parameter()", dist.get_world_size(), [1], remedy)


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """The engine's module, its weights whole."""
    module: nn.Module = model.module
    with GatheredParameters(module):
        yield module
