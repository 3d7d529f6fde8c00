# SPDX-License-Identifier: Apache-2.0
"""Trains LoRA adapters of a frozen model with Hugging Face's Trainer and TwinOptimizer. Only the adapters have
optimizer state and are saved. Needs `pip install peft transformers accelerate`.

python examples/peft_lora.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from twinflow.data import load_data
from twinflow.integrations.huggingface import TwinTrainer

STEPS, LENGTH = 60, 64
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 176}


def base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, use_cache=False, **SHAPE))


def main() -> None:
    data = load_data("stdlib")
    rows = [data.batch("train", i, 1, LENGTH)[0][0] for i in range(128)]
    adapted = get_peft_model(base(), LoraConfig(r=8, target_modules="all-linear", modules_to_save=["lm_head"]))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=4,
            learning_rate=2e-2,
            max_grad_norm=1.0,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
        )
        trainer = TwinTrainer(adapted, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
        trainer.train()
        trainer.save_model(folder)
        size = (Path(folder) / "adapter_model.safetensors").stat().st_size
        again = PeftModel.from_pretrained(base(), folder)
    trained, total = adapted.get_nb_trainable_parameters()
    print(f"{trained:,} of {total:,} parameters trained; the adapters are {size:,} bytes")
    batch = torch.stack(rows[:8])
    with torch.no_grad():
        before = base()(input_ids=batch, labels=batch).loss.item()
        after = again.eval()(input_ids=batch, labels=batch).loss.item()
    print(f"loss {before:.3f} without adapters, {after:.3f} with them")
    assert after < before - 0.5
    print("the adapters have learned")


if __name__ == "__main__":
    main()
