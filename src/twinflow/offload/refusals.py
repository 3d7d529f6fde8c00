"""What a loop must not do, found out before it makes a wrong result: old weights, gradients that no step would see.

Updates that start in backward (`early`) have taken gradients and options by the time `step` is called. What is changed
in between would be ignored, so it is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from twinflow.offload import changes
from twinflow.offload.bucket import Bucket, Job, Options, Param
from twinflow.offload.gather import TakenGradient
from twinflow.offload.torch_state import changes as changed_options
from twinflow.offload.torch_state import on_host

if TYPE_CHECKING:
    from twinflow.offload.runtime import Runtime

# Of each parameter, a weak reference to the runtime that updates it. All optimizers of a process look here; an
# attribute of the parameter would be saved with it.
_OWNERS: Any = WeakTensorKeyDictionary()


def check_layout(param: Param, grad: Tensor | None) -> None:
    """Gradients have to be dense."""
    if grad is not None and grad.layout != torch.strided:
        raise ValueError(
            f"{param.name} has a sparse gradient, which is not supported. Build its module with sparse=False"
        )


def check_taken(params: Sequence[Param], num_gathered: int) -> None:
    """In `step`, with gradients that were taken in backward: `.grad` is as backward has left it."""
    for param in params:
        grad = param.tensor.grad
        if grad is not None and not isinstance(grad, TakenGradient):
            raise RuntimeError(
                f"{param.name}.grad was set by hand, and step() would not use it: gradients are taken as backward "
                "makes them (early=True). Build the optimizer with early=False, or drop the step with zero_grad()"
            )
        is_complete = param.hits == num_gathered and not param.is_late and not param.is_sharded
        if grad is None and is_complete:
            raise RuntimeError(
                f"{param.name}.grad was dropped after backward, when its update had already begun (early=True). Drop "
                "all of a step with the optimizer's zero_grad(), or build the optimizer with early=False"
            )


def check_options(job: Job | None, groups: Sequence[Options], names: Iterable[str] | None) -> None:
    """In `step`: options are still those that the update has begun with. None: any that the groups have."""
    if job is None or job.is_part:
        return
    for i, (group, seen) in enumerate(zip(groups, job.options, strict=True)):
        wanted = seen if names is None else [name for name in names if name in seen]
        now = {name: on_host(group[name]) for name in wanted if name in group and _can_compare(group[name])}
        for name, value in changed_options(now, seen).items():
            raise RuntimeError(
                f"{name} of param_groups[{i}] was changed to {value!r} between backward() and step(), when the update "
                f"had already begun with {seen.get(name)!r} (early=True, as with the engine). Change it before "
                "backward() or after step(), or build the optimizer with early=False"
            )


def _can_compare(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_can_compare, value))
    return value is None or isinstance(value, (bool, int, float, str, Tensor))


def check_unwritten(params: Sequence[Param], job: Job | None) -> None:
    """In `step`, before any weight of the job can have been sent: nobody has written to weights since backward."""
    if job is None or job.is_part:
        return
    # Weights of the step before may still arrive, but not those that this step's forward has waited for.
    written = changes.written(param for param in params if param.was_hit and param.is_seen)
    if written:
        raise RuntimeError(
            f"{written[0].name} was written to between backward() and step(), when its update had already begun "
            "(early=True): the new values would be lost. Write to weights before backward() or after step()"
        )


def check_seen(param: Param) -> None:
    """In backward: the forward has waited for this parameter's weights, or there was nothing to wait for."""
    if param.is_seen or param.is_bypassed or not any(bucket.due for bucket in param.buckets if not bucket.is_parked):
        return
    raise RuntimeError(
        f"{param.name} was used by a forward that had not waited for its last update: a method of the model was "
        "called, or its parameter was read, past the forward of the module that has it. Call the optimizer's wait() "
        "first, or go through forward()"
    )


def check_scaled(is_scaled: bool, steps: int, scale: float) -> None:
    """In a backward under an engine: the loss was divided by the step's backwards, and multiplied with its scale."""
    if not is_scaled and (steps > 1 or scale != 1.0):
        raise RuntimeError(
            f"loss.backward() was called, which neither divides by gradient_accumulation_steps ({steps}) nor applies "
            f"the loss scale ({scale:g}). Call engine.backward(loss), or engine.scale(loss).backward()"
        )


def note_bypassed(params: Iterable[Param]) -> list[Bucket]:
    """In `step`: parameters with gradients that no forward has waited for. From now on it waits for their buckets."""
    found: dict[Bucket, None] = {}
    for param in params:
        param.is_bypassed |= param.was_hit and not param.is_seen
        param.is_seen = False
        if param.is_bypassed:
            found.update(dict.fromkeys(bucket for bucket in param.buckets if not bucket.is_parked))
    return list(found)


def forward_before_step(can_drop: bool) -> RuntimeError:
    """The update of a backward has begun, and a forward comes instead of `step`."""
    drop = ", drop this one with the optimizer's zero_grad()" if can_drop else ""
    return RuntimeError(
        "a forward runs before step(), but the update of the last backward has already begun (early=True). "
        f"Call step() after every `accumulation_steps` backwards{drop}, or build the optimizer with early=False"
    )


def cannot_drop(has_ranks: bool) -> RuntimeError:
    """`zero_grad` comes when the update has begun."""
    if has_ranks:
        why = "and other ranks go on with it. Call step() on all of them"
    else:
        why = "and cannot be taken back. Call step(); with max_grad_norm or skip_nonfinite=True, and without "
        why += "delayed_update, a step can be dropped"
    return RuntimeError(f"zero_grad() between backward() and step(): the update has already begun (early=True), {why}")


def check_free(tensors: Iterable[tuple[str, nn.Parameter]]) -> None:
    """No other optimizer has these parameters. One that nobody holds any more is closed."""
    for name, tensor in tensors:
        owner = _owner(tensor)
        if owner is None:
            continue
        if owner.is_forgotten:
            owner.close()
        else:
            raise ValueError(f"{name} already has a TwinOptimizer. Call its close() before building another")


def claim(params: Iterable[Param], runtime: Runtime) -> None:
    """These parameters are this runtime's."""
    for param in params:
        _OWNERS[param.tensor] = weakref.ref(runtime)


def release(params: Iterable[Param]) -> None:
    """They are nobody's again."""
    for param in params:
        _OWNERS.pop(param.tensor, None)


def _owner(tensor: nn.Parameter) -> Any:
    reference = _OWNERS.get(tensor)
    owner = reference() if reference is not None else None
    return owner if owner is not None and not owner.board.is_closing else None
