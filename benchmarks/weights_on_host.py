"""Published shapes with their weights on the host, in a limited part of the GPU's memory, beside what bounds a step.

A step cannot be shorter than forward and backward alone (measured without a limit of memory), than the host's update
alone, or than the copies over the bus: weights to the GPU twice, gradients to the host, and the inputs of the blocks
both ways if they are kept on the host. If every step is clipped, no update can begin before the backward has ended,
and the bound is t_bwd + max(t_fwd, update). Each part runs in a process of its own. Random weights, bf16, activation
checkpointing for each block, the loss in chunks, AdamW. Before that a small model trains with its weights on the host
and on the device and must have the same losses, bit for bit.

python benchmarks/weights_on_host.py --rows llama3-8b:bf16:24:4 llama3-8b:bf16:16:16 --save

A row is SHAPE:STATES:GB:SEQUENCES, with shapes of real_models.py and sequences of 2,048 tokens. A ":clipped" at its
end clips every step, a ":host" keeps the inputs of blocks on the host. `--rows tiny:fp32:0:2` runs on any machine.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from real_models import ALWAYS, CUDA, DEVICE, NEVER, SHAPES, TOKENS, bare, host_rate, measure, synchronize

from twinflow.activations import checkpoint_layers
from twinflow.bench.machine import describe, read_machine
from twinflow.integrations.chunked_loss import chunk_loss
from twinflow.offload.materialize import build
from twinflow.optim.twin import TwinOptimizer
from twinflow.planner.probe import load_or_measure

HEADS = [
    "params",
    "gpu_s",
    "fwd_s",
    "host_s",
    "copying_s",
    "busy_s",
    "bus_s",
    "bound_s",
    "step_s",
    "least_s",
    "most_s",
    "x_bound",
]
HEADS += ["gpu_gb", "host_gb", "in_gb", "out_gb", "ratio"]


def data_of(shape: str, batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, SHAPES[shape][5], (batch, TOKENS), generator=generator).to(DEVICE)


def prepared(model: Any, keeps_inputs_on_host: bool) -> Any:
    model.train()
    chunk_loss(model)
    checkpoint_layers(model, [type(model.model.layers[0]).__name__], offload=keeps_inputs_on_host)
    return model


def alone(shape: str, batch: int) -> dict[str, Any]:
    """Forward and backward with no optimizer, all weights on the device, every gradient dropped."""
    model: Any = prepared(build(lambda: bare(shape), DEVICE), keeps_inputs_on_host=False)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    data = data_of(shape, batch)

    def both() -> None:
        model(input_ids=data, labels=data).loss.backward()

    def forward() -> None:
        model.model(input_ids=data)  # without the loss, whose forward computes gradients

    seconds = measure(both, 2, 3, 2)
    return {"gpu_s": statistics.median(seconds), "fwd_s": statistics.median(measure(forward, 1, 3, 2))}


def memory_available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def trained(shape: str, states: str, cap: float, batch: int, more: list[str], options: Any) -> dict[str, Any]:
    """Training steps with weights on the host and a limit of GPU memory."""
    if CUDA and cap:
        torch.cuda.set_per_process_memory_fraction(cap * 1e9 / torch.cuda.get_device_properties(0).total_memory)
    rates = load_or_measure(torch.device(DEVICE, 0)) if CUDA else None
    before_bytes = memory_available()
    start = time.perf_counter()
    with torch.device("meta"):
        model: Any = bare(shape)
    optimizer = TwinOptimizer(
        model,
        "adamw",
        lr=1e-5,
        states=states,
        ratio=options.ratio if options.ratio == "auto" else float(options.ratio),
        early=True,
        max_grad_norm=ALWAYS if "clipped" in more else NEVER,
        offload_params=True,
    )
    prepared(model, "host" in more)
    build_s = time.perf_counter() - start
    print(f"built in {build_s:.0f} s", file=sys.stderr, flush=True)
    data = data_of(shape, batch)
    losses = []

    def step() -> None:
        loss = model(input_ids=data, labels=data).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    measure(step, 3, 1, 1)
    while not optimizer.is_placed:
        step()
    runtime = optimizer.runtime
    assert runtime.param_offload is not None
    fetcher = runtime.param_offload.fetcher
    num_before = (fetcher.fetched_bytes, int(runtime.executor.counters.bytes_out))
    seconds = measure(step, 0, options.windows, options.steps)
    num_steps = options.windows * options.steps
    num_in, num_out = fetcher.fetched_bytes - num_before[0], int(runtime.executor.counters.bytes_out) - num_before[1]
    host_bytes = before_bytes - memory_available()
    numel = sum(p.numel() for p in model.parameters())
    row = {
        "params": numel / 1e9,
        "build_s": build_s,
        "step_s": statistics.median(seconds),
        "least_s": min(seconds),
        "most_s": max(seconds),
        "in_gb": num_in / num_steps / 1e9,
        "out_gb": num_out / num_steps / 1e9,
        "gpu_gb": torch.cuda.max_memory_reserved() / 1e9 if CUDA else 0.0,
        "host_gb": host_bytes / 1e9,
        "losses": [round(float(loss), 4) for loss in losses],
        "ratio": optimizer.host_share,
        "busy_s": optimizer.metrics()["host_busy_s"] / len(losses),
    }
    if options.trace:
        write_trace(optimizer, step, Path(options.trace))
    optimizer.close()
    gc.collect()
    rate = host_rate(states)
    row["host_s"] = numel / rate
    if rates is not None:
        hidden, layers = SHAPES[shape][:2]
        inputs_gb = layers * hidden * batch * TOKENS * 2 / 1e9 if "host" in more else 0.0
        ways = ((row["in_gb"] + inputs_gb) / rates.in_bytes, (row["out_gb"] + inputs_gb) / rates.out_bytes)
        row["bus_s"] = 1e9 * max(ways)
        row["copying_s"] = numel / rates.host_params_copying[states]
    else:
        row["bus_s"] = 0.0
    return row


def write_trace(optimizer: Any, step: Any, path: Path) -> None:
    """Two steps as spans of the runtime, one JSON line each."""
    synchronize()
    optimizer.trace.start()
    step()
    step()
    synchronize()
    optimizer.wait()
    optimizer.trace.stop()
    spans = optimizer.trace.spans()
    first = min(span.start_s for span in spans)
    with path.open("w") as file:
        for span in spans:
            times = (round(span.start_s - first, 6), round(span.end_s - first, 6))
            file.write(json.dumps([span.track, span.name, *times, dict(span.args)]) + "\n")


def have_same_bits() -> bool:
    """Losses of some steps of a tiny model, weights on the host and on the device."""
    found = []
    for offloads in (False, True):
        torch.manual_seed(0)
        model: Any = prepared(build(lambda: bare("tiny"), DEVICE), keeps_inputs_on_host=False)
        optimizer = TwinOptimizer(
            model, "adamw", lr=1e-3, ratio=1.0, early=True, max_grad_norm=1.0, offload_params=offloads
        )
        data = data_of("tiny", 2)
        losses = []
        for _ in range(6):
            loss = model(input_ids=data, labels=data).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        optimizer.close()
        found.append(losses)
    return found[0] == found[1]


def in_process(*args: str) -> dict[str, Any]:
    """One part in a process of its own, with an allocator that does not lose memory between blocks of other sizes."""
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ}
    command = [sys.executable, __file__, *args]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    found = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if not found:
        return {"error": f"exit code {done.returncode}"}
    row: dict[str, Any] = json.loads(found[0].removeprefix("ROW "))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=["llama3-8b:bf16:24:4"])
    parser.add_argument("--ratio", default="1")
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--trace", help="write the spans of two steps to this file")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--save-to", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        faulthandler.enable()
        kind, text = options.part
        shape, states, cap, batch, *more = text.split(":")
        row = (
            alone(shape, int(batch))
            if kind == "alone"
            else trained(shape, states, float(cap), int(batch), more, options)
        )
        print("ROW " + json.dumps(row), flush=True)
        return
    if not have_same_bits():
        raise SystemExit("A small model has other losses with its weights on the host: no figures.")
    given = ["--windows", str(options.windows), "--steps", str(options.steps), "--ratio", options.ratio]
    given += ["--trace", options.trace] if options.trace else []
    bases: dict[tuple[str, str], dict[str, Any]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name in options.rows:
        shape, _, _, batch, *more = name.split(":")
        if (shape, batch) not in bases:
            bases[shape, batch] = in_process("--part", "alone", name)
        row = bases[shape, batch] | in_process("--part", "trained", name, *given)
        if "error" not in row:
            row["bound_s"] = max(row["gpu_s"], row["host_s"], row["bus_s"])
            if "clipped" in more:
                row["bound_s"] = row["gpu_s"] - row["fwd_s"] + max(row["fwd_s"], row["host_s"])
            row["x_bound"] = row["step_s"] / row["bound_s"]
        rows[name] = row
        print(name, json.dumps(row), file=sys.stderr, flush=True)
    date = datetime.date.today().isoformat()
    gpu = torch.cuda.get_device_name() if CUDA else "no GPU"
    lines = [f"# Weights on the host, {date}", ""]
    lines += [f"{gpu}; {describe(read_machine())}; torch {torch.__version__}", ""]
    lines += [f"| shape:states:GB:sequences | {' | '.join(HEADS)} |", "|---|" + "---:|" * len(HEADS)]
    for name, row in rows.items():
        cells = [f"{row[head]:.4g}" if head in row else "-" for head in HEADS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |" + row.get("error", ""))
    lines += [
        "",
        "gpu_s: forward and backward alone, no limit; host_s: the update alone; copying_s: the update while both",
        "directions copy at full rate, because copies and updates share the bandwidth of the host's memory; busy_s:",
        "the time of updates in a step as measured; bus_s: the larger of the bytes each way over its rate alone;",
        "bound_s: the largest of gpu_s, host_s and bus_s; least_s and most_s: of the windows; ratio: the share of",
        "the state that is on the host.",
        "",
    ]
    text = "\n".join([*lines, "```json", json.dumps({"date": date, "rows": rows}), "```", ""])
    print(text)
    if options.save:
        options.save_to.mkdir(parents=True, exist_ok=True)
        (options.save_to / f"{date}-weights-on-host.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
