# SPDX-License-Identifier: Apache-2.0
"""Values that follow from a config: batch sizes, the optimizer with its options, and notes on keys without effect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from twinflow.config.fields import UNUSED, KeyPath, Section, dotted, rule_of, used_keys, values_in
from twinflow.config.params import (
    MUON_RATES,
    AdamParams,
    Common,
    MuonParams,
    OneBitAdamParams,
    optimizer_kind,
    schedule_kind,
)
from twinflow.config.schema import Config
from twinflow.conflicts import refuse
from twinflow.errors import invalid_value
from twinflow.rules import ALL_RULES


@dataclass(frozen=True)
class Batch:
    """The batch sizes of a step."""

    train_batch_size: int  # samples in a step, over all processes
    micro_batch_size: int  # samples in a forward of one process
    accumulation_steps: int  # forwards in a step of one process


@dataclass(frozen=True)
class Axes:
    """The degrees of pipeline and tensor parallelism."""

    pipe: int
    model: int


def resolve_axes(config: Config, own_stages: int | None = None) -> Axes:
    """The degrees of pipeline and tensor parallelism of a config. `own_stages`: the stages of a PipelineModule."""
    asked = config.pipeline.stages
    if asked is not None and asked < 0:
        raise invalid_value("pipeline.stages", asked, "a whole number >= 0")
    if own_stages is not None and asked not in (None, 0, own_stages):
        remedy = f"The PipelineModule has {own_stages} stages. Leave pipeline.stages out."
        raise invalid_value("pipeline.stages", asked, [own_stages], remedy)
    autotp_size, tp_size = config.tensor_parallel.autotp_size, config.tensor_parallel.tp.tp_size
    sizes = {size for size in (autotp_size, tp_size) if size > 1}
    found = {"tensor ranks": len(sizes) > 1}
    refuse("Other keys of the config", found, autotp_size=autotp_size, tp_size=tp_size)
    return Axes(own_stages or asked or 1, sizes.pop() if sizes else 1)


def resolve_batch(config: Config, world_size: int) -> Batch:
    """Computes the three batch sizes from those that are given, as DeepSpeed does.

    train_batch_size = micro batch size * accumulation steps * `world_size`, so two of the three sizes determine the
    third. If only the train batch size or the micro batch size is given, there is one accumulation step.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise invalid_value("world_size", world_size, "a whole number >= 1")
    if config.data_parallel_size not in (None, world_size):
        remedy = "Remove data_parallel_size from the config, or change the number of processes."
        expected = f"{world_size}, the number of replicas"
        raise invalid_value("data_parallel_size", config.data_parallel_size, expected, remedy)
    train, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    steps = config.gradient_accumulation_steps
    given = (
        f"train_batch_size {train}, train_micro_batch_size_per_gpu {micro}, gradient_accumulation_steps {steps}, "
        f"world size {world_size}"
    )
    if train is None and micro is None:
        remedy = "Set train_batch_size or train_micro_batch_size_per_gpu."
        raise ValueError(f"The config has no batch size: {given}. {remedy}")
    if micro is None:
        assert train is not None
        steps = steps or 1
        micro = train // (steps * world_size)
    elif steps is None:
        steps = 1 if train is None else train // (micro * world_size)
    total = micro * steps * world_size
    if total < 1 or (train is not None and train != total):
        raise ValueError(
            f"The batch sizes do not fit: {given}. train_batch_size must be train_micro_batch_size_per_gpu * "
            "gradient_accumulation_steps * world size, all whole numbers. Change one of them, or leave one out."
        )
    return Batch(total, micro, steps)


COMPRESSION_KEYS = ("code", "freeze_step", "freeze_threshold", "freeze_window")


