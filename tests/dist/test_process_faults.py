"""Random faults of running ranks: none hangs, and the cause is named (process_faults.py draws many more)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from process_faults import draw, run

NUM_FAULTS, SEED = 40, 0


@pytest.mark.matrix
@pytest.mark.timeout(1800)
def test_random_faults_are_named_and_none_hangs(tmp_path: Path) -> None:
    generator = random.Random(SEED)
    bad: list[str] = []
    for number in range(NUM_FAULTS):
        fault = draw(generator)
        folder = tmp_path / str(number)
        folder.mkdir()
        ending, why = run(fault, folder)
        assert ending != "hang", f"{fault}: {why}"
        bad += [f"{fault}: {why}"] if ending == "wrong" else []
    assert len(bad) <= NUM_FAULTS * 0.05, bad
