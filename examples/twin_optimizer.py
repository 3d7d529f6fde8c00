# SPDX-License-Identifier: Apache-2.0
"""Trains a small GPT with TwinOptimizer in a plain loop. Prints losses and metrics, and writes a timeline.

With a GPU the model is in bf16. Its fp32 master weights and Adam states are in host memory, or partly on the GPU.
Without a GPU the same code trains on the CPU in fp32.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch

from twinflow import TwinOptimizer
from twinflow.data import load_data
from twinflow.models.gpt import GPT, GPTConfig

STEPS, BATCH_SIZE, TRACED = 60, 4, 5
CONFIG = GPTConfig(vocab_size=256, context=64, num_layers=3, hidden=64, num_heads=4)


def main() -> None:
    data = load_data("stdlib")
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = GPT(CONFIG).to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    optimizer = TwinOptimizer(model, "adamw", lr=3e-3, betas=(0.9, 0.95), max_grad_norm=1.0, early=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
    losses = []
    for step in range(STEPS):
        if step == STEPS - TRACED:
            optimizer.trace.start()
        tokens, targets = (part.to(device) for part in data.batch("train", step, BATCH_SIZE, CONFIG.context))
        loss = model(tokens, targets).loss  # each block waits for its own new weights
        loss.backward()  # each update starts as soon as its gradient is complete
        optimizer.step()  # does not wait for the updates
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if step % 20 == 0 or step == STEPS - 1:
            print(f"step {step:3d}  loss {losses[-1]:.3f}  gradient norm {optimizer.grad_norm:.2f}")
    print("metrics:", {name: round(value, 3) for name, value in optimizer.metrics().items()})
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # to look at the timeline, keep the file and open it in ui.perfetto.dev
        path = Path(folder) / "trace.json"
        optimizer.export_trace(path)
        events = json.loads(path.read_text())["traceEvents"]
    tracks = sorted(event["args"]["name"] for event in events if event["name"] == "thread_name")
    print(f"timeline of {TRACED} steps: {len(events)} events on the tracks {', '.join(tracks)}")
    optimizer.close()  # finishes all updates and removes the hooks from the model
    assert sum(losses[-10:]) / 10 < losses[0] - 1.5
    print("the loss fell")


if __name__ == "__main__":
    main()