def optimizer_choice(config: Config) -> tuple[str, dict[str, Any]]:
    """The name of an update rule of twinflow, of another optimizer of twinflow ("lamb", "onebitlamb", "zerooneadam") or
    of a torch.optim class, and the options to build it with.

    For optimizers of twinflow, these are all options. Those that are not given have DeepSpeed's defaults.
    """
    if config.optimizer is None:
        remedy = "Add the section optimizer to the config, or pass an optimizer."
        raise invalid_value("optimizer", None, "a section with type and params", remedy)
    kind = optimizer_kind(config.optimizer.type)
    given = dict(config.optimizer.params)
    if not issubclass(kind, Common):
        return config.optimizer.type, given
    name, params = config.optimizer.type.lower(), kind.model_validate(given)
    if isinstance(params, OneBitAdamParams):
        name = "adamw"
    if name not in ALL_RULES:
        return name, {key: getattr(params, key) for key in used_keys(kind)}
    options = {key: getattr(params, key) for key in ALL_RULES[name].defaults}
    if isinstance(params, MuonParams):
        options |= {} if "lr" in given else MUON_RATES
        options |= {key: rate for key in MUON_RATES if (rate := getattr(params, key)) is not None}
    if isinstance(params, AdamParams):
        name = "adamw" if name == "adamw" or params.adam_w_mode else "adam"
        if params.torch_adam and name == "adamw" and "weight_decay" not in given:
            # With torch_adam, DeepSpeed builds torch.optim.AdamW, whose default applies.
            options["weight_decay"] = ALL_RULES[name].defaults["weight_decay"]
    return name, options


def compression_choice(config: Config) -> dict[str, Any] | None:
    """The options of compressed communication in `optimizer.params`. None for optimizers without compression."""
    if config.optimizer is None or optimizer_kind(config.optimizer.type) is not OneBitAdamParams:
        return None
    params = OneBitAdamParams.model_validate(dict(config.optimizer.params))
    return {key: getattr(params, key) for key in COMPRESSION_KEYS}


def notes(config: Config) -> list[str]:
    """A line for each given key without effect, for each old name of a key, and for OneBitAdam with stage 0 or 2."""
    lines = [*config._renamed, *_without_effect(config, ())]
    for name, kind_of in (("optimizer", optimizer_kind), ("scheduler", schedule_kind)):
        chosen = getattr(config, name)
        kind = kind_of(chosen.type) if chosen is not None else None
        if kind is not None and issubclass(kind, Section):
            lines.extend(_without_effect(kind.model_validate(dict(chosen.params)), (name, "params")))
    offload, params = config.zero_optimization.offload_optimizer, config.zero_optimization.offload_param
    is_on_host = params is not None and params.device != "none"
    if is_on_host and (offload is None or offload.device == "none"):
        lines.append(
            "zero_optimization.offload_param: the optimizer state is on the host too, because weights are fetched from "
            "it. Without an optimizer, weights require no gradients"
        )
    elif offload is not None and offload.device == "none":
        because = "no effect here, because device is none and all state is on the GPU"
        for name in sorted(offload.model_fields_set):
            rule = rule_of(type(offload).model_fields[name])
            if rule is not None and rule.for_host:
                lines.append(f"zero_optimization.offload_optimizer.{name}: {because}")
    sections = ("offload_optimizer", offload), ("offload_param", params)
    has_disk = any(found is not None and found.device == "nvme" for _, found in sections)
    for section, found in sections:
        if found is None or found.device != "nvme":
            given = found.model_fields_set if found is not None else set()
            own = ("nvme_path", "buffer_count", "max_in_cpu", *(() if has_disk else ("disk_io",)))
            because = "no effect here, because device is not nvme"
            lines += [f"zero_optimization.{section}.{name}: {because}" for name in own if name in given]
    if "aio" in config.model_fields_set and not has_disk:
        lines.append("aio: no effect here, because no device in zero_optimization is nvme")
    if compression_choice(config) is not None and config.zero_optimization.stage in (0, 2):
        stage = config.zero_optimization.stage
        lines.append(
            f"zero_optimization.stage {stage}: OneBitAdam works as with stage 1: each rank has a part of the optimizer "
            "state"
        )
    return lines


def _without_effect(section: Section, at: KeyPath) -> Iterator[str]:
    for path, own, _, value, rule in values_in(section, at):
        if path[-1] in own.model_fields_set and rule.kind == UNUSED and value not in rule.off:
            yield f"{dotted(path)}: no effect here, because {rule.text}"
