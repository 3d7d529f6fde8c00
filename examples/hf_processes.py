# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer with TwinOptimizer on several processes, each with a part of weights, gradients and state
(ZeRO stage 3). A small Llama trains on the source code of Python's standard library, and transformers loads the result.
The script also runs in one process. Needs `pip install transformers accelerate`.

torchrun --nproc-per-node 2 examples/hf_processes.py
"""

from __future__ import annotations

import shutil
import tempfile

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from twinflow.data import load_data
from twinflow.integrations.huggingface import TwinTrainer  # instead of transformers.Trainer

STEPS, LENGTH, GLOBAL_BATCH = 30, 64, 8


def samples(split: str, count: int) -> list[dict[str, torch.Tensor]]:
    data = load_data("stdlib")
    rows = [data.batch(split, i, 1, LENGTH)[0][0] for i in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    processes = PartialState(cpu=not torch.cuda.is_available())
    (folder,) = broadcast_object_list([tempfile.mkdtemp() if processes.is_main_process else ""])
    shape = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, use_cache=False, **shape))
    arguments = TrainingArguments(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=GLOBAL_BATCH // processes.num_processes,
        max_grad_norm=1.0,
        learning_rate=5e-3,
        logging_steps=10,
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    data = {"train_dataset": samples("train", 256), "eval_dataset": samples("valid", 16)}
    trainer = TwinTrainer(model, arguments, **data, twin={"zero": 3})
    trainer.train()
    trainer.save_model()  # all processes call it, and process 0 writes the whole weights
    loss = trainer.evaluate()["eval_loss"]
    processes.wait_for_everyone()
    loaded = Trainer(LlamaForCausalLM.from_pretrained(folder), arguments, eval_dataset=data["eval_dataset"])
    same = abs(loaded.evaluate()["eval_loss"] - loss) < 1e-4
    processes.wait_for_everyone()
    if processes.is_main_process:
        shutil.rmtree(folder)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"{processes.num_processes} processes: loss {losses[0]:.3f} to {losses[-1]:.3f}")
        print("the saved model has the same loss" if same else "the saved model has another loss")
        assert losses[-1] < losses[0] - 0.3


if __name__ == "__main__":
    main()
