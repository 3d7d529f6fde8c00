"""Quantised frozen weights: tensors of torchao, and the parameters of bitsandbytes.

The base model of QLoRA is quantised and frozen, and adapters on top of it are trained. Quantised weights are never
cast, divided over ranks, or copied into flat buffers. They stay on the device that runs the model, also with
`offload_params`: they are small, and their format is known to their library only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from twinflow.dist.sharded import is_dtensor


def is_quantised(tensor: Tensor) -> bool:
    """Whether a tensor is a quantised weight, which cannot be trained."""
    if tensor.requires_grad or is_dtensor(tensor):
        return False
    return is_traceable_wrapper_subclass(tensor) or type(tensor).__module__.partition(".")[0] == "bitsandbytes"


def inner_tensors(tensor: Tensor, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The ordinary tensors of which a tensor consists, by their attribute. An ordinary one consists of itself, with an
    empty name.
    """
    if not is_traceable_wrapper_subclass(tensor):
        yield path, tensor
        return
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined,unused-ignore]  # of the wrapper subclass
    for name in names:
        yield from inner_tensors(getattr(tensor, name), f"{path}.{name}" if path else name)


def quantised_in(model: nn.Module) -> dict[str, nn.Parameter]:
    """The quantised parameters, by every name."""
    return {name: p for name, p in model.named_parameters(remove_duplicate=False) if is_quantised(p)}


def move_quantised(model: nn.Module, device: torch.device) -> None:
    """Moves quantised parameters to a device. They are new parameters then."""
    moved: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and is_quantised(param) and param.device != device:
                if param not in moved:
                    made = param.to(device)
                    moved[param] = made if isinstance(made, nn.Parameter) else nn.Parameter(made, requires_grad=False)
                module._parameters[name] = moved[param]


@contextmanager
def without_quantised(model: nn.Module) -> Iterator[None]:
    """A context in which the model does not have its quantised parameters, so that `Module.to` does not cast them."""
    places = [
        (module, name, param)
        for module in model.modules()
        for name, param in module._parameters.items()
        if param is not None and is_quantised(param)
    ]
    for module, name, _ in places:
        module._parameters[name] = None
    try:
        yield
    finally:
        for module, name, param in places:
            module._parameters[name] = param
