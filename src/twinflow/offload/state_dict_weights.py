# SPDX-License-Identifier: Apache-2.0
"""Weights on the host in the model's state dicts (`offload_param`).

A state dict has copies of the weights on the host. The user may write to them, so `UserCopies` gets them. Frozen
weights in memory are views instead, because they are not part of an optimizer state. Weights of which this rank has
only a part are tensors without values, which cannot be saved.

A view of trained weights would be wrong: a write to it would not change a separate fp32 master, and would join an upper
half with the lower half of another number. After a step the view could belong to a free store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import NoReturn, SupportsIndex

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from twinflow.errors import wrong_state
from twinflow.offload.hooks import Hook
from twinflow.offload.host_params import HostParams
from twinflow.offload.weight_copies import UserCopies
from twinflow.offload.weight_guard import cover, uncover


class NoValues(Tensor):
    """A weight in a state dict of which this rank has only a part: a meta tensor that cannot be saved."""

    @classmethod
    def like(cls, weight: Tensor) -> Tensor:
        return torch.empty_like(weight, device="meta").as_subclass(cls)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise wrong_state(
            "This state dict cannot be saved",
            "with offload_param and several ranks, it has the shapes and no values of weights, because each rank has "
            "only a part of them",
            "Save whole weights: call engine.save_16bit_model(), engine.module_state_dict(), "
            "accelerator.get_state_dict() or model.save_pretrained() on all ranks.",
        )


# Whether `listed` reads a state dict. The threads of a process have a value each.
_IS_LISTING: ContextVar[bool] = ContextVar("_IS_LISTING", default=False)


def listed(model: nn.Module) -> dict[str, object]:
    """The model's state dict, for its names, shapes and other objects: weights that it would copy are `NoValues`.
    Names that are not those of parameters, as hooks may give them, have their values.
    """
    reset = _IS_LISTING.set(True)
    try:
        found: dict[str, object] = model.state_dict()
    finally:
        _IS_LISTING.reset(reset)
    params = dict(model.named_parameters(remove_duplicate=False))
    if any(isinstance(value, NoValues) and name not in params for name, value in found.items()):
        return model.state_dict()
    return found


class StateDictHooks:
    """Hooks that put the weights into state dicts. `before_read`: called before the weights of a module are read."""

    def __init__(
        self,
        params: HostParams,
        user_copies: UserCopies,
        before_read: Callable[[Sequence[nn.Parameter]], None],
    ) -> None:
        self._params = params
        self._user_copies = user_copies
        self._before_read = before_read

    def attach(self, modules: Iterable[nn.Module]) -> list[RemovableHandle]:
        handles: list[RemovableHandle] = []
        for module in modules:
            handles.append(module.register_state_dict_pre_hook(Hook(self._before)))  # type: ignore[no-untyped-call]
            handles.append(module.register_state_dict_post_hook(Hook(self._after)))  # type: ignore[no-untyped-call]
            # Hooks of the user, which may rename or convert tensors, run after it.
            module._state_dict_hooks.move_to_end(handles[-1].id, last=False)  # type: ignore[attr-defined]
        return handles

    def _before(self, module: nn.Module, *_: object) -> None:
        """Removes the guard before state_dict() reads the parameters. `_after` then replaces the values in the dict."""
        own = [p for p in module._parameters.values() if isinstance(p, nn.Parameter) and self._params.holds(p)]
        self._before_read(own)
        uncover(own)

    def _after(self, module: nn.Module, state: dict[str, object], prefix: str, *_: object) -> None:
        for name, param in module._parameters.items():
            if param is None or not self._params.holds(param) or self._params.is_shown(param):
                continue
            cover((param,))
            key = prefix + name
            if key not in state:
                continue
            buffer = self._params.buffers_of(param)[0]
            is_copied = buffer.bucket is not None or buffer.is_on_disk
            if not buffer.is_whole or (is_copied and _IS_LISTING.get()):
                state[key] = NoValues.like(self._params.view_of(param))
                continue
            found = self._params.on_host(param)
            if is_copied:
                self._user_copies.add(param, found.detach(), is_counted=True)
            state[key] = found
