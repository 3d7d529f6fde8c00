# SPDX-License-Identifier: Apache-2.0
"""`twinflow train`: pretrains a GPT with the optimizer on the host. This module has the command and its output: the
header, the final numbers and the report.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
import typer
from rich.console import Console

from twinflow.cli.ranks import USER_ERRORS, Ranks, join
from twinflow.cli.run import REPORT, Outcome, Run, is_lost, prepare, run_training
from twinflow.cli.settings import TrainOptions, as_json, make_settings, option_name
from twinflow.models.gpt import GPTConfig, count_params, flops_per_token
from twinflow.monitor.metrics import share_ahead, tokens_per_second
from twinflow.monitor.progress import duration
from twinflow.monitor.report import Report, number, write_report
from twinflow.native import isa
from twinflow.version import __version__

LAST_STEPS: Final = 10  # the final loss is a mean over this many steps, because the loss of one batch is noisy
EXIT_CODES: Final = {"finished": 0, "interrupted": 130}


def train(options: TrainOptions) -> None:
    """Pretrain a GPT with the optimizer on the host, on a GPU if there is one, and write a report page.

    If the command is started with `twinflow launch --module twinflow train`, torchrun or srun, all ranks train one
    model together.
    """
    console, ranks = Console(), Ranks()
    try:
        ranks = join()
        console = ranks.console(console)
        with ranks.together():
            settings = make_settings(options, ranks.world)
        settings = replace(settings, out=Path(ranks.first(str(settings.out))), threads=ranks.least(settings.threads))
        run = prepare(settings, ranks, console)
        print_header(run, console)
        outcome = run_training(run, console)
    except (*USER_ERRORS, RuntimeError) as raised:  # such an error may also occur during training
        raise failed(raised, ranks) from None
    lost = ranks.first(is_lost(outcome, run))  # with replicas of the model, only the first rank saves
    if ranks.is_first:
        show(run, outcome, console)
    is_failure = outcome.status == "stopped" or lost
    ranks.leave(is_failure)
    raise typer.Exit(1 if is_failure else EXIT_CODES[outcome.status])


def failed(raised: Exception, ranks: Ranks, shown: tuple[type[Exception], ...] = USER_ERRORS) -> typer.Exit:
    """Prints an error that the user can fix, and returns the exception that ends the command. Raises other errors."""
    error = out_of_memory(raised)
    if not isinstance(error, shown):
        raise raised
    if (text := ranks.message(error)) is not None:
        typer.echo(text, err=True)
    else:
        ranks.after_first()
    return typer.Exit(1)


def out_of_memory(error: Exception) -> Exception:
    """A MemoryError for torch's errors of a failed allocation, which are RuntimeErrors. Other errors are unchanged."""
    text = str(error)
    is_host = re.search(r"DefaultCPUAllocator|Cannot allocate memory", text) is not None
    if not is_host and not isinstance(error, torch.OutOfMemoryError):
        return error
    remedy = "Use a smaller --batch-size, --recompute full, or a smaller model."
    return MemoryError(f"The run needs more memory than is available: {text.splitlines()[0].rstrip('.')}. {remedy}")


def final_numbers(outcome: Outcome) -> list[tuple[str, str]]:
    """Rows of the final numbers: losses, speed, memory and time."""
    rows: list[tuple[str, str]] = []
    steps, losses = outcome.steps, [record.loss for record in outcome.steps]
    if losses:
        last = losses[-LAST_STEPS:]
        rows.append(("first loss", number(losses[0])))
        rows.append((f"last loss (mean of {len(last)})", number(sum(last) / len(last))))
    if outcome.valids:
        rows.append(("validation loss", number(outcome.valids[-1].loss)))
    if losses:
        rows.append(("tokens/s", f"{tokens_per_second(steps):,.0f}"))
        steady = steps[1:] or steps
        if any(record.tflops for record in steady):  # not measured by `twinflow finetune`
            rows.append(("TFLOPS", f"{sum(r.tflops for r in steady) / len(steady):,.3g}"))
        rows.append(("host memory", f"{max(record.host_bytes for record in steps) / 2**20:,.0f} MiB"))
        if (gpu := max(record.gpu_bytes for record in steps)) > 0:
            rows.append(("GPU memory", f"{gpu / 2**20:,.0f} MiB"))
        if math.isfinite(ahead := share_ahead(steps)):
            rows.append(("early updates", f"{100 * ahead:.0f}%"))
        if (share := steps[-1].host_share) < 1.0:
            rows.append(("state on the host", f"{100 * share:.0f}%"))
        if skipped := sum(record.skipped for record in steps):
            rows.append(("skipped steps", str(skipped)))
        if outcome.num_resumes:
            rows.append(("resumes", f"{outcome.num_resumes}, {outcome.num_repeated_steps} steps repeated"))
    rows.append(("time", duration(outcome.wall_s)))
    return rows


def make_report(run: Run, outcome: Outcome) -> Report:
    values = as_json(run.settings)
    if values["ratio"] == "auto" and outcome.steps and math.isfinite(outcome.steps[-1].host_share):
        values["ratio"] = f"auto, {outcome.steps[-1].host_share:.2f} after the last step"
    words = {None: "-", True: "yes", False: "no"}
    settings = [
        (option_name(name), words[value] if value is None or isinstance(value, bool) else str(value))
        for name, value in values.items()
        if name not in ("model", "file_config", "world")
    ]
    return Report(
        title=run.settings.out.name or str(run.settings.out),
        status=outcome.status,
        message=outcome.message,
        numbers=final_numbers(outcome),
        settings=[*run.rank_rows, *header_rows(run)[:2], *disk_rows(run), ("data", run.data.describe()), *settings],
        machine=machine_rows(run.settings.threads),
        steps=outcome.steps,
        valids=outcome.valids,
        config=json.dumps(run.config, indent=2),
        notes=[*([f"At the start {tight}."] if (tight := run.memory.tight) else []), *outcome.notes],
    )


