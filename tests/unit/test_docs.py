"""Every Python block of the README and the docs runs as written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fork_support import run_script

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S), 1)
]


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block: str, tmp_path: Path) -> None:
    script, cwd = tmp_path / "block.py", tmp_path / "cwd"
    script.write_text(block)
    cwd.mkdir()
    result = run_script(script, cwd, tmp_path, timeout_s=120)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target
