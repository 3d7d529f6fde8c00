"""Imports only go down: each module imports lower layers or its own folder (the order is in CONTRIBUTING.md)."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "twinflow"
LAYERS = [
    ("errors", "version"),
    ("rules",),
    ("config", "trace", "launch"),
    ("codes", "loss", "attention"),
    ("native", "gpu"),
    ("device",),
    ("dist", "activations"),
    ("planner",),
    ("offload",),
    ("parallel",),
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
def imports(source: str) -> list[ast.Import | ast.ImportFrom]:
    """Of a module, at its top or inside a function."""
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Import, ast.ImportFrom))]


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
