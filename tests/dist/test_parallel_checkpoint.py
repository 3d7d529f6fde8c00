# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of one grid load into any other: equal weights and state, and training goes on as it would have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dist_support import run_ranks
from parallel_cases import config_of, load_and_save, train_and_save

from twinflow.checkpoint import open_checkpoint

Grids = dict[str, tuple[int, dict[str, Any]]]  # ranks, config


def check(folder: Path, first: tuple[int, dict[str, Any]], others: Grids) -> None:
    world, config = first
    wanted = run_ranks(world, train_and_save, config, str(folder), timeout_s=600)[0]
    for ranks in sorted({ranks for ranks, _ in others.values()}):
        group = {name: config for name, (needed, config) in others.items() if needed == ranks}
        found = run_ranks(ranks if ranks > 1 else 0, load_and_save, group, str(folder), timeout_s=600)
        for name in group:
            assert_same_files(folder, Path(f"{folder}-{name}"))
            for rank in found:
                assert rank[name] == pytest.approx(wanted, rel=1e-5), name


def assert_same_files(one: Path, other: Path) -> None:
    """Every tensor as one process would have it, bit for bit."""
    a, b = open_checkpoint(one), open_checkpoint(other)
    assert a is not None
    assert b is not None
    for file in ("model", "optimizer"):
        assert sorted(a.names(file)) == sorted(b.names(file))
        for name, tensor in a.tensors(file):
            assert torch.equal(tensor, b.tensor(file, name)), (other.name, file, name)


def test_from_pipeline_and_tensor_ranks_to_one_process(tmp_path: Path) -> None:
    check(tmp_path / "saved", (4, config_of(2, 2, 1, stage=1)), {"alone": (1, config_of(1, 1, 1, num_micro=1))})


@pytest.mark.matrix
def test_from_two_by_two_by_two(tmp_path: Path) -> None:
    others: Grids = {
        "111": (1, config_of(1, 1, 1, num_micro=1)),
        "412": (8, config_of(4, 1, 2, stage=2)),
        "121": (2, config_of(1, 2, 1)),
        "212 stage 3": (4, config_of(2, 1, 2, stage=3)),
        "221 background": (4, config_of(2, 2, 1, schedule="zbv", checkpoint={"background": True})),
        "222 interleaved": (8, config_of(2, 2, 2, stage=1, offload="none", schedule="interleaved")),
    }
    check(tmp_path / "saved", (8, config_of(2, 2, 2, stage=1, offload="half")), others)
