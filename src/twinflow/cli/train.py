"""`twinflow train`: pretrains a GPT on this machine with the optimizer on the host, and writes a report."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console

from twinflow.cli import check_whole, option
from twinflow.cli.outcome import EXIT_CODES, print_header, show
from twinflow.cli.ranks import USER_ERRORS, Ranks, join
from twinflow.cli.run import prepare, run_training
from twinflow.cli.settings import (
    BATCH_KEYS,
    TrainSettings,
    check_layout,
    choose_shape,
    default_lr,
    is_on,
    only_one,
    parse_bytes,
    parse_ratio,
    read_config,
    rule_params,
    with_axes,
)
from twinflow.config import load_config, resolve_batch
from twinflow.errors import invalid_value
from twinflow.models.gpt import PRESET_BATCH
from twinflow.native import get_threads
from twinflow.rules import RULES

_DATA = ("data", "json_key", "vocab_size", "tokenizer", "seed")
_AS_GIVEN = ("steps", *_DATA, "valid_every", "save", "save_every", "resume", "trace")  # options that need no default


@dataclass(frozen=True)
class TrainOptions:
    """The command line options of `twinflow train`."""

    preset: str | None = option(None, "Model: tiny, small, gpt-350m, gpt2-1.5b, gpt2-10b or gpt2-13b.  [default: tiny]")
    num_layers: int | None = option(None, "Number of transformer blocks.")
    hidden: int | None = option(None, "Width of the model.", "--hidden-size")
    num_heads: int | None = option(None, "Number of attention heads.", "--num-attention-heads")
    vocab_size: int | None = option(
        None, "Size of the vocabulary. Default: the size that the preset and the tokenizer need."
    )
    context: int | None = option(None, "Tokens in a sequence. Default: as in the preset.", "--seq-length --context")
    checkpoint_activations: bool | None = option(
        None,
        "Keep only the input of each block and recompute the other activations in backward. "
        "Default: on for models of width 1600 and more.",
        "--checkpoint-activations/--no-checkpoint-activations",
    )
    steps: int = option(800, "Number of training steps.", "--steps --train-iters")
    batch_size: int | None = option(
        None,
        "Sequences in a micro-batch of each model replica. Default: as in the preset.",
        "--batch-size --micro-batch-size",
    )
    accumulation: int | None = option(None, "Micro-batches in a step.  [default: 1]")
    lr: float | None = option(None, "Peak learning rate. Default: depends on the rule and the model size.")
    warmup: int | None = option(None, "Steps of linear warmup. Default: 5% of the steps.", "--warmup --lr-warmup-iters")
    weight_decay: float | None = option(None, "Weight decay. Default: depends on the rule.")
    grad_clip: float | None = option(
        None, "Largest gradient norm. 0 turns clipping off.  [default: 1]", "--grad-clip --clip-grad"
    )
    rule: str | None = option(None, f"Update rule: {', '.join(RULES)}.  [default: adamw]")
    states: str | None = option(
        None,
        "Format of optimizer state: fp32, bf16, int8 (adamw and adam), or auto: the widest that fits.  [default: auto]",
    )
    ratio: str | None = option(
        None,
        "Share of the optimizer state on the host, 0 to 1, or auto: chosen by twinflow after some steps.  [default: 1]",
    )
    placement: str | None = option(
        None, "End of the model whose optimizer state stays on the GPU: auto, front or tail."
    )
    delayed_update: bool = option(
        False, "Apply each update one step later, so that no step waits for it.", "--delayed-update"
    )
    precision: str | None = option(
        None, "Data type of the weights: bf16, fp16 or fp32. Default: bf16 on a GPU, else fp32."
    )
    data: str = option(
        "stdlib",
        "Training data: stdlib, a .txt, .jsonl, .bin or .npy file, or a folder of text files.",
        "--data --data-path",
    )
    json_key: str = option("text", "Field of a JSONL line that contains the text.")
    tokenizer: str = option("bytes", "Tokenizer: bytes, or a folder with a Hugging Face tokenizer.json.")
    seed: int = option(0, "Seed of the weights and of the order of the data.")
    valid_every: int = option(
        100,
        "Steps between validations. 0: only before the first and after the last step.",
        "--valid-every --eval-interval",
    )
    save: bool = option(True, "Whether to save checkpoints.", "--save/--no-save")
    save_every: int = option(0, "Steps between checkpoints. 0: only one at the end.", "--save-every --save-interval")
    keep_last: int | None = option(None, "How many checkpoints to keep. Default: 2.")
    resume: bool = option(False, "Continue the run in --out from its last checkpoint.", "--resume")
    gpu_memory: str | None = option(None, "Limit of the GPU memory that the run may use, for example 32GB.")
    threads: int | None = option(None, "CPU threads of each rank. Default: all that this process may use.")
    out: Path | None = option(None, "Folder of the run. Default: a new folder in runs.")
    trace: Path | None = option(None, "Write a timeline of some steps to this file, for Perfetto.")
    config: Path | None = option(
        None, "A DeepSpeed config, JSON or HJSON.", "--deepspeed_config --deepspeed-config --config"
    )
    of_megatron: bool = option(
        False,
        "Options of Megatron. They are accepted and have no effect.",
        "--deepspeed --cpu-optimizer --no-pipeline-parallel",
    )
    tensor_ranks: int | None = option(
        None, "Number of tensor-parallel ranks.", "--model-parallel-size --tensor-model-parallel-size"
    )
    stages: int | None = option(
        None, "Number of pipeline stages.", "--pipeline-parallel-size --pipeline-model-parallel-size"
    )
    pipeline_schedule: str | None = option(None, "Pipeline schedule: gpipe, 1f1b, interleaved or zbv.  [default: 1f1b]")
    max_positions: int | None = option(None, "Same as --seq-length.", "--max-position-embeddings")
    fp16: bool = option(False, "Same as --precision fp16.", "--fp16")
    bf16: bool = option(False, "Same as --precision bf16.", "--bf16")


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
    except USER_ERRORS as error:  # such an error may also occur during training, for example a full disk
        if (text := ranks.message(error)) is not None:
            typer.echo(text, err=True)
        else:
            ranks.after_first()
        raise typer.Exit(1) from None
    if ranks.is_first:
        show(run, outcome, console)
    ranks.leave(outcome.status == "stopped")
    raise typer.Exit(EXIT_CODES[outcome.status])


def make_settings(options: TrainOptions, world: int) -> TrainSettings:
    """The settings of a run, from the command line, the config file and the defaults."""
    file_config = read_config(options.config, "--deepspeed_config")
    file_config = with_axes(file_config, options.stages, options.tensor_ranks, options.pipeline_schedule)
    if options.resume and options.out is None:
        raise invalid_value("--out", None, "the folder of the run to resume", "Example: --resume --out runs/first.")
    context = _context(options.context, options.max_positions)
    by_hand = (options.num_layers, options.hidden, options.num_heads)
    preset, shape = choose_shape(options.preset, *by_hand, context, options.checkpoint_activations)
    rule = only_one("--rule", options.rule, file_config, "optimizer") or "adamw"
    replicas = check_layout(file_config, shape, world)
    batch = _batch(options.batch_size, options.accumulation, file_config, PRESET_BATCH.get(preset, 8), replicas)
    usual, now = rule_params(rule), time.strftime("%Y%m%d-%H%M%S")
    lr = only_one("--lr", options.lr, file_config, "optimizer")
    decay = only_one("--weight-decay", options.weight_decay, file_config, "optimizer")
    clip = only_one("--grad-clip", options.grad_clip, file_config, "gradient_clipping")
    return TrainSettings(
        preset=preset,
        model=shape,
        batch_size=batch[0],
        accumulation=batch[1],
        lr=default_lr(rule, shape) if lr is None else lr,
        warmup=options.steps // 20 if options.warmup is None else options.warmup,
        weight_decay=usual["weight_decay"] if decay is None else decay,
        grad_clip=1.0 if clip is None else clip,
        rule=rule,
        **_offload(options, file_config),
        precision=_precision(options, file_config),
        keep_last=2 if options.keep_last is None else options.keep_last,
        gpu_memory=parse_bytes("--gpu-memory", options.gpu_memory),
        threads=get_threads() if options.threads is None else options.threads,
        out=Path("runs") / f"{preset}-{rule}-{now}" if options.out is None else options.out,
        file_config=file_config,
        world=world,
        **{name: getattr(options, name) for name in _AS_GIVEN},
    )


def _context(context: int | None, max_positions: int | None) -> int | None:
    if context is not None and max_positions is not None and context > max_positions:
        raise invalid_value("--seq-length", context, f"at most {max_positions}, the value of --max-position-embeddings")
    return context if context is not None else max_positions


def _offload(options: TrainOptions, file_config: Mapping[str, Any]) -> dict[str, Any]:
    """Format, placement and delay of the optimizer state, from the command line or from the config file."""
    offload = (file_config.get("zero_optimization") or {}).get("offload_optimizer") or {}
    ratio = only_one("--ratio", parse_ratio(options.ratio), offload, "ratio")
    placement = only_one("--placement", options.placement, offload, "placement")
    if offload.get("device") == "none":  # then all state is on the GPU
        ratio = only_one("--ratio", ratio, offload, "device") or 0.0
        offload = {**offload, "placement": "auto"}
    delayed = only_one("--delayed-update", options.delayed_update or None, offload, "delayed_update")
    return {
        "states": only_one("--states", options.states, offload, "states") or offload.get("states", "auto"),
        "ratio": offload.get("ratio", 1.0) if ratio is None else ratio,
        "placement": placement or offload.get("placement", "auto"),
        "delayed_update": bool(delayed or offload.get("delayed_update")),
    }


def _batch(
    batch_size: int | None, accumulation: int | None, file_config: Mapping[str, Any], default: int, world: int
) -> tuple[int, int]:
    """Sequences in a micro-batch of a rank and micro-batches in a step, from the command line or the config file."""
    keys = BATCH_KEYS
    named = {key: file_config[key] for key in keys if file_config.get(key) not in (None, "auto")}
    for name, value, key in (("--batch-size", batch_size, keys[1]), ("--accumulation", accumulation, keys[2])):
        check_whole(name, value)
        if value is not None and named.setdefault(key, value) != value:
            raise invalid_value(name, value, [named[key]], f"The config file sets {key!r} to this value.")
    if keys[0] not in named:
        named.setdefault(keys[1], default)
        named.setdefault(keys[2], 1)
    elif len(named) == 1 and named[keys[0]] % (default * world) == 0:
        named[keys[1]] = default  # a large batch is split into micro-batches of the default size
    batch = resolve_batch(load_config(named), world_size=world)
    return batch.micro_batch_size, batch.accumulation_steps


def _precision(options: TrainOptions, file_config: Mapping[str, Any]) -> str:
    asked = {name for name in ("fp16", "bf16") if is_on(file_config, name)}
    asked |= {name for name in (options.precision, options.fp16 and "fp16", options.bf16 and "bf16") if name}
    if len(asked) > 1:
        remedy = "The options --precision, --fp16 and --bf16 and the config file must name the same type."
        raise invalid_value("--precision", sorted(asked), "a single type", remedy)
    return asked.pop() if asked else "bf16" if torch.cuda.is_available() else "fp32"
