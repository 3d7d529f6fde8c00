# SPDX-License-Identifier: Apache-2.0
"""Checks that raise an error for a training loop that would otherwise produce wrong results.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together. A job is one
optimizer step.

The runtime calls them in autograd's thread (`check_layout`, `check_seen`) and in `step`. They read the fields of
parameters and of the open job, which belong to the thread that calls the runtime (runtime.py). Only `note_bypassed`
changes such fields.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterable, Sequence

import torch
from torch import Tensor

from twinflow.errors import invalid_value, wrong_state
from twinflow.offload.bucket import Bucket, Param
from twinflow.offload.torch_state import changes as changed_options
from twinflow.rules.rule import Options


def check_layout(param: Param, grad: Tensor | None) -> None:
    """Raise ValueError if the gradient is sparse."""
    if grad is not None and grad.layout != torch.strided:
        raise invalid_value(
            f"{param.name}.grad.layout",
            grad.layout,
            "torch.strided, because sparse gradients are not supported",
            "Build the module of this parameter with sparse=False.",
        )


def changed_option(before: Sequence[Options], now: Sequence[Options], names: Container[str] | None) -> str:
    """Return a phrase that names the first option that was changed since backward, or "" if none was.

    `before`: the options during backward. `names` limits the comparison to these options; None compares all options.
    """
    for i, (group, seen) in enumerate(zip(now, before, strict=True)):
        known = {name: value for name, value in group.items() if names is None or name in names}
        comparable = {name: value for name, value in known.items() if name in seen and _can_compare(value)}
        for name in changed_options(comparable, seen):
            return f"{name} of param_groups[{i}] was changed"
    return ""


def _can_compare(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_can_compare, value))
    return value is None or isinstance(value, (bool, int, float, str, Tensor))


def check_seen(param: Param) -> None:
    """Raise RuntimeError in backward if the forward used this parameter without waiting for its last update."""
    if (
        param.is_seen
        or param.is_bypassed
        or not param.was_updated  # the buckets may be due for other parameters
        or not any(bucket.due for bucket in param.buckets if not bucket.offloads_params)
    ):
        return
    raise wrong_state(
        f"A forward has used {param.name} without waiting for the parameter's last update",
        "the forward ran neither the model's hooks nor torch functions, as with a CUDA graph or a C++ extension",
        "Call the optimizer's wait() before such a forward.",
    )


def note_bypassed(params: Iterable[Param], is_traced: bool) -> list[Bucket]:
    """Mark the parameters that a compiled graph has used without running our hooks, and return their buckets.

    `step` calls this function with the parameters that it updates, and waits for these buckets itself from then on.
    Their next forward has to wait for them again.
    """
    found: dict[Bucket, None] = {}
    for param in params:
        param.is_bypassed |= is_traced and param.was_hit and not param.is_seen
        param.is_seen = False
        param.was_updated = True
        if param.is_bypassed:
            found.update(dict.fromkeys(bucket for bucket in param.buckets if not bucket.offloads_params))
    return list(found)


def too_late(what: str, has_ranks: bool) -> RuntimeError:
    """Return the error for an access between backward and `step` when updates have already changed weights.

    `what`: a clause in the past tense that names the access.
    """
    why = "other ranks already use the new weights" if has_ranks else "cannot be undone"
    undo = "" if has_ranks else ", or set max_grad_norm or skip_nonfinite=True, with which updates wait for step()"
    return wrong_state(
        f"{what} between backward() and step(), which is too late",
        f"updates of this step have already been made during backward and {why}",
        "The step has been completed with the gradients so far, so weights and optimizer state are consistent and can "
        "be saved. Declare the number of backwards in a step with accumulation_steps=N, or build the optimizer with "
        f"early=False (zero_optimization.offload_optimizer.early: false in a config){undo}",
    )


def warn_of_own_gradient(reason: str) -> None:
    """Warn that gradients which the user reads or changes are not averaged over the ranks."""
    warnings.warn(
        f"{reason}. On several ranks .grad is the gradient of this rank's batches and not the average over the ranks, "
        "which step() computes. A norm or a limit of it therefore differs from that of one process. To clip gradients, "
        "use max_grad_norm or max_grad_value of the optimizer (gradient_clipping in a config). To read the average, "
        "call twinflow.compat.zero.safe_get_full_grad(param) on all ranks.",
        stacklevel=3,
    )


def used_twice(param: Param) -> RuntimeError:
    """Return the error for a `step` that finds in `.grad` a gradient that the last step has used."""
    return wrong_state(
        f"step() cannot update {param.name}",
        "its gradient was not reset after the last step, which has used the gradient and reused its memory",
        "Call zero_grad() after step(), or build the optimizer with early=False to use gradients again as torch does",
    )
