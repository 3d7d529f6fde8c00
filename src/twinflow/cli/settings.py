# SPDX-License-Identifier: Apache-2.0
"""Settings of `twinflow train`: the options of the command line, their defaults and checks, and the engine's config.

Pipeline and tensor ranks come from the options or the config file. They are stored in the sections `pipeline` and
`tensor_parallel` of the config. Batches are distributed over the replicas of the model, so all ranks of a replica get
the same tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch

from twinflow.build_parallel import axes_of as checked_axes
from twinflow.cli import MAX_COUNT, check_whole, option
from twinflow.config import Axes, compression_choice, load_config, optimizer_choice, resolve_axes, resolve_batch
from twinflow.config.fields import Shown
from twinflow.conflicts import refuse
from twinflow.errors import incompatible, invalid_value, unusable_path
from twinflow.launch.environment import RankEnvironment, is_elastic
from twinflow.models.gpt import GPT, PRESET_BATCH, PRESETS, RECOMPUTE, GPTConfig
from twinflow.native import get_threads
from twinflow.native.threads import check_threads
from twinflow.offload.placement import PLACEMENTS
from twinflow.planner.formats import STATES
from twinflow.rules import ALL_RULES, RULES
from twinflow.rules.segment import check_master

SECTIONS: Final = ("pipeline", "tensor_parallel")
_FASTER: Final = (
    "compile",
    "float8",
)  # sections that a resumed run may change, as it may change --compile and --float8
SCHEDULES: Final = ("gpipe", "1f1b", "interleaved", "zbv")
_STAGES, _TENSOR = "--pipeline-parallel-size", "--model-parallel-size"
MIN_LR_SHARE: Final = 0.1  # learning rate at the end of the cosine schedule, as a share of the peak
PRECISIONS: Final = ("bf16", "fp16", "fp32")
RANKS_STAGE: Final = 2  # default ZeRO stage of several ranks
BATCH_KEYS: Final = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
GPT2: Final = "gpt2-1.5b"  # the preset whose vocabulary and context are used if options give the other sizes
# Settings that must not change when a run is resumed, besides the model and the config file. The checkpoint's lr and
# weight_decay would override new values.
KEPT: Final = ("rule", "lr", "weight_decay", "data", "json_key", "tokenizer", "seed", "precision")
SEQUENCES: Final = "The number of sequences in a step (--batch-size x --accumulation x replicas)"
SHAPE_OPTIONS: Final = {"hidden": "--hidden-size", "num_heads": "--num-attention-heads", "context": "--seq-length"}
# Largest sizes of a model. Larger ones do not fit anywhere, and their memory would take minutes to compute.
MAX_SIZES: Final = {"num_layers": 10_000, "hidden": 2**20, "num_heads": 2**20, "context": 2**27, "vocab_size": 2**31}
MAX_SEED: Final = 2**32 - 1  # of NumPy's generator
MAX_BATCH: Final = 2**31
LARGE_LR: Final = 1.5e-4  # for the GPT-2 shapes, which diverge at the learning rate of a tiny model
_DATA: Final = ("data", "json_key", "vocab_size", "tokenizer", "seed")
# Options that become settings without change.
_AS_GIVEN: Final = (
    "steps",
    *_DATA,
    "valid_every",
    "save",
    "save_every",
    "resume",
    "trace",
    "verify_saves",
    "global_batch",
)


@dataclass(frozen=True)
class TrainOptions:
    preset: str | None = option(
        None, "Model: tiny, tiny-moe, small, gpt-350m, gpt2-1.5b, gpt2-10b or gpt2-13b.  [default: tiny]"
    )
    num_layers: int | None = option(None, "Number of transformer blocks.")
    hidden: int | None = option(None, "Width of the model.", "--hidden-size")
    num_heads: int | None = option(None, "Number of attention heads.", "--num-attention-heads")
    vocab_size: int | None = option(
        None, "Size of the vocabulary. Default: the size that the preset and the tokenizer need."
    )
    context: int | None = option(None, "Tokens in a sequence. Default: as in the preset.", "--seq-length --context")
    recompute: str | None = option(
        None,
        "Activations that backward computes again: none, selective (all but matrix products and attention), full "
        "(whole blocks), or a number of whole blocks beside selective ones. Default: as little as the memory allows.",
    )
    checkpoint_activations: bool | None = option(
        None,
        "Same as --recompute full, or --recompute none.",
        "--checkpoint-activations/--no-checkpoint-activations",
    )
    compile: bool | None = option(
        None,
        "Compile each block with torch.compile.  [default: only with --float8]",
        "--compile/--no-compile",
    )
    float8: bool = option(
        False, "Compute the linear layers of the blocks in float8, on a GPU that can. Needs torchao.", "--float8"
    )
    steps: int = option(800, "Number of training steps.", "--steps --train-iters")
    batch_size: int | None = option(
        None,
        "Sequences in a micro-batch of each model replica. Default: as in the preset.",
        "--batch-size --micro-batch-size",
    )
    accumulation: int | None = option(None, "Micro-batches in a step.  [default: 1]")
    global_batch: int | None = option(
        None,
        "Sequences in a step, on all ranks. --accumulation follows from it. --batch-size is the largest micro-batch.",
        "--global-batch-size",
    )
    lr: float | None = option(None, "Peak learning rate. Default: depends on the rule and the model size.")
    warmup: int | None = option(None, "Steps of linear warmup. Default: 5% of the steps.", "--warmup --lr-warmup-iters")
    weight_decay: float | None = option(None, "Weight decay. Default: depends on the rule.")
    grad_clip: float | None = option(
        None, "Largest gradient norm. 0 turns clipping off.  [default: 1]", "--grad-clip --clip-grad"
    )
    rule: str | None = option(None, f"Update rule: {', '.join(ALL_RULES)}.  [default: adamw]")
    states: str | None = option(
        None,
        "Format of optimizer state: fp32, bf16, int8 or 4bit (both: adamw and adam), or auto: the widest of the first "
        "three that fits.  [default: auto]",
    )
    master: str | None = option(
        None,
        "fp32, or none: bf16 weights have no fp32 master and are rounded stochastically. This changes results.  "
        "[default: fp32]",
    )
    ratio: str | None = option(
        None,
        "Share of the optimizer state on the host, 0 to 1, or auto: the fastest, chosen in the first steps. Default: "
        "auto if possible, else 1.",
    )
    nvme_path: Path | None = option(
        None,
        "Keep the optimizer state that would be on the host in a file in this folder, which is on a local disk.",
        "--nvme-path",
    )
    placement: str | None = option(None, "Layers whose optimizer state stays on the GPU: auto, front, tail or spread.")
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
    keep_last: int | None = option(None, "How many checkpoints to keep. Default: 2.", "--keep-last --keep")
    verify_saves: bool = option(
        False, "Read each checkpoint after it is written and compare its checksums.", "--verify-saves"
    )
    resume: bool = option(
        False, "Continue the run in --out from its last checkpoint. If there is no such folder, begin it.", "--resume"
    )
    gpu_memory: str | None = option(None, "Limit of the GPU memory that the run may use, for example 32GB.")
    ram: str | None = option(None, "Limit of the host memory that the run may use, for example 64GB.")
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


@dataclass(frozen=True)
class TrainSettings:
    """Settings of a run, with all defaults filled in."""

    preset: str
    model: GPTConfig
    steps: int
    batch_size: int  # sequences in a micro-batch of a replica
    accumulation: int  # micro-batches in a step
    lr: float
    warmup: int
    weight_decay: float
    grad_clip: float  # 0: no clipping
    rule: str
    states: str
    master: str
    ratio: float | str  # share of the optimizer state on the host, or "auto"
    nvme_path: Path | None  # folder for this share on a disk; None: it is in host memory
    placement: str
    delayed_update: bool
    precision: str
    data: str
    json_key: str
    vocab_size: int | None
    tokenizer: str
    seed: int
    valid_every: int  # 0: only before the first step and after the last
    save: bool  # whether checkpoints are saved
    save_every: int  # 0: only at the end
    keep_last: int | None
    gpu_memory: int | None  # limit in bytes
    threads: int
    out: Path
    resume: bool
    trace: Path | None
    file_config: Mapping[str, Any]  # from --deepspeed_config, with the pipeline and tensor ranks of the command line
    world: int = 1  # number of ranks
    ram: int | None = None  # limit of host memory in bytes
    global_batch: int | None = None  # sequences in a step; None: batch_size x accumulation x replicas
    verify_saves: bool = False
    recompute: str | int = "auto"  # "auto", or `GPTConfig.recompute`
    compile: bool = False  # compile the blocks
    float8: bool = False  # linear layers of the blocks in float8

    @property
    def context(self) -> int:
        return self.model.context

    @cached_property
    def replicas(self) -> int:
        return num_replicas(self.file_config, self.world)

    @property
    def sequences(self) -> int:
        """Sequences in a step, on all ranks."""
        return self.global_batch or self.batch_size * self.accumulation * self.replicas

    def micro_sizes(self, replica: int) -> list[int]:
        """Sequences in each micro-batch of a replica. They are all `batch_size` unless --global-batch-size is not a
        multiple of it. A size may then be 0.
        """
        share = _part(self.sequences, self.replicas, replica)
        return [_part(share, self.accumulation, part) for part in range(self.accumulation)]

    @property
    def tokens(self) -> int:
        """Tokens in a step, on all ranks."""
        return self.sequences * self.context


def _part(total: int, num_parts: int, index: int) -> int:
    """The size of a part if `total` is divided as evenly as possible and the first parts are the largest."""
    return total // num_parts + int(index < total % num_parts)


def make_settings(options: TrainOptions, world: int) -> TrainSettings:
    """The settings of a run, from the command line, the config file and the defaults."""
    if is_elastic():
        check_elastic(options)
    file_config = read_config(options.config, "--deepspeed_config")
    file_config = with_axes(file_config, options.stages, options.tensor_ranks, options.pipeline_schedule)
    if options.resume and options.out is None:
        raise ValueError("--resume needs the folder of the run. Give it with --out: --resume --out runs/first.")
    preset, shape = choose_shape(options)
    recompute = parse_recompute(options)
    if recompute == "auto" and recomputes(file_config):
        recompute = "none"  # the engine recomputes blocks, and not the model
    rule = only_one("--rule", options.rule, file_config, "optimizer") or "adamw"
    replicas = check_layout(file_config, shape, world)
    usual_size = PRESET_BATCH.get(preset, 8)
    if options.global_batch is not None:
        batch = _global_batch(options, file_config, usual_size, replicas)
    else:
        batch = _batch(options.batch_size, options.accumulation, file_config, usual_size, replicas)
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
        ram=parse_bytes("--ram", options.ram),
        threads=get_threads() if options.threads is None else options.threads,
        out=Path("runs") / f"{preset}-{rule}-{now}" if options.out is None else options.out,
        file_config=file_config,
        world=world,
        recompute=recompute,
        compile=_compiles(options, file_config),
        float8=bool(only_one("--float8", options.float8 or None, file_config, "float8")),
        **{name: getattr(options, name) for name in _AS_GIVEN},
    )


def parse_recompute(options: TrainOptions) -> str | int:
    """Parse --recompute and --checkpoint-activations. "auto": none of them is given."""
    text, flag = options.recompute, options.checkpoint_activations
    if text is not None and flag is not None:
        other = "--checkpoint-activations" if flag else "--no-checkpoint-activations"
        raise incompatible(f"--recompute {text}", other, "both set the same value", "Give only one of them.")
    if text is None:
        return "auto" if flag is None else "full" if flag else "none"
    if text in RECOMPUTE or text == "auto":
        return text
    if not text.isdecimal() or len(text) > len(str(MAX_SIZES["num_layers"])):
        raise invalid_value("--recompute", text, f"{', '.join(RECOMPUTE)}, auto, or a number of blocks")
    return int(text)


def recomputes(config: Mapping[str, Any]) -> bool:
    """Whether a config turns activation checkpointing on, with which the engine recomputes whole blocks."""
    section = load_config({"activation_checkpointing": config.get("activation_checkpointing") or {}})
    return section.activation_checkpointing.is_asked_for


def _compiles(options: TrainOptions, file_config: Mapping[str, Any]) -> bool:
    """Whether the command line asks for compiled blocks. Float8 without them is slower than bf16."""
    section = file_config.get("compile") or {}
    only_one("--compile" if options.compile else "--no-compile", options.compile, section, "blocks")
    return options.float8 and "blocks" not in section if options.compile is None else options.compile


def _offload(options: TrainOptions, file_config: Mapping[str, Any]) -> dict[str, Any]:
    """Format, ratio, placement and delay of the optimizer state, from the command line or from the config file."""
    offload = (file_config.get("zero_optimization") or {}).get("offload_optimizer") or {}
    ratio = only_one("--ratio", parse_ratio(options.ratio), offload, "ratio")
    placement = only_one("--placement", options.placement, offload, "placement")
    only_one("--nvme-path", options.nvme_path, offload, "device")
    path = only_one("--nvme-path", options.nvme_path, offload, "nvme_path")
    if offload.get("device") == "nvme":
        path = Path(offload["nvme_path"])
    if offload.get("device") == "none":  # then all state is on the GPU
        ratio = only_one("--ratio", ratio, offload, "device") or 0.0
        offload = {**offload, "placement": "auto"}
    usual = 1.0 if path is not None else _default_ratio(file_config, placement)
    delayed = only_one("--delayed-update", options.delayed_update or None, offload, "delayed_update")
    return {
        "states": only_one("--states", options.states, offload, "states") or offload.get("states", "auto"),
        "master": only_one("--master", options.master, offload, "master") or offload.get("master", "fp32"),
        "ratio": offload.get("ratio", usual) if ratio is None else ratio,
        "nvme_path": path,
        "placement": placement or offload.get("placement", "auto"),
        "delayed_update": bool(delayed or offload.get("delayed_update")),
    }


def _default_ratio(file_config: Mapping[str, Any], placement: str | None) -> float | str:
    """The ratio if neither the command line nor the config file has one.

    It is TwinOptimizer's default, "auto" where that is possible. A file with `offload_optimizer` has DeepSpeed's, 1.
    """
    config = load_config(file_config)
    can_choose = (
        torch.cuda.is_available()
        and config.zero_optimization.offload_optimizer is None
        and placement in (None, "auto")
        and axes_of(file_config).pipe == 1
        and compression_choice(config) is None
        and (config.optimizer is None or optimizer_choice(config)[0] in ALL_RULES)
    )
    return "auto" if can_choose else 1.0


def check_elastic(options: TrainOptions) -> None:
    """Raise a ValueError if a run could not go on with another number of ranks."""
    missing = [name for name, is_given in (("--resume", options.resume), ("--out", options.out)) if not is_given]
    missing += ["--global-batch-size"] if options.global_batch is None else []
    if missing or not options.save:
        wrong = "--no-save" if not missing else f"no {' and no '.join(missing)}"
        raise incompatible(
            f"`twinflow train` with {wrong}",
            "an elastic run (`twinflow launch --max-nodes`)",
            "new ranks go on from the last checkpoint with the same number of sequences in a step",
            "Give --resume --out FOLDER --global-batch-size N --save-every N, from the first start on.",
        )


def _batch(
    batch_size: int | None, accumulation: int | None, file_config: Mapping[str, Any], default: int, world: int
) -> tuple[int, int]:
    """Sequences in a micro-batch of a replica and micro-batches in a step, from command line or config file."""
    keys = BATCH_KEYS
    named = {key: file_config[key] for key in keys if file_config.get(key) not in (None, "auto")}
    for name, value, key in (("--batch-size", batch_size, keys[1]), ("--accumulation", accumulation, keys[2])):
        check_whole(name, value, most=MAX_BATCH)
        if value is not None and named.setdefault(key, value) != value:
            remedy = f"The config file sets {key!r} to {named[key]}. Leave {name} out."
            raise invalid_value(name, value, [named[key]], remedy)
    if keys[0] not in named:
        named.setdefault(keys[1], default)
        named.setdefault(keys[2], 1)
    elif len(named) == 1 and named[keys[0]] % (default * world) == 0:
        named[keys[1]] = default  # a large batch is split into micro-batches of the default size
    batch = resolve_batch(load_config(named), world_size=world)
    return batch.micro_batch_size, batch.accumulation_steps


def _global_batch(
    options: TrainOptions, file_config: Mapping[str, Any], default: int, replicas: int
) -> tuple[int, int]:
    """The same as `_batch` with --global-batch-size, which any number of replicas can share."""
    total = options.global_batch
    assert total is not None
    check_whole("--global-batch-size", total)
    check_whole("--batch-size", options.batch_size)
    name = f"--global-batch-size {total}"
    if options.accumulation is not None:
        reason = "the number of micro-batches follows from it"
        raise incompatible(name, f"--accumulation {options.accumulation}", reason, "Leave --accumulation out.")
    for key in BATCH_KEYS:
        only_one("--global-batch-size", total, file_config, key)
    if total < replicas:
        raise invalid_value("--global-batch-size", total, f"at least {replicas}, the number of model replicas")
    size = default if options.batch_size is None else options.batch_size
    largest = _part(total, replicas, 0)
    accumulation = -(-largest // size)
    if axes_of(file_config).pipe > 1 and total % (replicas * accumulation):
        expected = f"a multiple of {replicas * accumulation}, the number of micro-batches of all replicas"
        remedy = f"The micro-batches of a pipeline have equal sizes, up to --batch-size {size}."
        raise invalid_value("--global-batch-size", total, expected, remedy)
    return -(-largest // accumulation), accumulation


def _precision(options: TrainOptions, file_config: Mapping[str, Any]) -> str:
    asked = {name for name in ("fp16", "bf16") if is_on(file_config, name)}
    asked |= {name for name in (options.precision, options.fp16 and "fp16", options.bf16 and "bf16") if name}
    if len(asked) > 1:
        raise ValueError(
            f"The precisions {' and '.join(sorted(asked))} are given, but a run has one precision. Give the same one "
            "in --precision, --fp16, --bf16 and the config file, or in only one of these places."
        )
    return asked.pop() if asked else "bf16" if torch.cuda.is_available() else "fp32"


def only_one(name: str, value: Any, file_config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a command line option. Raises a ValueError if the config file sets the same value."""
    if value is not None and key in file_config:
        remedy = f"Remove {name} or the key in the config file."
        raise incompatible(f"{name} {value}", f"{key!r} in the config file", "only one may set this value", remedy)
    return value


