# SPDX-License-Identifier: Apache-2.0
"""Pipeline x tensor x data on a GPU: ranks that share one card over gloo train as one process does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dist_support import run_ranks
from parallel_cases import config_of, train_all
from parallel_replica_cases import tensor_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def test_ranks_that_share_a_card_train_as_one_process() -> None:
    checkpointed = {"activation_checkpointing": {"layers": ["Block"]}}
    configs = {
        "pipe data 1f1b": config_of(2, 1, 2, stage=1, offload="half"),
        "pipe data zbv": config_of(2, 1, 2, stage=2, schedule="zbv", **checkpointed),
        "pipe tensor interleaved": config_of(2, 2, 1, schedule="interleaved"),
        "tensor data": config_of(1, 2, 2, stage=2, tensor_parallel={"sequence": True}),
        "pipe data stage 3": config_of(2, 1, 2, stage=3),
    }
    truth = run_ranks(0, train_all, {"alone": config_of(1, 1, 1, num_micro=1)})[0]["alone"]
    ranks = run_ranks(4, train_all, configs, timeout_s=240)
    for name in configs:
        for rank in ranks:
            assert rank[name]["losses"] == pytest.approx(truth["losses"], rel=1e-4), name


def test_ranks_of_one_replica_with_other_batches_or_seeds(tmp_path: Path) -> None:
    ranks = run_ranks(2, tensor_ranks, str(tmp_path))
    for rank in ranks:
        for name in ("drift", "seeds"):
            whole = {param: digest for param, digest in rank[name]["digests"].items() if "@" not in param}
            assert whole.items() <= ranks[0][name]["digests"].items()
        said, is_unchanged, _ = rank["batches"]
        assert all("Divide the data by engine.dp_rank" in one for one in said), said
        assert is_unchanged
        assert all("the copies of the parameter" in one for one in rank["inside"])


def test_planned_stages_run_alone_take_what_is_planned() -> None:
    """Three stages of 13 B parameters, 40 to 50 GB each: within 5%."""
    benchmark = Path(__file__).parents[2] / "benchmarks" / "planned_stage.py"
    if torch.cuda.mem_get_info()[1] < 80e9:
        pytest.skip("needs a GPU with 80 GB")
    done = subprocess.run([sys.executable, str(benchmark), "--only", "0"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
