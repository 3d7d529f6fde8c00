# SPDX-License-Identifier: Apache-2.0
"""Does training with the delayed update end where training without it ends, and how much faster is a step?

    python benchmarks/delayed_update.py                  # 25 M parameters, 3 seeds, 3,000 steps: needs CUDA
    python benchmarks/delayed_update.py --parts quality --lr 3e-4 1e-4      # with other learning rates
    python benchmarks/delayed_update.py --tiny           # shows on any machine that the script works, nothing more
    python benchmarks/delayed_update.py --plot benchmarks/results/<date>-delayed-update.json

Part 1 trains a GPT on Python source text, in bf16 with all state on the host: without the delay, with the delay after
the warm-up of the learning rate, after a third of the steps, and from the first step. `--ways "plain PyTorch"` is the
delay after the warm-up in a few lines of PyTorch, without this library, to separate the method from its implementation.
A seed sets the initial weights and the batches. Each learning rate has its own runs. All runs are processes that share
the GPU, so their times mean nothing. Part 2 measures steps of a larger GPT with few tokens, alone: forward and
backward, then a step without and with the delay, in alternating windows. Prints tables; `--save` writes them to
`--save-to`, with a JSON file and a picture of the curves. `--budget` is the wall-clock time in seconds after which runs
of part 1 are stopped; these are named in the output.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import multiprocessing
import statistics
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from curves_plot import Curve, Panel, picture
from torch import Tensor

from twinflow.bench.machine import describe, read_machine
from twinflow.data import TokenData, load_data
from twinflow.data.tokens import Split
from twinflow.models.gpt import GPT, GPTConfig
from twinflow.optim.twin import TwinOptimizer

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
WAYS = ("no delay", "delay after warm-up", "delay from the start", "plain PyTorch", "delay after a third")
POINTS = 60  # of a curve
TOLD = 500  # steps between two lines of progress


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


def all_batches(data: TokenData, split: Split, num: int, batch_size: int, context: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of the first batches, each [num, batch_size, context], on the device."""
    pairs = [data.batch(split, step, batch_size, context) for step in range(num)]
    tokens, targets = (torch.stack(some).to(DEVICE) for some in zip(*pairs, strict=True))
    return tokens, targets


class PlainDelay(torch.optim.AdamW):
    """The delay in plain PyTorch. AdamW updates fp32 copies; after `start` steps, the model gets them a step late."""

    def __init__(self, model: GPT, start: int, **options: Any) -> None:
        self.used = list(model.parameters())
        self.newest = [param.detach().to(torch.float32, copy=True) for param in self.used]
        super().__init__(self.newest, foreach=True, **options)
        self.start, self.num_steps = start, 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        before = [param.clone() for param in self.newest]
        for param, newest in zip(self.used, self.newest, strict=True):
            newest.grad = param.grad.float() if param.grad is not None else None
            param.grad = None
        torch.nn.utils.clip_grad_norm_(self.newest, 1.0)
        super().step()
        self.num_steps += 1
        torch._foreach_copy_(self.used, before if self.num_steps > self.start else self.newest)

    @torch.no_grad()
    def flush(self) -> None:
        torch._foreach_copy_(self.used, self.newest)

    def close(self) -> None:
        """Nothing is held."""


