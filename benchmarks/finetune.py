# SPDX-License-Identifier: Apache-2.0
"""`twinflow finetune` on a published shape, from a safetensors folder to trained steps, in limited memory.

    python benchmarks/finetune.py --save                          # needs CUDA, 20 GB of disk and 80 GB of memory
    python benchmarks/finetune.py --shape tiny --rows sft:0 lora:0    # shows on any machine that it works

The folder has random weights in bf16 (with a tokenizer of examples/tiny_models.py), the data are chats that are longer
than `--seq-length`. A row is METHOD:GB of GPU memory. `--ram` is the host memory that the runs may use. Each row runs
the command in a process of its own. The table has, beside what the command planned:

- load: seconds from the start of the process until the first step begins, with planning and reading the model
- host: the largest memory of the machine that the process took, page-locked memory included, files in the cache not
- GPU: the largest memory that torch had allocated in a step
- s/step, tokens/s: medians of the steps after the first two

A run with all parameters is ended after its steps, because its checkpoint would need more disk than there is. The other
methods run to their end.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from real_models import CUDA, SHAPES, bare
from weights_on_host import memory_available

from twinflow.bench.machine import describe, read_machine
from twinflow.offload.materialize import build

ROOT = Path(__file__).parents[1]
WARM_UP = 2
HEADS = ("load_s", "step_s", "least_s", "most_s", "tokens_s", "gpu_gb", "host_gb")
PLANNED = re.compile(r"planned\s+(?:GPU ([\d.]+) GB, )?host ([\d.]+) GB(?:, ([\d.]+) s a step)?")


def make_folder(folder: Path, shape: str, seq_length: int) -> Path:
    """A model folder, and a file of chats beside it."""
    spec = importlib.util.spec_from_file_location("tiny_models", ROOT / "examples" / "tiny_models.py")
    assert spec is not None
    assert spec.loader is not None
    tiny = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    model: Any = build(lambda: bare(shape), "cuda" if CUDA else "cpu")
    model.save_pretrained(folder / "model")
    tiny.make_tokenizer("llama").save_pretrained(folder / "model")
    data = folder / "chats.jsonl"
    with data.open("w") as file:
        for row in range(200):
            text = " ".join(str((row + i) % 90 + 10) for i in range(seq_length))  # at least a token for each number
            turns = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": text}]
            file.write(json.dumps({"messages": turns}) + "\n")
    return data


def run_row(name: str, folder: Path, data: Path, options: argparse.Namespace) -> dict[str, Any]:
    method, gpu = name.split(":")
    out = folder / f"{method}-{gpu}"
    command = [sys.executable, "-m", "twinflow", "finetune", str(folder / "model"), str(data), "--method", method]
    command += ["--steps", str(options.steps), "--seq-length", str(options.seq_length), "--ram", options.ram]
    command += ["--samples", "1", "--valid-every", "0", "--out", str(out)]
    command += ["--gpu-memory", f"{gpu}GB"] if CUDA else []
    before, start, least = memory_available(), time.perf_counter(), float("inf")
    log = (folder / f"{method}-{gpu}.log").open("w+")
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True)
    metrics, num_steps, first_s = out / "metrics.jsonl", 0, 0.0
    while process.poll() is None:
        time.sleep(0.05)
        least = min(least, memory_available())
        if metrics.exists():
            found = [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]
            num_steps = sum("lr" in record for record in found)
            if num_steps and not first_s:
                first_s = time.perf_counter() - start
        is_over = method in ("sft", "dpo") and num_steps >= options.steps
        if is_over or time.perf_counter() - start > options.limit:
            process.kill()
    process.wait()
    log.seek(0)
    text = log.read()
    print(text[-6000:], file=sys.stderr, flush=True)
    if num_steps <= WARM_UP:
        return {"error": text.strip().splitlines()[-1] if text.strip() else f"exit code {process.returncode}"}
    records = [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]
    steps = [record for record in records if "lr" in record]
    seconds = [r["forward_s"] + r["backward_s"] + r["update_s"] for r in steps]
    tokens = [r["num_tokens"] for r in steps]
    planned = PLANNED.search(text)
    return {
        "load_s": first_s - seconds[0],
        "step_s": statistics.median(seconds[WARM_UP:]),
        "least_s": min(seconds[WARM_UP:]),
        "most_s": max(seconds[WARM_UP:]),
        "tokens_s": statistics.median(n / s for n, s in zip(tokens[WARM_UP:], seconds[WARM_UP:], strict=True)),
        "gpu_gb": max(r["gpu_bytes"] for r in steps) / 1e9,
        "host_gb": (before - least) / 1e9,
        "planned": [float(value) if value else 0.0 for value in planned.groups()] if planned else [],
        "choice": {
            key: line.split(key, 1)[1].strip()
            for key in ("batch", "state")
            for line in text.splitlines()
            if line.startswith(f"  {key} ")
        },
        "losses": [round(r["loss"], 4) for r in steps],
        "all_s": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama3-8b", choices=SHAPES)
    parser.add_argument("--rows", nargs="+", default=["sft:24", "sft:16", "lora:12", "qlora:12"])
    parser.add_argument("--ram", default="64GB")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seq-length", type=int, default=2048 if CUDA else 32)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which a row is ended")
    parser.add_argument("--folder", type=Path, help="where the model folder is made; default: a temporary folder")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--save-to", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    options = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        data = make_folder(folder, options.shape, options.seq_length)
        if CUDA:
            torch.cuda.empty_cache()
        print(f"folder written in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        for name in options.rows:
            rows[name] = run_row(name, folder, data, options)
            print(name, json.dumps(rows[name]), file=sys.stderr, flush=True)
    date = datetime.date.today().isoformat()
    gpu = torch.cuda.get_device_name() if CUDA else "no GPU"
    lines = [f"# Fine-tuning in limited memory, {options.shape}, {date}", ""]
    lines += [f"{gpu}; {describe(read_machine())}; torch {torch.__version__}", ""]
    lines += [f"`--ram {options.ram}`, sequences of {options.seq_length} tokens, 16 in a step.", ""]
    lines += ["| method, GPU | " + " | ".join(HEADS) + " | planned GPU, host, s | choice |"]
    lines += ["|---|" + "---:|" * len(HEADS) + "---|---|"]
    for name, row in rows.items():
        if "error" in row:
            lines.append(f"| {name.replace(':', ', ')} GB |" + " |" * len(HEADS) + f" | {row['error']} |")
            continue
        used = (row["gpu_gb"], row["host_gb"], row["step_s"])
        pairs = zip(row["planned"], used, strict=True)
        plans = [f"{plan:.4g} ({plan / real - 1:+.1%})" for plan, real in pairs if plan and real]
        cells = [f"{row[head]:.4g}" for head in HEADS]
        chosen = "; ".join(row["choice"].values())
        lines.append(f"| {name.replace(':', ', ')} GB | " + " | ".join([*cells, ", ".join(plans), chosen]) + " |")
    text = "\n".join([*lines, "", "```json", json.dumps({"date": date, "rows": rows}), "```", ""])
    print(text)
    if options.save:
        options.save_to.mkdir(parents=True, exist_ok=True)
        (options.save_to / f"{date}-finetune-{options.shape}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
