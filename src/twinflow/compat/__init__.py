# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's names for twinflow, for DeepSpeed scripts that should run unchanged.

Importing this package changes nothing. `install()` and `python -m twinflow.compat` make the names available: an import
finder provides the modules of `deepspeed`, which are made from the table in names.py, and a distribution provides its
version. A name is resolved at its first use. Every module is marked as a package. Python therefore asks the finder for
`y` in `from deepspeed.x import y` if `x` has no `y`, and the finder can raise an error with a remedy.

A name that is not supported can be imported, because a script may mention it and not use it. It is a class
(`Unavailable`) that raises NotImplementedError when it is called, also as a base class. A constant raises it when it is
compared, printed or used as a key.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from os import PathLike
from types import ModuleType
from typing import Any

from twinflow.compat.names import ALIASES, TABLE, VERSION, Entry, Ours, Refused, Through
from twinflow.errors import wrong_state

__all__ = ["VERSION", "install", "uninstall"]

NAME = "deepspeed"
_DOCS = "docs/compat.md lists all names"


class CompatModule(ModuleType):
    """A module `deepspeed` or `deepspeed.x` whose attributes come from the table."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{NAME}.{path}" if path else NAME, f"twinflow under the names of DeepSpeed {VERSION}.")
        self._path = path
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        entry, through = (entries(self._path).get(key) for key in (name, "*"))
        if name.startswith("__") and entry is None:
            raise AttributeError(name)
        source = importlib.import_module(through.module) if isinstance(through, Through) else None
        if isinstance(entry, Ours):
            found = entry.resolve()
        elif entry is None and is_module(join(self._path, name)):
            found = module_at(join(self._path, name))
        elif entry is None and hasattr(source, name):
            found = getattr(source, name)
        elif refused_at(join(self._path, name)) is not None:
            return unavailable(self._path, name)  # not stored here: its module, if it is one, may be imported later
        else:
            raise AttributeError(missing(self._path, name))
        setattr(self, name, found)
        return found

    def __dir__(self) -> list[str]:
        own = [name for name, entry in entries(self._path).items() if isinstance(entry, Ours)]
        return sorted({*own, *children(self._path)})


class Unavailable(type):
    """The class of names that are not supported. A script may import them, and use them in isinstance()."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{cls._reason}")

    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(name if name.startswith("__") else cls._reason)

    def __iter__(cls) -> Any:
        raise NotImplementedError(cls._reason)

    _reason: str


class UnavailableConstant(Unavailable):
    """The class of names in upper case, whose values scripts compare, print and use as keys. They would do so with the
    class in silence.
    """

    def __eq__(cls, other: object) -> bool:
        raise NotImplementedError(cls._reason)

    def __hash__(cls) -> int:
        raise NotImplementedError(cls._reason)

    def __str__(cls) -> str:
        raise NotImplementedError(cls._reason)


@cache
def unavailable(path: str, name: str) -> Unavailable:
    """What a name that is not supported gives. There is one object for each name."""
    kind = UnavailableConstant if name.isupper() else Unavailable
    return kind(name, (), {"_reason": missing(path, name), "__module__": f"{NAME}.{path}" if path else NAME})


def entries(path: str) -> Mapping[str, Entry]:
    """The table's entries for one module, by name."""
    return TABLE.get(real_path(path), {})


def real_path(path: str) -> str:
    """The path under which the table lists a module. Some modules have two paths."""
    for alias, path_of_it in ALIASES.items():
        if path == alias or path.startswith(f"{alias}."):
            return path_of_it + path[len(alias) :]
    return path


def is_module(path: str) -> bool:
    """Whether the table has a module at this path or below it."""
    real = real_path(path)
    return any(name == real or name.startswith(f"{real}.") for name in (*TABLE, *ALIASES))


def children(path: str) -> list[str]:
    """The names of the modules directly below a module."""
    real = real_path(path)
    start = f"{real}." if real else ""
    return sorted({name[len(start) :].split(".")[0] for name in (*TABLE, *ALIASES) if name.startswith(start)} - {""})


def join(path: str, name: str) -> str:
    """The path of a module below another one."""
    return f"{path}.{name}" if path else name


def missing(path: str, name: str) -> str:
    """The error message for a name that is unknown or refused."""
    whole, refused = f"{NAME}.{join(path, name)}", refused_at(join(path, name))
    if refused is not None:
        return f"{whole} is not available in twinflow.compat. {refused.remedy}."
    known = sorted({*(key for key, one in entries(path).items() if isinstance(one, Ours)), *children(path)})
    near = get_close_matches(name, {*known, *entries(path)}, 1)
    hint = f"Did you mean {near[0]}?" if near else f"Available names: {', '.join(known)}."
    return (
        f"{whole} is not available in twinflow.compat. {hint} {_DOCS}. To use DeepSpeed, run without twinflow.compat."
    )


def module_at(path: str) -> CompatModule:
    """The module object of a path. There is one object for each path. The top module is twinflow.compat.deepspeed."""
    if not path:
        top = importlib.import_module("twinflow.compat.deepspeed")
        assert isinstance(top, CompatModule)
        return top
    real = real_path(path)
    if real != path:
        return module_at(real)
    parent, _, last = path.rpartition(".")
    above = module_at(parent)
    if last not in vars(above):
        setattr(above, last, CompatModule(path))
    found: CompatModule = vars(above)[last]
    return found


class CompatFinder(MetaPathFinder, Loader):
    """A finder for sys.meta_path that provides `deepspeed`, the modules below it and its version."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """The spec of a module of `deepspeed`, None for other packages. ModuleNotFoundError if the table lacks it."""
        top, _, below = fullname.partition(".")
        if top != NAME:
            return None
        if is_module(below) or not below or refused_at(below) is not None:
            return ModuleSpec(fullname, self, is_package=True)
        above, _, last = below.rpartition(".")
        raise ModuleNotFoundError(missing(above, last))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module of the table. Both paths of an alias give the same module object."""
        return module_at(spec.name.partition(".")[2])

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: the attributes of the module are resolved at their first use."""

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        """The distribution `deepspeed`, from which libraries read DeepSpeed's version before they import it."""
        name = getattr(context, "name", None)
        return [CompatDistribution()] if name in (None, NAME) else []


def refused_at(path: str) -> Refused | None:
    """The entry that refuses a name, or a module above it."""
    parts = path.split(".")
    for i in range(len(parts)):
        entry = entries(".".join(parts[:i])).get(parts[i])
        if isinstance(entry, Refused):
            return entry
    return None


class CompatDistribution(importlib.metadata.Distribution):
    """The metadata of `deepspeed` for importlib.metadata."""

    def read_text(self, filename: str | PathLike[str]) -> str | None:
        """The METADATA file with name and version. None for other files."""
        if str(filename) != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\nSummary: twinflow.compat, not DeepSpeed\n"

    def locate_file(self, path: str | PathLike[str]) -> Any:
        raise FileNotFoundError(str(path))


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
    ours = {name: one for name, one in sys.modules.items() if name.split(".")[0] == NAME}
    for name, module in ours.items():
        if not isinstance(module, CompatModule):
            continue
        del sys.modules[name]
        parent, _, last = name.rpartition(".")
        if parent in ours and refused_at(name.partition(".")[2]) is not None:
            vars(ours[parent]).pop(last, None)  # an `Unavailable` again, until it is imported as a module again
