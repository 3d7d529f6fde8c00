# SPDX-License-Identifier: Apache-2.0
"""Ray Train's TorchTrainer with two workers on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_two_workers_of_ray_train_one_model(tmp_path: Path) -> None:
    pytest.importorskip("ray.train")
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "examples" / "ray_train.py")]
    ended = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "2 workers, 30 steps" in ended.stdout
    assert "Ray has global_step30" in ended.stdout
    assert "the loss fell" in ended.stdout
