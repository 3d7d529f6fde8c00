"""Hugging Face's Trainer with TwinOptimizer: `TwinTrainer` in the place of `Trainer`.

The Trainer builds the optimizer that its arguments name, as ever: its groups, learning rate and options. A
TwinOptimizer takes its place, with updates that start in backward. `gradient_accumulation_steps` and `max_grad_norm`
are declared to it, and the accelerator's clipping answers with its norm (norms.py). Everything else is the Trainer's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.optim.optimizer import Optimizer

from twinflow.errors import invalid_value
from twinflow.integrations.accelerate import check_accelerator, connect
from twinflow.integrations.files import StreamedState
from twinflow.integrations.given import own_options, take_over
from twinflow.integrations.optional import need
from twinflow.optim.twin import TwinOptimizer

_PACKAGES = "transformers accelerate"
need("accelerate", _PACKAGES, "twinflow.integrations.huggingface")
transformers = need("transformers", _PACKAGES, "twinflow.integrations.huggingface")
# What TrainingArguments say, under TwinOptimizer's names.
_DECLARED = {"max_grad_norm": "max_grad_norm", "accumulation_steps": "gradient_accumulation_steps"}


class TwinMixin:
    """What makes a Trainer use TwinOptimizer: `class MyTrainer(TwinMixin, SFTTrainer)`."""

    def __init__(self, *args: Any, twin: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """A Trainer's arguments, and options of TwinOptimizer in `twin`: states, ratio, host_threads, ..."""
        self.twin: TwinOptimizer | None = None  # once `train` has begun
        self._twin_options = dict(twin or {})
        for name, argument in _DECLARED.items():
            if name in self._twin_options:
                remedy = f"Set {argument} in TrainingArguments."
                raise invalid_value(f"twin[{name!r}]", self._twin_options[name], "nothing", remedy)
        _check_options(self._twin_options)
        super().__init__(*args, **kwargs)
        _check_arguments(self)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer that the Trainer would have made, as a TwinOptimizer, prepared for its accelerator."""
        made = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        trainer: Any = self
        twin = self.twin
        if twin is not None and getattr(made, "optimizer", made) is twin:
            twin.zero_grad()  # `train` is called again, maybe after one that ended between two micro-batches
            return made
        if twin is not None:
            twin.close()  # of a model that `model_init` has made before
        check_accelerator(trainer.accelerator)
        self.twin = _adopt(made, trainer) if isinstance(made, TwinOptimizer) else _build(made, trainer)
        trainer.optimizer = connect(trainer.accelerator, self.twin, "TrainingArguments.max_grad_norm")
        return trainer.optimizer

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """The state goes into a folder of the checkpoint, without a copy in memory."""
        trainer: Any = self
        with _streaming(trainer, output_dir):
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """And comes from there."""
        trainer: Any = self
        with _streaming(trainer, checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        """After the last update, which must not come over it."""
        if self.twin is not None:
            self.twin.flush()
        super()._load_best_model()  # type: ignore[misc]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As of a Trainer; the weights are complete when it returns, a delayed update included."""
        result = super().train(*args, **kwargs)  # type: ignore[misc]
        if self.twin is not None:
            self.twin.flush()
        return result


class TwinTrainer(TwinMixin, transformers.Trainer):  # type: ignore[name-defined,misc]
    """transformers.Trainer, whose optimizer is a TwinOptimizer with the options in `twin`."""


@contextmanager
def _streaming(trainer: Any, folder: str | None) -> Iterator[None]:
    """Let whoever asks `trainer.optimizer` for its state get one that lies in `folder`."""
    own = trainer.optimizer
    if folder is not None and trainer.twin is not None:
        trainer.optimizer = StreamedState(trainer.twin, Path(folder))
    try:
        yield
    finally:
        trainer.optimizer = own


def _build(made: Optimizer, trainer: Any) -> TwinOptimizer:
    """The arguments' optimizer, on the host."""
    given = {"early": True, **trainer._twin_options}
    if given["early"]:  # else gradients add up in `.grad`, where the Trainer clips them
        given["max_grad_norm"] = trainer.args.max_grad_norm or None
        given["accumulation_steps"] = trainer.args.gradient_accumulation_steps
    return take_over(made, trainer.model, **given)


def _adopt(twin: TwinOptimizer, trainer: Any) -> TwinOptimizer:
    """One that was given as `optimizers=`: it must mean what the arguments say."""
    if trainer._twin_options:
        raise invalid_value("twin", trainer._twin_options, "nothing beside a TwinOptimizer given in optimizers=")
    if twin.model is not trainer.model:
        raise invalid_value("optimizers[0].model", "another module", "the Trainer's model")
    if twin.runtime.settings.early:
        wanted = trainer.args.max_grad_norm or None
        if twin.max_grad_norm != wanted:
            remedy = "Build the TwinOptimizer with this max_grad_norm."
            raise invalid_value("TrainingArguments.max_grad_norm", wanted, [twin.max_grad_norm], remedy)
        twin.set_accumulation_steps(trainer.args.gradient_accumulation_steps)
    return twin


def _check_options(given: Mapping[str, Any]) -> None:
    """What the arguments do not say, and a Trainer's loop does not need to know of."""
    allowed = [name for name in own_options() if name not in (*_DECLARED, "loss_scale")]
    for name in given:
        if name == "loss_scale":
            raise invalid_value("option in twin", name, allowed, "The Trainer does not scale its loss: train in bf16.")
        if name not in allowed:
            remedy = "Options of the update are TrainingArguments: optim, learning_rate, weight_decay, optim_args, ..."
            raise invalid_value("option in twin", name, allowed, remedy)


def _check_arguments(trainer: Any) -> None:
    """Refuse what would train wrongly, or not at all."""
    args = trainer.args
    if args.n_gpu > 1:
        remedy = "Set CUDA_VISIBLE_DEVICES to one GPU; for several see twinflow.initialize()."
        raise invalid_value("GPUs of this process", args.n_gpu, [1], remedy)
    if args.torch_compile:
        remedy = "Compile blocks instead, before: `for layer in model.model.layers: layer.compile()`."
        raise invalid_value("TrainingArguments.torch_compile", True, [False], remedy)
    if args.fsdp or args.deepspeed:
        remedy = "TwinTrainer is for one process and one GPU."
        raise invalid_value("TrainingArguments.fsdp or deepspeed", "given", "nothing", remedy)
