"""Settings of `twinflow train`: checked, with all defaults, and converted to a config for the engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch

from twinflow.cli.axes import SECTIONS, axes_of, num_replicas
from twinflow.errors import invalid_value
from twinflow.models.gpt import PRESET_BATCH, PRESETS, GPTConfig
from twinflow.native.threads import check_threads
from twinflow.offload.placement import PLACEMENTS
from twinflow.rules import RULES

MIN_LR_SHARE: Final = 0.1  # learning rate at the end of the cosine, as a share of the peak
PRECISIONS: Final = ("bf16", "fp16", "fp32")
RANKS_STAGE: Final = 2  # default ZeRO stage of several ranks
BATCH_KEYS: Final = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
GPT2: Final = "gpt2-1.5b"  # default vocabulary and context of a shape given by options
# Settings that must not change when a run is resumed.
KEPT: Final = (
    "model",
    "batch_size",
    "accumulation",
    "rule",
    "lr",  # the checkpoint's lr and weight_decay would override new values
    "weight_decay",
    "data",
    "json_key",
    "tokenizer",
    "seed",
    "precision",
    "file_config",
)

SEQUENCES: Final = "number of sequences in a step (--batch-size x --accumulation x replicas)"
SHAPE_OPTIONS: Final = {"hidden": "--hidden-size", "num_heads": "--num-attention-heads", "context": "--seq-length"}
LARGE_LR: Final = 1.5e-4  # for the GPT-2 shapes, which diverge at the learning rate of a tiny model


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
    ratio: float | str  # share of the optimizer state on the host, or "auto"
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

    @property
    def context(self) -> int:
        """Tokens in a sequence."""
        return self.model.context

    @cached_property
    def replicas(self) -> int:
        """Copies of the model. Each takes a part of every batch."""
        return num_replicas(self.file_config, self.world)

    @property
    def sequences(self) -> int:
        """Sequences in a step, on all ranks."""
        return self.batch_size * self.accumulation * self.replicas

    @property
    def tokens(self) -> int:
        """Tokens in a step, on all ranks."""
        return self.sequences * self.context


def option(name: str) -> str:
    """The command line option of a setting."""
    return "--" + name.replace("_", "-")


def check_settings(settings: TrainSettings) -> None:
    """Raise a ValueError that names the option if a value cannot work."""
    at_least_one = ("steps", "batch_size", "accumulation")
    for name in (*at_least_one, "warmup", "seed", "valid_every", "save_every"):
        least = 1 if name in at_least_one else 0
        if getattr(settings, name) < least:
            raise invalid_value(option(name), getattr(settings, name), f"a whole number >= {least}")
    for name in ("lr", "weight_decay", "grad_clip"):
        value = getattr(settings, name)
        if not 0.0 <= value < math.inf:
            raise invalid_value(option(name), value, "a finite number >= 0")
    if settings.precision not in PRECISIONS:
        raise invalid_value("--precision", settings.precision, PRECISIONS)
    if settings.keep_last is not None and settings.keep_last < 1:
        raise invalid_value("--keep-last", settings.keep_last, "a whole number >= 1")
    if settings.gpu_memory is not None and not torch.cuda.is_available():
        raise invalid_value("--gpu-memory", settings.gpu_memory, "left out on a machine without a GPU")
    check_threads(settings.threads, "--threads")
    formats = ("auto", *RULES[settings.rule].formats)
    if settings.states not in formats:
        raise invalid_value("--states", settings.states, formats, f"These are the formats of --rule {settings.rule}.")
    if settings.placement not in PLACEMENTS:
        raise invalid_value("--placement", settings.placement, PLACEMENTS)


def choose_shape(
    preset: str | None,
    num_layers: int | None,
    hidden: int | None,
    num_heads: int | None,
    context: int | None,
    checkpoint_activations: bool | None,
) -> tuple[str, GPTConfig]:
    """Name and shape of the model: a preset, or a shape given by options with the vocabulary and context of GPT-2."""
    by_hand = {"num_layers": num_layers, "hidden": hidden, "num_heads": num_heads}
    given = {name: value for name, value in by_hand.items() if value is not None}
    if preset is None:
        preset = GPT2 if given else "tiny"
    if preset not in PRESETS:
        raise invalid_value("--preset", preset, PRESETS)
    shape = replace(PRESETS[preset], **given)  # type: ignore[arg-type]
    if context is not None:
        if context < 1:
            raise invalid_value("--seq-length (--context)", context, "a whole number >= 1")
        shape = replace(shape, context=context)
    if checkpoint_activations is None:
        checkpoint_activations = shape.hidden >= 1600  # activations of large shapes do not fit on a GPU
    shape = replace(shape, checkpoint_activations=checkpoint_activations)
    return (preset if not given else "custom", shape)


def rule_params(name: str) -> dict[str, Any]:
    """Default `optimizer.params` of an update rule, as in a config file."""
    if name not in RULES:
        raise invalid_value("--rule", name, RULES)
    rule = RULES[name]
    options = {"lr": rule.defaults["lr"], "weight_decay": 0.0, **rule.train}
    params = {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
    return {**params, "adam_w_mode": False} if name == "adam" else params


def default_batch_size(preset: str) -> int:
    """Default number of sequences in a micro-batch of a preset."""
    return PRESET_BATCH.get(preset, 8)


def default_lr(rule: str, shape: GPTConfig) -> float:
    """Default peak learning rate of an update rule and a model size."""
    lr = float(rule_params(rule)["lr"])
    return min(lr, LARGE_LR) if RULES[rule].is_normalized and shape.hidden >= 1024 else lr


def parse_bytes(name: str, text: str | None) -> int | None:
    """Parse a size such as 32GB, 24GiB or 500MB. `name`: the option, for the error message."""
    if text is None:
        return None
    units = {"GIB": 2**30, "GB": 10**9, "G": 10**9, "MIB": 2**20, "MB": 10**6, "M": 10**6, "B": 1}
    upper = text.strip().upper()
    unit = next((unit for unit in units if upper.endswith(unit)), "")
    try:
        value = float(upper.removesuffix(unit)) * (units[unit] if unit else 1)
    except ValueError:
        raise invalid_value(name, text, "a size like 32GB, 24GiB or 500MB") from None
    if not 0 < value < math.inf:
        raise invalid_value(name, text, "a size above 0")
    return int(value)


def parse_ratio(text: str | None) -> float | str | None:
    """Parse --ratio: a number from 0 to 1, or "auto"."""
    if text in (None, "auto"):
        return text
    assert text is not None
    allowed = "a number from 0 (all optimizer state on the GPU) to 1 (all of it on the host), or auto"
    try:
        value = float(text)
    except ValueError:
        raise invalid_value("--ratio", text, allowed) from None
    if not 0.0 <= value <= 1.0:
        raise invalid_value("--ratio", text, allowed)
    return value


def engine_config(settings: TrainSettings, states: str, num_ranks: int = 1) -> dict[str, Any]:
    """The config of the engine: the config file, completed with the values of the command line."""
    config: dict[str, Any] = deepcopy(dict(settings.file_config))
    config["train_micro_batch_size_per_gpu"] = settings.batch_size
    config["gradient_accumulation_steps"] = settings.accumulation
    config.pop("train_batch_size", None)
    config.setdefault("gradient_clipping", settings.grad_clip)
    if settings.precision != "fp32" and not any(is_on(config, name) for name in ("fp16", "bf16", "bfloat16")):
        config[settings.precision] = {"enabled": True}
        if settings.precision == "bf16" and not settings.grad_clip:
            # The check for overflow would delay every update until the last gradient, as clipping does.
            config["bf16"]["check_grad_overflow"] = False
    if "optimizer" not in config:
        params = {**rule_params(settings.rule), "lr": settings.lr, "weight_decay": settings.weight_decay}
        config["optimizer"] = {"type": settings.rule, "params": params}
    zero = config.setdefault("zero_optimization", {})
    if not isinstance(zero, dict):
        return config  # the config reader raises an error for this value
    if num_ranks > 1:
        zero.setdefault("stage", RANKS_STAGE)
    offload = zero.get("offload_optimizer")
    offload = zero["offload_optimizer"] = dict(offload) if isinstance(offload, dict) else {}
    offload.setdefault("device", "cpu")
    offload.setdefault("states", states)
    if offload["device"] == "cpu":  # otherwise all state is on the GPU, and neither key has an effect
        offload.setdefault("ratio", settings.ratio)
        offload.setdefault("placement", settings.placement)
    offload.setdefault("delayed_update", settings.delayed_update)
    offload.setdefault("host_threads", settings.threads)
    if settings.keep_last is not None:
        config.setdefault("checkpoint", {}).setdefault("keep_last", settings.keep_last)
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
    """All settings as plain values for the run's folder, except the number of ranks."""
    return {
        name: str(value) if isinstance(value, Path) else dict(value) if isinstance(value, Mapping) else value
        for name, value in asdict(settings).items()
        if name != "world"
    }


