"""What an engine answers about itself, under the names that DeepSpeed's users ask by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, SupportsFloat

import torch
from torch import nn

from twinflow.engine.place import Place
from twinflow.engine.reports import Reports
from twinflow.errors import invalid_value
from twinflow.optim.twin import TwinOptimizer

# Of DeepSpeed's engine, and not here.
_INSTEAD: Final = {
    "allreduce_gradients": "gradients are summed over ranks as backward makes them: leave it out",
    "coalesce_grad_reduction": "gradients are summed over ranks as backward makes them: leave it out",
    "offload_states": "use zero_optimization.offload_optimizer: the state is on the host then",
    "reload_states": "use zero_optimization.offload_optimizer: the state is on the host then",
    "get_sequence_parallel_group": "there is no sequence parallelism of DeepSpeed's kind",
    "get_wall_clock_timers": "set wall_clock_breakdown in the config, and read the log",
    "empty_partition_cache": "gathered weights are dropped by themselves: leave it out",
    "mpu": "use engine.dp_rank, engine.dp_world_size and get_model_parallel_rank()",
    "grid": "use engine.dp_rank, engine.dp_world_size and get_pipeline_parallel_rank()",
}


def instead(name: str) -> str:
    """What to use for a name of DeepSpeed's engine that there is not, to end a sentence with; or nothing."""
    return f": {_INSTEAD[name]}" if name in _INSTEAD else ""


class Answers(Place):
    """Nothing here changes how the engine trains."""

    optimizer: TwinOptimizer | None
    reports: Reports

    # Weights.

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The module's parameters; whoever reads one gets every update that is due."""
        return (param for _, param in self.named_parameters(recurse=recurse))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with their names."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def module_state_dict(self) -> dict[str, object]:
        """The module's state dict, with every update in it that is due."""
        return self.module.state_dict()

    def load_module_state_dict(
        self,
        state_dict: Mapping[str, object],
        strict: bool = True,
        custom_load_fn: Callable[[Mapping[str, object], nn.Module], object] | None = None,
    ) -> None:
        """Other weights from now on; `custom_load_fn` puts them there in its own way."""
        if custom_load_fn is not None:
            custom_load_fn(state_dict, self.module)
        else:
            self.module.load_state_dict(state_dict, strict=strict)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, object]:
        """The weights, where this rank has all of them: what Accelerate saves a model from with stage 3."""
        if not self.zero_gather_16bit_weights_on_model_save():
            remedy = "Save a checkpoint, and make files of it with `twinflow export`."
            raise invalid_value("ranks with zero_optimization.stage 3", self.world_size, [1], remedy)
        frozen = {name for name, param in self.module.named_parameters() if not param.requires_grad}
        left_out = frozen if exclude_frozen_parameters else set()
        return {name: value for name, value in self.module_state_dict().items() if name not in left_out}

    # The config.

    def zero_optimization_stage(self) -> int:
        """Of ZeRO; 0 where nothing is partitioned."""
        return self.settings.stage

    def zero_optimization(self) -> bool:
        """Whether there is a stage."""
        return self.settings.stage > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether ranks keep only their part of gradients."""
        return self.settings.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether ranks keep only their part of weights."""
        return self.settings.stage >= 3

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether this rank has whole weights to save."""
        return self.settings.stage < 3 or self.world_size == 1

    def fp16_enabled(self) -> bool:
        """Whether weights are fp16."""
        return self._has(torch.float16)

    def bfloat16_enabled(self) -> bool:
        """Whether weights are bf16."""
        return self._has(torch.bfloat16)

    def _has(self, dtype: torch.dtype) -> bool:
        return any(param.dtype == dtype for param in self.module.parameters())

    def gradient_clipping(self) -> float:
        """The largest norm of all gradients together; 0: no clipping."""
        return (self.optimizer.max_grad_norm if self.optimizer is not None else None) or 0.0

    def steps_per_print(self) -> int | None:
        """Steps between two lines of progress."""
        return self.reports.every

    def optimizer_name(self) -> str | None:
        """The update rule."""
        return self.optimizer.rule_name if self.optimizer is not None else None

    # Steps.

    def get_global_grad_norm(self) -> float | None:
        """Norm of the last step's gradients before clipping; waits until it is known."""
        return self.optimizer.grad_norm if self.optimizer is not None else None

    def loss_scale(self) -> float:
        """What the next loss is multiplied with."""
        return self.optimizer.loss_scale if self.optimizer is not None else 1.0

    @property
    def cur_scale(self) -> float:
        """The same, as an attribute."""
        return self.loss_scale()

    @property
    def monitor(self) -> Monitor:
        """Where numbers of one's own can be written, beside the engine's."""
        return Monitor(self.reports)

    # Ranks.

    def get_data_parallel_rank(self) -> int:
        """Which replica of the model this process is in."""
        return self.dp_rank

    def get_model_parallel_rank(self) -> int:
        """Which of the ranks that share a tensor."""
        return self.settings.grid.model.rank if self.settings.grid is not None else 0

    get_tensor_parallel_rank = get_model_parallel_rank


class Monitor:
    """The writers that the config asks for."""

    def __init__(self, reports: Reports) -> None:
        self._reports = reports

    @property
    def enabled(self) -> bool:
        """Whether there is one on this rank."""
        return self._reports.writes

    def write_events(self, events: Sequence[tuple[str, SupportsFloat, int]]) -> None:
        """Each a tag, a number, and the samples so far."""
        self._reports.write([(tag, float(value), samples) for tag, value, samples in events])
