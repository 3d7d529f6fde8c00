# SPDX-License-Identifier: Apache-2.0
"""Scripts for DeepSpeed, unmodified, on a GPU: they train there, and as they do on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

SCRIPTS = Path(__file__).parents[2] / "examples" / "compat"
# Runs a script, and then says how much memory of the GPU it has used.
MEASURED = """
import atexit, runpy, sys
import torch
torch.backends.cudnn.allow_tf32 = False  # torch's default for convolutions, and three digits
atexit.register(lambda: print(f"peak {torch.cuda.max_memory_allocated()}", flush=True))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(words: list[str], visible: str | None) -> str:
    given = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    command = [sys.executable, "-m", "twinflow", *words]
    done = subprocess.run(
        command, env={**os.environ, **given}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def losses_of(said: str) -> list[float]:
    line = next(line for line in reversed(said.splitlines()) if line.startswith('{"losses"'))
    losses: list[float] = json.loads(line)["losses"]
    return losses


@pytest.mark.parametrize("script", ["transformer.py", "hf_causal_lm.py", "alexnet_pipeline.py"])
def test_a_script_trains_on_the_gpu_as_on_the_cpu(script: str, tmp_path: Path) -> None:
    measured = tmp_path / "measured.py"
    measured.write_text(MEASURED)
    num_ranks = 2 if script == "alexnet_pipeline.py" else 1  # they share the card
    start = ["launch", "--compat", "--no_local_rank", "--num_procs", str(num_ranks)]
    words = [*start, str(measured), str(SCRIPTS / script)]
    words += ["--deepspeed_config", str(SCRIPTS / "transformer.json")] if script == "transformer.py" else []
    on_gpu, on_cpu = run(words, None), run(words, "")
    peaks = [int(line.split()[-1]) for line in on_gpu.splitlines() if "peak " in line]
    assert len(peaks) == num_ranks
    assert min(peaks) > 0
    assert losses_of(on_gpu) == pytest.approx(losses_of(on_cpu), rel=1e-4)
