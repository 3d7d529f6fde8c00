"""Does training with the delayed update end where training without it ends, and how much faster is a step?

    python benchmarks/delayed_update.py                  # 25 M parameters, 3 seeds, 3,000 steps: needs CUDA
    python benchmarks/delayed_update.py --tiny           # shows on any machine that the script works, nothing more

Part 1 trains a GPT on Python source text, in bf16 with all state on the host: without the delay, with the delay after
the warm-up of the learning rate, and with the delay from the first step. A seed sets the initial weights and the
batches. All runs are processes that share the GPU, so their times mean nothing. Part 2 measures steps of a larger GPT
with few tokens, alone: forward and backward, then a step without and with the delay, in alternating windows. Prints
tables and one JSON line; `--save` writes them with the curves to benchmarks/results.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from twinflow.bench.machine import describe, read_machine
from twinflow.data import TokenData, load_data
from twinflow.models.gpt import GPT, GPTConfig
from twinflow.optim.twin import TwinOptimizer

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
WAYS = ("no delay", "delay after warm-up", "delay from the start")
POINTS = 60  # of a curve


@dataclasses.dataclass(frozen=True)
class Scale:
    """Sizes of both parts."""

    shape: GPTConfig
    batch_size: int
    num_steps: int
    num_seeds: int
    large: GPTConfig
    tokens: tuple[int, ...]  # of a step of part 2
    window: int  # steps


FULL = Scale(
    GPTConfig(256, 256, num_layers=8, hidden=512, num_heads=8), 16, 3000, 3,
    GPTConfig(32000, 1024, num_layers=24, hidden=2048, num_heads=16), (256, 1024), 8,
)  # fmt: skip
TINY = Scale(
    GPTConfig(256, 32, num_layers=2, hidden=32, num_heads=2), 2, 12, 1,
    GPTConfig(256, 32, num_layers=2, hidden=32, num_heads=2), (16,), 2,
)  # fmt: skip


def train(way: str, seed: int, scale: Scale) -> dict[str, Any]:
    """The curve of the training loss, and the validation loss at the end."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    data = load_data("stdlib", seed=seed)
    model = GPT(scale.shape).to(DEVICE, DTYPE)
    warm_up = scale.num_steps // 20
    optimizer = TwinOptimizer(
        model,
        "adamw",
        lr=1e-3,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        max_grad_norm=1.0,
        early=True,
        host_threads=2,
        delayed_update=way != "no delay",
        delayed_update_start=warm_up if way == "delay after warm-up" else 0,
    )
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1.0, total_iters=warm_up)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, scale.num_steps - warm_up, eta_min=1e-4)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, decay], [warm_up])
    every = max(1, scale.num_steps // POINTS)
    curve, since = [], []
    for step in range(scale.num_steps):
        tokens, targets = data.batch("train", step, scale.batch_size, scale.shape.context)
        loss = model(tokens.to(DEVICE), targets.to(DEVICE)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        since.append(loss.detach())
        if len(since) == every:
            curve.append([step + 1, torch.stack(since).float().mean().item()])
            since = []
    optimizer.flush()  # the last delayed update
    valid = validate(model, data, scale.batch_size)
    optimizer.close()
    return {"way": way, "seed": seed, "curve": curve, "valid": valid}


@torch.no_grad()
def validate(model: GPT, data: TokenData, batch_size: int) -> float:
    """Mean loss of the same 40 batches for every run."""
    fixed = dataclasses.replace(data, seed=0)
    losses = []
    for step in range(40):
        tokens, targets = fixed.batch("valid", step, batch_size, model.config.context)
        losses.append(model(tokens.to(DEVICE), targets.to(DEVICE)).loss.item())
    return statistics.mean(losses)


def train_all(scale: Scale, ways: list[str]) -> list[dict[str, Any]]:
    jobs = [(way, seed) for seed in range(scale.num_seeds) for way in ways]
    found = []
    with ProcessPoolExecutor(len(jobs) if CUDA else 1, mp_context=multiprocessing.get_context("spawn")) as pool:
        for run in [pool.submit(train, way, seed, scale) for way, seed in jobs]:
            found.append(run.result())
            print(f"{found[-1]['way']}, seed {found[-1]['seed']}: {found[-1]['valid']:.4f}", flush=True)
    return found


def measure_steps(scale: Scale) -> list[dict[str, Any]]:
    """Seconds a step of each window."""
    rows = []
    for tokens in scale.tokens:
        torch.manual_seed(0)
        models = {name: GPT(scale.large).to(DEVICE, DTYPE) for name in ("alone", *WAYS[:2])}
        batch = torch.randint(0, scale.large.vocab_size, (1, tokens + 1), device=DEVICE)
        optimizers = {
            name: TwinOptimizer(models[name], "adamw", lr=1e-6, early=True, delayed_update=name != WAYS[0])
            for name in WAYS[:2]
        }
        found: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(4):
            for name, model in models.items():
                for step in range(scale.window + 2):
                    if step == 2:
                        _synchronize()
                        start = time.perf_counter()
                    model(batch[:, :-1], batch[:, 1:]).loss.backward()
                    if name in optimizers:
                        optimizers[name].step()
                        optimizers[name].zero_grad()
                    else:
                        model.zero_grad(set_to_none=True)
                _synchronize()
                found[name].append((time.perf_counter() - start) / scale.window)
        for optimizer in optimizers.values():
            optimizer.close()
        rows.append({"tokens": tokens, "numel": sum(p.numel() for p in models["alone"].parameters()), "s": found})
    return rows


def _synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def page(runs: list[dict[str, Any]], rows: list[dict[str, Any]], scale: Scale) -> str:
    gpu = torch.cuda.get_device_name() if CUDA else "no GPU"
    lines = [
        f"# Delayed update, {datetime.date.today()}",
        "",
        f"`python benchmarks/delayed_update.py`: {gpu}; {describe(read_machine())}; torch {torch.__version__}",
        "",
    ]
    if runs:
        numel = sum(p.numel() for p in GPT(scale.shape).parameters())
        lines += [
            f"A GPT of {numel / 1e6:.1f} M parameters, {scale.num_steps:,} steps of {scale.batch_size} x "
            f"{scale.shape.context} bytes of Python source text, all state on the host. Validation loss, nats a byte:",
            "",
            "| way | " + " | ".join(f"seed {seed}" for seed in range(scale.num_seeds)) + " | mean | beside no delay |",
            "|---|" + "---:|" * (scale.num_seeds + 2),
        ]
        means: dict[str, float] = {}
        for way in dict.fromkeys(run["way"] for run in runs):
            losses = [run["valid"] for run in runs if run["way"] == way]
            means[way] = statistics.mean(losses)
            cells = " | ".join(f"{loss:.4f}" for loss in losses)
            lines.append(f"| {way} | {cells} | {means[way]:.4f} | {means[way] / means[WAYS[0]] - 1.0:+.2%} |")
        lines.append("")
    if rows:
        lines += [
            "Step time with few tokens, all state on the host, median of four windows (lowest to highest):",
            "",
            "| parameters | tokens | forward + backward alone | no delay | delay |",
            "|---|---:|---:|---:|---:|",
        ]
        for row in rows:
            cells = " | ".join(f"{statistics.median(s):.4f} ({min(s):.4f} to {max(s):.4f})" for s in row["s"].values())
            lines.append(f"| {row['numel'] / 1e9:.2f} B | {row['tokens']} | {cells} |")
        lines.append("")
    return "\n".join([*lines, "```json", json.dumps({"runs": runs, "steps": rows}), "```"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--parts", nargs="+", choices=["quality", "speed"], default=["quality", "speed"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    scale = TINY if options.tiny else FULL
    rows = measure_steps(scale) if "speed" in options.parts else []
    runs = train_all(scale, options.ways) if "quality" in options.parts else []
    text = page(runs, rows, scale)
    print(text)
    if options.save:
        path = Path(__file__).parent / "results" / f"{datetime.date.today()}-delayed-update.md"
        path.write_text(text + "\n")


if __name__ == "__main__":
    main()
