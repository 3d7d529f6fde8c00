# SPDX-License-Identifier: Apache-2.0
"""The trainers of `twinflow finetune`. TRL computes the losses and PEFT adds adapters. The classes here add
`TwinMixin`, measure every step, and save checkpoints and the tuned model. `finetune_data.py` prepares the data.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from twinflow.files import read_json
from twinflow.integrations import need
from twinflow.integrations.dpo import TwinDPOTrainer
from twinflow.integrations.finetune_data import EXTRA, IGNORED, NAME, Prepared, no_model
from twinflow.integrations.huggingface import TwinMixin
from twinflow.integrations.pretrained import from_pretrained
from twinflow.monitor.metrics import StepMeter, StepRecord, ValidRecord
from twinflow.monitor.timers import Clock

transformers = need("transformers", EXTRA, NAME)
peft = need("peft", EXTRA, NAME)
trl = need("trl", EXTRA, NAME)

METHODS: Final = ("sft", "lora", "qlora", "dpo")
PARTIAL: Final = ".partial"  # suffix of a folder that is being written
STATE_FILE: Final = "trainer_state.json"  # the last file of a checkpoint that the Trainer writes
SAMPLE_TOKENS, SAMPLE_S = 64, 20.0  # limits of a sample answer
NF4_BLOCK, NF4_SCALES = 64, 256  # weights that share a scale, and scales that share a second one


@dataclass(frozen=True)
class TuneSettings:
    """What the trainer needs to know of a run."""

    method: str
    steps: int
    batch_size: int
    accumulation: int
    lr: float
    weight_decay: float
    grad_clip: float
    seed: int
    seq_length: int
    packing: bool
    checkpoint_activations: bool
    compile: bool
    keep_last: int
    rank: int  # of LoRA matrices
    beta: float  # of DPO
    out: Path


def has_bitsandbytes() -> bool:
    """Whether bitsandbytes can be used. Its kernels for weights in 4 bits are fast, and need the weights on the GPU."""
    return torch.cuda.is_available() and find_spec("bitsandbytes") is not None


def load_model(model: str, dtype: torch.dtype, method: str, offload_params: bool = False) -> nn.Module:
    """The model in the form in which it is trained. The base of qlora has 4 bits: of bitsandbytes where it is installed
    beside a GPU and the weights are on the GPU, else of torchao.
    """
    more: dict[str, Any] = {}
    by_bitsandbytes = method == "qlora" and has_bitsandbytes() and not offload_params
    if by_bitsandbytes:
        more["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    try:
        loaded: nn.Module = from_pretrained(transformers.AutoModelForCausalLM, model, dtype=dtype, **more)
    except OSError as error:
        raise no_model(model, error) from None
    return _quantized(loaded) if method == "qlora" and not by_bitsandbytes else loaded


def load_whole(model: str, dtype: torch.dtype) -> nn.Module:
    """The model in memory, without communication between ranks."""
    loaded: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    return loaded


def _quantized(model: nn.Module) -> nn.Module:
    """Stores the matrices of all linear layers but the head in 4 bits (NF4), frozen."""
    torchao = need("torchao.quantization", EXTRA, NAME)
    head = model.get_output_embeddings()  # type: ignore[operator]
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not head:
            weight = module.weight.detach()
            num_blocks = weight.numel() // NF4_BLOCK
            # Scales of blocks are stored in groups, which must divide their number.
            compact = torchao.NF4Tensor.from_tensor(weight, NF4_BLOCK, math.gcd(num_blocks, NF4_SCALES))
            module.weight = nn.Parameter(compact, requires_grad=False)
    return model


def adapters(rank: int) -> Any:
    """LoRA on all linear layers but the head."""
    return peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


class Listener(Protocol):
    """What happens outside of the trainer: output, files, and the wish to stop."""

    def begin(self, trainer: Any) -> None:
        """The optimizer exists and no step has run in this process."""

    def exchange(self, loss: float, num_tokens: int) -> None:
        """Tells the other ranks this rank's loss and tokens of a step. All ranks call this before `step`."""

    def step(self, record: StepRecord) -> StepRecord:
        """Gets the record of this rank and returns that of all ranks."""
        ...

    def valid(self, record: ValidRecord) -> None: ...

    def saved(self, path: Path, seconds: float) -> None: ...

    def should_stop(self) -> bool:
        """Whether to save and stop after this step."""
        ...


