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
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

import twinflow
from twinflow.build import own_device
from twinflow.build_optimizer import TIMEOUT_S, follow
from twinflow.config.load import read_source
from twinflow.conflicts import conflict
from twinflow.engine import Engine
from twinflow.errors import incompatible, invalid_value, wrong_state
from twinflow.integrations import need
from twinflow.integrations.given import groups_for, rule_for, section_for
from twinflow.integrations.norms import Clipping
from twinflow.optim.twin import TwinOptimizer
from twinflow.optim.twin_checks import check_loss

_IS_OLD_NAME = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
_HOME = "pytorch_lightning" if _IS_OLD_NAME else "lightning.pytorch"
pl = need(_HOME, "pytorch-lightning" if _IS_OLD_NAME else "lightning", "twinflow.integrations.lightning")
_FOLDER, _REST = "engine", "lightning.ckpt"
_OWN = ("state_dict", "optimizer_states")  # parts of a checkpoint that the engine saves
# Sections for the engine's own forward, which Lightning does not call, and what to use instead.
_REFUSED = {
    "torch_autocast": 'Use Trainer(precision="bf16-mixed").',
    "pipeline": "Use twinflow.initialize() and your own loop.",
    "tensor_parallel": "Use twinflow.initialize() and your own loop.",
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
    lightning_restore_optimizer = False  # the engine loads the optimizer state
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
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(seconds=TIMEOUT_S),
        **kwargs: Any,
    ) -> None:
        """`config`: a dict or a JSON file in DeepSpeed's format. Without it, all optimizer state is on the host.

        Batch sizes, clipping and accumulation are arguments of the Trainer. `kwargs` are passed to ParallelStrategy.
        """
        super().__init__(**kwargs)
        self.config = _read(config)
        self.engine: Engine | None = None  # only while `fit` runs
        self._num_nodes, self._start_method = 1, "popen"
        self._process_group_backend, self._timeout = process_group_backend, timeout

    @property
    def is_distributed(self) -> bool:
        """Whether there are several ranks, which need different batches."""
        return bool(self.num_nodes * self.num_processes > 1)

    @property
    def twin(self) -> TwinOptimizer:
        """The optimizer. Raises RuntimeError if `fit` is not running."""
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
        if not self._is_fitting:
            super().model_to_device()

    @property
    def _is_fitting(self) -> bool:
        return str(getattr(self.lightning_module.trainer.state.fn, "value", "")) == "fit"

    def setup_optimizers(self, trainer: Any) -> None:
        """Build the engine with the optimizer of `configure_optimizers` or of the config."""
        if own_device().type != self.root_device.type:
            remedy = "Leave it out: twinflow trains on the GPU if this machine has one, and otherwise on the CPU."
            raise invalid_value("Trainer(accelerator=)", self.root_device.type, [own_device().type], remedy)
        if getattr(self.precision_plugin, "scaler", None) is not None:
            precision, expected = self.precision_plugin.precision, "a precision without a gradient scaler"
            remedy = 'Use "bf16-true" or "bf16-mixed", or fp16 in the config of TwinStrategy.'
            raise invalid_value("Trainer(precision=)", precision, expected, remedy)
        for averaging in ("WeightAveraging", "StochasticWeightAveraging"):
            # They read weights while updates are running, and save them in the checkpoint file.
            kind = getattr(pl.callbacks, averaging, None)
            if kind is not None and any(isinstance(callback, kind) for callback in trainer.callbacks):
                raise conflict("Hugging Face and Lightning", "average", callback=averaging)
        config, groups, given = self._configured(trainer), None, None
        if "optimizer" in config:
            if self.lightning_module.configure_optimizers() is not None:
                raise conflict("Hugging Face and Lightning", "optimizer")
        else:
            super().setup_optimizers(trainer)
            given = _only(self.optimizers)
            name = rule_for(given)
            if name is not None:
                config["optimizer"], groups = section_for(given, name), groups_for(given)
        own = given if groups is None else None
        engine, twin, _, scheduler = self._initialize(optimizer=own, model_parameters=groups, config=config)
        assert twin is not None
        engine.leave_plain_backwards()  # the method `backward` of this class scales the loss
        self.engine = engine
        if given is not None:
            follow(given, twin)
        if scheduler is not None:
            self._add_scheduler(scheduler)
        self.optimizers = [twin]
        self._take_clipping(twin)

    def _initialize(self, **kwargs: Any) -> Any:
        """Build an engine. Lightning sets only some of the environment variables that describe the ranks."""
        ranks = {"RANK": self.global_rank, "LOCAL_RANK": self.local_rank, "WORLD_SIZE": self.world_size}
        ranks |= {"LOCAL_WORLD_SIZE": self.num_processes}
        missing = {key: str(value) for key, value in ranks.items() if key not in os.environ}
        os.environ.update(missing)
        try:
            return twinflow.initialize(model=self.lightning_module, dist_init_required=False, **kwargs)
        finally:
            for key in missing:
                del os.environ[key]

    def _configured(self, trainer: Any) -> dict[str, Any]:
        """The config with the Trainer's settings for clipping and accumulation."""
        config = dict(self.config)
        algorithm = str(getattr(trainer.gradient_clip_algorithm, "value", "norm"))
        if trainer.gradient_clip_val and algorithm != "norm":
            remedy = 'Use Trainer(gradient_clip_algorithm="norm").'
            raise invalid_value("gradient_clip_algorithm of the Trainer", algorithm, ["norm"], remedy)
        config["gradient_clipping"] = float(trainer.gradient_clip_val or 0.0)
        config["gradient_accumulation_steps"] = trainer.accumulate_grad_batches
        return {"train_micro_batch_size_per_gpu": 1, **config}  # the Trainer determines the batches

    def _add_scheduler(self, scheduler: Any) -> None:
        """Give the scheduler of the config to the Trainer, which advances it in every step and saves it."""
        if self.lr_scheduler_configs:
            raise conflict("Hugging Face and Lightning", "scheduler")
        assert self.engine is not None
        self.engine.release_scheduler()
        kind = need(f"{_HOME}.utilities.types", "lightning", "TwinStrategy").LRSchedulerConfig
        self.lr_scheduler_configs = [kind(scheduler, interval="step")]

    def _take_clipping(self, twin: TwinOptimizer) -> None:
        clipping = Clipping(twin, "gradient_clip_val")

        def clip_gradients(optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
            if str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)) != "norm":
                raise invalid_value("gradient_clip_algorithm", str(gradient_clip_algorithm), ["norm"])
            if clip_val > 0:
                clipping.clip(clip_val)

        self.precision_plugin.clip_gradients = clip_gradients

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
            twin.set_accumulation_steps(wanted)
        check_loss(closure_loss)
        scale = twin.loss_scale
        loss: Tensor = super().backward(
            closure_loss * scale if scale != 1.0 else closure_loss, optimizer, *args, **kwargs
        )
        return loss

    def teardown(self) -> None:
        """Release threads and memory. The module keeps its weights."""
        self.precision_plugin.__dict__.pop("clip_gradients", None)
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.destroy()
        super().teardown()

    # Checkpoints.

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An empty dict, because the engine saves the optimizer state without a copy."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder, or Lightning's file for weights only. After `fit`, a folder raises RuntimeError."""
        if "optimizer_states" not in checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if self.engine is None:
            raise wrong_state(
                "Trainer.save_checkpoint() cannot save the optimizer state",
                "fit() has ended and the memory of the optimizer is released",
                "Save during fit() (ModelCheckpoint), or save only weights: save_checkpoint(path, weights_only=True).",
            )
        self.engine.count_from(checkpoint["global_step"])
        self.engine.save_checkpoint(filepath, tag=_FOLDER)
        rest = {key: value for key, value in checkpoint.items() if key not in _OWN}
        super().save_checkpoint(rest, Path(filepath) / _REST, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder that this strategy has written, or, outside of `fit`, a file of Lightning."""
        path = Path(checkpoint_path)
        is_folder = path.is_dir()
        if is_folder:
            self._load_folder(path)
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
        if self._is_fitting and not is_folder:
            remedy = "Load its weights with LightningModule.load_from_checkpoint(), and call fit() without ckpt_path."
            raise invalid_value("ckpt_path", str(path), "a folder that TwinStrategy has written", remedy)
        return loaded

    def _load_folder(self, path: Path) -> None:
        engine = self.engine
        if engine is None:  # `fit` is not running, for example in `test`
            engine = self._initialize(config={"train_batch_size": self.world_size})[0]
        found, _ = engine.load_checkpoint(path, tag=_FOLDER, load_module_only=self.engine is None)
        if found is None:
            raise invalid_value("ckpt_path", str(path), "a checkpoint that TwinStrategy has written")
        if self.engine is None:
            engine.destroy()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of a file. The weights of a folder are loaded already."""
        if "state_dict" in checkpoint:
            super().load_model_state_dict(checkpoint, strict=strict)


def _read(config: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """The config as a dict. Raises ValueError for keys that the Trainer sets or that do not work with Lightning."""
    if config is None:
        config = {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}
    found = dict(config) if isinstance(config, Mapping) else dict(read_source(config)[1])
    for key, remedy in _REFUSED.items():
        if key in found:
            raise incompatible(f"The config key {key}", "TwinStrategy", "Lightning runs the training loop", remedy)
    for key, argument in {
        "gradient_clipping": "Trainer(gradient_clip_val=...)",
        "gradient_accumulation_steps": "Trainer(accumulate_grad_batches=...)",
        "train_batch_size": "the DataLoader's batch_size",
    }.items():
        if found.get(key) not in (None, "auto"):
            raise invalid_value(
                f"{key} in the config of TwinStrategy", found[key], ["auto"], f"Set {argument} instead."
            )
        found.pop(key, None)
    return found


def _only(optimizers: list[Any]) -> Optimizer:
    found = [one for one in optimizers if one.param_groups]  # for None, Lightning makes an optimizer without parameters
    if len(found) != 1:
        remedy = "Return one optimizer there, or set one in the config of TwinStrategy."
        raise invalid_value("The number of optimizers from configure_optimizers()", len(found), [1], remedy)
    return found[0]  # type: ignore[no-any-return]
