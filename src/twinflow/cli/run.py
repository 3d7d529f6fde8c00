"""A run of `twinflow train`: its parts, the loop around them, checkpoints, and how it may end."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from torch.optim.lr_scheduler import LambdaLR

from twinflow.build import initialize
from twinflow.cli.memory import Available, MemoryPlan, case_of, plan_memory
from twinflow.cli.settings import TrainSettings, as_json, check_same_run, check_settings, engine_config, lr_factor
from twinflow.cli.training import Loop, is_bad
from twinflow.data.tokens import TokenData, load_data
from twinflow.engine import Engine
from twinflow.errors import bad_value
from twinflow.models.gpt import GPT
from twinflow.monitor.files import write_whole
from twinflow.monitor.metrics import MetricsWriter, StepRecord, ValidRecord, read_metrics
from twinflow.monitor.progress import TrainProgress, duration
from twinflow.native import set_threads
from twinflow.native.cgroup import free_host_bytes
from twinflow.offload.materialize import build as build_model

METRICS, SETTINGS, REPORT, CHECKPOINTS = "metrics.jsonl", "settings.json", "report.html", "checkpoints"
TRACED_STEPS = 3
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Run:
    """A run that is ready to start, or to go on."""

    settings: TrainSettings
    data: TokenData
    engine: Engine
    config: dict[str, Any]
    memory: MemoryPlan
    first_step: int  # steps that were done before

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.settings.out / CHECKPOINTS


@dataclass
class Outcome:
    """What happened, filled in while the run goes on so that an interrupted one can still be reported."""

    status: Literal["finished", "interrupted", "stopped"] = "finished"
    message: str = ""
    steps: list[StepRecord] = field(default_factory=list)
    valids: list[ValidRecord] = field(default_factory=list)
    wall_s: float = 0.0
    numbers: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def prepare(settings: TrainSettings, console: Console) -> Run:
    """Check everything, read the data, build the parts. ValueError or OSError: the user's to mend."""
    check_settings(settings)
    is_new = not (settings.out / METRICS).exists()
    if not is_new and not settings.resume:
        remedy = "Name another one, remove it, or go on with --resume."
        raise bad_value("--out", str(settings.out), "a folder that holds no run yet", remedy)
    gpu_bytes = _cap_gpu(settings)
    set_threads(settings.threads)
    torch.set_num_threads(settings.threads)
    data = load_data(
        settings.data,
        settings.tokenizer,
        settings.seed,
        json_key=settings.json_key,
        vocab_size=settings.vocab_size,
        progress=_tokenizing(console),
    )
    vocab_size = settings.vocab_size or max(settings.model.vocab_size, data.vocab_size)
    settings = replace(settings, model=replace(settings.model, vocab_size=vocab_size))
    data.check_context(settings.context)
    saved = _saved(settings, data)
    states = saved.get("chosen_states", "auto") if settings.states == "auto" else settings.states
    case = case_of(settings, engine_config(settings, "fp32"))
    plan = plan_memory(case, states, Available(gpu_bytes, free_host_bytes()))
    config = engine_config(settings, plan.states)
    engine = build_engine(settings, config)
    settings.out.mkdir(parents=True, exist_ok=True)
    if settings.trace is not None:
        settings.trace.parent.mkdir(parents=True, exist_ok=True)
    values = as_json(settings) | {"fingerprint": data.fingerprint, "chosen_states": plan.states}
    write_whole(settings.out / SETTINGS, json.dumps(values, default=str, indent=2) + "\n")
    if settings.resume:
        found, _ = engine.load_checkpoint(settings.out / CHECKPOINTS)
        _set_rates(engine)
        console.print(f"resuming from {found}" if found else "no checkpoint yet: starting anew", soft_wrap=True)
    return Run(settings, data, engine, config, plan, engine.global_steps)


def _saved(settings: TrainSettings, data: TokenData) -> dict[str, Any]:
    """The settings of the run that is to be resumed, which must be the same; nothing where there is none."""
    path = settings.out / SETTINGS
    if not settings.resume or not path.exists():
        return {}
    saved: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    check_same_run(saved, settings)
    if (before := saved.get("fingerprint", data.fingerprint)) != data.fingerprint:
        now = f"{settings.data}, fingerprint {data.fingerprint}"
        remedy = "Bring it back, or take another --out."
        raise bad_value("--data", now, f"what it was, fingerprint {before}", remedy)
    return saved


