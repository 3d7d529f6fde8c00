# SPDX-License-Identifier: Apache-2.0
"""Ranks of one replica that are given different batches, or draw different random numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from dist_support import run_ranks
from parallel_replica_cases import engine_loader, later_batches, one_process, stages, tensor_ranks

REMEDY = "Divide the data by engine.dp_rank and engine.dp_world_size"


def test_tensor_ranks(tmp_path: Path) -> None:
    alone = run_ranks(0, tensor_ranks, "")[0]
    ranks = run_ranks(2, tensor_ranks, str(tmp_path))
    seen: dict[str, str] = {}
    for rank in ranks:
        for name in ("drift", "seeds"):  # the dropout of one process with the numbers of the first rank
            assert rank[name]["losses"] == pytest.approx(alone[name]["losses"], rel=1e-5), name
            for param, digest in rank[name]["digests"].items():
                assert seen.setdefault(f"{name} {param}", digest) == digest, param
        said, is_unchanged, loss = rank["batches"]
        assert all(REMEDY in one and "Ranks 0 and 1" in one for one in said), said
        assert is_unchanged
        assert loss == ranks[0]["batches"][2]
        for one in rank["inside"]:
            assert "the copies of the parameter" in one
            assert "after step 1" in one


def test_batches_that_are_compared_on_the_gpu() -> None:
    for *said, is_unchanged in run_ranks(2, later_batches):
        assert all(REMEDY in one for one in said), said
        assert is_unchanged


def test_stages() -> None:
    alone = run_ranks(0, one_process)[0]
    ranks = run_ranks(2, stages)
    for rank in ranks:
        assert all(REMEDY in rank[name] for name in ("other", "other eval", "targets")), rank
        assert rank["losses"] == pytest.approx(alone, rel=1e-5)  # the pipeline is usable after the errors
    assert ranks[0]["ended"].startswith("RuntimeError: train_batch() cannot run, because data_iter ended after 1 of 4")
    assert "data_iter ended after 1 of 4" in ranks[1]["ended"]


def test_the_loader_of_the_engine_divides_by_data_rank() -> None:
    ranks = run_ranks(4, engine_loader)
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    both = [sample for rank in (ranks[0], ranks[2]) for batch in rank for sample in batch]
    assert sorted(both) == list(range(64))
