# SPDX-License-Identifier: Apache-2.0
"""Faster blocks: torch.compile for each block of a model, and float8 for the matrix products in them.

Both change modules in place and keep the names of all parameters, so a checkpoint of a model with them loads in a model
without them, and the other way round. The embedding, the head and everything else outside of the blocks stays as it is.
Blocks are those of `twinflow.offload.blocks`.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from twinflow.activations.wrap import Checkpointed
from twinflow.conflicts import refuse
from twinflow.errors import incompatible, invalid_value
from twinflow.offload.blocks import Block, find_blocks

LOGGER = logging.getLogger("twinflow")
_BLOCKS: Final = "compile.blocks"
_FLOAT8: Final = "float8.enabled"
# Lowest compute capability of a GPU for each recipe of torchao: Ada and newer, Hopper and newer.
_CAPABILITIES: Final = {"tensorwise": (8, 9), "rowwise": (9, 0), "rowwise_with_gw_hp": (9, 0)}
_MULTIPLE: Final = 16  # float8 matrix products need sizes that are multiples of it


def compile_blocks(
    model: nn.Module, device: torch.device, backend: str = "inductor", options: Mapping[str, Any] | None = None
) -> int:
    """Compile each block with `block.compile()`, and return the number of blocks. torch compiles them when they first
    run, and equal blocks share one graph.

    `device`: the device on which the model runs. `options`: further arguments of torch.compile. A checkpointed block
    (`checkpoint_layers`) is compiled inside of its checkpoint. A small function is compiled first, so that a missing
    compiler raises a ValueError here, and not in the first forward.
    """
    blocks = _blocks(model, _BLOCKS)
    for block in blocks:
        _check_checkpoints(block)
    _check_compiler(backend, device)
    for block in blocks:
        forward = vars(block.module).get("forward")
        compiled: Any = forward if isinstance(forward, Checkpointed) else block.module
        compiled.compile(backend=backend, **(options or {}))
    return len(blocks)


def has_compiled_blocks(model: nn.Module) -> bool:
    return any(block.module._compiled_call_impl is not None for block in find_blocks(model))


def _blocks(model: nn.Module, key: str) -> list[Block]:
    found = find_blocks(model)
    if not found:
        remedy = "This model has no ModuleList or Sequential with trainable members. Leave the key out."
        raise invalid_value(key, True, "false for a model without blocks", remedy)
    return found


def _check_checkpoints(block: Block) -> None:
    """Raise a ValueError for checkpoints that Dynamo would have to trace."""
    for name, module in block.module.named_modules():
        forward = vars(module).get("forward")
        if isinstance(forward, Checkpointed):
            checks = {"selective compiled": forward.is_selective, "inner compiled": module is not block.module}
            refuse("Other keys of the config", checks, layer=f"{block.name}.{name}".rstrip("."))


def _check_compiler(backend: str, device: torch.device) -> None:
    from torch._dynamo import list_backends

    known = list_backends(exclude_tags=())
    if backend not in known:
        raise invalid_value("compile.backend", backend, known)
    if backend != "inductor":  # the other backends of torch need no compiler
        return
    try:
        small = torch.compile(_small, backend=backend)
        small(torch.ones(8, device=device))
    except Exception as error:  # any error of the compiler, of Triton or of torch
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = lines[0].strip() if lines else type(error).__name__
        needed = "Triton and a C compiler" if device.type == "cuda" else "a C++ compiler"
        raise incompatible(
            _BLOCKS,
            "this machine",
            f"torch.compile fails for a small function on {device.type} ({reason.rstrip('.')})",
            f"Install {needed}, or do not compile.",
        ) from error


def _small(x: Tensor) -> Tensor:
    return x * 2 + 1


def use_float8(model: nn.Module, device: torch.device, recipe: str = "tensorwise", emulate: bool = False) -> int:
    """Replace the linear layers of the blocks by torchao's Float8Linear, and return their number. The parameters stay
    the same objects.

    `device`: the device on which the model runs. `recipe`: the granularity of scales. `emulate`: round to float8, but
    compute in the dtype of the weights. Call it before the optimizer is built, because the optimizer puts hooks on
    modules. Raises ValueError without torchao, on a device without float8, and if no layer can be replaced.
    """
    if recipe not in _CAPABILITIES:
        raise invalid_value("float8.recipe", recipe, _CAPABILITIES)
    _check_float8(device, recipe, emulate)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    left: list[str] = []

    def is_replaced(module: nn.Linear, name: str) -> bool:
        if isinstance(module, Float8Linear):
            return False
        if not _can_replace(module):
            left.append(name)
            return False
        return True

    blocks = _blocks(model, _FLOAT8)
    for block in blocks:
        if not isinstance(block.module, nn.Linear):
            convert_to_float8_training(block.module, config=config, module_filter_fn=is_replaced)
    count = sum(isinstance(module, Float8Linear) for block in blocks for module in block.module.modules())
    if not count:
        remedy = f"Their sizes must be multiples of {_MULTIPLE}. Leave the key out."
        raise invalid_value(_FLOAT8, True, "false for a model whose blocks have no suitable linear layers", remedy)
    rest = f"; {len(left)} are not suitable, such as {left[0]}" if left else ""
    LOGGER.info(f"float8: {count} linear layers of {len(blocks)} blocks compute in float8 ({recipe}){rest}")
    return count


def _check_float8(device: torch.device, recipe: str, emulate: bool) -> None:
    if importlib.util.find_spec("torchao") is None:
        remedy = 'Install it with pip install "twinflow[float8]", or leave the key out.'
        raise invalid_value(_FLOAT8, True, "false without the package torchao", remedy)
    if emulate:
        return
    least = _CAPABILITIES[recipe]
    has = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if has is None or has < least:
        here = f"a GPU of compute capability {has[0]}.{has[1]}" if has is not None else "no GPU"
        remedy = f"Here is {here}. Leave the key out."
        expected = f"false without a GPU of compute capability {least[0]}.{least[1]} or more for recipe {recipe!r}"
        raise invalid_value(_FLOAT8, True, expected, remedy)


def _can_replace(module: nn.Linear) -> bool:
    """Whether a linear layer does exactly what nn.Linear does, with ordinary weights of suitable sizes. A layer with
    another forward or with hooks would lose them.
    """
    weight = module.weight
    is_plain = type(module).forward is nn.Linear.forward and "forward" not in vars(module)
    has_hooks = bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
    is_ordinary = type(weight) is nn.Parameter and weight.is_floating_point() and weight.layout == torch.strided
    return is_plain and not has_hooks and is_ordinary and not any(size % _MULTIPLE for size in weight.shape)
