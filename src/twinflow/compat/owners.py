"""Which optimizer a parameter belongs to: DeepSpeed's `safe_*` functions are given the parameter alone."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from twinflow.errors import invalid_value
from twinflow.offload.bucket import Param
from twinflow.optim.twin import TwinOptimizer


class Owners:
    """Optimizers that `initialize` has built, by parameter; it keeps neither alive."""

    def __init__(self) -> None:
        self._found: Any = WeakTensorKeyDictionary()

    def add(self, optimizer: TwinOptimizer) -> None:
        """Know its parameters."""
        for index, param in enumerate(optimizer.runtime.params):
            self._found[param.tensor] = (weakref.ref(optimizer), index)

    def find(self, tensor: Tensor) -> tuple[TwinOptimizer, Param] | None:
        """The optimizer, and what it knows a parameter as; None for one that is not trained."""
        found = self._found.get(tensor)
        optimizer = found[0]() if found is not None else None
        if optimizer is None or optimizer.runtime.is_closed:
            return None
        return optimizer, optimizer.runtime.params[found[1]]

    def need(self, tensor: Tensor) -> tuple[TwinOptimizer, Param]:
        """The same; ValueError where there is none."""
        found = self.find(tensor)
        if found is None:
            remedy = "Take it from engine.module.named_parameters()."
            raise invalid_value(
                "param", f"of shape {tuple(tensor.shape)}", "a parameter that initialize() was to train", remedy
            )
        return found


OWNERS = Owners()  # the one of this process, as torch's default process group is
