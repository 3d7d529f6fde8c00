# SPDX-License-Identifier: Apache-2.0
"""`twinflow train` with pipeline and tensor ranks: the run of one process with the same global batch, resumed in other
layouts too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from run_support import steps_of, write_text
from train_ranks_support import TrainRanks, saved_steps

from twinflow.monitor.metrics import read_metrics

pytestmark = pytest.mark.matrix

# A rate at which rounding stays rounding.
SHAPE = ("--preset", "tiny", "--num-layers", 4, "--hidden-size", 32, "--num-attention-heads", 2, "--context", 16)
STEPS, HALF = 8, 4
RUN = (*SHAPE, "--lr", 5e-4, "--threads", 1, "--steps", STEPS, "--save-every", HALF, "--valid-every", HALF)
SEQUENCES = 8  # of a step
# Ranks, sequences of a forward, forwards of a step, and options.
Layout = tuple[int, int, int, tuple[Any, ...]]
LAYOUTS: dict[str, Layout] = {
    "one": (1, 2, 4, ()),
    "pipeline": (2, 2, 4, ("--pipeline-parallel-size", 2)),
    "zbv": (2, 2, 4, ("--pipeline-model-parallel-size", 2, "--pipeline-schedule", "zbv")),
    "gpipe": (2, 2, 4, ("--pipeline-parallel-size", 2, "--pipeline-schedule", "gpipe")),
    "interleaved": (2, 2, 4, ("--pipeline-parallel-size", 2, "--pipeline-schedule", "interleaved")),
    "four stages": (4, 2, 4, ("--pipeline-parallel-size", 4)),
    "tensor": (2, 2, 4, ("--tensor-model-parallel-size", 2)),
    "pipeline x data": (4, 1, 4, ("--pipeline-parallel-size", 2)),
    "tensor x data": (4, 1, 4, ("--model-parallel-size", 2)),
    "pipeline x tensor": (4, 2, 4, ("--pipeline-parallel-size", 2, "--model-parallel-size", 2)),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data"), 1500)


def finish(name: str, out: Path, *options: Any) -> list[str]:
    """A run to its end; what each rank has printed."""
    world, size, parts, layout = LAYOUTS[name]
    given = (*RUN, "--batch-size", size, "--accumulation", parts, *layout, *options, "--out", out)
    ranks = TrainRanks(given, out.with_suffix(".logs"), world)
    assert ranks.wait(240) == [0] * world, ranks.texts()
    return ranks.texts()


@pytest.fixture(scope="module")
def one(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process."""
    out = tmp_path_factory.mktemp("one") / "run"
    finish("one", out, "--data", text)
    return out


def assert_same_run(out: Path, expected: Path) -> None:
    """Steps and validations, their losses, norms and rates."""
    found, wanted = (read_metrics(path / "metrics.jsonl") for path in (out, expected))
    assert [(type(r), r.step) for r in found] == [(type(r), r.step) for r in wanted]
    assert [r.loss for r in found] == pytest.approx([r.loss for r in wanted], abs=1e-4)
    assert len({round(r.loss, 4) for r in found}) > STEPS / 2  # not the same number again and again
    norms, rates = (
        [[getattr(r, key) for r in steps_of(path)] for path in (out, expected)] for key in ("grad_norm", "lr")
    )
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    assert rates[0] == rates[1]


def from_the_middle(run: Path, out: Path) -> Path:
    """A copy of a finished run as it was after its first checkpoint."""
    shutil.copytree(run, out)
    shutil.rmtree(out / "checkpoints" / f"global_step{STEPS}")
    (out / "checkpoints" / "latest").write_text(f"global_step{HALF}")
    return out


