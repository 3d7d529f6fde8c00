# SPDX-License-Identifier: Apache-2.0
"""Published shapes with their weights on the host, in a limited part of the GPU's memory, beside what bounds a step.

A step cannot be shorter than forward and backward alone (measured without a limit of memory), than the host's update
alone, or than the copies over the bus: weights to the GPU twice, gradients to the host, and the inputs of the blocks
both ways if they are kept on the host. If every step is clipped, no update can begin before the backward has ended,
and the bound is t_bwd + max(t_fwd, update). Updates and copies share the bandwidth of the host's memory, so a step
cannot be shorter either than the bytes of both over the rate of the update alone. Each part runs in a process of its
own. Random weights, bf16, activation
checkpointing for each block, the loss in chunks, AdamW. Before that a small model trains with its weights on the host
and on the device and must have the same losses, bit for bit.

python benchmarks/weights_on_host.py --rows llama3-8b:bf16:24:4 llama3-8b:bf16:16:16 --save

A row is SHAPE:STATES:GB:SEQUENCES, with shapes of real_models.py and sequences of 2,048 tokens. A ":clipped" at its
end clips every step, a ":host" keeps the inputs of blocks on the host, an ":embeddings" puts the weights of the
embedding and output layers on the host too, and an ":auto" lets `ratio="auto"` keep a part of the blocks on the GPU.
Otherwise all state is on the host, or the share `--ratio`. A ":tiled" runs MLPs, norms and loss over tiles of 8,192
tokens, for shapes whose MLP of all tokens does not fit. `--verbose` logs what `ratio="auto"` measures and predicts.
Rows with the same shape, states and ":embeddings" train one model after each other, because building it takes most of
the time. It is built in the memory of the first row. Rows with ":auto" share a model only if they have the same memory
too. `--rows tiny:fp32:0:2` runs on any machine. SHAPE@16 is the shape with 16 layers. STATES may be "4bit-none": 4-bit
states and no master weights.

For 70 B parameters on one GPU see largest_model.py.
"""

from __future__ import annotations

import argparse
import cProfile
import datetime
import faulthandler
import gc
import json
import logging
import os
import pstats
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from real_models import CUDA, DEVICE, NEVER, TOKENS, bare, host_rate, measure, sizes_of, synchronize

from twinflow import native
from twinflow.activations import checkpoint_layers
from twinflow.bench.machine import describe, read_machine
from twinflow.integrations.chunked_loss import chunk_loss
from twinflow.integrations.tiled import tile_sequence
from twinflow.offload.materialize import build
from twinflow.offload.plan import RESIDENT
from twinflow.optim.twin import Tuning, TwinOptimizer
from twinflow.planner.formats import UPDATE_BYTES
from twinflow.planner.probe import load_or_measure

HEADS = [
    "params",
    "gpu_s",
    "fwd_s",
    "host_s",
    "copying_s",
    "busy_s",
    "bus_s",
    "memory_s",
    "bound_s",
    "step_s",
    "least_s",
    "most_s",
    "x_bound",
    "x_memory",
]
HEADS += ["tokens_s", "planned_gpu_gb", "planned_host_gb", "gpu_gb", "used_gb", "host_gb", "in_gb", "out_gb", "ratio"]


def data_of(shape: str, batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, sizes_of(shape)[5], (batch, TOKENS), generator=generator).to(DEVICE)


def prepared(model: Any) -> Any:
    model.train()
    chunk_loss(model)
    return model


def memory_rate() -> float:
    """Bytes a second that all threads read from and write to the host's memory."""
    values = native.huge_zeros(1 << 28, dtype=torch.float32)
    found = []
    for _ in range(5):
        start = time.perf_counter()
        native.scale_in_place(values, 1.5)
        found.append(2 * values.nbytes / (time.perf_counter() - start))
    return max(found)


