"""TwinOptimizer in a loop of Accelerate: `twin_optimizer(accelerator, model, ...)` instead of an optimizer of torch.

Two things differ from any other optimizer, and both are settled here, for the one accelerator that is given: its
`clip_grad_norm_` must not look for gradients that have left (norms.py), and its `prepare` must not copy the state to
the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from twinflow.errors import invalid_value
from twinflow.integrations.given import take_over
from twinflow.integrations.norms import Clipping
from twinflow.integrations.optional import need
from twinflow.optim.twin import TwinOptimizer

_PRECISIONS = ("no", "bf16")


def twin_optimizer(
    accelerator: Any, model: nn.Module, rule: str | Optimizer | Callable[..., Optimizer] = "adamw", **options: Any
) -> Any:
    """A TwinOptimizer for a loop of Accelerate, prepared; the optimizer itself is its `optimizer`.

    Options are TwinOptimizer's. Updates start in backward, and the accelerator's accumulation is declared. Where the
    loop clips, give its limit as `max_grad_norm`. The model goes to the accelerator's device.
    """
    need("accelerate", "accelerate", "twinflow.integrations.accelerate")
    check_accelerator(accelerator)
    if options.get("loss_scale") is not None:
        remedy = "accelerator.backward() does not apply it. Use bf16, or a loop of your own."
        raise invalid_value("loss_scale", options["loss_scale"], [None], remedy)
    model.to(accelerator.device)
    options = {"early": True, "accumulation_steps": accelerator.gradient_accumulation_steps, **options}
    given = isinstance(rule, Optimizer)
    twin = take_over(rule, model, **options) if given else TwinOptimizer(model, rule, **options)  # type: ignore[arg-type]
    return connect(accelerator, twin)


def connect(accelerator: Any, twin: TwinOptimizer, name: str = "max_norm") -> Any:
    """The optimizer as the accelerator wants it; the accelerator's clipping as this optimizer wants it."""
    if twin.runtime.settings.early:
        intercept_clipping(accelerator, twin, name)
    # Its state has its place, and is too large for another. What is prepared once is left alone by `prepare`.
    return accelerator.prepare(twin, device_placement=[False])


def intercept_clipping(accelerator: Any, twin: TwinOptimizer, name: str) -> None:
    """Let `accelerator.clip_grad_norm_` speak of the norm of this optimizer, whose gradients it cannot see.

    On this one object, for the parameters of this optimizer; others are clipped as before.
    """
    clipping, before = Clipping(twin, name), accelerator.clip_grad_norm_

    def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor | None:
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if clipping.covers(params):
            return clipping.clip(max_norm, norm_type)
        found: Tensor | None = before(params, max_norm, norm_type=norm_type)
        return found

    accelerator.clip_grad_norm_ = clip_grad_norm_


def check_accelerator(accelerator: Any) -> None:
    """Refuse what would train wrongly."""
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if accelerator.num_processes > 1 or kind != "NO":  # of one process, too, it would make a DistributedDataParallel
        remedy = (
            "twinflow.initialize() shares the work between ranks. Start one process with python, not with torchrun, "
            "and without RANK and WORLD_SIZE in its environment."
        )
        found = f"{accelerator.num_processes} ({kind})"
        raise invalid_value("processes of Accelerate", found, "one, without a launcher", remedy)
    precision = getattr(accelerator, "mixed_precision", "no")
    if accelerator.scaler is not None or precision not in _PRECISIONS:  # without a GPU fp16 comes without a scaler
        remedy = 'Use "bf16", or an fp16 model with loss_scale= in a loop of your own.'
        raise invalid_value("mixed_precision", precision, _PRECISIONS, remedy)
