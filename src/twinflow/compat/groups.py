# SPDX-License-Identifier: Apache-2.0
"""`deepspeed.utils.groups`, which describes the ranks of the last engine, and `deepspeed.moe.utils`.

No parameter belongs to an expert group of DeepSpeed, unless a script marks it so.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from twinflow.engine import Engine
from twinflow.errors import incompatible, wrong_state

_LAST: list[weakref.ref[Engine]] = []  # the engine that initialize() has built last


def note_engine(engine: Engine) -> None:
    """Makes an engine the one whose ranks the functions of this module describe."""
    _LAST[:] = [weakref.ref(engine)]


def _engine() -> Engine | None:
    return _LAST[0]() if _LAST else None


def get_data_parallel_world_size() -> int:
    """The number of replicas of the model. Before `initialize`, the number of processes."""
    engine = _engine()
    if engine is not None:
        return engine.dp_world_size
    return dist.get_world_size() if dist.is_initialized() else 1


def get_data_parallel_rank() -> int:
    """The index of this process's replica. Before `initialize`, the rank of the process."""
    engine = _engine()
    if engine is not None:
        return engine.dp_rank
    return dist.get_rank() if dist.is_initialized() else 0


def get_data_parallel_group() -> Any:
    """The process group of all replicas. Raises ValueError with pipeline, tensor or sequence ranks, where it is not all
    ranks.
    """
    engine = _engine()
    if engine is not None and engine.dp_world_size != engine.world_size:
        remedy = "Use engine.dp_rank and engine.dp_world_size, or make the group with torch.distributed.new_group()."
        reason = "twinflow's own groups of these ranks must be used by one thread"
        raise incompatible("get_data_parallel_group()", "pipeline, tensor or sequence ranks", reason, remedy)
    return dist.group.WORLD


def get_sequence_data_parallel_group() -> Any:
    """The process group of all ranks among which ZeRO divides the state: replicas, and ranks that share a sequence.
    Raises ValueError with pipeline or tensor ranks.
    """
    engine = _engine()
    return get_data_parallel_group() if engine is None or engine.sequence is None else dist.group.WORLD


def get_sequence_data_parallel_world_size() -> int:
    """The number of replicas times the number of ranks that share a sequence."""
    return get_data_parallel_world_size() * get_sequence_parallel_world_size()


def get_sequence_data_parallel_rank() -> int:
    """The index of this process among these ranks. Those of a sequence are neighbours."""
    return get_data_parallel_rank() * get_sequence_parallel_world_size() + get_sequence_parallel_rank()


def get_data_parallel_group_ranks() -> list[int]:
    """The global ranks of the processes that have a replica of the model, in order. Raises ValueError with pipeline or
    tensor ranks.
    """
    return dist.get_process_group_ranks(get_data_parallel_group())


def get_sequence_parallel_world_size() -> int:
    """The number of ranks that share a sequence."""
    engine = _engine()
    return engine.sp_world_size if engine is not None else 1


def get_sequence_parallel_rank() -> int:
    """The index of this process among the ranks that share a sequence."""
    engine = _engine()
    return engine.sequence.rank if engine is not None and engine.sequence is not None else 0


def get_sequence_parallel_group() -> Any:
    """The process group of the ranks that share a sequence with this one, which the model's attention uses too: all of
    these ranks must make their calls between the same forwards. Raises RuntimeError without such ranks.
    """
    engine = _engine()
    group = engine.get_sequence_parallel_group() if engine is not None else None
    if group is None:
        raise wrong_state(
            "get_sequence_parallel_group() cannot return a group",
            "no ranks share a sequence",
            "Set sequence_parallel_size in the config, and call it after initialize() (docs/long-sequences.md).",
        )
    return group


def get_model_parallel_world_size() -> int:
    """The number of tensor-parallel ranks."""
    engine = _engine()
    grid = engine.settings.grid if engine is not None else None
    return grid.num_model if grid is not None else 1


def get_model_parallel_rank() -> int:
    """The index of this process among the tensor-parallel ranks."""
    engine = _engine()
    return engine.get_model_parallel_rank() if engine is not None else 0


# `deepspeed.moe.utils`.


def is_moe_param(param: Tensor) -> bool:
    """Whether a script has marked a parameter as that of an expert, with the attribute `allreduce` False."""
    return getattr(param, "allreduce", True) is False


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """(False, 0): there are no expert layers of DeepSpeed."""
    return False, 0


def is_moe_param_group(param_group: Mapping[str, Any]) -> bool:
    """Whether a param group is marked as one of experts."""
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(params: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters that all ranks share, and those of experts."""
    every = list(params)
    return [param for param in every if not is_moe_param(param)], [param for param in every if is_moe_param(param)]


def split_params_grads_into_shared_and_expert_params(group: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of shared parameters, and of those of experts."""
    shared, experts = split_params_into_shared_and_expert_params(group)
    return [p.grad for p in shared if p.grad is not None], [p.grad for p in experts if p.grad is not None]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Sequence[Mapping[str, Any]], max_group_size: float = 178956971
) -> list[Mapping[str, Any]]:
    """The param groups themselves. Raises ValueError if one has parameters of experts."""
    groups = [param_groups] if isinstance(param_groups, Mapping) else list(param_groups)
    for group in groups:
        if any(is_moe_param(param) for param in group["params"]):
            remedy = "Do not mark parameters of experts: experts train like other layers."
            reason = "expert_parallel_size finds experts by their class"
            raise incompatible("A parameter with allreduce=False", "twinflow", reason, remedy)
    return groups


def configure_moe_param_groups(model_parameters: Sequence[Any]) -> Sequence[Any]:
    """The parameters or param groups themselves. Raises ValueError if one has parameters of experts."""
    groups = [one if isinstance(one, Mapping) else {"params": [one]} for one in model_parameters]
    split_params_into_different_moe_groups_for_optimizer(groups)
    return model_parameters
