"""Fine-tuning of pretrained models with TRL, PEFT and TwinOptimizer: the parts of `twinflow finetune`.

TRL prepares the data (chat template, loss mask, packing) and computes the losses. PEFT adds adapters. The trainers here
add `TwinMixin`, measure every step, and save checkpoints and the tuned model.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from twinflow.data.chats import Examples, Row
from twinflow.errors import invalid_value
from twinflow.files import read_json, read_text
from twinflow.integrations import need
from twinflow.integrations.huggingface import TwinMixin
from twinflow.integrations.pretrained import from_pretrained
from twinflow.monitor.metrics import StepMeter, StepRecord, ValidRecord
from twinflow.monitor.timers import Clock

_EXTRA: Final = '"twinflow[finetune]"'
_NAME: Final = "twinflow finetune"
transformers = need("transformers", _EXTRA, _NAME)
datasets = need("datasets", _EXTRA, _NAME)
peft = need("peft", _EXTRA, _NAME)
trl = need("trl", _EXTRA, _NAME)
templates = need("trl.chat_template_utils", _EXTRA, _NAME)

METHODS: Final = ("sft", "lora", "qlora", "dpo")
PARTIAL: Final = ".partial"  # suffix of a folder that is being written
STATE_FILE: Final = "trainer_state.json"  # the last file of a checkpoint that the Trainer writes
SAMPLE_TOKENS, SAMPLE_S = 64, 20.0  # limits of a sample answer
NF4_BLOCK, NF4_SCALES = 64, 256  # weights that share a scale, and scales that share a second one
IGNORED: Final = -100  # label of a token that is not learned


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars and warnings of these libraries: the command has its own."""
    messages = transformers.utils.logging
    had_bars, level, hid_bars = (
        messages.is_progress_bar_enabled(),
        messages.get_verbosity(),
        datasets.are_progress_bars_disabled(),
    )
    messages.disable_progress_bar()
    messages.set_verbosity_error()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        messages.set_verbosity(level)
        if had_bars:
            messages.enable_progress_bar()
        if not hid_bars:
            datasets.enable_progress_bars()


