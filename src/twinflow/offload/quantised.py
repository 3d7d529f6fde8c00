# SPDX-License-Identifier: Apache-2.0
"""Quantised frozen weights: tensors of torchao, and the parameters of bitsandbytes.

The base model of QLoRA is quantised and frozen, and adapters on top of it are trained. Quantised weights are never
cast or divided over ranks.

A tensor of torchao consists of ordinary tensors: integers, scales and zero points. With weights on the host
(param_offload.py) these are frozen parameters of their own, which are fetched for their block. The torchao tensor stays
the same object. Weights of bitsandbytes, and on several ranks all quantised weights, stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from twinflow.dist.sharded import is_dtensor


def is_quantised(tensor: Tensor) -> bool:
    """Whether a tensor is a quantised weight, which cannot be trained."""
    if tensor.requires_grad or is_dtensor(tensor):
        return False
    return _is_nested(tensor) or type(tensor).__module__.partition(".")[0] == "bitsandbytes"


def _is_nested(tensor: Tensor) -> bool:
    """Whether a tensor consists of other tensors. torch's function narrows the type to one that is no Tensor."""
    return is_traceable_wrapper_subclass(tensor)


def inner_tensors(tensor: Tensor, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The ordinary tensors of which a tensor consists, by their attribute. An ordinary one consists of itself, with an
    empty name.
    """
    if not _is_nested(tensor):
        yield path, tensor
        return
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined,unused-ignore]  # of the wrapper subclass
    for name in names:
        yield from inner_tensors(getattr(tensor, name), f"{path}.{name}" if path else name)


def quantised_in(model: nn.Module) -> dict[str, nn.Parameter]:
    """The quantised parameters, by every name."""
    return {name: p for name, p in model.named_parameters(remove_duplicate=False) if is_quantised(p)}


def is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor is a quantised weight that consists of ordinary tensors."""
    return is_quantised(tensor) and _is_nested(tensor)


def plain_params(given: Iterable[nn.Parameter], values: Collection[Tensor]) -> list[nn.Parameter]:
    """These weights. Quantised ones are replaced by the parameters of which they consist and that are in `values`."""
    params = [param for param in given if not is_wrapper(param)]
    inner = [one for param in given if is_wrapper(param) for _, one in inner_tensors(param)]
    return params + [one for one in inner if isinstance(one, nn.Parameter) and one in values]


def rebuilt(tensor: Tensor, kind: type, change: Callable[[Tensor], Tensor]) -> Tensor:
    """A quantised weight of the class `kind` like `tensor`, from changed ordinary tensors."""
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined,unused-ignore]
    inner: dict[str, Tensor] = {}
    for name in names:
        one: Tensor = getattr(tensor, name)
        inner[name] = rebuilt(one, type(one), change) if _is_nested(one) else change(one)
    with torch._C.DisableTorchFunctionSubclass():
        size, stride = tensor.size(), tensor.stride()
    made: Tensor = kind.__tensor_unflatten__(inner, context, size, stride)  # type: ignore[attr-defined]
    return made


def move_quantised(
    model: nn.Module, device: torch.device, aside: Collection[Tensor] = ()
) -> tuple[dict[Tensor, nn.Parameter], dict[nn.Parameter, Tensor]]:
    """Moves quantised parameters to a device, one after the other. Returns the new parameter of each.

    Those in `aside` have no values there. The second result has these: for each of the ordinary tensors of which they
    consist, and which are parameters now, its values on the host.
    """
    moved: dict[Tensor, nn.Parameter] = {}
    values: dict[nn.Parameter, Tensor] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is None or not is_quantised(param):
                continue
            if param not in moved:
                made = param if param.device == device else param.to(device)
                moved[param] = made if isinstance(made, nn.Parameter) else nn.Parameter(made, requires_grad=False)
                if param in aside:
                    values.update(_take_values(moved[param], dict(inner_tensors(param))))
            module._parameters[name] = moved[param]
    return moved, values


def _take_values(tensor: Tensor, given: dict[str, Tensor], path: str = "") -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Makes the contiguous tensors of which a weight consists parameters without memory. `given`: their values."""
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined,unused-ignore]
    for name in names:
        inner: Tensor = getattr(tensor, name)
        place = f"{path}.{name}" if path else name
        if _is_nested(inner):
            yield from _take_values(inner, given, place)
        elif inner.numel() and inner.is_contiguous() and given[place].is_contiguous():
            nothing = torch.zeros((), dtype=inner.dtype, device=inner.device).expand(inner.shape)
            param = nn.Parameter(nothing, requires_grad=False)
            setattr(tensor, name, param)
            yield param, given[place].detach().to("cpu")


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
