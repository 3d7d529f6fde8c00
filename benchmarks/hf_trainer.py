# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer with TwinOptimizer beside a plain loop with the same optimizer: what the Trainer costs.

A fine-tune of a Llama shape (random weights, bf16, activation checkpointing) with `max_grad_norm`. Both drive one
model and one TwinOptimizer, in turn: the Trainer's steps are timed by a callback, the plain loop's over one window.
Prints a table and one JSON line; `--save` writes a dated file. `--tiny` shows on a CPU that it works, nothing more.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from twinflow.bench.machine import read_machine

SIZES = {  # hidden, layers, inner, heads, key-value heads, vocabulary
    "tiny": (64, 2, 176, 4, 4, 256),
    "1b": (2048, 16, 5504, 16, 16, 32000),
    "3b": (3200, 26, 8640, 32, 32, 32000),
    "7b": (4096, 32, 11008, 32, 32, 32000),
    "8b": (4096, 32, 14336, 32, 8, 128256),  # Llama 3
}
CUDA = torch.cuda.is_available()
WARMUP = 2  # steps of a loop before it is timed
SETTLE = 20  # steps of the Trainer before the first round if "auto" places the state
LEAST = 0.97  # of the plain loop's speed


def build(size: str, length: int) -> Any:
    """The model where it trains, in bf16 on a GPU, with weights that are drawn there."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, inner, heads, kv_heads, vocabulary = SIZES[size]
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=length,
        use_cache=False,
        attn_implementation="sdpa",
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if CUDA else torch.float32)
    try:
        with torch.device("cuda" if CUDA else "cpu"):
            return LlamaForCausalLM(config).train()
    finally:
        torch.set_default_dtype(before)


def make_trainer(model: Any, given: argparse.Namespace, folder: str) -> Any:
    from transformers import TrainerCallback, TrainingArguments

    from twinflow.integrations.huggingface import TwinTrainer

    class Clock(TrainerCallback):  # type: ignore[misc]
        """When each step was handed over, and how long the timed ones took together."""

        def __init__(self) -> None:
            self.moments: list[float] = []
            self.seconds = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.moments.clear()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            start = args.max_steps - given.steps
            if state.global_step in (start, args.max_steps):
                synchronize()
            self.moments.append(time.perf_counter())
            if state.global_step == args.max_steps:
                self.seconds = self.moments[-1] - self.moments[start - 1]

    arguments = TrainingArguments(
        folder,
        max_steps=WARMUP + given.steps,
        per_device_train_batch_size=given.batch,
        max_grad_norm=given.max_grad_norm,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        gradient_checkpointing=CUDA,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        logging_steps=given.log_every,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not CUDA,
        dataloader_pin_memory=CUDA,
    )
    data = Tokens(model.config.vocab_size, given.length, (SETTLE + arguments.max_steps) * given.batch)
    clock = Clock()
    twin = {"states": given.states, "ratio": given.ratio}
    return TwinTrainer(model, arguments, train_dataset=data, callbacks=[clock], twin=twin), clock


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random rows, the same for both loops."""

    def __init__(self, vocabulary: int, length: int, count: int) -> None:
        self._vocabulary, self._length, self._count = vocabulary, length, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.randint(0, self._vocabulary, (self._length,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def plain_steps(trainer: Any, model: Any, given: argparse.Namespace) -> tuple[float, list[float]]:
    """Seconds a step of a loop as one would write it, and the losses."""
    optimizer, losses, start = trainer.twin, [], 0.0
    model.train()
    for step in range(WARMUP + given.steps):
        if step == WARMUP:
            synchronize()
            start = time.perf_counter()
        first = step * given.batch
        rows = torch.stack([trainer.train_dataset[first + i]["input_ids"] for i in range(given.batch)])
        rows = rows.to(model.device)
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    synchronize()
    return (time.perf_counter() - start) / given.steps, [loss.item() for loss in losses]


def forward_and_backward(model: Any, given: argparse.Namespace) -> float:
    """Seconds of forward and backward without an optimizer; the median of five."""
    if CUDA:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    handles = [p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for p in model.parameters()]
    rows = torch.randint(0, model.config.vocab_size, (given.batch, given.length), device=model.device)
    times = []
    for _ in range(7):
        synchronize()
        start = time.perf_counter()
        model(input_ids=rows, labels=rows).loss.backward()
        synchronize()
        times.append(time.perf_counter() - start)
    for handle in handles:
        handle.remove()
    return sorted(times[2:])[2]


def ratio_of(text: str) -> float | str:
    return text if text == "auto" else float(text)


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Trainer, plain loop, and both again: what drifts hits both."""
    begin = time.perf_counter()
    model = build(given.size, given.length)
    alone = forward_and_backward(model, given)
    found: dict[str, Any] = {"alone": alone, "params": model.num_parameters(), "trainer": [], "plain": []}
    with tempfile.TemporaryDirectory() as folder:
        trainer, clock = make_trainer(model, given, folder)
        for number in range(given.rounds):
            trainer.args.max_steps = given.steps + (SETTLE if number == 0 and given.ratio == "auto" else WARMUP)
            trainer.train()
            found["trainer"].append(clock.seconds / given.steps)
            logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
            seconds, losses = plain_steps(trainer, model, given)
            found["plain"].append(seconds)
    found |= {"norms": [entry["grad_norm"] for entry in logs], "losses": losses}
    found |= {"host_share": trainer.twin.host_share, "all_s": time.perf_counter() - begin}
    found |= {"gpu_gb": torch.cuda.max_memory_allocated() / 1e9 if CUDA else 0.0}
    found["speed"] = min(found["plain"]) / min(found["trainer"])
    assert logs, "the Trainer reports no norm"
    assert all(entry["grad_norm"] > 0.0 for entry in logs), "a norm is none"
    assert all(loss == loss for loss in losses), "a loss is not a number"
    return found


def page(found: dict[str, Any], given: argparse.Namespace, date: str) -> str:
    import accelerate
    import transformers

    machine, gpu = read_machine(), torch.cuda.get_device_name() if CUDA else "no GPU"
    versions = (
        f"torch {torch.__version__}, transformers {transformers.__version__}, accelerate {accelerate.__version__}"
    )
    lines = [f"# Hugging Face's Trainer beside a plain loop, {given.size}, {date}", ""]
    lines += [
        f"- {gpu}; {machine.cpu}, {machine.usable_cores} cores, {machine.memory_bytes / 2**30:.0f} GiB; {versions}"
    ]
    lines += [
        f"- {found['params'] / 1e9:.2f} B parameters, {given.batch} x {given.length} tokens a step, "
        f"{given.states} state, {found['host_share']:.2f} of it on the host (ratio {given.ratio}), "
        f"max_grad_norm {given.max_grad_norm:g}, "
        f"a log every {given.log_every} steps; "
        f"{found['gpu_gb']:.0f} GB on the GPU",
        "",
    ]
    lines += ["| loop | s/step, best of rounds | all rounds |", "|---|---:|---|"]
    lines += [f"| forward and backward alone | {found['alone']:.4f} | |"]
    for name in ("trainer", "plain"):
        times = found[name]
        lines += [f"| {name} | {min(times):.4f} | {', '.join(f'{t:.4f}' for t in times)} |"]
    verdict = "" if found["speed"] >= LEAST else f" (less than {LEAST:.0%})"
    lines += ["", f"The Trainer has {found['speed']:.1%} of the plain loop's speed{verdict}. "]
    lines[-1] += f"Its gradient norms: {', '.join(f'{norm:.2f}' for norm in found['norms'])}; "
    lines[-1] += f"the whole run took {found['all_s']:.0f} s."
    result = {"date": date, "size": given.size, "batch": given.batch, "length": given.length, **found}
    return "\n".join([*lines, "", "```json", json.dumps(result), "```", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="7b")
    parser.add_argument("--tiny", action="store_true", help="a small model, to see that it works")
    parser.add_argument("--batch", type=int, default=4, help="rows of a micro-batch")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=6, help="timed steps of a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--states", choices=("fp32", "bf16", "int8"), default="fp32")
    parser.add_argument("--ratio", type=ratio_of, default="auto", help='share of the state on the host, or "auto"')
    parser.add_argument("--max-grad-norm", type=float, default=1.0, help="of the Trainer; 1.0 clips every step here")
    parser.add_argument("--log-every", type=int, default=1, help="steps; each log waits for the GPU")
    parser.add_argument("--save", action="store_true", help="write the result to a dated file")
    parser.add_argument("--save-to", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    if given.tiny:
        given.size, given.length, given.batch = "tiny", 64, 2
    elif not CUDA:
        parser.error("without CUDA only --tiny makes sense")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    found = run(given)
    date = datetime.date.today().isoformat()
    text = page(found, given, date)
    print(text)
    if given.save:
        path = given.save_to / f"{date}-hf-trainer-{given.size}-{given.ratio}.md"
        path.write_text(text, encoding="utf-8")
    sys.stdout.flush()
    if CUDA:
        os._exit(0)  # giving a hundred gigabytes back in order takes longer than the steps


if __name__ == "__main__":
    main()