def check_same_run(saved: Mapping[str, Any], settings: TrainSettings) -> None:
    """Raise a ValueError that names the first setting that differs from the run to resume.

    The number of ranks and the layout may change if the number of sequences in a step stays the same.
    """
    world, file = saved.get("world", 1), saved.get("file_config") or {}
    is_same = world == settings.world and axes_of(file) == axes_of(settings.file_config)
    new, old = (_kept(values, is_same) for values in (as_json(settings), saved))
    sequences = saved["batch_size"] * saved["accumulation"] * num_replicas(file, world)
    new[SEQUENCES], old[SEQUENCES] = settings.sequences, sequences
    for name, value in new.items():
        if old.get(name) != value:
            remedy = "--resume continues a run with the same settings. Start a new run in another --out."
            raise invalid_value(name, value, [old.get(name)], remedy)


def _kept(values: Mapping[str, Any], with_batch: bool) -> dict[str, Any]:
    """The settings that must not change, by their options."""
    shape = {SHAPE_OPTIONS.get(name, option(name)): value for name, value in (values.get("model") or {}).items()}
    dropped = () if with_batch else ("batch_size", "accumulation")
    rest = {option(name): values.get(name) for name in KEPT if name not in ("model", "file_config", *dropped)}
    file = dict(values.get("file_config") or {})
    for key in SECTIONS if with_batch else (*SECTIONS, *BATCH_KEYS):
        file.pop(key, None)
    return {**shape, **rest, "--deepspeed_config": file}
