# SPDX-License-Identifier: Apache-2.0
"""The longest sequence that trains, and the step at equal length: layers checkpointed, and their inputs on the host.

One sequence a step, bf16, TwinOptimizer with the state on the host, a loss in chunks (all logits of a long sequence are
larger than anything else). The longest sequence is first sought with forward and backward alone, then real steps are
taken with it, a little shorter where they do not fit; every run is a process of its own. Before all that, on a short
sequence, losses and gradients of both ways must have the same bits. Prints the machine, a table and one JSON line;
`--save` writes a dated file in benchmarks/results. A shape of Llama needs transformers, a preset of twinflow's GPT does
not; without CUDA `--size tiny` shows that it works, nothing more.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from offload import CUDA, DEVICE, SIZES, build, synchronize
from torch import Tensor, nn

from twinflow.activations import Handle, checkpoint_layers
from twinflow.bench.machine import read_machine
from twinflow.loss import chunked_cross_entropy
from twinflow.models.gpt import GPT, PRESETS
from twinflow.offload import materialize
from twinflow.offload.blocks import find_blocks
from twinflow.optim.twin import TwinOptimizer

WAYS = ("checkpointed", "cpu_checkpointing")
SHORT = 512 if CUDA else 64


def make(size: str, length: int) -> nn.Module:
    """The model, checkpointing nothing itself."""
    if size in SIZES:
        model: Any = build(size)
        model.gradient_checkpointing_disable()
        return model  # type: ignore[no-any-return]
    torch.manual_seed(0)
    config = dataclasses.replace(PRESETS[size], context=length)
    return materialize.build(lambda: GPT(config), DEVICE, torch.bfloat16 if CUDA else torch.float32)


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    if isinstance(model, GPT):
        loss = model(tokens[:, :-1], tokens[:, 1:]).loss
        assert loss is not None
        return loss
    hidden = model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
    return chunked_cross_entropy(hidden.flatten(0, 1), model.lm_head.weight, tokens[:, 1:].flatten())


def tokens_of(model: Any, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, model.config.vocab_size, (1, length + 1), generator=generator).to(DEVICE)


def wrap(model: nn.Module, way: str) -> Handle:
    layers = [block.module for block in find_blocks(model)]
    min_bytes = 1 << 20 if CUDA else 1
    return checkpoint_layers(model, layers, offload=way == "cpu_checkpointing", min_bytes=min_bytes)


def have_same_bits(size: str) -> bool:
    """Loss and gradients of one short step, both ways."""
    found = []
    for way in WAYS:
        model = make(size, SHORT)
        handle = wrap(model, way)
        loss = loss_of(model, tokens_of(model, SHORT))
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        handle.remove()
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def search(size: str, way: str, start: int, most: int) -> dict[str, Any]:
    """The longest sequence whose forward and backward fit, within 1/16: doubled while it does, then halfway between."""
    model = make(size, most)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    handle = wrap(model, way)
    fits, too_long, length = 0, most + 1, start
    while length > fits and fits * 17 // 16 < too_long:
        try:
            loss_of(model, tokens_of(model, length)).backward()
            synchronize()
            fits = length
        except torch.OutOfMemoryError:
            too_long = length
        print(f"{way}, {length} tokens: {'fits' if fits == length else 'too long'}", file=sys.stderr)
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()
        length = fits * 2 if 0 < fits * 2 < too_long else (fits + too_long) // 2 // 64 * 64
    handle.remove()
    return {"length": fits}


def take_steps(size: str, way: str, length: int, steps: int) -> dict[str, Any]:
    """Seconds a step and memory at this length."""
    model = make(size, length)
    optimizer = TwinOptimizer(model, lr=1e-6, ratio=1.0, early=True)
    handle, tokens = wrap(model, way), tokens_of(model, length)
    warmup, start = 2 if steps > 1 else 1, 0.0
    for step in range(warmup + steps):
        if step == warmup:
            synchronize()
            start = time.perf_counter()
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    synchronize()
    row: dict[str, Any] = {"way": way, "length": length, "step_s": (time.perf_counter() - start) / steps}
    row["gpu_gb"] = torch.cuda.max_memory_allocated() / 1e9 if CUDA else 0.0
    row["host_gb"] = handle.offload.host_bytes / 1e9 if handle.offload is not None else 0.0
    return row


def in_process(given: argparse.Namespace, *part: object) -> dict[str, Any] | None:
    """A part in a process of its own; None where memory did not suffice."""
    command = [sys.executable, __file__, "--size", given.size, "--cap", str(given.cap), "--start", str(given.start)]
    command += ["--most", str(given.most), "--part", *(str(word) for word in part)]
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    found = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
    print(*part, found[0] if found else "does not fit", file=sys.stderr)
    if not found and "out of memory" not in done.stderr:
        raise RuntimeError(done.stderr)
    return json.loads(found[0].removeprefix("ROW ")) if found else None


def longest(given: argparse.Namespace, way: str) -> dict[str, Any]:
    """A real step with the longest sequence for which there is memory."""
    if given.longest:
        length = given.longest[WAYS.index(way)]
    else:
        found = in_process(given, "search", way)
        length = found["length"] if found is not None else 0
    while length >= 64:  # the optimizer needs some of the memory too
        row = in_process(given, "steps", way, length, 1)
        if row is not None:
            return row
        length = length * 15 // 16 // 64 * 64
    raise RuntimeError(f"{way}: not even 64 tokens fit")


def page(size: str, rows: list[dict[str, Any]], cap_gb: float, date: str) -> str:
    """The result as Markdown, one JSON line last."""
    machine, gpu = read_machine(), torch.cuda.get_device_name() if CUDA else "no GPU"
    lines = [f"# Checkpointed layers with their inputs on the host, {size}, {date}", ""]
    lines += [f"- {gpu}; {machine.cpu}, {machine.usable_cores} cores, {machine.memory_bytes / 2**30:.0f} GiB"]
    lines += [f"- torch {torch.__version__}; GPU memory {f'capped at {cap_gb:g} GB' if cap_gb else 'not capped'}"]
    lines += ["- losses and gradients of both ways have the same bits", ""]
    lines += ["| what | way | tokens | s/step | GPU GB | page-locked GB |", "|---|---|---:|---:|---:|---:|"]
    for row in rows:
        cells = [row["what"], row["way"], row["length"], f"{row['step_s']:.3f}", f"{row['gpu_gb']:.1f}"]
        lines.append("| " + " | ".join(str(cell) for cell in [*cells, f"{row['host_gb']:.1f}"]) + " |")
    by = {(row["what"], row["way"]): row for row in rows}
    plain, ours = (by["longest", way]["length"] for way in WAYS)
    times = [by["equal length", way]["step_s"] for way in WAYS]
    lines += ["", f"Sequence {ours / plain:.2f} times as long; step {times[1] / times[0]:.3f} times at equal length."]
    lines += ["", "```json", json.dumps({"size": size, "date": date, "cap_gb": cap_gb, "rows": rows}), "```", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=[*SIZES, *PRESETS], default="3b")
    parser.add_argument("--start", type=int, default=8192 if CUDA else 64, help="first length that is tried")
    parser.add_argument("--most", type=int, default=1 << 19 if CUDA else 256, help="longest length that is tried")
    parser.add_argument("--longest", type=int, nargs=2, help="lengths found before, of both ways: no search")
    parser.add_argument("--cap", type=float, default=40.0, help="GB of GPU memory that may be used; 0: all")
    parser.add_argument("--save", action="store_true", help="write the result to a dated file")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.cap and CUDA and given.part:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, given.cap * 1e9 / total))
    if given.part:
        kind, way, *numbers = given.part
        if kind == "search":
            row = search(given.size, way, given.start, given.most)
        else:
            row = take_steps(given.size, way, *(int(number) for number in numbers))
        print("ROW " + json.dumps(row), flush=True)
        os._exit(0)
    if not have_same_bits(given.size):
        raise SystemExit("the two ways differ: no figures")
    if CUDA:
        torch.cuda.empty_cache()  # all else is in other processes
    rows = [{"what": "longest", **longest(given, way)} for way in WAYS]
    equal = rows[0]["length"] * 15 // 16 // 64 * 64  # not at the brim, where the allocator's retries would be timed
    for way in WAYS:
        timed = in_process(given, "steps", way, equal, 5)
        assert timed is not None
        rows.append({"what": "equal length", **timed})
    today = datetime.date.today().isoformat()
    text = page(given.size, rows, given.cap, today)
    print(text)
    if given.save:
        path = Path(__file__).parent / "results" / f"{today}-activations-{given.size}.md"
        path.write_text(text, encoding="utf-8")
        print(f"written to {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
