# SPDX-License-Identifier: Apache-2.0
"""Copies of offloaded weights that are used after the run of their block (`offload_param`).

- The user's copies. Code outside of the block gets a copy, for example of `param.data` or in a state dict, and may
  write to it. torch counts the writes in the version of the copy, so that `UserCopies.store` finds them later.
- Copies in graphs. With create_graph=True a graph needs a weight after the backward of its block. If the weight changes
  before that graph is used, torch must raise an exception, as it does for a weight on the device.

Threads: the thread that uses a weight calls these methods, which is the one that runs the model or autograd's. They
never run at the same time, so there is no lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from twinflow.errors import wrong_state
from twinflow.offload.weight_buffers import WeightBuffer


class OnWrite(Protocol):
    """Called after the user's write to a weight. It stores the values when no update uses the state."""

    def __call__(self, param: Tensor, values: Tensor, *, is_running: bool = False, is_counted: bool = True) -> None:
        """`is_running`: the weight's block wrote to it while it ran. `is_counted`: the write increments the parameter's
        version.
        """
        ...


@dataclass(eq=False)
class _UserCopy:
    param: Tensor
    copied: Tensor
    version: int  # version of the copy when the user got it, or when a write to it was stored last
    is_counted: bool  # torch would increment the parameter's version for a write to the copy
    is_old: bool = False  # the weight has changed since, and the copy has not


class UserCopies:
    """The copies that the user has and may write to."""

    def __init__(self, on_write: OnWrite) -> None:
        self._on_write = on_write
        self._copies: list[_UserCopy] = []

    def add(self, param: Tensor, copied: Tensor, is_counted: bool) -> None:
        self._copies.append(_UserCopy(param, copied, copied._version, is_counted))

    def note_write(self, param: Tensor, values: Tensor) -> None:
        """Notes that a weight has new values. The copies of it are old, except the one with these values."""
        for it in self._copies:
            if it.param is param and _storage(it.copied) != _storage(values):
                it.is_old = True

    def note_step(self) -> None:
        for it in self._copies:
            it.is_old = True

    def store(self) -> None:
        """Stores copies that the user has written to. Forgets copies that the user does not have any more.

        Raises RuntimeError if the user has written to a copy from before a step or before another write to the weight,
        after all other copies are stored.
        """
        written = [it for it in self._copies if it.copied._version != it.version]
        stored: dict[int, Tensor] = {}
        is_lost = False
        for it in written:
            it.version = it.copied._version
            other = stored.get(id(it.param))  # a dict has several copies of a weight with several names
            if other is not None and torch.equal(other.to(it.copied.device), it.copied):
                it.is_old = False
            elif it.is_old:
                is_lost = True
            else:
                self._on_write(it.param, it.copied, is_counted=it.is_counted)
                stored[id(it.param)] = it.copied
        self._copies = [it for it in self._copies if _has_other_users(it.copied)]
        if is_lost:
            raise wrong_state(
                "A write to a copy of a weight on the host cannot be stored",
                "a step, or a write to the weight or to another copy of it, has changed the weight since the copy was "
                "made, and this copy would undo that",
                "Take a new copy with state_dict() or param.data before you write, or write to the parameter itself.",
            )


class GraphCopies:
    """The copies in graphs that were made with create_graph=True."""

    def __init__(self) -> None:
        self._copies: dict[int, list[Tensor]] = {}  # by the storage of the device buffer

    def add(self, view: Tensor) -> Tensor:
        """Copies a weight from its device buffer."""
        copied = view.clone()
        self._copies = {key: kept for key, known in self._copies.items() if (kept := _in_use(known))}
        self._copies.setdefault(_storage(view), []).append(copied)
        return copied

    def invalidate(self, buffer: WeightBuffer | None = None) -> None:
        """Increments the versions of the copies from a buffer, or of all, so that torch raises an exception in a
        backward that uses them.
        """
        for key in [_storage(buffer.flat)] if buffer is not None else [*self._copies]:
            torch._C._increment_version(self._copies.pop(key, []))


def _in_use(copies: list[Tensor]) -> list[Tensor]:
    return [copied for copied in copies if _has_other_users(copied)]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _has_other_users(copied: Tensor) -> bool:
    """Whether other tensors use the memory of this tensor."""
    return int(torch._C._storage_Use_Count(copied.untyped_storage()._cdata)) > 2
