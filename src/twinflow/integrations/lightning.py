# SPDX-License-Identifier: Apache-2.0
"""Lightning with TwinOptimizer: `Trainer(strategy=TwinStrategy(config=...))`.

The strategy builds an engine for the LightningModule (`twinflow.initialize`) and gives its TwinOptimizer to the
Trainer. The Trainer runs its own loop, with Lightning's accumulation, schedules, callbacks, precision and logging. The
optimizer of `configure_optimizers` defines the update, and the config defines offload and ZeRO. The TwinOptimizer clips
gradients while they are moved to the host. The precision plugin's `clip_gradients` only checks that its limit equals
that of the TwinOptimizer.

A checkpoint is a folder. It has the files of the engine, which are written one parameter at a time, and a file with the
rest of Lightning's checkpoint.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

import twinflow
from twinflow.build_optimizer import TIMEOUT_S, follow
from twinflow.checkpoint import open_checkpoint
from twinflow.config.load import read_source
from twinflow.conflicts import conflict
from twinflow.dist.sharded import is_dtensor
from twinflow.engine import Engine
from twinflow.errors import incompatible, invalid_value, wrong_state
from twinflow.integrations import need
from twinflow.integrations.norms import Clipping
from twinflow.integrations.parts import allocate, gathered_weights, has_no_values
from twinflow.integrations.scaler import TwinScaler, loss_scale_for
from twinflow.integrations.torch_state import load_torch_state, torch_state
from twinflow.optim.equivalent import groups_for, rule_for, section_for
from twinflow.optim.twin import TwinOptimizer
from twinflow.optim.twin_build import own_device
from twinflow.optim.twin_checks import check_loss
from twinflow.optim.whole import whole_weights
from twinflow.zero.experts import expert_ranks

_IS_OLD_NAME = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
_HOME = "pytorch_lightning" if _IS_OLD_NAME else "lightning.pytorch"
pl = need(_HOME, "pytorch-lightning" if _IS_OLD_NAME else "lightning", "twinflow.integrations.lightning")
_FOLDER, _REST = "engine", "lightning.ckpt"
_PARTS = "twinflow"  # what the engines have saved, in the file with the rest
_LOADED: Final[list[Any]] = []  # the optimizer states of a folder, which are loaded with the weights
_CLIPPING = {"gradient_clipping": "norm", "gradient_clipping_value": "value"}  # config keys and Lightning's algorithms
# Sections for the engine's own forward, which Lightning does not call, and what to use instead.
_REFUSED = {
    "torch_autocast": 'Use Trainer(precision="bf16-mixed").',
    "pipeline": "Use twinflow.initialize() and your own loop.",
    "tensor_parallel": "Use twinflow.initialize() and your own loop.",
    "expert_parallel_size": "Use twinflow.initialize() and your own loop, or Hugging Face's Trainer.",
    "wall_clock_breakdown": "Use Trainer(profiler=...).",
    "flops_profiler": "Use Trainer(profiler=...).",
    "tensorboard": "Use Trainer(logger=...).",
    "csv_monitor": "Use Trainer(logger=...).",
    "wandb": "Use Trainer(logger=...).",
    "steps_per_print": "Use Trainer(log_every_n_steps=...).",
}


_Ddp = pl.strategies.DDPStrategy


class TwinStrategy(pl.strategies.ParallelStrategy):  # type: ignore[name-defined,misc]
    """Trains a LightningModule with offload and ZeRO. `config` is a config for `twinflow.initialize`."""

    strategy_name = "twin"
    restore_checkpoint_after_setup = True  # the engine loads its part of the checkpoint and must exist before
    lightning_restore_optimizer = True  # calls `load_optimizer_state_dict`, which handles files of Lightning only
    optimizers: Any
    lr_scheduler_configs: Any
    # Processes and collectives are those of DDPStrategy. This class does not inherit from it, because the Trainer would
    # then shuffle the batches of a single process too.
    root_device, num_nodes, num_processes = _Ddp.root_device, _Ddp.num_nodes, _Ddp.num_processes
    distributed_sampler_kwargs = _Ddp.distributed_sampler_kwargs
    setup_distributed, set_world_ranks = _Ddp.setup_distributed, _Ddp.set_world_ranks
    _get_process_group_backend = _Ddp._get_process_group_backend
    determine_ddp_device_ids = _Ddp.determine_ddp_device_ids
    barrier, broadcast, reduce = _Ddp.barrier, _Ddp.broadcast, _Ddp.reduce

    def __init__(
        self,
        config: Mapping[str, Any] | str | Path | None = None,
        stage: int | None = None,
        offload_params: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(seconds=TIMEOUT_S),
        **kwargs: Any,
    ) -> None:
        """`config`: a dict or a JSON file in DeepSpeed's format. Without it, all optimizer state is on the host, and
        `stage` is the ZeRO stage. With `offload_params`, the weights are on the host too (stage 3).

        Batch sizes, clipping and accumulation are arguments of the Trainer. `kwargs` are passed to ParallelStrategy.
        """
        super().__init__(**kwargs)
        self.config = _read(_by_stage(config, stage, offload_params))
        self._parts: list[_Part] = []  # only while `fit` runs
        self._own_state: dict[str, Any] | None = None  # the state dict that the Trainer puts into a checkpoint
        self._num_nodes, self._start_method = 1, "popen"
        self._process_group_backend, self._timeout = process_group_backend, timeout

    @property
    def is_distributed(self) -> bool:
        """Whether there are several ranks, which need different batches."""
        return bool(self.num_nodes * self.num_processes > 1)

    @property
    def engine(self) -> Engine | None:
        """The engine, while `fit` runs. With several optimizers: that of the first one."""
        return self._parts[0].engine if self._parts else None

    @property
    def twin(self) -> TwinOptimizer:
        """The optimizer, or the first one of several. Raises RuntimeError if `fit` is not running."""
        if self.engine is None or self.engine.optimizer is None:
            reason, remedy = "it exists only while fit() runs", "Read it in a callback or a hook of the module."
            raise wrong_state("TwinStrategy.twin cannot be read", reason, remedy)
        return self.engine.optimizer

    # Setup, in the order of the calls.

    def _configure_launcher(self) -> None:
        if self.is_distributed:
            _Ddp._configure_launcher(self)

    def setup_environment(self) -> None:
        """Join the process group if there are several ranks."""
        super().setup_environment()
        if self.is_distributed:
            self.setup_distributed()

    def model_to_device(self) -> None:
        """Move the model to the device. For `fit`, `twinflow.initialize` does this, in the precision of the config."""
        if self._is_fitting:
            return
        trainer = self.lightning_module.trainer
        if has_no_values(self.lightning_module) and not trainer.ckpt_path:
            raise wrong_state(
                f"Trainer.{trainer.state.fn.value}() cannot run",
                "after fit() each rank has a part of the weights, and the whole weights did not fit into host memory",
                "Pass ckpt_path, for example with fewer processes.",
            )
        allocate(self.lightning_module)
        super().model_to_device()

    @property
    def _is_fitting(self) -> bool:
        return str(getattr(self.lightning_module.trainer.state.fn, "value", "")) == "fit"

    def setup_optimizers(self, trainer: Any) -> None:
        """Build an engine for each optimizer of `configure_optimizers`, or for that of the config."""
        if own_device().type != self.root_device.type:
            remedy = "Leave it out: twinflow trains on the GPU if this machine has one, and otherwise on the CPU."
            raise invalid_value("Trainer(accelerator=)", self.root_device.type, [own_device().type], remedy)
        self._check_averaging(trainer)
        if expert_ranks(self.lightning_module) is not None:
            raise incompatible(
                "A model that split_experts() has divided",
                "TwinStrategy",
                "Lightning would save the experts of one rank",
                _REFUSED["expert_parallel_size"],
            )
        config, module = self._configured(trainer), self.lightning_module
        if "optimizer" in config:
            if module.configure_optimizers() is not None:
                raise conflict("Hugging Face and Lightning", "optimizer")
            self._add_part(_Part(module, _FOLDER), config, None)
        else:
            super().setup_optimizers(trainer)
            given = [one for one in self.optimizers if one.param_groups]  # for None, Lightning makes an empty one
            if not given:
                remedy = "Return an optimizer there, or set one in the config of TwinStrategy."
                raise invalid_value("The number of optimizers from configure_optimizers()", 0, "1 or more", remedy)
            if len(given) > 1 and (self._scaler is not None or config.get("fp16", {}).get("enabled")):
                raise conflict("Hugging Face and Lightning", "optimizers", number=len(given))
            for part, optimizer in zip(_divided(module, given), given, strict=True):
                self._add_part(part, config, optimizer)
        self.optimizers = [part.twin for part in self._parts]
        if self._scaler is not None:  # precision="16-mixed"
            self.twin.scale_losses(loss_scale_for(self._scaler))
            self.precision_plugin.scaler = TwinScaler(self.twin, self._scaler)
        self._take_clipping()

    @property
    def _scaler(self) -> Any:
        """The gradient scaler of the precision plugin; None without one."""
        return getattr(self.precision_plugin, "scaler", None)

    def _check_averaging(self, trainer: Any) -> None:
        """Raises ValueError for callbacks that average weights, if ranks have only parts of them."""
        if self.world_size == 1 or self.config.get("zero_optimization", {}).get("stage") != 3:
            return
        for averaging in ("WeightAveraging", "StochasticWeightAveraging"):
            kind = getattr(pl.callbacks, averaging, None)
            if kind is not None and any(isinstance(callback, kind) for callback in trainer.callbacks):
                raise conflict("Hugging Face and Lightning", "average", callback=averaging)

    def _add_part(self, part: _Part, config: Mapping[str, Any], given: Optimizer | None) -> None:
        """Build the engine of one optimizer. Its rule is one of ours if possible, and otherwise `given` itself."""
        section, config, groups = config.get("zero_optimization", {}), dict(config), None
        if len(part.names) > 1 and self.world_size > 1 and section.get("stage") == 3 and "offload_param" not in section:
            raise conflict("Hugging Face and Lightning", "several modules", names=", ".join(part.names))
        name = rule_for(given) if given is not None else None
        if given is not None and name is not None:
            config["optimizer"], groups = section_for(given, name), groups_for(given)
        own = given if groups is None else None
        engine, twin, _, scheduler = self._initialize(
            part.module, optimizer=own, model_parameters=groups, config=config
        )
        assert twin is not None
        engine.leave_plain_backwards()  # the method `backward` of this class scales the loss
        self._parts.append(replace(part, built=engine))
        if given is not None:
            follow(given, twin)
        if scheduler is not None:
            self._add_scheduler(engine, scheduler)

    def _initialize(self, module: nn.Module, **kwargs: Any) -> Any:
        """Build an engine. Lightning sets only some of the environment variables that describe the ranks."""
        ranks = {"RANK": self.global_rank, "LOCAL_RANK": self.local_rank, "WORLD_SIZE": self.world_size}
        ranks |= {"LOCAL_WORLD_SIZE": self.num_processes}
        missing = {key: str(value) for key, value in ranks.items() if key not in os.environ and self.world_size > 1}
        os.environ.update(missing)
        try:
            return twinflow.initialize(model=module, dist_init_required=False, **kwargs)
        finally:
            for key in missing:
                del os.environ[key]

    def _configured(self, trainer: Any) -> dict[str, Any]:
        """The config with the Trainer's settings for clipping and accumulation."""
        config, limit = dict(self.config), float(trainer.gradient_clip_val or 0.0)
        algorithm = str(getattr(trainer.gradient_clip_algorithm, "value", "norm"))
        for key, name in _CLIPPING.items():
            if not self.lightning_module.automatic_optimization:  # the Trainer does not clip
                config[key] = config.get(key, 0.0)
            elif config.get(key):
                remedy = f'Set Trainer(gradient_clip_val=..., gradient_clip_algorithm="{name}") instead.'
                raise invalid_value(f"{key} in the config of TwinStrategy", config[key], ["auto"], remedy)
            else:
                config[key] = limit if algorithm == name else 0.0
        config["gradient_accumulation_steps"] = trainer.accumulate_grad_batches
        return {"train_micro_batch_size_per_gpu": 1, **config}  # the Trainer determines the batches

    def _add_scheduler(self, engine: Engine, scheduler: Any) -> None:
        """Give the scheduler of the config to the Trainer, which advances it in every step and saves it."""
        if self.lr_scheduler_configs:
            raise conflict("Hugging Face and Lightning", "scheduler")
        engine.release_scheduler()
        kind = need(f"{_HOME}.utilities.types", "lightning", "TwinStrategy").LRSchedulerConfig
        self.lr_scheduler_configs = [kind(scheduler, interval="step")]

    def _take_clipping(self) -> None:
        """Replace the clipping of the precision plugin. Limits of the Trainer are those of the TwinOptimizer."""
        clippings = {part.twin: Clipping(part.twin, "gradient_clip_val") for part in self._parts}
        plugin = self.precision_plugin
        original = plugin.clip_gradients

        def clip_gradients(optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
            algorithm = str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm))
            twin = getattr(optimizer, "_optimizer", optimizer)
            if not clip_val or clip_val <= 0:
                return
            if algorithm == "norm" and twin.max_grad_norm is not None:
                clippings[twin].clip(clip_val)
            elif algorithm == "value" and twin.max_grad_value is not None:
                if twin.max_grad_value != clip_val:
                    remedy = "TwinOptimizer clips gradients itself. Use the same value in both places."
                    raise invalid_value("gradient_clip_val", clip_val, [twin.max_grad_value], remedy)
            elif twin.team is not None and twin.team.world > 1:
                raise conflict("Hugging Face and Lightning", "clip")
            else:  # as with torch: the loop changes gradients between backward and step
                original(optimizer, clip_val, gradient_clip_algorithm)

        plugin.clip_gradients = clip_gradients

    def setup_precision_plugin(self) -> None:
        """Also prepare the wrappers of the optimizers, which `LightningModule.optimizers()` returns."""
        super().setup_precision_plugin()
        for wrapper in self._lightning_optimizers:
            if isinstance(wrapper.optimizer, TwinOptimizer):
                wrapper.__class__ = _Wrapper

    # Training.

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run `training_step` as the forward of the module, so that forward hooks run."""
        with self.precision_plugin.train_step_context():
            return self._run("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._run("validation_step", *args, **kwargs)

    def _run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        if self.engine is not None and self.engine.watch is not None:  # tells other ranks that this rank makes progress
            self.engine.watch.beat(module.trainer.global_step + 1, name)
        return self._forward_redirection(module, module, name, *args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run backward, with the loss scale if the config has one."""
        twin, wanted = self.twin, self.lightning_module.trainer.accumulate_grad_batches
        if twin.accumulation_steps != wanted:  # a callback has changed the number of accumulation steps
            for part in self._parts:
                part.twin.set_accumulation_steps(wanted)
        check_loss(closure_loss)
        scale = twin.loss_scale if self._scaler is None else 1.0  # otherwise the precision plugin scales the loss
        loss: Tensor = super().backward(
            closure_loss * scale if scale != 1.0 else closure_loss, optimizer, *args, **kwargs
        )
        return loss

    def teardown(self) -> None:
        """Release threads and memory. The module keeps its weights. Weights that the hosts of several ranks share are
        gathered if each host has memory for all of them.
        """
        self.precision_plugin.__dict__.pop("clip_gradients", None)
        if isinstance(self._scaler, TwinScaler):
            self.precision_plugin.scaler = self._scaler.original
        parts, self._parts = self._parts, []
        status = self.lightning_module.trainer.state.status if parts else None
        is_complete = str(getattr(status, "value", "")) != "interrupted"  # after an error, ranks do not meet
        for part in parts:
            values = gathered_weights(part.twin) if is_complete else {}
            part.engine.destroy()
            for param, value in values.items():
                param.data = value
        super().teardown()

    @property
    def _has_rows(self) -> bool:
        """Whether fully_shard() has divided the parameters."""
        return any(is_dtensor(param) for param in self.lightning_module.parameters())

    # Checkpoints.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state dict of the module. It is empty if ranks have parts of the weights, because `save_checkpoint`
        gathers them for a file and needs none for a folder. `save_checkpoint` compares it with what callbacks leave.
        """
        self._own_state = {} if self._is_partitioned else super().lightning_module_state_dict()
        return self._own_state

    @property
    def _is_partitioned(self) -> bool:
        """Whether this rank has only a part of the weights."""
        if self._parts:
            return self.world_size > 1 and self._parts[0].engine.settings.stage == 3
        return self._has_rows

    def _whole_weights(self) -> dict[str, Any]:
        """The whole weights on rank 0. All ranks must call this."""
        call = "Trainer.save_checkpoint()"
        if not self._parts:
            return {**self.lightning_module.state_dict(), **dict(whole_weights(self.lightning_module, call=call))}
        every = {part: dict(whole_weights(part.twin, call=call)) for part in self._parts}
        found = {_name_in(part.names, name): value for part, state in every.items() for name, value in state.items()}
        return {**_others(self.lightning_module.state_dict(), self._parts), **found}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An empty dict, because the engine saves the optimizer state without a copy."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder, or Lightning's file for weights only. After `fit`, a folder raises RuntimeError."""
        own, self._own_state = self._own_state, None
        if "optimizer_states" not in checkpoint:
            if self._is_partitioned:
                checkpoint = {**checkpoint, "state_dict": self._whole_weights()}
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if not self._parts:
            raise wrong_state(
                "Trainer.save_checkpoint() cannot save the optimizer state",
                "fit() has ended and the memory of the optimizer is released",
                "Save during fit() (ModelCheckpoint), or save only weights: save_checkpoint(path, weights_only=True).",
            )
        for part in self._parts:
            part.engine.count_from(checkpoint["global_step"])
            part.engine.save_checkpoint(filepath, tag=part.folder)
        # The engines have saved the weights. Callbacks that average weights save their average as `state_dict`, and the
        # weights under another name.
        names = [name for name, value in checkpoint.items() if value is own]
        rest = {key: value for key, value in checkpoint.items() if key not in (*names, "optimizer_states")}
        rest[_PARTS] = {"weights": names, "parts": [(part.names, part.folder) for part in self._parts]}
        if own is not None and self._parts[0].module is not self.lightning_module:
            rest[_PARTS]["others"] = _others(own, self._parts)
        super().save_checkpoint(rest, Path(filepath) / _REST, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder that this strategy has written, or a file of Lightning."""
        path = Path(checkpoint_path)
        is_folder = path.is_dir()
        # Lightning's part is pickled. Code in it is run only if the user allows it.
        is_safe = True if weights_only is None else weights_only
        try:
            loaded: dict[str, Any] = super().load_checkpoint(path / _REST if is_folder else path, weights_only=is_safe)
        except UnpicklingError as error:
            remedy = (
                "The file is damaged, is no checkpoint, or contains Python objects. If you trust an intact file, allow "
                "its objects with fit(..., weights_only=False)."
            )
            expected = "a folder that TwinStrategy has written, or a file of Lightning with tensors and plain values"
            raise invalid_value("ckpt_path", str(path), expected, remedy) from error
        if is_folder:
            self._load_folder(path, loaded)
        return loaded

    def _load_folder(self, path: Path, loaded: dict[str, Any]) -> None:
        """Load the weights, and in `fit` also the optimizer state. Adds to `loaded` what hooks may read there."""
        module = self.lightning_module
        saved = loaded.pop(_PARTS, {"weights": ["state_dict"], "parts": [([""], _FOLDER)]})
        if self._parts and [part.folder for part in self._parts] != [folder for _, folder in saved["parts"]]:
            there = len(saved["parts"])
            remedy = "Resume with the optimizers that were saved."
            raise invalid_value("The number of optimizers in ckpt_path", there, [len(self._parts)], remedy)
        for index, (names, folder) in enumerate(saved["parts"]):
            engine = self._parts[index].engine if self._parts else None
            if engine is None:  # `fit` is not running, for example in `test`
                part = _part_of(module, names)
                engine = self._initialize(part, config={"train_batch_size": self.world_size})[0]
            found, _ = engine.load_checkpoint(path, tag=folder, load_module_only=not self._parts)
            if found is None:
                raise invalid_value("ckpt_path", str(path), "a checkpoint that TwinStrategy has written")
            if not self._parts:
                engine.destroy()
        if "others" in saved:
            module.load_state_dict(saved["others"], strict=False)
        loaded["optimizer_states"] = _LOADED
        wanted = [name for name in saved["weights"] if name != "state_dict" or self._is_read_by_hooks()]
        if wanted and not self._is_partitioned:  # copies, because a hook may load other weights into the module first
            values = {key: _copied(value) for key, value in module.state_dict().items()}
            loaded.update(dict.fromkeys(wanted, values))

    def _is_read_by_hooks(self) -> bool:
        """Whether a hook of the module or of a callback may read the state dict of a loaded checkpoint."""
        base = (pl.LightningModule.on_load_checkpoint, pl.Callback.on_load_checkpoint)  # they do nothing
        every = [self.lightning_module, *self.lightning_module.trainer.callbacks]
        return any(type(one).on_load_checkpoint not in base for one in every)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of a file. The weights of a folder are loaded already."""
        if "state_dict" not in checkpoint:
            return
        if self._parts:
            for part in self._parts:
                part.twin.flush()
        super().load_model_state_dict(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer states of a file that Lightning has written with another strategy."""
        states = checkpoint["optimizer_states"]
        if states is _LOADED:
            return
        if len(states) != len(self._parts):
            remedy = "Resume with the optimizers that were saved."
            raise invalid_value("The number of optimizers in ckpt_path", len(states), [len(self._parts)], remedy)
        for part, state in zip(self._parts, states, strict=True):
            load_torch_state(part.twin, state)


def _read(config: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """The config as a dict. Raises ValueError for keys that the Trainer sets or that do not work with Lightning."""
    if config is None:
        config = {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}
    found = dict(config) if isinstance(config, Mapping) else dict(read_source(config)[1])
    for key, remedy in _REFUSED.items():
        if key in found:
            raise incompatible(f"The config key {key}", "TwinStrategy", "Lightning runs the training loop", remedy)
    for key in _CLIPPING:
        if found.get(key) == "auto":
            del found[key]
    for key, argument in {
        "gradient_accumulation_steps": "Trainer(accumulate_grad_batches=...)",
        "train_batch_size": "the DataLoader's batch_size",
    }.items():
        if found.get(key) not in (None, "auto"):
            raise invalid_value(
                f"{key} in the config of TwinStrategy", found[key], ["auto"], f"Set {argument} instead."
            )
        found.pop(key, None)
    return found


_Wrapping = need(f"{_HOME}.core.optimizer", "lightning", "TwinStrategy").LightningOptimizer


def _inner(name: str) -> property:
    return property(lambda wrapper: getattr(wrapper.optimizer, name))


# Lightning's wrapper inherits from the class of its optimizer. Methods and properties of TwinOptimizer would thus run
# on the wrapper, which has a state of its own. Here they are those of the optimizer.
_Wrapper: Any = type(
    "LightningTwinOptimizer",
    (_Wrapping, TwinOptimizer),
    {name: _inner(name) for name in dir(TwinOptimizer) if not name.startswith("_") and not hasattr(_Wrapping, name)},
)


def _by_stage(
    config: Mapping[str, Any] | str | Path | None, stage: int | None, offload_params: bool
) -> Mapping[str, Any] | str | Path:
    """The config, or one for the ZeRO stage with all optimizer state on the host."""
    if config is not None:
        if stage is not None or offload_params:
            name = "stage" if stage is not None else "offload_params"
            remedy = f"Set zero_optimization.{'stage' if stage is not None else 'offload_param'} in the config."
            raise incompatible(f"{name} of TwinStrategy", "config", "the config has the same setting", remedy)
        return config
    section: dict[str, Any] = {"stage": stage if stage is not None else 3 if offload_params else 0}
    section["offload_optimizer"] = {"device": "cpu"}
    if offload_params:
        section["offload_param"] = {"device": "cpu"}
    return {"zero_optimization": section}


@dataclass(frozen=True)
class _Part:
    """One optimizer's engine. `module` is the LightningModule, or the part of it that the optimizer trains."""

    module: nn.Module
    folder: str  # of the engine in a checkpoint
    names: Sequence[str] = ("",)  # of the part in the LightningModule, or of its modules if it has several
    built: Engine | None = None

    @property
    def engine(self) -> Engine:
        assert self.built is not None
        return self.built

    @property
    def twin(self) -> TwinOptimizer:
        assert self.engine.optimizer is not None
        return self.engine.optimizer


def _divided(module: nn.Module, optimizers: Sequence[Optimizer]) -> list[_Part]:
    """The part of the module that each optimizer trains: all of it, or the largest submodules whose trainable
    parameters belong to this optimizer. Raises ValueError if a parameter is in no such submodule.
    """
    if len(optimizers) == 1:
        return [_Part(module, _FOLDER)]
    owner = {p: i for i, one in enumerate(optimizers) for group in one.param_groups for p in group["params"]}
    found: list[list[str]] = [[] for _ in optimizers]
    taken: list[str] = []
    for name, part in module.named_modules():  # a module comes before its submodules
        owners = {owner.get(param) for param in part.parameters() if param.requires_grad}
        if name and len(owners) == 1 and None not in owners and not any(name.startswith(f"{one}.") for one in taken):
            found[next(iter(owners))].append(name)  # type: ignore[index]
            taken.append(name)
    covered = {param for name in taken for param in module.get_submodule(name).parameters()}
    names = [name for name, param in module.named_parameters() if param in owner and param not in covered]
    if names:
        raise ValueError(
            f"{names[0]} is a parameter of a module with parameters of several optimizers, but must be in a submodule "
            "whose parameters all belong to one optimizer. Put the parameters of each optimizer into their own modules."
        )
    return [
        _Part(_part_of(module, names), f"{_FOLDER}-{i}" if i else _FOLDER, tuple(names))
        for i, names in enumerate(found)
    ]


def _part_of(module: nn.Module, names: Sequence[str]) -> nn.Module:
    parts = [module.get_submodule(name) for name in names]
    return parts[0] if len(parts) == 1 else nn.ModuleList(parts)


def _others(own: Mapping[str, Any], parts: Sequence[_Part]) -> dict[str, Any]:
    """The entries of a state dict that belong to no part."""
    prefixes = tuple(f"{name}." if name else "" for part in parts for name in part.names)
    return {name: value for name, value in own.items() if not name.startswith(prefixes)}


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def export_file(folder: str | Path, path: str | Path) -> None:
    """Convert a checkpoint folder of TwinStrategy to a file of Lightning, with which `fit(ckpt_path=...)` continues
    under any other strategy. The file has whole weights, whatever the number of ranks.
    """
    saved = torch.load(Path(folder) / _REST, weights_only=True, map_location="cpu")
    about = saved.pop(_PARTS)
    weights, states = dict(about.get("others", {})), []
    for names, tag in about["parts"]:
        found = open_checkpoint(Path(folder), tag)
        assert found is not None
        states.append(torch_state(found))
        for name, value in found.tensors("model"):
            weights[_name_in(names, name)] = value
        for alias, first in found.meta["aliases"].items():
            weights[_name_in(names, alias)] = weights[_name_in(names, first)]
    every = {**saved, **dict.fromkeys(about["weights"], weights), "optimizer_states": states}
    torch.save(every, path)


def _name_in(names: Sequence[str], name: str) -> str:
    """The name in the LightningModule of a tensor of a part."""
    if len(names) == 1:
        return f"{names[0]}.{name}" if names[0] else name
    index, _, rest = name.partition(".")
    return f"{names[int(index)]}.{rest}"
