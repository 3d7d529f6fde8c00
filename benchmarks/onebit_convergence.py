# SPDX-License-Identifier: Apache-2.0
"""Does 1-bit Adam converge as Adam does, and does Adam with compressed gradients?

    python benchmarks/onebit_convergence.py              # 23 M parameters, 4 workers, 5 seeds: needs CUDA
    python benchmarks/onebit_convergence.py --tiny       # shows on any machine that the script works, nothing more
    python benchmarks/onebit_convergence.py --plot benchmarks/results/<date>-onebit-convergence.json

A BERT-like encoder learns masked language modelling on the words of Python's standard library. Five ways:

- Adam on the mean gradient of all workers
- error-compensated Adam: gradients are compressed to one bit with error feedback, and Adam takes what was decoded
- error-compensated Adam that starts with plain steps, as many as 1-bit Adam
- 1-bit Adam that switches after a fifth of the steps
- 1-bit Adam that decides itself when to switch

Each way gets the same sweep of learning rates, in shorter runs with another seed, except for the last one, which uses
the rate of 1-bit Adam: the shorter runs could end before it switches. The best rate of each way is used in whole runs:
of all seeds for Adam and 1-bit Adam, of the first seed for the others. Then Adam and 1-bit Adam fine-tune their own
models to a classification: from which eighth of the library is this passage? Learning rates are chosen on one part of
the validation text, and figures are of another part. The workers are played in one process with onebit_played.py,
because NCCL refuses several ranks on one GPU. All runs are processes that share the GPU, so their times mean nothing.
`--budget` is the wall-clock time in seconds after which runs are stopped; these are named in the output. `--save`
writes a table, a JSON file with the curves and a picture.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import math
import multiprocessing
import re
import statistics
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from curves_plot import Curve, Panel, picture
from onebit_played import CompressedAdam, PlainAdam, PlayedAdam
from onebit_quality import rate
from torch import Tensor, nn

from twinflow.bench.machine import describe, read_machine
from twinflow.data import load_data

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
ADAM, ERROR, ERROR_LATE, ONE_BIT, OWN_SWITCH = WAYS = (
    "Adam",
    "error-compensated Adam",
    "error-compensated Adam, warm-up",
    "1-bit Adam",
    "1-bit Adam, own switch",
)
WORLD = 4
BETAS = (0.9, 0.99)
WEIGHT_DECAY = 0.01
PLAIN_SHARE = 0.2  # of the steps before 1-bit Adam switches; the article: 15% to 20%
TUNE_PLAIN_SHARE = 0.25  # in fine-tuning, as in the article
MASK, UNKNOWN, NUM_SPECIAL = range(3)
BLOCK_WORDS = 1024
NUM_CLASSES = 8
SWEEP_SEED = 100
POINTS = 60  # of a curve
SWEEP_PART = 0.45  # of the budget
TOLD = 500  # steps between two lines of progress of a whole run
RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Scale:
    """Sizes of the model and of the runs."""

    vocab: int
    length: int
    num_masked: int  # positions of a sequence
    layers: int
    hidden: int
    heads: int
    micro_batch: int  # sequences of a worker
    num_seeds: int
    rates: tuple[float, ...]
    tune_rates: tuple[float, ...]
    sweep_steps: int
    steps: int  # of a whole run
    tune_steps: int
    num_valid: int  # sequences of each part of the validation text


FULL = Scale(
    8192, 128, 20, 6, 512, 8, 8, 5, (6e-5, 1.6e-4, 4e-4, 1e-3, 2.5e-3), (5e-5, 1.5e-4, 4.5e-4), 500, 2000, 600, 2048,
)  # fmt: skip
TINY = Scale(300, 16, 3, 1, 32, 2, 2, 2, (1e-3, 3e-3), (1e-3,), 10, 20, 8, 16)


# The model: an encoder whose weights have one more dimension, the worker. One pass therefore gives the gradients of
# all workers. Layer norms come first in each block and positions are rotary, so that short runs leave the loss of word
# frequencies. There is no dropout.


def new_params(scale: Scale, seed: int) -> dict[str, nn.Parameter]:
    """Parameters by name. Names that begin with `mlm` and `cls` belong to the two heads."""
    torch.manual_seed(seed)
    size, deep = scale.hidden, 0.02 / math.sqrt(2 * scale.layers)
    found: dict[str, Tensor] = {}

    def linear(name: str, out: int, given: int, std: float = 0.02) -> None:
        found[f"{name}.weight"] = std * torch.randn(out, given)
        found[f"{name}.bias"] = torch.zeros(out)

    def norm(name: str) -> None:
        found[f"{name}.weight"] = torch.ones(size)
        found[f"{name}.bias"] = torch.zeros(size)

    found["tokens"] = 0.02 * torch.randn(scale.vocab, size)
    for i in range(scale.layers):
        norm(f"{i}.first")
        linear(f"{i}.qkv", 3 * size, size)
        linear(f"{i}.out", size, size, deep)
        norm(f"{i}.second")
        linear(f"{i}.up", 4 * size, size)
        linear(f"{i}.down", size, 4 * size, deep)
    norm("last")
    linear("mlm.dense", size, size)
    norm("mlm.norm")
    found["mlm.bias"] = torch.zeros(scale.vocab)
    linear("cls", NUM_CLASSES, size)
    return {name: nn.Parameter(value.to(DEVICE)) for name, value in found.items()}


Weights = dict[str, Tensor]  # by name, each [workers, *shape]
Batch = dict[str, Tensor]  # by name, each [workers, sequences, ...]


def _linear(p: Weights, name: str, x: Tensor) -> Tensor:
    return torch.baddbmm(p[f"{name}.bias"][:, None], x, p[f"{name}.weight"].transpose(1, 2))


def _norm(p: Weights, name: str, x: Tensor) -> Tensor:
    flat = F.layer_norm(x, x.shape[-1:])
    return torch.addcmul(p[f"{name}.bias"][:, None], flat, p[f"{name}.weight"][:, None])


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: pairs of elements of `x` [..., length, 2 * n] are rotated by angles [length, n]."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def encode(p: Weights, scale: Scale, tokens: Tensor) -> Tensor:
    """Hidden states [workers, sequences * length, hidden]."""
    workers, batch, length = tokens.shape
    size, heads = scale.hidden, scale.heads
    first = torch.arange(workers, device=tokens.device)[:, None, None] * scale.vocab
    x = F.embedding(tokens + first, p["tokens"].reshape(-1, size)).view(workers, batch * length, size)
    pairs = torch.arange(size // heads // 2, device=tokens.device)
    turns = torch.arange(length, device=tokens.device)
    angles = turns[:, None] * torch.pow(10_000.0, -2.0 * pairs * heads / size)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    for i in range(scale.layers):
        qkv = _linear(p, f"{i}.qkv", _norm(p, f"{i}.first", x))
        split = qkv.view(workers * batch, length, 3, heads, size // heads).permute(2, 0, 3, 1, 4)
        qk, v = split.split([2, 1])
        q, k = _rotated(qk, cos, sin).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v[0])
        x = x + _linear(p, f"{i}.out", mixed.transpose(1, 2).reshape(workers, batch * length, size))
        x = x + _linear(p, f"{i}.down", F.gelu(_linear(p, f"{i}.up", _norm(p, f"{i}.second", x))))
    return _norm(p, "last", x)


def mlm_losses(p: Weights, scale: Scale, batch: Batch) -> Tensor:
    """The mean loss of each worker's masked positions."""
    workers, num, _ = batch["masked"].shape
    x = encode(p, scale, batch["tokens"]).reshape(-1, scale.hidden)
    first = torch.arange(workers * num, device=x.device)[:, None] * scale.length
    x = x.index_select(0, (batch["masked"].view(workers * num, -1) + first).view(-1)).view(workers, -1, scale.hidden)
    x = _norm(p, "mlm.norm", F.gelu(_linear(p, "mlm.dense", x)))
    logits = torch.baddbmm(p["mlm.bias"][:, None], x, p["tokens"].transpose(1, 2))
    losses = F.cross_entropy(logits.float().view(-1, scale.vocab), batch["targets"].reshape(-1), reduction="none")
    return losses.view(workers, -1).mean(1)