def with_axes(
    file_config: Mapping[str, Any], stages: int | None, tensor: int | None, schedule: str | None
) -> dict[str, Any]:
    """The config of the file with the pipeline and tensor ranks of the command line."""
    check_whole(_STAGES, stages)
    check_whole(_TENSOR, tensor)
    if schedule not in (None, *SCHEDULES):
        raise invalid_value("--pipeline-schedule", schedule, SCHEDULES)
    only_one(_TENSOR, tensor, file_config.get("tensor_parallel") or {}, "tp")
    found = dict(file_config)
    for section, key, name, value in (
        ("pipeline", "stages", _STAGES, stages),
        ("pipeline", "schedule", "--pipeline-schedule", schedule),
        ("tensor_parallel", "autotp_size", _TENSOR, tensor),
    ):
        only_one(name, value, file_config.get(section) or {}, key)
        if value not in (None, 1):  # 1 is the default
            found[section] = {**(found.get(section) or {}), key: value}
    return found


def axes_of(config: Mapping[str, Any]) -> Axes:
    """Pipeline and tensor ranks in a config."""
    asked = {key: config[key] for key in SECTIONS if config.get(key)}
    return resolve_axes(load_config(asked)) if asked else Axes(1, 1)


def num_replicas(config: Mapping[str, Any], world: int) -> int:
    """Copies of the model. Each takes a part of every batch."""
    axes = axes_of(config)
    return max(1, world // (axes.pipe * axes.model))


def describe_layout(config: Mapping[str, Any], world: int) -> str:
    """The numbers of pipeline, tensor and data ranks as text. Empty if every rank has the whole model."""
    axes, (schedule, _) = axes_of(config), _schedule(config)
    named = [(f"pipeline {axes.pipe} ({schedule})", axes.pipe), (f"tensor {axes.model}", axes.model)]
    parts = [text for text, size in named if size > 1]
    return " x ".join([*parts, f"data {num_replicas(config, world)}"]) if parts else ""


def check_layout(config: Mapping[str, Any], shape: GPTConfig, world: int) -> int:
    """Return the number of replicas. Raises a ValueError if pipeline and tensor ranks cannot divide ranks, heads or
    layers.
    """
    axes, (schedule, num_chunks) = axes_of(config), _schedule(config)
    parts = axes.pipe * axes.model
    if parts > 1 and world % parts:
        options = f"{_STAGES} {axes.pipe} and {_TENSOR} {axes.model}"
        allowed = f"a multiple of {parts}, because {options} divide a model over {parts} ranks"
        remedy = f"Start {parts} processes with `twinflow launch --num_gpus {parts}`, or reduce one of the two options."
        raise invalid_value("The number of ranks", world, allowed, remedy)
    if shape.num_heads % axes.model and not (config.get("tensor_parallel") or {}).get("plan"):
        raise invalid_value("--num-attention-heads", shape.num_heads, f"a multiple of {_TENSOR}, which is {axes.model}")
    num_stages = axes.pipe * num_chunks
    if axes.pipe > 1 and shape.num_layers < num_stages:
        each = f" ({schedule}: {num_chunks} on each of {axes.pipe} ranks)" if num_chunks > 1 else ""
        allowed = f"at least {num_stages}, the number of stages of the pipeline{each}"
        remedy = "Use more layers or fewer stages: every stage needs at least one layer."
        raise invalid_value("--num-layers", shape.num_layers, allowed, remedy)
    return world // parts


def check_vocabulary(file_config: Mapping[str, Any], shape: GPTConfig) -> None:
    """Raise a ValueError if the vocabulary is not divisible by the number of tensor ranks."""
    axes = axes_of(file_config)
    if shape.vocab_size % axes.model and not (file_config.get("tensor_parallel") or {}).get("plan"):
        padded = -(-shape.vocab_size // axes.model) * axes.model
        remedy = f"Use --vocab-size {padded}, which adds symbols that are never used."
        allowed = f"a multiple of {_TENSOR}, which is {axes.model}"
        raise invalid_value("The vocabulary size", shape.vocab_size, allowed, remedy)


def check_combination(config: Mapping[str, Any], shape: GPTConfig, here: RankEnvironment) -> None:
    """Raise the error of `initialize` for a conflict with pipeline or tensor ranks before the model is built."""
    axes = axes_of(config)
    if axes.pipe * axes.model > 1:
        with torch.device("meta"):
            model = GPT(shape)
        checked_axes(load_config(config), model, here, None)


def _schedule(config: Mapping[str, Any]) -> tuple[str, int]:
    """Name of the pipeline schedule, and number of stages of each rank."""
    section = config.get("pipeline") or {}
    name = section.get("schedule") or "1f1b"
    return name, (section.get("chunks") or 2) if name == "interleaved" else 2 if name == "zbv" else 1


def option_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_masters(master: str, precision: str) -> None:
    """Raise a ValueError if weights of this precision cannot have this --master."""
    if check_master(master) == "none" and precision != "bf16":
        raise incompatible(
            "--master none",
            f"--precision {precision}",
            "only bf16 weights can be trained without an fp32 copy",
            "Use --precision bf16.",
        )


def check_settings(settings: TrainSettings) -> None:
    """Raise a ValueError that names the option if a value cannot work."""
    if settings.out.exists() and not settings.out.is_dir():
        raise invalid_value("--out", str(settings.out), "a folder", "This is a file. Choose another --out.")
    for name in ("steps", "keep_last"):
        check_whole(option_name(name), getattr(settings, name))
    for name in ("batch_size", "accumulation"):
        check_whole(option_name(name), getattr(settings, name), most=MAX_BATCH)
    for name in ("warmup", "valid_every", "save_every"):
        check_whole(option_name(name), getattr(settings, name), least=0)
    check_whole("--seed", settings.seed, least=0, most=MAX_SEED)
    if settings.warmup > settings.steps:
        remedy = "Use a shorter --warmup, or more --steps."
        raise invalid_value("--warmup", settings.warmup, f"at most {settings.steps}, the value of --steps", remedy)
    for name in ("lr", "weight_decay", "grad_clip"):
        value = getattr(settings, name)
        if not 0.0 <= value < math.inf:
            raise invalid_value(option_name(name), value, "a finite number >= 0")
    if settings.precision not in PRECISIONS:
        raise invalid_value("--precision", settings.precision, PRECISIONS)
    if settings.gpu_memory is not None and not torch.cuda.is_available():
        raise ValueError("--gpu-memory is given, but this machine has no GPU. Leave --gpu-memory out.")
    check_threads(settings.threads, "--threads")
    formats = ("auto", *ALL_RULES[settings.rule].formats)
    if settings.states not in formats:
        raise invalid_value("--states", settings.states, formats, f"These are the formats of --rule {settings.rule}.")
    check_masters(settings.master, settings.precision)
    if settings.nvme_path is not None:
        check_disk(settings)
    if settings.placement not in PLACEMENTS:
        raise invalid_value("--placement", settings.placement, PLACEMENTS)
    axes = axes_of(settings.file_config)
    if axes.pipe * axes.model > 1 and settings.recompute not in ("auto", "none", "full"):
        raise incompatible(
            f"--recompute {settings.recompute}",
            "pipeline or tensor ranks",
            "the part of a rank is recomputed as a whole or not at all",
            "Use --recompute none or --recompute full.",
        )


def check_disk(settings: TrainSettings) -> None:
    """Raise a ValueError that names what cannot be combined with state on a disk, and create the folder."""
    assert settings.nvme_path is not None
    section = settings.file_config.get("optimizer")
    rule = settings.rule if section is None else optimizer_choice(load_config({"optimizer": section}))[0]
    found = {
        "ratio": settings.ratio == "auto",
        "rule": rule not in ALL_RULES,
        "muon": rule in ALL_RULES and ALL_RULES[rule].elementwise is not None,
        "delayed_update": settings.delayed_update,
        "compression": compression_choice(load_config(settings.file_config)) is not None,
    }
    refuse("State on the disk", found, rules=", ".join(RULES))
    try:
        settings.nvme_path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unusable_path("--nvme-path", settings.nvme_path, "a folder that can be created", error) from None


def choose_shape(options: TrainOptions) -> tuple[str, GPTConfig]:
    """Name and shape of the model: a preset with the sizes that options give. With sizes alone, the preset is GPT-2."""
    sizes = {name: getattr(options, name) for name in ("num_layers", "hidden", "num_heads")}
    given = {name: value for name, value in sizes.items() if value is not None}
    preset = options.preset
    if preset is None:
        preset = GPT2 if given else "tiny"
    if preset not in PRESETS:
        raise invalid_value("--preset", preset, PRESETS)
    context, most = options.context, options.max_positions
    if context is not None and most is not None and context > most:
        raise invalid_value("--seq-length", context, f"at most {most}, the value of --max-position-embeddings")
    context = most if context is None else context
    check_whole("--seq-length (--context)", context, most=MAX_SIZES["context"])
    check_whole("--vocab-size", options.vocab_size, most=MAX_SIZES["vocab_size"])
    for name, value in given.items():
        check_whole(SHAPE_OPTIONS.get(name, "--num-layers"), value, most=MAX_SIZES[name])
    hidden, heads = (given.get(name, getattr(PRESETS[preset], name)) for name in ("hidden", "num_heads"))
    if hidden % heads:
        nearest = next(number for number in range(heads, 0, -1) if hidden % number == 0)
        expected = f"a multiple of --num-attention-heads, which is {heads}"
        raise invalid_value("--hidden-size", hidden, expected, f"Use --num-attention-heads {nearest}, or another size.")
    shape = replace(PRESETS[preset], **given)
    if context is not None:
        shape = replace(shape, context=context)
    recompute = parse_recompute(options)
    if isinstance(recompute, int):
        check_whole("--recompute", recompute, least=0, most=shape.num_layers)
    return "custom" if given else preset, replace(shape, recompute="none" if recompute == "auto" else recompute)


def rule_params(name: str) -> dict[str, Any]:
    """Default `optimizer.params` of an update rule, as in a config file."""
    if name not in ALL_RULES:
        raise invalid_value("--rule", name, ALL_RULES)
    rule = ALL_RULES[name]
    options = {"lr": rule.defaults["lr"], "weight_decay": 0.0, **rule.train}
    params = {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
    return {**params, "adam_w_mode": False} if name == "adam" else params


def default_lr(rule: str, shape: GPTConfig) -> float:
    """Default peak learning rate of an update rule and a model size."""
    lr = float(rule_params(rule)["lr"])
    return min(lr, LARGE_LR) if ALL_RULES[rule].is_normalized and shape.hidden >= 1024 else lr


def read_config(path: Path | None, name: str) -> dict[str, Any]:
    """Read and validate the config file that the option `name` names. Deprecated keys get their current names."""
    if path is None:
        return {}
    if not path.is_file():
        raise invalid_value(name, str(path), "an existing file")
    return load_config(path).model_dump(mode="json", exclude_unset=True)


def parse_bytes(name: str, text: str | None) -> int | None:
    """Parse a size such as 32GB, 24GiB or 500MB. `name`: the option, for the error message.

    A number without a unit is a number of bytes. It is refused below a million, because 64 probably means 64GB.
    """
    if text is None:
        return None
    units = {"TIB": 2**40, "TB": 10**12, "T": 10**12, "GIB": 2**30, "GB": 10**9, "G": 10**9}
    units |= {"MIB": 2**20, "MB": 10**6, "M": 10**6, "B": 1, "": 1}
    upper = text.strip().upper()
    unit = next(unit for unit in units if upper.endswith(unit))
    try:
        value = float(upper.removesuffix(unit)) * units[unit]
    except ValueError:
        raise invalid_value(name, text, "a size like 32GB, 24GiB or 500MB") from None
    if not 0 < value < math.inf:
        raise invalid_value(name, text, "a size above 0")
    if not unit and value < 10**6:
        raise invalid_value(name, text, "a size with a unit", f"Write {text}GB if you mean gigabytes.")
    return int(value)


def parse_ratio(text: str | None) -> float | str | None:
    """Parse --ratio: a number from 0 to 1, or "auto"."""
    if text is None or text == "auto":
        return text
    with suppress(ValueError):
        if 0.0 <= (value := float(text)) <= 1.0:
            return value
    allowed = "a number from 0 (all optimizer state on the GPU) to 1 (all of it on the host), or auto"
    raise invalid_value("--ratio", text, allowed)


def engine_config(settings: TrainSettings, states: str) -> dict[str, Any]:
    """The config of the engine: the config file, completed with the values of the command line."""
    config: dict[str, Any] = deepcopy(dict(settings.file_config))
    config["train_micro_batch_size_per_gpu"] = settings.batch_size
    config["gradient_accumulation_steps"] = settings.accumulation
    config.pop("train_batch_size", None)
    config.setdefault("gradient_clipping", settings.grad_clip)
    if settings.precision != "fp32" and not any(is_on(config, name) for name in ("fp16", "bf16", "bfloat16")):
        config[settings.precision] = {"enabled": True}
        if settings.precision == "bf16" and not settings.grad_clip:
            # With the check for overflow, every update would wait for the last gradient, as with clipping.
            config["bf16"]["check_grad_overflow"] = False
    if "optimizer" not in config:
        params = {**rule_params(settings.rule), "lr": settings.lr, "weight_decay": settings.weight_decay}
        config["optimizer"] = {"type": settings.rule, "params": params}
    zero = config.setdefault("zero_optimization", {})
    if not isinstance(zero, dict):
        return config  # the config reader raises an error for this value
    if settings.world > 1:
        zero.setdefault("stage", RANKS_STAGE)
    offload = zero.get("offload_optimizer")
    offload = zero["offload_optimizer"] = dict(offload) if isinstance(offload, dict) else {}
    if settings.nvme_path is not None and "device" not in offload:
        offload |= {"device": "nvme", "nvme_path": str(settings.nvme_path)}
    offload.setdefault("device", "cpu")
    offload.setdefault("states", states)
    if settings.master == "none":
        offload.setdefault("master", "none")
    if offload["device"] != "none":  # otherwise all state is on the GPU, and these keys have no effect
        offload.setdefault("ratio", settings.ratio)
        offload.setdefault("placement", settings.placement)
    offload.setdefault("delayed_update", settings.delayed_update)
    offload.setdefault("host_threads", settings.threads)
    if settings.keep_last is not None:
        config.setdefault("checkpoint", {}).setdefault("keep_last", settings.keep_last)
    if settings.compile:
        config.setdefault("compile", {})["blocks"] = True
    if settings.float8:
        config["float8"] = {"enabled": True}
    return config


def is_on(config: Mapping[str, Any], section: str) -> bool:
    """Whether a config section has `"enabled": true`."""
    found = config.get(section)
    return isinstance(found, dict) and found.get("enabled") is True


def lr_factor(step: int, warmup: int, steps: int) -> float:
    """Share of the peak learning rate at a step counted from 0: linear warmup, then a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return MIN_LR_SHARE + (1.0 - MIN_LR_SHARE) * 0.5 * (1.0 + math.cos(math.pi * progress))


def as_json(settings: TrainSettings) -> dict[str, Any]:
    """All settings as plain values, for the run's folder."""
    return {
        name: str(value) if isinstance(value, Path) else dict(value) if isinstance(value, Mapping) else value
        for name, value in asdict(settings).items()
    }


def check_saved(saved: object, path: str) -> None:
    """Raise a ValueError if `saved`, from the file at `path`, is not what a run has written there."""
    if not isinstance(saved, dict):
        raise invalid_value(f"The content of {path}", Shown(saved), "the JSON object that `twinflow train` wrote")
    counts = {"batch_size": True, "accumulation": True, "world": False, "num_valid": False}
    for name, is_needed in counts.items():
        value = saved.get(name)
        if (is_needed or name in saved) and (type(value) is not int or not 1 <= value <= MAX_COUNT):
            raise invalid_value(f"{name} in {path}", Shown(value), f"a whole number from 1 to {MAX_COUNT}")
    for name in ("num_resumes", "num_repeated_steps"):
        value = saved.get(name, 0)
        if type(value) is not int or not 0 <= value <= MAX_COUNT:
            raise invalid_value(f"{name} in {path}", Shown(value), f"a whole number from 0 to {MAX_COUNT}")
    for name in ("model", "file_config"):
        if not isinstance(saved.get(name, {}), dict):
            raise invalid_value(f"{name} in {path}", Shown(saved[name]), "an object")
    states = saved.get("chosen_states", "fp32")
    if not isinstance(states, str) or states not in STATES:
        raise invalid_value(f"chosen_states in {path}", Shown(states), STATES)
    if not isinstance(saved.get("fingerprint", ""), str):
        raise invalid_value(f"fingerprint in {path}", Shown(saved["fingerprint"]), "text")
    try:
        axes_of(saved.get("file_config", {}))
    except ValueError as error:
        raise ValueError(f"file_config in {path}: {error}") from None


def check_same_run(saved: Mapping[str, Any], settings: TrainSettings) -> None:
    """Raise a ValueError that names the first setting that differs from the run to resume.

    The numbers of pipeline, tensor and data ranks may change if the number of sequences in a step does not.
    """
    world, file = saved.get("world", 1), saved.get("file_config") or {}
    is_same = world == settings.world and axes_of(file) == axes_of(settings.file_config)
    new, old = (_kept(values, is_same) for values in (as_json(settings), saved))
    sequences = saved.get("global_batch") or saved["batch_size"] * saved["accumulation"] * num_replicas(file, world)
    new[SEQUENCES], old[SEQUENCES] = settings.sequences, sequences
    for name, value in new.items():
        if old.get(name) != value:
            expected = f"{old.get(name)!r}, as when the run began"
            raise invalid_value(name, value, expected, "Use the same value, or start a new run in another --out.")


def _kept(values: Mapping[str, Any], with_batch: bool) -> dict[str, Any]:
    """The settings that a resumed run must keep, by option. `with_batch`: the batch sizes too."""
    sizes = {name: value for name, value in (values.get("model") or {}).items() if name != "recompute"}
    shape = {SHAPE_OPTIONS.get(name, option_name(name)): value for name, value in sizes.items()}
    names = ("batch_size", "accumulation", *KEPT) if with_batch else KEPT
    rest = {option_name(name): values.get(name) for name in names}
    file = dict(values.get("file_config") or {})
    for key in (*SECTIONS, *_FASTER, *(() if with_batch else BATCH_KEYS)):
        file.pop(key, None)
    return {**shape, **rest, "--deepspeed_config": file}
