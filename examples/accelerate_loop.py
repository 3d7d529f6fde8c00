# SPDX-License-Identifier: Apache-2.0
"""A training loop of Accelerate with TwinOptimizer. Only the line that builds the optimizer changes.

Needs `pip install accelerate transformers`.

python examples/accelerate_loop.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from twinflow.data import load_data
from twinflow.integrations.accelerate import twin_optimizer

STEPS, ACCUMULATION, LENGTH = 40, 2, 64
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 176}


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, use_cache=False, **SHAPE))
    # Instead of torch.optim.AdamW(...). max_grad_norm must equal the limit that the loop passes to clip_grad_norm_.
    optimizer = twin_optimizer(accelerator, model, "adamw", lr=5e-3, weight_decay=0.01, max_grad_norm=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    data = load_data("stdlib")
    rows = [data.batch("train", i, 1, LENGTH)[0][0] for i in range(4 * STEPS * ACCUMULATION)]
    loader = torch.utils.data.DataLoader(rows, batch_size=4)  # type: ignore[arg-type]
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses: list[float] = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)  # updates start during backward
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)  # its value is known after the step
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) % 20 == 0:
            print(f"micro-batch {len(losses):3d}  loss {losses[-1]:.3f}  gradient norm {norm.item():.2f}")
    optimizer.optimizer.close()  # closes the TwinOptimizer after its last update
    assert sum(losses[-4:]) / 4 < losses[0] - 1.0
    print("the loss fell")


if __name__ == "__main__":
    main()