def _tokenizing(console: Console) -> Callable[[int, int], None]:
    """Says every tenth of the way how far the tokenizer has come: a large text takes minutes, once."""
    shown = -1

    def show(done: int, total: int) -> None:
        nonlocal shown
        if total and (tenth := 10 * done // total) > shown:
            shown = tenth
            console.print(f"tokenizing: {10 * tenth}% of {total / 1e6:,.0f} MB", highlight=False)

    return show


def _cap_gpu(settings: TrainSettings) -> int | None:
    """Bytes of the GPU that this run may use; None without one."""
    if not torch.cuda.is_available():
        return None
    total = torch.cuda.get_device_properties(0).total_memory
    if settings.gpu_memory is None:
        return int(total)
    if settings.gpu_memory > total:
        raise bad_value("--gpu-memory", settings.gpu_memory, f"at most the {total / 1e9:.0f} GB there are")
    torch.cuda.set_per_process_memory_fraction(settings.gpu_memory / total)
    return settings.gpu_memory


def build_engine(settings: TrainSettings, config: dict[str, Any]) -> Engine:
    """The model, its weights drawn from the seed, and the engine around it.

    Weight decay pulls on matrices only, never on norms and biases.
    """
    torch.manual_seed(settings.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(lambda: GPT(settings.model), device, DTYPES[settings.precision])
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() >= 2]},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    schedule = None
    if "optimizer" not in settings.file_config and "scheduler" not in config:
        schedule = partial(LambdaLR, lr_lambda=lambda step: lr_factor(step, settings.warmup, settings.steps))
    engine, *_ = initialize(model=model, model_parameters=groups, lr_scheduler=schedule, config=config)
    return engine


def _set_rates(engine: Engine) -> None:
    """The rates of the next step by the schedule of this command line: those in a checkpoint are by its own --steps."""
    schedule, optimizer = engine.lr_scheduler, engine.optimizer
    if isinstance(schedule, LambdaLR) and optimizer is not None:
        for group, base, factor in zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
            group["lr"] = base * factor(schedule.last_epoch)


