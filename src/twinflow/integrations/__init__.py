# SPDX-License-Identifier: Apache-2.0
"""twinflow in the training loops of Hugging Face's Trainer, of Accelerate and of Lightning. These packages are
imported only by modules of this folder. The rest of twinflow does not need them.
"""

from __future__ import annotations

import importlib
from typing import Any


def need(module: str, packages: str, what: str) -> Any:
    """Import a module of an optional package. Raises ImportError with the name of the package if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{what} needs {module.split('.')[0]} ({error}). Install it with: pip install {packages}"
        ) from error
