# SPDX-License-Identifier: Apache-2.0
"""benchmarks/twin_flow_opt.py and benchmarks/memory_caps.py with tiny models: rows, what is left out, pictures."""

from __future__ import annotations

import argparse
import importlib
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

from twinflow.planner.costs import Memory

pytestmark = pytest.mark.matrix  # benchmarks are no part of the library

FOLDER = Path(__file__).parents[2] / "benchmarks"
H200 = Memory(int(150.1e9 * 0.98), int(134.2e9 * 0.97))


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("twin_flow_opt")


@pytest.fixture
def caps(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("memory_caps")


def options(**changes: object) -> argparse.Namespace:
    given = {"budget": 60.0, "windows": 1, "ratios": None, "layers": 0, "deepspeed": False, "tiny": True, "depth": 0}
    given |= {"ratio_limit": 30.0}
    return argparse.Namespace(**{**given, **changes})


def test_state_moves_from_ratio_to_ratio(sweep: ModuleType) -> None:
    pytest.importorskip("transformers")
    shape = sweep.SHAPES["tiny"]
    rows, left_out = sweep.sweep(shape, options(), time.perf_counter(), sweep.room())
    assert not left_out
    shares = {row["ratio"]: row["host_share"] for row in rows if "ratio" in row}
    assert shares == pytest.approx({1.0: 1.0, 0.5: 0.5, 0.0: 0.0}, abs=0.2)
    assert {row["tokens"] for row in rows} == set(shape.lengths)
    text = sweep.page("tiny", shape, rows, left_out, sweep.room(), "command")
    assert "| twinflow | 0.5 | 1 x 32 |" in text
    assert sweep.picture(text).count("<polyline") > 6


@pytest.mark.matrix
def test_windows_of_processes_alternate(sweep: ModuleType) -> None:
    pytest.importorskip("transformers")
    name = "tiny-parallel"
    rows, left_out = sweep.contests(name, sweep.SHAPES[name], options(budget=200.0), time.perf_counter())
    assert not left_out
    assert [row.get("ratio") for row in rows] == [None, 1.0, 0.0]


def test_ratios_that_do_not_fit_are_named(sweep: ModuleType) -> None:
    small, large = sweep.SHAPES["opt-13b"], sweep.SHAPES["opt-30b"]
    fitting = [row for row in sweep.all_formats(small, H200) if not row["lacks"]]
    assert {row["ratio"] for row in fitting if row["states"] == "bf16"} == set(small.ratios)
    assert 1.0 not in {row["ratio"] for row in fitting if row["states"] == "fp32"}
    reasons = {row["ratio"]: row["lacks"] for row in sweep.all_formats(large, H200) if row["states"] == "int8"}
    assert [ratio for ratio, lacks in reasons.items() if not lacks] == [0.65, 0.5, 0.4]
    assert "on the host" in reasons[1.0]
    assert "on the GPU" in reasons[0.0]


def test_full_offload_is_estimated_where_it_does_not_fit(sweep: ModuleType) -> None:
    row = {"system": "twinflow", "tokens": 512, "ratio": 0.5, "host_share": 0.5, "s": [1.0, 2.0, 9.0]}
    assert sweep.estimated_full([row]) == {512: 4.0}
    assert sweep.estimated_full([row, {**row, "ratio": 1.0, "host_share": 1.0}]) == {}
    rows = [{**row, "params": 10**9, "batch": 1}]
    pages = {name: sweep.page(name, sweep.SHAPES[name], rows, [], H200, "") for name in ("opt-30b", "gpt-350m")}
    assert [name for name, text in pages.items() if "Full offload does not fit" in text] == ["opt-30b"]


def test_the_most_important_rows_come_first(sweep: ModuleType) -> None:
    assert sweep.in_order(sweep.RATIOS) == [0.0, 0.5, 1.0, 0.75, 0.25]
    found = sweep.by_importance(sweep.RATIOS, [1.0, 0.5, 0.0])
    assert found[:5] == [
        (sweep.ALONE, 1.0),
        ("twinflow", 1.0),
        ("deepspeed", 1.0),
        ("twinflow", 0.5),
        ("deepspeed", 0.5),
    ]
    assert found[5:] == [("twinflow", 0.0), ("deepspeed", 0.0), ("twinflow", 0.75), ("twinflow", 0.25)]


def test_a_step_that_hangs_shows_where(sweep: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import offload

    monkeypatch.setattr(offload, "STUCK_S", 1.1)
    said: list[str] = []
    with offload.told_if_stuck(lambda: said.append("state") or "state"):
        time.sleep(0.4)
    assert said == ["state"]


@pytest.mark.parametrize("limit", [1, 19, 20, 22, 24])
def test_the_search_ends_beside_the_limit(caps: ModuleType, limit: int) -> None:
    found = caps.search(lambda n: n <= limit, 20, time.perf_counter() + 60.0)
    assert len(found["trials"]) <= caps.MAX_TRIALS
    assert found["layers"] <= limit < (found["fails_at"] or 99)
    if limit > 1:
        assert (found["layers"], found["fails_at"]) == (limit, limit + 1)


def test_only_full_memory_is_a_trial_that_failed(caps: ModuleType) -> None:
    def fill() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert not caps.attempt(fill)
    with pytest.raises(ZeroDivisionError):
        caps.attempt(lambda: print(1 // 0))


@pytest.mark.parametrize("row", ["plain", "zero2"])
def test_a_baseline_trains(caps: ModuleType, row: str) -> None:
    found = caps.baseline(row, 16.0, options(), time.perf_counter() + 60.0)
    assert found["layers"] >= 3


@pytest.mark.parametrize("row", ["offload", "weights"])
def test_an_offloaded_model_trains_and_is_timed(caps: ModuleType, row: str) -> None:
    found = caps.offloaded(row, 16.0, options(depth=2), time.perf_counter() + 60.0)
    assert found["layers"] == 2
    assert found["tflops"] > 0
    text = caps.page([{"row": row, "cap": 16.0, "params": 10**9, **found}], "command")
    assert f"{found['states']} state | 1.00 B | 2 |" in text
