"""Finds the optimizer of a parameter: DeepSpeed's `safe_*` functions get only the parameter."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from twinflow.errors import invalid_value
from twinflow.offload.bucket import Param
from twinflow.optim.twin import TwinOptimizer


class Owners:
    """The optimizers that `initialize` has built, by parameter. Both are weak references."""

    def __init__(self) -> None:
        self._found: Any = WeakTensorKeyDictionary()

    def add(self, optimizer: TwinOptimizer) -> None:
        """Registers the parameters of an optimizer."""
        for index, param in enumerate(optimizer.runtime.params):
            self._found[param.tensor] = (weakref.ref(optimizer), index)

    def find(self, tensor: Tensor) -> tuple[TwinOptimizer, Param] | None:
        """The optimizer and its record of a parameter. None for a parameter that is not trained."""
        found = self._found.get(tensor)
        optimizer = found[0]() if found is not None else None
        if optimizer is None or optimizer.runtime.is_closed:
            return None
        return optimizer, optimizer.runtime.params[found[1]]

    def need(self, tensor: Tensor) -> tuple[TwinOptimizer, Param]:
        """Like `find`, but ValueError if no optimizer has the parameter."""
        found = self.find(tensor)
        if found is None:
            raise invalid_value(
                "param",
                f"a tensor of shape {tuple(tensor.shape)}",
                "a parameter that initialize() was given to train",
                "Take the parameter from engine.module.named_parameters().",
            )
        return found


OWNERS = Owners()  # One for each process, as the functions of DeepSpeed get no engine.
