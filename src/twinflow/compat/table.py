"""`python -m twinflow.compat.table`: the names of docs/compat.md, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from twinflow.compat.finder import NAME
from twinflow.compat.names import ALIASES, TABLE, Ours, Refused, Through

HEAD = ("| module | available names | implementation |", "|---|---|---|")
REFUSED_HEAD = ("| not available | use instead |", "|---|---|")


def named() -> Iterator[str]:
    """One row for each group of names that come from one module of twinflow."""
    yield from HEAD
    for path, entries in TABLE.items():
        rows: dict[tuple[str, str], list[str]] = {}
        for name, entry in entries.items():
            if isinstance(entry, Ours):
                rows.setdefault((entry.target.partition(":")[0], entry.note), []).append(name)
            elif isinstance(entry, Through):
                rows.setdefault((entry.module, ""), []).append("all other names")
        for (home, note), names in rows.items():
            said = f"`{home}`" + (f"; {note}" if note else "")
            shown = ", ".join(name if name == "all other names" else f"`{name}`" for name in names)
            yield f"| `{_full(path)}` | {shown} | {said} |"
    for alias, path in ALIASES.items():
        yield f"| `{_full(alias)}` | all of `{_full(path)}` | the same module |"


def refused() -> Iterator[str]:
    """One row for each remedy, with the names that it is for."""
    yield from REFUSED_HEAD
    rows: dict[str, list[str]] = {}
    for path, entries in TABLE.items():
        for name, entry in entries.items():
            if isinstance(entry, Refused):
                rows.setdefault(entry.remedy, []).append(f"`{_full(f'{path}.{name}' if path else name)}`")
    for remedy, names in rows.items():
        yield f"| {', '.join(names)} | {remedy} |"


def _full(path: str) -> str:
    return f"{NAME}.{path}" if path else NAME


def markdown() -> str:
    return "\n".join([*named(), "", *refused()])


if __name__ == "__main__":
    print(markdown())
