# SPDX-License-Identifier: Apache-2.0
"""What compressed communication costs in quality: the small GPT on four ranks, with Adam and with 1-bit optimizers.

Ranks are processes of this machine over gloo, each with batches of its own. Parts (`--only`): `adam`, for some seeds:
AdamW on the mean gradient and 1-bit Adam that switches by itself, and for the first seed 0/1 Adam and 1-bit Adam
without error feedback; `lamb`: LAMB and 1-bit LAMB; `tune`: a trained model goes on with other text in micro-batches of
3, with AdamW and 1-bit Adam. All start from the same weights and see the same batches. Bytes are those that the
collectives count, beside those of an all-reduce in bf16. After each run all ranks must have the same weights: no figure
otherwise. Prints the machine, a table and one JSON line; `--save` writes a dated file in benchmarks/results. Needs no
GPU; 3,000 steps take some minutes on two cores. `--tiny` shows that the script works, nothing more.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from twinflow.bench.machine import read_machine
from twinflow.data.tokens import load_data
from twinflow.models.gpt import GPT, GPTConfig, count_params
from twinflow.optim.onebit import OneBitAdam, OneBitLamb, ZeroOneAdam

WORLD = 4
PARTS = ("adam", "lamb", "tune")
LIMIT = 0.01  # of the plain optimizer's loss
FEWER = 4.0  # bytes
BETAS = (0.9, 0.99)


@dataclasses.dataclass(frozen=True)
class Scale:
    """How large everything is."""

    shape: GPTConfig
    micro_batch: int
    steps: int
    tune_steps: int
    num_valid: int  # batches of 32
    max_bytes: int


FULL = Scale(GPTConfig(256, 48, num_layers=2, hidden=48, num_heads=2), 4, 3000, 1000, 16, 6_000_000)
TINY = Scale(GPTConfig(256, 16, num_layers=1, hidden=32, num_heads=2), 2, 40, 20, 1, 200_000)


class MeanAdamW(torch.optim.AdamW):
    """torch's AdamW on the mean gradient of all ranks."""

    sent_bytes = 0
    frozen_step = None

    def step(self, closure: Any = None) -> None:
        """Sum, divide, step."""
        params = [param for group in self.param_groups for param in group["params"]]
        flat = torch.cat([param.grad.reshape(-1) for param in params])
        dist.all_reduce(flat)
        flat /= WORLD
        for param, grad in zip(params, flat.split([p.numel() for p in params]), strict=True):
            param.grad.copy_(grad.view(param.shape))
        super().step()


