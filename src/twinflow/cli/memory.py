"""How much memory a run of `twinflow train` will take, before it takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinflow.cli.settings import TrainSettings
from twinflow.errors import bad_value
from twinflow.models.gpt import GPTConfig, activation_bytes, count_params
from twinflow.offload.memory import free_host_bytes

_STATE_BYTES = {"fp32": 12.0, "bf16": 8.0, "int8": 6.1}  # a parameter, with its weight's host copy
_OVERHEAD_BYTES = 5 << 30  # the interpreter, CUDA's host side, page-locked slots, the text
_SHARE = 0.95  # of what is available: the rest of the machine lives too


@dataclass(frozen=True)
class MemoryPlan:
    """The state format that was chosen, and the sum behind it."""

    states: str
    state_bytes: int
    host_bytes: int  # with gradients that wait, and a reserve
    free_bytes: int
    why: str


def gradient_bytes(settings: TrainSettings, gpu_bytes: int | None) -> int:
    """Host memory for gradients: sums of micro-batches, or what waits for the norm, where the GPU has no room, and all
    of them where updates are delayed."""
    num_params = count_params(settings.model)
    if gpu_bytes is None:
        return 0
    room = (gpu_bytes - 2 * num_params) // 2
    if settings.accumulation > 1 and 4 * num_params > room:
        return 4 * num_params
    waits = settings.grad_clip > 0 or settings.precision == "fp16"
    return 2 * num_params if settings.delayed_update or (waits and 2 * num_params > room) else 0


def plan_memory(
    shape: GPTConfig, states: str, formats: Sequence[str], waiting: int, free_bytes: int | None = None
) -> MemoryPlan:
    """The widest state format that fits the host's memory beside `waiting` bytes of gradients; ValueError where none
    does. `states` other than "auto" fixes it instead.
    """
    free = free_host_bytes() if free_bytes is None else free_bytes
    usable = int(free * _SHARE)
    num_params = count_params(shape)
    sizes = {f: int(_STATE_BYTES[f] * num_params) for f in _STATE_BYTES if f in formats}
    needs = {f: size + waiting + _OVERHEAD_BYTES for f, size in sizes.items()}
    if states != "auto":
        return MemoryPlan(states, sizes[states], needs[states], free, "as asked for")
    for format, need in needs.items():
        if need <= usable or free == 0:
            skipped = [f"{f} would need {_gb(needs[f])}" for f in needs if needs[f] > need]
            return MemoryPlan(format, sizes[format], need, free, "; ".join(skipped) if skipped else "it fits")
    clip_hint = " Without clipping (--grad-clip 0) and accumulation, no gradient waits on the host." if waiting else ""
    raise bad_value(
        "host memory",
        f"{_gb(free)} available",
        f"at least {_gb(min(needs.values()))} for {num_params / 1e9:.2f} B parameters",
        f"Free some, or train a smaller model.{clip_hint}",
    )


def check_gpu(shape: GPTConfig, batch_size: int, gpu_bytes: int | None) -> str:
    """A line on the GPU's memory; ValueError where the weights alone do not fit."""
    if gpu_bytes is None:
        return "no GPU"
    weights = 2 * count_params(shape)
    work = activation_bytes(shape, batch_size, shape.context, shape.checkpoint_activations, 2)
    if weights > gpu_bytes:
        raise bad_value("GPU memory", _gb(gpu_bytes), f"at least {_gb(weights)}, for the weights alone")
    return f"{_gb(weights)} of weights and about {_gb(work)} of activations, of {_gb(gpu_bytes)}"


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
