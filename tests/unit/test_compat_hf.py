# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer with `deepspeed=`: transformers and accelerate take twinflow.compat for DeepSpeed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fork_support import run_script

# The losses of hf_causal_lm.py with deepspeed 0.19.8.
EXAMPLE = [3.530906915664673, 3.533987522125244, 3.527157783508301, 3.3962903022766113, 3.2986109256744385]
EXAMPLE += [3.1994571685791016, 3.1489360332489014, 3.130852222442627]
EXAMPLE_LAST = 2.692900


def run(folder: Path) -> dict[str, Any]:
    """In a process of its own: transformers looks for DeepSpeed when it is imported."""
    script = folder / "script.py"
    script.write_text(f"import json, compat_cases\nprint(json.dumps(compat_cases.hf({str(folder / 'out')!r})))\n")
    ended = run_script(script, folder, folder)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def test_the_trainer_trains_with_a_deepspeed_config(tmp_path: Path) -> None:
    found = run(tmp_path)
    losses = found["example"]["losses"]
    assert losses[: len(EXAMPLE)] == pytest.approx(EXAMPLE, rel=1e-4)
    assert losses[-1] == pytest.approx(EXAMPLE_LAST, rel=1e-4)
    # Optimizer and schedule are the Trainer's: clipping, accumulation and a short last step as without DeepSpeed.
    whole, stock = found["whole"], found["stock"]
    assert len(whole["loss"]) == 4
    for key in ("loss", "grad_norm", "learning_rate", "eval"):
        assert whole[key] == pytest.approx(stock[key], rel=1e-4), key
    assert found["resumed"] == whole
