# SPDX-License-Identifier: Apache-2.0
"""`twinflow finetune`: tunes a pretrained model of Hugging Face on chats, instructions, pairs of answers or texts.

The data is checked before anything is loaded. The planner then chooses batch, state format and place of the weights for
this machine (finetune_fit.py), and the command reports the choice and one example with its loss mask.
`integrations/finetune.py` and `finetune_data.py` have the parts that need transformers, TRL and PEFT. They are imported
when the data has passed the checks.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import typer
from rich.console import Console

from twinflow.cli.finetune_fit import Choice, choose
from twinflow.cli.finetune_settings import (
    ADAPTERS,
    MAX_LENGTH,
    MAX_VALID,
    MIN_ROWS,
    SETTINGS,
    VALID_SHARE,
    FinetuneOptions,
    FinetuneSettings,
    as_json,
    make_settings,
)
from twinflow.cli.plan_input import resolve_hub
from twinflow.cli.ranks import ONE_SIGNAL_S, USER_ERRORS, Ranks, SharedError, join
from twinflow.cli.run import DTYPES, METRICS, REPORT, Outcome, avoid_fragments, cap_gpu, stop_signals
from twinflow.cli.settings import lr_factor, option_name
from twinflow.cli.train import EXIT_CODES, failed, final_numbers, machine_rows, print_rows, printable, where
from twinflow.cli.training import Talk
from twinflow.data.chats import Examples, check_rows, read_examples
from twinflow.data.files import missing_path
from twinflow.errors import invalid_value, unusable_path
from twinflow.files import read_json, write_whole
from twinflow.integrations.ranks import watch_ranks
from twinflow.monitor.metrics import MetricsWriter, StepRecord, ValidRecord, read_metrics
from twinflow.monitor.progress import TrainProgress, duration
from twinflow.monitor.report import Report, write_report
from twinflow.native import set_threads
from twinflow.native.cgroup import limit_host_bytes
from twinflow.offload.settings import Tuning
from twinflow.version import __version__

CHECKPOINTS, TUNED, SAMPLES = "checkpoints", "model", "samples.json"
NUM_LINES: Final = 24  # lines of the example that are shown
METHOD_NAMES: Final = {
    "sft": "sft, all parameters",
    "lora": "lora, adapters",
    "qlora": "qlora, adapters on a base in 4 bits",
    "dpo": "dpo, all parameters",
}


def finetune(options: FinetuneOptions) -> None:
    """Tune a pretrained model on your data: a folder or hub name of a model, and a JSONL file of chats, instructions,
    prompts with answers, pairs of answers, or texts.

    Example: twinflow finetune Qwen/Qwen2.5-1.5B-Instruct chats.jsonl --out runs/first

    If the command is started with `twinflow launch --module twinflow finetune`, torchrun or srun, all ranks tune one
    model together.
    """
    console, ranks = Console(), Ranks()
    try:
        ranks = join()
        console = ranks.console(console)
        with ranks.together():
            settings, saved = make_settings(options, ranks.world, ranks.here.local_world_size)
        settings = replace(settings, out=Path(ranks.first(str(settings.out))), threads=ranks.least(settings.threads))
        with ranks.together():
            checked = check_files(settings)
            avoid_fragments()
            if settings.ram is not None:
                limit_host_bytes(settings.ram)
            quiet = _load_libraries(settings)
        with quiet():
            run = prepare(settings, saved, checked, ranks, console)
            outcome = None if settings.dry_run else run_tuning(run, console)
    except (*USER_ERRORS, ImportError, RuntimeError) as raised:
        raise failed(raised, ranks, (*USER_ERRORS, ImportError)) from None
    if outcome is None:
        ranks.leave(is_failure=False)
        return
    if ranks.is_first:
        show(run, outcome, console)
    ranks.leave(is_failure=outcome.status == "stopped")
    raise typer.Exit(1 if outcome.status == "stopped" else EXIT_CODES[outcome.status])


def check_files(settings: FinetuneSettings) -> dict[str, Examples]:
    """The examples of the files that DATA and --valid-data name, with every row checked. This comes first, because it
    needs no other package.
    """
    if (settings.out / METRICS).exists() and not settings.resume:
        remedy = "Choose another folder, remove this folder, or continue the earlier run with --resume."
        raise invalid_value("--out", str(settings.out), "a folder without an earlier run", remedy)
    # No name of the hub: without this, the hub would be asked for it, for a minute where there is no network.
    if not Path(settings.model).exists() and (settings.model[0] in "./~" or settings.model.count("/") > 1):
        raise missing_path("MODEL", Path(settings.model), "the folder or the hub name of a causal language model")
    named = [name for name in (settings.data, settings.valid_data) if name is not None and _is_file(name)]
    checked = {name: read_examples(Path(name), as_chat=True) for name in named}
    if settings.data in checked:
        _check_form(settings.method, checked[settings.data].form)
    return checked


def _load_libraries(settings: FinetuneSettings) -> Callable[[], AbstractContextManager[None]]:
    """Imports the libraries, and returns a context without their progress bars and warnings. Without a network to the
    hub, they use only their local cache.
    """
    if not all(Path(name).exists() for name in (settings.model, settings.data)):
        try:
            resolve_hub()
        except OSError:
            os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when they are imported
    # They report, on import or in every run, what a user of this command cannot change.
    for name in ("torchao", "torch.utils._pytree", "trl", "accelerate", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from twinflow.integrations.finetune_data import quiet

    return quiet


@dataclass(frozen=True)
class TuneRun:
    """A run that is ready to start or to be resumed."""

    settings: FinetuneSettings  # with all values that were chosen
    ranks: Ranks
    choice: Choice
    tokenizer: Any
    data: Any  # Prepared of integrations/finetune_data.py
    questions: list[tuple[str, str, str]]  # of the sample answers: prompt, question, expected answer
    header: list[tuple[str, str]]
    checkpoint: Path | None  # from which the run is resumed


def prepare(
    settings: FinetuneSettings, saved: dict[str, Any], checked: dict[str, Examples], ranks: Ranks, console: Console
) -> TuneRun:
    """Tokenize the data, choose settings for the machine, and report all of it. Of the model, only the tokenizer and
    the config are loaded. `checked`: examples by the name of their file. Every rank prepares all of the data, and
    trains on a part of it. The first rank chooses the settings.
    """
    from twinflow.integrations import finetune_data as tuning
    from twinflow.integrations.finetune import last_checkpoint

    # In turns, because some of it may be downloaded.
    tokenizer, config, examples, given = ranks.in_turns(lambda: _read(settings, checked))
    for rank, fingerprint in enumerate(prints := ranks.gather(examples.fingerprint)):
        if fingerprint != prints[0]:
            raise SharedError(
                f"DATA of rank {rank} differs from that of rank 0: the checksums are {fingerprint} and {prints[0]}. "
                "Put the same data on all machines."
            )
    with ranks.together():
        _check_form(settings.method, examples.form)
        _check_data(examples.fingerprint, saved)
        train, valid = _split(examples, given, settings.seed)
        limit = _max_positions(config)
        preparation = tuning.Preparation(tokenizer, settings.method, examples)
        data = tuning.prepare(
            preparation, train, valid, lambda longest: _seq_length(settings, longest, limit), settings.packing
        )
    choice = _chosen(settings, config.to_dict(), data, ranks)
    with ranks.together():
        settings = _filled(settings, choice, data)
        folder = settings.out / CHECKPOINTS
        checkpoint = last_checkpoint(folder) if settings.resume and ranks.is_first else None
    found = ranks.first(None if checkpoint is None else str(checkpoint))
    shown = (valid or train).rows[: settings.num_samples]
    run = TuneRun(
        settings=settings,
        ranks=ranks,
        choice=choice,
        tokenizer=tokenizer,
        data=data,
        questions=[tuning.question(tokenizer, row) for row in shown],
        header=_header(settings, config, choice, data, examples, valid),
        checkpoint=None if found is None else Path(found),
    )
    title = f"twinflow {__version__}: tuning {settings.model} on {where()}"
    print_rows(console, title, run.header)
    print_example(console, data.shown, train.places[0])
    for note in choice.notes:
        console.print(f"Note: {note}", highlight=False, markup=False, soft_wrap=True)
    with ranks.together():
        if not settings.dry_run and ranks.is_first:
            _write_settings(settings, examples.fingerprint)
    return run


def _read(settings: FinetuneSettings, checked: dict[str, Examples]) -> tuple[Any, Any, Examples, Examples | None]:
    """Tokenizer and config of the model, the data, and that of --valid-data."""
    from twinflow.integrations import finetune_data as tuning

    tokenizer = tuning.load_tokenizer(settings.model, settings.chat_template)
    as_chat = settings.template if settings.template is not None else tokenizer.chat_template is not None

    def read(name: str) -> Examples:
        if name in checked:
            return checked[name] if as_chat else read_examples(Path(name), as_chat=False)
        return check_rows(tuning.load_rows(name, settings.split), name, as_chat)

    valid = None if settings.valid_data is None else read(settings.valid_data)
    return tokenizer, tuning.load_config(settings.model), read(settings.data), valid


def _chosen(settings: FinetuneSettings, config: dict[str, Any], data: Any, ranks: Ranks) -> Choice:
    """The choice of the first rank for all ranks."""
    gpu_bytes = ranks.least(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() and ranks.world > 1 else None
    num_machines = -(-ranks.world // ranks.here.local_world_size)
    choice = None
    with ranks.together():
        if ranks.is_first:
            choice = choose(settings, config, data.seq_length, len(data.train), gpu_bytes, num_machines)
    values = ranks.first(None if choice is None else asdict(choice))
    return Choice(**{**values, "rows": [(name, text) for name, text in values["rows"]]})


def _is_file(name: str) -> bool:
    """Whether DATA names a file, also one that is missing, rather than a dataset of the hub."""
    return Path(name).is_file() or Path(name).suffix.lower() in (
        ".jsonl",
        ".ndjson",
        ".json",
        ".txt",
        ".csv",
        ".parquet",
    )


def _check_form(method: str, form: str) -> None:
    if method == "dpo" and form != "preference":
        remedy = "Each row needs the fields prompt, chosen and rejected. For this data use --method sft, lora or qlora."
        raise invalid_value("The form of DATA", form, "'preference' for --method dpo", remedy)
    if method != "dpo" and form == "preference":
        remedy = "Use --method dpo, or data with one answer to each prompt."
        raise invalid_value("The form of DATA", form, f"one with single answers for --method {method}", remedy)


def _check_data(fingerprint: str, saved: dict[str, Any]) -> None:
    if saved.get("fingerprint", fingerprint) != fingerprint:
        raise ValueError(
            f"DATA has changed since the run began: its fingerprint (a checksum) is {fingerprint}, but must be "
            f"{saved['fingerprint']}. Restore the data, or start a new run in another --out."
        )


def _split(examples: Examples, valid: Examples | None, seed: int) -> tuple[Examples, Examples | None]:
    """Training and validation data. Without data for validation, some rows are held out."""
    if valid is not None:
        if valid.form != examples.form:
            raise invalid_value("The form of --valid-data", valid.form, [examples.form])
        return examples, valid
    num_rows = len(examples.rows)
    if num_rows < MIN_ROWS:
        return examples, None
    held = set(random.Random(seed).sample(range(num_rows), min(MAX_VALID, max(1, round(VALID_SHARE * num_rows)))))

    def part(is_held: bool) -> Examples:
        kept = [index for index in range(num_rows) if (index in held) is is_held]
        rows, places = [examples.rows[i] for i in kept], [examples.places[i] for i in kept]
        return Examples(examples.form, rows, places, examples.fingerprint)

    return part(False), part(True)


def _max_positions(config: Any) -> int | None:
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(found) if found else None


def _seq_length(settings: FinetuneSettings, longest: int, limit: int | None) -> int:
    if settings.seq_length is None:
        return min(longest, MAX_LENGTH, limit or MAX_LENGTH)
    if limit is not None and settings.seq_length > limit:
        raise invalid_value("--seq-length", settings.seq_length, f"at most {limit}, the context of the model")
    return settings.seq_length


def _filled(settings: FinetuneSettings, choice: Choice, data: Any) -> FinetuneSettings:
    """The settings with the values that data and machine have decided."""
    sequences = choice.batch_size * choice.accumulation * settings.world
    steps = settings.steps or max(1, math.ceil(settings.epochs * len(data.train) / sequences))
    warmup = steps // 20 if settings.warmup is None else settings.warmup
    if warmup > steps:
        remedy = "Use a shorter --warmup, or more --steps."
        raise invalid_value("--warmup", warmup, f"at most {steps}, the number of steps", remedy)
    return replace(
        settings,
        steps=steps,
        warmup=warmup,
        batch_size=choice.batch_size,
        accumulation=choice.accumulation,
        seq_length=data.seq_length,
        grad_clip=choice.grad_clip,
        states=choice.states,
        ratio=choice.ratio,
        offload_params=choice.offload_params,
        offload_embeddings=choice.offload_embeddings,
        checkpoint_activations=choice.checkpointing,
    )


def _write_settings(settings: FinetuneSettings, fingerprint: str) -> None:
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unusable_path("--out", settings.out, "a folder that can be created", error) from None
    write_whole(settings.out / SETTINGS, json.dumps(as_json(settings) | {"fingerprint": fingerprint}, indent=2) + "\n")


def _header(
    settings: FinetuneSettings, config: Any, choice: Choice, data: Any, examples: Examples, valid: Examples | None
) -> list[tuple[str, str]]:
    kinds = {
        "messages": "chats",
        "prompt": "prompts with answers",
        "instruction": "instructions with answers",
        "preference": "pairs of answers",
        "text": "texts",
    }
    held = f", {len(valid.rows):,} for validation" if valid is not None else ", none for validation"
    packed = f", packed into {len(data.train):,} sequences" if settings.packing else ""
    sequences = choice.batch_size * choice.accumulation * settings.world
    assert settings.steps is not None
    epochs = settings.steps * sequences / len(data.train)
    adapted = f", rank {settings.rank}" if settings.method in ADAPTERS else ""
    clip = f"clip {choice.grad_clip:g}" if choice.grad_clip else "no clipping"
    rows = [
        ("model", f"{config.model_type}, {settings.precision} weights"),
        ("method", f"{METHOD_NAMES[settings.method]}{adapted}, lr {settings.lr:g}, {clip}"),
        ("data", f"{settings.data}: {len(examples.rows):,} {kinds[examples.form]} (form {examples.form!r}){held}"),
        ("tokens", f"{data.num_tokens:,}, {data.num_learned:,} of them learned{packed}"),
        *choice.rows,
        ("steps", f"{settings.steps:,} of {sequences} sequences, {epochs:.3g} epochs, warmup {settings.warmup}"),
        ("output", str(settings.out)),
    ]
    if data.num_cut or data.num_dropped:
        lost = f"; {data.num_dropped:,} of them have nothing left to learn and are left out" if data.num_dropped else ""
        text = f"{data.num_cut:,} examples are longer than {data.seq_length} tokens and are cut{lost}"
        rows.insert(4, ("warning", f"{text} (the longest has {data.longest:,}: see --seq-length)"))
    return rows


def print_example(console: Console, parts: Sequence[tuple[str, str]], place: str) -> None:
    """One example as the model sees it. A column says which part is context and which is learned."""
    lines = [f"Example ({place}): what the model gets (context) and what it learns"]
    for use, text in parts:
        if text.strip():  # a line break alone is not shown
            shown = text.rstrip("\n").split("\n")
            names = [use, *[""] * (len(shown) - 1)]
            lines += [f"  {name:<8} | {printable(line).strip()}" for name, line in zip(names, shown, strict=True)]
    if len(lines) > NUM_LINES:
        half = NUM_LINES // 2
        lines = [*lines[:half], f"  ... {len(lines) - 2 * half} more lines", *lines[-half:]]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


class Watcher:
    """The listener of the trainer: prints progress, writes metrics, and takes the samples before training. Each rank
    has one. `metrics`: None on all ranks but the first, which has the records of all.
    """

    def __init__(
        self, run: TuneRun, outcome: Outcome, progress: TrainProgress, metrics: MetricsWriter | None, talk: Talk
    ):
        self._run = run
        self._outcome = outcome
        self._progress = progress
        self._metrics = metrics
        self._talk = talk
        self.before: list[str] = []  # sample answers

    def begin(self, trainer: Any) -> None:
        from twinflow.integrations.finetune import answer

        samples, is_first = self._run.settings.out / SAMPLES, self._run.ranks.is_first
        if self._run.checkpoint is not None:
            self.before = read_json(samples) if is_first and samples.exists() else []
            return
        # All ranks answer: a forward may gather weights.
        self.before = [answer(trainer.model, self._run.tokenizer, prompt) for prompt, _, _ in self._run.questions]
        if is_first:
            write_whole(samples, json.dumps(self.before) + "\n")
        if trainer.eval_dataset is not None:
            trainer.evaluate()

    def exchange(self, loss: float, num_tokens: int) -> None:
        self._talk.after_step(loss, num_tokens)

    def step(self, record: StepRecord) -> StepRecord:
        record, steps = self._talk.of_all(record), self._outcome.steps
        before = steps[-1].tokens_total if steps else 0  # also of the run that is resumed
        record = replace(record, tokens_total=before + record.num_tokens)
        if self._metrics is not None:
            self._metrics.write(record)
        self._progress.step(record)
        steps.append(record)
        return record

    def valid(self, record: ValidRecord) -> None:
        if self._metrics is not None:
            self._metrics.write(record)
        self._outcome.valids.append(record)
        self._progress.note(f"Validation loss after {record.step} steps: {record.loss:.4f}")

    def saved(self, path: Path, seconds: float) -> None:
        self._progress.note(f"Checkpoint: {path} ({duration(seconds)})")

    def should_stop(self) -> bool:
        return self._talk.should_stop()


def run_tuning(run: TuneRun, console: Console) -> Outcome:
    """Load the model, train, and write the tuned model. The outcome is finished, interrupted or stopped."""
    watch = watch_ranks() if run.ranks.world > 1 else None
    try:
        return _run_tuning(run, console)
    finally:
        if watch is not None:
            watch.close()  # reports an error of this rank, which ends the other ranks


def _run_tuning(run: TuneRun, console: Console) -> Outcome:
    from twinflow.integrations import finetune as tuning

    settings, ranks, outcome = run.settings, run.ranks, Outcome()
    assert settings.steps is not None and settings.warmup is not None
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    cap_gpu(settings.gpu_memory)
    set_threads(settings.threads)
    torch.set_num_threads(settings.threads)
    start = time.perf_counter()
    dtype, offloads = DTYPES[settings.precision], bool(settings.offload_params)
    model = tuning.load_model(settings.model, dtype, settings.method, offloads)
    console.print(f"Loaded {settings.model} ({duration(time.perf_counter() - start)})", highlight=False, soft_wrap=True)
    first = 0 if run.checkpoint is None else int(run.checkpoint.name.rpartition("-")[2])
    if settings.resume:
        text = (
            f"Resuming from {run.checkpoint}" if first else "There is no checkpoint yet. Training starts from step 0."
        )
        console.print(text, highlight=False, soft_wrap=True)
    path = settings.out / METRICS
    with ExitStack() as stack:
        metrics = stack.enter_context(MetricsWriter(path, resume_after=first or -1)) if ranks.is_first else None
        progress = TrainProgress(console, settings.steps, max(1, settings.steps // 20), first_step=first + 1)
        stack.enter_context(progress)
        stop = stack.enter_context(stop_signals(console, ONE_SIGNAL_S if ranks.world > 1 else 0.0))
        earlier = read_metrics(path) if ranks.is_first else []
        outcome.steps += [record for record in earlier if isinstance(record, StepRecord)]
        outcome.valids += [record for record in earlier if isinstance(record, ValidRecord)]
        watcher = Watcher(run, outcome, progress, metrics, Talk(ranks, lambda: bool(stop), device))
        callback = tuning.Steps(watcher, settings.valid_every, settings.save_every, device)
        schedule = partial(lr_factor, warmup=settings.warmup, steps=settings.steps)
        trainer = tuning.make_trainer(
            _tune_settings(settings), model, run.tokenizer, run.data, _twin(settings), callback, schedule, device
        )
        start = time.perf_counter()
        try:
            trainer.train(resume_from_checkpoint=None if run.checkpoint is None else str(run.checkpoint))
        except KeyboardInterrupt:
            outcome.status = "interrupted"
            outcome.notes.append("The run was interrupted twice, so the steps since the last checkpoint are lost.")
        outcome.wall_s = time.perf_counter() - start
        last = outcome.steps[-1] if outcome.steps else None
        if last is not None and (not math.isfinite(last.loss) or last.skipped):
            outcome.status = "stopped"
        elif trainer.state.global_step < settings.steps:
            outcome.status = "interrupted"
    outcome.message = _message(run, outcome, trainer.state.global_step)
    if outcome.status == "finished":
        after = [tuning.answer(trainer.model, run.tokenizer, prompt) for prompt, _, _ in run.questions]
        print_samples(console, run.questions, watcher.before, after)
        merge = None
        if settings.merge:
            merge = partial(tuning.load_whole, settings.model, DTYPES[settings.precision])
        tuning.save_tuned(trainer, run.tokenizer, settings.out / TUNED, model_card(run, outcome), merge)
    trainer.twin.close(keep_weights=False)  # the tuned model is written, or training can be resumed
    return outcome


def _tune_settings(settings: FinetuneSettings) -> Any:
    from twinflow.integrations.finetune import TuneSettings

    names = TuneSettings.__dataclass_fields__
    return TuneSettings(
        **{name: getattr(settings, name) for name in names if name != "out"}, out=settings.out / CHECKPOINTS
    )


def _twin(settings: FinetuneSettings) -> dict[str, Any]:
    """Arguments of TwinOptimizer that the settings determine."""
    return {
        "tuning": Tuning(nvme_path=settings.nvme_path, offload_embeddings=bool(settings.offload_embeddings)),
        "states": settings.states,
        "master": settings.master,
        "host_threads": settings.threads,
        "ratio": settings.ratio,
        "offload_params": bool(settings.offload_params),
    }


def resume_command(settings: FinetuneSettings) -> str:
    return shlex.join(["twinflow", "finetune", settings.model, settings.data, "--resume", "--out", str(settings.out)])


def _message(run: TuneRun, outcome: Outcome, done: int) -> str:
    """How the run ended, in sentences, with advice if it went wrong."""
    settings = run.settings
    if outcome.status == "stopped":
        last = outcome.steps[-1]
        what = "loss" if not math.isfinite(last.loss) else "gradient norm"
        return (
            f"Stopped at step {done}: the {what} is not a finite number. "
            f"Use a lower --lr (now {settings.lr:g}) or a longer --warmup (now {settings.warmup})."
        )
    if outcome.status == "interrupted":
        lost = " ".join(["", *outcome.notes])
        how = f", start {settings.world} processes as before with" if settings.world > 1 else ""
        again = f"To continue{how}: {resume_command(settings)}"
        return f"Interrupted after {done} of {settings.steps} steps.{lost} {again}"
    return f"Finished {done} steps in {duration(outcome.wall_s)}."


def print_samples(console: Console, questions: list[tuple[str, str, str]], before: list[str], after: list[str]) -> None:
    if not questions:
        return
    lines = ["Sample answers"]
    befores = before if len(before) == len(after) else ["-"] * len(after)
    for (_, asked, expected), old, new in zip(questions, befores, after, strict=True):
        for name, text in (("asked", asked), ("expected", expected), ("before", old), ("after", new)):
            said = " / ".join(printable(text).split("\n")).strip()
            lines.append(f"  {name:<8}  {said[:200] + '...' if len(said) > 200 else said or '(nothing)'}")
        lines.append("")
    console.print("\n".join(lines[:-1]), highlight=False, markup=False, soft_wrap=True)


def model_card(run: TuneRun, outcome: Outcome) -> str:
    """The README.md of the tuned model."""
    settings = run.settings
    is_adapter = settings.method in ADAPTERS and not settings.merge
    head = ["---", f"base_model: {settings.model}", f"library_name: {'peft' if is_adapter else 'transformers'}"]
    head += ["pipeline_tag: text-generation", "tags:", "- twinflow", f"- {settings.method}", "---", ""]
    rows = [*run.header, *final_numbers(outcome)]
    table = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows if name != "output")]
    load = [
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained("this folder")',
        'tokenizer = AutoTokenizer.from_pretrained("this folder")',
        "```",
    ]
    kind = "LoRA adapters for" if is_adapter else "A tuned version of"
    text = f"{kind} {settings.model}, made with `twinflow finetune` {__version__}."
    return "\n".join([*head, f"# {settings.out.name}", "", text, "", *load, "", *table, ""])


def show(run: TuneRun, outcome: Outcome, console: Console) -> None:
    """Write the report page and print the final numbers."""
    settings = run.settings
    values = as_json(settings)
    words = {None: "-", True: "yes", False: "no"}
    rows = [
        (option_name(name), words[value] if value is None or isinstance(value, bool) else str(value))
        for name, value in values.items()
        if name != "world"
    ]
    report = Report(
        title=settings.out.name or str(settings.out),
        status=outcome.status,
        message=outcome.message,
        numbers=final_numbers(outcome),
        settings=[*run.header, *rows],
        machine=machine_rows(settings.threads),
        steps=outcome.steps,
        valids=outcome.valids,
        notes=[*run.choice.notes, *outcome.notes],
    )
    numbers, path = list(report.numbers), settings.out / REPORT
    try:
        write_report(path, report)
        numbers.append(("report", str(path)))
    except OSError as error:  # for example a full disk
        typer.echo(f"warning: The report could not be written: {error}", err=True)
    tuned = settings.out / TUNED
    if outcome.status == "finished":
        kind = "adapters" if settings.method in ADAPTERS and not settings.merge else "tuned model"
        numbers.append((kind, str(tuned)))
    print_rows(console, outcome.message, numbers)
    if outcome.status == "stopped" and settings.world > 1:
        typer.echo(f"error: {outcome.message}", err=True)  # the launcher shows this line as the cause
    if outcome.status == "finished":
        text = f'Next: in Python, transformers.AutoModelForCausalLM.from_pretrained("{tuned}") loads the result.'
        console.print(text, highlight=False, markup=False, soft_wrap=True)