def alone(shape: str, states: list[str], batches: list[int]) -> dict[str, Any]:
    """Forward and backward with no optimizer, all weights on the device, every gradient dropped. With the rates of the
    host, which are measured before a model fills its memory.
    """
    rates: dict[str, Any] = {name: host_rate(name) for name in states} | {"memory": memory_rate()}
    model: Any = prepared(build(lambda: bare(shape), DEVICE))
    checkpoint_blocks(model, keeps_inputs_on_host=False)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    found: dict[str, Any] = {"rates": rates}
    for batch in batches:
        data = data_of(shape, batch)

        def both(data: torch.Tensor = data) -> None:
            model(input_ids=data, labels=data).loss.backward()

        def forward(data: torch.Tensor = data) -> None:
            model.model(input_ids=data)  # without the loss, whose forward computes gradients

        seconds = statistics.median(measure(both, 1, 3, 2 if batch < 16 else 1))
        found[str(batch)] = {"gpu_s": seconds, "fwd_s": statistics.median(measure(forward, 1, 3, 1))}
    return found


def checkpoint_blocks(model: Any, keeps_inputs_on_host: bool) -> Any:
    return checkpoint_layers(model, [type(model.model.layers[0]).__name__], offload=keeps_inputs_on_host)


def memory_available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def limit_memory(cap: float) -> None:
    if CUDA:
        gc.collect()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap * 1e9 / total) if cap else 1.0)


def trained(shape: str, states: str, cases: list[str], options: Any) -> None:
    """Training steps with weights on the host and a limit of GPU memory. One optimizer trains all cases."""
    limit_memory(float(cases[0].split(":")[0]))
    rates = load_or_measure(torch.device(DEVICE, 0)) if CUDA else None
    before_bytes = memory_available()
    profile = cProfile.Profile()
    start = time.perf_counter()
    states, _, master = states.partition("-")
    with torch.device("meta"):
        model: Any = bare(shape, torch.bfloat16 if master else None)
    profile.enable()
    optimizer = TwinOptimizer(
        model,
        "adamw",
        lr=1e-5,
        states=states,
        ratio="auto" if "auto" in cases[0].split(":") else float(options.ratio),
        master=master or "fp32",
        early=True,
        max_grad_norm=NEVER,
        offload_params=True,
        tuning=Tuning(
            offload_embeddings="embeddings" in cases[0].split(":"),
            **({"bucket_numel": options.bucket_numel} if options.bucket_numel else {}),
        ),
    )
    profile.disable()
    prepared(model)
    build_s = time.perf_counter() - start
    print(f"built in {build_s:.0f} s", file=sys.stderr, flush=True)
    if options.profile:
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(12)
    print(f"{optimizer!r}".partition("Parameter Group")[0], file=sys.stderr, flush=True)
    plans = [bucket.plan for bucket in optimizer.runtime.buckets]
    planned = {
        f"planned_{name}_gb": sum(optimizer.kind.nbytes(p) for p in plans if (p.place == RESIDENT) == is_gpu) / 1e9
        for name, is_gpu in (("gpu", True), ("host", False))
    }
    numel = sum(p.numel() for p in model.parameters())
    for case in cases:
        try:
            row = trained_case(model, optimizer, shape, case, options)
        except torch.OutOfMemoryError as error:
            show({"error": str(error).partition(". ")[0]})
            return  # the optimizer may have half a step
        row |= planned | {"build_s": build_s, "host_gb": (before_bytes - memory_available()) / 1e9}
        _, batch, *more = case.split(":")
        hidden, layers = sizes_of(shape)[:2]
        inputs_gb = layers * hidden * int(batch) * TOKENS * 2 / 1e9 if "host" in more else 0.0
        copied_gb = row["in_gb"] + row["out_gb"] + 2 * inputs_gb
        row |= {"params": numel / 1e9, "host_numel": row["ratio"] * numel, "copied_gb": copied_gb, "bus_s": 0.0}
        if rates is not None:
            ways = ((row["in_gb"] + inputs_gb) / rates.in_bytes, (row["out_gb"] + inputs_gb) / rates.out_bytes)
            row |= {"bus_s": 1e9 * max(ways), "copying_s": row["host_numel"] / rates.host_params_copying[states]}
        show(row)
    if options.trace:
        write_trace(model, optimizer, data_of(shape, int(cases[-1].split(":")[1])), Path(options.trace))
    optimizer.close(keep_weights=False)


