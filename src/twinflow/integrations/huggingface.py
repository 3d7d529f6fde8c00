# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer with TwinOptimizer: use `TwinTrainer` instead of `Trainer`.

The Trainer builds the optimizer of its arguments as usual, with its groups, learning rate and options. A TwinOptimizer
replaces this optimizer. By default, its updates start in backward. It uses `gradient_accumulation_steps` and
`max_grad_norm` of the TrainingArguments. The accelerator's clipping returns the norm of the TwinOptimizer (norms.py).
All other parts of the Trainer are unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from torch.optim.optimizer import Optimizer

from twinflow.conflicts import conflict, refuse
from twinflow.errors import invalid_value
from twinflow.integrations import need
from twinflow.integrations.accelerate import check_accelerator, connect, keep_even, keep_plain, scaling
from twinflow.integrations.chunked_loss import run_fused_head
from twinflow.integrations.files import StreamedState
from twinflow.integrations.given import own_options, take_over
from twinflow.integrations.pretrained import saved_weights
from twinflow.integrations.ranks import (
    EXPERTS,
    DividedModel,
    check_equal,
    check_experts,
    check_given,
    divide_experts,
    divided,
    join_ranks,
    make_zero,
    replace_params,
    start_ranks,
)
from twinflow.optim.twin import TwinOptimizer
from twinflow.speedups import compile_blocks, has_compiled_blocks
from twinflow.zero import Zero

_PACKAGES = "transformers accelerate"
need("accelerate", _PACKAGES, "twinflow.integrations.huggingface")
transformers = need("transformers", _PACKAGES, "twinflow.integrations.huggingface")
_MODES = (None, "default", "max-autotune-no-cudagraphs")  # of torch.compile
# Options of TwinOptimizer that TrainingArguments set, with their names there.
_DECLARED = {"max_grad_norm": "max_grad_norm", "accumulation_steps": "gradient_accumulation_steps"}