@pytest.mark.parametrize(
    ("began", "goes_on"),
    [
        ("pipeline", "tensor"),
        ("tensor", "pipeline x data"),
        ("pipeline x data", "one"),
        ("zbv", "tensor x data"),
        ("pipeline x tensor", "zbv"),
        ("interleaved", "gpipe"),
    ],
)
def test_a_layout_trains_what_one_process_does_and_another_goes_on(
    began: str, goes_on: str, one: Path, text: Path, tmp_path: Path
) -> None:
    texts = finish(began, tmp_path / "run", "--data", text)
    assert_same_run(tmp_path / "run", one)
    assert texts[1:] == [""] * (len(texts) - 1)  # the first rank speaks
    records = steps_of(tmp_path / "run")
    assert [r.num_tokens for r in records] == [SEQUENCES * 16] * STEPS
    assert all(r.step_s > 0.0 and r.tflops > 0.0 for r in records)
    out = from_the_middle(tmp_path / "run", tmp_path / "resumed")
    texts = finish(goes_on, out, "--data", text, "--resume")
    assert "Resuming from" in texts[0]
    assert_same_run(out, one)
    assert saved_steps(out) == STEPS


def test_a_config_file_names_the_layout(one: Path, text: Path, tmp_path: Path) -> None:
    config, out = tmp_path / "config.json", tmp_path / "run"
    sections = {
        "train_batch_size": SEQUENCES,
        "pipeline": {"stages": 2, "schedule": "zbv"},
        "tensor_parallel": {"autotp_size": 2, "sequence": True},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"ratio": 0.5}},
    }
    config.write_text(json.dumps(sections))
    trace = tmp_path / "trace.json"
    options = (*RUN, "--batch-size", 2, "--deepspeed_config", config, "--data", text, "--trace", trace, "--out", out)
    ranks = TrainRanks(options, tmp_path / "logs", 4)
    assert ranks.wait(240) == [0] * 4, ranks.texts()
    assert_same_run(out, one)
    words = "4: pipeline 2 (zbv) x tensor 2 x data 1, ZeRO stage 1"
    assert f"ranks        {words}" in ranks.texts()[0]
    assert words in (out / "report.html").read_text()
    assert json.loads(trace.read_text())


def test_a_large_embedding_is_no_stage_of_its_own(text: Path, tmp_path: Path) -> None:
    """It would leave a rank without norms and biases, and checkpoints without equal param groups."""
    large = ("--vocab-size", 4096, "--data", text, "--steps", 2)
    finish("one", tmp_path / "one", *large)
    finish("four stages", tmp_path / "four", *large)
    losses = [[r.loss for r in steps_of(tmp_path / name)] for name in ("one", "four")]
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    assert saved_steps(tmp_path / "four") == 2


def test_a_signal_to_one_stage_stops_all_after_the_same_step(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    given = (*RUN, "--batch-size", 2, "--accumulation", 4, "--pipeline-parallel-size", 2, "--data", text, "--out", out)
    ranks = TrainRanks(given, tmp_path / "logs", fault="late signal")
    assert ranks.wait() == [130, 130], ranks.texts()
    stopped = saved_steps(out)
    assert stopped in (6, 7)
    assert steps_of(out)[-1].step == stopped
    assert f"Interrupted after {stopped} of {STEPS} steps" in ranks.texts()[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ("--pipeline-parallel-size", 3),
            "error: The number of ranks is 2, but must be a multiple of 3, because --pipeline-parallel-size 3 ",
        ),
        (("--model-parallel-size", 2, "--num-attention-heads", 1), "error: --num-attention-heads is 1, but must be "),
        (("--pipeline-parallel-size", 2, "--num-layers", 1), "error: --num-layers is 1, but must be "),
        (("--model-parallel-size", 2, "--vocab-size", 257), "error: The vocabulary size is 257, but must be "),
        (
            ("--pipeline-parallel-size", 2, "--delayed-update"),
            "delayed_update=True cannot be used with pipeline ranks, because ",
        ),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_what_cannot_work_is_one_line_before_anything_starts(
    options: tuple[Any, ...], words: str, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    ranks = TrainRanks((*RUN, "--batch-size", 2, "--data", text, "--out", out, *options), tmp_path / "logs")
    assert ranks.wait() == [1, 1], ranks.texts()
    first, second = ranks.texts()
    assert words in first
    assert first.count("\n") == 1
    assert second == ""
    assert not out.exists()
