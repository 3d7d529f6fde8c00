# SPDX-License-Identifier: Apache-2.0
"""A config with a mistake anywhere loads, or raises a ValueError that names the key. Nothing else ever happens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from config_support import BASE, mutated, names_one_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twinflow.config import Config, load_config, notes


def error_of(source: Any) -> str:
    """What load_config says; nothing if it loads. Any other exception is the test's failure."""
    try:
        loaded = load_config(source)
    except ValueError as error:
        return str(error)
    assert isinstance(loaded, Config)
    assert all(isinstance(line, str) for line in notes(loaded))
    return ""


@pytest.mark.parametrize("num_examples", [150, pytest.param(400, marks=pytest.mark.matrix)])
def test_a_mutated_config_loads_or_names_the_key(num_examples: int) -> None:
    @settings(max_examples=num_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(mutated())
    def check(case: tuple[dict[str, Any], list[str]]) -> None:
        config, touched = case
        text = error_of(config)
        if text:
            assert names_one_of(text, touched), text

    check()


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_file_with_a_change_anywhere_loads_or_is_named(data: st.DataObject, tmp_path: Path) -> None:
    text = json.dumps(BASE, indent=1)
    at, length = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 3))
    piece = data.draw(st.sampled_from(['"', "{", "}", "[", ",", ":", "", "\n", "1e999", "#", "'''", "null"]))
    file = tmp_path / "config.json"
    file.write_text(text[:at] + piece + text[at + length :])
    error = error_of(file)
    assert not error or str(file) in error


def test_the_config_that_is_mutated_is_right() -> None:
    assert load_config(BASE).zero_optimization.stage == 2
