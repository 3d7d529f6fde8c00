# SPDX-License-Identifier: Apache-2.0
"""Random faults of every family: none is silent, none hangs, and the cause is named (random_faults.py draws more)."""

from __future__ import annotations

import pytest
from random_faults import draw_and_run

NUM_FAULTS = {"ranks": 40, "signals": 15, "files": 60, "disk": 40, "numbers": 60}
SEED = 0


@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", NUM_FAULTS)
def test_random_faults_are_named_and_none_hangs(family: str) -> None:
    found = list(draw_and_run([family], NUM_FAULTS[family], SEED, None))
    lost = [record for record in found if record["ending"] in ("silent", "hang")]
    assert not lost, lost
    wrong = [record for record in found if record["ending"] == "wrong"]
    assert len(wrong) <= NUM_FAULTS[family] * 0.05, wrong
