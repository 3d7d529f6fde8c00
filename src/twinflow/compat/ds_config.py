"""`deepspeed.runtime.config` and `deepspeed.runtime.zero.config`: a config as an object with DeepSpeed's attributes."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum
from typing import Any

from twinflow.compat.comm import get_world_size
from twinflow.config import load_config, resolve_batch
from twinflow.config.read import read_source
from twinflow.config.zero import ZeroOptimization
from twinflow.errors import invalid_value

DeepSpeedConfigError = ValueError


class ZeroStageEnum(IntEnum):
    """The stages of ZeRO. Each is named after the state that it is the first to partition."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(str, Enum):
    """Devices to which DeepSpeed can offload."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class DeepSpeedConfig:
    """A checked config with its batch sizes resolved. Other attributes are those of twinflow's `Config`."""

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        for name, value in (("mpu", mpu), ("mesh_device", mesh_device)):
            if value is not None:
                raise invalid_value(name, type(value).__name__, "None", "initialize() creates the process groups.")
        self._param_dict: Mapping[str, Any] = read_source(config)[1]
        self._config = parsed = load_config(config)
        batch = resolve_batch(parsed, get_world_size())
        self.train_batch_size = batch.train_batch_size
        self.train_micro_batch_size_per_gpu = batch.micro_batch_size
        self.gradient_accumulation_steps = batch.accumulation_steps
        self.zero_config = parsed.zero_optimization
        self.zero_optimization_stage = self.zero_config.stage
        self.zero_enabled = self.zero_optimization_stage > 0
        self.float16_config = parsed.fp16
        self.bfloat16_config = parsed.bf16
        self.optimizer_name = parsed.optimizer.type.lower() if parsed.optimizer is not None else None
        self.optimizer_params = dict(parsed.optimizer.params) if parsed.optimizer is not None else None
        self.scheduler_name = parsed.scheduler.type if parsed.scheduler is not None else None
        self.scheduler_params = dict(parsed.scheduler.params) if parsed.scheduler is not None else None
        self.activation_checkpointing_config = parsed.activation_checkpointing
        self.flops_profiler_config = parsed.flops_profiler

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._config, name)

    def print_user_config(self) -> None:
        """Prints the config with all defaults filled in."""
        print(self._config.model_dump_json(indent=2))

    print = print_user_config


def get_zero_config(param_dict: Mapping[str, Any]) -> ZeroOptimization:
    """The section `zero_optimization` of a whole config, checked."""
    return load_config({"zero_optimization": param_dict.get("zero_optimization", {})}).zero_optimization
