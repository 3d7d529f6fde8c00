# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer with TwinOptimizer, which changes two lines. A small Llama trains on the source code of
Python's standard library. A resumed run ends with the same bits. Needs `pip install transformers accelerate`.

python examples/hf_trainer.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from twinflow.data import load_data
from twinflow.integrations.huggingface import TwinTrainer  # instead of transformers.Trainer

STEPS, LENGTH = 40, 64


def samples(split: str, count: int) -> list[dict[str, torch.Tensor]]:
    data = load_data("stdlib")
    rows = [data.batch(split, i, 1, LENGTH)[0][0] for i in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def build(folder: str) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=176,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    arguments = TrainingArguments(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        logging_steps=10,
        save_steps=20,
        eval_strategy="steps",
        eval_steps=20,
        bf16=torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    # The optimizer state is fp32. On a GPU the first steps show how much of it should be on the host: ratio "auto".
    # twin={"ratio": 1.0, "states": "bf16"} would keep all of it on the host, in bf16.
    return TwinTrainer(model, arguments, train_dataset=samples("train", 128), eval_dataset=samples("valid", 8))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(folder)
        trainer.train()
        resumed = build(folder)
        resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-20")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, gradient norms {', '.join(f'{norm:.2f}' for norm in norms)}")
    print(f"optimizer {trainer.twin.rule_name}, with {trainer.twin.host_share:.0%} of its state on the host")
    one, two = trainer.model.state_dict(), resumed.model.state_dict()
    same = all(torch.equal(one[name], two[name]) for name in one)
    print("the resumed run has the same bits" if same else "the resumed run differs")
    assert losses[-1] < losses[0] - 0.5


if __name__ == "__main__":
    main()
