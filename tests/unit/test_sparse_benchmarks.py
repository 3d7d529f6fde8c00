# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of sparse attention: what their tasks ask, and that the scripts run at tiny sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(FOLDER))
import sparse_convergence as convergence  # noqa: E402
import sparse_shapes as shapes  # noqa: E402

from twinflow.loss import IGNORE_INDEX  # noqa: E402

pytestmark = pytest.mark.matrix  # benchmarks are no part of the library


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(FOLDER / script), "--tiny", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_answer_is_the_fact_of_the_asked_slot_half_a_sequence_away() -> None:
    scale = convergence.TINY
    tokens, targets = convergence.sequences(3, scale.length, 0, scale, "cpu")
    for row, wanted in zip(tokens, targets, strict=True):
        for place in (wanted >= convergence.FIRST_FACT).nonzero().flatten().tolist():
            slot = int(row[place]) - convergence.FIRST_QUESTION
            assert (int(wanted[place]) - convergence.FIRST_FACT) // convergence.NUM_VALUES == slot
            (fact,) = (row == wanted[place]).nonzero().flatten().tolist()
            assert place - fact >= scale.length // 2
        is_symbol = (wanted != IGNORE_INDEX) & (wanted < convergence.FIRST_FACT)
        assert is_symbol.any()
        assert torch.equal(row[is_symbol], torch.full_like(row[is_symbol], convergence.MASK))
    assert 0.0 < convergence.lowest_loss(tokens, targets) < 4.0


def test_the_last_fifth_of_a_line_changes_by_its_slope() -> None:
    curve = [[float(step), 5.0 - 0.1 * step] for step in range(50)]
    assert convergence.last_fifth(curve, 1) == pytest.approx(-0.9)


def test_training_ends_with_full_sequences() -> None:
    lengths = convergence.lengths_of(convergence.FULL)
    assert len(lengths) == convergence.FULL.steps
    assert lengths[0] < lengths[-1] == convergence.FULL.length


@pytest.mark.matrix
def test_the_script_of_convergence_saves_a_result_that_can_be_drawn_again(tmp_path: Path) -> None:
    shown = run("sparse_convergence.py", "--ways", "dense", "fixed", "--save", "--save-to", str(tmp_path))
    (curves,) = tmp_path.glob("*.json")
    assert all(row["done"] for row in json.loads(curves.read_text())["runs"])
    assert "| fixed |" in shown
    drawn = curves.with_suffix(".svg").read_text()
    run("sparse_convergence.py", "--plot", str(curves))
    assert len(drawn) > 1000
    assert curves.with_suffix(".svg").read_text().count("<polyline") == drawn.count("<polyline")


@pytest.mark.matrix
def test_the_script_of_bert_measures_longest_sequences_and_longformer(tmp_path: Path) -> None:
    shown = run("sparse_bert.py", "--only", "longest,longformer", "--save", "--save-to", str(tmp_path))
    assert "base: longest sequence" in shown
    assert "sparse BERT, Fixed" in shown
    assert "gave no result" not in shown
    assert len(list(tmp_path.glob("*.md"))) == 1


@pytest.mark.matrix
def test_the_script_measures_every_shape_at_the_given_length() -> None:
    shown = run("sparse_attention.py", "--only", "shapes", "--tokens", "512")
    rows = [line for line in shown.splitlines() if line.startswith("| ") and "| 512 |" in line]
    assert len(rows) == 2 * len(shapes.PATTERNS) + 2 + 2 * (len(shapes.KINDS) + 2)
    assert "| bigbird, 8 sequences | 256 |" in shown
    assert "| bigbird, odd length | 475 |" in shown
    assert "failed" not in shown
