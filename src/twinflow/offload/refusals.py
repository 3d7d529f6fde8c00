"""Errors about what a loop does, before it makes a wrong result."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import torch
from torch import Tensor

from twinflow.offload.bucket import Bucket, Param
from twinflow.offload.job import Job
from twinflow.offload.torch_state import changes as changed_options
from twinflow.rules.rule import Options


def check_layout(param: Param, grad: Tensor | None) -> None:
    """Gradients have to be dense."""
    if grad is not None and grad.layout != torch.strided:
        raise ValueError(
            f"{param.name} has a sparse gradient, which is not supported. Build its module with sparse=False"
        )


def changed_option(job: Job, now: Sequence[Options], names: Container[str] | None) -> str:
    """The option that was changed since the job began; "" if none was. Of these names; None: of all."""
    for i, (group, seen) in enumerate(zip(now, job.options, strict=True)):
        known = {name: value for name, value in group.items() if names is None or name in names}
        comparable = {name: value for name, value in known.items() if name in seen and _can_compare(value)}
        for name in changed_options(comparable, seen):
            return f"{name} of param_groups[{i}] is changed"
    return ""


def _can_compare(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_can_compare, value))
    return value is None or isinstance(value, (bool, int, float, str, Tensor))


def check_seen(param: Param) -> None:
    """In backward: the forward has waited for this parameter's weights, or there was nothing to wait for."""
    if (
        param.is_seen
        or param.is_bypassed
        or not any(bucket.due for bucket in param.buckets if not bucket.offloads_params)
    ):
        return
    raise RuntimeError(
        f"{param.name} was used by a forward that had not waited for its last update: neither the model's "
        f"hooks nor torch's "
        "functions saw it, as with a CUDA graph or a C++ extension. Call the optimizer's wait() before such a forward"
    )


def note_bypassed(params: Iterable[Param], is_traced: bool) -> list[Bucket]:
    """In `step`: parameters that a compiled graph has used past our hooks. From now on `step` waits for their
    buckets."""
    found: dict[Bucket, None] = {}
    for param in params:
        param.is_bypassed |= is_traced and param.was_hit and not param.is_seen
        param.is_seen = False
        if param.is_bypassed:
            found.update(dict.fromkeys(bucket for bucket in param.buckets if not bucket.offloads_params))
    return list(found)


def too_late(what: str, has_ranks: bool) -> RuntimeError:
    """`what` comes between backward and `step`, when updates have been written."""
    why = "which other ranks go on with" if has_ranks else "which cannot be undone"
    undo = "" if has_ranks else ", or give max_grad_norm or skip_nonfinite=True, with which updates wait for step()"
    return RuntimeError(
        f"{what} between backward() and step(), but updates of this step have already been made during "
        f"backward, {why}. "
        "The step has been completed with the gradients that had come: weights and state belong together and "
        "can be saved. "
        "Declare the number of backwards with accumulation_steps=, or build the optimizer with early=False "
        f"(zero_optimization.offload_optimizer.early: false in a config){undo}"
    )


def used_twice(param: Param) -> RuntimeError:
    """`step` finds a gradient in `.grad` that the last step has used."""
    return RuntimeError(
        f"step() finds no new gradient of {param.name}, and the last step has used the one before, whose memory serves "
        "others now. Call zero_grad() after step(), or build the optimizer with early=False to use gradients "
        "again as torch "
        "does"
    )
