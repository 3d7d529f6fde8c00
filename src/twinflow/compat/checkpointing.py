"""`deepspeed.checkpointing`: a function that keeps only its inputs, and runs again in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint as run_again

from twinflow.config import load_config
from twinflow.errors import invalid_value

_SECTION = "Set it in activation_checkpointing of the config: initialize() checkpoints the model's layers so."


class _Configured:
    """Whether `configure` was called, as scripts ask."""

    is_done = False


_CONFIGURED = _Configured()


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Check what is asked of `checkpoint`: where inputs are kept is for the config to say.

    `contiguous_checkpointing`, `num_checkpoints`, `synchronize` and `profile` change nothing that is computed, in
    DeepSpeed as here.
    """
    asked = {"partition_activations": partition_activations, "checkpoint_in_cpu": checkpoint_in_cpu}
    if deepspeed_config is not None:
        section = load_config(deepspeed_config).activation_checkpointing
        asked["partition_activations"] = asked["partition_activations"] or section.partition_activations
        asked["checkpoint_in_cpu"] = asked["checkpoint_in_cpu"] or section.cpu_checkpointing
    for name, value in asked.items():
        if value:
            raise invalid_value(f"{name} for deepspeed.checkpointing.checkpoint()", value, [False], _SECTION)
    _CONFIGURED.is_done = True


def is_configured() -> bool:
    """Whether `configure` was called."""
    return _CONFIGURED.is_done


def reset() -> None:
    """Nothing is kept between steps."""


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """The function's outputs; what it saves for backward are its inputs alone."""
    return run_again(function, *args, use_reentrant=False)


non_reentrant_checkpoint = checkpoint
