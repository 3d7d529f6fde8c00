"""Lightning with TwinOptimizer: `Trainer(strategy=TwinStrategy(config=...))`.

The strategy makes an engine of the LightningModule (`twinflow.initialize`) and hands its TwinOptimizer to the Trainer,
which keeps its own loop: accumulation, schedules, callbacks, precision and logging stay Lightning's. The optimizer of
`configure_optimizers` says what to do, the config how. Clipping is done by the optimizer while gradients are on their
way, so that the precision plugin's `clip_gradients` of this Trainer only checks that it means the same.

A checkpoint is a folder: what the engine saves, one parameter at a time, and beside it what Lightning adds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

import twinflow
from twinflow.build import own_device
from twinflow.build_optimizer import TIMEOUT_S
from twinflow.config.read import read_source
from twinflow.engine import Engine
from twinflow.errors import invalid_value
from twinflow.integrations.given import follow, groups_for, rule_for, section_for
from twinflow.integrations.norms import Clipping
from twinflow.integrations.optional import need
from twinflow.optim.twin import TwinOptimizer

_IS_OLD_NAME = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
_HOME = "pytorch_lightning" if _IS_OLD_NAME else "lightning.pytorch"
pl = need(_HOME, "pytorch-lightning" if _IS_OLD_NAME else "lightning", "twinflow.integrations.lightning")
_FOLDER, _REST = "engine", "lightning.ckpt"
_OWN = ("state_dict", "optimizer_states")  # parts of a checkpoint that the engine saves
# Sections that would change what the engine's own forward does, which is not called here.
_REFUSED = {
    "torch_autocast": 'Use Trainer(precision="bf16-mixed").',
    "pipeline": "Use twinflow.initialize() and a loop of your own.",
    "tensor_parallel": "Use twinflow.initialize() and a loop of your own.",
    "wall_clock_breakdown": "Use Trainer(profiler=...).",
    "flops_profiler": "Use Trainer(profiler=...).",
    "tensorboard": "Use Trainer(logger=...).",
    "csv_monitor": "Use Trainer(logger=...).",
    "wandb": "Use Trainer(logger=...).",
    "steps_per_print": "Use Trainer(log_every_n_steps=...).",
}


_Ddp = pl.strategies.DDPStrategy


class TwinStrategy(pl.strategies.ParallelStrategy):  # type: ignore[name-defined,misc]
    """Offload, Twin-Flow and ZeRO for a LightningModule, as one config for `twinflow.initialize` says."""

    strategy_name = "twin"
    optimizers: Any
    lr_scheduler_configs: Any
    # Processes and what they tell each other are DDPStrategy's. It is none itself: then the Trainer would shuffle the
    # batches of a single process too.
    root_device, num_nodes, num_processes = _Ddp.root_device, _Ddp.num_nodes, _Ddp.num_processes
    distributed_sampler_kwargs = _Ddp.distributed_sampler_kwargs
    setup_distributed, set_world_ranks = _Ddp.setup_distributed, _Ddp.set_world_ranks
    _get_process_group_backend, determine_ddp_device_ids = (
        _Ddp._get_process_group_backend,
        _Ddp.determine_ddp_device_ids,
    )
    barrier, broadcast, reduce = _Ddp.barrier, _Ddp.broadcast, _Ddp.reduce

    def __init__(
        self,
        config: Mapping[str, Any] | str | Path | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(seconds=TIMEOUT_S),
        **kwargs: Any,
    ) -> None:
        """`config`: a dict or a JSON file in DeepSpeed's format; without one, all state is on the host.

        Batch sizes, clipping and accumulation are the Trainer's. Other arguments are ParallelStrategy's.
        """
        super().__init__(**kwargs)
        self.config = _read(config)
        self.engine: Engine | None = None  # while `fit` runs
        self._num_nodes, self._start_method = 1, "popen"
        self._process_group_backend, self._timeout = process_group_backend, timeout

    @property
    def is_distributed(self) -> bool:
        """Whether batches have to be dealt out to ranks."""
        return bool(self.num_nodes * self.num_processes > 1)

    @property
    def twin(self) -> TwinOptimizer:
        """The optimizer, while `fit` runs."""
        if self.engine is None or self.engine.optimizer is None:
            raise RuntimeError("there is an optimizer only while Trainer.fit() runs")
        return self.engine.optimizer

    # Setting up, in the order in which it happens.

    def _configure_launcher(self) -> None:
        if self.is_distributed:
            _Ddp._configure_launcher(self)

    def setup_environment(self) -> None:
        """Join the group of ranks, where there are several."""
        super().setup_environment()
        if self.is_distributed:
            self.setup_distributed()

    def model_to_device(self) -> None:
        """For fitting `initialize` does it, in the precision that the config says."""
        if not self._is_fitting:
            super().model_to_device()

    @property
    def _is_fitting(self) -> bool:
        return str(getattr(self.lightning_module.trainer.state.fn, "value", "")) == "fit"

    def setup_optimizers(self, trainer: Any) -> None:
        """The engine, with the optimizer that `configure_optimizers` or the config asks for."""
        if own_device().type != self.root_device.type:
            raise invalid_value("Trainer(accelerator=)", self.root_device.type, [own_device().type])
        if getattr(self.precision_plugin, "scaler", None) is not None:
            remedy = 'Use "bf16-true" or "bf16-mixed", or fp16 in the config of TwinStrategy.'
            raise invalid_value("Trainer(precision=)", self.precision_plugin.precision, "one without a scaler", remedy)
        _refuse_averages(trainer.callbacks)
        config, groups, given = self._configured(trainer), None, None
        if "optimizer" in config:
            _refuse_second(self.lightning_module)
        else:
            super().setup_optimizers(trainer)
            given = _only(self.optimizers)
            name = rule_for(given)
            if name is not None:
                config["optimizer"], groups = section_for(given, name), groups_for(given)
        kept = None if groups is not None else given
        engine, twin, _, scheduler = self._initialize(optimizer=kept, model_parameters=groups, config=config)
        assert twin is not None
        engine.leave_plain_backwards()  # `backward` here scales losses
        self.engine = engine
        if given is not None:
            follow(given, twin)
        if scheduler is not None:
            self._add_scheduler(scheduler)
        self.optimizers = [twin]
        self._take_clipping(twin)

    def _initialize(self, **kwargs: Any) -> Any:
        """An engine among the ranks that Lightning has started, of which it says half in the environment."""
        said = {"RANK": self.global_rank, "LOCAL_RANK": self.local_rank, "WORLD_SIZE": self.world_size}
        said |= {"LOCAL_WORLD_SIZE": self.num_processes}
        missing = {key: str(value) for key, value in said.items() if key not in os.environ}
        os.environ.update(missing)
        try:
            return twinflow.initialize(model=self.lightning_module, dist_init_required=False, **kwargs)
        finally:
            for key in missing:
                del os.environ[key]

    def _configured(self, trainer: Any) -> dict[str, Any]:
        """The config, with what the Trainer says in it."""
        config = dict(self.config)
        if trainer.gradient_clip_val and str(getattr(trainer.gradient_clip_algorithm, "value", "norm")) != "norm":
            raise invalid_value("Trainer(gradient_clip_algorithm=)", trainer.gradient_clip_algorithm, ["norm"])
        config["gradient_clipping"] = float(trainer.gradient_clip_val or 0.0)
        config["gradient_accumulation_steps"] = trainer.accumulate_grad_batches
        return {"train_micro_batch_size_per_gpu": 1, **config}  # batches are the Trainer's

    def _add_scheduler(self, scheduler: Any) -> None:
        """The config's schedule, which moves with every step; the Trainer moves and saves it."""
        if self.lr_scheduler_configs:
            raise invalid_value("scheduler", "in the config and in configure_optimizers()", "one of them")
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
        """Through the module's own call, so that it counts as its forward."""
        with self.precision_plugin.train_step_context():
            return self._run("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The same."""
        with self.precision_plugin.val_step_context():
            return self._run("validation_step", *args, **kwargs)

    def _run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        if self.engine is not None and self.engine.watch is not None:  # other ranks know that this one goes on
            self.engine.watch.beat(module.trainer.global_step + 1, name)
        return self._forward_redirection(module, module, name, *args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """With the loss scale, where the config has one."""
        twin, wanted = self.twin, self.lightning_module.trainer.accumulate_grad_batches
        if twin.accumulation_steps != wanted:  # a callback has changed it
            twin.set_accumulation_steps(wanted)
        scale = twin.loss_scale
        loss: Tensor = super().backward(
            closure_loss * scale if scale != 1.0 else closure_loss, optimizer, *args, **kwargs
        )
        return loss

    def teardown(self) -> None:
        """Give threads and memory back; the module keeps its weights."""
        self.precision_plugin.__dict__.pop("clip_gradients", None)
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.destroy()
        super().teardown()

    # Checkpoints.

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """The engine loads its part, so it must be there."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """The engine loads it."""
        return False

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing here: the engine saves it without a copy."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """A folder; with the weights alone, a file as Lightning writes it."""
        if "optimizer_states" not in checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if self.engine is None:
            raise RuntimeError(
                "Trainer.save_checkpoint() after fit(), when the optimizer's state has been given back. Save during "
                "fit() (ModelCheckpoint), or the weights alone: save_checkpoint(path, weights_only=True)"
            )
        self.engine.count_from(checkpoint["global_step"])
        self.engine.save_checkpoint(filepath, tag=_FOLDER)
        rest = {key: value for key, value in checkpoint.items() if key not in _OWN}
        super().save_checkpoint(rest, Path(filepath) / _REST, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """A folder that this strategy wrote, or a file that has weights alone."""
        path = Path(checkpoint_path)
        if not path.is_dir():
            return self._load_file(path, weights_only)
        engine = self.engine
        if engine is None:  # testing
            engine = self._initialize(config={"train_batch_size": self.world_size})[0]
        found, _ = engine.load_checkpoint(path, tag=_FOLDER, load_module_only=self.engine is None)
        if found is None:
            raise invalid_value("ckpt_path", str(path), "a checkpoint that TwinStrategy wrote")
        if self.engine is None:
            engine.destroy()
        # What Lightning adds is pickled: no code of it is run, unless the user says so.
        is_safe = True if weights_only is None else weights_only
        loaded: dict[str, Any] = super().load_checkpoint(path / _REST, weights_only=is_safe)
        return loaded

    def _load_file(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        loaded: dict[str, Any] = super().load_checkpoint(
            path, weights_only=True if weights_only is None else weights_only
        )
        if self._is_fitting:
            remedy = "Take its weights with LightningModule.load_from_checkpoint(), and fit without ckpt_path."
            raise invalid_value("ckpt_path", str(path), "a folder that TwinStrategy wrote", remedy)
        return loaded

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Weights of a file; those of a folder are there already."""
        if "state_dict" in checkpoint:
            super().load_model_state_dict(checkpoint, strict=strict)


def _read(config: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """The config as a dict, without what is the Trainer's business."""
    if config is None:
        config = {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}
    found = dict(config) if isinstance(config, Mapping) else dict(read_source(config)[1])
    for key, remedy in _REFUSED.items():
        if key in found:
            raise invalid_value(f"{key} with TwinStrategy", found[key], "nothing", remedy)
    for key, argument in {
        "gradient_clipping": "Trainer(gradient_clip_val=...)",
        "gradient_accumulation_steps": "Trainer(accumulate_grad_batches=...)",
        "train_batch_size": "the DataLoader's batch_size",
    }.items():
        if found.get(key) not in (None, "auto"):
            raise invalid_value(f"{key} with TwinStrategy", found[key], ["auto"], f"Leave it out, and set {argument}.")
        found.pop(key, None)
    return found


def _refuse_averages(callbacks: list[Any]) -> None:
    """They read weights after every step, when updates are on their way, and keep them in the checkpoint's file."""
    for name in ("WeightAveraging", "StochasticWeightAveraging"):
        kind = getattr(pl.callbacks, name, None)
        if kind is not None and any(isinstance(callback, kind) for callback in callbacks):
            remedy = "Average in a callback of your own, after trainer.strategy.twin.wait()."
            raise invalid_value("Trainer(callbacks=)", name, "others with TwinStrategy", remedy)


def _only(optimizers: list[Any]) -> Optimizer:
    found = [one for one in optimizers if one.param_groups]  # Lightning has one without parameters for None
    if len(found) != 1:
        remedy = "Return one there, or name one in the config of TwinStrategy."
        raise invalid_value("optimizers of configure_optimizers()", len(found), [1], remedy)
    return found[0]  # type: ignore[no-any-return]


def _refuse_second(module: Any) -> None:
    if module.configure_optimizers() is not None:
        remedy = "Let configure_optimizers() return None, or leave it out of the config."
        raise invalid_value("optimizer", "in the config and in configure_optimizers()", "one of them", remedy)
