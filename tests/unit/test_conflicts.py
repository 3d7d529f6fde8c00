"""Every conflict of the table is used in the code, under its name, and makes a whole error."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from twinflow.conflicts import CONFLICTS, DIVISIONS, Conflict, conflict, refuse

SOURCE = Path(__file__).parents[2] / "src" / "twinflow"
ALL = [(group, name) for group, found in CONFLICTS.items() for name in found]


def strings_by_file() -> Iterator[set[str]]:
    for path in SOURCE.rglob("*.py"):
        if path.name != "conflicts.py":
            yield {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}


def test_every_conflict_is_used() -> None:
    files = list(strings_by_file())
    for group, name in ALL:
        if name not in DIVISIONS:
            assert any({group, name} <= strings for strings in files), f"nothing refuses {name!r} of {group!r}"


def test_the_code_names_only_conflicts_that_exist() -> None:
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "conflict":
                names = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
                if len(names) == 2:
                    assert tuple(names) in ALL, f"{path.name}, line {node.lineno}"


@pytest.mark.parametrize(("group", "name"), ALL)
def test_errors_are_whole_sentences(group: str, name: str) -> None:
    found = CONFLICTS[group][name]
    values = dict.fromkeys(re.findall(r"\{(\w+)", " ".join(vars(found).values())), 7)
    text = str(found.error(**values))
    assert "{" not in text
    assert text.endswith((".", "?"))
    assert found.remedy
    assert not found.reason.endswith(".")


def test_the_first_that_is_found_is_raised() -> None:
    with pytest.raises(ValueError, match=r"^delayed_update=True cannot be used with offload_params=True, because"):
        refuse("Weights on the host", {"zero": False, "delayed_update": True, "ratio": True}, ratio=0.5)
    refuse("Weights on the host", {"zero": False, "ratio": None})


def test_an_unknown_name_is_found_even_if_nothing_is_refused() -> None:
    with pytest.raises(AssertionError, match="table"):
        refuse("Weights on the host", {"ratioo": False})
    with pytest.raises(KeyError):
        conflict("Weights on the host", "ratioo")


def test_values_are_filled_in() -> None:
    made = Conflict("ratio={ratio!r}", "x", "y is {least:g}", "Use {ratio}.").error(ratio="auto", least=2.0)
    assert str(made) == "ratio='auto' cannot be used with x, because y is 2. Use auto."
