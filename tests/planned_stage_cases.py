# SPDX-License-Identifier: Apache-2.0
"""What a rank does in the tests of planned stages: it runs the benchmark's small stages, with stand-ins for others."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))


def measured_beside_planned(rank: int, world: int, number: int) -> list[float]:
    """Of one layout's ranks on the CPU: how much more was measured than planned."""
    from planned_stage import TINY_SHAPE, run, tiny_cases

    case = tiny_cases()[number]
    return [run(TINY_SHAPE, case.layout, one, torch.device("cpu")).off for one in case.ranks]