def show(row: dict[str, Any]) -> None:
    """Give a row to the process that started this one."""
    print("ROW " + json.dumps(row), flush=True)


def trained_case(model: Any, optimizer: Any, shape: str, case: str, options: Any) -> dict[str, Any]:
    """Steps of one case: GPU memory, the number of sequences, and whether inputs are on the host or steps clipped."""
    cap, batch, *more = case.split(":")
    limit_memory(float(cap))
    tiles = tile_sequence(model) if "tiled" in more else None
    handle = checkpoint_blocks(model, "host" in more)
    data = data_of(shape, int(batch))
    # A gradient whose norm exceeds NEVER is clipped. A power of two changes no digit of it.
    factor = 2.0**40 if "clipped" in more else 1.0
    losses: list[torch.Tensor] = []

    def step() -> None:
        loss = model(input_ids=data, labels=data).loss
        (loss * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    step()
    synchronize()
    first_s = time.perf_counter() - start
    measure(step, 2, 1, 1)
    while not optimizer.is_placed:
        step()
    runtime = optimizer.runtime
    assert runtime.param_offload is not None
    fetcher = runtime.param_offload.fetcher

    def counts() -> tuple[int, int, float]:
        busy_s = optimizer.metrics()["host_busy_s"]
        return fetcher.fetched_bytes, int(runtime.executor.counters.bytes_out), busy_s

    before = counts()
    seconds = measure(step, 0, options.windows, options.steps)
    num_steps = options.windows * options.steps
    num_in, num_out, busy_s = ((end - begin) / num_steps for begin, end in zip(before, counts(), strict=True))
    handle.remove()
    if tiles is not None:
        tiles.remove()
    return {
        "first_s": first_s,
        "step_s": statistics.median(seconds),
        "tokens_s": data.numel() / statistics.median(seconds),
        "least_s": min(seconds),
        "most_s": max(seconds),
        "in_gb": num_in / 1e9,
        "out_gb": num_out / 1e9,
        "busy_s": busy_s,
        "gpu_gb": torch.cuda.max_memory_reserved() / 1e9 if CUDA else 0.0,
        "used_gb": torch.cuda.max_memory_allocated() / 1e9 if CUDA else 0.0,
        "losses": [round(float(loss), 4) for loss in losses],
        "ratio": optimizer.host_share,
        "auto": optimizer.auto_report,
    }


def write_trace(model: Any, optimizer: Any, data: torch.Tensor, path: Path) -> None:
    """Two steps as spans of the runtime, one JSON line each."""
    checkpoint_blocks(model, keeps_inputs_on_host=False)
    synchronize()
    optimizer.trace.start()
    for _ in range(2):
        model(input_ids=data, labels=data).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
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
    """Losses of some steps of a tiny model, weights on the device, on the host, and those of all layers there."""
    found = []
    for offloads, embeddings in ((False, False), (True, False), (True, True)):
        torch.manual_seed(0)
        model: Any = prepared(build(lambda: bare("tiny"), DEVICE))
        checkpoint_blocks(model, keeps_inputs_on_host=False)
        optimizer = TwinOptimizer(
            model,
            "adamw",
            lr=1e-3,
            ratio=1.0,
            early=True,
            max_grad_norm=1.0,
            offload_params=offloads,
            tuning=Tuning(offload_embeddings=embeddings),
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
    return found[0] == found[1] == found[2]


def in_process(*args: str) -> list[dict[str, Any]]:
    """The rows of a part in its own process. Its allocator loses no memory between blocks of other sizes."""
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ}
    command = [sys.executable, __file__, *args]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    lines = done.stdout.splitlines()
    rows = [json.loads(line.removeprefix("ROW ")) for line in lines if line.startswith("ROW ")]
    return [*rows, {"error": f"exit code {done.returncode}"}] if done.returncode else rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=["llama3-8b:bf16:24:4"])
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="print where building the optimizer takes its time")
    parser.add_argument("--ratio", default="1")
    parser.add_argument("--bucket-numel", type=int, help="elements of a bucket, instead of the default")
    parser.add_argument("--verbose", action="store_true", help="log what ratio auto measures and predicts")
    parser.add_argument("--trace", help="write the spans of two steps to this file")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--save-to", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        faulthandler.enable()
        if options.verbose:
            logging.basicConfig(level=logging.WARNING)
            logging.getLogger("twinflow").setLevel(logging.DEBUG)
        kind, text = options.part
        shape, states, *cases = text.split("/")
        if kind == "alone":
            show(alone(shape, states.split(","), [int(case) for case in cases]))
        else:
            trained(shape, states, cases, options)
        return
    if not have_same_bits():
        raise SystemExit("A small model has other losses with its weights on the host: no figures.")
    given = ["--windows", str(options.windows), "--steps", str(options.steps), "--ratio", options.ratio]
    given += ["--profile"] if options.profile else []
    given += ["--verbose"] if options.verbose else []
    given += ["--bucket-numel", str(options.bucket_numel)] if options.bucket_numel else []
    given += ["--trace", options.trace] if options.trace else []
    groups: dict[tuple[str, str, str, bool], list[str]] = {}  # the cases of each optimizer
    batches: dict[str, dict[str, None]] = {}
    formats: dict[str, dict[str, None]] = {}
    for name in options.rows:
        shape, states, case = name.split(":", 2)
        cap, batch, *more = case.split(":")
        kind = (f"auto {cap}" if "auto" in more else "", "embeddings" in more)
        groups.setdefault((shape, states, *kind), []).append(case)
        batches.setdefault(shape, {})[batch] = None
        formats.setdefault(shape, {})[states.partition("-")[0]] = None
    bases: dict[str, Any] = {}
    for shape, found in batches.items():
        bases[shape] = in_process("--part", "alone", "/".join([shape, ",".join(formats[shape]), *found]))[0]
    print(json.dumps(bases), file=sys.stderr, flush=True)
    rows: dict[str, dict[str, Any]] = {}
    for group, cases in groups.items():
        found = in_process("--part", "trained", "/".join([*group[:2], *cases]), *given)
        for case, trained_row in zip(cases, found, strict=False):
            base = bases[group[0]]
            row = base.get(case.split(":")[1], {}) | trained_row
            if "error" not in row and "gpu_s" in row:
                row["host_s"] = row["host_numel"] / base["rates"][group[1].partition("-")[0]]
                update_bytes = row["host_numel"] * UPDATE_BYTES[group[1].partition("-")[0]]
                row["memory_s"] = (update_bytes + 1e9 * row["copied_gb"]) / base["rates"]["memory"]
                row["bound_s"] = max(row["gpu_s"], row["host_s"], row["bus_s"])
                if "clipped" in case.split(":"):
                    row["bound_s"] = row["gpu_s"] - row["fwd_s"] + max(row["fwd_s"], row["host_s"])
                row["x_bound"] = row["step_s"] / row["bound_s"]
                row["x_memory"] = row["step_s"] / max(row["bound_s"], row["memory_s"])
            name = ":".join([*group[:2], case])
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
    lines += ["", *(f"Losses of {name}: {row['losses']}" for name, row in rows.items() if "losses" in row)]
    lines += [
        "",
        "planned_gpu_gb and planned_host_gb: state with its weights, as the optimizer counts it before it allocates;",
        "gpu_gb and used_gb: of the GPU, reserved by torch and in use at the same time;",
        "gpu_s: forward and backward alone, no limit; host_s: the update alone; copying_s: the update while both",
        "directions copy at full rate, because copies and updates share the bandwidth of the host's memory; busy_s:",
        "the time of updates in a step as measured; bus_s: the larger of the bytes each way over its rate alone;",
        "memory_s: the bytes of updates and copies over the bandwidth of the host's memory, as measured; bound_s: the",
        "largest of gpu_s, host_s and bus_s; x_memory: of the larger of bound_s and memory_s; least_s and most_s: of",
        "the windows; ratio: the share of the state that is on the host.",
        "",
    ]
    text = "\n".join([*lines, "```json", json.dumps({"date": date, "rows": rows}), "```", ""])
    print(text)
    if options.save:
        options.save_to.mkdir(parents=True, exist_ok=True)
        (options.save_to / f"{date}-weights-on-host.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
