# SPDX-License-Identifier: Apache-2.0
"""The script of `make sanitize-gpu`: it refuses in one line, and its tests exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sanitize_gpu


@pytest.mark.parametrize(
    ("sanitizer", "words"), [(None, "compute-sanitizer was not found"), ("x", "finds no CUDA GPU")]
)
def test_it_refuses_in_one_line(sanitizer: str | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize_gpu, "find_sanitizer", lambda: sanitizer)
    monkeypatch.setattr(sanitize_gpu, "has_gpu", lambda: False)
    monkeypatch.setattr("sys.argv", ["sanitize_gpu.py"])
    with pytest.raises(SystemExit, match=f"^error: .*{words}[^\n]*$"):
        sanitize_gpu.main()


@pytest.mark.parametrize("name", sanitize_gpu.PASSES)
def test_every_file_has_tests_of_its_pass(name: str) -> None:
    one = sanitize_gpu.PASSES[name]
    words = re.findall(r"\w+", one.which.split(")")[0].strip("(")) if "(" in one.which else ["test_"]
    for file in one.files:
        tests = re.findall(r"^def (test_\w+)", (sanitize_gpu.TESTS / file).read_text(), re.M)
        assert any(word in test for word in words if word != "or" for test in tests), file
    found = sanitize_gpu.command("compute-sanitizer", one)
    assert found[0] == "compute-sanitizer"
    assert found[found.index("--error-exitcode") + 1] == str(sanitize_gpu.FOUND)
    assert all(Path(path).exists() for path in found if path.endswith(".py"))
