"""A run of `twinflow train`: its parts, the loop around them, checkpoints, and how it may end."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from twinflow.cli import axes
from twinflow.cli.memory import MemoryPlan, available_to, case_of, plan_memory
from twinflow.cli.model import build_engine, set_rates
from twinflow.cli.ranks import ONE_SIGNAL_S, RankLoop, Ranks, SharedError, Talk, watched
from twinflow.cli.settings import TrainSettings, as_json, check_same_run, check_settings, engine_config
from twinflow.cli.training import VALID_BATCHES, is_bad
from twinflow.data.tokens import TokenData, load_data
from twinflow.engine import Engine
from twinflow.errors import invalid_value
from twinflow.monitor.files import write_whole
from twinflow.monitor.metrics import MetricsWriter, Record, StepRecord, ValidRecord, read_metrics
from twinflow.monitor.progress import TrainProgress, duration
from twinflow.native import set_threads
from twinflow.native.cgroup import free_host_bytes

METRICS, SETTINGS, REPORT, CHECKPOINTS = "metrics.jsonl", "settings.json", "report.html", "checkpoints"
TRACED_STEPS = 3


@dataclass(frozen=True)
class Run:
    """A run that is ready to start, or to go on."""

    settings: TrainSettings
    ranks: Ranks
    data: TokenData
    engine: Engine
    config: dict[str, Any]
    memory: MemoryPlan
    first_step: int  # steps that were done before
    num_valid: int  # sequences of a validation

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.settings.out / CHECKPOINTS

    @property
    def stage(self) -> int:
        """Of ZeRO."""
        return int(self.config["zero_optimization"].get("stage", 0))

    @property
    def rank_rows(self) -> list[tuple[str, str]]:
        """Of the header and the page: its ranks and how they share the model; nothing for one process."""
        return self.ranks.rows_of_report(self.stage, axes.describe(self.config, self.ranks.world))


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


def prepare(settings: TrainSettings, ranks: Ranks, console: Console) -> Run:
    """Check everything, read the data, build the parts. ValueError or OSError: the user's to mend."""
    with ranks.together():
        check_settings(settings)
        saved = _saved(settings) if ranks.is_first else {}  # its folder is the first rank's to look at
        gpu_bytes = _cap_gpu(settings)
        set_threads(settings.threads)
        torch.set_num_threads(settings.threads)
    saved = ranks.first(saved)
    data = _load(settings, ranks, console)
    vocab_size = settings.vocab_size or max(settings.model.vocab_size, data.vocab_size)
    settings = replace(settings, model=replace(settings.model, vocab_size=vocab_size))
    free_bytes = ranks.least(free_host_bytes())
    gpu_bytes = None if gpu_bytes is None else ranks.least(gpu_bytes)
    with ranks.together():
        data.check_context(settings.context)
        _check_saved(saved, settings, data)
        axes.check_vocabulary(settings.file_config, settings.model)
        states = saved.get("chosen_states", "auto") if settings.states == "auto" else settings.states
        config = engine_config(settings, "fp32", ranks.world)
        axes.check_combination(config, settings.model, ranks.here)
        case = case_of(settings, config, ranks.world)
        plan = plan_memory(case, states, available_to(ranks.here, gpu_bytes, free_bytes))
    config = engine_config(settings, plan.states, ranks.world)
    engine = build_engine(settings, config, ranks)
    num_valid = saved.get("num_valid") or _num_valid(saved or {**as_json(settings), "world": ranks.world})
    with ranks.together():
        if ranks.is_first:
            chosen = {"fingerprint": data.fingerprint, "chosen_states": plan.states, "num_valid": num_valid}
            _write_settings(settings, {**chosen, "world": ranks.world})
    if settings.resume:
        with watched(engine):
            found, _ = engine.load_checkpoint(settings.out / CHECKPOINTS)
        set_rates(engine)
        console.print(f"resuming from {found}" if found else "no checkpoint yet: starting anew", soft_wrap=True)
    return Run(settings, ranks, data, engine, config, plan, engine.global_steps, num_valid)


def _saved(settings: TrainSettings) -> dict[str, Any]:
    """The settings of the run that is to be resumed; nothing where there is none."""
    if (settings.out / METRICS).exists() and not settings.resume:
        remedy = "Name another one, remove it, or go on with --resume."
        raise invalid_value("--out", str(settings.out), "a folder that holds no run yet", remedy)
    path = settings.out / SETTINGS
    if not settings.resume or not path.exists():
        return {}
    saved: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return saved


def _load(settings: TrainSettings, ranks: Ranks, console: Console) -> TokenData:
    """The data, the same on all ranks."""
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
        if fingerprint != prints[0]:  # the standard library of another Python, a file of another day
            remedy = "Put the same data on all machines."
            raise SharedError(
                str(invalid_value(f"fingerprint of --data on rank {rank}", fingerprint, prints[:1], remedy))
            )
    return data


