"""`twinflow train`: pretrain a GPT on this machine, its optimizer on the host, and leave a report."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from twinflow.cli.axes import check_layout, only_one, with_axes
from twinflow.cli.outcome import EXIT_CODES, header_rows, make_report, print_rows, where
from twinflow.cli.ranks import Ranks, join
from twinflow.cli.run import REPORT, Outcome, Run, prepare, run_training
from twinflow.cli.settings import (
    BATCH_KEYS,
    TrainSettings,
    choose_shape,
    default_batch_size,
    default_lr,
    parse_bytes,
    parse_ratio,
    rule_params,
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
        str | None, _option(help="tiny, small, gpt-350m, gpt2-1.5b, gpt2-10b or gpt2-13b.  [default: tiny]")
    ] = None,
    num_layers: Annotated[int | None, _option("--num-layers", help="Blocks.")] = None,
    hidden: Annotated[int | None, _option("--hidden-size", help="Width.")] = None,
    num_heads: Annotated[int | None, _option("--num-attention-heads", help="Heads.")] = None,
    vocab_size: Annotated[
        int | None, _option("--vocab-size", help="Symbols. Default: what preset and tokenizer need.")
    ] = None,
    context: Annotated[
        int | None, _option("--seq-length", "--context", help="Tokens a sequence. Default: the preset's.")
    ] = None,
    checkpoint_activations: Annotated[
        bool | None,
        _option(
            "--checkpoint-activations/--no-checkpoint-activations",
            help="Keep only each block's input, compute the rest again in backward. Default: from width 1600 on.",
        ),
    ] = None,
    steps: Annotated[int, _option("--steps", "--train-iters", help="Training steps.")] = 800,
    batch_size: Annotated[
        int | None,
        _option("--batch-size", "--micro-batch-size", help="Sequences a forward, a replica. Default: the preset's."),
    ] = None,
    accumulation: Annotated[
        int | None, _option("--accumulation", help="Forwards and backwards that make a step.  [default: 1]")
    ] = None,
    lr: Annotated[float | None, _option(help="Peak learning rate. Default: one that suits rule and size.")] = None,
    warmup: Annotated[
        int | None, _option("--warmup", "--lr-warmup-iters", help="Steps of linear warmup. Default: a twentieth.")
    ] = None,
    weight_decay: Annotated[float | None, _option(help="Weight decay. Default: one that suits the rule.")] = None,
    grad_clip: Annotated[
        float | None,
        _option("--grad-clip", "--clip-grad", help="Largest gradient norm; 0 for no clipping.  [default: 1]"),
    ] = None,
    rule: Annotated[str | None, _option(help=f"{', '.join(RULES)}.  [default: adamw]")] = None,
    states: Annotated[
        str | None,
        _option(help="Optimizer state: fp32, bf16, int8 (adamw and adam), or auto: what fits.  [default: auto]"),
    ] = None,
    ratio: Annotated[
        str | None,
        _option(
            "--ratio", help="Share of that state on the host, 0 to 1; auto: chosen after some steps.  [default: 1]"
        ),
    ] = None,
    placement: Annotated[
        str | None,
        _option("--placement", help="The end of the model whose state stays on the GPU: auto, front or tail."),
    ] = None,
    delayed_update: Annotated[
        bool, _option("--delayed-update", help="Apply each update one step later, so that it never holds up a step.")
    ] = False,
    precision: Annotated[
        str | None,
        _option("--precision", help="Of the weights: bf16, fp16 or fp32. Default: bf16 on a GPU, else fp32."),
    ] = None,
    data: Annotated[
        str, _option("--data", "--data-path", help="stdlib, or a .txt, .jsonl, .bin, .npy file or a folder of text.")
    ] = "stdlib",
    json_key: Annotated[str, _option("--json-key", help="The field of a JSONL line that holds its text.")] = "text",
    tokenizer: Annotated[str, _option(help="bytes, or a folder with a Hugging Face tokenizer.json.")] = "bytes",
    seed: Annotated[int, _option(help="Of the weights and of the order of the data.")] = 0,
    valid_every: Annotated[
        int,
        _option("--valid-every", "--eval-interval", help="Steps between validations; 0: at start and end."),
    ] = 100,
    save: Annotated[bool, _option("--save/--no-save", help="Whether to keep checkpoints at all.")] = True,
    save_every: Annotated[
        int,
        _option("--save-every", "--save-interval", help="Steps between checkpoints; 0: one at the end."),
    ] = 0,
    keep_last: Annotated[int | None, _option(help="Checkpoints to keep. Default: 2.")] = None,
    resume: Annotated[bool, _option("--resume", help="Go on with the run in --out, from its last checkpoint.")] = False,
    gpu_memory: Annotated[
        str | None, _option("--gpu-memory", help="Use no more of the GPU than this, like 32GB.")
    ] = None,
    threads: Annotated[
        int | None, _option(help="CPU threads, of each rank. Default: all this process may use.")
    ] = None,
    out: Annotated[Path | None, _option(help="Folder of the run. Default: a new one in runs.")] = None,
    trace: Annotated[
        Path | None, _option("--trace", help="Write the timeline of some steps here, for Perfetto.")
    ] = None,
    config: Annotated[
        Path | None,
        _option("--deepspeed_config", "--deepspeed-config", "--config", help="A DeepSpeed config, JSON or HJSON."),
    ] = None,
    of_megatron: Annotated[
        bool,
        _option("--deepspeed", "--cpu-optimizer", "--no-pipeline-parallel", help="Of Megatron's: no effect."),
    ] = False,
    tensor_ranks: Annotated[
        int | None,
        _option("--model-parallel-size", "--tensor-model-parallel-size", help="Ranks that share each tensor."),
    ] = None,
    stages: Annotated[
        int | None,
        _option("--pipeline-parallel-size", "--pipeline-model-parallel-size", help="Ranks that share the layers."),
    ] = None,
    pipeline_schedule: Annotated[
        str | None, _option("--pipeline-schedule", help="gpipe, 1f1b, interleaved or zbv.  [default: 1f1b]")
    ] = None,
    max_positions: Annotated[int | None, _option("--max-position-embeddings", help="The same as --seq-length.")] = None,
    fp16: Annotated[bool, _option("--fp16", help="--precision fp16.")] = False,
    bf16: Annotated[bool, _option("--bf16", help="--precision bf16.")] = False,
) -> None:
    """Pretrain a GPT with the optimizer on the host, on a GPU where there is one, and write a report page.

    Under `twinflow launch --module twinflow train`, torchrun or srun all ranks train it together.
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
    except (ValueError, OSError) as error:  # later on: a token outside the vocabulary, a disk without room for a line
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
    """The page, and the last lines."""
    report = make_report(run, outcome)
    report = replace(report, settings=[*run.rank_rows, *report.settings])
    rows, path = outcome.numbers, run.settings.out / REPORT
    try:
        write_report(path, report)
        rows.append(("report", str(path)))
    except OSError as error:  # a disk that is full
        typer.echo(f"warning: no report: {error}", err=True)
    print_rows(console, outcome.message, rows)
    if outcome.status == "stopped" and run.ranks.world > 1:
        typer.echo(f"error: {outcome.message}", err=True)  # what the launcher names as the cause


