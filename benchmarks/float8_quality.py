# SPDX-License-Identifier: Apache-2.0
"""Does training in float8 end where training in bf16 ends? A small GPT, both with compiled blocks, with several seeds.

    python benchmarks/float8_quality.py                  # 25 M parameters, 3 seeds, 2,000 steps: needs CUDA
    python benchmarks/float8_quality.py --tiny           # shows on any machine that the script works, nothing more

A GPT is trained on Python source text with TwinOptimizer, all state on the host: with weights in bf16, and the same
with the linear layers of its blocks in float8 (torchao). A seed sets the initial weights and the batches, which are the
same in both ways. All runs are processes that share the GPU, so their times mean nothing. Prints a table: validation
losses, the spread of the seeds, and the difference between the ways. `--save` writes it to `--save-to`, with a JSON
file that has the curves. `--budget` is the time in seconds after which runs are stopped; the output names these.
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

import delayed_update
import torch
from delayed_update import CUDA, DEVICE, DTYPE, Scale

from twinflow.bench.machine import describe, read_machine, version_of
from twinflow.models.gpt import GPT, count_params
from twinflow.optim.twin import TwinOptimizer
from twinflow.speedups import compile_blocks, use_float8

WAYS = ("bf16", "float8")
LR = 1e-3
# As in benchmarks/delayed_update.py, with fewer steps. Sizes in float8 are multiples of 16.
FULL = dataclasses.replace(delayed_update.FULL, num_steps=2000)
TINY = dataclasses.replace(delayed_update.TINY, num_seeds=2)


def train(way: str, seed: int, scale: Scale, recipe: str, deadline: float) -> dict[str, Any]:
    """The curve of the training loss, and the validation loss at the end. `valid` is missing if time was up before."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = GPT(scale.shape).to(DEVICE, DTYPE)
    device = torch.device(DEVICE)
    if way == "float8":
        use_float8(model, device, recipe, emulate=not CUDA)
    compile_blocks(model, device, "inductor" if CUDA else "aot_eager")
    options: dict[str, Any] = {"lr": LR, "betas": (0.9, 0.95), "weight_decay": 0.1, "max_grad_norm": 1.0}
    optimizer = TwinOptimizer(model, "adamw", ratio=1.0, early=True, host_threads=2, **options)
    return delayed_update.fit({"way": way, "seed": seed, "lr": LR}, model, optimizer, scale, deadline)


def train_all(scale: Scale, recipe: str, budget: float) -> list[dict[str, Any]]:
    """All runs. A run that failed or was stopped has `why` instead of `valid`."""
    begin = time.time()
    jobs = [(way, seed) for seed in range(scale.num_seeds) for way in WAYS]
    found = []
    with ProcessPoolExecutor(len(jobs) if CUDA else 1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pending = {pool.submit(train, *job, scale, recipe, begin + budget - 10.0): job for job in jobs}
        for run in as_completed(pending):
            way, seed = pending[run]
            try:
                row = run.result()
            except Exception as error:
                traceback.print_exc()
                row = {"way": way, "seed": seed, "lr": LR, "curve": [], "why": f"failed: {error}"}
            found.append(row)
            ends = f"{row['valid']:.4f}" if "valid" in row else row["why"]
            print(f"{time.time() - begin:4.0f} s: {way}, seed {seed}: {ends}", flush=True)
    return sorted(found, key=lambda row: (WAYS.index(row["way"]), row["seed"]))


def page(runs: list[dict[str, Any]], scale: Scale, recipe: str) -> str:
    gpu = torch.cuda.get_device_name() if CUDA else "no GPU, float8 emulated, blocks traced and not compiled"
    losses = {way: {row["seed"]: row["valid"] for row in runs if row["way"] == way and "valid" in row} for way in WAYS}
    lines = [
        f"# Float8 and bf16, {datetime.date.today()}",
        "",
        f"`python benchmarks/float8_quality.py`: {gpu}; {describe(read_machine())}; torch {torch.__version__}, torchao "
        f"{version_of('torchao')}",
        "",
        f"A GPT of {count_params(scale.shape) / 1e6:.1f} M parameters, blocks compiled, {scale.num_steps:,} steps of "
        f"{scale.batch_size} x {scale.shape.context} bytes of Python source text, learning rate {LR:g}, all state on "
        f"the host. Float8: recipe {recipe}. Validation loss, nats a byte:",
        "",
        "| weights | " + " | ".join(f"seed {seed}" for seed in range(scale.num_seeds)) + " | mean | spread of seeds |",
        "|---|" + "---:|" * (scale.num_seeds + 2),
    ]
    for way, found in losses.items():
        cells = [f"{found[seed]:.4f}" if seed in found else "" for seed in range(scale.num_seeds)]
        values = list(found.values())
        cells += [f"{statistics.mean(values):.4f}", f"{max(values) - min(values):.4f}"] if values else ["", ""]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    bf16, float8 = (losses[way] for way in WAYS)
    if both := sorted(set(bf16) & set(float8)):
        gaps = [float8[seed] - bf16[seed] for seed in both]
        spread = max(bf16.values()) - min(bf16.values())
        mean = statistics.mean(gaps)
        verdict = "is within" if abs(mean) <= spread else "exceeds"
        each = ", ".join(f"{gap:+.4f}" for gap in gaps)
        lines += ["", f"Float8 minus bf16, seed by seed: {each}; mean {mean:+.4f} ({mean / min(bf16.values()):+.2%}). "]
        lines[-1] += f"The mean difference {verdict} the spread of the seeds in bf16, {spread:.4f}."
    missing = [f"- Left out: {row['way']}, seed {row['seed']}: {row['why']}" for row in runs if "why" in row]
    brief = [{key: value for key, value in row.items() if key != "curve"} for row in runs]
    return "\n".join([*lines, "", *missing, *([""] if missing else []), "```json", json.dumps({"runs": brief}), "```"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--recipe", default="tensorwise", help="recipe of torchao")
    parser.add_argument("--budget", type=float, default=230.0, help="seconds after which runs are stopped")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--save-to", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    options = parser.parse_args()
    scale = TINY if options.tiny else FULL
    runs = train_all(scale, options.recipe, options.budget)
    text = page(runs, scale, options.recipe)
    print(text)
    if options.save:
        options.save_to.mkdir(parents=True, exist_ok=True)
        path = options.save_to / f"{datetime.date.today()}-float8-quality.md"
        path.with_suffix(".json").write_text(json.dumps({"runs": runs}) + "\n", encoding="utf-8")
        path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
