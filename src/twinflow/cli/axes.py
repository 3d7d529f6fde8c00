"""Pipeline and tensor parallelism of `twinflow train`: merges its options with the config file and checks the layout.

The options are stored in the sections `pipeline` and `tensor_parallel` of the config. All ranks of a replica get the
same tokens, because batches are distributed over replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from twinflow.build_parallel import axes_of as checked_axes
from twinflow.config import Axes, load_config, resolve_axes
from twinflow.errors import incompatible, invalid_value
from twinflow.launch.environment import RankEnvironment
from twinflow.models.gpt import GPT, GPTConfig

SECTIONS: Final = ("pipeline", "tensor_parallel")
SCHEDULES: Final = ("gpipe", "1f1b", "interleaved", "zbv")
_STAGES, _TENSOR = "--pipeline-parallel-size", "--model-parallel-size"


def only_one(name: str, value: Any, file_config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a command line option. Raises a ValueError if the config file sets the same value."""
    if value is not None and key in file_config:
        raise incompatible(f"{name} {value}", f"{key!r} in the config file", "both set the same value", "Remove one.")
    return value


def with_axes(
    file_config: Mapping[str, Any], stages: int | None, tensor: int | None, schedule: str | None
) -> dict[str, Any]:
    """The config of the file with the pipeline and tensor ranks of the command line."""
    for name, value in ((_STAGES, stages), (_TENSOR, tensor)):
        if value is not None and value < 1:
            raise invalid_value(name, value, "a whole number >= 1")
    if schedule not in (None, *SCHEDULES):
        raise invalid_value("--pipeline-schedule", schedule, SCHEDULES)
    pipeline, cut = (dict(file_config.get(key) or {}) for key in SECTIONS)
    only_one(_TENSOR, tensor, cut, "tp")
    given = {
        "pipeline": {
            "stages": only_one(_STAGES, stages, pipeline, "stages"),
            "schedule": only_one("--pipeline-schedule", schedule, pipeline, "schedule"),
        },
        "tensor_parallel": {"autotp_size": only_one(_TENSOR, tensor, cut, "autotp_size")},
    }
    found = dict(file_config)
    for key, section in zip(SECTIONS, (pipeline, cut), strict=True):
        said = {name: value for name, value in given[key].items() if value not in (None, 1)}  # 1 is the default
        if section or said:
            found[key] = {**section, **said}
    return found


def axes_of(config: Mapping[str, Any]) -> Axes:
    """Pipeline and tensor ranks in a config."""
    asked = {key: config[key] for key in SECTIONS if config.get(key)}
    return resolve_axes(load_config(asked)) if asked else Axes(1, 1)


def num_replicas(config: Mapping[str, Any], world: int) -> int:
    """Copies of the model. Each takes a part of every batch."""
    axes = axes_of(config)
    return max(1, world // (axes.pipe * axes.model))


def describe(config: Mapping[str, Any], world: int) -> str:
    """The layout as text. Empty if every rank has the whole model."""
    axes, (schedule, _) = axes_of(config), _schedule(config)
    named = [(f"pipeline {axes.pipe} ({schedule})", axes.pipe), (f"tensor {axes.model}", axes.model)]
    parts = [text for text, size in named if size > 1]
    return " x ".join([*parts, f"data {num_replicas(config, world)}"]) if parts else ""


def check_layout(config: Mapping[str, Any], shape: GPTConfig, world: int) -> int:
    """Return the number of replicas. Raises a ValueError if ranks, heads or layers are not divisible by the layout."""
    axes, (schedule, num_chunks) = axes_of(config), _schedule(config)
    parts = axes.pipe * axes.model
    if parts > 1 and world % parts:
        remedy = f"Start a multiple of {parts} processes (twinflow launch --num_gpus {parts}), or use fewer stages."
        allowed = f"a divisor of {world}, the number of ranks"
        raise invalid_value(f"{_STAGES} x {_TENSOR}", f"{axes.pipe} x {axes.model}", allowed, remedy)
    if shape.num_heads % axes.model and not (config.get("tensor_parallel") or {}).get("plan"):
        raise invalid_value("--num-attention-heads", shape.num_heads, f"a multiple of {_TENSOR}, which is {axes.model}")
    num_stages = axes.pipe * num_chunks
    if axes.pipe > 1 and shape.num_layers < num_stages:
        each = f" ({schedule}: {num_chunks} on each of {axes.pipe} ranks)" if num_chunks > 1 else ""
        allowed = f"at least {num_stages}, the stages of the pipeline{each}"
        raise invalid_value("--num-layers", shape.num_layers, allowed, "Every stage needs at least one layer.")
    return world // parts


def check_vocabulary(file_config: Mapping[str, Any], shape: GPTConfig) -> None:
    """Raise a ValueError if the vocabulary is not divisible by the number of tensor ranks."""
    axes = axes_of(file_config)
    if shape.vocab_size % axes.model and not (file_config.get("tensor_parallel") or {}).get("plan"):
        padded = -(-shape.vocab_size // axes.model) * axes.model
        remedy = f"Use --vocab-size {padded}, which leaves some symbols unused."
        raise invalid_value("vocabulary", shape.vocab_size, f"a multiple of {_TENSOR}, which is {axes.model}", remedy)


def check_combination(config: Mapping[str, Any], shape: GPTConfig, here: RankEnvironment) -> None:
    """Raise the error of `initialize` for options that conflict with pipeline or tensor ranks, before the model is
    built."""
    axes = axes_of(config)
    if axes.pipe * axes.model > 1:
        checked_axes(load_config(config), _on_meta(shape), here, None)


def _schedule(config: Mapping[str, Any]) -> tuple[str, int]:
    """Name of the pipeline schedule and stages of each rank."""
    section = config.get("pipeline") or {}
    name = section.get("schedule") or "1f1b"
    return name, (section.get("chunks") or 2) if name == "interleaved" else 2 if name == "zbv" else 1


def _on_meta(shape: GPTConfig) -> GPT:
    with torch.device("meta"):
        return GPT(shape)
