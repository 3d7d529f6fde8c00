# SPDX-License-Identifier: Apache-2.0
"""Base class of the engine: its settings, its counters, and getters with the names of DeepSpeed's engine.

The modules that save, load and report an engine use this class. They cannot use `Engine`, which imports them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim.optimizer import Optimizer

from twinflow.config import Config
from twinflow.config.params import OPTIMIZERS
from twinflow.engine.values import UserValue
from twinflow.errors import incompatible, invalid_value, wrong_state
from twinflow.launch.environment import ALONE, RankEnvironment
from twinflow.launch.watch import Watch
from twinflow.offload.state_dict_weights import listed
from twinflow.optim.inference import HostWeights
from twinflow.optim.twin import TwinOptimizer
from twinflow.optim.whole import whole_weights
from twinflow.parallel.grid import Grid
from twinflow.parallel.sequence import SequenceRanks
from twinflow.parallel.sequence_model import SplitSequence
from twinflow.parallel.whole import WholeWeights, wrap_save_pretrained
from twinflow.state_dict import StateDict
from twinflow.zero.experts import expert_ranks


class Scheduler(Protocol):
    """A learning-rate scheduler of torch, of twinflow or of the user."""

    @property
    def step(self) -> Callable[..., object]: ...

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state_dict: StateDict, /) -> object: ...


@dataclass(frozen=True)
class EngineSettings:
    """Settings of an engine, with all defaults filled in."""

    micro_batch_size: int
    accumulation_steps: int = 1  # of an engine without an optimizer
    ranks: RankEnvironment = ALONE
    grid: Grid | None = None  # layout of ranks with pipeline or tensor parallelism
    sequence: SplitSequence | None = None  # the ranks that share each sequence
    stage: int = 0  # ZeRO stage
    autocast: torch.dtype | None = None  # dtype of torch.autocast in forwards
    input_dtype: torch.dtype | None = None  # dtype to which floating-point inputs are cast
    keep_last: int | None = None  # number of checkpoints that are kept; None: all
    is_background: bool = False  # checkpoints are written in the background
    background_bytes: int | None = None  # host memory for these checkpoints; None: what is free at the call of save()
    drop_last: bool = False  # drop the last batch of an epoch if it is not full
    config: Mapping[str, object] = field(default_factory=dict)  # as the user gave it
    parsed: Config = field(default_factory=Config)  # the checked config
    weights_file: str = "model.safetensors"  # default file name of save_16bit_model()
    client_optimizer: Optimizer | Callable[..., Optimizer] | None = None  # that the user passed to initialize()


class EngineBase:
    """The state of an engine between steps, and getters that do not change how it trains."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: TwinOptimizer | None,
        scheduler: Scheduler | None,
        settings: EngineSettings,
        watch: Watch | None,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.host_weights: HostWeights | None = None  # weights on the host, if the engine has no optimizer
        self.lr_scheduler = scheduler
        self.training_dataloader: Iterable[UserValue] | None = None
        self.settings = settings
        self.config = settings.config
        self.watch = watch  # detects ranks that have stopped
        grid, ranks = settings.grid, settings.ranks
        self.global_rank = ranks.rank
        self.local_rank = ranks.local_rank  # index of this process on its machine
        self.world_size = ranks.world_size
        # Ranks that ZeRO divides the state among, and the index of this rank. Ranks of one sequence are such ranks too.
        self._num_zero = grid.num_data if grid is not None else ranks.world_size
        self._zero_rank = grid.data if grid is not None else ranks.rank
        self.sp_world_size = self.sequence.size if self.sequence is not None else 1  # ranks that share a sequence
        self.dp_world_size = (
            self._num_zero // self.sp_world_size
        )  # number of ranks, or groups of them, with own samples
        self.dp_rank = self._zero_rank // self.sp_world_size  # index of the one that contains this process
        self._whole: WholeWeights | None = None  # gathers weights that tensor or expert ranks have split
        if grid is not None and grid.num_model > 1:
            self._whole = WholeWeights(module, grid.model, writes=grid.data == 0 and grid.model.rank == 0)
        elif (experts := expert_ranks(module)) is not None:
            self._whole = WholeWeights(module, experts.group, writes=ranks.rank == 0, is_expert=True)
        elif self._has_parts:
            wrap_save_pretrained(module, self._gathered_state_dict, writes=ranks.rank == 0)
        self.global_steps = 0  # steps of the optimizer, including skipped ones
        self.micro_steps = 0
        self.global_samples = 0
        self.part = 0  # number of micro-batches of this step so far
        self._is_pending = False  # `settle` has not yet handled the last step
        self._was_boundary = False
        self.has_frozen = False  # the engine has frozen the parameters, which are on the host and are not trained
        self._destroyed_by = ""  # why the engine cannot be used any more
        self._num_skipped = 0  # after `destroy`
        self._lr_kwargs: StateDict = {}

    def _check_open(self, what: str) -> None:
        if self._destroyed_by:
            remedy = "Do this before destroy(), or build a new engine with initialize() and load a checkpoint."
            raise wrong_state(f"{what} cannot run", self._destroyed_by, remedy)

    def _check_exclusion(self, exclude_frozen: bool) -> None:
        """Raises ValueError if frozen parameters are to be excluded and the engine itself has frozen all of them."""
        if exclude_frozen and self.has_frozen:
            reason, remedy = "the engine has frozen all parameters", "Leave exclude_frozen_parameters out."
            raise incompatible(
                "exclude_frozen_parameters=True", "weights on the host without optimizer", reason, remedy
            )

    def _need_optimizer(self) -> TwinOptimizer:
        self._check_open("Training")
        if self.optimizer is None:
            raise wrong_state(
                "The engine cannot train",
                "it has no optimizer",
                'Add a section "optimizer" to the config, or pass `optimizer` to initialize().',
            )
        return self.optimizer

    def settle(self) -> None:
        """Waits for the outcome of the last step and advances the scheduler if the step was applied."""
        if not self._is_pending:
            return
        self._is_pending = False
        optimizer = self.optimizer
        if optimizer is None or (optimizer.can_skip and not optimizer.was_applied) or self.lr_scheduler is None:
            return
        self.lr_scheduler.step(**self._lr_kwargs)
        # The error that the update rule would raise later does not name the scheduler.
        for lr in (float(group["lr"]) for group in optimizer.param_groups if optimizer.rule is not None):
            if not (math.isfinite(lr) and lr >= 0.0):
                name, remedy = "The learning rate that the scheduler has set", "Check the parameters of the scheduler."
                raise invalid_value(name, lr, "a finite number >= 0", remedy)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients that no step has used. The next micro-batch is then the first of a step."""
        self.part = 0
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none)

    @property
    def device(self) -> torch.device:
        """Device of the module's first parameter; the CPU if it has none."""
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    # Weights.

    def module_state_dict(
        self,
        destination: None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, object]:
        """The module's state dict, with `prefix` before each name. Reading it waits for running updates.

        With tensor ranks: whole weights on the host, which all tensor ranks of a replica gather together. With expert
        ranks: the same, on all ranks. With ZeRO stage 3 on several ranks: whole weights on the host of rank 0, and an
        empty dict on other ranks. All ranks must call it. In a pipeline: the layers of this rank's stage; with ZeRO
        stage 3, on the first data rank of the stage. `destination` and `keep_vars` must have their defaults.
        """
        for name, given in {"destination": destination is not None, "keep_vars": keep_vars}.items():
            if given:
                default = {"destination": None, "keep_vars": False}[name]
                raise invalid_value(f"{name} of module_state_dict()", True, [default], "Use the returned dict.")
        self._check_exclusion(exclude_frozen_parameters)
        call = "module_state_dict()"
        if self._has_parts:
            found = self._gathered_state_dict(call, exclude_frozen=exclude_frozen_parameters, of_stage=True)
        elif self._whole is not None:
            found = self._whole.state_dict(call, exclude_frozen=exclude_frozen_parameters)
        else:
            frozen = {name for name, param in self.module.named_parameters() if not param.requires_grad}
            left_out = frozen if exclude_frozen_parameters else set()
            found = {name: value for name, value in self.module.state_dict().items() if name not in left_out}
        return {f"{prefix}{name}": value for name, value in found.items()} if prefix else found

    @property
    def _has_parts(self) -> bool:
        """Whether ranks have parts of the weights, as ZeRO stage 3 partitions them."""
        return self.settings.stage == 3 and self._num_zero > 1

    def _gathered_state_dict(
        self, call: str, part: nn.Module | None = None, exclude_frozen: bool = False, of_stage: bool = False
    ) -> dict[str, object]:
        """The state dict of the module, or of a submodule, on the host of the first data rank; empty on other ranks."""
        self.settle()
        source = self.optimizer if self.optimizer is not None else self.module
        found: dict[str, object] = dict(whole_weights(source, exclude_frozen, call, part, of_stage))
        if self._zero_rank == 0:
            state = listed(part if part is not None else self.module)
            found |= {name: value for name, value in state.items() if not isinstance(value, Tensor)}
        return found

    def load_module_state_dict(
        self,
        state_dict: Mapping[str, object],
        strict: bool = True,
        custom_load_fn: Callable[[Mapping[str, object], nn.Module], object] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Loads weights into the module. `custom_load_fn(state_dict, module)` replaces `module.load_state_dict`. Tensor
        ranks take their parts of whole weights. As in DeepSpeed, the weights may be the entry "module" of a dict.
        `fetch_z3_params` has no effect, because parts of weights are always taken from whole ones.
        """
        inner = state_dict.get("module")
        if isinstance(inner, Mapping):
            state_dict = inner
        if self._whole is not None:
            state_dict = self._whole.cut(state_dict)
        if custom_load_fn is not None:
            custom_load_fn(state_dict, self.module)
        else:
            self.module.load_state_dict(state_dict, strict=strict)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, object] | None:
        """The state dict from which Accelerate saves a model. With ZeRO stage 3 on several ranks all ranks must
        call it, and other ranks than 0 get None.
        """
        if self._has_parts:
            found = self._gathered_state_dict("get_state_dict()", exclude_frozen=exclude_frozen_parameters)
            return found if self.global_rank == 0 else None
        return self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)

    # The config.

    def gradient_accumulation_steps(self) -> int:
        """Number of micro-batches in a step."""
        return self.optimizer.accumulation_steps if self.optimizer is not None else self.settings.accumulation_steps

    def train_micro_batch_size_per_gpu(self) -> int:
        """Number of samples in a micro-batch of one rank."""
        return self.settings.micro_batch_size

    def train_batch_size(self) -> int:
        """Number of samples in a step, over all replicas of the model."""
        return self.settings.micro_batch_size * self.gradient_accumulation_steps() * self.dp_world_size

    def get_batch_info(self) -> tuple[int, int, int]:
        """The number of samples in a step, of samples in a micro-batch, and of micro-batches in a step."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

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
        """True: weights of any ZeRO stage are gathered on rank 0 when a model is saved."""
        return True

    def fp16_enabled(self) -> bool:
        """Whether at least one parameter is fp16."""
        return torch.float16 in {param.dtype for param in self.module.parameters()}

    def bfloat16_enabled(self) -> bool:
        """Whether at least one parameter is bf16."""
        return torch.bfloat16 in {param.dtype for param in self.module.parameters()}

    def gradient_clipping(self) -> float:
        """The gradient norm to which gradients are clipped; 0: no clipping."""
        return (self.optimizer.max_grad_norm if self.optimizer is not None else None) or 0.0

    @property
    def client_optimizer(self) -> Optimizer | Callable[..., Optimizer] | None:
        """The optimizer, or the function that builds one, that was passed to initialize()."""
        return self.settings.client_optimizer

    @property
    def basic_optimizer(self) -> Optimizer | None:
        """The optimizer that was passed to initialize(), or else the engine's: DeepSpeed's name for an optimizer
        without wrappers.
        """
        given = self.settings.client_optimizer
        return given if isinstance(given, Optimizer) else self.optimizer

    def optimizer_name(self) -> str | None:
        """The class name of the optimizer that was passed to initialize(), or the config's name of the update rule, in
        lower case if it is one of twinflow's. None without an optimizer.
        """
        if self.optimizer is None:
            return None
        given, chosen = self.settings.client_optimizer, self.settings.parsed.optimizer
        if isinstance(given, Optimizer) and given is not self.optimizer:
            return type(given).__name__
        if given is None and chosen is not None:
            return chosen.type.lower() if chosen.type.lower() in OPTIMIZERS else chosen.type
        return self.optimizer.rule_name.rpartition(".")[2]

    # Steps.

    @property
    def skipped_steps(self) -> int:
        """Number of steps that were not applied because a gradient was not finite."""
        self.settle()
        return self.optimizer.num_skipped if self.optimizer is not None else self._num_skipped

    def was_step_applied(self) -> bool:
        """Whether the last `step()` changed the model."""
        self.settle()
        return self._was_boundary and self.optimizer is not None and self.optimizer.was_applied

    def get_lr(self) -> list[float]:
        """The learning rate of each param group for the next step."""
        self.settle()
        return [float(group["lr"]) for group in self._need_optimizer().param_groups]

    def get_mom(self) -> list[float | tuple[float, float] | None]:
        """The betas or the momentum of each param group."""
        self.settle()
        return [group.get("betas", group.get("momentum")) for group in self._need_optimizer().param_groups]

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

    # Ranks.

    @property
    def sequence(self) -> SequenceRanks | None:
        """The ranks that share each sequence (sequence_parallel_size). `engine.sequence.split(batch)` returns this
        rank's part of a batch, which loaders of the engine do.
        """
        return self.settings.sequence.ranks if self.settings.sequence is not None else None

    def get_data_parallel_rank(self) -> int:
        """Index of the model replica that contains this process."""
        return self.dp_rank

    def get_model_parallel_rank(self) -> int:
        """Index of this process among the tensor-parallel ranks."""
        return self.settings.grid.model.rank if self.settings.grid is not None else 0

    get_tensor_parallel_rank = get_model_parallel_rank

    def get_sequence_parallel_group(self) -> ProcessGroup | None:
        """torch's process group of the ranks that share a sequence, for queries. None without such ranks."""
        handle: ProcessGroup | None = self.sequence.group.handle if self.sequence is not None else None
        return handle
