"""`twinflow train`: pretrains a GPT on this machine with the optimizer on the host, and writes a report."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from twinflow.cli.outcome import EXIT_CODES, header_rows, make_report, print_rows, where
from twinflow.cli.ranks import USER_ERRORS, Ranks, join
from twinflow.cli.run import REPORT, Outcome, Run, prepare, run_training
from twinflow.cli.settings import (
    BATCH_KEYS,
    TrainSettings,
    check_layout,
    choose_shape,
    default_batch_size,
    default_lr,
    only_one,
    parse_bytes,
    parse_ratio,
    rule_params,
    with_axes,
)
from twinflow.config import load_config, resolve_batch
from twinflow.errors import invalid_value
from twinflow.monitor.report import write_report
from twinflow.native import get_threads
from twinflow.rules import RULES
from twinflow.version import __version__


def _option(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help)


def train(
    preset: Annotated[
        str | None, _option(help="Model: tiny, small, gpt-350m, gpt2-1.5b, gpt2-10b or gpt2-13b.  [default: tiny]")
    ] = None,
    num_layers: Annotated[int | None, _option("--num-layers", help="Number of transformer blocks.")] = None,
    hidden: Annotated[int | None, _option("--hidden-size", help="Width of the model.")] = None,
    num_heads: Annotated[int | None, _option("--num-attention-heads", help="Number of attention heads.")] = None,
    vocab_size: Annotated[
        int | None,
        _option("--vocab-size", help="Size of the vocabulary. Default: what the preset and the tokenizer need."),
    ] = None,
    context: Annotated[
        int | None, _option("--seq-length", "--context", help="Tokens in a sequence. Default: the preset's.")
    ] = None,
    checkpoint_activations: Annotated[
        bool | None,
        _option(
            "--checkpoint-activations/--no-checkpoint-activations",
            help="Keep only the input of each block and recompute the other activations in backward. "
            "Default: on for models of width 1600 and more.",
        ),
    ] = None,
    steps: Annotated[int, _option("--steps", "--train-iters", help="Number of training steps.")] = 800,
    batch_size: Annotated[
        int | None,
        _option(
            "--batch-size", "--micro-batch-size", help="Sequences in a micro-batch of a replica. Default: the preset's."
        ),
    ] = None,
    accumulation: Annotated[
        int | None, _option("--accumulation", help="Micro-batches in a step.  [default: 1]")
    ] = None,
    lr: Annotated[
        float | None, _option(help="Peak learning rate. Default: depends on the rule and the model size.")
    ] = None,
    warmup: Annotated[
        int | None, _option("--warmup", "--lr-warmup-iters", help="Steps of linear warmup. Default: 5% of the steps.")
    ] = None,
    weight_decay: Annotated[float | None, _option(help="Weight decay. Default: depends on the rule.")] = None,
    grad_clip: Annotated[
        float | None,
        _option("--grad-clip", "--clip-grad", help="Largest gradient norm. 0 turns clipping off.  [default: 1]"),
    ] = None,
    rule: Annotated[str | None, _option(help=f"Update rule: {', '.join(RULES)}.  [default: adamw]")] = None,
    states: Annotated[
        str | None,
        _option(
            help="Optimizer state: fp32, bf16, int8 (adamw and adam), or auto: the widest that fits.  [default: auto]"
        ),
    ] = None,
    ratio: Annotated[
        str | None,
        _option(
            "--ratio",
            help="Share of the optimizer state on the host, 0 to 1, or auto: chosen after some steps.  [default: 1]",
        ),
    ] = None,
    placement: Annotated[
        str | None,
        _option("--placement", help="End of the model whose optimizer state stays on the GPU: auto, front or tail."),
    ] = None,
    delayed_update: Annotated[
        bool, _option("--delayed-update", help="Apply each update one step later, so that no step waits for it.")
    ] = False,
    precision: Annotated[
        str | None,
        _option("--precision", help="Data type of the weights: bf16, fp16 or fp32. Default: bf16 on a GPU, else fp32."),
    ] = None,
    data: Annotated[
        str,
        _option(
            "--data",
            "--data-path",
            help="Training data: stdlib, a .txt, .jsonl, .bin or .npy file, or a folder of text files.",
        ),
    ] = "stdlib",
    json_key: Annotated[str, _option("--json-key", help="Field of a JSONL line that holds the text.")] = "text",
    tokenizer: Annotated[str, _option(help="bytes, or a folder with a Hugging Face tokenizer.json.")] = "bytes",
    seed: Annotated[int, _option(help="Seed of the weights and of the order of the data.")] = 0,
    valid_every: Annotated[
        int,
        _option(
            "--valid-every",
            "--eval-interval",
            help="Steps between validations. 0: only before the first and after the last step.",
        ),
    ] = 100,
    save: Annotated[bool, _option("--save/--no-save", help="Whether to save checkpoints.")] = True,
    save_every: Annotated[
        int,
        _option("--save-every", "--save-interval", help="Steps between checkpoints. 0: only one at the end."),
    ] = 0,
    keep_last: Annotated[int | None, _option(help="How many checkpoints to keep. Default: 2.")] = None,
    resume: Annotated[bool, _option("--resume", help="Continue the run in --out from its last checkpoint.")] = False,
    gpu_memory: Annotated[
        str | None, _option("--gpu-memory", help="Limit of the GPU memory, for example 32GB.")
    ] = None,
    threads: Annotated[
        int | None, _option(help="CPU threads of each rank. Default: all that this process may use.")
    ] = None,
    out: Annotated[Path | None, _option(help="Folder of the run. Default: a new folder in runs.")] = None,
    trace: Annotated[
        Path | None, _option("--trace", help="Write a timeline of some steps to this file, for Perfetto.")
    ] = None,
    config: Annotated[
        Path | None,
        _option("--deepspeed_config", "--deepspeed-config", "--config", help="A DeepSpeed config, JSON or HJSON."),
    ] = None,
    of_megatron: Annotated[
        bool,
        _option(
            "--deepspeed",
            "--cpu-optimizer",
            "--no-pipeline-parallel",
            help="Options of Megatron that have no effect here.",
        ),
    ] = False,
    tensor_ranks: Annotated[
        int | None,
        _option("--model-parallel-size", "--tensor-model-parallel-size", help="Number of tensor-parallel ranks."),
    ] = None,
    stages: Annotated[
        int | None,
        _option("--pipeline-parallel-size", "--pipeline-model-parallel-size", help="Number of pipeline stages."),
    ] = None,
    pipeline_schedule: Annotated[
        str | None,
        _option("--pipeline-schedule", help="Pipeline schedule: gpipe, 1f1b, interleaved or zbv.  [default: 1f1b]"),
    ] = None,
    max_positions: Annotated[int | None, _option("--max-position-embeddings", help="Same as --seq-length.")] = None,
    fp16: Annotated[bool, _option("--fp16", help="Same as --precision fp16.")] = False,
    bf16: Annotated[bool, _option("--bf16", help="Same as --precision bf16.")] = False,
) -> None:
    """Pretrain a GPT with the optimizer on the host, on a GPU if there is one, and write a report page.

    Started with `twinflow launch --module twinflow train`, torchrun or srun, all ranks train one model together.
    """
    console, ranks = Console(), Ranks()
    try:
        ranks = join()
        console = ranks.console(console)
        with ranks.together():
            file_config = with_axes(read_config(config), stages, tensor_ranks, pipeline_schedule)
            name, shape = choose_shape(
                preset, num_layers, hidden, num_heads, _context(context, max_positions), checkpoint_activations
            )
            chosen_rule = only_one("--rule", rule, file_config, "optimizer") or "adamw"
            replicas = check_layout(file_config, shape, ranks.world)
            micro, parts = _batch(batch_size, accumulation, file_config, default_batch_size(name), replicas)
            usual = rule_params(chosen_rule)
            chosen_lr = only_one("--lr", lr, file_config, "optimizer")
            decay = only_one("--weight-decay", weight_decay, file_config, "optimizer")
            clip = only_one("--grad-clip", grad_clip, file_config, "gradient_clipping")
            settings = TrainSettings(
                preset=name,
                model=shape,
                steps=steps,
                batch_size=micro,
                accumulation=parts,
                lr=default_lr(chosen_rule, shape) if chosen_lr is None else chosen_lr,
                warmup=steps // 20 if warmup is None else warmup,
                weight_decay=usual["weight_decay"] if decay is None else decay,
                grad_clip=1.0 if clip is None else clip,
                rule=chosen_rule,
                **_offload(states, ratio, placement, delayed_update, file_config),
                precision=_precision(precision, fp16, bf16, file_config),
                data=data,
                json_key=json_key,
                vocab_size=vocab_size,
                tokenizer=tokenizer,
                seed=seed,
                valid_every=valid_every,
                save=save,
                save_every=save_every,
                keep_last=2 if keep_last is None else keep_last,
                gpu_memory=parse_bytes("--gpu-memory", gpu_memory),
                threads=get_threads() if threads is None else threads,
                out=default_out(name, chosen_rule) if out is None else out,
                resume=resume,
                trace=trace,
                file_config=file_config,
                world=ranks.world,
            )
        settings = replace(settings, out=Path(ranks.first(str(settings.out))), threads=ranks.least(settings.threads))
        run = prepare(settings, ranks, console)
        title = f"twinflow {__version__}: training a GPT ({name}) on {where()}"
        print_rows(console, title, [*header_rows(run), *run.rank_rows])
        outcome = run_training(run, console)
    except USER_ERRORS as error:  # also during training: a token outside the vocabulary, a full disk
        if (text := ranks.message(error)) is not None:
            typer.echo(text, err=True)
        else:
            ranks.after_first()
        raise typer.Exit(1) from None
    if ranks.is_first:
        show(run, outcome, console)
    ranks.leave(outcome.status == "stopped")
    raise typer.Exit(EXIT_CODES[outcome.status])


def show(run: Run, outcome: Outcome, console: Console) -> None:
    """Write the report page and print the final numbers."""
    report = make_report(run, outcome)
    report = replace(report, settings=[*run.rank_rows, *report.settings])
    rows, path = outcome.numbers, run.settings.out / REPORT
    try:
        write_report(path, report)
        rows.append(("report", str(path)))
    except OSError as error:  # for example a full disk
        typer.echo(f"warning: The report could not be written: {error}", err=True)
    print_rows(console, outcome.message, rows)
    if outcome.status == "finished":
        console.print(f"Next: {next_command(run)}", highlight=False, markup=False, soft_wrap=True)
    if outcome.status == "stopped" and run.ranks.world > 1:
        typer.echo(f"error: {outcome.message}", err=True)  # the launcher shows this line as the cause


def next_command(run: Run) -> str:
    """A command to try after a finished run: export the weights, or without a checkpoint plan a larger model."""
    if run.checkpoints.exists():
        return shlex.join(["twinflow", "export", str(run.checkpoints), str(run.settings.out / "weights")])
    return shlex.join(
        ["twinflow", "plan", "--preset", "gpt2-10b", *([] if torch.cuda.is_available() else ["--gpu", "h200"])]
    )


def read_config(path: Path | None) -> dict[str, Any]:
    """Read and validate a config file. Deprecated keys get their current names."""
    if path is None:
        return {}
    if not path.is_file():
        raise invalid_value("--deepspeed_config", str(path), "an existing file")
    return load_config(path).model_dump(mode="json", exclude_unset=True)


def default_out(preset: str, rule: str) -> Path:
    """A new folder for each run, named by preset, rule and time."""
    return Path("runs") / f"{preset}-{rule}-{time.strftime('%Y%m%d-%H%M%S')}"


def _context(context: int | None, max_positions: int | None) -> int | None:
    if context is not None and max_positions is not None and context > max_positions:
        raise invalid_value("--seq-length", context, f"at most --max-position-embeddings, which is {max_positions}")
    return context if context is not None else max_positions


def _offload(
    states: str | None, ratio: str | None, placement: str | None, delayed_update: bool, file_config: Mapping[str, Any]
) -> dict[str, Any]:
    """Settings of the optimizer state, from the command line or from the config file."""
    offload = (file_config.get("zero_optimization") or {}).get("offload_optimizer") or {}
    chosen_ratio, end = _ratio(ratio, placement, offload)
    delayed = only_one("--delayed-update", delayed_update or None, offload, "delayed_update")
    return {
        "states": only_one("--states", states, offload, "states") or offload.get("states", "auto"),
        "ratio": chosen_ratio,
        "placement": end,
        "delayed_update": bool(delayed or offload.get("delayed_update")),
    }


def _ratio(ratio: str | None, placement: str | None, offload: Mapping[str, Any]) -> tuple[float | str, str]:
    """The share of the state on the host and the end of the model that stays on the GPU, from the command line or the
    config file."""
    asked = only_one("--ratio", parse_ratio(ratio), offload, "ratio")
    end = only_one("--placement", placement, offload, "placement")
    if offload.get("device") == "none":  # then all state is on the GPU
        return only_one("--ratio", asked, offload, "device") or 0.0, end or "auto"
    return offload.get("ratio", 1.0) if asked is None else asked, end or offload.get("placement", "auto")


def _batch(
    batch_size: int | None, accumulation: int | None, file_config: Mapping[str, Any], default: int, world: int
) -> tuple[int, int]:
    """Sequences in a micro-batch of a rank and micro-batches in a step, from the command line or the config file."""
    keys = BATCH_KEYS
    named = {key: file_config[key] for key in keys if file_config.get(key) not in (None, "auto")}
    for option, value, key in (("--batch-size", batch_size, keys[1]), ("--accumulation", accumulation, keys[2])):
        if value is not None and value < 1:
            raise invalid_value(option, value, "a whole number >= 1")
        if value is not None and named.setdefault(key, value) != value:
            raise invalid_value(option, value, [named[key]], f"The config file sets {key!r} to this value.")
    if keys[0] not in named:
        named.setdefault(keys[1], default)
        named.setdefault(keys[2], 1)
    elif len(named) == 1 and named[keys[0]] % (default * world) == 0:
        named[keys[1]] = default  # a large batch is split into micro-batches of the default size
    batch = resolve_batch(load_config(named), world_size=world)
    return batch.micro_batch_size, batch.accumulation_steps


def _precision(precision: str | None, fp16: bool, bf16: bool, file_config: Mapping[str, Any]) -> str:
    sections = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
    in_file = [
        name
        for key, name in sections.items()
        if isinstance(file_config.get(key), dict) and file_config[key].get("enabled")
    ]
    asked = {name for name, given in (("fp16", fp16), ("bf16", bf16), (precision, precision is not None)) if given}
    if len(asked | set(in_file)) > 1:
        named = sorted(map(str, asked | set(in_file)))
        remedy = "The options --precision, --fp16 and --bf16 and the config file must name the same type."
        raise invalid_value("--precision", named, "a single type", remedy)
    found = next(iter(asked | set(in_file)), None)
    return found or ("bf16" if torch.cuda.is_available() else "fp32")
