# SPDX-License-Identifier: Apache-2.0
"""Settings of `twinflow finetune`: the options of the command line, their defaults and checks.

A step has the same sequences on any number of processes: a run that is resumed on another number divides them anew.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import torch
import typer

from twinflow.cli import check_whole, option
from twinflow.cli.settings import PRECISIONS, check_masters, option_name, parse_bytes, parse_ratio
from twinflow.conflicts import refuse
from twinflow.errors import incompatible, invalid_value
from twinflow.files import read_json
from twinflow.native import get_threads
from twinflow.native.threads import check_threads
from twinflow.rules import RULES

METHODS: Final = ("sft", "lora", "qlora", "dpo")
ADAPTERS: Final = ("lora", "qlora")
SETTINGS: Final = "settings.json"
# Peak learning rates that are usual for these methods.
LRS: Final = {"sft": 1e-5, "lora": 2e-4, "qlora": 2e-4, "dpo": 1e-6}
EPOCHS: Final = 3.0
SEQUENCES: Final = 16  # sequences in a step, if neither --batch-size nor --accumulation is given
RANK, BETA = 16, 0.1
MAX_LENGTH: Final = 2048  # default limit of --seq-length
VALID_SHARE, MAX_VALID, MIN_ROWS = 0.05, 100, 20  # rows held out for validation; none of fewer rows than MIN_ROWS
# Settings that may change when a run is resumed. All others are those of the run.
FREE: Final = (
    "resume",
    "dry_run",
    "out",
    "gpu_memory",
    "ram",
    "threads",
    "nvme_path",
    "merge",
    "num_samples",
    "keep_last",
    "save_every",
)


@dataclass(frozen=True)
class FinetuneOptions:
    model: str = field(
        metadata={"option": typer.Argument(metavar="MODEL", help="Folder or hub name of a causal language model.")}
    )
    data: str = field(
        metadata={"option": typer.Argument(metavar="DATA", help="A .jsonl or .json file, or the name of a dataset.")}
    )
    method: str | None = option(
        None,
        "sft: all parameters. lora: adapters. qlora: adapters on a base in 4 bits. dpo: all parameters, from pairs of "
        "answers.  [default: sft]",
    )
    steps: int | None = option(None, "Number of training steps. Default: as many as --epochs needs.")
    epochs: float | None = option(None, "Passes over the data.  [default: 3]")
    batch_size: int | None = option(
        None,
        "Sequences in a micro-batch of each process. Default: chosen for the machine.",
        "--batch-size --micro-batch-size",
    )
    accumulation: int | None = option(
        None,
        "Micro-batches of each process in a step. Default: as many as make 16 sequences in a step of all processes.",
    )
    seq_length: int | None = option(
        None,
        "Tokens to which an example is cut. Default: the longest example, at most 2048.",
        "--seq-length --context",
    )
    packing: bool | None = option(None, "Put several examples into one sequence.", "--packing/--no-packing")
    lr: float | None = option(None, "Peak learning rate.  [default: sft 1e-5, lora and qlora 2e-4, dpo 1e-6]")
    warmup: int | None = option(None, "Steps of linear warmup. Default: 5% of the steps.")
    weight_decay: float | None = option(None, "Weight decay.  [default: 0]")
    grad_clip: float | None = option(
        None, "Largest gradient norm. 0 turns clipping off.  [default: 1]", "--grad-clip --clip-grad"
    )
    rank: int | None = option(None, "Rank of the adapters of lora and qlora.  [default: 16]")
    beta: float | None = option(None, "Strength with which dpo keeps to the untuned model.  [default: 0.1]")
    merge: bool = option(False, "Write whole weights with the adapters merged, instead of the adapters.", "--merge")
    states: str | None = option(
        None,
        "Format of optimizer state: fp32, bf16, int8 or 4bit. Default: one of the first three, chosen for the machine.",
    )
    master: str | None = option(
        None,
        "fp32, or none: bf16 weights have no fp32 master and are rounded stochastically. This changes results.  "
        "[default: fp32]",
    )
    ratio: str | None = option(
        None, "Share of the optimizer state on the host, 0 to 1. Default: chosen for the machine."
    )
    nvme_path: Path | None = option(
        None,
        "Keep the optimizer state that would be on the host in a file in this folder, which is on a local disk.",
        "--nvme-path",
    )
    offload_params: bool | None = option(
        None, "Keep the weights on the host. Default: chosen for the machine.", "--offload-params/--no-offload-params"
    )
    offload_embeddings: bool | None = option(
        None,
        "With the weights on the host, keep those of the embedding and output layers there too. Default: chosen for "
        "the machine.",
        "--offload-embeddings/--no-offload-embeddings",
    )
    checkpoint_activations: bool | None = option(
        None,
        "Recompute activations in backward. Default: chosen for the machine.",
        "--checkpoint-activations/--no-checkpoint-activations",
    )
    compile: bool | None = option(
        None, "Compile each layer with torch.compile.  [default: no-compile]", "--compile/--no-compile"
    )
    precision: str | None = option(None, "Data type of the weights: bf16 or fp32. Default: bf16 on a GPU, else fp32.")
    template: bool | None = option(
        None,
        "Write prompts and answers that are texts as turns of a chat. Default: if the model has a chat template.",
        "--template/--no-template",
    )
    chat_template: Path | None = option(None, "A Jinja file with the chat template, for a model that has none.")
    split: str | None = option(None, "Split of a dataset.  [default: train]")
    valid_data: str | None = option(None, "Data for validation. Default: 5% of DATA, at most 100 rows.")
    valid_every: int | None = option(
        None,
        "Steps between validations. 0: only before the first and after the last step.  [default: 100]",
        "--valid-every --eval-interval",
    )
    num_samples: int | None = option(None, "Sample answers before and after.  [default: 3]", "--samples")
    seed: int | None = option(None, "Seed of the adapters and of the order of the data.  [default: 0]")
    save_every: int | None = option(
        None, "Steps between checkpoints. 0: only one at the end.  [default: 0]", "--save-every --save-interval"
    )
    keep_last: int | None = option(None, "How many checkpoints to keep.  [default: 2]")
    resume: bool = option(
        False, "Continue the run in --out from its last checkpoint. If there is no such folder, begin it.", "--resume"
    )
    dry_run: bool = option(False, "Check the data and show the plan, without loading the model.", "--dry-run")
    gpu_memory: str | None = option(None, "Limit of the GPU memory that the run may use, for example 24GB.")
    ram: str | None = option(None, "Limit of the host memory that the run may use, for example 64GB.")
    threads: int | None = option(
        None, "CPU threads of each process. Default: all that this process may use, divided among those of the machine."
    )
    out: Path | None = option(None, "Folder of the run. Default: a new folder in runs.")


@dataclass(frozen=True)
class FinetuneSettings:
    """Settings of a run, with all defaults filled in. None: not given, and chosen later for the data or the machine."""

    model: str
    data: str
    method: str
    steps: int | None
    epochs: float
    batch_size: int | None
    accumulation: int | None
    seq_length: int | None
    packing: bool
    lr: float
    warmup: int | None
    weight_decay: float
    grad_clip: float | None
    rank: int
    beta: float
    merge: bool
    states: str | None
    master: str
    ratio: float | None
    nvme_path: str | None
    offload_params: bool | None
    offload_embeddings: bool | None
    checkpoint_activations: bool | None
    compile: bool
    precision: str
    template: bool | None
    chat_template: str | None
    split: str
    valid_data: str | None
    valid_every: int
    num_samples: int
    seed: int
    save_every: int
    keep_last: int
    resume: bool
    dry_run: bool
    gpu_memory: int | None
    ram: int | None
    threads: int
    world: int  # number of processes
    out: Path


_DEFAULTS: Final[Mapping[str, Any]] = {
    "method": "sft",
    "epochs": EPOCHS,
    "packing": False,
    "compile": False,
    "weight_decay": 0.0,
    "rank": RANK,
    "beta": BETA,
    "master": "fp32",
    "split": "train",
    "valid_every": 100,
    "num_samples": 3,
    "seed": 0,
    "save_every": 0,
    "keep_last": 2,
}


def make_settings(
    options: FinetuneOptions, world: int = 1, num_local: int = 1
) -> tuple[FinetuneSettings, dict[str, Any]]:
    """The settings of a run, and what a run to resume has saved. A resumed run takes its settings from there. `world`:
    number of processes, `num_local` of them on this machine.
    """
    given = {name: value for name, value in asdict(options).items() if value is not None}
    given |= {"chat_template": None if options.chat_template is None else str(options.chat_template)}
    given |= {"nvme_path": None if options.nvme_path is None else str(options.nvme_path)}
    given["ratio"] = _ratio(options.ratio)
    given["gpu_memory"] = parse_bytes("--gpu-memory", options.gpu_memory)
    given["ram"] = parse_bytes("--ram", options.ram)
    given = {name: value for name, value in given.items() if value is not None}
    saved: dict[str, Any] = {}
    if options.resume:
        if options.out is None:
            raise ValueError("--resume needs the folder of the run. Give it with --out: --resume --out runs/first.")
        if options.out.exists():  # a launcher that restarts failed ranks begins the run with --resume too
            saved = read_saved(options.out)
            _check_same(given, {**_DEFAULTS, **saved})  # of a version with fewer options, some are not saved
            saved = _redivided(saved, world)
    stored = {name: value for name, value in saved.items() if value is not None}
    kept = {name: value for name, value in stored.items() if name not in FREE}
    values = {**_DEFAULTS, **stored, **given, **kept, "world": world}
    method = values["method"]
    if method not in METHODS:
        raise invalid_value("--method", method, METHODS)
    if "rank" in given and method not in ADAPTERS:
        raise incompatible("--rank", f"--method {method}", "it trains no adapters", "Leave --rank out.")
    if "beta" in given and method != "dpo":
        reason = "it does not compare with the untuned model"
        raise incompatible("--beta", f"--method {method}", reason, "Leave --beta out, or use --method dpo.")
    values.setdefault("lr", LRS[method])
    values.setdefault("precision", "bf16" if torch.cuda.is_available() else "fp32")
    values.setdefault("threads", max(1, get_threads() // num_local))
    if "out" not in values:
        values["out"] = Path("runs") / f"{Path(values['model']).name}-{method}-{time.strftime('%Y%m%d-%H%M%S')}"
    known: dict[str, Any] = {one.name: values.get(one.name) for one in fields(FinetuneSettings)}
    settings = FinetuneSettings(**known)
    check_settings(settings)
    return settings, saved


def _ratio(text: str | None) -> float | None:
    found = parse_ratio(text)
    if isinstance(found, str):
        raise invalid_value("--ratio", text, "a number from 0 to 1", "Leave --ratio out to have it chosen.")
    return found


def read_saved(out: Path) -> dict[str, Any]:
    """The settings of the run to resume."""
    path = out / SETTINGS
    if not path.exists():
        remedy = "Give the folder of an earlier run, or start a new run without --resume."
        raise invalid_value("--out", str(out), f"the folder of a run with a file {SETTINGS}", remedy)
    remedy = "Restore the file from a copy, or start a new run in another --out."
    try:
        saved: Any = read_json(path)
    except ValueError as error:
        raise ValueError(f"{error} {remedy}") from None
    if not isinstance(saved, dict) or "method" not in saved:
        raise invalid_value(str(path), saved, "the JSON object that `twinflow finetune` wrote", remedy)
    return saved


def _check_same(given: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raises a ValueError that names the first option that differs from the run to resume."""
    for name, value in given.items():
        if name not in FREE and saved.get(name) != value:
            what = name.upper() if name in ("model", "data") else option_name(name)
            expected = f"{saved.get(name)!r}, as when the run began"
            raise invalid_value(what, value, expected, "Use the same value, or start a new run in another --out.")


