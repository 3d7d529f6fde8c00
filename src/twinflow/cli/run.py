# SPDX-License-Identifier: Apache-2.0
"""A run of `twinflow train`: preparation, the loop with checkpoints and metrics, and the outcome."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from rich.console import Console
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from twinflow.bench.disk import BLOCK_BYTES, measure_disk
from twinflow.build import initialize
from twinflow.checkpoint import open_checkpoint
from twinflow.cli.memory import MemoryPlan, available_to, case_of, plan_memory
from twinflow.cli.ranks import ONE_SIGNAL_S, Ranks, SharedError, watched
from twinflow.cli.settings import (
    TrainSettings,
    as_json,
    axes_of,
    check_combination,
    check_disk,
    check_same_run,
    check_saved,
    check_settings,
    check_vocabulary,
    describe_layout,
    engine_config,
    lr_factor,
)
from twinflow.cli.training import VALID_BATCHES, Loop, Talk, is_bad, sample_text
from twinflow.data.tokens import TokenData, load_data
from twinflow.engine import Engine
from twinflow.errors import invalid_value, unusable_path
from twinflow.files import is_full, read_json, write_whole
from twinflow.models.gpt import GPT
from twinflow.monitor.metrics import MetricsWriter, StepRecord, ValidRecord, read_metrics
from twinflow.monitor.progress import TrainProgress, duration
from twinflow.native import set_threads
from twinflow.native.cgroup import free_host_bytes, limit_host_bytes
from twinflow.offload.materialize import build as build_model
from twinflow.optim.twin import TwinOptimizer

DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
METRICS, SETTINGS, REPORT, CHECKPOINTS = "metrics.jsonl", "settings.json", "report.html", "checkpoints"
TRACED_STEPS = 3
# Entries of the file of settings: how often the run was resumed, and how many steps were done again because of that.
REPEATS: Final = ("num_resumes", "num_repeated_steps")


def build_engine(settings: TrainSettings, config: dict[str, Any], ranks: Ranks) -> Engine:
    """Build the model and the engine on all ranks. The seed determines the initial weights.

    With pipeline or tensor parallelism the model is built on the host, because it need not fit on one GPU.
    """
    torch.manual_seed(settings.seed)
    random.seed(settings.seed)  # checkpoints also store the states of Python's and NumPy's generators
    np.random.seed(settings.seed)  # noqa: NPY002
    axes = axes_of(config)
    on_gpu = torch.cuda.is_available() and axes.pipe * axes.model == 1
    with ranks.together():
        made = build_model(lambda: GPT(settings.model), "cuda" if on_gpu else "cpu", DTYPES[settings.precision])
    schedule = None
    if "optimizer" not in settings.file_config and "scheduler" not in config:
        schedule = partial(LambdaLR, lr_lambda=lambda step: lr_factor(step, settings.warmup, settings.steps))
    engine, *_ = initialize(model=made, model_parameters=_groups(made), lr_scheduler=schedule, config=config)
    return engine


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups: weight decay applies to matrices, not to norms and biases."""
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.dim() >= 2]},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]


def set_rates(engine: Engine) -> None:
    """Set the learning rates of the next step from this command line's schedule.

    A checkpoint stores the rates of the schedule that it was saved with, which may have had another --steps.
    """
    schedule, optimizer = engine.lr_scheduler, engine.optimizer
    if isinstance(schedule, LambdaLR) and optimizer is not None:
        for group, base, factor in zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
            group["lr"] = base * factor(schedule.last_epoch)


@dataclass(frozen=True)
class Run:
    """A run that is ready to start or to be resumed."""

    settings: TrainSettings
    ranks: Ranks
    data: TokenData
    engine: Engine
    config: dict[str, Any]
    memory: MemoryPlan
    first_step: int  # number of steps that were done before this process started
    num_valid: int  # sequences in a validation
    disk_rate: float = 0.0  # bytes/s of reads and writes of the disk with the state; 0: no disk is used
    disk_io: str | None = None  # how it is read and written

    @property
    def checkpoints(self) -> Path:
        return self.settings.out / CHECKPOINTS

    @property
    def rank_rows(self) -> list[tuple[str, str]]:
        """Rows on ranks and parallel layout for the header and the report. Empty for one process."""
        world, layout = self.ranks.world, describe_layout(self.config, self.ranks.world)
        stage = self.config["zero_optimization"].get("stage", 0)
        spread = f": {layout}" if layout else ""
        return [("ranks", f"{world}{spread}, ZeRO stage {stage}")] if world > 1 else []


