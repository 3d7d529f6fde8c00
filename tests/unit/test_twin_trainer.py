# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer with TwinOptimizer in place of AdamW: its own clipping, accumulation, schedule and resume."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from twin_support import matrix_but

from twinflow.optim.twin import Tuning, TwinOptimizer

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

STEPS, LR = 6, 5e-3
ROWS = torch.randint(0, 64, (64, 8), generator=torch.Generator().manual_seed(1))
Make = Callable[[nn.Module], torch.optim.Optimizer]


def model(name: str) -> nn.Module:
    shape = {"vocab_size": 64, "max_position_embeddings": 16, "hidden_size": 32, "num_attention_heads": 2}
    torch.manual_seed(0)
    if name == "llama":
        config = transformers.LlamaConfig(**shape, num_hidden_layers=2, intermediate_size=64)
        return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]
    config = transformers.GPT2Config(**shape, num_hidden_layers=2, tie_word_embeddings=True)
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)


def twin(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    optimizer = TwinOptimizer(model, lr=LR, weight_decay=0.01, tuning=Tuning(bucket_numel=4096), **options)
    for stream in ("in", "out", "compute"):
        optimizer.runtime.device.delay(stream, 0.001)
    return optimizer


def train(name: str, make: Make, folder: Path, resume: Path | None = None) -> tuple[list[Any], dict[str, Tensor]]:
    """What the Trainer logged for each step, and the weights it ended with."""
    net = model(name)
    optimizer = make(net)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_grad_norm=1.0,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        logging_steps=1,
        save_strategy="steps",
        save_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=3,
    )
    rows = [{"input_ids": row, "labels": row} for row in ROWS]
    trainer = transformers.Trainer(net, arguments, train_dataset=rows, optimizers=(optimizer, None))
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    keys = ("step", "loss", "learning_rate", "grad_norm")
    logs = [tuple(entry[key] for key in keys) for entry in trainer.state.log_history if "loss" in entry]
    weights = {key: value.clone() for key, value in net.state_dict().items()}
    if isinstance(optimizer, TwinOptimizer):
        optimizer.close()
    return logs, weights


def assert_same(found: tuple[list[Any], dict[str, Tensor]], wanted: tuple[list[Any], dict[str, Tensor]]) -> None:
    for ours, theirs in zip(found[0], wanted[0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", matrix_but(["gpt2"], ["llama", "gpt2"]))
def test_a_trainer_run_equals_adamw_and_its_own_resume(name: str, tmp_path: Path) -> None:
    wanted = train(name, plain, tmp_path / "plain")
    found = train(name, twin, tmp_path / "twin")
    assert [entry[0] for entry in found[0]] == list(range(1, STEPS + 1))
    assert any(entry[3] > 1.0 for entry in found[0]), "nothing was clipped"
    assert_same(found, wanted)
    resumed = train(name, twin, tmp_path / "resumed", resume=tmp_path / "twin" / "checkpoint-3")
    assert [entry for entry in resumed[0] if entry[0] > 3] == found[0][3:]
    for key, value in found[1].items():
        assert torch.equal(resumed[1][key], value), key


def test_the_trainers_clipping_of_gradients_that_are_gone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"set max_grad_norm"):
        train("llama", partial(twin, early=True, accumulation_steps=4), tmp_path)