def header_rows(run: Run) -> list[tuple[str, str]]:
    """Rows on the model, the optimizer, the memory, the data and the steps."""
    settings, memory = run.settings, run.memory
    shape = settings.model
    optimizer = run.config["optimizer"]
    clip = run.config["gradient_clipping"]
    clipping = f"clip {clip:g}" if clip else "no clipping"
    delayed = ", delayed by one step" if settings.delayed_update else ""
    parts = f" in {settings.accumulation} micro-batches" if settings.accumulation > 1 else ""
    states = run.config["zero_optimization"]["offload_optimizer"]["states"]
    ratio = f", ratio {str(settings.ratio).removesuffix('.0')}" if settings.ratio != 1.0 else ""
    fast = ", blocks compiled" if run.config.get("compile", {}).get("blocks") else ""
    fast += ", float8" if run.config.get("float8", {}).get("enabled") else ""
    return [
        (
            "model",
            f"{count_params(shape) / 1e6:,.2f} M parameters: {shape.num_layers} layers, hidden {shape.hidden}, "
            f"{shape.num_heads} heads{_experts(shape)}, context {shape.context}{_recomputed(shape)}{fast}",
        ),
        (
            "optimizer",
            f"TwinOptimizer, {optimizer['type']}, {states} state{ratio}, lr {optimizer['params'].get('lr', 1e-3):g}, "
            f"weight decay {optimizer['params'].get('weight_decay', 0):g}, {clipping}{delayed}",
        ),
        ("host memory", memory.host_line),
        *disk_rows(run),
        ("GPU memory", memory.gpu_line),
        *([("warning", memory.tight)] if memory.tight else []),
        ("threads", f"{settings.threads}, kernels {isa()}"),
        ("data", run.data.describe()),
        (
            "steps",
            f"{settings.steps:,} of {settings.tokens:,} tokens{parts} "
            f"({flops_per_token(shape) * settings.tokens / 1e9:,.1f} GFLOP each), warmup {settings.warmup}",
        ),
        ("output", str(settings.out)),
    ]


def disk_rows(run: Run) -> list[tuple[str, str]]:
    if not run.disk_rate:
        return []
    return [("disk", run.memory.disk_line(str(run.settings.nvme_path), run.disk_rate, run.disk_io))]


def _experts(shape: GPTConfig) -> str:
    if not shape.num_experts:
        return ""
    return f", {shape.num_experts} experts a layer of which a token uses {shape.num_experts_per_tok}"


def _recomputed(shape: GPTConfig) -> str:
    if shape.recompute == "none":
        return ""
    if shape.recompute in ("full", shape.num_layers):
        return ", activations recomputed"
    blocks = f" and {shape.num_recomputed} whole blocks" if shape.num_recomputed else ""
    return f", cheap activations{blocks} recomputed"


def print_header(run: Run, console: Console) -> None:
    title = f"twinflow {__version__}: training a GPT ({run.settings.preset}) on {where()}"
    print_rows(console, title, [*header_rows(run), *run.rank_rows])


def show(run: Run, outcome: Outcome, console: Console) -> None:
    """Write the report page and print the final numbers."""
    report = make_report(run, outcome)
    rows, path = list(report.numbers), run.settings.out / REPORT
    try:
        write_report(path, report)
        rows.append(("report", str(path)))
    except OSError as error:  # for example a full disk
        typer.echo(f"warning: The report could not be written: {error}", err=True)
    print_rows(console, outcome.message, rows)
    if outcome.sample is not None:
        before, after = map(printable, outcome.sample)
        text = f"Text of the validation data:\n{before}\nThe model goes on with:\n{after}"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    if is_lost(outcome, run):
        typer.echo(f"error: {outcome.message}", err=True)
    elif outcome.status == "finished":
        console.print(f"Next: {next_command(run)}", highlight=False, markup=False, soft_wrap=True)
    if outcome.status == "stopped" and run.ranks.world > 1:
        typer.echo(f"error: {outcome.message}", err=True)  # the launcher shows this line as the cause


def printable(text: str) -> str:
    """The text, indented, without characters that control a terminal, and without empty lines."""
    lines = ("".join(c if c.isprintable() else " " for c in line).rstrip() for line in text.splitlines())
    return "\n".join(f"  {line}" for line in lines if line)


def next_command(run: Run) -> str:
    """A command to try after a finished run: export the weights, or without a checkpoint plan a larger model."""
    if run.checkpoints.exists():
        return shlex.join(["twinflow", "export", str(run.checkpoints), str(run.settings.out / "weights")])
    return shlex.join(
        ["twinflow", "plan", "--preset", "gpt2-10b", *([] if torch.cuda.is_available() else ["--gpu", "h200"])]
    )


def where() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"


def machine_rows(threads: int) -> list[tuple[str, str]]:
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
    """Print a heading and aligned names and values. The terminal wraps long values."""
    width = max(len(name) for name, _ in rows)
    lines = [title, *(f"  {name:<{width}}  {value}" for name, value in rows)]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
