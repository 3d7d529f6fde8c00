# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer with TwinStrategy on several ranks: the losses of plain Lightning in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import dist_support
import pytest
from fork_support import process_with
from lightning_ranks_cases import SAVED, config, fit, fit_gan, killed, live, sums

pytest.importorskip("lightning.pytorch")
pytestmark = pytest.mark.timeout(300)
PLACES = {"state on the host": False, "weights on the host": True}
matrix = pytest.mark.matrix
RunRanks = Callable[..., list[Any]]
CASES = [
    pytest.param(2, 3, True),
    pytest.param(2, 2, False, marks=matrix),
    pytest.param(2, 1, False, marks=matrix),
    pytest.param(2, 3, False, marks=matrix),
    pytest.param(4, 1, False, marks=matrix),
    pytest.param(4, 2, False, marks=matrix),
    pytest.param(4, 3, False, marks=matrix),
    pytest.param(4, 3, True, marks=matrix),
]


def near(value: Any) -> Any:
    return pytest.approx(value, abs=1e-5)


@pytest.fixture(scope="module")
def run_ranks() -> Iterator[RunRanks]:
    with process_with("lightning.pytorch") as call:
        yield partial(call, dist_support.run_ranks)


@pytest.fixture(scope="module")
def plain(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The checkpoints and figures of plain Lightning in one process."""
    folder = tmp_path_factory.mktemp("plain")
    return folder, run_ranks(0, live, None, str(folder), str(folder / SAVED))[0]


@pytest.mark.parametrize(("world", "stage", "is_weights"), CASES)
def test_ranks_train_as_one_process(
    run_ranks: RunRanks, plain: tuple[Path, Any], tmp_path: Path, world: int, stage: int, is_weights: bool
) -> None:
    folder, wanted = plain
    ranks = run_ranks(world, live, config(stage, is_weights), str(tmp_path), str(folder / SAVED))
    for found in ranks:
        assert found["best"] == wanted["best"]
        for key in ("losses", "checks", "last", "tested", "fresh", "predicted", "resumed"):
            assert found[key] == near(wanted[key]), key
    files = [folder / SAVED, tmp_path / f"weights-{SAVED}", folder / "after.ckpt", tmp_path / "after.ckpt"]
    one, other, last, saved = run_ranks(0, sums, [str(path) for path in files])[0]
    assert other == near(one)
    assert saved == near(last)


@matrix
@pytest.mark.parametrize(("stage", "is_weights"), [(1, False), (2, False), (3, False), (3, True)])
def test_thirty_steps_and_a_resume_on_other_numbers_of_ranks(
    run_ranks: RunRanks, tmp_path: Path, stage: int, is_weights: bool
) -> None:
    wanted = run_ranks(0, fit, None, str(tmp_path / "plain"), {}, None, 30)[0]
    given = config(stage, is_weights)
    found = run_ranks(2, fit, given, str(tmp_path / "two"), {}, None, 30)[0]
    assert len(found["losses"]) == 60
    for key in ("losses", "checks"):
        assert found[key] == near(wanted[key])
    # Lightning itself loses a batch of a checkpoint with `monitor`, so its own resumed run is the reference.
    wanted = run_ranks(0, fit, None, str(tmp_path / "again"), {}, str(tmp_path / "plain" / SAVED), 30)[0]
    for world in (1, 2, 3):
        resume = str(tmp_path / "two" / SAVED)
        again = run_ranks(0 if world == 1 else world, fit, given, str(tmp_path / f"{world}"), {}, resume, 30)[0]
        assert again["losses"] == near(wanted["losses"]), world


@matrix
@pytest.mark.parametrize(("stage", "is_weights"), [(0, False), (1, False), (2, False), (3, False), (3, True)])
def test_clipping_by_value(run_ranks: RunRanks, tmp_path: Path, stage: int, is_weights: bool) -> None:
    options = {"gradient_clip_val": 2e-3, "gradient_clip_algorithm": "value"}
    wanted = run_ranks(0, fit, None, str(tmp_path / "plain"), options)[0]
    found = run_ranks(2, fit, config(stage, is_weights), str(tmp_path / "two"), options)[0]
    assert found["losses"] == near(wanted["losses"])


@matrix
@pytest.mark.parametrize(("stage", "is_weights"), [(1, False), (2, False), (3, False), (3, True)])
def test_two_optimizers(run_ranks: RunRanks, tmp_path: Path, stage: int, is_weights: bool) -> None:
    wanted = run_ranks(0, fit_gan, None, str(tmp_path / "plain"), None)[0]
    given = config(stage, is_weights)
    if stage == 3 and not is_weights:
        with pytest.raises(AssertionError, match=r"An optimizer of several modules \(judge, more\) cannot be used"):
            run_ranks(2, fit_gan, given, str(tmp_path / "two"), None)
        return
    found = run_ranks(2, fit_gan, given, str(tmp_path / "two"), None)[0]
    for key in ("losses", "checks"):
        assert found[key] == near(wanted[key])
    again = run_ranks(2, fit_gan, given, str(tmp_path / "again"), None, str(tmp_path / "two" / "step=20.ckpt"))[0]
    assert again["losses"] == near(wanted["losses"][20:])
    with pytest.raises(AssertionError, match=r"clip_gradients\(\) in manual optimization cannot be used with several"):
        run_ranks(2, fit_gan, given, str(tmp_path / "clipped"), (0.1, "norm"))


@matrix
@pytest.mark.parametrize(("stage", "is_weights"), [(1, False), (3, False), (3, True)])
def test_a_rank_that_is_killed_ends_the_others_and_the_run_goes_on(
    run_ranks: RunRanks, tmp_path: Path, stage: int, is_weights: bool
) -> None:
    given, folder = config(stage, is_weights), tmp_path / "dies"
    began_s = time.monotonic()
    with pytest.raises(AssertionError, match=r"exit codes, of ranks \{0: 1, 1: -9\}"):
        run_ranks(2, killed, given, str(folder), 12, timeout_s=120)
    assert time.monotonic() - began_s < 100  # of which the watch needs at most 30 s
    assert "twinflow: rank 0 ends: rank 1 failed in step" in (folder / "0.err").read_text()
    wanted = run_ranks(0, fit, None, str(tmp_path / "plain"), {})[0]
    plain = str(tmp_path / "plain" / SAVED)
    wanted = run_ranks(0, fit, None, str(tmp_path / "again"), {}, plain)[0]
    found = run_ranks(2, fit, given, str(tmp_path / "resumed"), {}, str(folder / SAVED))[0]
    assert found["losses"] == near(wanted["losses"])
