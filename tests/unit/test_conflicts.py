# SPDX-License-Identifier: Apache-2.0
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


def placeholders(found: Conflict) -> set[str]:
    return set(re.findall(r"\{(\w+)", " ".join(vars(found).values())))


def calls(function: str) -> Iterator[tuple[str, ast.Call, ast.AST]]:
    """Calls of one of our functions: where they are, and the function that contains them."""
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        for outer in ast.walk(ast.parse(text)) if f"{function}(" in text else ():
            for node in ast.walk(outer) if isinstance(outer, ast.FunctionDef) else ():
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function:
                    yield f"{path.name}, line {node.lineno}", node, outer


def text_of(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def given(call: ast.Call) -> set[str]:
    return {keyword.arg for keyword in call.keywords if keyword.arg is not None}


def test_conflicts_that_the_code_names_exist_and_get_their_values() -> None:
    num_found = 0
    for where, call, _ in calls("conflict"):
        group, name = map(text_of, call.args)
        if group and name:
            assert (group, name) in ALL, where
            assert given(call) == placeholders(CONFLICTS[group][name]), where
            num_found += 1
    assert num_found > 15


def test_conflicts_that_are_looked_for_exist_and_get_their_values() -> None:
    num_found = 0
    for where, call, outer in calls("refuse"):
        table = call.args[1]
        if isinstance(table, ast.Name):  # the last one that was assigned before the call
            made = [node for node in ast.walk(outer) if isinstance(node, ast.Assign) and node.lineno < call.lineno]
            table = [node.value for node in made if ast.unparse(node.targets[0]) == table.id][-1]
        group = text_of(call.args[0])
        if group and isinstance(table, ast.Dict):
            names = {text_of(key) for key in table.keys if key is not None}
            assert names <= CONFLICTS[group].keys(), where
            assert given(call) == set().union(*(placeholders(CONFLICTS[group][name]) for name in names)), where
            num_found += 1
    assert num_found > 10


@pytest.mark.parametrize(("group", "name"), ALL)
def test_errors_are_whole_sentences(group: str, name: str) -> None:
    found = CONFLICTS[group][name]
    values = dict.fromkeys(placeholders(found), 7)
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
