# SPDX-License-Identifier: Apache-2.0
"""Modules and fits for the tests of TwinStrategy: apart, because importing Lightning takes seconds."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from integrations_support import DECAY, LR, MAX_NORM, llama, rows

from twinflow.integrations.lightning import TwinStrategy

__all__ = ["CONFIG", "OFFLOAD", "Configured", "Module", "Path", "TwinStrategy", "fit", "loader", "pl", "trainer"]
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)
STEPS = 50  # of the schedule
OFFLOAD = {"device": "cpu", "bucket_numel": 4096}
CONFIG = {"zero_optimization": {"stage": 0, "offload_optimizer": OFFLOAD}}


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


def trainer(folder: Path, strategy: Any, steps: int, every: int, **options: Any) -> Any:
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
    folder: Path,
    strategy: Any,
    module: Any = None,
    resume: Path | None = None,
    size: int = 18,
    steps: int = 10,
    every: int = 5,
    **options: Any,
) -> Any:
    """18 rows are 9 batches, 5 steps: the last of an epoch has one backward."""
    module = Configured() if module is None else module
    made = trainer(folder, strategy, steps, every, **options)
    made.fit(module, loader(size), loader(4), ckpt_path=str(resume) if resume else None)
    return module
