# SPDX-License-Identifier: Apache-2.0
"""Prints the packages that twinflow and its tests need, one requirement on each line. The names of other extras may be
given instead of `test`.

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
extras = sys.argv[1:] or ["test"]
wanted = [one for extra in extras for one in project["optional-dependencies"][extra]]
print(*project["dependencies"], *wanted, sep="\n")