class TwinMixin:
    """Makes any Trainer use TwinOptimizer: `class MyTrainer(TwinMixin, SFTTrainer)`."""

    def __init__(self, *args: Any, twin: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """`args` and `kwargs` are the arguments of a Trainer. `twin`: options of TwinOptimizer such as states, ratio
        and host_threads, and `expert_parallel_size`, the number of processes that have all experts together.
        """
        self.twin: TwinOptimizer | None = None  # set when `train` starts
        if twin is not None and not isinstance(twin, Mapping):
            raise invalid_value("twin", twin, "a dict of options of TwinOptimizer", 'Example: twin={"states": "bf16"}.')
        self._twin_options = dict(twin or {})
        allowed = [*(name for name in own_options() if name not in (*_DECLARED, "loss_scale")), EXPERTS]
        for name in self._twin_options:
            if name in _DECLARED:
                raise ValueError(f"twin must not have the key {name!r}. Set {_DECLARED[name]} in TrainingArguments.")
            if name not in allowed:
                remedy = "Set options of the update in TrainingArguments: optim, optim_args, learning_rate, ..."
                if name == "loss_scale":
                    remedy = "Set fp16=True in TrainingArguments."
                raise invalid_value("The name of an option in twin", name, allowed, remedy)
        join_ranks(kwargs.get("args", args[1] if len(args) > 1 else None))
        self._divided: DividedModel | None = None  # the model, if ranks have parts of its weights
        self._gathered: dict[str, Tensor] | None = None  # the whole weights while a file is written
        super().__init__(*args, **kwargs)  # a trainer may build its optimizer here
        trainer: Any = self
        _check_arguments(self)
        check_accelerator(trainer.accelerator)
        if trainer.accelerator.num_processes > 1:
            keep_even(trainer.accelerator)
        zero = make_zero(self._twin_options, trainer.accelerator.num_processes)  # an invalid value raises here
        size = check_experts(self._twin_options, trainer.accelerator.num_processes)
        is_compiled = size > 1 and trainer.args.torch_compile
        refuse(
            "Expert parallelism",
            {"stage": size > 1 and zero is not None and zero.stage == 3, "compiled": is_compiled},
        )

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Leaves a model whose weights belong on the host there. The GPU may be too small for all of it, and the
        TwinOptimizer moves the rest.
        """
        if self.twin is None and self._twin_options.get("offload_params"):
            return
        super()._move_model_to_device(model, device)  # type: ignore[misc]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        trainer: Any = self
        if self.twin is None and trainer.place_model_on_device:  # an evaluation before training needs all of the model
            super()._move_model_to_device(trainer.model, trainer.args.device)  # type: ignore[misc]
        return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Build the Trainer's optimizer as a TwinOptimizer and prepare it for the accelerator."""
        trainer: Any = self
        accelerator, twin = trainer.accelerator, self.twin
        given = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        if twin is not None and given is twin:
            twin.zero_grad()  # `train` was called before, and may have ended between two micro-batches
            return super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        if twin is not None:
            twin.close()  # it belongs to an earlier model of `model_init`
        check_accelerator(accelerator)
        keep_plain(accelerator, trainer.model)
        zero = make_zero(self._twin_options, accelerator.num_processes)
        if not isinstance(given, TwinOptimizer):
            replaced = start_ranks(trainer.model, zero, _settings(trainer, zero))
            if given is not None:
                replace_params(given, replaced)
            size = check_experts(self._twin_options, accelerator.num_processes)
            divide_experts(trainer.model, size, zero, trainer.args.device, given)
        made = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        self.twin = _adopt(made, trainer) if isinstance(made, TwinOptimizer) else _build(made, trainer, zero)
        if self.twin.tuning.offload_embeddings:
            run_fused_head(trainer.model)
        self._divided = divided(self.twin)
        if self._divided is not None and trainer.args.save_on_each_node:
            raise conflict("Hugging Face and Lightning", "save_on_each_node", option="TrainingArguments")
        _compile(trainer)
        trainer.optimizer = connect(accelerator, self.twin, "TrainingArguments.max_grad_norm")
        return trainer.optimizer

    def _wrap_model(self, model: Any, training: bool = True, *args: Any, **kwargs: Any) -> Any:
        """`Trainer._wrap_model`, which the Trainer calls after `create_optimizer`. A subclass may have its own
        `create_optimizer` that does not call this class: its optimizer is replaced here.
        """
        trainer: Any = self
        given = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        if training and given is not None and given is not self.twin:
            TwinMixin.create_optimizer(self)
        return super()._wrap_model(model, training, *args, **kwargs)  # type: ignore[misc]

    def _has_mixed_mesh_grads(self, model: Any) -> bool:
        """False: TwinOptimizer computes the norm. The Trainer would read gradients that were moved to the host."""
        return False

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The batches of one step. Raises RuntimeError if ranks have different numbers of them: forward and backward
        of a rank without a batch would be missing in the communication of the others.
        """
        found = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        twin, trainer = self.twin, cast(Any, self)
        if twin is None:
            return found
        if twin.team is not None and twin.team.world > 1:
            check_equal(twin.team.calls, "The number of batches of a step", len(found[0]))
        if not twin.runtime.has_gradients:
            # The Trainer makes no step after a stream that ends between two micro-batches. It adds these gradients to
            # those of the next step, which then has more backwards.
            num_asked = kwargs["num_batches"] if "num_batches" in kwargs else args[1]
            num_kept = len(found[0]) if len(found[0]) < num_asked else 0
            num_backwards = trainer.args.gradient_accumulation_steps + num_kept
            if twin.accumulation_steps != num_backwards:
                twin.set_accumulation_steps(num_backwards)
        return found

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """`Trainer.save_model`. With ZeRO stage 3 or expert ranks, all ranks must call it, and rank 0 writes the whole
        weights.
        """
        if self._divided is not None:
            self._gathered = self._divided.gather("save_model()")
        try:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        finally:
            self._gathered = None

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict if state_dict is not None else self._gathered)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Writes the optimizer state to a folder of the checkpoint, without a copy in memory."""
        trainer: Any = self
        with _streaming(trainer, output_dir) as state:
            if state is not None:
                state.write()
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        trainer: Any = self
        with _streaming(trainer, checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        given = {**dict(zip(("resume_from_checkpoint", "model"), args, strict=False)), **kwargs}
        model = given.get("model")
        with self._loading(given["resume_from_checkpoint"], model) as is_loaded:
            if not is_loaded:
                super()._load_from_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        trainer: Any = self
        with self._loading(trainer.state.best_model_checkpoint) as is_loaded:
            if not is_loaded:
                super()._load_best_model()  # type: ignore[misc]

    @contextmanager
    def _loading(self, folder: str | None, model: Any = None) -> Iterator[bool]:
        """Within this context the model can load whole weights. Yields whether it has loaded those of the folder, which
        the Trainer cannot if a model of transformers has other names there, as experts have.

        Waits for the last update before, because the update would overwrite the loaded weights.
        """
        if self.twin is not None:
            self.twin.flush()
        model = cast(Any, self).model if model is None else model
        with self._divided.loading() if self._divided is not None else nullcontext():
            weights = saved_weights(model, folder) if folder is not None else None
            if weights is not None:
                model.load_state_dict(weights)
            yield weights is not None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Run `Trainer.train`. When it returns, the weights include all updates, also a delayed one."""
        result = super().train(*args, **kwargs)  # type: ignore[misc]
        if self.twin is not None:
            self.twin.flush()
        return result


class TwinTrainer(TwinMixin, transformers.Trainer):  # type: ignore[name-defined,misc]
    """transformers.Trainer with a TwinOptimizer. `twin`: the options of the TwinOptimizer."""


@contextmanager
def _streaming(trainer: Any, folder: str | None) -> Iterator[StreamedState | None]:
    """Within this context the state of `trainer.optimizer` is saved to and loaded from `folder`."""
    own, state = trainer.optimizer, None
    if folder is not None and trainer.twin is not None:
        state = trainer.optimizer = StreamedState(trainer.twin, Path(folder))
    try:
        yield state
    finally:
        trainer.optimizer = own


def _settings(trainer: Any, zero: Zero | None) -> dict[str, object]:
    """The settings that must be equal on all ranks."""
    names = ("optim", "learning_rate", "weight_decay", "max_steps", "num_train_epochs", "seed", *_DECLARED.values())
    own = {f"twin[{name!r}]": value for name, value in trainer._twin_options.items() if name != "zero"}
    return {**{name: getattr(trainer.args, name) for name in names}, **own, "zero": zero}


def _build(made: Optimizer, trainer: Any, zero: Zero | None) -> TwinOptimizer:
    """A TwinOptimizer that replaces the optimizer of the arguments."""
    options = {name: value for name, value in trainer._twin_options.items() if name != EXPERTS}
    given = {"early": True, **options, **scaling(trainer.accelerator), "zero": zero}
    # Otherwise gradients accumulate in `.grad`, and the Trainer clips them. With several ranks it cannot do this,
    # because `.grad` is not the average over ranks, and with fp16 `.grad` is multiplied by the loss scale.
    if given["early"] or trainer.accelerator.num_processes > 1 or "loss_scale" in given:
        given["max_grad_norm"] = trainer.args.max_grad_norm or None
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
    check_given(twin, trainer.accelerator.num_processes)
    if twin.runtime.settings.early or twin.team is not None:
        wanted = trainer.args.max_grad_norm or None
        if twin.max_grad_norm != wanted:
            remedy = f"Build the TwinOptimizer with max_grad_norm={wanted}, or change TrainingArguments."
            raise invalid_value("TrainingArguments.max_grad_norm", wanted, [twin.max_grad_norm], remedy)
        twin.set_accumulation_steps(trainer.args.gradient_accumulation_steps)
    return twin


def _compile(trainer: Any) -> None:
    """Compiles the blocks, as `torch_compile` asks. The Trainer would compile the model as a whole, whose gradients
    arrive at the end of backward.
    """
    args = trainer.args
    if args.torch_compile and not has_compiled_blocks(trainer.model):
        mode = {} if args.torch_compile_mode is None else {"mode": args.torch_compile_mode}
        compile_blocks(trainer.model, args.device, args.torch_compile_backend, mode)


def _check_arguments(trainer: Any) -> None:
    """Raise ValueError for arguments with which training would fail or give wrong results."""
    args = trainer.args
    if args.n_gpu > 1:
        remedy = "Start one process for each GPU, for example with torchrun, or set CUDA_VISIBLE_DEVICES to one GPU."
        raise invalid_value("The number of GPUs of this process", args.n_gpu, [1], remedy)
    if args.torch_compile and args.torch_compile_mode not in _MODES:
        # A replayed CUDA graph would overwrite gradients that TwinOptimizer has not read yet.
        remedy = "The other modes of torch.compile use CUDA graphs."
        raise invalid_value("TrainingArguments.torch_compile_mode", args.torch_compile_mode, _MODES, remedy)
    if args.fsdp or args.deepspeed:
        raise conflict("Hugging Face and Lightning", "fsdp")
    if args.auto_find_batch_size and args.world_size > 1:
        raise conflict("Hugging Face and Lightning", "auto_find_batch_size")
