# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer with TwinStrategy: the losses of torch's AdamW, and the same bits after a resume."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations_support import DECAY, LR, assert_same_weights

ADAMW = {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}}
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*(many workers|dirpath has changed|ended before the epoch|no optimizer).*"),
]


@pytest.fixture(scope="module")
def cases() -> Any:
    """lightning_cases, which only a process that runs these tests imports."""
    pytest.importorskip("transformers")
    pytest.importorskip("lightning.pytorch")
    return importlib.import_module("lightning_cases")


@pytest.mark.parametrize("batches", [9, pytest.param(49, marks=pytest.mark.matrix)])  # of an epoch; 10 or 50 steps
def test_a_fit_has_the_losses_of_adamw_and_goes_on_with_the_same_bits(cases: Any, tmp_path: Path, batches: int) -> None:
    saved = batches // 2 + 1
    sizes = {"size": 2 * batches, "steps": 2 * saved, "every": saved}
    wanted = cases.fit(tmp_path / "plain", "auto", **sizes)
    found = cases.fit(tmp_path / "twin", cases.TwinStrategy(config=cases.CONFIG), **sizes)
    assert len(found.losses) == 2 * batches
    assert found.losses == pytest.approx(wanted.losses, abs=1e-4)
    assert found.checks == pytest.approx(wanted.checks, abs=1e-4)
    assert found.rates == wanted.rates
    assert len(set(found.rates)) == 2 * saved
    checkpoint = tmp_path / "twin" / f"step={saved}.ckpt"
    resumed = cases.fit(tmp_path / "resumed", cases.TwinStrategy(config=cases.CONFIG), resume=checkpoint, **sizes)
    assert resumed.losses == found.losses[batches:]
    assert_same_weights(resumed, found)
    # To test a checkpoint takes its weights.
    module, tester = (
        cases.Configured(),
        cases.trainer(tmp_path / "other", cases.TwinStrategy(config=cases.CONFIG), 1, 1),
    )
    tester.test(module, cases.loader(4), ckpt_path=str(checkpoint), verbose=False)
    assert module.checks == found.checks[:2]


def test_optimizer_and_schedule_may_be_the_configs(cases: Any, tmp_path: Path) -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": LR, "warmup_num_steps": 4, "warmup_type": "linear"}}
    (tmp_path / "config.json").write_text(json.dumps({**cases.CONFIG, "optimizer": ADAMW, "scheduler": schedule}))
    strategy = cases.TwinStrategy(config=tmp_path / "config.json")
    found = cases.fit(tmp_path / "a", strategy, cases.Module(), steps=6, every=3, size=16)
    assert found.rates[0] < found.rates[6] < found.rates[-1] == LR
    resume = tmp_path / "a" / "step=3.ckpt"
    again = cases.trainer(tmp_path / "b", cases.TwinStrategy(config=tmp_path / "config.json"), 6, 6)
    module = cases.Module()
    again.fit(module, cases.loader(16), ckpt_path=str(resume))
    assert module.rates[-1] == found.rates[-1]


@pytest.mark.matrix
def test_weights_alone_are_a_file_that_lightning_reads(cases: Any, tmp_path: Path) -> None:
    callback = cases.pl.callbacks.ModelCheckpoint(dirpath=tmp_path, save_weights_only=True, filename="weights")
    made = cases.trainer(tmp_path, cases.TwinStrategy(config=cases.CONFIG), 2, 2, callbacks=[callback])
    module = cases.Configured()
    made.fit(module, cases.loader(8))
    path = tmp_path / "weights.ckpt"
    assert_same_weights(cases.Configured.load_from_checkpoint(path, weights_only=True), module)
    with pytest.raises(KeyError, match="contains only the model"):
        cases.fit(tmp_path / "again", cases.TwinStrategy(config=cases.CONFIG), resume=path, steps=2, size=8)
    with pytest.raises(RuntimeError, match="weights_only=True"):
        made.save_checkpoint(tmp_path / "late.ckpt")


