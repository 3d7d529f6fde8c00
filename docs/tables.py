"""Writes the tables of these pages that follow from declarations in the code, each between its two marks.

python docs/tables.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from twinflow.config.migration import migration_tables, summary
from twinflow.config.registry import key_tables, option_tables, rule_table, spelling_table
from twinflow.conflicts import CONFLICTS
from twinflow.parallel.support import LIMITS
from twinflow.parallel.support import table as support_table

DOCS: Final = Path(__file__).parent
# How the docs show values that are in braces in the table of conflicts. The others become an ellipsis.
SHOWN: Final = {
    "stage": "0, 1 or 2",
    "stage_except_1": "0, 2 or 3",
    "stage_2_or_3": "2 or 3",
    "ranks": "several",
    "rules": "that [this page](rules.md) lists",
    "name": "Any parameter",
    "callback": "WeightAveraging or StochasticWeightAveraging",
    "own_key": "fp16.enabled, or a key of offload_optimizer that DeepSpeed does not have",
}
LINK: Final = r"\[[^\]]*\]\([^)]*\)"
CALL: Final = r"[\w.=]+\([^)\s]*(?: \w+=[^)]*)?\)"
VALUE: Final = r"[\w.]+=(?:\.{3}|[^\s,;.]+)"
NAME: Final = r"[A-Za-z]\w*(?:\.\w+)+|\w*_\w+|\w+\[\d\]"
CODE: Final = re.compile(f"`[^`]*`|{LINK}|{CALL}|{VALUE}|{NAME}")


def conflict_tables() -> str:
    """The conflicts between features, one table for each group."""
    parts = []
    for group, found in CONFLICTS.items():
        rows = [(c.option, c.other, c.reason, c.remedy) for c in found.values()]
        parts.append(f"### {group}\n\n{refusals(rows)}\n")
    return "\n" + "\n".join(parts) + "\n"


def limit_table() -> str:
    """The conflicts with pipeline and tensor ranks."""
    rows = []
    for limit in LIMITS:
        values = ", ".join(map(repr, limit.allowed))
        option = limit.key if isinstance(limit.allowed[0], bool) else f"{limit.key}, except {values},"
        remedy = limit.remedy or "Leave out one of the two."
        rows.append((option, f"{' or '.join(sorted(limit.axes))} ranks", limit.reason, remedy))
    return f"\n{refusals(rows)}\n\n"


def refusals(rows: Iterable[tuple[str, str, str, str]]) -> str:
    lines = ["| feature | cannot be used with | reason | what to do |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(as_markdown, row))} |" for row in rows)])


def as_markdown(text: str) -> str:
    """A text of an error, with names and values marked as code."""
    text = re.sub(r"\{(\w+)[^}]*\}", lambda found: SHOWN.get(found[1], "..."), text).rstrip(",")
    return CODE.sub(lambda found: found[0] if found[0][0] in "`[" else f"`{found[0]}`", text)


TABLES: Final[dict[tuple[str, str], Callable[[], str]]] = {  # by page and name of the marks
    ("config.md", "keys"): key_tables,
    ("config.md", "options"): option_tables,
    ("config.md", "spellings"): spelling_table,
    ("rules.md", "rules"): rule_table,
    ("coming-from-deepspeed.md", "summary"): summary,
    ("coming-from-deepspeed.md", "migration"): migration_tables,
    ("conflicts.md", "conflicts"): conflict_tables,
    ("conflicts.md", "parallel"): limit_table,
    ("3d.md", "support"): lambda: f"\n{support_table()}\n\n",
}


def with_table(text: str, name: str, table: str) -> str:
    """A page's text with this table between its marks."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    assert begin in text, name
    return re.sub(f"(?<={begin}).*?(?={end})", lambda _: table, text, flags=re.DOTALL)


if __name__ == "__main__":
    for (page, name), table in TABLES.items():
        path = DOCS / page
        path.write_text(with_table(path.read_text(), name, table()))
