"""Lightning's Trainer with TwinStrategy: the losses of torch's AdamW, and the same bits after a resume."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations_support import DECAY, LR, MAX_NORM, assert_same_weights, llama, rows

pl = pytest.importorskip("lightning.pytorch")
pytest.importorskip("transformers")
from twinflow.integrations.lightning import TwinStrategy  # noqa: E402

STEPS, SAVED = 50, 25
OFFLOAD = {"device": "cpu", "bucket_numel": 4096}
CONFIG = {"zero_optimization": {"stage": 0, "offload_optimizer": OFFLOAD}}
ADAMW = {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}}
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*(many workers|dirpath has changed|ended before the epoch|no optimizer).*"),
]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    yield
    torch.set_num_threads(before)


class Module(pl.LightningModule):  # type: ignore[name-defined,misc]
    def __init__(self) -> None:
        super().__init__()
        self.model, self.losses, self.rates, self.checks = llama(), list[float](), list[float](), list[float]()

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.checks.append(self.model(input_ids=batch, labels=batch).loss.item())

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return None  # the config has one


class Configured(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=LR, weight_decay=DECAY)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader(count: int) -> Any:
    return torch.utils.data.DataLoader(rows(count), batch_size=2)  # type: ignore[arg-type]


def trainer(folder: Path, strategy: Any, steps: int = STEPS, every: int = SAVED, **options: Any) -> Any:
    callback = pl.callbacks.ModelCheckpoint(dirpath=folder, save_top_k=-1, every_n_train_steps=every, filename="{step}")
    given = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": steps,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": MAX_NORM,
        "callbacks": [callback],
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(strategy=strategy, **{**given, **options})


def fit(
    folder: Path, strategy: Any, module: Any = None, resume: Path | None = None, size: int = 98, **options: Any
) -> Any:
    """98 rows are 49 batches, 25 steps: the last of an epoch has one backward."""
    module = Configured() if module is None else module
    made = trainer(folder, strategy, **options)
    made.fit(module, loader(size), loader(4), ckpt_path=str(resume) if resume else None)
    return module


def test_a_fit_has_the_losses_of_adamw_and_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    wanted = fit(tmp_path / "plain", "auto")
    found = fit(tmp_path / "twin", TwinStrategy(config=CONFIG))
    assert len(found.losses) == 2 * 49
    assert found.losses == pytest.approx(wanted.losses, abs=1e-4)
    assert found.checks == pytest.approx(wanted.checks, abs=1e-4)
    assert found.rates == wanted.rates
    assert len(set(found.rates)) == STEPS
    checkpoint = tmp_path / "twin" / f"step={SAVED}.ckpt"
    resumed = fit(tmp_path / "resumed", TwinStrategy(config=CONFIG), resume=checkpoint)
    assert resumed.losses == found.losses[49:]
    assert_same_weights(resumed, found)
    # To test a checkpoint takes its weights.
    module, tester = Configured(), trainer(tmp_path / "other", TwinStrategy(config=CONFIG))
    tester.test(module, loader(4), ckpt_path=str(checkpoint), verbose=False)
    assert module.checks == found.checks[:2]


def test_optimizer_and_schedule_may_be_the_configs(tmp_path: Path) -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": LR, "warmup_num_steps": 4, "warmup_type": "linear"}}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "optimizer": ADAMW, "scheduler": schedule}))
    strategy = TwinStrategy(config=tmp_path / "config.json")
    found = fit(tmp_path / "a", strategy, Module(), steps=6, every=3, size=16)
    assert found.rates[0] < found.rates[6] < found.rates[-1] == LR
    resume = tmp_path / "a" / "step=3.ckpt"
    again = trainer(tmp_path / "b", TwinStrategy(config=tmp_path / "config.json"), steps=6)
    module = Module()
    again.fit(module, loader(16), ckpt_path=str(resume))
    assert module.rates[-1] == found.rates[-1]


@pytest.mark.matrix
def test_weights_alone_are_a_file_that_lightning_reads(tmp_path: Path) -> None:
    callback = pl.callbacks.ModelCheckpoint(dirpath=tmp_path, save_weights_only=True, filename="weights")
    made = trainer(tmp_path, TwinStrategy(config=CONFIG), steps=2, callbacks=[callback])
    module = Configured()
    made.fit(module, loader(8))
    path = tmp_path / "weights.ckpt"
    assert_same_weights(Configured.load_from_checkpoint(path, weights_only=True), module)
    with pytest.raises(ValueError, match="load_from_checkpoint"):
        fit(tmp_path / "again", TwinStrategy(config=CONFIG), resume=path, steps=2, size=8)
    with pytest.raises(RuntimeError, match="weights_only=True"):
        made.save_checkpoint(tmp_path / "late.ckpt")


@pytest.mark.matrix
def test_accumulation_that_a_callback_changes(tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 4})]

    options = {"accumulate_grad_batches": 1, "steps": 12, "size": 16, "enable_checkpointing": False}
    wanted = fit(tmp_path / "a", "auto", callbacks=callbacks(), **options)
    found = fit(tmp_path / "b", TwinStrategy(config=CONFIG), callbacks=callbacks(), **options)
    assert found.losses == pytest.approx(wanted.losses, abs=1e-4)


@pytest.mark.matrix
def test_any_optimizer_of_torch_and_bf16_weights(tmp_path: Path) -> None:
    class Other(Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.NAdam(self.parameters(), lr=LR)

    wanted = fit(tmp_path / "a", "auto", Other(), steps=6, size=16)
    found = fit(tmp_path / "b", TwinStrategy(config=CONFIG), Other(), steps=6, size=16)
    assert found.losses == pytest.approx(wanted.losses, abs=1e-4)
    low = fit(tmp_path / "c", TwinStrategy(config=CONFIG), steps=3, size=16, precision="bf16-true")
    assert low.model.dtype == torch.bfloat16
    assert low.losses == pytest.approx(fit(tmp_path / "d", "auto", steps=3, size=16).losses[:6], abs=0.1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"gradient_clipping": 1.0}, "gradient_clip_val"),
        ({"gradient_accumulation_steps": 4}, "accumulate_grad_batches"),
        ({"train_batch_size": 4}, "batch_size"),
        ({"torch_autocast": {"enabled": True}}, "bf16-mixed"),
        ({"pipeline": {"stages": 2}}, "initialize"),
    ],
)
def test_what_is_the_trainers_business_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TwinStrategy(config=config)


def test_what_would_train_wrongly_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one of them"):
        fit(tmp_path, TwinStrategy(config={**CONFIG, "optimizer": ADAMW}))
    with pytest.raises(ValueError, match="gradient_clip_algorithm"):
        fit(tmp_path, TwinStrategy(config=CONFIG), gradient_clip_algorithm="value")
    with pytest.raises(ValueError, match=r"configure_optimizers\(\) is 0; allowed: 1"):
        fit(tmp_path, TwinStrategy(config=CONFIG), Module())
    with pytest.raises(RuntimeError, match="only while"):
        _ = TwinStrategy().twin


SCRIPT = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from test_integrations_lightning import *
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