@dataclass
class Marks:
    """Measurements of the micro-batches of a step."""

    losses: list[Tensor] = field(default_factory=list)
    num_tokens: list[Tensor] = field(default_factory=list)
    times: list[tuple[Any, Any, Any]] = field(default_factory=list)  # start, end of forward, end of backward
    middle: Any = None  # end of the last forward


class TuneMixin(TwinMixin):
    """A trainer that measures its steps. `schedule`: the share of the peak learning rate at a step counted from 0."""

    def __init__(self, *args: Any, device: torch.device, schedule: Callable[[int], float], **kwargs: Any) -> None:
        self.marks = Marks()
        self.clock = Clock(device)
        self._schedule = schedule
        super().__init__(*args, **kwargs)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        trainer: Any = self
        if trainer.lr_scheduler is None:
            trainer.lr_scheduler = LambdaLR(trainer.optimizer if optimizer is None else optimizer, self._schedule)
        return trainer.lr_scheduler

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        found = super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
        self.marks.middle = self.clock.now()
        return found

    def _get_train_sampler(self, *_: Any, **__: Any) -> list[int]:
        """The rows of all steps: every row once in a random order, then every row again in another order, and so on.

        Every step is full. It has the same rows however ranks and micro-batches divide it, and a rank never has fewer
        of them than the others. With an epoch of the Trainer, the last step of an epoch would have fewer rows, or on
        several ranks rows that are repeated.
        """
        trainer: Any = self
        args, num_rows = trainer.args, len(trainer.train_dataset)
        num_wanted = args.max_steps * args.gradient_accumulation_steps * args.train_batch_size * args.world_size
        generator = torch.Generator().manual_seed(args.seed)
        passes = [torch.randperm(num_rows, generator=generator) for _ in range(-(-num_wanted // num_rows))]
        return torch.cat(passes)[:num_wanted].tolist()

    def num_counted(self, inputs: Any) -> int:
        """The number of terms of which the loss of a batch is the mean."""
        raise NotImplementedError

    @torch.no_grad()
    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """The mean loss of the validation data, over its learned tokens or pairs of answers.

        The Trainer takes the mean of the losses of batches, which depends on how the rows are divided. Here it does
        not. All ranks compute equally many batches, because a forward may gather weights.
        """
        trainer: Any = self
        args, data = trainer.args, trainer.eval_dataset
        was_training = trainer.model.training
        trainer.model.eval()
        total = count = 0.0
        for first in range(0, len(data), args.eval_batch_size * args.world_size):
            own = range(first + args.process_index, len(data), args.world_size)[: args.eval_batch_size]
            inputs = trainer._prepare_inputs(trainer.data_collator([data[row] for row in own or (0,)]))
            weight = self.num_counted(inputs) if own else 0  # 0: other ranks have rows, and this rank has none
            total += weight * float(trainer.compute_loss(trainer.model, inputs))
            count += weight
        trainer.model.train(was_training)
        team = None if self.twin is None else self.twin.team
        sums = torch.tensor([total, count], dtype=torch.float64)
        if team is not None and team.world > 1:
            sums = team.calls.gather_rows(sums).sum(dim=0)
        found = {"eval_loss": float(sums[0] / sums[1])}
        trainer.control = trainer.callback_handler.on_evaluate(args, trainer.state, trainer.control, found)
        return found

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)  # type: ignore[misc]
        # The next file is the mark of a complete checkpoint, so the files of all ranks come first.
        cast(Any, self).accelerator.wait_for_everyone()

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        start = self.clock.now()
        mask, tokens = inputs.get("attention_mask"), inputs["input_ids"]
        loss = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        self.marks.times.append((start, self.marks.middle, self.clock.now()))
        self.marks.losses.append(loss.detach())
        self.marks.num_tokens.append(torch.tensor(tokens.numel()) if mask is None else mask.sum())
        return loss

    def take_marks(self) -> Marks:
        taken, self.marks = self.marks, Marks()
        return taken

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the card of the tuned model is written at the end, by `save_tuned`."""


class SFT(TuneMixin, trl.SFTTrainer):  # type: ignore[name-defined,misc]
    """Supervised fine-tuning by TRL, on data that `Preparation` has tokenized, with `TuneMixin`'s measurements."""

    def num_counted(self, inputs: Any) -> int:
        return int((inputs["labels"][..., 1:] != IGNORED).sum())  # nothing predicts the first token


class DPO(TuneMixin, TwinDPOTrainer):
    """Direct preference optimization by TRL, with `TuneMixin`'s measurements."""

    def num_counted(self, inputs: Any) -> int:
        return len(inputs["input_ids"]) // 2  # both answers of a pair are rows of the batch


class Steps(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
    """Measures steps, and decides when to validate, to save and to stop."""

    def __init__(self, listener: Listener, valid_every: int, save_every: int, device: torch.device) -> None:
        self.trainer: Any = None
        self._listener = listener
        self._valid_every = valid_every
        self._save_every = save_every
        self._meter = StepMeter(device)
        self._start_s = 0.0
        self._save_start_s = 0.0
        self._lr = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._listener.begin(self.trainer)
        self.trainer.take_marks()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._start_s = time.perf_counter()
        self._lr = float(self.trainer.twin.param_groups[0]["lr"])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        record = self._listener.step(self._record(state))
        # A loss or gradient that is not finite ends the run without a checkpoint: --resume needs a good one.
        is_bad = not math.isfinite(record.loss) or record.skipped
        is_last = state.global_step >= state.max_steps
        stops = is_bad or self._listener.should_stop()
        control.should_evaluate = not is_bad and (
            is_last or (self._valid_every > 0 and state.global_step % self._valid_every == 0)
        )
        control.should_evaluate &= self.trainer.eval_dataset is not None
        due = self._save_every > 0 and state.global_step % self._save_every == 0
        control.should_save = not is_bad and (is_last or stops or due)
        control.should_training_stop |= stops
        if is_last or stops:
            self.trainer.twin.flush()  # validation and checkpoint have the last delayed update
        self._save_start_s = time.perf_counter()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        self._listener.valid(ValidRecord(state.global_step, metrics["eval_loss"]))
        self._save_start_s = time.perf_counter()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        path = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self._listener.saved(path, time.perf_counter() - self._save_start_s)

    def _record(self, state: Any) -> StepRecord:
        marks, twin = self.trainer.take_marks(), self.trainer.twin
        counts = twin.metrics()  # waits for the gradient norm, so the device has finished backward
        loss = float(torch.stack(marks.losses).sum())
        wall_s = time.perf_counter() - self._start_s
        clock = self.trainer.clock
        forward_s = sum(clock.seconds(start, middle) for start, middle, _ in marks.times)
        backward_s = sum(clock.seconds(middle, end) for _, middle, end in marks.times)
        num_tokens = int(sum(int(number) for number in marks.num_tokens))
        self._listener.exchange(loss, num_tokens)
        return self._meter.record(
            counts,
            wall_s,
            lambda wait_s: (max(0.0, forward_s - wait_s), backward_s),
            step=state.global_step,
            loss=loss,
            lr=self._lr,
            num_tokens=num_tokens,
            skipped=not twin.was_applied,
            host_share=twin.host_share,
        )


def make_trainer(
    settings: TuneSettings,
    model: nn.Module,
    tokenizer: Any,
    data: Prepared,
    twin: dict[str, Any],
    callback: Steps,
    schedule: Callable[[int], float],
    device: torch.device,
) -> Any:
    """The trainer of the method. Its first `train()` builds the TwinOptimizer."""
    common: dict[str, Any] = {
        "output_dir": str(settings.out),
        "max_steps": settings.steps,
        "per_device_train_batch_size": settings.batch_size,
        "per_device_eval_batch_size": settings.batch_size,
        "gradient_accumulation_steps": settings.accumulation,
        "learning_rate": settings.lr,
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.grad_clip,
        "gradient_checkpointing": settings.checkpoint_activations,
        "torch_compile": settings.compile,
        "seed": settings.seed,
        "bf16": False,  # the weights have their dtype; no autocast
        "max_length": settings.seq_length,
        "eval_strategy": "no",  # `Steps` decides
        "save_strategy": "no",
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,
        "save_total_limit": settings.keep_last,
        "report_to": [],
        "log_level_replica": "error",  # as `quiet` for the first rank
        "disable_tqdm": True,
        "dataloader_pin_memory": device.type == "cuda",
        "use_cpu": device.type == "cpu",
    }
    given: dict[str, Any] = {
        "model": model,
        "train_dataset": data.train,
        "eval_dataset": data.valid,
        "processing_class": tokenizer,
        "callbacks": [callback],
        "twin": twin,
        "schedule": schedule,
        "device": device,
    }
    if settings.method == "dpo":
        # The log probabilities of the untuned model are computed once, so that no copy of it is kept.
        config = trl.DPOConfig(**common, beta=settings.beta, precompute_ref_log_probs=True)
        trainer: Any = DPO(args=config, **given)
    else:
        # The data is prepared. A second preparation would pack the packed sequences, without the bounds of examples.
        is_prepared = {"skip_prepare_dataset": True}
        config = trl.SFTConfig(**common, packing=settings.packing, dataset_kwargs=is_prepared)
        if settings.method in ("lora", "qlora"):
            transformers.set_seed(settings.seed)  # the trainer sets it too late for the adapters
            # In the dtype of the base: fp32 adapters would cast all their inputs, and TwinOptimizer has fp32 masters.
            given["model"] = peft.get_peft_model(model, adapters(settings.rank), autocast_adapter_dtype=False)
        trainer = SFT(args=config, **given)
    trainer.remove_callback(transformers.PrinterCallback)
    callback.trainer = trainer
    return trainer


def last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint. Those without their last file, of a run that was killed while it saved, are
    removed. Damaged ones are left out. Of several ranks, one calls this.
    """
    found: dict[int, Path] = {}
    for path in folder.glob("checkpoint-*"):
        step = _step_of(path)
        if step is not None:
            found[step] = path
        elif not (path / STATE_FILE).exists():  # the process ended while it was being written
            shutil.rmtree(path)
    return found[max(found)] if found else None


def _step_of(checkpoint: Path) -> int | None:
    """The step of a complete checkpoint, else None."""
    try:
        return int(read_json(checkpoint / STATE_FILE)["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


@torch.no_grad()
def answer(model: Any, tokenizer: Any, prompt: str) -> str:
    """The model's answer to a prompt, the most probable token at each place, until it ends or a limit is reached."""
    tokens = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).to(model.device)
    was_training = model.training
    model.eval()
    given = {"max_new_tokens": SAMPLE_TOKENS, "max_time": SAMPLE_S, "do_sample": False}
    # Not compiled, because layers would be compiled again for each length of the text.
    with torch.compiler.set_stance("force_eager"):
        written = model.generate(**tokens, **given, pad_token_id=tokenizer.pad_token_id)[0]
    model.train(was_training)
    text: str = tokenizer.decode(written[tokens["input_ids"].shape[1] :], skip_special_tokens=True)
    return text.strip()


def save_tuned(trainer: Any, tokenizer: Any, folder: Path, card: str, merge: Callable[[], nn.Module] | None) -> None:
    """Writes the tuned model as a folder that `from_pretrained` loads: weights or adapters, tokenizer, chat template,
    generation config and model card. The folder appears when it is complete. `merge`: loads the base model, into which
    the adapters are merged. All ranks must call this function, and rank 0 writes.
    """
    partial = folder.with_name(folder.name + PARTIAL)
    if trainer.is_world_process_zero():
        shutil.rmtree(partial, ignore_errors=True)
    trainer.save_model(str(partial))
    if not trainer.is_world_process_zero():
        return
    if merge is not None:
        merged = peft.PeftModel.from_pretrained(merge(), str(partial)).merge_and_unload()
        shutil.rmtree(partial)
        merged.save_pretrained(str(partial))
    tokenizer.save_pretrained(str(partial))
    trainer.model.generation_config.save_pretrained(str(partial))
    (partial / "training_args.bin").unlink(missing_ok=True)  # a pickle, with paths of this machine
    (partial / "README.md").write_text(card, encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
