# SPDX-License-Identifier: Apache-2.0
"""Does a small GPT reach AdamW's loss in fewer steps with Muon? Both with several learning rates, on any machine.

    python benchmarks/muon_quality.py                    # 0.9 M parameters, 400 steps: about ten minutes on two cores
    python benchmarks/muon_quality.py --tiny             # shows that the script works, nothing more
    python benchmarks/muon_quality.py --plot benchmarks/results/<date>-muon-quality.json
    python benchmarks/muon_quality.py --reuse benchmarks/results/<date>-muon-quality.json   # makes only other runs

A GPT is trained on Python source text with TwinOptimizer, all state on the host. Weights and batches are the same in
all runs, and so are schedule and weight decay. First AdamW is trained with several learning rates. Then Muon is
trained with several learning rates of the matrices, and with the best one of AdamW for all other parameters. Prints
the validation losses, and the step at which Muon's training loss has fallen to that of the best run of AdamW at its
end. `--save` writes the table to `--save-to`, with a JSON file and a picture of the curves.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import time
from pathlib import Path
from typing import Any

import delayed_update
import torch
from curves_plot import Curve, Panel, picture
from delayed_update import DEVICE, DTYPE, Scale

from twinflow.bench.machine import describe, read_machine
from twinflow.models.gpt import GPT, GPTConfig, count_params
from twinflow.optim.twin import TwinOptimizer

WAYS = ("adamw", "muon")
RATES = {"adamw": (3e-4, 1e-3, 3e-3), "muon": (1e-3, 3e-3, 1e-2)}
OPTIONS: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1, "max_grad_norm": 1.0, "ratio": 1.0}
FULL = dataclasses.replace(
    delayed_update.FULL,
    shape=GPTConfig(256, 128, num_layers=4, hidden=128, num_heads=4),
    batch_size=8,
    num_steps=400,
)
TINY = delayed_update.TINY


def train(way: str, lr: float, adam_lr: float, scale: Scale) -> dict[str, Any]:
    """The curve of the training loss, and the validation loss at the end."""
    torch.manual_seed(0)
    model = GPT(scale.shape).to(DEVICE, DTYPE)
    own = {"adjust_lr_fn": "match_rms_adamw", "adam_lr": adam_lr} if way == "muon" else {}
    optimizer = TwinOptimizer(model, way, lr=lr, **OPTIONS, **own)
    row = {"way": way, "seed": 0, "lr": lr, "adam_lr": adam_lr}
    return delayed_update.fit(row, model, optimizer, scale, deadline=float("inf"))


def best_of(runs: list[dict[str, Any]], way: str) -> dict[str, Any]:
    return min((run for run in runs if run["way"] == way), key=lambda run: run["valid"])


def step_reached(run: dict[str, Any], loss: float) -> int | None:
    """The first step of the curve at which the mean training loss since the last point is at most `loss`."""
    return next((step for step, value in run["curve"] if value <= loss), None)


def plotted(runs: list[dict[str, Any]]) -> str:
    curves = []
    for color, way in enumerate(WAYS):
        best = best_of(runs, way)
        curves.append(Curve(f"{way}, lr {best['lr']:g} (best)", best["curve"], color))
        others = [run for run in runs if run["way"] == way and run is not best]
        curves += [Curve(f"{way}, lr {run['lr']:g}", run["curve"], color, is_faint=True) for run in others]
    return picture([Panel("Training loss, nats a byte", curves)])


def page(runs: list[dict[str, Any]], scale: Scale) -> str:
    lines = [
        f"# Muon and AdamW, {datetime.date.today()}",
        "",
        f"`python benchmarks/muon_quality.py`: {describe(read_machine())}; torch {torch.__version__}",
        "",
        f"A GPT of {count_params(scale.shape) / 1e6:.1f} M parameters, {scale.num_steps:,} steps of "
        f"{scale.batch_size} x {scale.shape.context} bytes of Python source text. Nats a byte:",
        "",
        "| rule | lr | training loss at the end | validation loss |",
        "|---|---:|---:|---:|",
    ]
    lines += [f"| {run['way']} | {run['lr']:g} | {run['curve'][-1][1]:.4f} | {run['valid']:.4f} |" for run in runs]
    adamw, muon = (best_of(runs, way) for way in WAYS)
    end = adamw["curve"][-1][1]
    at = step_reached(muon, end)
    text = f"The best run of AdamW ends with a training loss of {end:.4f}. "
    text += f"The best run of Muon reaches it at step {at} of {scale.num_steps}." if at else "Muon does not reach it."
    return "\n".join([*lines, "", text])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--reuse", type=Path, metavar="JSON", help="a saved file, whose runs are not repeated")
    parser.add_argument("--plot", type=Path, metavar="JSON", help="draw the picture of a saved file, and train nothing")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--save-to", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    options = parser.parse_args()
    if options.plot:
        options.plot.with_suffix(".svg").write_text(plotted(json.loads(options.plot.read_text())["runs"]))
        return
    scale, begin = TINY if options.tiny else FULL, time.time()
    known: list[dict[str, Any]] = json.loads(options.reuse.read_text())["runs"] if options.reuse else []
    runs: list[dict[str, Any]] = []
    for way in WAYS:
        for lr in RATES[way]:
            adam_lr = lr if way == "adamw" else best_of(runs, "adamw")["lr"]
            same = (run for run in known if (run["way"], run["lr"], run["adam_lr"]) == (way, lr, adam_lr))
            runs.append(next(same, None) or train(way, lr, adam_lr, scale))
            print(f"{time.time() - begin:4.0f} s: {way}, {lr:g}: {runs[-1]['valid']:.4f}", flush=True)
    text = page(runs, scale)
    print(text)
    if options.save:
        options.save_to.mkdir(parents=True, exist_ok=True)
        path = options.save_to / f"{datetime.date.today()}-muon-quality.md"
        path.with_suffix(".json").write_text(json.dumps({"runs": runs}) + "\n", encoding="utf-8")
        path.with_suffix(".svg").write_text(plotted(runs), encoding="utf-8")
        path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
