"""Packages that twinflow does not depend on."""

from __future__ import annotations

import importlib
from typing import Any


def need(module: str, packages: str, what: str) -> Any:
    """An optional package's module; an ImportError that names what to install where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{what} needs {module.split('.')[0]} ({error}). Install it: pip install {packages}"
        ) from error