def _check_saved(saved: dict[str, Any], settings: TrainSettings, data: TokenData) -> None:
    """A run that is resumed must be the same."""
    if not saved:
        return
    check_same_run(saved, settings)
    if (before := saved.get("fingerprint", data.fingerprint)) != data.fingerprint:
        now = f"{settings.data}, fingerprint {data.fingerprint}"
        remedy = "Bring it back, or take another --out."
        raise invalid_value("--data", now, f"what it was, fingerprint {before}", remedy)


def _num_valid(started: dict[str, Any]) -> int:
    """Sequences of a validation, by the settings that the run began with: other ranks measure the same."""
    replicas = axes.num_replicas(started.get("file_config") or {}, int(started.get("world", 1)))
    return VALID_BATCHES * int(started["batch_size"]) * replicas


def _write_settings(settings: TrainSettings, chosen: dict[str, Any]) -> None:
    settings.out.mkdir(parents=True, exist_ok=True)
    if settings.trace is not None:
        settings.trace.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(as_json(settings) | chosen, default=str, indent=2)
    write_whole(settings.out / SETTINGS, text + "\n")


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
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    if settings.gpu_memory is None:
        return int(total)
    if settings.gpu_memory > total:
        raise invalid_value("--gpu-memory", settings.gpu_memory, f"at most the {total / 1e9:.0f} GB there are")
    torch.cuda.set_per_process_memory_fraction(settings.gpu_memory / total)
    return settings.gpu_memory


def run_training(run: Run, console: Console) -> Outcome:
    """The run itself. It always has an outcome: finished, interrupted by the user, or stopped by bad numbers."""
    outcome, start = Outcome(), time.perf_counter()
    try:
        with watched(run.engine):
            _train(run, outcome, console)
    except KeyboardInterrupt:
        outcome.status = "interrupted"
        outcome.notes.append("Interrupted twice: the steps since the last checkpoint are lost.")
    finally:
        run.engine.destroy()
    outcome.wall_s = time.perf_counter() - start
    outcome.message = describe(outcome, run)
    return outcome


def _train(run: Run, outcome: Outcome, console: Console) -> None:
    """All steps, and what comes after each of them."""
    settings, ranks = run.settings, run.ranks
    plain_every = max(1, settings.steps // 20)
    with (
        _metrics(run) as write,
        TrainProgress(console, settings.steps, plain_every, first_step=run.first_step + 1) as progress,
        _stop_signals(console, ONE_SIGNAL_S if ranks.world > 1 else 0.0) as stop,
    ):
        earlier = read_metrics(settings.out / METRICS) if ranks.is_first else []  # of the run that is resumed
        outcome.steps += [record for record in earlier if isinstance(record, StepRecord)]
        outcome.valids += [record for record in earlier if isinstance(record, ValidRecord)]
        measured = ranks.first([record.step for record in outcome.valids])
        talk = Talk(ranks, lambda: bool(stop), run.engine.device)
        loop = RankLoop(settings, run.engine, run.data, talk, run.num_valid)
        try:
            for record in loop.records(talk.should_stop, measured):
                write(record)
                if isinstance(record, ValidRecord):
                    outcome.valids.append(record)
                    progress.note(f"validation loss {record.loss:.4f} after {record.step} steps")
                    continue
                progress.step(record)
                _note_move(outcome, progress, record)
                outcome.steps.append(record)
                _after_step(run, outcome, progress, record.step)
            if talk.should_stop():
                outcome.status = "interrupted"
            _finish(run, outcome, progress)
        except FloatingPointError as error:  # the loss scale of fp16 has reached its end, on all ranks
            outcome.status = "stopped"
            outcome.notes.append(str(error))


@contextmanager
def _metrics(run: Run) -> Iterator[Callable[[Record], None]]:
    """Writes a record; only the first rank does."""
    if not run.ranks.is_first:
        yield lambda record: None
        return
    with MetricsWriter(run.settings.out / METRICS, resume_after=run.first_step or -1) as metrics:
        yield metrics.write


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
    if settings.trace is not None and optimizer is not None and run.ranks.is_first:
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
def _stop_signals(console: Console, one_s: float) -> Iterator[list[float]]:
    """Ctrl-C and SIGTERM end the run after the step under way, in which weights and state agree; twice: at once.

    What comes within `one_s` seconds is one signal that came by two ways.
    """
    seen: list[float] = []

    def stop(number: int, frame: Any) -> None:
        if seen and time.monotonic() - seen[0] >= one_s:
            raise KeyboardInterrupt
        seen.append(time.monotonic())
        if len(seen) > 1:
            return
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
