# SPDX-License-Identifier: Apache-2.0
"""`twinflow train` under `twinflow launch --max-nodes`: ranks and nodes are killed and return, and the run goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from elastic_support import SAVE_EVERY, command, draw_kills, losses, run_with_kills, write_text

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(2700)]
NUM_NODES, NUM_KILLS, NUM_STEPS, SEED = 4, 30, 190, 7
NEAR = 1e-3
LIMIT_S = 2400.0  # each of the kills costs new processes that import torch, on two busy cores


def test_thirty_kills_change_nothing_but_the_time(tmp_path: Path) -> None:
    data = write_text(tmp_path / "text.txt")
    straight, disturbed = tmp_path / "straight", tmp_path / "disturbed"
    argv = command(straight, data, NUM_STEPS, NUM_NODES, 0)
    assert run_with_kills(argv, straight, tmp_path / "straight.log", [], LIMIT_S)[0] == 0
    kills = draw_kills(SEED, NUM_NODES, NUM_KILLS)
    argv = command(disturbed, data, NUM_STEPS, NUM_NODES, 4 * NUM_KILLS)
    log = tmp_path / "disturbed.log"
    code, done = run_with_kills(argv, disturbed, log, kills, LIMIT_S)
    assert code == 0, log.read_text()[-4000:]
    assert done == kills
    wanted, found = losses(straight), losses(disturbed)
    assert found.keys() == wanted.keys() == set(range(1, NUM_STEPS + 1))
    assert abs(found[NUM_STEPS] - wanted[NUM_STEPS]) < NEAR
    assert max(abs(found[step] - wanted[step]) for step in found) < NEAR  # every step had the same data
    saved = json.loads((disturbed / "settings.json").read_text())
    assert 1 <= saved["num_resumes"] <= 2 * NUM_KILLS
    assert 0 < saved["num_repeated_steps"] <= SAVE_EVERY * saved["num_resumes"]
    assert len(list((disturbed / "checkpoints").glob("global_step*"))) == 3  # --keep 3
