# SPDX-License-Identifier: Apache-2.0
"""Options of Lightning's Trainer with TwinStrategy: the losses of plain Lightning with the same options."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("lightning.pytorch")
STEPS = 15  # an epoch has 10 batches, which are 5 steps


@pytest.fixture(scope="module")
def cases() -> Any:
    return importlib.import_module("lightning_ranks_cases")


@pytest.fixture(scope="module")
def module_class(cases: Any) -> Any:
    return cases.module_class()


def fit(
    cases: Any, kind: Any, folder: Path, given: Any, resume: Path | None = None, steps: int = STEPS, **options: Any
) -> Any:
    """A module after a fit. `given`: a config; None: plain Lightning."""
    module = kind()
    strategy = "auto" if given is None else cases.twin(given)
    made = cases.trainer(folder, strategy, 1, steps, **{"val_check_interval": 4, **options})
    made.fit(module, cases.loader(1), cases.loader(1, 24), ckpt_path=None if resume is None else str(resume))
    return module


def same(found: Any, wanted: Any, first: int = 0) -> None:
    """Equal losses, checks and weights. `first`: the index of the first loss of a resumed run."""
    assert found.losses == pytest.approx(wanted.losses[first:], abs=1e-5)
    assert found.checks == pytest.approx(wanted.checks[len(wanted.checks) - len(found.checks) :], abs=1e-5)
    theirs = wanted.state_dict()
    for name, value in found.state_dict().items():
        torch.testing.assert_close(value, theirs[name], atol=1e-5, rtol=0)


CONFIGS = {"state": (0, False), "weights": (3, True)}
matrix = pytest.mark.matrix


@pytest.mark.parametrize("where", ["state", pytest.param("weights", marks=matrix)])
def test_clipping_by_value(cases: Any, module_class: Any, tmp_path: Path, where: str) -> None:
    options = {"gradient_clip_val": 2e-3, "gradient_clip_algorithm": "value"}
    wanted = fit(cases, module_class, tmp_path, None, **options)
    same(fit(cases, module_class, tmp_path, cases.config(*CONFIGS[where]), **options), wanted)
    none = fit(cases, module_class, tmp_path, None, gradient_clip_val=None)
    assert none.losses != pytest.approx(wanted.losses, abs=1e-4)


def averaging(name: str) -> list[Any]:
    import lightning.pytorch as pl

    if name == "swa":
        return [pl.callbacks.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)]
    if name == "ema":
        return [pl.callbacks.EMAWeightAveraging(decay=0.9)]
    return [pl.callbacks.WeightAveraging()]


AVERAGES = [("swa", "weights"), *(pytest.param(n, w, marks=matrix) for n in ("ema", "mean") for w in CONFIGS)]


@pytest.mark.parametrize(("name", "where"), [*AVERAGES, pytest.param("swa", "state", marks=matrix)])
def test_averages_of_weights(cases: Any, module_class: Any, tmp_path: Path, name: str, where: str) -> None:
    options: dict[str, Any] = {"max_epochs": 3, "steps": -1}
    wanted = fit(cases, module_class, tmp_path, None, callbacks=averaging(name), **options)
    given = cases.config(*CONFIGS[where])
    same(fit(cases, module_class, tmp_path, given, callbacks=averaging(name), **options), wanted)


def checkpoints(folder: Path, every: int = 5, **options: Any) -> Any:
    import lightning.pytorch as pl

    return pl.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=every, save_top_k=-1, **options)


def test_an_average_continues_from_a_checkpoint(cases: Any, module_class: Any, tmp_path: Path) -> None:
    def run(folder: str, given: Any, resume: Path | None = None) -> Any:
        callbacks = [*averaging("ema"), checkpoints(tmp_path / folder)]
        options = {"callbacks": callbacks, "enable_checkpointing": True}
        return fit(cases, module_class, tmp_path, given, resume, **options)

    wanted = run("plain", None)
    run("twin", cases.config(0))
    same(run("again", cases.config(0), tmp_path / "twin" / "step=5.ckpt"), wanted, first=10)
    # A test loads the average, as with plain Lightning.
    found = {}
    for name, given in {"plain": None, "twin": cases.config(0)}.items():
        tester = cases.trainer(tmp_path, "auto" if given is None else cases.twin(given), 1, STEPS)
        path = str(tmp_path / name / "step=5.ckpt")
        found[name] = tester.test(module_class(), cases.loader(1, 24), ckpt_path=path, verbose=False)[0]["tested"]
    assert found["twin"] == pytest.approx(found["plain"], abs=1e-5)


@pytest.mark.parametrize("states", ["fp32", pytest.param("int8", marks=matrix)])
def test_files_of_lightning_in_both_directions(cases: Any, module_class: Any, tmp_path: Path, states: str) -> None:
    from twinflow.integrations.lightning import export_file

    def run(folder: str, given: Any, resume: Path | None = None) -> Any:
        options = {"callbacks": [checkpoints(tmp_path / folder)], "enable_checkpointing": True}
        return fit(cases, module_class, tmp_path, given, resume, **options)

    given = cases.config(0)
    given["zero_optimization"]["offload_optimizer"] = {**cases.OFFLOAD, "states": states}
    wanted = run("plain", None)
    again = run("twin", given, tmp_path / "plain" / "step=5.ckpt")
    if states == "fp32":
        same(again, wanted, first=10)
    assert again.losses == pytest.approx(wanted.losses[10:], abs=1e-2)
    first = run("first", given)
    export_file(tmp_path / "first" / "step=5.ckpt", tmp_path / "file.ckpt")
    other = run("other", None, tmp_path / "file.ckpt")
    assert other.losses == pytest.approx(first.losses[10:], abs=1e-5 if states == "fp32" else 1e-2)
    loaded = module_class.load_from_checkpoint(tmp_path / "file.ckpt")
    assert loaded.state_dict().keys() == first.state_dict().keys()


@matrix
def test_a_file_of_weights_only_does_not_resume(cases: Any, module_class: Any, tmp_path: Path) -> None:
    options = {"callbacks": [checkpoints(tmp_path, save_weights_only=True)], "enable_checkpointing": True}
    fit(cases, module_class, tmp_path, cases.config(0), **options)
    path = tmp_path / "step=5.ckpt"
    assert path.is_file()
    with pytest.raises(KeyError, match="contains only the model"):
        fit(cases, module_class, tmp_path, cases.config(0), path)


CLIPS = [(1e-3, "value"), pytest.param(None, marks=matrix), pytest.param((0.05, "norm"), marks=matrix)]


@pytest.mark.parametrize("clip", CLIPS)
def test_two_optimizers(cases: Any, module_class: Any, tmp_path: Path, clip: tuple[float, str] | None) -> None:
    kind = cases.gan(module_class, clip)

    def run(folder: str, given: Any, resume: Path | None = None) -> Any:
        options = {**cases.MANUAL, "callbacks": [checkpoints(tmp_path / folder, 10)], "enable_checkpointing": True}
        return fit(cases, kind, tmp_path, given, resume, steps=40, **options)

    wanted = run("plain", None)
    same(run("twin", cases.config(0)), wanted)
    for source in ("twin", "plain"):
        path = tmp_path / source / "step=20.ckpt"
        assert path.exists()
        same(run("again", cases.config(0), path), wanted, first=20)
    tester = cases.trainer(tmp_path, cases.twin(cases.config(0)), 1, STEPS, **cases.MANUAL)
    module = kind()
    tester.test(module, cases.loader(1, 24), ckpt_path=str(tmp_path / "twin" / "step=40.ckpt"), verbose=False)
    assert module.count == wanted.count
    same_weights = [torch.equal(a, b) for a, b in zip(module.parameters(), kind().parameters(), strict=True)]
    assert not any(same_weights)


def test_16_mixed(cases: Any, module_class: Any, tmp_path: Path) -> None:
    """A CPU has no gradient scaler by default, so that of a GPU is given to the precision plugin."""
    import lightning.pytorch as pl

    class Bad(module_class):  # type: ignore[misc]
        def training_step(self, batch: Any, index: int) -> Tensor:
            loss: Tensor = super().training_step(batch, index)
            return loss * torch.inf if len(self.losses) == 9 else loss

    def run(given: Any) -> tuple[Any, Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)
        return fit(cases, Bad, tmp_path, given, plugins=[plugin]), scaler

    wanted, theirs = run(None)
    found, ours = run(cases.config(0))
    assert theirs.get_scale() == 512.0
    assert found.losses == pytest.approx(wanted.losses, abs=2e-4)  # fp16 rounds
    assert found.checks == pytest.approx(wanted.checks, abs=2e-4)
    assert ours.get_scale() == 1024.0  # the optimizer has the scale
