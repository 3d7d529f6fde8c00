"""DeepSpeed's names for twinflow, for DeepSpeed scripts that should run unchanged.

Importing this package changes nothing. `install()` and `python -m twinflow.compat` make the names available.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

from twinflow.compat.finder import NAME, CompatFinder, CompatModule
from twinflow.compat.names import VERSION
from twinflow.errors import wrong_state

__all__ = ["VERSION", "install", "uninstall"]


def install() -> None:
    """Makes `import deepspeed` find twinflow from now on, even if DeepSpeed is installed.

    Call this function before transformers and accelerate are imported: they look for DeepSpeed once, at import.
    """
    there = sys.modules.get(NAME)
    if there is not None and not isinstance(there, CompatModule):
        raise wrong_state(
            "twinflow.compat.install() cannot replace deepspeed",
            "DeepSpeed is imported already",
            "Call install() before the first import of deepspeed, or run the script with python -m twinflow.compat.",
        )
    if not any(isinstance(finder, CompatFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, CompatFinder())
        importlib.invalidate_caches()


def uninstall() -> None:
    """Undoes `install`. Modules that a script has already imported keep working."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, CompatFinder)]
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == NAME and isinstance(module, CompatModule):
            del sys.modules[name]
