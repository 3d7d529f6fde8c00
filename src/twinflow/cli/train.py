"""`twinflow train`: train a small GPT on this machine and leave a report."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console

from twinflow.cli.training import (
    TrainSettings,
    build_model,
    build_optimizer,
    check_settings,
    choose_device,
    choose_preset,
    choose_rule,
    option,
    training_records,
)
from twinflow.data.text import Corpus, load_corpus
from twinflow.errors import bad_value
from twinflow.models.gpt import GPT, count_params, flops_per_token
from twinflow.monitor.metrics import MetricsWriter, StepRecord, ValidRecord, share_ahead, tokens_per_second
from twinflow.monitor.progress import TrainProgress, duration
from twinflow.monitor.report import Report, Rows, write_report
from twinflow.native import get_threads, isa, set_threads
from twinflow.optim.twin import TwinOptimizer
from twinflow.version import __version__

METRICS, SETTINGS, REPORT = "metrics.jsonl", "settings.json", "report.html"
LAST_STEPS = 10  # the last loss is a mean over this many steps: a single batch is noisy
EXIT_CODES = {"finished": 0, "stopped": 1, "interrupted": 130}


def train(
    preset: Annotated[str, typer.Option(help="Model: tiny or small.")] = "tiny",
    steps: Annotated[int, typer.Option(help="Training steps.")] = 800,
    batch_size: Annotated[int, typer.Option(help="Sequences a step.")] = 8,
    context: Annotated[int | None, typer.Option(help="Bytes a sequence. Default: the preset's.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate. Default: one that suits the rule.")] = None,
    warmup: Annotated[int | None, typer.Option(help="Steps of linear warmup. Default: a twentieth of all.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Weight decay. Default: one that suits the rule.")] = None,
    grad_clip: Annotated[float, typer.Option(help="Largest gradient norm; 0 for no clipping.")] = 1.0,
    rule: Annotated[str, typer.Option(help="Update rule: adamw, adam, adagrad, lion or sgd.")] = "adamw",
    states: Annotated[str, typer.Option(help="Optimizer state: fp32, bf16, or int8 (adamw and adam).")] = "fp32",
    delayed_update: Annotated[
        bool,
        typer.Option("--delayed-update", help="Apply each update one step later, so that it never holds up a step."),
    ] = False,
    data: Annotated[str, typer.Option(help="stdlib, or the path of a text file or of a folder of them.")] = "stdlib",
    seed: Annotated[int, typer.Option(help="Of the weights and of the order of the data.")] = 0,
    valid_every: Annotated[int, typer.Option(help="Steps between validations; 0 for start and end only.")] = 100,
    threads: Annotated[int | None, typer.Option(help="CPU threads. Default: all this process may use.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for metrics and report. Default: a new one in runs.")] = None,
) -> None:
    """Train a small GPT with the optimizer on the host, on a GPU where there is one, and write a report page."""
    console = Console()
    try:
        choice = choose_rule(rule)
        settings = TrainSettings(
            preset=preset,
            steps=steps,
            batch_size=batch_size,
            context=choose_preset(preset).context if context is None else context,
            lr=choice.lr if lr is None else lr,
            warmup=steps // 20 if warmup is None else warmup,
            weight_decay=choice.weight_decay if weight_decay is None else weight_decay,
            grad_clip=grad_clip,
            rule=rule,
            states=states,
            delayed_update=delayed_update,
            data=data,
            seed=seed,
            valid_every=valid_every,
            threads=get_threads() if threads is None else threads,
            out=default_out(preset, rule) if out is None else out,
        )
        run = prepare(settings)
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    print_rows(console, f"twinflow {__version__}: training a {preset} GPT on {where()}", header_rows(run))
    outcome = run_training(run, console)
    write_report(settings.out / REPORT, make_report(run, outcome))
    print_rows(console, outcome.message, [*outcome.numbers, ("report", str(settings.out / REPORT))])
    raise typer.Exit(EXIT_CODES[outcome.status])


@dataclass(frozen=True)
class Run:
    """A run that is ready to start."""

    settings: TrainSettings
    corpus: Corpus
    model: GPT
    optimizer: TwinOptimizer


@dataclass
class Outcome:
    """What happened, filled in while the run goes on so that an interrupted one can still be reported."""

    status: Literal["finished", "interrupted", "stopped"] = "finished"
    message: str = ""
    steps: list[StepRecord] = field(default_factory=list)
    valids: list[ValidRecord] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def numbers(self) -> Rows:
        """The final numbers."""
        rows: list[tuple[str, str]] = []
        losses = [record.loss for record in self.steps]
        if losses:
            last = losses[-LAST_STEPS:]
            rows.append(("first loss", number(losses[0])))
            rows.append(("last loss", number(sum(last) / len(last))))
        if self.valids:
            rows.append(("validation loss", number(self.valids[-1].loss)))
        if losses:
            rows.append(("tokens/s", f"{tokens_per_second(self.steps):,.0f}"))
            rows.append(("host memory", f"{max(record.host_bytes for record in self.steps) / 2**20:,.0f} MiB"))
            if torch.cuda.is_available():
                rows.append(("GPU memory", f"{torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB"))
            if math.isfinite(ahead := share_ahead(self.steps)):
                rows.append(("early updates", f"{100 * ahead:.0f}%"))
        rows.append(("time", duration(self.wall_s)))
        return rows


def default_out(preset: str, rule: str) -> Path:
    """A folder of its own for every run."""
    return Path("runs") / f"{preset}-{rule}-{time.strftime('%Y%m%d-%H%M%S')}"


def prepare(settings: TrainSettings) -> Run:
    """Check everything, read the data, build the parts. ValueError or OSError: the user's to mend."""
    check_settings(settings)
    if (settings.out / METRICS).exists():
        raise bad_value("--out", str(settings.out), "a folder that holds no run yet", "Name another one or remove it.")
    set_threads(settings.threads)
    torch.set_num_threads(settings.threads)
    corpus = load_corpus(settings.data, settings.seed)
    corpus.check_context(settings.context)
    model = build_model(settings)
    optimizer = build_optimizer(settings, model)
    settings.out.mkdir(parents=True, exist_ok=True)
    (settings.out / SETTINGS).write_text(json.dumps(asdict(settings), default=str, indent=2) + "\n", encoding="utf-8")
    return Run(settings, corpus, model, optimizer)


