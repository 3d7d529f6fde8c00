# SPDX-License-Identifier: Apache-2.0
"""1-bit Adam on a GPU: ranks that share one card over gloo have the same weights, and learn as on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dist_support import run_ranks
from zero_onebit_cases import FREEZE, config_for, train_all

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
OFFLOADS: dict[str, dict[str, Any] | None] = {"none": None, "full": {}, "half": {"ratio": 0.5}}


def test_ranks_that_share_a_card_have_the_same_weights() -> None:
    num_steps = FREEZE + 20
    configs = {name: config_for(1, offload, 2) for name, offload in OFFLOADS.items()}
    configs["bf16"] = config_for(1, {"ratio": 0.5}, 2, bf16={"enabled": True})
    ranks = run_ranks(2, train_all, configs, num_steps, timeout_s=180)
    for name in configs:
        first = ranks[0][name]
        assert all(rank[name]["digests"] == first["digests"] for rank in ranks), name
        assert first["losses"][-1] < first["losses"][FREEZE] - 0.3, name
        assert first["compressed"][-1], name