@pytest.mark.matrix
def test_accumulation_that_a_callback_changes(cases: Any, tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [cases.pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 4})]

    options = {"accumulate_grad_batches": 1, "steps": 12, "size": 16, "enable_checkpointing": False}
    wanted = cases.fit(tmp_path / "a", "auto", callbacks=callbacks(), **options)
    found = cases.fit(tmp_path / "b", cases.TwinStrategy(config=cases.CONFIG), callbacks=callbacks(), **options)
    assert found.losses == pytest.approx(wanted.losses, abs=1e-4)


@pytest.mark.matrix
def test_any_optimizer_of_torch_and_bf16_weights(cases: Any, tmp_path: Path) -> None:
    class Other(cases.Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.NAdam(self.parameters(), lr=LR)

    wanted = cases.fit(tmp_path / "a", "auto", Other(), steps=6, size=16)
    found = cases.fit(tmp_path / "b", cases.TwinStrategy(config=cases.CONFIG), Other(), steps=6, size=16)
    assert found.losses == pytest.approx(wanted.losses, abs=1e-4)
    low = cases.fit(tmp_path / "c", cases.TwinStrategy(config=cases.CONFIG), steps=3, size=16, precision="bf16-true")
    assert low.model.dtype == torch.bfloat16
    assert low.losses == pytest.approx(cases.fit(tmp_path / "d", "auto", steps=3, size=16).losses[:6], abs=0.1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"gradient_accumulation_steps": 4}, "accumulate_grad_batches"),
        ({"train_batch_size": 4}, "batch_size"),
        ({"torch_autocast": {"enabled": True}}, "bf16-mixed"),
        ({"pipeline": {"stages": 2}}, "initialize"),
    ],
)
def test_what_is_the_trainers_business_is_refused(cases: Any, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cases.TwinStrategy(config=config)


def test_what_would_train_wrongly_is_refused(cases: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"^optimizer in the config of TwinStrategy cannot be used with an optimizer of configure_optimizers\(\)",
    ):
        cases.fit(tmp_path, cases.TwinStrategy(config={**cases.CONFIG, "optimizer": ADAMW}))
    with pytest.raises(ValueError, match=r"gradient_clipping in the config.*gradient_clip_val"):
        cases.fit(tmp_path, cases.TwinStrategy(config={**cases.CONFIG, "gradient_clipping": 1.0}))
    with pytest.raises(ValueError, match=r"configure_optimizers\(\) is 0, but must be 1"):
        cases.fit(tmp_path, cases.TwinStrategy(config=cases.CONFIG), cases.Module())
    with pytest.raises(ValueError, match=r"stage of TwinStrategy cannot be used with config"):
        cases.TwinStrategy(config=cases.CONFIG, stage=2)
    with pytest.raises(RuntimeError, match="only while"):
        _ = cases.TwinStrategy().twin


SCRIPT = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from integrations_support import assert_same_weights
from lightning_cases import *
strategy = TwinStrategy(config={{"zero_optimization": {{"stage": {stage}, "offload_optimizer": OFFLOAD}}}})
options = dict(devices=2, steps=6, every=3, use_distributed_sampler=True)
first = fit(Path({folder!r}) / "a", strategy, size=24, **options)
strategy = TwinStrategy(config={{"zero_optimization": {{"stage": {stage}, "offload_optimizer": OFFLOAD}}}})
again = fit(Path({folder!r}) / "b", strategy, resume=Path({folder!r}) / "a" / "step=3.ckpt", size=24, **options)
assert again.losses == first.losses[-len(again.losses):], (again.losses, first.losses)
assert_same_weights(again, first)
print("same", *first.losses)
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_two_ranks_share_the_work(stage: int, tmp_path: Path) -> None:
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src")]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(path=folders, stage=stage, folder=str(tmp_path)))
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.count("same") == 2
