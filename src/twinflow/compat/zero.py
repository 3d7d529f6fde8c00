"""`deepspeed.zero`: contexts for creating, reading and changing models that ranks partition."""

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
from twinflow.conflicts import conflict
from twinflow.errors import invalid_value

_WHOLE = (
    "Read a weight with deepspeed.utils.safe_get_full_fp32_param(param), or change it before initialize(). "
    "engine.save_checkpoint() and `twinflow export` write whole weights."
)


class Init:
    """A context without effect: models are created as usual, and `initialize` partitions them.

    DeepSpeed partitions a model during its creation. For a model that does not fit into one host, give `initialize` a
    function that creates it, or create it under `torch.device("meta")`.
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
            remedy = "twinflow does not offload to NVMe."
            raise invalid_value("remote_device", remote_device, (None, "none", "cpu"), remedy)
        if dtype not in (None, torch.get_default_dtype()):
            remedy = "Set bf16 or fp16 in the config: initialize() casts the model."
            raise invalid_value("dtype", dtype, [None, torch.get_default_dtype()], remedy)
        for name, value in (("data_parallel_group", data_parallel_group), ("mpu", mpu)):
            if value is not None:
                raise invalid_value(name, type(value).__name__, "None", "initialize() creates the process groups.")

    def __enter__(self) -> Init:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class GatheredParameters:
    """A context in which parameters are whole and all pending updates are in them.

    With `modifier_rank`, the values of that rank are sent to all ranks at the end. ValueError for weights that are
    partitioned (stage 3) or live on the host.
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
                kind = "that are partitioned (stage 3)" if isinstance(param, DTensor) else "that live on the host"
                raise invalid_value("params", f"weights {kind}", "weights that are whole on this rank", _WHOLE)
            if found is not None and found[0].runtime.steps.job is None:
                found[0].wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None or self._modifier is None:
            return
        for param in self._params:
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.broadcast(param.data, self._modifier)
            # torch does not count writes to `.data`. A new version makes the optimizer compare the weight with its
            # master, and copy it there if it is not the rounded master.
            torch.autograd.graph.increment_version(param)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Does nothing with one rank. ValueError with several: with stage 3 a weight cannot be used outside its module."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise conflict("ZeRO stages 2 and 3", "external", ranks=dist.get_world_size())


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """A context with the engine's module, whose weights are whole."""
    module: nn.Module = model.module
    with GatheredParameters(module):
        yield module
