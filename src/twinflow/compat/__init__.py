"""DeepSpeed's names over twinflow, for scripts that are written for DeepSpeed and shall not change.

Nothing here is in anybody's way until `install()` is called, or a script is run with `python -m twinflow.compat`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

from twinflow.compat.finder import NAME, CompatFinder, CompatModule
from twinflow.compat.names import VERSION

__all__ = ["VERSION", "install", "uninstall"]


def install() -> None:
    """Let `import deepspeed` find twinflow from now on, also where the real one is installed.

    Call it before anything that looks for DeepSpeed is imported: transformers and accelerate look once, when they are.
    """
    there = sys.modules.get(NAME)
    if there is not None and not isinstance(there, CompatModule):
        raise RuntimeError(
            "deepspeed is imported already, and it is the real one. Call twinflow.compat.install() before, or run the "
            "script with python -m twinflow.compat"
        )
    if not any(isinstance(finder, CompatFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, CompatFinder())
        importlib.invalidate_caches()


def uninstall() -> None:
    """Forget what `install` did; what a script has imported stays with it."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, CompatFinder)]
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == NAME and isinstance(module, CompatModule):
            del sys.modules[name]
