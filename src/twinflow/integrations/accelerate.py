# SPDX-License-Identifier: Apache-2.0
"""TwinOptimizer in a loop of Accelerate: `twin_optimizer(accelerator, model, ...)` instead of a torch optimizer.

This module replaces `clip_grad_norm_` of the given accelerator, because that function must not read gradients that were
moved to the host (norms.py). It also prevents `prepare` from copying the optimizer state to the GPU, and from wrapping
the model in DistributedDataParallel: with several processes, TwinOptimizer averages the gradients (ranks.py).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from twinflow.conflicts import conflict
from twinflow.errors import invalid_value, wrong_state
from twinflow.integrations import need
from twinflow.integrations.files import StreamedState
from twinflow.integrations.given import take_over
from twinflow.integrations.norms import Clipping
from twinflow.integrations.ranks import (
    EXPERTS,
    check_experts,
    divide_experts,
    divided,
    make_zero,
    replace_params,
    report_steps,
    start_ranks,
    waiting,
)
from twinflow.integrations.scaler import TwinScaler, loss_scale_for
from twinflow.launch.environment import rank_environment
from twinflow.offload.clipping import clip_values
from twinflow.optim.twin import TwinOptimizer
from twinflow.speedups import has_compiled_blocks
from twinflow.zero.partitioned import regroup

_PRECISIONS = ("no", "bf16")


def twin_optimizer(
    accelerator: Any, model: nn.Module, rule: str | Optimizer | Callable[..., Optimizer] = "adamw", **options: Any
) -> Any:
    """Build a TwinOptimizer and prepare it for a loop of Accelerate. The TwinOptimizer is the attribute `optimizer` of
    the result.

    `options` are those of TwinOptimizer. By default, updates start in backward, and the accelerator sets the number of
    accumulation steps. If the loop clips gradients, pass its limit as `max_grad_norm`. With several processes `zero` is
    the ZeRO stage, 2 by default, and `expert_parallel_size` of them have all experts together. The model is moved to
    the accelerator's device. Raises ValueError for settings of the accelerator that are not supported.
    """
    need("accelerate", "accelerate", "twinflow.integrations.accelerate")
    check_accelerator(accelerator)
    if options.get("loss_scale") is not None:
        remedy = "accelerator.backward() does not apply a loss scale. Use bf16, or your own loop."
        raise invalid_value("loss_scale", options["loss_scale"], [None], remedy)
    keep_plain(accelerator, model)
    model.to(accelerator.device)
    options = {"early": True, "accumulation_steps": accelerator.gradient_accumulation_steps, **options}
    options |= scaling(accelerator)
    zero = make_zero(options, accelerator.num_processes)
    size = check_experts(options, accelerator.num_processes)
    if accelerator.num_processes > 1:
        keep_even(accelerator)
    named = {name: value for name, value in options.items() if name not in ("zero", "param_groups")}
    replaced = start_ranks(model, zero, {**named, "zero": zero})
    divide_experts(model, size, zero, accelerator.device, rule)
    options["zero"] = zero
    options.pop(EXPERTS, None)
    if options.get("param_groups") is not None:
        options["param_groups"] = regroup(options["param_groups"], replaced)
    if isinstance(rule, Optimizer):
        replace_params(rule, replaced)
        twin = take_over(rule, model, **options)
    else:
        twin = TwinOptimizer(model, rule, **options)
    prepared = connect(accelerator, twin)
    _keep_state(accelerator, prepared, twin)
    return prepared


def connect(accelerator: Any, twin: TwinOptimizer, name: str = "max_norm") -> Any:
    """Prepare the optimizer for the accelerator. `name`: the clipping option of the loop.

    With `early` or several ranks, `accelerator.clip_grad_norm_` is replaced by a function that returns the norm of this
    optimizer's gradients, over all ranks. It is replaced on this object and for the parameters of this optimizer only.
    Other parameters are clipped as before.
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
    has_ranks = twin.team is not None and twin.team.world > 1
    if not twin.runtime.settings.early and not has_ranks and not has_scaler:
        return prepared
    clipping = Clipping(twin, name)
    before, before_value = accelerator.clip_grad_norm_, accelerator.clip_grad_value_

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
        elif has_ranks:  # the gradients of this rank are not yet averaged over ranks
            if twin.max_grad_value != clip_value:
                raise conflict("Hugging Face and Lightning", "clipping by value")
        else:
            for grad in (param.grad for param in params if param.grad is not None):
                clip_values(grad, clip_value * twin.loss_scale)  # the gradients are multiplied by the scale

    accelerator.clip_grad_norm_ = clip_grad_norm_
    if has_ranks:
        report_steps(twin)
        for call in ("wait_for_everyone", "gather", "reduce"):  # other methods call these
            setattr(accelerator, call, waiting(f"accelerator.{call}()", getattr(accelerator, call)))
    if has_ranks or has_scaler:
        accelerator.clip_grad_value_ = clip_grad_value_
    return prepared


def check_accelerator(accelerator: Any) -> None:
    """Raise ValueError for settings of the accelerator that would give wrong results."""
    if not hasattr(accelerator, "distributed_type"):
        raise invalid_value("accelerator", accelerator, "an accelerate.Accelerator", "Pass Accelerator().")
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind != "NO" and not kind.startswith("MULTI_"):
        expected = "that of data parallelism without FSDP, DeepSpeed and Megatron"
        remedy = "TwinOptimizer divides the state over processes itself. Remove the plugin, and use zero=1, 2 or 3."
        raise invalid_value("The distributed_type of Accelerate", kind, expected, remedy)
    ranks = None if dist.is_initialized() else rank_environment(os.environ)
    if ranks is not None and ranks.world_size != accelerator.num_processes:
        expected = f"{ranks.world_size}, the number that the launcher has started"
        remedy = "Call twinflow.init_distributed() at the start of the script, before Accelerator()."
        raise invalid_value("The number of processes of Accelerate", accelerator.num_processes, expected, remedy)
    precision = getattr(accelerator, "mixed_precision", "no")
    if accelerator.scaler is None and precision not in _PRECISIONS:  # without a GPU fp16 has no scaler
        remedy = 'Use "bf16". "fp16" needs a GPU.'
        raise invalid_value("mixed_precision", precision, _PRECISIONS, remedy)


