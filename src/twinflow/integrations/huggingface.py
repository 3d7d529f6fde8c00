"""Hugging Face's Trainer with TwinOptimizer: use `TwinTrainer` instead of `Trainer`.

The Trainer builds the optimizer of its arguments as usual, with its groups, learning rate and options. A TwinOptimizer
replaces this optimizer. By default, its updates start in backward. It uses `gradient_accumulation_steps` and
`max_grad_norm` of the TrainingArguments. The accelerator's clipping returns the norm of the TwinOptimizer (norms.py).
All other parts of the Trainer are unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.optim.optimizer import Optimizer

from twinflow.conflicts import conflict
from twinflow.errors import invalid_value
from twinflow.integrations import need
from twinflow.integrations.accelerate import as_one_process, check_accelerator, connect, scaling
from twinflow.integrations.files import StreamedState
from twinflow.integrations.given import own_options, take_over
from twinflow.optim.twin import TwinOptimizer

_PACKAGES = "transformers accelerate"
need("accelerate", _PACKAGES, "twinflow.integrations.huggingface")
transformers = need("transformers", _PACKAGES, "twinflow.integrations.huggingface")
# Options of TwinOptimizer that TrainingArguments set, with their names there.
_DECLARED = {"max_grad_norm": "max_grad_norm", "accumulation_steps": "gradient_accumulation_steps"}


class TwinMixin:
    """Makes any Trainer use TwinOptimizer: `class MyTrainer(TwinMixin, SFTTrainer)`."""

    def __init__(self, *args: Any, twin: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """`args` and `kwargs` are the arguments of a Trainer. `twin`: options of TwinOptimizer such as states, ratio
        and host_threads.
        """
        self.twin: TwinOptimizer | None = None  # set when `train` starts
        if twin is not None and not isinstance(twin, Mapping):
            raise invalid_value("twin", twin, "a dict of options of TwinOptimizer", 'Example: twin={"states": "bf16"}.')
        self._twin_options = dict(twin or {})
        allowed = [name for name in own_options() if name not in (*_DECLARED, "loss_scale")]
        for name in self._twin_options:
            if name in _DECLARED:
                raise ValueError(f"twin must not have the key {name!r}. Set {_DECLARED[name]} in TrainingArguments.")
            if name not in allowed:
                remedy = "Set options of the update in TrainingArguments: optim, optim_args, learning_rate, ..."
                if name == "loss_scale":
                    remedy = "Set fp16=True in TrainingArguments."
                raise invalid_value("The name of an option in twin", name, allowed, remedy)
        super().__init__(*args, **kwargs)
        trainer: Any = self
        as_one_process(trainer.accelerator, trainer.model)  # before `evaluate`, which prepares the model too
        _check_arguments(self)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Build the Trainer's optimizer as a TwinOptimizer and prepare it for the accelerator."""
        made = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        trainer: Any = self
        twin = self.twin
        if twin is not None and getattr(made, "optimizer", made) is twin:
            twin.zero_grad()  # `train` was called before, and may have ended between two micro-batches
            return made
        if twin is not None:
            twin.close()  # it belongs to an earlier model of `model_init`
        check_accelerator(trainer.accelerator, trainer.model)
        self.twin = _adopt(made, trainer) if isinstance(made, TwinOptimizer) else _build(made, trainer)
        trainer.optimizer = connect(trainer.accelerator, self.twin, "TrainingArguments.max_grad_norm")
        return trainer.optimizer

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Writes the optimizer state to a folder of the checkpoint, without a copy in memory."""
        trainer: Any = self
        with _streaming(trainer, output_dir):
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        trainer: Any = self
        with _streaming(trainer, checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        """Waits for the last update before the best model is loaded, because the update would overwrite the loaded
        weights.
        """
        if self.twin is not None:
            self.twin.flush()
        super()._load_best_model()  # type: ignore[misc]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Run `Trainer.train`. When it returns, the weights include all updates, also a delayed one."""
        result = super().train(*args, **kwargs)  # type: ignore[misc]
        if self.twin is not None:
            self.twin.flush()
        return result


class TwinTrainer(TwinMixin, transformers.Trainer):  # type: ignore[name-defined,misc]
    """transformers.Trainer with a TwinOptimizer. `twin`: the options of the TwinOptimizer."""


@contextmanager
def _streaming(trainer: Any, folder: str | None) -> Iterator[None]:
    """Within this context the state of `trainer.optimizer` is saved to and loaded from `folder`."""
    own = trainer.optimizer
    if folder is not None and trainer.twin is not None:
        trainer.optimizer = StreamedState(trainer.twin, Path(folder))
    try:
        yield
    finally:
        trainer.optimizer = own


def _build(made: Optimizer, trainer: Any) -> TwinOptimizer:
    """A TwinOptimizer that replaces the optimizer of the arguments."""
    given = {"early": True, **trainer._twin_options, **scaling(trainer.accelerator)}
    if given["early"] or "loss_scale" in given:  # otherwise the Trainer clips gradients in `.grad`
        given["max_grad_norm"] = trainer.args.max_grad_norm or None
    if given["early"]:  # otherwise gradients accumulate in `.grad`
        given["accumulation_steps"] = trainer.args.gradient_accumulation_steps
    return take_over(made, trainer.model, **given)


def _adopt(twin: TwinOptimizer, trainer: Any) -> TwinOptimizer:
    """Check a TwinOptimizer that was given as `optimizers=`: its options must agree with the arguments."""
    if trainer._twin_options:
        raise conflict("Hugging Face and Lightning", "twin", options=trainer._twin_options)
    if twin.model is not trainer.model:
        raise ValueError(
            "The TwinOptimizer in optimizers= was built for another model. Build it with the model of the Trainer."
        )
    if twin.runtime.settings.early:
        wanted = trainer.args.max_grad_norm or None
        if twin.max_grad_norm != wanted:
            remedy = f"Build the TwinOptimizer with max_grad_norm={wanted}, or change TrainingArguments."
            raise invalid_value("TrainingArguments.max_grad_norm", wanted, [twin.max_grad_norm], remedy)
        twin.set_accumulation_steps(trainer.args.gradient_accumulation_steps)
    return twin


def _check_arguments(trainer: Any) -> None:
    """Raise ValueError for arguments with which training would fail or give wrong results."""
    args = trainer.args
    if args.n_gpu > 1:
        remedy = "Set CUDA_VISIBLE_DEVICES to one GPU. For several GPUs use twinflow.initialize()."
        raise invalid_value("The number of GPUs of this process", args.n_gpu, [1], remedy)
    if args.torch_compile:
        remedy = "Compile the blocks before training: `for layer in model.model.layers: layer.compile()`."
        raise invalid_value("TrainingArguments.torch_compile", True, [False], remedy)
    if args.fsdp or args.deepspeed:
        raise conflict("Hugging Face and Lightning", "fsdp")
