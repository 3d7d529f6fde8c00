"""Writes the tables of these pages that follow from declarations in the code, each between its two marks.

python docs/tables.py
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from twinflow.config.migration import migration_tables, summary
from twinflow.config.registry import key_tables, option_tables, rule_table, spelling_table

DOCS: Final = Path(__file__).parent
TABLES: Final[dict[tuple[str, str], Callable[[], str]]] = {  # by page and name of the marks
    ("config.md", "keys"): key_tables,
    ("config.md", "options"): option_tables,
    ("config.md", "spellings"): spelling_table,
    ("rules.md", "rules"): rule_table,
    ("coming-from-deepspeed.md", "summary"): summary,
    ("coming-from-deepspeed.md", "migration"): migration_tables,
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