def optimizers(steps: int) -> dict[str, Callable[[Iterable[nn.Parameter]], Any]]:
    """By name. Plain steps of ours travel in bf16."""
    wire: dict[str, Any] = {"betas": BETAS, "wire_dtype": torch.bfloat16}
    never = 10**9
    zero_one = {"var_freeze_step": steps // 5, "local_step_scaler": steps // 10, "local_step_clipper": 4}
    return {
        "AdamW": lambda params: MeanAdamW(params, betas=BETAS, weight_decay=0.0),
        "1-bit Adam": lambda params: OneBitAdam(params, **wire),
        "1-bit Adam, no feedback": lambda params: OneBitAdam(params, has_feedback=False, **wire),
        "0/1 Adam": lambda params: ZeroOneAdam(params, **zero_one, **wire),
        "LAMB": lambda params: OneBitLamb(params, freeze_step=never, **wire),
        "1-bit LAMB": lambda params: OneBitLamb(params, **wire),
    }


def texts(scale: Scale) -> tuple[Tensor, Tensor]:
    """Bytes to train on, and others to go on with: the start and the end of the standard library's source."""
    tokens = torch.as_tensor(load_data("stdlib").tokens[: scale.max_bytes].astype("int64"))
    cut = len(tokens) * 2 // 3
    return tokens[:cut], tokens[cut:]


class Batches:
    """Random windows of a text; its last part is for validation."""

    def __init__(self, text: Tensor, scale: Scale, seed: int) -> None:
        self._text, self._scale, self._cut = text, scale, len(text) * 95 // 100
        self._generator = torch.Generator().manual_seed(seed)

    def _draw(self, number: int, generator: torch.Generator, low: int, high: int) -> tuple[Tensor, Tensor]:
        length = self._scale.shape.context
        starts = torch.randint(low, high - length - 1, (number,), generator=generator)
        rows = torch.stack([self._text[start : start + length + 1] for start in starts.tolist()])
        return rows[:, :-1], rows[:, 1:]

    def train(self, number: int) -> tuple[Tensor, Tensor]:
        """The next ones."""
        return self._draw(number, self._generator, 0, self._cut)

    @torch.no_grad()
    def valid_loss(self, model: GPT) -> float:
        """On batches that are always the same."""
        generator = torch.Generator().manual_seed(7)
        model.eval()
        losses = [
            self._loss(model, *self._draw(32, generator, self._cut, len(self._text)))
            for _ in range(self._scale.num_valid)
        ]
        model.train()
        return sum(losses) / len(losses)

    def _loss(self, model: GPT, tokens: Tensor, targets: Tensor) -> float:
        loss = model(tokens, targets).loss
        assert loss is not None
        return float(loss)


def rate(step: int, steps: int, peak: float) -> float:
    """A warm-up of a twentieth, then a cosine down to a tenth."""
    warm = max(1, steps // 20)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * (0.1 + 0.45 * (1.0 + math.cos(math.pi * (step - warm) / max(1, steps - warm))))


def train(model: GPT, batches: Batches, optimizer: Any, steps: int, peak: float, micro: int) -> None:
    """All steps of a rank."""
    name = type(optimizer).__name__
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps, peak)
        loss = model(*batches.train(micro)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step + 1) % max(1, steps // 6) == 0:
            print(f"  {name}: {step + 1} of {steps}: {float(loss.detach()):.3f}", file=sys.stderr, flush=True)


def run(rank: int, folder: str, order: dict[str, Any]) -> None:
    """One rank of one run; the first writes what came out."""
    torch.set_num_threads(1)
    os.environ["TWINFLOW_THREADS"] = "1"
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    scale = TINY if order["is_tiny"] else FULL
    torch.manual_seed(order["seed"])
    model, (text, other) = GPT(scale.shape), texts(scale)
    steps, micro, peak = scale.steps, scale.micro_batch, order["lr"]
    if order["start"]:
        model.load_state_dict(torch.load(order["start"], weights_only=True))
        text, steps, micro = other, scale.tune_steps, 3
    batches = Batches(text, scale, 1000 * order["seed"] + rank)
    optimizer = optimizers(steps)[order["name"]](model.parameters())
    begin = time.perf_counter()
    before = batches.valid_loss(model)
    train(model, batches, optimizer, steps, peak, micro)
    flat = torch.cat([param.detach().reshape(-1) for param in model.parameters()])
    copies = [torch.empty_like(flat) for _ in range(WORLD)]
    dist.all_gather(copies, flat)
    is_same = all(torch.equal(copy, flat) for copy in copies) or not getattr(optimizer, "is_in_step", True)
    numel = sum(param.numel() for param in model.parameters())
    if rank == 0:
        row = {
            "name": order["name"], "seed": order["seed"], "steps": steps, "before": before,
            "loss": batches.valid_loss(model), "frozen_step": getattr(optimizer, "frozen_step", None),
            "sent_bytes": optimizer.sent_bytes, "bf16_bytes": steps * 2 * (WORLD - 1) / WORLD * 2 * numel,
            "is_same": is_same, "seconds": time.perf_counter() - begin,
        }  # fmt: skip
        if order["end"]:
            torch.save(model.state_dict(), order["end"])
        Path(folder, "row.json").write_text(json.dumps(row))
    dist.destroy_process_group()


def launch(**order: Any) -> dict[str, Any]:
    """All ranks of one run."""
    print(f"{order['name']}, seed {order['seed']}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(folder, order), nprocs=WORLD)
        row: dict[str, Any] = json.loads(Path(folder, "row.json").read_text())
    if not row["is_same"]:
        raise SystemExit(f"no figures: weights of ranks differ: {row}")
    print(f"{row['name']}: loss {row['loss']:.4f}, {row['seconds']:.0f} s", file=sys.stderr, flush=True)
    return row


def measure(parts: list[str], seeds: list[int], is_tiny: bool) -> list[dict[str, Any]]:
    """Rows, each with the plain optimizer's loss where there is one; as many runs at a time as cores allow."""
    at_once = max(2, (os.cpu_count() or 1) // WORLD)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(at_once) as pool:
        start = str(Path(folder) / "start.pt")

        def go(name: str, seed: int, lr: float, begins: str | None = None, ends: str | None = None) -> Future[Any]:
            return pool.submit(launch, name=name, seed=seed, lr=lr, is_tiny=is_tiny, start=begins, end=ends)

        runs: list[tuple[Future[Any], Future[Any] | None]] = []
        if "adam" in parts or "tune" in parts:
            for seed in seeds if "adam" in parts else seeds[:1]:
                plain = go("AdamW", seed, 2e-3, ends=start if seed == seeds[0] else None)
                runs.append((plain, None))
                first = ["0/1 Adam", "1-bit Adam, no feedback"] if seed == seeds[0] else []
                names = ["1-bit Adam", *first] if "adam" in parts else []
                runs += [(go(name, seed, 2e-3), plain) for name in names]
        if "lamb" in parts:
            plain = go("LAMB", seeds[0], 1e-2)
            runs += [(plain, None), (go("1-bit LAMB", seeds[0], 1e-2), plain)]
        if "tune" in parts:
            runs[0][0].result()
            plain = go("AdamW", seeds[0], 5e-4, begins=start)
            runs += [(plain, None), (go("1-bit Adam", seeds[0], 5e-4, begins=start), plain)]
        return [{**run.result(), "plain": None if plain is None else plain.result()["loss"]} for run, plain in runs]


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """One line for each limit that is not met."""
    lines = []
    for row in rows:
        if row["plain"] is None:
            continue
        over, fewer = row["loss"] / row["plain"] - 1.0, row["bf16_bytes"] / row["sent_bytes"]
        where = f"{row['name']}, seed {row['seed']}, {row['steps']} steps"
        if "no feedback" in row["name"]:
            lines += [f"- missed: {where}: {over:+.2%}, wanted more than {LIMIT:+.0%}"] if over <= LIMIT else []
            continue
        lines += [f"- missed: {where}: {over:+.2%}, wanted at most {LIMIT:+.0%}"] if not over <= LIMIT else []
        lines += [f"- missed: {where}: {fewer:.2f}x fewer bytes, wanted {FEWER}"] if fewer < FEWER else []
        if row["frozen_step"] is None and row["name"] != "0/1 Adam":
            lines.append(f"- missed: {where}: it never switched")
    return lines or ["All limits are met."]


HEADS = (
    "optimizer", "seed", "steps", "last plain step", "loss before", "loss", "over plain", "fewer bytes than bf16", "s",
)  # fmt: skip


def cells(row: dict[str, Any]) -> list[str]:
    over = "" if row["plain"] is None else f"{row['loss'] / row['plain'] - 1.0:+.2%}"
    fewer = f"{row['bf16_bytes'] / row['sent_bytes']:.2f}" if row["sent_bytes"] else ""
    first = [row["name"], str(row["seed"]), str(row["steps"]), str(row["frozen_step"] or "")]
    return [*first, f"{row['before']:.3f}", f"{row['loss']:.4f}", over, fewer, f"{row['seconds']:.0f}"]


def page(rows: list[dict[str, Any]], scale: Scale, date: str) -> str:
    """The result as Markdown, one JSON line last."""
    machine, shape = read_machine(), scale.shape
    lines = [f"# Quality of 1-bit optimizers, {date}", ""]
    lines += [f"- {machine.cpu}, {machine.usable_cores} cores; torch {torch.__version__}"]
    lines += [f"- GPT of {count_params(shape) / 1e3:.0f} k parameters, {WORLD} ranks over gloo"]
    lines += [f"- {scale.micro_batch} x {shape.context} bytes a rank and step; 3 where a trained model goes on"]
    lines += [f"- betas {BETAS}; the switch is made by the optimizer itself; plain steps of ours travel in bf16", ""]
    lines += ["| " + " | ".join(HEADS) + " |", "|" + "---|" * len(HEADS)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    return "\n".join([*lines, "", *missed(rows), "", "```json", json.dumps({"date": date, "rows": rows}), "```", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, with commas between")
    parser.add_argument("--seeds", default="0,1", help="with commas between")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--save", action="store_true", help="write the result to a dated file")
    given = parser.parse_args()
    parts = given.only.split(",")
    if not set(parts) <= set(PARTS):
        raise SystemExit(f"--only {given.only}: parts are {','.join(PARTS)}")
    rows = measure(parts, [int(seed) for seed in given.seeds.split(",")], given.tiny)
    date = datetime.date.today().isoformat()
    text = page(rows, TINY if given.tiny else FULL, date)
    print(text)
    if given.save:
        path = Path(__file__).parent / "results" / f"{date}-onebit-quality.md"
        path.write_text(text, encoding="utf-8")
        print(f"written to {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