@dataclass
class Outcome:
    """Result of a run. It is filled in during the run, so that an interrupted run can be reported as well."""

    status: Literal["finished", "interrupted", "stopped"] = "finished"
    message: str = ""
    steps: list[StepRecord] = field(default_factory=list)
    valids: list[ValidRecord] = field(default_factory=list)
    wall_s: float = 0.0
    saved: int | None = None  # steps after which the newest checkpoint was saved
    saving: int | None = None  # steps after which a thread is saving a checkpoint
    notes: list[str] = field(default_factory=list)
    num_resumes: int = 0
    num_repeated_steps: int = 0
    sample: tuple[str, str] | None = None  # a text of the data, and how the model continues it
    auto_report: str = ""  # what --ratio auto has chosen, as printed last


def prepare(settings: TrainSettings, ranks: Ranks, console: Console) -> Run:
    """Check the settings, read the data and build the engine.

    Raises ValueError, MemoryError or OSError for problems that the user can fix.
    """
    with ranks.together():
        check_settings(settings)
        saved = _saved(settings) if ranks.is_first else {}  # only the first rank reads and writes the folder
        avoid_fragments()
        gpu_bytes = cap_gpu(settings.gpu_memory)
        # A limit above the free memory limits nothing, and a larger one would not help.
        is_limit = settings.ram is not None and settings.ram < free_host_bytes()
        if settings.ram is not None:
            limit_host_bytes(settings.ram)
        set_threads(settings.threads)
        torch.set_num_threads(settings.threads)
    saved = ranks.first(saved)
    with ranks.together():
        settings = _with_disk(settings, saved)
    data = _load(settings, ranks, console)
    vocab_size = settings.vocab_size or max(settings.model.vocab_size, data.vocab_size)
    settings = replace(settings, model=replace(settings.model, vocab_size=vocab_size))
    free_bytes = ranks.least(free_host_bytes())
    gpu_bytes = None if gpu_bytes is None else ranks.least(gpu_bytes)
    disk_bytes = ranks.least(shutil.disk_usage(settings.nvme_path).free) if settings.nvme_path is not None else None
    with ranks.together():
        data.check_context(settings.context)
        _check_saved(saved, settings, data)
        check_vocabulary(settings.file_config, settings.model)
        states = saved.get("chosen_states", "auto") if settings.states == "auto" else settings.states
        config = engine_config(settings, "fp32")
        check_combination(config, settings.model, ranks.here)
        case = case_of(settings, config)
        available = available_to(ranks.here, gpu_bytes, free_bytes, is_limit, disk_bytes)
        plan = plan_memory(case, states, available)
    if settings.recompute == "auto":
        settings = replace(settings, model=replace(settings.model, recompute=plan.recompute))
    config = engine_config(settings, plan.states)
    if plan.offload_embeddings:
        config["zero_optimization"]["offload_param"]["embeddings"] = True
    disk_rate = _disk_rate(settings, plan, ranks)
    engine = build_engine(settings, config, ranks)
    # A resumed run with another number of ranks validates with the same sequences.
    num_valid = int(saved.get("num_valid", VALID_BATCHES * settings.batch_size * settings.replicas))
    with ranks.together():
        if ranks.is_first:
            chosen = {"fingerprint": data.fingerprint, "chosen_states": plan.states, "num_valid": num_valid}
            chosen |= {name: saved.get(name, 0) for name in REPEATS}
            try:
                settings.out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise unusable_path("--out", settings.out, "a folder that can be created", error) from None
            _write_settings(settings, chosen, console)
            if settings.trace is not None:
                settings.trace.parent.mkdir(parents=True, exist_ok=True)
    if settings.resume:
        with watched(engine):
            found, _ = engine.load_checkpoint(settings.out / CHECKPOINTS)
        set_rates(engine)
        console.print(
            f"Resuming from {found}" if found else "There is no checkpoint yet. Training starts from step 0.",
            soft_wrap=True,
        )
    disk_io = engine.optimizer.disk_io if isinstance(engine.optimizer, TwinOptimizer) else None
    return Run(settings, ranks, data, engine, config, plan, engine.global_steps, num_valid, disk_rate, disk_io)


