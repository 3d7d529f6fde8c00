# SPDX-License-Identifier: Apache-2.0
"""State on the disk of several ranks. ZeRO stages 0 to 2 are in test_zero_exact.py."""

from __future__ import annotations

from pathlib import Path

import disk_cases
import pytest
from dist_support import run_ranks
from parallel_cases import config_of, train_all


@pytest.mark.parametrize("params", ["none", "cpu", "nvme"])
def test_stage_3_has_the_bits_of_state_in_memory(tmp_path: Path, params: str) -> None:
    for found in run_ranks(2, disk_cases.as_in_memory, str(tmp_path), params):
        assert found[0] > (60 if params == "none" else 45)
        assert found[1:] == [0, found[0], 0]
    assert not list((tmp_path / "disk").iterdir())


@pytest.mark.parametrize(("pipe", "model"), [(2, 1), (1, 2)], ids=["pipeline", "tensor"])
def test_pipeline_and_tensor_ranks_have_the_bits_of_state_in_memory(tmp_path: Path, pipe: int, model: int) -> None:
    memory, disk = config_of(pipe, model, 1), config_of(pipe, model, 1)
    disk["zero_optimization"]["offload_optimizer"] |= {"device": "nvme", "nvme_path": str(tmp_path / "disk")}
    for found in run_ranks(2, train_all, {"memory": memory, "disk": disk}):
        for key in ("losses", "norms", "digests"):
            assert found["disk"][key] == found["memory"][key]
    assert (tmp_path / "disk").is_dir()


def test_compressed_communication_is_refused(tmp_path: Path) -> None:
    run_ranks(2, disk_cases.compressed, str(tmp_path))