def _redivided(saved: dict[str, Any], world: int) -> dict[str, Any]:
    """The saved settings with micro-batches for this number of processes. A step keeps its sequences. No micro-batch
    becomes larger, because it may not fit.
    """
    before = saved.get("world", 1)
    if before == world:
        return saved
    for name, value in (
        ("world", before),
        ("batch_size", saved.get("batch_size")),
        ("accumulation", saved.get("accumulation")),
    ):
        if not isinstance(value, int) or value < 1:
            raise invalid_value(f"{name} in {SETTINGS}", value, "a whole number >= 1", "Restore the file from a copy.")
    sequences = saved["batch_size"] * saved["accumulation"] * before
    if sequences % world:
        remedy = f"Start the run on {before}, as when it began."
        raise invalid_value(
            "The number of processes", world, f"a divisor of {sequences}, the sequences in a step of this run", remedy
        )
    share = sequences // world
    size = max(size for size in range(1, saved["batch_size"] + 1) if share % size == 0)
    return {**saved, "batch_size": size, "accumulation": share // size, "world": world, "threads": None}


def check_settings(settings: FinetuneSettings) -> None:
    """Raise a ValueError that names the option if a value cannot work."""
    if settings.out.exists() and not settings.out.is_dir():
        raise invalid_value("--out", str(settings.out), "a folder", "This is a file. Choose another --out.")
    for name in ("steps", "batch_size", "accumulation", "seq_length", "rank", "keep_last"):
        check_whole(option_name(name), getattr(settings, name))
    for name in ("warmup", "seed", "valid_every", "save_every", "num_samples"):
        check_whole("--samples" if name == "num_samples" else option_name(name), getattr(settings, name), least=0)
    for name in ("lr", "weight_decay", "grad_clip"):
        if getattr(settings, name) is not None and not 0.0 <= getattr(settings, name) < math.inf:
            raise invalid_value(option_name(name), getattr(settings, name), "a finite number >= 0")
    for name in ("epochs", "beta"):
        if not 0.0 < getattr(settings, name) < math.inf:
            raise invalid_value(option_name(name), getattr(settings, name), "a finite number above 0")
    if settings.precision == "fp16" or settings.precision not in PRECISIONS:
        raise invalid_value("--precision", settings.precision, ("bf16", "fp32"))
    if settings.states not in (None, *RULES["adamw"].formats):
        raise invalid_value("--states", settings.states, RULES["adamw"].formats)
    check_masters(settings.master, settings.precision)
    if settings.gpu_memory is not None and not torch.cuda.is_available():
        remedy = "Leave --gpu-memory out. `twinflow plan --gpu` plans for the GPU of another machine."
        raise ValueError(f"--gpu-memory is given, but this machine has no GPU. {remedy}")
    if settings.merge and settings.method not in ADAPTERS:
        raise incompatible("--merge", f"--method {settings.method}", "it trains no adapters", "Leave --merge out.")
    is_on_host = settings.offload_params or settings.offload_embeddings
    if settings.method == "qlora" and is_on_host and settings.world > 1:
        reason = "a base in 4 bits stays whole on each GPU then"
        raise incompatible("--offload-params", "--method qlora on several ranks", reason, "Leave --offload-params out.")
    is_on_gpu = settings.offload_params is False
    refuse("Weights on the host", {"--offload-embeddings": bool(settings.offload_embeddings) and is_on_gpu})
    if settings.packing and settings.method == "dpo":
        raise incompatible("--packing", "--method dpo", "TRL does not pack pairs of answers", "Leave --packing out.")
    if settings.compile and settings.method == "qlora":
        reason = "graphs with weights of 4 bits are not tested"
        raise incompatible("--compile", "--method qlora", reason, "Leave --compile out, or use --method lora.")
    if settings.chat_template is not None and not Path(settings.chat_template).is_file():
        raise invalid_value("--chat-template", settings.chat_template, "an existing Jinja file")
    check_threads(settings.threads, "--threads")


def as_json(settings: FinetuneSettings) -> dict[str, Any]:
    """All settings as plain values, for the run's folder."""
    values = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(settings).items()}
    return {name: value for name, value in values.items() if name not in ("resume", "dry_run", "out")}