def scaling(accelerator: Any) -> dict[str, Any]:
    """The option `loss_scale` of a TwinOptimizer for an accelerator with a gradient scaler (fp16)."""
    scaler = getattr(accelerator.scaler, "original", accelerator.scaler)
    return {"loss_scale": loss_scale_for(scaler)} if scaler is not None and scaler.is_enabled() else {}


class PlainModels:
    """Replaces `accelerator.prepare_model`, so that the models of TwinOptimizers are not wrapped in
    DistributedDataParallel, which would reduce gradients that TwinOptimizer has already taken. A model whose blocks are
    compiled is not compiled as a whole.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._original = accelerator.prepare_model
        self.models: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def __call__(self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        if model not in self.models:
            return self._original(model, device_placement=device_placement, evaluation_mode=evaluation_mode)
        # `evaluation_mode` skips only the wrapper. The model is on its device: the optimizer was built there. Some of
        # its weights may be on the host, and must stay there.
        with without_dynamo(self._accelerator) if has_compiled_blocks(model) else nullcontext():
            return self._original(model, device_placement=False, evaluation_mode=True)


@contextmanager
def without_dynamo(accelerator: Any) -> Iterator[None]:
    """Prevents the accelerator from compiling models. Its state is shared by all accelerators, so it is restored."""
    plugin = accelerator.state.dynamo_plugin
    before = plugin.backend
    plugin.backend = type(before).NO
    try:
        yield
    finally:
        plugin.backend = before


def keep_plain(accelerator: Any, model: nn.Module) -> None:
    """Prevents `accelerator.prepare` from wrapping this model. Raises RuntimeError if it is already wrapped."""
    if not hasattr(accelerator, "prepare_model"):
        return
    if not isinstance(accelerator.prepare_model, PlainModels):
        accelerator.prepare_model = PlainModels(accelerator)
    plain = accelerator.prepare_model.models
    is_alone = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type)) == "NO"
    was_prepared = any(one is model for one in accelerator._models) and model not in plain
    if isinstance(model, DistributedDataParallel) or (was_prepared and not is_alone):
        raise wrong_state(
            "TwinOptimizer cannot train this model",
            "accelerator.prepare() has wrapped it in DistributedDataParallel",
            "Call twin_optimizer() before accelerator.prepare().",
        )
    plain.add(model)


def keep_even(accelerator: Any) -> None:
    """Raises ValueError if ranks may have different numbers of batches: a rank would wait for a rank that has ended."""

    def join_uneven_inputs(*_: Any, **__: Any) -> Any:
        raise conflict("Hugging Face and Lightning", "uneven batches", option="accelerator.join_uneven_inputs()")

    if not accelerator.even_batches:
        raise conflict("Hugging Face and Lightning", "uneven batches", option="even_batches=False")
    accelerator.join_uneven_inputs = join_uneven_inputs


def _keep_state(accelerator: Any, prepared: Any, twin: TwinOptimizer) -> None:
    """Makes `save_state`, `load_state` and `get_state_dict` of the accelerator work with state that ranks share.

    The hooks of Accelerate run on all ranks before its files are written or read. Here they write the optimizer state
    to the same folder, one parameter at a time, and Accelerate's file of the optimizer contains only a reference.
    """
    whole = divided(twin)
    if whole is not None and accelerator.project_configuration.save_on_each_node:
        raise conflict("Hugging Face and Lightning", "save_on_each_node", option="ProjectConfiguration")
    number = sum(isinstance(one.optimizer, TwinOptimizer) for one in accelerator._optimizers[:-1])
    own_state_dict, own_load, own_weights = prepared.state_dict, prepared.load_state_dict, accelerator.get_state_dict
    written: list[dict[str, Any]] = []  # the reference, between the hook and `state_dict`
    opened: list[StreamedState] = []  # the folder, between the hook and `load_state_dict`

    def streamed(folder: str) -> StreamedState:
        return StreamedState(twin, Path(folder), number)

    def before_save(models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        if any(one is prepared for one in accelerator._optimizers):
            write = streamed(output_dir).write  # no rank leaves it before all have come
            written[:] = [waiting("accelerator.save_state()", write)() if accelerator.num_processes > 1 else write()]

    def before_load(models: list[Any], input_dir: str) -> None:
        if any(one is prepared for one in accelerator._optimizers):
            opened[:] = [streamed(input_dir)]
        if whole is not None:
            models[:] = [whole if model is twin.model else model for model in models]

    def state_dict() -> Any:
        return written.pop() if written else own_state_dict()

    def load_state_dict(state: Any) -> None:
        if opened:
            opened.pop().load_state_dict(state)
        else:
            own_load(state)

    def get_state_dict(model: nn.Module, unwrap: bool = True) -> Any:
        if whole is not None and model is twin.model:
            return whole.gather("get_state_dict()")
        return own_weights(model, unwrap=unwrap)

    accelerator.register_save_state_pre_hook(before_save)
    accelerator.register_load_state_pre_hook(before_load)
    prepared.state_dict = state_dict
    prepared.load_state_dict = load_state_dict
    if whole is not None:
        accelerator.get_state_dict = get_state_dict
