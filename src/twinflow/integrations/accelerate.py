"""TwinOptimizer in a loop of Accelerate: `twin_optimizer(accelerator, model, ...)` instead of a torch optimizer.

This module replaces `clip_grad_norm_` of the given accelerator, because that function must not read gradients that were
moved to the host (norms.py). It also prevents `prepare` from copying the optimizer state to the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from twinflow.errors import invalid_value, wrong_state
from twinflow.integrations import need
from twinflow.integrations.given import take_over
from twinflow.integrations.norms import Clipping
from twinflow.integrations.scaler import TwinScaler, loss_scale_for
from twinflow.offload.clipping import clip_values
from twinflow.optim.twin import TwinOptimizer

_PRECISIONS = ("no", "bf16")


def twin_optimizer(
    accelerator: Any, model: nn.Module, rule: str | Optimizer | Callable[..., Optimizer] = "adamw", **options: Any
) -> Any:
    """Build a TwinOptimizer and prepare it for a loop of Accelerate. The TwinOptimizer is the attribute `optimizer` of
    the result.

    `options` are those of TwinOptimizer. By default, updates start in backward, and the accelerator sets the number of
    accumulation steps. If the loop clips gradients, pass its limit as `max_grad_norm`. The model is moved to the
    accelerator's device. Raises ValueError for settings of the accelerator that are not supported.
    """
    need("accelerate", "accelerate", "twinflow.integrations.accelerate")
    check_accelerator(accelerator, model)
    if options.get("loss_scale") is not None:
        remedy = "accelerator.backward() does not apply a loss scale. Use bf16, or your own loop."
        raise invalid_value("loss_scale", options["loss_scale"], [None], remedy)
    model.to(accelerator.device)
    options = {"early": True, "accumulation_steps": accelerator.gradient_accumulation_steps, **options}
    options |= scaling(accelerator)
    given = isinstance(rule, Optimizer)
    twin = take_over(rule, model, **options) if given else TwinOptimizer(model, rule, **options)  # type: ignore[arg-type]
    return connect(accelerator, twin)


def connect(accelerator: Any, twin: TwinOptimizer, name: str = "max_norm") -> Any:
    """Prepare the optimizer for the accelerator. `name`: the clipping option of the loop.

    With `early`, `accelerator.clip_grad_norm_` is replaced by a function that returns the norm of this optimizer's
    gradients. It is replaced on this object and for the parameters of this optimizer only. Other parameters are clipped
    as before.
    """
    if not hasattr(accelerator, "prepare"):
        raise invalid_value("accelerator", accelerator, "an accelerate.Accelerator", "Pass Accelerator().")
    # The state must stay where it is, because it may be too large for the GPU. A later `prepare` does not change an
    # optimizer that was prepared before.
    has_scaler = accelerator.scaler is not None
    if has_scaler:
        if not twin.scales_loss:
            remedy = "Build it with loss_scale=twinflow.optim.loss_scale.dynamic(), or use bf16."
            raise invalid_value("loss_scale of the TwinOptimizer", None, "a loss scale, for fp16", remedy)
        accelerator.scaler = TwinScaler(twin, accelerator.scaler)
    prepared = accelerator.prepare(twin, device_placement=[False])
    if has_scaler:
        accelerator.scaler.attach(prepared)
    if not twin.runtime.settings.early and not has_scaler:
        return prepared
    clipping, before, before_value = Clipping(twin, name), accelerator.clip_grad_norm_, accelerator.clip_grad_value_

    def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor | None:
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if clipping.covers(params):
            return clipping.clip(max_norm, norm_type)
        found: Tensor | None = before(params, max_norm, norm_type=norm_type)
        return found

    def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not clipping.covers(params):
            before_value(params, clip_value)
            return
        for grad in (param.grad for param in params if param.grad is not None):
            clip_values(grad, clip_value * twin.loss_scale)  # the gradients are multiplied by the scale

    accelerator.clip_grad_norm_ = clip_grad_norm_
    if has_scaler:
        accelerator.clip_grad_value_ = clip_grad_value_
    return prepared


def check_accelerator(accelerator: Any, model: nn.Module) -> None:
    """Raise ValueError for settings of the accelerator that would give wrong results. If torchrun has started a single
    process, the accelerator is changed to that of a process without torchrun. `model`: the model to train.
    """
    if not hasattr(accelerator, "distributed_type"):
        raise invalid_value("accelerator", accelerator, "an accelerate.Accelerator", "Pass Accelerator().")
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if as_one_process(accelerator, model):
        kind = "NO"
    if accelerator.num_processes > 1 or kind != "NO":
        raise ValueError(
            f"The number of processes of Accelerate is {accelerator.num_processes} with distributed_type {kind}, but "
            "must be 1 without FSDP and DeepSpeed. Start one process. For several ranks use twinflow.initialize()."
        )
    precision = getattr(accelerator, "mixed_precision", "no")
    if accelerator.scaler is None and precision not in _PRECISIONS:  # without a GPU fp16 has no scaler
        remedy = 'Use "bf16". "fp16" needs a GPU.'
        raise invalid_value("mixed_precision", precision, _PRECISIONS, remedy)


def scaling(accelerator: Any) -> dict[str, Any]:
    """The option `loss_scale` of a TwinOptimizer for an accelerator with a gradient scaler (fp16)."""
    scaler = getattr(accelerator.scaler, "original", accelerator.scaler)
    return {"loss_scale": loss_scale_for(scaler)} if scaler is not None and scaler.is_enabled() else {}


def as_one_process(accelerator: Any, model: nn.Module) -> bool:
    """Sets the distributed_type of a single process under torchrun to NO, and returns whether this was done. Otherwise
    `prepare` would wrap the model in DistributedDataParallel, which reduces gradients that TwinOptimizer has already
    taken.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if accelerator.num_processes > 1 or not kind.startswith("MULTI_"):
        return False
    # On GPUs, recent versions do not wrap the model of a single process.
    wraps = kind == "MULTI_CPU" or getattr(accelerator, "multi_device", True)
    if wraps and any(one is getattr(model, "module", model) for one in accelerator._models):
        raise wrong_state(
            "TwinOptimizer cannot train this model",
            "accelerator.prepare() has wrapped it in DistributedDataParallel",
            "Call twin_optimizer() before accelerator.prepare(), or start the process with python instead of torchrun.",
        )
    partial = need("accelerate.state", "accelerate", "twinflow.integrations.accelerate").PartialState()
    for state in (accelerator.state, partial):  # an AcceleratorState copies the values of the PartialState
        state.distributed_type = type(state.distributed_type).NO
    return True