def read_config(path: Path | None) -> dict[str, Any]:
    """What a config file says, checked, in today's spellings."""
    if path is None:
        return {}
    if not path.is_file():
        raise invalid_value("--deepspeed_config", str(path), "a file that is there")
    return load_config(path).model_dump(mode="json", exclude_unset=True)


def default_out(preset: str, rule: str) -> Path:
    """A folder of its own for every run."""
    return Path("runs") / f"{preset}-{rule}-{time.strftime('%Y%m%d-%H%M%S')}"


def _context(context: int | None, max_positions: int | None) -> int | None:
    if context is not None and max_positions is not None and context > max_positions:
        raise invalid_value("--seq-length", context, f"at most --max-position-embeddings, which is {max_positions}")
    return context if context is not None else max_positions


def _offload(
    states: str | None, ratio: str | None, placement: str | None, delayed_update: bool, file_config: Mapping[str, Any]
) -> dict[str, Any]:
    """Settings of the optimizer's state, from the command line or from the file."""
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
    """The share of the state on the host and the end that is not, from the command line or from the file."""
    asked = only_one("--ratio", parse_ratio(ratio), offload, "ratio")
    end = only_one("--placement", placement, offload, "placement")
    if offload.get("device") == "none":  # all state is on the GPU, whatever else the file says
        return only_one("--ratio", asked, offload, "device") or 0.0, end or "auto"
    return offload.get("ratio", 1.0) if asked is None else asked, end or offload.get("placement", "auto")


def _batch(
    batch_size: int | None, accumulation: int | None, file_config: Mapping[str, Any], default: int, world: int
) -> tuple[int, int]:
    """Sequences of a rank's micro-batch and micro-batches of a step, from the command line or from the file."""
    keys = BATCH_KEYS
    named = {key: file_config[key] for key in keys if file_config.get(key) not in (None, "auto")}
    for option, value, key in (("--batch-size", batch_size, keys[1]), ("--accumulation", accumulation, keys[2])):
        if value is not None and value < 1:
            raise invalid_value(option, value, "a whole number >= 1")
        if value is not None and named.setdefault(key, value) != value:
            raise invalid_value(option, value, [named[key]], f"The config file says so in {key!r}.")
    if keys[0] not in named:
        named.setdefault(keys[1], default)
        named.setdefault(keys[2], 1)
    elif len(named) == 1 and named[keys[0]] % (default * world) == 0:
        named[keys[1]] = default  # a large batch is made of micro-batches that fit
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
        raise invalid_value("--precision", sorted(map(str, asked | set(in_file))), "one of them")
    found = next(iter(asked | set(in_file)), None)
    return found or ("bf16" if torch.cuda.is_available() else "fp32")