def optimizer_of(way: str, model: GPT, lr: float, num_steps: int) -> TwinOptimizer | PlainDelay:
    warm_up = num_steps // 20
    start = {"delay after warm-up": warm_up, "delay after a third": num_steps // 3}.get(way, 0)
    options: dict[str, Any] = {"lr": lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
    if way == "plain PyTorch":
        return PlainDelay(model, warm_up, **options)
    return TwinOptimizer(
        model,
        "adamw",
        ratio=1.0,
        max_grad_norm=1.0,
        early=True,
        host_threads=2,
        delayed_update=way != "no delay",
        delayed_update_start=start,
        **options,
    )


def train(way: str, seed: int, lr: float, scale: Scale, deadline: float) -> dict[str, Any]:
    """The curve of the training loss, and the validation loss at the end. `valid` is missing if time was up before."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = GPT(scale.shape).to(DEVICE, DTYPE)
    row = {"way": way, "seed": seed, "lr": lr}
    return fit(row, model, optimizer_of(way, model, lr, scale.num_steps), scale, deadline)


def fit(
    row: dict[str, Any], model: GPT, optimizer: TwinOptimizer | PlainDelay, scale: Scale, deadline: float
) -> dict[str, Any]:
    """Trains with the seed and the learning rate of `row`. Returns `row` with the curve and the validation loss."""
    start, way, seed, lr = time.time(), row["way"], row["seed"], row["lr"]
    row = {**row, "curve": []}
    data = load_data("stdlib", seed=seed)
    tokens, targets = all_batches(data, "train", scale.num_steps, scale.batch_size, scale.shape.context)
    warm_up = scale.num_steps // 20
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1.0, total_iters=warm_up)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, scale.num_steps - warm_up, eta_min=lr / 10)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, decay], [warm_up])
    every = max(1, scale.num_steps // POINTS)
    since = []
    for step in range(scale.num_steps):
        loss = model(tokens[step], targets[step]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        since.append(loss.detach())
        if len(since) == every:
            row["curve"].append([step + 1, torch.stack(since).float().mean().item()])
            since = []
            if (step + 1) % TOLD < every:
                loss_now, seconds = row["curve"][-1][1], time.time() - start
                print(f"{way}, {lr:g}, seed {seed}, step {step + 1}: {loss_now:.4f}, {seconds:.0f} s", flush=True)
            if time.time() > deadline and step + 1 < scale.num_steps:
                return {**row, "why": f"stopped at step {step + 1:,} after {time.time() - start:.0f} s"}
    optimizer.flush()  # the last delayed update
    row["valid"] = validate(model, data, scale.batch_size)
    optimizer.close()
    return row


@torch.no_grad()
def validate(model: GPT, data: TokenData, batch_size: int) -> float:
    """Mean loss of the same 40 batches for every run."""
    fixed = dataclasses.replace(data, seed=0)
    tokens, targets = all_batches(fixed, "valid", 40, batch_size, model.config.context)
    return float(torch.stack([model(*pair).loss for pair in zip(tokens, targets, strict=True)]).float().mean())


def train_all(scale: Scale, ways: list[str], rates: list[float], budget: float) -> list[dict[str, Any]]:
    """All runs. A run that failed or was stopped has `why` instead of `valid`."""
    begin = time.time()
    seeds = {way: range(1 if way == "plain PyTorch" else scale.num_seeds) for way in ways}
    jobs = [(way, seed, lr) for lr in rates for way in ways for seed in seeds[way]]
    found = []
    with ProcessPoolExecutor(len(jobs) if CUDA else 1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pending = {pool.submit(train, *job, scale, begin + budget - 10.0): job for job in jobs}
        for run in as_completed(pending):
            way, seed, lr = pending[run]
            try:
                row = run.result()
            except Exception as error:
                traceback.print_exc()
                row = {
                    "way": way,
                    "seed": seed,
                    "lr": lr,
                    "curve": [],
                    "why": f"failed with {type(error).__name__}: {error}",
                }
            found.append(row)
            ends = f"{row['valid']:.4f}" if "valid" in row else row["why"]
            print(f"{time.time() - begin:4.0f} s: {way}, {lr:g}, seed {seed}: {ends}", flush=True)
    return sorted(found, key=lambda row: (-row["lr"], row["seed"], WAYS.index(row["way"])))


def plotted(runs: list[dict[str, Any]]) -> str:
    """The curves of all runs, without the steep start, one plot for each learning rate."""
    panels = []
    for lr in sorted({row["lr"] for row in runs}, reverse=True):
        curves, named = [], set()
        for row in (row for row in runs if row["lr"] == lr):
            points = [(step, loss) for step, loss in row["curve"]][len(row["curve"]) // 6 :]
            label = "" if row["way"] in named else row["way"]
            named.add(row["way"])
            curves.append(Curve(label, points, WAYS.index(row["way"]), is_faint=True))
        panels.append(Panel(f"Training loss of a GPT, nats a byte, learning rate {lr:g}, all seeds", curves))
    return picture(panels)


def measure_steps(scale: Scale) -> list[dict[str, Any]]:
    """Seconds a step of each window."""
    rows = []
    for tokens in scale.tokens:
        torch.manual_seed(0)
        models = {name: GPT(scale.large).to(DEVICE, DTYPE) for name in ("alone", *WAYS[:2])}
        batch = torch.randint(0, scale.large.vocab_size, (1, tokens + 1), device=DEVICE)
        optimizers = {
            name: TwinOptimizer(models[name], "adamw", lr=1e-6, ratio=1.0, early=True, delayed_update=name != WAYS[0])
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
            "| learning rate | way | " + " | ".join(f"seed {seed}" for seed in range(scale.num_seeds)) + " | mean | |",
            "|---:|---|" + "---:|" * (scale.num_seeds + 2),
        ]
        found: dict[tuple[float, str], dict[int, float]] = {}
        for run in (run for run in runs if "valid" in run):
            found.setdefault((run["lr"], run["way"]), {})[run["seed"]] = run["valid"]
        for (lr, way), losses in sorted(found.items(), key=lambda item: (-item[0][0], WAYS.index(item[0][1]))):
            cells = [f"{losses[seed]:.4f}" if seed in losses else "" for seed in range(scale.num_seeds)]
            plain = found.get((lr, WAYS[0]), {})
            both = sorted(set(losses) & set(plain))  # seeds that both ways have
            beside = ""
            if both and way != WAYS[0]:
                ratio = statistics.mean(losses[seed] for seed in both) / statistics.mean(plain[seed] for seed in both)
                beside = f"{ratio - 1.0:+.2%}"
            cells += [f"{statistics.mean(losses.values()):.4f}", beside]
            lines.append(f"| {lr:g} | {way} | {' | '.join(cells)} |")
        lines += ["", "The last column compares with no delay at the same learning rate, over the seeds of both."]
        missing = [
            f"- Left out: {run['way']}, {run['lr']:g}, seed {run['seed']}: {run['why']}"
            for run in runs
            if "why" in run and run["seed"] not in found.get((run["lr"], run["way"]), {})  # `--add` may have it
        ]
        lines += ["", *missing, *([""] if missing else [])]
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
    brief = [{key: value for key, value in run.items() if key != "curve"} for run in runs]
    return "\n".join([*lines, "```json", json.dumps({"runs": brief, "steps": rows}), "```"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--parts", nargs="+", choices=["quality", "speed"], default=["quality", "speed"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[way for way in WAYS if way != "plain PyTorch"])
    parser.add_argument("--lr", nargs="+", type=float, default=[1e-3])
    parser.add_argument("--add", type=Path, metavar="FILE.json", help="saved runs that are shown beside the new ones")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds after which runs of part 1 are stopped")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--save-to", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    parser.add_argument("--plot", type=Path, metavar="FILE.json", help="only draw the picture of a saved result")
    options = parser.parse_args()
    if options.plot:
        runs = json.loads(options.plot.read_text(encoding="utf-8"))["runs"]
        options.plot.with_suffix(".svg").write_text(plotted(runs), encoding="utf-8")
        return
    scale = TINY if options.tiny else FULL
    runs = train_all(scale, options.ways, options.lr, options.budget) if "quality" in options.parts else []
    if options.add:
        runs += json.loads(options.add.read_text(encoding="utf-8"))["runs"]
    path = options.save_to / f"{datetime.date.today()}-delayed-update.md"
    if options.save:
        options.save_to.mkdir(parents=True, exist_ok=True)
        if runs:  # first the numbers: an error in part 2 or in the page must not lose them
            path.with_suffix(".json").write_text(json.dumps({"runs": runs}) + "\n", encoding="utf-8")
            path.with_suffix(".svg").write_text(plotted(runs), encoding="utf-8")
    rows = measure_steps(scale) if "speed" in options.parts else []
    text = page(runs, rows, scale)
    print(text)
    if options.save:
        path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
