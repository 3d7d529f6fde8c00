# SPDX-License-Identifier: Apache-2.0
"""ZeRO on a GPU: ranks that share one card over gloo train as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dist_support import run_ranks
from group_cases import collectives_of_one_rank, digest_checked
from zero_cases import config_of, train_all

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
OFFLOADS: dict[str, dict[str, Any] | None] = {"none": None, "full": {}, "half": {"ratio": 0.5}}


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_share_a_card_train_as_one_process(world: int) -> None:
    parts = 2 if world == 2 else 1
    truth = run_ranks(0, train_all, {"alone": config_of(0, {}, parts, 1)})[0]["alone"]
    cases = [(stage, name) for stage in (0, 1, 2, 3) for name in OFFLOADS]
    configs = {f"{stage} {name}": config_of(stage, OFFLOADS[name], parts, world) for stage, name in cases}
    configs["3 params"] = config_of(3, {"params": True}, parts, world)
    ranks = run_ranks(world, train_all, configs, timeout_s=180)
    for name in configs:
        for rank in ranks:
            assert rank[name]["losses"] == pytest.approx(truth["losses"], rel=1e-5), name
            assert rank[name]["digests"] == ranks[0][name]["digests"], name


def test_nccl_with_one_rank() -> None:
    """The only world that one card has for NCCL: the same bits as without a group."""
    from zero_cases import digest_alone

    (alone,) = run_ranks(0, digest_alone, None)
    for stage in (0, 1, 2):
        assert run_ranks(1, digest_alone, stage, backend="nccl") == [alone], stage
        assert run_ranks(1, digest_checked, stage, backend="nccl") == [alone], stage  # every collective is called


def test_collectives_of_nccl_with_one_rank() -> None:
    truth = run_ranks(1, collectives_of_one_rank, False)
    assert run_ranks(1, collectives_of_one_rank, True, "cuda", backend="nccl") == truth