def cls_logits(p: Weights, scale: Scale, batch: Batch) -> Tensor:
    """Logits from the mean of the hidden states of a sequence."""
    workers, num, length = batch["tokens"].shape
    x = encode(p, scale, batch["tokens"]).view(workers, num, length, scale.hidden).mean(2)
    return _linear(p, "cls", x).float()


def cls_losses(p: Weights, scale: Scale, batch: Batch) -> Tensor:
    logits = cls_logits(p, scale, batch).view(-1, NUM_CLASSES)
    losses = F.cross_entropy(logits, batch["labels"].reshape(-1), reduction="none")
    return losses.view(batch["labels"].shape).mean(1)


# The data.


def make_words(scale: Scale, path: Path) -> dict[str, Any]:
    """Writes the words of the standard library as numbers. The most frequent words are the vocabulary."""
    text = bytes(load_data("stdlib").tokens).decode("utf-8", "replace")
    if scale is TINY:
        text = text[:2_000_000]
    words = re.findall(r"\w+|\n *|[^\w\s]", text)
    known = {word: i for i, (word, _) in enumerate(Counter(words).most_common(scale.vocab - NUM_SPECIAL), NUM_SPECIAL)}
    numbers = torch.tensor([known.get(word, UNKNOWN) for word in words])
    torch.save(numbers, path)
    return {"words": len(words), "unknown": float((numbers == UNKNOWN).float().mean())}