def run_training(run: Run, console: Console) -> Outcome:
    """The run itself. It always has an outcome: finished, interrupted by the user, or stopped by bad numbers."""
    settings, outcome, start = run.settings, Outcome(), time.perf_counter()
    plain_every = max(1, settings.steps // 20)
    try:
        with (
            MetricsWriter(settings.out / METRICS) as metrics,
            TrainProgress(console, settings.steps, plain_every) as progress,
        ):
            for record in training_records(settings, run.model, run.corpus, run.optimizer):
                metrics.write(record)
                if isinstance(record, ValidRecord):
                    outcome.valids.append(record)
                    progress.note(f"validation loss {record.loss:.4f} after {record.step} steps")
                else:
                    outcome.steps.append(record)
                    progress.step(record)
    except KeyboardInterrupt:
        outcome.status = "interrupted"
    finally:
        run.optimizer.close()
    outcome.wall_s = time.perf_counter() - start
    if outcome.steps and not outcome.steps[-1].is_finite:
        outcome.status = "stopped"
    outcome.message = describe(outcome, settings)
    return outcome


def describe(outcome: Outcome, settings: TrainSettings) -> str:
    """How the run ended, in a sentence, with advice where it went wrong."""
    done = len(outcome.steps)
    if outcome.status == "stopped":
        what = "loss" if not math.isfinite(outcome.steps[-1].loss) else "gradient norm"
        clip = "" if settings.grad_clip else ", or clip with --grad-clip 1.0"
        return (
            f"Stopped at step {done}: the {what} is not a finite number, so this step was not applied. "
            f"Try a lower --lr (now {settings.lr:g}) or a longer --warmup (now {settings.warmup}){clip}."
        )
    if outcome.status == "interrupted":
        return f"Interrupted after {done} of {settings.steps} steps."
    return f"Finished {done} steps in {duration(outcome.wall_s)}."


def make_report(run: Run, outcome: Outcome) -> Report:
    """The page's content."""
    settings = [(option(name), str(value)) for name, value in asdict(run.settings).items()]
    return Report(
        title=run.settings.out.name or str(run.settings.out),
        status=outcome.status,
        message=outcome.message,
        numbers=outcome.numbers,
        settings=[*header_rows(run)[:2], ("data", describe_data(run.corpus)), *settings],
        machine=machine_rows(run.settings.threads),
        steps=outcome.steps,
        valids=outcome.valids,
    )


def header_rows(run: Run) -> list[tuple[str, str]]:
    """What is about to be trained, with what, on what."""
    config, settings = run.model.config, run.settings
    num_params = count_params(config)
    tokens = settings.batch_size * settings.context
    clip = f"clip {settings.grad_clip:g}" if settings.grad_clip else "no clipping"
    delayed = ", delayed by one step" if settings.delayed_update else ""
    return [
        (
            "model",
            f"{num_params / 1e6:.2f} M parameters: {config.num_layers} layers, hidden {config.hidden}, "
            f"{config.num_heads} heads, context {config.context}",
        ),
        (
            "optimizer",
            f"TwinOptimizer, {settings.rule}, {settings.states} state, lr {settings.lr:g}, "
            f"weight decay {settings.weight_decay:g}, {clip}{delayed}",
        ),
        ("threads", f"{settings.threads}, kernels {isa()}"),
        ("data", describe_data(run.corpus)),
        (
            "steps",
            f"{settings.steps:,} of {tokens:,} tokens ({flops_per_token(config) * tokens / 1e9:.1f} GFLOP each), "
            f"warmup {settings.warmup}",
        ),
        ("output", str(settings.out)),
    ]


def where() -> str:
    """The model's device, in words."""
    device = choose_device()
    return f"{torch.cuda.get_device_name(device)}, in bf16" if device.type == "cuda" else "the CPU"


def describe_data(corpus: Corpus) -> str:
    """Name, size and fingerprint of the text."""
    size = (corpus.train.size + corpus.valid.size) / 1e6
    cut = ", cut at the limit" if corpus.truncated else ""
    files = "1 file" if corpus.num_files == 1 else f"{corpus.num_files:,} files"
    return f"{corpus.name}: {size:.2f} MB in {files}{cut}, sha256 {corpus.fingerprint}"


def machine_rows(threads: int) -> list[tuple[str, str]]:
    """What the numbers were measured on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [
        ("system", f"{platform.system()} {platform.machine()}"),
        ("model on", where()),
        ("cores", f"{os.cpu_count()}, threads used {threads}"),
        ("memory", f"{memory / 2**30:.1f} GiB"),
        ("host kernels", isa()),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("twinflow", __version__),
    ]


def print_rows(console: Console, title: str, rows: Sequence[tuple[str, str]]) -> None:
    """A heading and aligned names and values; long values are left to the terminal to wrap."""
    width = max(len(name) for name, _ in rows)
    lines = [title, *(f"  {name:<{width}}  {value}" for name, value in rows)]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def number(value: float) -> str:
    """A loss with four decimals."""
    return f"{value:.4f}" if math.isfinite(value) else "not finite"
