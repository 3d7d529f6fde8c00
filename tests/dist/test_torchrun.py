# SPDX-License-Identifier: Apache-2.0
"""Under torchrun: its OMP_NUM_THREADS=1 must not starve the pool, and ranks agree bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from twinflow import native
from twinflow.native.threads import default_threads

SCRIPT = """
import os
import torch
import torch.distributed as dist
from twinflow import native
from twinflow.optim import HostAdamW

assert os.environ["OMP_NUM_THREADS"] == "1"
dist.init_process_group("gloo")
torch.manual_seed(0)
weight = torch.nn.Parameter(torch.randn(50_000))
optimizer = HostAdamW([weight], lr=1e-2, states="int8")
for step in range(5):
    weight.grad = torch.randn(50_000)
    optimizer.step()
copies = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
dist.all_gather(copies, weight.detach())
assert all(torch.equal(copies[0], other) for other in copies)
os.write(1, f"threads {native.get_threads()}\\n".encode())
dist.destroy_process_group()
"""


@pytest.mark.matrix
@pytest.mark.skipif(not native.available(), reason="the native library is not installed")
def test_torchrun_does_not_starve_the_pool(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "TWINFLOW_THREADS")}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(f"threads {max(1, default_threads({}) // 2)}") == 2, result.stdout
