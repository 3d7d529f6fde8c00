"""Getters of the engine, with the names of DeepSpeed's engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, SupportsFloat

import torch
from torch import nn

from twinflow.engine.reports import Reports
from twinflow.engine.settings import EngineSettings
from twinflow.errors import incompatible
from twinflow.optim.twin import TwinOptimizer

# Names of DeepSpeed's engine that twinflow's engine does not have, with the remedy.
_INSTEAD: Final = {
    "allreduce_gradients": "Remove the call: ranks sum gradients during backward.",
    "coalesce_grad_reduction": "Remove the call: ranks sum gradients during backward.",
    "offload_states": "Set zero_optimization.offload_optimizer in the config, which keeps the state on the host.",
    "reload_states": "Set zero_optimization.offload_optimizer in the config, which keeps the state on the host.",
    "get_sequence_parallel_group": "twinflow has no sequence parallelism like DeepSpeed's.",
    "get_wall_clock_timers": "Set wall_clock_breakdown in the config and read the log.",
    "empty_partition_cache": "Remove the call: gathered weights are released automatically.",
    "mpu": "Use engine.dp_rank, engine.dp_world_size and engine.get_model_parallel_rank().",
    "grid": "Use engine.dp_rank, engine.dp_world_size and engine.get_pipeline_parallel_rank().",
}


def instead(name: str) -> str:
    """A sentence that says what replaces an attribute of DeepSpeed's engine; empty for other names."""
    return f" {_INSTEAD[name]}" if name in _INSTEAD else ""


class Answers:
    """The engine's getters. They do not change how the engine trains, except `load_module_state_dict`."""

    settings: EngineSettings
    module: nn.Module
    optimizer: TwinOptimizer | None
    reports: Reports

    # Rank and device.

    @property
    def global_rank(self) -> int:
        """Index of this process among all processes."""
        return self.settings.ranks.rank

    @property
    def local_rank(self) -> int:
        """Index of this process among those on its machine."""
        return self.settings.ranks.local_rank

    @property
    def world_size(self) -> int:
        """Number of processes that train the model."""
        return self.settings.ranks.world_size

    @property
    def dp_world_size(self) -> int:
        """Number of model replicas (data parallelism)."""
        return self.settings.grid.num_data if self.settings.grid is not None else self.world_size

    @property
    def dp_rank(self) -> int:
        """Index of the model replica that contains this process."""
        return self.settings.grid.data if self.settings.grid is not None else self.global_rank

    @property
    def device(self) -> torch.device:
        """Device of the module's first parameter; the CPU if it has none."""
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    @property
    def config(self) -> Mapping[str, object]:
        """The config as the user gave it."""
        return self.settings.config

    # Weights.

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The module's parameters. Reading a parameter waits for its running updates."""
        return (param for _, param in self.named_parameters(recurse=recurse))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's parameters with their names, as `nn.Module.named_parameters`."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def module_state_dict(self) -> dict[str, object]:
        """The module's state dict. Reading it waits for running updates."""
        return self.module.state_dict()

    def load_module_state_dict(
        self,
        state_dict: Mapping[str, object],
        strict: bool = True,
        custom_load_fn: Callable[[Mapping[str, object], nn.Module], object] | None = None,
    ) -> None:
        """Loads weights into the module. `custom_load_fn(state_dict, module)` replaces `module.load_state_dict`."""
        if custom_load_fn is not None:
            custom_load_fn(state_dict, self.module)
        else:
            self.module.load_state_dict(state_dict, strict=strict)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, object]:
        """The state dict from which Accelerate saves a model. Raises ValueError with ZeRO stage 3 on several ranks."""
        if not self.zero_gather_16bit_weights_on_model_save():
            raise incompatible(
                "A state dict of all weights",
                f"zero_optimization.stage 3 on {self.world_size} ranks",
                "each rank has only a part of the weights",
                "Save a checkpoint and convert it with `twinflow export`.",
            )
        frozen = {name for name, param in self.module.named_parameters() if not param.requires_grad}
        left_out = frozen if exclude_frozen_parameters else set()
        return {name: value for name, value in self.module_state_dict().items() if name not in left_out}

    # The config.

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage; 0 if nothing is partitioned."""
        return self.settings.stage

    def zero_optimization(self) -> bool:
        """Whether the ZeRO stage is 1 or higher."""
        return self.settings.stage > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are partitioned between ranks (stage 2 or 3)."""
        return self.settings.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether weights are partitioned between ranks (stage 3)."""
        return self.settings.stage >= 3

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether this rank has all weights and can save them."""
        return self.settings.stage < 3 or self.world_size == 1

    def fp16_enabled(self) -> bool:
        """Whether any parameter is fp16."""
        return self._has(torch.float16)

    def bfloat16_enabled(self) -> bool:
        """Whether any parameter is bf16."""
        return self._has(torch.bfloat16)

    def _has(self, dtype: torch.dtype) -> bool:
        return any(param.dtype == dtype for param in self.module.parameters())

    def gradient_clipping(self) -> float:
        """The gradient norm to which gradients are clipped; 0: no clipping."""
        return (self.optimizer.max_grad_norm if self.optimizer is not None else None) or 0.0

    def steps_per_print(self) -> int | None:
        """Number of steps between two log lines; None: no log lines."""
        return self.reports.every

    def optimizer_name(self) -> str | None:
        """Name of the update rule; None without an optimizer."""
        return self.optimizer.rule_name if self.optimizer is not None else None

    # Steps.

    def get_global_grad_norm(self) -> float | None:
        """Gradient norm of the last step before clipping. The call waits until the norm is known."""
        return self.optimizer.grad_norm if self.optimizer is not None else None

    def loss_scale(self) -> float:
        """The factor by which the next loss is multiplied (fp16)."""
        return self.optimizer.loss_scale if self.optimizer is not None else 1.0

    @property
    def cur_scale(self) -> float:
        """`loss_scale()` as an attribute, as DeepSpeed has it."""
        return self.loss_scale()

    @property
    def monitor(self) -> Monitor:
        """Writes the user's own scalars to the monitors of the config."""
        return Monitor(self.reports)

    # Ranks.

    def get_data_parallel_rank(self) -> int:
        """Index of the model replica that contains this process."""
        return self.dp_rank

    def get_model_parallel_rank(self) -> int:
        """Index of this process among the tensor-parallel ranks."""
        return self.settings.grid.model.rank if self.settings.grid is not None else 0

    get_tensor_parallel_rank = get_model_parallel_rank


class Monitor:
    """The monitors of the config (TensorBoard, CSV, ...)."""

    def __init__(self, reports: Reports) -> None:
        self._reports = reports

    @property
    def enabled(self) -> bool:
        """Whether this rank writes to a monitor."""
        return self._reports.writes

    def write_events(self, events: Sequence[tuple[str, SupportsFloat, int]]) -> None:
        """Writes events of the form (tag, value, number of samples so far)."""
        self._reports.write([(tag, float(value), samples) for tag, value, samples in events])
