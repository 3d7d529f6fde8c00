# SPDX-License-Identifier: Apache-2.0
"""Imports only go down: each module imports lower layers or its own folder (the order is in CONTRIBUTING.md).

In the core (`CORE`) three more things are not allowed: `Any`, imports for type checking alone, and private names of
other modules. torch's own private names are fine where it has no public ones.
"""

from __future__ import annotations

import ast
from collections.abc import Set
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[2] / "src" / "twinflow"
LAYERS = [
    ("errors", "files", "version"),
    ("conflicts", "rules"),
    ("config", "trace", "launch"),
    ("codes", "loss", "attention"),
    ("native", "gpu"),
    ("device", "state_dict"),
    ("dist",),
    ("planner", "activations"),
    ("offload",),
    ("parallel", "speedups"),
    ("zero",),
    ("optim",),
    ("data", "checkpoint", "monitor"),
    ("engine",),
    ("build_optimizer",),
    ("build_parallel",),
    ("build",),
    ("models", "bench"),
    ("compat", "integrations"),
    ("cli",),
    ("__main__",),
]
LAYER = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@cache
def nodes(source: str) -> list[ast.AST]:
    """All nodes of a module, parsed once for all tests."""
    return list(ast.walk(ast.parse(source)))


def imports(source: str) -> list[ast.Import | ast.ImportFrom]:
    """Of a module, at its top or inside a function."""
    return [node for node in nodes(source) if isinstance(node, (ast.Import, ast.ImportFrom))]


def imported_rooms(source: str, known: set[str]) -> set[str]:
    """Rooms of twinflow that a module imports."""
    found = set()
    for node in imports(source):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif node.level == 0 and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "twinflow" and len(parts) > 1 and parts[1] in known:
                found.add(parts[1])
    return found


MODULES = sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT or path.name != "__init__.py")


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_only_go_down(path: Path) -> None:
    own = room(path)
    assert own in LAYER, f"{own} has no layer yet: add it to LAYERS here and to CONTRIBUTING.md"
    for other in imported_rooms(path.read_text(), set(LAYER)) - {own}:
        assert LAYER[other] < LAYER[own], f"{path.name} (layer {LAYER[own]}) imports {other} (layer {LAYER[other]})"


def test_an_upward_import_is_found() -> None:
    assert imported_rooms("from twinflow.cli import main", set(LAYER)) == {"cli"}
    assert imported_rooms("def f():\n    import twinflow.optim.host", set(LAYER)) == {"optim"}
    assert imported_rooms("from twinflow import native", set(LAYER)) == {"native"}


def test_no_relative_imports() -> None:
    for path in MODULES:
        relative = [n for n in imports(path.read_text()) if isinstance(n, ast.ImportFrom) and n.level]
        assert not relative, f"{path} uses a relative import, which the layer test does not follow"


CORE = ("offload", "zero", "optim", "engine", "rules")
CORE_MODULES = [path for path in MODULES if room(path) in CORE]
# The one name for values whose type only the user knows; it is given out, and not used inside.
USERS_VALUES = "engine/values.py"
# Private names that are torch's or Python's, whoever else has one of the same name.
NOT_OURS = {*dir(nn.Module()), *dir(torch.Tensor), "_replace"}


def names_any(source: str) -> bool:
    for node in nodes(source):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "Any" for alias in node.names):
            return True
        if isinstance(node, ast.Attribute) and node.attr == "Any":
            return True
        if isinstance(node, ast.Name) and node.id == "Any":
            return True
    return False


def type_checking_imports(source: str) -> set[str]:
    """Modules that are imported for type checking alone."""
    found = set()
    for node in nodes(source):
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            continue
        for inner in ast.walk(node):
            if isinstance(inner, ast.ImportFrom):
                found.add(inner.module or "")
            elif isinstance(inner, ast.Import):
                found |= {alias.name for alias in inner.names}
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def is_own(node: ast.expr) -> bool:
    """`self`, `cls` or `super()`: a class may use what it inherits."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


@cache
def private_definitions(source: str) -> frozenset[str]:
    """Private names that a module defines: functions, classes, variables, methods and attributes."""
    found = set()
    for node in nodes(source):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            found.add(node.attr)
    return frozenset(name for name in found if is_private(name))


def foreign_private_names(source: str, others: Set[str]) -> set[str]:
    """Private names of twinflow that a module uses and does not define; `others`: those of all modules."""
    used = set()
    for node in nodes(source):
        if isinstance(node, ast.Attribute) and not is_own(node.value):
            used.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("twinflow"):
            used |= {alias.name for alias in node.names}
    return {name for name in used if is_private(name)} & others - private_definitions(source) - NOT_OURS


@cache
def all_private_names() -> frozenset[str]:
    return frozenset().union(*(private_definitions(path.read_text()) for path in MODULES))


@pytest.mark.parametrize("path", CORE_MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_core_has_real_types(path: Path) -> None:
    if str(path.relative_to(ROOT)) != USERS_VALUES:
        assert not names_any(path.read_text()), "use a Protocol, a union or `object` instead of Any"


@pytest.mark.parametrize("path", CORE_MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_core_has_no_import_cycles(path: Path) -> None:
    hidden = type_checking_imports(path.read_text())
    if room(path) == "rules":
        hidden -= {"torch"}  # reading a config imports the rules, and must not import torch, which takes seconds
    assert not hidden, "move the type to a lower module, or describe it there by a Protocol"


@pytest.mark.parametrize("path", CORE_MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_core_uses_no_private_names_of_others(path: Path) -> None:
    assert not foreign_private_names(path.read_text(), all_private_names())


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_fully_shard_is_imported_inside_functions(path: Path) -> None:
    """Its import takes over a second, and only ZeRO stage 3 needs it (dist/sharded.py)."""
    body = ast.parse(path.read_text()).body
    at_top = [ast.unparse(node) for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert not [one for one in at_top if "torch.distributed.fsdp" in one or "torch.distributed.tensor" in one]


def test_what_the_core_must_not_have_is_found() -> None:
    assert names_any("from typing import Any")
    assert names_any("import typing\nx: typing.Any = 1")
    assert not names_any("x: object = 1  # Any")
    assert type_checking_imports("if TYPE_CHECKING:\n    from twinflow.optim.twin import X") == {"twinflow.optim.twin"}
    assert type_checking_imports("if typing.TYPE_CHECKING:\n    import torch") == {"torch"}
    assert foreign_private_names("from twinflow.a import _b", {"_b"}) == {"_b"}
    assert foreign_private_names("x.first._b()", {"_b"}) == {"_b"}
    assert foreign_private_names("class A:\n    def _b(self): ...\nA()._b()", {"_b"}) == set()
    assert foreign_private_names("self._b = tensor._version", {"_b"}) == set()
