"""Prints the packages that twinflow and its tests need, one requirement on each line.

The Makefile installs them while the library is compiled. `pip install .[test]` would do one after the other.
"""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
print(*project["dependencies"], *project["optional-dependencies"]["test"], sep="\n")