class Text(NamedTuple):
    """Blocks of the text, which no sequence crosses."""

    words: Tensor  # [blocks, BLOCK_WORDS]
    labels: Tensor  # [blocks]: the part of the library that a block is from, for the classification


@functools.cache
def split_text(path: str) -> dict[str, Text]:
    """Of 20 successive blocks, 18 are to train on, one is to choose learning rates with, one is for the figures."""
    words = torch.load(path, weights_only=True).to(DEVICE)
    num = len(words) // BLOCK_WORDS
    blocks = words[: num * BLOCK_WORDS].view(num, BLOCK_WORDS)
    index = torch.arange(num, device=DEVICE)
    chosen = {"train": index % 20 < 18, "choose": index % 20 == 18, "report": index % 20 == 19}
    return {name: Text(blocks[which], (index * NUM_CLASSES // num)[which]) for name, which in chosen.items()}


def sequences(text: Text, scale: Scale, num: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random sequences [num, length], and the labels of their blocks."""
    blocks = torch.randint(len(text.words), (num,), generator=generator, device=DEVICE)
    starts = torch.randint(BLOCK_WORDS - scale.length + 1, (num, 1), generator=generator, device=DEVICE)
    places = blocks[:, None] * BLOCK_WORDS + starts + torch.arange(scale.length, device=DEVICE)
    return text.words.view(-1)[places], text.labels[blocks]


def mlm_batches(text: Text, scale: Scale, num: int, seed: int) -> Batch:
    """`num` sequences. Of the masked positions 80% have the mask, 10% a random word, 10% their own word."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    tokens, _ = sequences(text, scale, num, generator)
    drawn = torch.rand(tokens.shape, generator=generator, device=DEVICE)
    masked = drawn.topk(scale.num_masked, dim=1).indices
    targets = tokens.gather(1, masked)
    kind = torch.rand(masked.shape, generator=generator, device=DEVICE)
    other = torch.randint(NUM_SPECIAL, scale.vocab, masked.shape, generator=generator, device=DEVICE)
    shown = torch.where(kind < 0.8, MASK, torch.where(kind < 0.9, other, targets))
    return {"tokens": tokens.scatter(1, masked, shown), "masked": masked, "targets": targets}


def cls_batches(text: Text, scale: Scale, num: int, seed: int) -> Batch:
    tokens, labels = sequences(text, scale, num, torch.Generator(DEVICE).manual_seed(seed))
    return {"tokens": tokens, "labels": labels}


# Training.

Losses = Callable[[Weights, Scale, Batch], Tensor]


def weights_of(params: dict[str, nn.Parameter], workers: int) -> Weights:
    """The weights in the dtype of the computation, once for each worker. The copies share their memory."""
    return {name: param.detach().to(DTYPE).expand(workers, *param.shape) for name, param in params.items()}


class Trainer:
    """Steps of all workers. On a GPU, forward and backward are one CUDA graph."""

    def __init__(
        self, params: dict[str, nn.Parameter], optimizer: PlayedAdam, scale: Scale, losses: Losses, example: Batch
    ) -> None:
        self._params = params
        self._optimizer = optimizer
        self._scale = scale
        self._losses = losses
        self._batch = {name: value.clone() for name, value in example.items()}
        self.loss = torch.zeros((), device=DEVICE)  # mean of the workers in the last step
        self._graph: torch.cuda.CUDAGraph | None = None
        if CUDA:
            self._capture()

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._compute()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._compute()
        except RuntimeError:
            traceback.print_exc()
            print("no CUDA graph: steps run without it", flush=True)
            torch.cuda.synchronize()
        else:
            self._graph = graph

    def _compute(self) -> None:
        given = weights_of(self._params, WORLD)
        for value in given.values():
            value.requires_grad_()
        losses = self._losses(given, self._scale, self._batch)
        self._optimizer.take(torch.autograd.grad(losses.sum(), list(given.values())))
        self.loss.copy_(losses.detach().mean())

    def step(self, batch: Batch, lr: float) -> None:
        for name, value in batch.items():
            self._batch[name].copy_(value)
        if self._graph is not None:
            self._graph.replay()
        else:
            self._compute()
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()


def new_optimizer(way: str, params: Iterable[nn.Parameter], num_plain: int) -> PlayedAdam:
    options: dict[str, Any] = {"betas": BETAS, "weight_decay": WEIGHT_DECAY, "wire_dtype": torch.bfloat16}
    if way == ADAM:
        return PlainAdam(list(params), WORLD, **options)
    if way in (ONE_BIT, OWN_SWITCH):
        return PlayedAdam(list(params), WORLD, freeze_step=num_plain if way == ONE_BIT else None, **options)
    return CompressedAdam(list(params), WORLD, freeze_step=num_plain if way == ERROR_LATE else 0, **options)


@dataclasses.dataclass(frozen=True)
class Order:
    """One run."""

    way: str
    seed: int
    lr: float
    steps: int
    is_whole: bool  # with figures on both parts of the validation text, and fine-tuning
    deadline: float  # of time.time()
    words: str  # file
    is_tiny: bool
    tune_plain_share: float = TUNE_PLAIN_SHARE  # share of the steps of fine-tuning before compression begins

    def __str__(self) -> str:
        return f"{self.way}, seed {self.seed}, learning rate {self.lr:g}, {self.steps:,} steps"


class OutOfTimeError(Exception):
    """The budget does not suffice for this run."""


def train(
    params: dict[str, nn.Parameter], order: Order, lr: float, steps: int, plain: float, losses: Losses, data: Batch
) -> dict[str, Any]:
    """Trains on the sequences of `data` in their order. Returns the curve of the loss, and counts of the optimizer."""
    scale = TINY if order.is_tiny else FULL
    batches = {name: value.view(steps, WORLD, scale.micro_batch, *value.shape[1:]) for name, value in data.items()}
    optimizer = new_optimizer(order.way, params.values(), max(1, round(plain * steps)))
    trainer = Trainer(params, optimizer, scale, losses, {name: value[0] for name, value in batches.items()})
    found = torch.zeros(steps, device=DEVICE)
    start = time.time()
    for step in range(steps):
        if order.is_whole and step and step % TOLD == 0:
            loss = float(found[step - TOLD : step].mean())
            print(f"{order.way}, seed {order.seed}, step {step}: {loss:.4f}, {time.time() - start:.0f} s", flush=True)
        if step % 20 == 0 and time.time() > order.deadline:
            raise OutOfTimeError(f"stopped at step {step} of {steps}")
        trainer.step({name: value[step] for name, value in batches.items()}, rate(step, steps, lr))
        found[step] = trainer.loss
    every = max(1, steps // POINTS)
    curve = [[i + every, float(found[i : i + every].mean())] for i in range(0, steps - every + 1, every)]
    return {
        "curve": curve, "frozen_step": optimizer.frozen_step, "rule_step": getattr(optimizer, "rule_step", None),
        "skipped": optimizer.num_skipped, "sent_bytes": optimizer.sent_bytes,
    }  # fmt: skip


@torch.no_grad()
def valid_loss(params: dict[str, nn.Parameter], text: Text, scale: Scale) -> float:
    """Masked language modelling, on the same sequences for every run."""
    data = mlm_batches(text, scale, scale.num_valid, seed=7)
    given = weights_of(params, 1)
    losses = [
        mlm_losses(given, scale, {name: value[None, at : at + 128] for name, value in data.items()})
        for at in range(0, scale.num_valid, 128)
    ]
    return float(torch.stack(losses).mean())


@torch.no_grad()
def accuracy(params: dict[str, nn.Parameter], text: Text, scale: Scale) -> float:
    data = cls_batches(text, scale, scale.num_valid, seed=7)
    given = weights_of(params, 1)
    right = 0
    for at in range(0, scale.num_valid, 128):
        logits = cls_logits(given, scale, {"tokens": data["tokens"][None, at : at + 128]})
        right += int((logits[0].argmax(-1) == data["labels"][at : at + 128]).sum())
    return right / scale.num_valid


def run(order: Order) -> dict[str, Any]:
    """One run in a process of the pool."""
    torch.set_num_threads(1)
    scale = TINY if order.is_tiny else FULL
    row: dict[str, Any] = {"way": order.way, "seed": order.seed, "lr": order.lr, "steps": order.steps}
    row["begin"] = time.time()
    if time.time() > order.deadline:
        raise OutOfTimeError("not begun")
    texts = split_text(order.words)
    params = new_params(scale, order.seed)
    chosen = {name: param for name, param in params.items() if not name.startswith("cls")}
    num = order.steps * WORLD * scale.micro_batch
    data = mlm_batches(texts["train"], scale, num, seed=1000 + order.seed)
    row |= train(chosen, order, order.lr, order.steps, PLAIN_SHARE, mlm_losses, data)
    row["numel"] = sum(param.numel() for param in chosen.values())
    row["choose"] = valid_loss(chosen, texts["choose"], scale)
    row["trained"] = time.time()
    if order.is_whole:
        row["report"] = valid_loss(chosen, texts["report"], scale)
        if order.way in (ADAM, ONE_BIT):
            # A fine-tune that does not fit into the budget leaves the figures before it as they are. The highest rate
            # is the first, because it was the best one in all runs so far.
            row["tunes"] = []
            try:
                for lr in sorted(scale.tune_rates, reverse=True):
                    row["tunes"].append(fine_tune(params, order, scale, lr, texts))
            except OutOfTimeError as error:
                row["no_tune"] = f"fine-tune: {error}"
            except Exception:
                traceback.print_exc()
                row["no_tune"] = f"fine-tune failed: {traceback.format_exc(limit=-1)}"
    row["end"] = time.time()
    return row


def fine_tune(
    params: dict[str, nn.Parameter], order: Order, scale: Scale, lr: float, texts: dict[str, Text]
) -> dict[str, Any]:
    """Trains copies of the parameters to the classification, with the optimizer that has pre-trained them."""
    names = [name for name in params if not name.startswith("mlm")]
    copies = {name: nn.Parameter(params[name].detach().clone()) for name in names}
    num = scale.tune_steps * WORLD * scale.micro_batch
    data = cls_batches(texts["train"], scale, num, seed=2000 + order.seed)
    found = train(copies, order, lr, scale.tune_steps, order.tune_plain_share, cls_losses, data)
    choose, report = (accuracy(copies, texts[part], scale) for part in ("choose", "report"))
    return {"lr": lr, "choose": choose, "report": report, **found}


# All runs.


def collect(pool: ProcessPoolExecutor, orders: list[Order], left_out: list[str]) -> list[dict[str, Any]]:
    """The rows of all runs that finished. The others are named in `left_out`."""
    futures: dict[Future[dict[str, Any]], int] = {pool.submit(run, order): i for i, order in enumerate(orders)}
    rows: dict[int, dict[str, Any]] = {}
    for future in as_completed(futures):
        order = orders[futures[future]]
        try:
            row = future.result()
        except OutOfTimeError as error:
            left_out.append(f"{order}: {error}")
            print(f"left out: {left_out[-1]}", flush=True)
            continue
        except Exception as error:
            traceback.print_exc()
            left_out.append(f"{order}: failed with {type(error).__name__}: {error}")
            continue
        rows[futures[future]] = row
        if "no_tune" in row:
            left_out.append(f"{order}: {row['no_tune']}")
        print(f"{order}: loss {row.get('report', row['choose']):.4f}, {row['end'] - row['begin']:.0f} s", flush=True)
    return [row for _, row in sorted(rows.items())]


def finite_or_inf(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def best_rates(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The learning rate with the lowest loss of each way. A way whose runs all diverged gets its lowest rate."""
    best: dict[str, float] = {}
    for way in dict.fromkeys(row["way"] for row in rows):
        own = [row for row in rows if row["way"] == way]
        best[way] = min(own, key=lambda row: (finite_or_inf(row["choose"]), row["lr"]))["lr"]
    return best


def measure(scale: Scale, given: argparse.Namespace) -> dict[str, Any]:
    start = time.time()
    end = start + given.budget
    left_out: list[str] = []
    result: dict[str, Any] = {"left_out": left_out, "sweep": [], "runs": []}
    result["tune_plain_share"] = given.tune_plain_share
    processes = given.processes or (13 if CUDA else 1)
    with tempfile.TemporaryDirectory() as folder:
        words = str(Path(folder) / "words.pt")
        result["data"] = make_words(scale, Path(words))
        with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
            limit = start + SWEEP_PART * given.budget
            orders = [
                Order(way, SWEEP_SEED, lr, scale.sweep_steps, False, limit, words, given.tiny)
                for lr in scale.rates
                for way in given.ways
                if way != OWN_SWITCH
            ]
            if given.lr:
                result["rates"] = best = dict.fromkeys(given.ways, given.lr)
            else:
                result["sweep"] = collect(pool, orders, left_out)
                result["rates"] = best = best_rates(result["sweep"])
            if OWN_SWITCH in given.ways and ONE_BIT in best:
                best[OWN_SWITCH] = best[ONE_BIT]
            print(f"best learning rates: {best}, {time.time() - start:.0f} s", flush=True)
            pairs = [(way, 0) for way in best]
            pairs += [(way, seed) for seed in range(1, given.seeds) for way in best if way in (ADAM, ONE_BIT)]
            if pairs:
                steps = given.steps or scale.steps
                orders = [
                    Order(way, seed, best[way], steps, True, end, words, given.tiny, given.tune_plain_share)
                    for way, seed in pairs
                ]
                result["runs"] = collect(pool, orders, left_out)
    result |= {"seconds": time.time() - start, "seeds": given.seeds, "budget": given.budget, "processes": processes}
    return result


# The result.


def spread(values: list[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.4f} | {deviation:.4f} | {min(values):.4f} to {max(values):.4f}"


def tune_choice(runs: list[dict[str, Any]]) -> dict[str, float]:
    """The learning rate of fine-tuning of each way: the best mean accuracy over seeds on the text for choosing."""
    best = {}
    for way in (ADAM, ONE_BIT):
        means: dict[float, list[float]] = {}
        for row in runs:
            for tune in row.get("tunes", []) if row["way"] == way else []:
                means.setdefault(tune["lr"], []).append(tune["choose"])
        if means:
            best[way] = max(means, key=lambda lr: statistics.mean(means[lr]))
    return best


def tuned(row: dict[str, Any], best: dict[str, float]) -> dict[str, Any] | None:
    return next((tune for tune in row.get("tunes", []) if tune["lr"] == best.get(row["way"])), None)


def compared(name: str, by_way: dict[str, dict[int, float]]) -> list[str]:
    """A table of seeds for Adam and 1-bit Adam, and a sentence on the difference of their means."""
    seeds = sorted({seed for values in by_way.values() for seed in values})
    lines = ["| way | " + " | ".join(f"seed {seed}" for seed in seeds) + " | mean | std | range |"]
    lines += ["|---|" + "---:|" * (len(seeds) + 3)]
    for way, values in by_way.items():
        cells = " | ".join(f"{values[seed]:.4f}" if seed in values else "left out" for seed in seeds)
        lines.append(f"| {way} | {cells} | {spread(list(values.values()))} |")
    lines.append("")
    if ADAM in by_way and ONE_BIT in by_way:
        plain, ours = list(by_way[ADAM].values()), list(by_way[ONE_BIT].values())
        both = sorted(set(by_way[ADAM]) & set(by_way[ONE_BIT]))
        difference = statistics.mean(ours) - statistics.mean(plain)
        is_inside = min(plain) <= statistics.mean(ours) <= max(plain)
        pairs = ", ".join(f"{by_way[ONE_BIT][seed] - by_way[ADAM][seed]:+.4f}" for seed in both)
        lines += [
            f"The mean {name} of 1-bit Adam differs from that of Adam by {difference:+.4f}. "
            f"It is {'inside' if is_inside else 'outside'} the range of Adam's seeds. "
            f"By seed, 1-bit Adam minus Adam: {pairs}.",
            "",
        ]
    return lines


def page(result: dict[str, Any], scale: Scale, command: str) -> str:
    runs, sweep = result["runs"], result["sweep"]
    gpu = torch.cuda.get_device_name() if CUDA else "no GPU"
    lines = [f"# Convergence of 1-bit Adam, {datetime.date.today()}", ""]
    if runs:
        by_way: dict[str, dict[int, float]] = {}
        for row in runs:
            by_way.setdefault(row["way"], {})[row["seed"]] = row["report"]
        shown = {way: by_way[way] for way in (ADAM, ONE_BIT) if way in by_way}
        lines += ["Validation loss of masked language modelling, nats a word:", "", *compared("loss", shown)]
        best = tune_choice(runs)
        accuracies: dict[str, dict[int, float]] = {}
        for row in runs:
            if (tune := tuned(row, best)) is not None:
                accuracies.setdefault(row["way"], {})[row["seed"]] = tune["report"]
        if accuracies:
            rates = ", ".join(f"{way} {lr:g}" for way, lr in best.items())
            lines += [
                f"Accuracy after fine-tuning with the same optimizer (learning rates: {rates}); "
                f"chance is {1 / NUM_CLASSES:g}:",
                "",
                *compared("accuracy", accuracies),
            ]
        lines += figure_13(by_way)
        lines += whole_run_bytes(runs, best, scale)
    lines += sweep_table(sweep, scale) if sweep else []
    lines += about(result, scale, gpu, command)
    return "\n".join(lines)


def figure_13(by_way: dict[str, dict[int, float]]) -> list[str]:
    """All ways with the first seed."""
    first = {way: values[0] for way, values in by_way.items() if 0 in values}
    lines = ["All ways with seed 0, each with its best learning rate (figure 13 of the article):", ""]
    lines += ["| way | validation loss | beside Adam |", "|---|---:|---:|"]
    for way, loss in first.items():
        beside = f"{loss / first[ADAM] - 1.0:+.2%}" if ADAM in first else ""
        lines.append(f"| {way} | {loss:.4f} | {beside} |")
    return [*lines, ""]


def whole_run_bytes(runs: list[dict[str, Any]], best: dict[str, float], scale: Scale) -> list[str]:
    """Bytes that a rank sends, and predicted times on the networks of slow_network.py."""
    found: list[tuple[str, dict[str, Any], dict[str, Any], int]] = []
    plain = next((row for row in runs if row["way"] == ADAM), None)
    ours = next((row for row in runs if row["way"] == ONE_BIT), None)
    if plain is None or ours is None:
        return []
    found.append(("pre-training", plain, ours, ours["steps"]))
    found += [("pre-training, own switch", plain, row, row["steps"]) for row in runs if row["way"] == OWN_SWITCH]
    tunes = tuned(plain, best), tuned(ours, best)
    if tunes[0] is not None and tunes[1] is not None:
        found.append(("fine-tuning", tunes[0], tunes[1], scale.tune_steps))
    lines = [
        f"Bytes that each of {WORLD} ranks sends in a whole run, counted by the collectives; Adam sends gradients in "
        "bf16:",
        "",
        "| run | steps | plain steps of 1-bit Adam | Adam | 1-bit Adam | fewer | 1 / (w + (1 - w) / 16) |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, one, other, steps in found:
        num_plain = other["frozen_step"] or steps
        share = num_plain / steps
        fewer = one["sent_bytes"] / other["sent_bytes"]
        lines.append(
            f"| {name} | {steps:,} | {num_plain:,} ({share:.0%}) | {one['sent_bytes'] / 1e9:.3f} GB | "
            f"{other['sent_bytes'] / 1e9:.3f} GB | {fewer:.2f} | {1.0 / (share + (1.0 - share) / 16.0):.2f} |"
        )
    lines.append("")
    rules = [row["rule_step"] for row in runs if row["way"] == ADAM]
    told = ", ".join("never" if step is None else f"after step {step:,}" for step in rules)
    lines += [f"The rule that chooses the switch by itself would have switched in the runs of Adam: {told}.", ""]
    return lines + predicted_times(found)


def predicted_times(found: list[tuple[str, dict[str, Any], dict[str, Any], int]]) -> list[str]:
    """Speed of whole runs from the steps that slow_network.py has measured, for the share of plain steps here."""
    files = sorted(RESULTS.glob("*-slow-network.md"))
    text = re.search(r"```json\n(.*?)\n```", files[-1].read_text(encoding="utf-8"), re.S) if files else None
    if text is None:
        return []
    measured = json.loads(text[1])
    seconds = {(row["way"], row["mbit"]): row["seconds"] for row in measured["rows"]}
    lines = [
        f"Predicted speed of a whole run beside DDP in bf16, from the step times that {files[-1].name} gives for a "
        f"model of {measured['numel'] / 1e6:.2f} M parameters on CPUs:",
        "",
        "| run | Mbit/s | DDP in bf16, s a step | 1-bit Adam, s a step, mean of the run | times as fast |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, _, ours, steps in found:
        share = (ours["frozen_step"] or steps) / steps
        for mbit in sorted({mbit for way, mbit in seconds if way == "onebit"}):
            if ("bf16", mbit) in seconds and ("warmup", mbit) in seconds:
                mean = share * seconds["warmup", mbit] + (1.0 - share) * seconds["onebit", mbit]
                plain = seconds["bf16", mbit]
                lines.append(f"| {name} | {mbit:g} | {plain:.3f} | {mean:.3f} | {plain / mean:.2f} |")
    return [*lines, ""]


def sweep_table(rows: list[dict[str, Any]], scale: Scale) -> list[str]:
    """Losses of the sweep. The best of each way is bold."""
    best = best_rates(rows)
    lines = [
        f"Sweep of learning rates, {scale.sweep_steps:,} steps, one seed that is not used elsewhere; loss on the text "
        "for choosing:",
        "",
        "| way | " + " | ".join(f"{lr:g}" for lr in scale.rates) + " |",
        "|---|" + "---:|" * len(scale.rates),
    ]
    for way in best:
        cells = []
        for lr in scale.rates:
            row = next((row for row in rows if row["way"] == way and row["lr"] == lr), None)
            cell = "left out" if row is None else f"{row['choose']:.4f}"
            cells.append(f"**{cell}**" if lr == best[way] else cell)
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    ends = [way for way, lr in best.items() if lr in (scale.rates[0], scale.rates[-1])]
    if ends:
        lines += ["", f"The best rate is at an end of the sweep for: {', '.join(ends)}."]
    return [*lines, ""]


def about(result: dict[str, Any], scale: Scale, gpu: str, command: str) -> list[str]:
    first = next(iter(result["runs"] or result["sweep"]), None)
    numel = f"{first['numel'] / 1e6:.1f} M" if first else "?"
    steps = f"{result['runs'][0]['steps']:,}" if result["runs"] else "no"
    skipped = sum(row["skipped"] for row in result["runs"])
    lines = [
        f"- `{command}`, {result['seconds']:.0f} s with {result['processes']} processes that share the GPU",
        f"- {gpu}; {describe(read_machine())}; torch {torch.__version__}",
        f"- An encoder of {numel} parameters ({scale.layers} layers, hidden size {scale.hidden}, vocabulary "
        f"{scale.vocab:,}, layer norms first, rotary positions, no dropout), computed in "
        f"{str(DTYPE).removeprefix('torch.')} with fp32 master weights.",
        f"- {result['data']['words'] / 1e6:.2f} M words of Python's standard library, {result['data']['unknown']:.1%} "
        f"of them not in the vocabulary; of 20 blocks of {BLOCK_WORDS:,} words, 18 to train on, one to choose learning "
        "rates, one for the figures. The classification: from which eighth of the library is a passage?",
        f"- {steps} steps of {WORLD} workers with {scale.micro_batch} sequences of {scale.length} words, "
        f"{scale.num_masked} masked; fine-tuning has {scale.tune_steps} steps with the same batch. The workers are "
        "played in one process with the optimizer's own code.",
        f"- Betas {BETAS}, weight decay {WEIGHT_DECAY}, no clipping; learning rate: warm-up over a twentieth, cosine "
        f"to a tenth. 1-bit Adam switches after {PLAIN_SHARE:.0%} of the steps, in fine-tuning after "
        f"{result['tune_plain_share']:.0%}; with its own switch it decides itself, with the same learning rate. Plain "
        "steps send gradients in bf16.",
        "- Not equal: the sweep is shorter than whole runs, and its best rate may not be the best one of a whole run. "
        "The scale of error-compensated gradients is that of 4,096 elements, which is finer than one for a tensor.",
        f"- Steps of whole runs that were skipped because a gradient was not finite: {skipped}.",
    ]
    lines += [f"- Left out: {one}" for one in result["left_out"]] or ["- No run was left out."]
    return [*lines, ""]


def plotted(result: dict[str, Any]) -> str:
    """The curves of all ways with seed 0, and those of all seeds of Adam and 1-bit Adam."""

    def curve(row: dict[str, Any], label: str, is_faint: bool = False) -> Curve:
        points = [(step, loss) for step, loss in row["curve"] if loss is not None]
        return Curve(label, points, WAYS.index(row["way"]), is_faint)

    rows = result["runs"]
    first = [curve(row, f"{row['way']}, lr {row['lr']:g}") for row in rows if row["seed"] == 0]
    pair = [row for row in rows if row["way"] in (ADAM, ONE_BIT)]
    seeds = [curve(row, row["way"] if row["seed"] == 0 else "", is_faint=True) for row in pair]
    # Without the steep start, so that the difference between the seeds is visible.
    ends = [one._replace(points=one.points[len(one.points) // 3 :]) for one in seeds]
    return picture(
        [
            Panel("Training loss of masked language modelling, seed 0", first),
            Panel("All seeds of Adam and 1-bit Adam, last two thirds", ends),
        ]
    )


def without_nan(value: Any) -> Any:
    """For JSON: None instead of numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: without_nan(one) for key, one in value.items()}
    if isinstance(value, list):
        return [without_nan(one) for one in value]
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds of wall-clock time, then runs are stopped")
    parser.add_argument("--seeds", type=int, default=None)
    parser.add_argument("--steps", type=int, default=None, help=f"of whole runs, otherwise {FULL.steps:,}")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--lr", type=float, default=None, help="of all ways, without a sweep")
    parser.add_argument("--processes", type=int, default=None)
    text = "share of fine-tuning before 1-bit Adam compresses; 1: never"
    parser.add_argument("--tune-plain-share", type=float, default=TUNE_PLAIN_SHARE, help=text)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--save-to", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--plot", type=Path, metavar="FILE.json", help="only draw the picture of a saved result")
    given = parser.parse_args()
    if given.plot:
        given.plot.with_suffix(".svg").write_text(plotted(json.loads(given.plot.read_text())), encoding="utf-8")
        return
    scale = TINY if given.tiny else FULL
    given.seeds = given.seeds or scale.num_seeds
    result = measure(scale, given)
    stem = f"{datetime.date.today()}-onebit-convergence"
    if given.save:  # first the numbers: an error in the page must not lose them
        given.save_to.mkdir(parents=True, exist_ok=True)
        (given.save_to / f"{stem}.json").write_text(json.dumps(without_nan(result)) + "\n", encoding="utf-8")
        (given.save_to / f"{stem}.svg").write_text(plotted(result), encoding="utf-8")
    command = f"python benchmarks/onebit_convergence.py --budget {given.budget:g}" + (" --tiny" if given.tiny else "")
    text = page(result, scale, command)
    print(text)
    if given.save:
        (given.save_to / f"{stem}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
