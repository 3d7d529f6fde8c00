# SPDX-License-Identifier: Apache-2.0
"""fp16 in loops of Accelerate and the Trainer: the loss scale of TwinOptimizer gives the steps of torch's GradScaler.

A CPU has no fp16 in these libraries, so the scaler of a GPU is put onto the accelerator. An infinite loss overflows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

accelerate = pytest.importorskip("accelerate")
LR, SCALE = 1e-2, 1024.0


def scaled(**options: Any) -> Any:
    """An accelerator with a gradient scaler."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    give_scaler(accelerator, **options)
    return accelerator


def give_scaler(accelerator: Any, **options: Any) -> None:
    """What Accelerate does for fp16 on a GPU, without autocast."""
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, **options)

    def unscale_gradients(optimizer: Any = None) -> None:
        for prepared in accelerator._optimizers:
            accelerator.scaler.unscale_(prepared.optimizer)

    accelerator.unscale_gradients = unscale_gradients


def loop(is_twin: bool, clip: tuple[str, float] | None, bad: int = -1, **options: Any) -> dict[str, list[Any]]:
    """Losses, learning rates and scales. The loss of micro-batch `bad` is infinite."""
    from twinflow.integrations.accelerate import twin_optimizer

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    accelerator = scaled()
    if is_twin:
        limit = clip[1] if clip is not None and clip[0] == "norm" else None
        optimizer = twin_optimizer(accelerator, model, "adamw", lr=LR, max_grad_norm=limit, **options)
    else:
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=LR))
    model = accelerator.prepare(model)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.LinearLR(optimizer.optimizer, 1.0, 0.1, 12))
    found: dict[str, list[Any]] = {"losses": [], "rates": [], "skipped": [], "scales": []}
    batches = torch.randn(24, 6, 4, generator=torch.Generator().manual_seed(1))
    for index, batch in enumerate(batches):
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss * torch.inf if index == bad else loss)
            if accelerator.sync_gradients and clip is not None:
                clipped = accelerator.clip_grad_norm_ if clip[0] == "norm" else accelerator.clip_grad_value_
                clipped(model.parameters(), clip[1])
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        found["losses"].append(loss.item())
        found["rates"].append(optimizer.param_groups[0]["lr"])
        found["skipped"].append(accelerator.optimizer_step_was_skipped)
        found["scales"].append(accelerator.scaler.get_scale())
    if is_twin:
        optimizer.optimizer.close()
    return found


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("clip", [None, ("norm", 0.05), ("value", 0.01)])
def test_steps_are_those_of_gradscaler(clip: tuple[str, float] | None, early: bool) -> None:
    wanted = loop(False, clip, bad=9)
    found = loop(True, clip, bad=9, early=early)
    assert any(wanted["skipped"])
    for key in ("losses", "rates"):
        assert found[key] == pytest.approx(wanted[key], abs=1e-5), key
    assert found["skipped"] == wanted["skipped"]
    assert found["scales"] == wanted["scales"]


def test_a_scaler_with_two_factors_is_refused() -> None:
    from twinflow.integrations.accelerate import twin_optimizer

    with pytest.raises(ValueError, match=r"backoff_factor of the gradient scaler is 0.25, but must be 0.5"):
        twin_optimizer(scaled(backoff_factor=0.25), nn.Linear(2, 2))
    accelerator, model = scaled(), nn.Linear(2, 2)
    optimizer = twin_optimizer(accelerator, model)
    with pytest.raises(RuntimeError, match="another optimizer"):
        accelerator.scaler.step(torch.optim.SGD(model.parameters()))
    optimizer.optimizer.close()


@pytest.mark.parametrize("clip", [1.0, pytest.param(0.0, marks=pytest.mark.matrix)])
def test_the_trainer_with_a_scaler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip: float) -> None:
    transformers = pytest.importorskip("transformers")
    from integrations_support import llama, samples

    from twinflow.integrations.huggingface import TwinTrainer

    def run(kind: Any, resume: str | None = None) -> tuple[list[float], Any]:
        arguments = transformers.TrainingArguments(
            str(tmp_path / kind.__name__), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=6,
            learning_rate=LR, max_grad_norm=clip, logging_steps=1, save_steps=3, use_cpu=True, report_to=[],
            disable_tqdm=True,
        )  # fmt: skip
        trainer = kind(model=llama(), args=arguments, train_dataset=samples(24))
        give_scaler(trainer.accelerator)
        trainer.train(resume_from_checkpoint=resume)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer

    wanted, _ = run(transformers.Trainer)
    found, trainer = run(TwinTrainer)
    assert found == pytest.approx(wanted, abs=1e-4)
    assert trainer.twin.scales_loss
    again, _ = run(TwinTrainer, str(tmp_path / "TwinTrainer" / "checkpoint-3"))
    assert again[-3:] == found[-3:]