def run_training(run: Run, console: Console) -> Outcome:
    """The run itself. It always has an outcome: finished, interrupted by the user, or stopped by bad numbers."""
    settings, outcome, start = run.settings, Outcome(), time.perf_counter()
    plain_every = max(1, settings.steps // 20)
    try:
        with (
            MetricsWriter(settings.out / METRICS, resume_after=run.first_step or -1) as metrics,
            TrainProgress(console, settings.steps, plain_every, first_step=run.first_step + 1) as progress,
            _stop_signals(console) as stop,
        ):
            earlier = read_metrics(settings.out / METRICS)  # of the run that is resumed
            outcome.steps += [record for record in earlier if isinstance(record, StepRecord)]
            outcome.valids += [record for record in earlier if isinstance(record, ValidRecord)]
            measured = {record.step for record in outcome.valids}
            for record in Loop(settings, run.engine, run.data).records(lambda: bool(stop), measured):
                metrics.write(record)
                if isinstance(record, ValidRecord):
                    outcome.valids.append(record)
                    progress.note(f"validation loss {record.loss:.4f} after {record.step} steps")
                    continue
                progress.step(record)
                _note_move(outcome, progress, record)
                outcome.steps.append(record)
                _after_step(run, outcome, progress, record.step)
            if stop:
                outcome.status = "interrupted"
            _finish(run, outcome, progress)
    except FloatingPointError as error:  # the loss scale of fp16 has reached its end
        outcome.status = "stopped"
        outcome.notes.append(str(error))
    except KeyboardInterrupt:
        outcome.status = "interrupted"
        outcome.notes.append("Interrupted twice: the steps since the last checkpoint are lost.")
    finally:
        run.engine.destroy()
    outcome.wall_s = time.perf_counter() - start
    outcome.message = describe(outcome, run)
    return outcome


def _note_move(outcome: Outcome, progress: TrainProgress, record: StepRecord) -> None:
    """Says so where the optimizer has moved state between GPU and host."""
    before = outcome.steps[-1].host_share if outcome.steps else math.nan
    if abs(record.host_share - before) > 1e-6:
        progress.note(f"ratio {record.host_share:.2f} from here on: so much of the optimizer state is on the host")


def _after_step(run: Run, outcome: Outcome, progress: TrainProgress, step: int) -> None:
    """Checkpoints and the timeline, where they are due."""
    settings, optimizer = run.settings, run.engine.optimizer
    if settings.save_every and step % settings.save_every == 0 and step < settings.steps:
        _save(run, outcome, progress)
    if settings.trace is not None and optimizer is not None:
        first = min(run.first_step + 2, settings.steps - 1)
        if step == first:
            optimizer.trace.start()
        elif step == first + TRACED_STEPS:
            _write_trace(run, outcome, progress)


def _write_trace(run: Run, outcome: Outcome, progress: TrainProgress) -> None:
    """The timeline, where one has been begun. A file that cannot be written does not cost the run."""
    path, optimizer = run.settings.trace, run.engine.optimizer
    if path is None or optimizer is None or not optimizer.trace.enabled:
        return
    optimizer.wait()
    optimizer.trace.stop()
    try:
        optimizer.export_trace(path)
    except (ValueError, OSError) as error:
        outcome.notes.append(f"could not write the timeline: {error}")
        progress.note(f"warning: {outcome.notes[-1]}")
        return
    progress.note(f"timeline of some steps: {path}")


def _finish(run: Run, outcome: Outcome, progress: TrainProgress) -> None:
    """The last checkpoint; none after numbers that went bad, so that --resume has a good one to go back to."""
    _write_trace(run, outcome, progress)  # of a run that ended before the last of the steps to record
    last = outcome.steps[-1] if outcome.steps else None
    if last is not None and is_bad(last, run.settings.precision):
        outcome.status = "stopped"
    elif run.engine.global_steps > run.first_step:
        _save(run, outcome, progress)


def _save(run: Run, outcome: Outcome, progress: TrainProgress) -> None:
    """A checkpoint. A disk that is full costs the checkpoint, not the run."""
    if not run.settings.save:
        return
    start = time.perf_counter()
    try:
        run.engine.save_checkpoint(run.checkpoints)
    except OSError as error:
        text = f"could not save a checkpoint after {run.engine.global_steps} steps: {error}. The one before is kept."
        progress.note(f"warning: {text}")
        outcome.notes.append(text)
        return
    seconds = time.perf_counter() - start
    progress.note(f"checkpoint after {run.engine.global_steps} steps: {run.checkpoints} ({duration(seconds)})")


@contextmanager
def _stop_signals(console: Console) -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM end the run after the step under way, in which weights and state agree; twice: at once."""
    seen: list[int] = []

    def stop(number: int, frame: Any) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)
        console.print("stopping after this step; once more ends at once", highlight=False)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def describe(outcome: Outcome, run: Run) -> str:
    """How the run ended, in a sentence, with advice where it went wrong."""
    settings, done = run.settings, run.engine.global_steps
    if outcome.status == "stopped":
        last = outcome.steps[-1] if outcome.steps else None
        what = "loss" if last is not None and not math.isfinite(last.loss) else "gradient norm"
        clip = "" if settings.grad_clip else ", or clip with --grad-clip 1.0"
        applied = ", so this step was not applied" if last is None or last.skipped else ""
        first = " It was so from the first step: look at the data and the model first." if done == 1 else ""
        return (
            f"Stopped at step {done}: the {what} is not a finite number{applied}. "
            f"Try a lower --lr (now {settings.lr:g}) or a longer --warmup (now {settings.warmup}){clip}.{first}"
        )
    if outcome.status == "interrupted":
        go_on = f" --resume --out {settings.out} goes on from there." if run.checkpoints.exists() else ""
        lost = " ".join(["", *outcome.notes]) if outcome.notes else ""
        return f"Interrupted after {done} of {settings.steps} steps.{lost}{go_on}"
    here = f", {done - run.first_step} of them now," if run.first_step else ""
    share = outcome.steps[-1].host_share if outcome.steps else math.nan
    chosen = f", with ratio auto at {share:.2f}" if settings.ratio == "auto" and math.isfinite(share) else ""
    return f"Finished {done} steps{here} in {duration(outcome.wall_s)}{chosen}."
