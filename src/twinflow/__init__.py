# SPDX-License-Identifier: Apache-2.0
"""twinflow: train models larger than GPU memory, with the optimizer on the host.

Names are imported at their first use, so that `import twinflow` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from twinflow.version import __version__

if TYPE_CHECKING:
    from twinflow import config, data, models, native, optim, rules
    from twinflow.build import add_config_arguments, initialize
    from twinflow.engine import Engine
    from twinflow.integrations.pretrained import from_pretrained
    from twinflow.launch.environment import init_distributed
    from twinflow.optim.twin import TwinOptimizer

__all__ = [
    "Engine",
    "TwinOptimizer",
    "__version__",
    "add_config_arguments",
    "config",
    "data",
    "from_pretrained",
    "init_distributed",
    "initialize",
    "models",
    "native",
    "optim",
    "rules",
]
_HOMES = {
    "TwinOptimizer": "twinflow.optim.twin",
    "Engine": "twinflow.engine",
    "from_pretrained": "twinflow.integrations.pretrained",
    "initialize": "twinflow.build",
    "add_config_arguments": "twinflow.build",
    "init_distributed": "twinflow.launch.environment",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in __all__:
        return importlib.import_module(f"twinflow.{name}")
    raise AttributeError(f"module 'twinflow' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