def _with_disk(settings: TrainSettings, saved: Mapping[str, Any]) -> TrainSettings:
    """A resumed run keeps its state on the disk, unless --nvme-path names another folder."""
    path = saved.get("nvme_path")
    if settings.nvme_path is not None or not isinstance(path, str):
        return settings
    ratio = 1.0 if settings.ratio == "auto" else settings.ratio
    settings = replace(settings, nvme_path=Path(path), ratio=ratio)
    check_disk(settings)
    return settings


def _disk_rate(settings: TrainSettings, plan: MemoryPlan, ranks: Ranks) -> float:
    """Bytes that the disk of the first rank reads and writes in a second."""
    rate = 0.0
    with ranks.together():
        if plan.file_bytes and settings.nvme_path is not None and ranks.is_first:
            num_bytes = max(BLOCK_BYTES, min(_MEASURED_BYTES, plan.file_bytes // BLOCK_BYTES * BLOCK_BYTES))
            rate = measure_disk(settings.nvme_path, num_bytes, option="--nvme-path").update
    return float(ranks.first(rate))


def _write_settings(settings: TrainSettings, chosen: dict[str, Any], console: Console) -> None:
    """Write the settings for --resume. A full disk does not end the run, because it may have space again later."""
    path = settings.out / SETTINGS
    try:
        write_whole(path, json.dumps(as_json(settings) | chosen, default=str, indent=2) + "\n")
    except OSError as error:
        if not is_full(error):
            raise unusable_path("--out", settings.out, "a folder in which files can be created", error) from None
        text = f"warning: {path} could not be written: {error.strerror}. --resume will not compare the settings."
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def _saved(settings: TrainSettings) -> dict[str, Any]:
    """The settings of the run to resume. Empty for a new run."""
    if os.path.lexists(settings.out / METRICS) and not settings.resume:
        remedy = "Choose another folder, remove this folder, or continue the earlier run with --resume."
        raise invalid_value("--out", str(settings.out), "a folder without an earlier run", remedy)
    path = settings.out / SETTINGS
    if not settings.resume or not os.path.lexists(path):
        return {}
    try:
        found: dict[str, Any] = read_json(path)
        check_saved(found, str(path))
        read_metrics(settings.out / METRICS)
    except FileNotFoundError:  # a run that ended before its first record
        pass
    except ValueError as error:
        remedy = "Restore the file from a copy, or start a new run in another --out."
        raise ValueError(f"{error} {remedy}") from None
    return found


def _load(settings: TrainSettings, ranks: Ranks, console: Console) -> TokenData:
    """Load the data on all ranks and check that it is identical."""
    data: TokenData = ranks.in_turns(
        lambda: load_data(
            settings.data,
            settings.tokenizer,
            settings.seed,
            json_key=settings.json_key,
            vocab_size=settings.vocab_size,
            progress=_tokenizing(console),
        )
    )
    for rank, fingerprint in enumerate(prints := ranks.gather(data.fingerprint)):
        # The data can differ, for example because the machines have different versions of Python's standard library.
        if fingerprint != prints[0]:
            raise SharedError(
                f"The data of rank {rank} differs from the data of rank 0: the checksums of --data are {fingerprint} "
                f"and {prints[0]}. Put the same data on all machines."
            )
    return data


def _check_saved(saved: dict[str, Any], settings: TrainSettings, data: TokenData) -> None:
    """Raise a ValueError if the run to resume had other settings or data."""
    if not saved:
        return
    check_same_run(saved, settings)
    if (before := saved.get("fingerprint", data.fingerprint)) != data.fingerprint:
        raise ValueError(
            f"The data {settings.data} has changed since the run began: its fingerprint (a checksum) is "
            f"{data.fingerprint}, but must be {before}. Restore the data, or start a new run in another --out."
        )


def _tokenizing(console: Console) -> Callable[[int, int], None]:
    """Progress callback that prints a line for every tenth of the text: tokenizing a large text takes minutes."""
    shown = -1

    def show(done: int, total: int) -> None:
        nonlocal shown
        if total and (tenth := 10 * done // total) > shown:
            shown = tenth
            console.print(f"Tokenizing: {10 * tenth}% of {total / 1e6:,.0f} MB", highlight=False)

    return show


_MEASURED_BYTES: Final = 1 << 28  # of a disk that a run uses
_ALLOCATOR_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def avoid_fragments() -> None:
    """Lets torch's allocator extend its segments of GPU memory, unless the user has configured the allocator.

    Blocks, gradients and logits have different sizes. With segments of fixed size, gigabytes would stay unused between
    them. The setting is made by a call, because the name of the variable depends on torch's version.
    """
    if torch.cuda.is_available() and not any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        if change is None:  # before torch 2.9
            change = torch.cuda.memory._set_allocator_settings
        change("expandable_segments:True")


def cap_gpu(limit: int | None) -> int | None:
    """Bytes of the GPU that this run may use, or None without a GPU. `limit`: the value of --gpu-memory."""
    if not torch.cuda.is_available():
        return None
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    if limit is None:
        return int(total)
    if limit > total:
        raise invalid_value("--gpu-memory", limit, f"at most {total} bytes, the memory of this GPU")
    torch.cuda.set_per_process_memory_fraction(limit / total)
    return limit


def run_training(run: Run, console: Console) -> Outcome:
    """Train. The outcome is finished, interrupted by the user, or stopped by a loss or gradient that is not finite."""
    outcome, start = Outcome(saved=run.first_step or None), time.perf_counter()
    try:
        with watched(run.engine):
            _train(run, outcome, console)
    except KeyboardInterrupt:
        outcome.status = "interrupted"
        outcome.notes.append("The run was interrupted twice, so the steps since the last checkpoint are lost.")
    finally:
        run.engine.destroy()
    outcome.wall_s = time.perf_counter() - start
    outcome.message = describe(outcome, run)
    return outcome


def _train(run: Run, outcome: Outcome, console: Console) -> None:
    """Run all steps, and write metrics, progress and checkpoints."""
    settings, ranks = run.settings, run.ranks
    plain_every = max(1, settings.steps // 20)
    path = settings.out / METRICS
    if settings.resume and ranks.is_first:
        outcome.num_resumes, outcome.num_repeated_steps = _count_repeats(run, path)
    with (
        TrainProgress(console, settings.steps, plain_every, first_step=run.first_step + 1) as progress,
        _metrics(run, path, outcome, progress) if ranks.is_first else nullcontext() as metrics,
        stop_signals(console, ONE_SIGNAL_S if ranks.world > 1 else 0.0) as stop,
    ):
        earlier = read_metrics(path) if ranks.is_first else []  # records of the run that is resumed
        outcome.steps += [record for record in earlier if isinstance(record, StepRecord)]
        outcome.valids += [record for record in earlier if isinstance(record, ValidRecord)]
        measured = ranks.first([record.step for record in outcome.valids])
        talk = Talk(ranks, lambda: bool(stop), run.engine.device)
        loop = Loop(settings, run.engine, run.data, talk, run.num_valid)
        if run.config.get("compile", {}).get("blocks"):
            progress.note("Compiling the blocks in the first validation and the first step, which take longer")
        try:
            for record in loop.records(measured):
                if metrics is not None:
                    metrics.write(record)
                if isinstance(record, ValidRecord):
                    outcome.valids.append(record)
                    progress.note(f"Validation loss after {record.step} steps: {record.loss:.4f}")
                    continue
                progress.step(record)
                _note_move(run, outcome, progress, record)
                outcome.steps.append(record)
                _after_step(run, outcome, progress, record.step)
            if talk.should_stop():
                outcome.status = "interrupted"
            _finish(run, outcome, progress)
        except FloatingPointError as error:  # the loss scale of fp16 has reached its minimum, on all ranks
            outcome.status = "stopped"
            outcome.notes.append(str(error))


def _metrics(run: Run, path: Path, outcome: Outcome, progress: TrainProgress) -> MetricsWriter:
    return MetricsWriter(path, run.first_step or -1, partial(_warn, outcome, progress))


def _warn(outcome: Outcome, progress: TrainProgress, text: str) -> None:
    """Print a warning, and put it on the report page."""
    outcome.notes.append(text)
    progress.note(f"warning: {text}")


def _count_repeats(run: Run, metrics: Path) -> tuple[int, int]:
    """Add this resume, and the steps after the loaded checkpoint that an earlier process has recorded, to the file of
    settings. Return both sums."""
    if not metrics.exists():
        return 0, 0  # the first start of a run with --resume
    path = run.settings.out / SETTINGS
    values = read_json(path) if path.exists() else dict.fromkeys(REPEATS, 0)
    again = {record.step for record in read_metrics(metrics) if isinstance(record, StepRecord)}
    values[REPEATS[0]] += 1
    values[REPEATS[1]] += sum(step > run.first_step for step in again)
    with suppress(OSError):  # a full disk, of which `_write_settings` has warned: only these counts are lost
        write_whole(path, json.dumps(values, indent=2) + "\n")
    return values[REPEATS[0]], values[REPEATS[1]]


def _note_move(run: Run, outcome: Outcome, progress: TrainProgress, record: StepRecord) -> None:
    """Print what --ratio auto has chosen, or that the optimizer has moved state since then."""
    optimizer = run.engine.optimizer
    if optimizer is None or not optimizer.is_placed:
        return  # some placements are being tried
    before = outcome.steps[-1].host_share if outcome.steps else math.nan
    if optimizer.auto_report != outcome.auto_report:
        outcome.auto_report = optimizer.auto_report
        progress.note(optimizer.auto_report)
    elif abs(record.host_share - before) > 1e-6:
        progress.note(
            f"From this step on the ratio is {record.host_share:.2f}: this share of the optimizer state is on the host"
        )


def _after_step(run: Run, outcome: Outcome, progress: TrainProgress, step: int) -> None:
    """Save a checkpoint and record the timeline if they are due."""
    settings, optimizer = run.settings, run.engine.optimizer
    if settings.save_every and step % settings.save_every == 0 and step < settings.steps:
        _save(run, outcome, progress)
    if settings.trace is not None and optimizer is not None and run.ranks.is_first:
        first = min(run.first_step + 2, settings.steps - 1)
        if step == first:
            optimizer.trace.start()
        elif step == first + TRACED_STEPS:
            _write_trace(run, outcome, progress)


def _write_trace(run: Run, outcome: Outcome, progress: TrainProgress) -> None:
    """Write the timeline if a recording is running. A file that cannot be written does not end the run."""
    path, optimizer = run.settings.trace, run.engine.optimizer
    if path is None or optimizer is None or not optimizer.trace.enabled:
        return
    optimizer.wait()
    optimizer.trace.stop()
    try:
        optimizer.export_trace(path)
    except (ValueError, OSError) as error:
        _warn(outcome, progress, f"The timeline could not be written: {error}")
        return
    progress.note(f"Timeline of some steps: {path}")


def _finish(run: Run, outcome: Outcome, progress: TrainProgress) -> None:
    """Save the last checkpoint. After a loss or gradient that is not finite, no checkpoint is saved, because --resume
    needs a good one.
    """
    _write_trace(run, outcome, progress)  # the run may end before the last step that was to be recorded
    last = outcome.steps[-1] if outcome.steps else None
    if last is not None and is_bad(last, run.settings.precision):
        outcome.status = "stopped"
    elif run.engine.global_steps > run.first_step:
        _save(run, outcome, progress)
        _settle_save(run, outcome, progress)
        if outcome.status == "finished":
            # If memory is short, only the sample is missing: the checkpoint is saved. Blocks are not compiled here,
            # because they would be compiled again for each length of the text.
            with suppress(torch.OutOfMemoryError), torch.compiler.set_stance("force_eager"):
                outcome.sample = sample_text(run.engine, run.data, run.settings.context)


def _save(run: Run, outcome: Outcome, progress: TrainProgress) -> None:
    """Save a checkpoint. A full disk loses this checkpoint, but does not end the run."""
    if not run.settings.save:
        return
    _settle_save(run, outcome, progress)
    start, step = time.perf_counter(), run.engine.global_steps
    try:
        run.engine.save_checkpoint(run.checkpoints)
    except OSError as error:
        _warn_unsaved(outcome, progress, step, error)
        return
    outcome.saving = step
    if run.engine.background is None or run.settings.verify_saves:
        _settle_save(run, outcome, progress)
    if run.settings.verify_saves and outcome.saved == step:
        _verify(run)
    seconds = time.perf_counter() - start
    progress.note(f"Checkpoint after {step} steps: {run.checkpoints} ({duration(seconds)})")


def _settle_save(run: Run, outcome: Outcome, progress: TrainProgress) -> None:
    """Wait for the checkpoint that a thread is saving, if there is one."""
    step, outcome.saving = outcome.saving, None
    if step is None:
        return
    try:
        run.engine.wait_for_checkpoint()
        outcome.saved = step
    except OSError as error:
        _warn_unsaved(outcome, progress, step, error)


def _warn_unsaved(outcome: Outcome, progress: TrainProgress, step: int, error: OSError) -> None:
    kept = "There is no earlier checkpoint."
    if outcome.saved is not None:
        kept = f"The previous checkpoint, after {outcome.saved} steps, is kept."
    reason = str(error).rstrip(".")
    _warn(outcome, progress, f"The checkpoint after {step} steps could not be saved: {reason}. {kept}")


def _verify(run: Run) -> None:
    """Read the last checkpoint and compare all checksums. Each rank reads a part. Raises ValueError on all ranks if a
    file is damaged.
    """
    engine, ranks = run.engine, run.ranks
    engine.wait_for_checkpoint()
    with watched(engine, "verifying the checkpoint"), ranks.together():
        saved = open_checkpoint(run.checkpoints, f"global_step{engine.global_steps}")
        assert saved is not None
        saved.verify(share=(ranks.rank, ranks.world))


@contextmanager
def stop_signals(console: Console, one_s: float) -> Iterator[list[float]]:
    """Yield a list that gets an entry when Ctrl-C or SIGTERM arrives.

    The first signal ends the run after the current step, when weights and state agree. A second signal ends it at once.
    Signals within `one_s` seconds count as one, because a launcher and the terminal may both deliver the same signal.
    """
    seen: list[float] = []

    def stop(number: int, frame: Any) -> None:
        if seen and time.monotonic() - seen[0] >= one_s:
            raise KeyboardInterrupt
        seen.append(time.monotonic())
        if len(seen) > 1:
            return
        console.print("Stopping after this step. Press Ctrl-C again to stop at once.", highlight=False)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def describe(outcome: Outcome, run: Run) -> str:
    """How the run ended, in sentences, with advice if it went wrong."""
    settings, done = run.settings, run.engine.global_steps
    if outcome.status == "stopped":
        last = outcome.steps[-1] if outcome.steps else None
        what = "loss" if last is not None and not math.isfinite(last.loss) else "gradient norm"
        clip = "" if settings.grad_clip else ", or clip with --grad-clip 1.0"
        applied = ", so this step was not applied" if last is None or last.skipped else ""
        first = " This happened in the first step, so check the data and the model first." if done == 1 else ""
        return (
            f"Stopped at step {done}: the {what} is not a finite number{applied}. "
            f"Use a lower --lr (now {settings.lr:g}) or a longer --warmup (now {settings.warmup}){clip}.{first}"
        )
    if outcome.status == "interrupted":
        again = f" To continue, run the same command with --resume --out {settings.out}."
        go_on = again if outcome.saved is not None else ""
        lost = " ".join(["", *outcome.notes]) if outcome.notes else ""
        return f"Interrupted after {done} of {settings.steps} steps.{lost}{go_on}"
    if run.first_step >= settings.steps:
        return f"The run has {done} steps already, so no step was made. To train on, use --steps with a larger number."
    here = f", {done - run.first_step} of them after the resume," if run.first_step else ""
    share = outcome.steps[-1].host_share if outcome.steps else math.nan
    chosen = f". --ratio auto has chosen {share:.2f}" if settings.ratio == "auto" and math.isfinite(share) else ""
    return f"Finished {done} steps{here} in {duration(outcome.wall_s)}{chosen}.{_lost(outcome, run)}"


def is_lost(outcome: Outcome, run: Run) -> bool:
    """Whether the run has finished, but its result is in no checkpoint, although checkpoints were to be saved."""
    done = run.engine.global_steps
    made = done > run.first_step
    return outcome.status == "finished" and run.settings.save and made and outcome.saved != done


def _lost(outcome: Outcome, run: Run) -> str:
    if not is_lost(outcome, run):
        return ""
    if outcome.saved is None:
        text = "No checkpoint could be saved, so the trained weights are lost. Free space on the disk, and train again."
        return f" {text}"
    again = f"run the same command with --resume --out {run.settings.out}"
    return (
        " The checkpoint after the last step could not be saved. The newest one is after "
        f"{outcome.saved} steps. Free space on the disk, and {again}."
    )
