"""twinflow: train models larger than GPU memory, with the optimizer on the host.

Names are loaded when first used, so that `import twinflow` stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from twinflow.version import __version__

if TYPE_CHECKING:
    from twinflow import models, native, optim, rules
    from twinflow.optim.twin import TwinOptimizer

__all__ = ["TwinOptimizer", "__version__", "models", "native", "optim", "rules"]


def __getattr__(name: str) -> Any:
    if name == "TwinOptimizer":
        return importlib.import_module("twinflow.optim.twin").TwinOptimizer
    if name in __all__:
        return importlib.import_module(f"twinflow.{name}")
    raise AttributeError(f"module 'twinflow' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