def load_tokenizer(model: str, chat_template: str | None) -> Any:
    """The tokenizer of a model, with a token for padding. Raises a ValueError if there is none."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise _no_model(model, error) from None
    if tokenizer.eos_token is None:
        raise ValueError(f"The tokenizer of {model} has no end-of-text token. Set eos_token in tokenizer_config.json.")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template is not None:
        tokenizer.chat_template = read_text(Path(chat_template))
    return tokenizer


def load_config(model: str) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise _no_model(model, error) from None


def _no_model(model: str, error: Exception) -> ValueError:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    remedy = f"transformers reports: {first}"
    return invalid_value("MODEL", model, "the folder or the hub name of a causal language model", remedy)


def load_rows(name: str, split: str) -> list[tuple[str, Row | str]]:
    """The rows of a dataset of the hub, or of a folder that `datasets` can load."""
    try:
        found = datasets.load_dataset(name, split=split)
    except Exception as error:  # it raises errors of many packages
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        remedy = f"datasets reports: {first}"
        raise invalid_value("DATA", name, "a .jsonl or .json file, or the name of a dataset", remedy) from None
    return [(f"row {index}", dict(row)) for index, row in enumerate(found, start=1)]


class Preparation:
    """Tokenizes examples as TRL's trainers do, before a model is loaded."""

    def __init__(self, tokenizer: Any, method: str, examples: Examples) -> None:
        self._tokenizer = tokenizer
        self._is_dpo = method == "dpo"
        self._template: str | None = None  # with marks of the answers
        self._by_marks = False  # whether a chat is one example, in which the template marks the answers
        if examples.form == "messages":
            self._need_template()
            self._by_marks, self._template = _marking_template(tokenizer)
        elif examples.form != "text" and isinstance(next(iter(examples.rows[0].values())), list):
            self._need_template()

    def _need_template(self) -> None:
        if self._tokenizer.chat_template is None:
            raise ValueError(
                "The data are chats, but the tokenizer of the model has no chat template, as is usual for a model that "
                "was not tuned for chats. Give a Jinja file with --chat-template."
            )

    def rows(self, examples: Examples) -> list[Row]:
        """The rows for TRL. Where the template marks no answers, a chat becomes one row for each answer."""
        if examples.form != "messages" or self._by_marks:
            return list(examples.rows)
        made: list[Row] = []
        for row in examples.rows:
            messages = row["messages"]
            ends = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
            made += [{"prompt": messages[:end], "completion": [messages[end]]} for end in ends]
        return made

    def tokenize(self, examples: Examples) -> Any:
        """A dataset with the columns of TRL. Nothing is cut yet."""
        rows = self.rows(examples)
        try:
            return self._prepared(datasets.Dataset.from_list(rows), None, "completion" in rows[0])
        except Exception:
            self._blame(examples)
            raise

    def cut(self, data: Any, seq_length: int, packing: bool = False) -> Any:
        """Cuts examples to `seq_length` tokens, leaves out those of which nothing to learn remains, and packs several
        examples into one sequence.
        """
        if self._is_dpo:  # the collator of TRL cuts
            return data.filter(lambda row: len(row["prompt_ids"]) < seq_length)
        return self._prepared(data, seq_length, False, packing)

    def _prepared(self, data: Any, seq_length: int | None, completion_only: bool, packing: bool = False) -> Any:
        common: dict[str, Any] = {"output_dir": "unused", "report_to": [], "max_length": seq_length, "bf16": False}
        if self._is_dpo:
            config = trl.DPOConfig(**common)
            return _DPOPreparation(self._tokenizer)._prepare_dataset(data, self._tokenizer, config, "train")
        config = trl.SFTConfig(**common, assistant_only_loss=self._by_marks)
        made = _SFTPreparation(self._tokenizer, self._template, completion_only)
        found = made._prepare_dataset(data, self._tokenizer, config, packing, None, "train")
        return found.select_columns([name for name in ("input_ids", "labels", "seq_lengths") if name in found.features])

    def _blame(self, examples: Examples) -> None:
        """Raises a ValueError that names the row which the chat template refuses, if it is one."""
        for row, place in zip(examples.rows, examples.places, strict=True):
            answers = row.get("completion") or row.get("chosen")
            messages = row.get("messages") or (row["prompt"] + answers if answers else None)
            try:
                if isinstance(messages, list):
                    self._tokenizer.apply_chat_template(messages, tokenize=False)
            except Exception as error:
                raise ValueError(f"{place}: the chat template of the model refuses this chat: {error}") from None

    def show(self, examples: Examples) -> list[tuple[str, str]]:
        """The first example as the model sees it: parts of the text, each with its use."""
        first = Examples(examples.form, examples.rows[:1], examples.places[:1], "")
        row = self.tokenize(first)[0]
        decode = self._tokenizer.decode
        if self._is_dpo:
            names = {"context": "prompt_ids", "chosen": "chosen_ids", "rejected": "rejected_ids"}
            return [(use, decode(row[name])) for use, name in names.items()]
        parts: list[tuple[str, list[int]]] = []
        for token, label in zip(row["input_ids"], row["labels"], strict=True):
            use = "context" if label == IGNORED else "learned"
            if not parts or parts[-1][0] != use:
                parts.append((use, []))
            parts[-1][1].append(token)
        return [(use, decode(tokens)) for use, tokens in parts]

    def lengths(self, data: Any) -> list[int]:
        """The number of tokens of each example, prompt included. For a pair of answers, that with the longer answer."""
        if self._is_dpo:
            return [len(row["prompt_ids"]) + max(len(row["chosen_ids"]), len(row["rejected_ids"])) for row in data]
        return [len(tokens) for tokens in data["input_ids"]]

    def learned(self, data: Any) -> int:
        """The number of tokens of all examples that contribute to the loss: those of answers, not of prompts."""
        if self._is_dpo:
            return sum(len(row["chosen_ids"]) + len(row["rejected_ids"]) for row in data)
        return sum(label != IGNORED for labels in data["labels"] for label in labels)


def _marking_template(tokenizer: Any) -> tuple[bool, str | None]:
    """Whether marks in the chat template tell what is answered, and the template, if not the tokenizer's own."""
    template = None
    if not templates.has_generation_markers(tokenizer.chat_template):
        try:
            template = templates.get_training_chat_template(tokenizer)
        except ValueError:  # TRL does not know this template
            return False, None
    # Some templates leave the end of an answer out of the marks. The model would not learn to stop.
    return bool(templates.is_chat_template_stop_token_trained(tokenizer, chat_template=template)), template


class _SFTPreparation(trl.SFTTrainer):  # type: ignore[name-defined,misc]
    """TRL's preparation of data without the rest of its trainer, which needs a model."""

    def __init__(self, tokenizer: Any, chat_template: str | None, completion_only: bool) -> None:
        self._tokenizer = tokenizer
        self.chat_template = chat_template
        self.completion_only_loss = completion_only


class _DPOPreparation(trl.DPOTrainer):  # type: ignore[name-defined,misc]
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer


@dataclass(frozen=True)
class Prepared:
    """Tokenized data of a run."""

    train: Any  # datasets.Dataset
    valid: Any  # None without validation
    num_tokens: int  # of the training data
    num_learned: int  # tokens whose loss is learned
    longest: int  # tokens of the longest example, before it is cut
    num_cut: int  # examples that are longer than seq_length
    num_dropped: int  # examples of which nothing to learn is left
    seq_length: int
    shown: Sequence[tuple[str, str]]  # one example: parts of the text, each with its use: context, learned, ...


