# SPDX-License-Identifier: Apache-2.0
"""Trains a small Llama with Hugging Face's Trainer and a DeepSpeed config, whose "auto" values the Trainer sets.

With twinflow:  twinflow launch --compat --num_procs 1 examples/compat/hf_causal_lm.py
With DeepSpeed: deepspeed --num_gpus 1 examples/compat/hf_causal_lm.py
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

HERE = Path(__file__).resolve().parent


class Characters(torch.utils.data.Dataset):
    """Sequences of `length` characters of text.txt, as numbers."""

    def __init__(self, length=64):
        text = (HERE / "text.txt").read_text()
        self.known = sorted(set(text))
        numbers = {character: i for i, character in enumerate(self.known)}
        self.rows = torch.tensor([numbers[character] for character in text]).unfold(0, length, length)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--deepspeed", default=str(HERE / "hf_causal_lm.json"))
    parser.add_argument("--accumulate", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder,
            max_steps=args.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=args.accumulate,
            learning_rate=3e-3,
            weight_decay=0.01,
            max_grad_norm=1.0,
            warmup_steps=4,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            seed=0,
            dataloader_pin_memory=False,
            deepspeed=args.deepspeed,
        )
        torch.manual_seed(0)
        data = Characters()
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(data.known),
                hidden_size=48,
                intermediate_size=96,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=64,
            )
        )
        trainer = Trainer(model=model, args=options, train_dataset=data)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        print(json.dumps({"losses": losses, "norms": norms}))


if __name__ == "__main__":
    main()
