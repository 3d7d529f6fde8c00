"""`deepspeed.checkpointing`: activation checkpointing. A function keeps only its inputs and runs again in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint as run_again

from twinflow.config import load_config
from twinflow.errors import invalid_value

_SECTION = (
    "Set it in the section activation_checkpointing of the config: initialize() applies it to the model's layers."
)


class _Configured:
    """Records whether `configure` was called, for `is_configured`."""

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
    """Checks the options for `checkpoint`.

    `partition_activations` and `checkpoint_in_cpu` work through the config only: ValueError if one of them is true.
    `contiguous_checkpointing`, `num_checkpoints`, `synchronize` and `profile` have no effect on results, as in
    DeepSpeed.
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
    return _CONFIGURED.is_done


def reset() -> None:
    """Does nothing: no activations are kept between steps. DeepSpeed scripts call this function."""


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Calls `function` and saves only its inputs for backward."""
    return run_again(function, *args, use_reentrant=False)


non_reentrant_checkpoint = checkpoint