def prepare(
    preparation: Preparation,
    train: Examples,
    valid: Examples | None,
    choose_length: Callable[[int], int],
    packing: bool,
) -> Prepared:
    """Tokenizes and cuts the data. `choose_length` gets the length of the longest example and returns the length to
    which examples are cut.
    """
    tokens = preparation.tokenize(train)
    lengths = preparation.lengths(tokens)
    seq_length = choose_length(max(lengths))
    cut = preparation.cut(tokens, seq_length)
    if not len(cut):
        raise ValueError(
            f"No example has anything to learn in its first {seq_length} tokens. Use a longer --seq-length."
        )
    kept = preparation.lengths(cut)
    num_learned = preparation.learned(cut)
    held = None if valid is None else preparation.cut(preparation.tokenize(valid), seq_length)
    return Prepared(
        train=preparation.cut(tokens, seq_length, packing=True) if packing else cut,
        valid=held if held is not None and len(held) else None,
        num_tokens=sum(kept),
        num_learned=num_learned,
        longest=max(lengths),
        num_cut=sum(length > seq_length for length in lengths),
        num_dropped=len(lengths) - len(kept),
        seq_length=seq_length,
        shown=preparation.show(train),
    )


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


def load_model(model: str, dtype: torch.dtype, method: str) -> nn.Module:
    """The model in the form in which it is trained. The base of qlora has 4 bits: of bitsandbytes, whose kernels are
    fast, where it is installed beside a GPU, else of torchao.
    """
    more: dict[str, Any] = {}
    by_kernels = method == "qlora" and torch.cuda.is_available() and find_spec("bitsandbytes") is not None
    if by_kernels:
        more["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    try:
        loaded: nn.Module = from_pretrained(transformers.AutoModelForCausalLM, model, dtype=dtype, **more)
    except OSError as error:
        raise _no_model(model, error) from None
    return _quantized(loaded) if method == "qlora" and not by_kernels else loaded


def _quantized(model: nn.Module) -> nn.Module:
    """Stores the matrices of all linear layers but the head in 4 bits (NF4), frozen."""
    torchao = need("torchao.quantization", _EXTRA, _NAME)
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

    def step(self, record: StepRecord) -> None: ...

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


class DPO(TuneMixin, trl.DPOTrainer):  # type: ignore[name-defined,misc]
    """Direct preference optimization by TRL. Its constructor computes the log probabilities of the untuned model, for
    which weights on the host need their optimizer.
    """

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        if self.twin is None and self._twin_options.get("offload_params"):
            self.create_optimizer()  # TRL runs the model in its constructor, and the weights are not on the device
        return super()._precompute_ref_logps(*args, **kwargs)


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
        self._num_tokens = 0
        self._is_bad = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._listener.begin(self.trainer)
        self.trainer.take_marks()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._start_s = time.perf_counter()
        self._lr = float(self.trainer.twin.param_groups[0]["lr"])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        record = self._record(state)
        self._listener.step(record)
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
        self._num_tokens += num_tokens
        return self._meter.record(
            counts,
            wall_s,
            lambda wait_s: (max(0.0, forward_s - wait_s), backward_s),
            step=state.global_step,
            loss=loss,
            lr=self._lr,
            num_tokens=num_tokens,
            skipped=not twin.was_applied,
            tokens_total=self._num_tokens,
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
        lora = adapters(settings.rank) if settings.method in ("lora", "qlora") else None
        trainer = SFT(args=config, peft_config=lora, **given)
    trainer.remove_callback(transformers.PrinterCallback)
    callback.trainer = trainer
    return trainer


def last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint. Those without their last file, of a run that was killed while it saved, are
    removed. Damaged ones are left out.
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


def question(tokenizer: Any, row: Row) -> tuple[str, str, str]:
    """A row as a prompt for the model: the prompt as the model gets it, its last question, and the expected answer."""
    if "text" in row:
        words = row["text"].split(" ")
        start = " ".join(words[: max(1, len(words) // 2)])
        return start, start, row["text"][len(start) :]
    if "messages" in row:
        prompt, answers = row["messages"][:-1], row["messages"][-1:]
    else:
        prompt, answers = row["prompt"], row.get("completion", row.get("chosen"))
    if isinstance(prompt, str):
        return prompt, prompt, answers
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return text, prompt[-1]["content"], answers[0]["content"]


def save_tuned(trainer: Any, tokenizer: Any, folder: Path, card: str, merge: Callable[[], nn.Module] | None) -> None:
    """Writes the tuned model as a folder that `from_pretrained` loads: weights or adapters, tokenizer, chat template,
    generation config and model card. The folder appears when it is complete. `merge`: loads the base model, into which
    the adapters are merged.
    """
    partial = folder.with_name(folder.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    trainer.save_model(str(partial))
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
