# SPDX-License-Identifier: Apache-2.0
"""Parameters that lost their values when their optimizer was closed, and the errors for their use (`offload_param`).

With several ranks each rank has only a part of the weights on the host. After `close(keep_weights=False)`, or after a
failure, no weights are left.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, MutableMapping

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from twinflow.errors import wrong_state

_LOST: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()
_REFUSING: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules with a hook that raises an error


def refuse_use(lost: Iterable[Tensor], modules: Iterable[nn.Module]) -> None:
    """Notes that these parameters have no values. Modules that have one of them raise an error when they are used."""
    _LOST.update(dict.fromkeys(lost))
    for module in modules:
        if module not in _REFUSING and any(param in _LOST for param in module.parameters(recurse=False)):
            module.register_forward_pre_hook(_refuse)
            module.register_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]
            _REFUSING.add(module)


def _refuse(module: nn.Module, *_: object) -> None:
    check_values((name, param) for name, param in module._parameters.items() if param is not None)


def check_values(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises RuntimeError if a parameter has no values."""
    for name, param in named:
        if is_lost(param):
            raise wrong_state(
                f"{name} cannot be used",
                "it has no values: with offload_param and several ranks each rank has a part of the weights, until the "
                "optimizer is closed; close(keep_weights=False) releases all weights; and after a failure in the "
                "background, or of a disk, they cannot be read",
                "Save the whole model before close() or destroy(), for example with save_pretrained(), and load it.",
            )


def is_lost(param: Tensor) -> bool:
    """Whether a parameter has had no values since its optimizer was closed. It may have been converted since then."""
    if param not in _LOST:
        return False
    if param.is_floating_point():
        has_values = not bool(param.detach()[(0,) * param.dim()].isnan())
    else:
        has_values = any(param.stride())  # otherwise it is an expanded scalar
    if has_values:
        del _LOST[param]  # the forward asks once
    return not has_values
