# SPDX-License-Identifier: Apache-2.0
"""BERT with sparse attention: the longest sequence that trains in 32 GB, the step at equal length, and other models.

    python benchmarks/sparse_bert.py --only longest --budget 120     # longest sequences: needs CUDA and transformers
    python benchmarks/sparse_bert.py --only longformer --budget 120  # beside transformers' Longformer
    python benchmarks/sparse_bert.py --tiny                          # shows on any machine that the script works

Parts (`--only`), each in a process of its own: `longest` and `steps`, for BERT's two shapes; `longformer` and
`bigbird`, transformers' own models of base's shape beside dense BERT and sparse BERTs. Random weights; weights,
gradients and AdamW's state (fused) in bf16; no dropout; the loss is that of masked language modelling at up to 512
positions of a batch, so that logits do not decide.

A sequence fits if a whole step of it runs under the cap, with the state of the optimizer allocated before. Lengths are
doubled, then halved between, until the longest is known within 1/8. The time of dense flash attention grows with the
square of the length, so its search ends where a step would take more than `--trial` seconds. What would fit then
follows from the memory of the last two lengths, which grows linearly. Steps at equal length are without cap and without
checkpointing, with equal numbers of tokens. Other models are timed in alternating windows, the host's part with them.
Before all that, hidden states of a sparse model must be those of a dense one with the pattern as its mask. Prints the
machine, tables and one JSON line; `--save` writes a dated file.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sparse_common import Row, header, parts_of, save, shown, synchronize, table, to_json
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from twinflow.attention import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    FixedSparsityConfig,
    SparsityConfig,
    sparsify,
)

PARTS = ("longest", "steps", "longformer", "bigbird")
DENSE, FLASH, SPARSE = "eager dense", "dense flash, checkpointed", "sparse, checkpointed"
WAYS = (DENSE, "eager dense, checkpointed", FLASH, "sparse", SPARSE)
LONGER = {"base": 10.0, "large": 16.0}  # times the sequence of dense attention without checkpointing
FASTER, PEERS_FASTER, INFERENCE_FASTER = 6.0, 1.5, 3.0
TOLERANCE = 1e-2  # of the norm, after all layers, in fp32: in bf16 two dense models of 24 layers differ by more
POSITIONS = 512  # of the loss


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    device: str
    dtype: torch.dtype
    sizes: dict[str, tuple[int, int, int]]  # layers, hidden, heads
    vocab: int
    block: int
    check_length: int
    start: int  # of the search
    most: int
    multiple: int  # of which lengths are
    lengths: tuple[int, ...]
    tokens: int  # of a timed step
    peer_lengths: tuple[int, ...]
    peer_tokens: int  # of a timed step
    repeats: int  # steps of a window
    windows: int


SIZES = {"base": (12, 768, 12), "large": (24, 1024, 16)}
FULL = Scale(
    "cuda", torch.bfloat16, SIZES, 30522, 64, 1024, 4096, 1 << 20, 128, (512, 1024, 2048, 4096, 8192, 16384), 16384,
    (2048, 4096, 8192, 16384), 16384, 3, 4,
)  # fmt: skip
TINY = Scale(
    "cpu", torch.float32, {"base": (2, 64, 2), "large": (2, 64, 4)}, 300, 16, 256, 64, 256, 32, (64, 256), 256,
    (128,), 256, 1, 2,
)  # fmt: skip


def bigbird(scale: Scale, heads: int) -> SparsityConfig:
    """The paper's: three random blocks, a window of three, two global ones."""
    return BigBirdSparsityConfig(heads, scale.block, False, 3, 3, 2)


def longformer(scale: Scale, heads: int) -> SparsityConfig:
    """A window of 256 tokens (four blocks) on each side, the first block global."""
    return BSLongformerSparsityConfig(heads, scale.block, False, 9)


def fixed(scale: Scale, heads: int) -> SparsityConfig:
    """Windows as wide as Longformer's, 512 tokens (eight blocks), the last block of each global."""
    return FixedSparsityConfig(heads, scale.block, num_local_blocks=8)


def bert(scale: Scale, size: str, implementation: str, pattern: SparsityConfig | None = None) -> Any:
    """BERT without dropout; positions are given to it anew for every length."""
    from transformers import BertConfig, BertModel

    layers, hidden, heads = scale.sizes[size]
    config = BertConfig(
        vocab_size=scale.vocab, num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads,
        intermediate_size=4 * hidden, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        attn_implementation=implementation, max_position_embeddings=64,
    )  # fmt: skip
    model = made(scale, lambda: BertModel(config, add_pooling_layer=False))
    return model if pattern is None else sparsify(model, pattern)


def made(scale: Scale, maker: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    with torch.device(scale.device):
        return maker().to(scale.dtype).train()


def set_length(model: Any, length: int) -> None:
    """A table of so many positions, drawn anew."""
    table_of = model.embeddings.position_embeddings
    weight, generator = table_of.weight, torch.Generator(table_of.weight.device).manual_seed(1)
    new = nn.Embedding(length, weight.shape[1], device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        new.weight.normal_(std=0.02, generator=generator)
    model.embeddings.position_embeddings = new


def tokens_of(scale: Scale, batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(5, scale.vocab, (batch, length), generator=generator).to(scale.device)


def hidden_of(model: Any, tokens: Tensor, **more: Any) -> Tensor:
    if type(model).__name__ == "BertModel":  # whose tables of these end at its old length
        more["position_ids"] = torch.arange(tokens.shape[1], device=tokens.device)[None]
        more["token_type_ids"] = torch.zeros_like(tokens)
    return model(input_ids=tokens, **more).last_hidden_state  # type: ignore[no-any-return]


def loss_of(model: Any, tokens: Tensor, **more: Any) -> Tensor:
    """Masked language modelling with the embedding as the head, at some positions."""
    hidden = hidden_of(model, tokens, **more).flatten(0, 1)
    step = max(1, len(hidden) // POSITIONS)
    logits = F.linear(hidden[::step], model.get_input_embeddings().weight)
    return F.cross_entropy(logits.float(), tokens.flatten()[::step])


@dataclass(frozen=True)
class Limits:
    """Of a part: its time, the time of a step in the search, and memory."""

    deadline: float
    trial_s: float
    cap_gb: float


class Steps:
    """Training steps on one batch."""

    def __init__(self, scale: Scale, model: Any, batch: int, length: int, **more: Any) -> None:
        self._model, self._tokens, self._more = model, tokens_of(scale, batch, length), more
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def allocate(self) -> None:
        """Make the optimizer allocate its state."""
        for param in self._model.parameters():
            param.grad = torch.zeros_like(param)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def __call__(self) -> None:
        """One more."""
        loss_of(self._model, self._tokens, **self._more).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def clear(model: Any, scale: Scale) -> None:
    model.zero_grad(set_to_none=True)
    gc.collect()
    if scale.device == "cuda":
        torch.cuda.empty_cache()


def check(scale: Scale, size: str) -> Row:
    """How far a sparse model's hidden states are from those of a dense one, with the pattern as its mask and without.

    Weights of attention are larger here than a fresh model's, whose attention hardly matters.
    """
    scale = replace(scale, dtype=torch.float32)
    heads, length = scale.sizes[size][2], scale.check_length
    pattern = bigbird(scale, heads)
    kept = pattern.layout(length).to_dense()[:1].repeat_interleave(scale.block, 1).repeat_interleave(scale.block, 2)
    mask = torch.zeros(1, 1, length, length, dtype=scale.dtype).masked_fill(~kept[None], torch.finfo(scale.dtype).min)
    found = []
    for its, more in ((pattern, {}), (None, {"attention_mask": mask.to(scale.device)}), (None, {})):
        model = bert(scale, size, "eager", its)
        set_length(model, length)
        with torch.no_grad():
            for name, param in model.named_parameters():
                if ".attention." in name and param.dim() == 2:
                    param.mul_(5.0)
            found.append(hidden_of(model, tokens_of(scale, 1, length), **more).double())
    masked, whole = (float((found[0] - other).norm() / other.norm()) for other in found[1:])
    if not (masked < TOLERANCE and masked < whole / 4):
        raise SystemExit(f"no figures: {size} is {masked:.1e} from dense with a mask, {whole:.1e} from it without")
    return {"masked": masked, "whole": whole}


def limit_memory(scale: Scale, cap_gb: float) -> None:
    if scale.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap_gb * 1e9 / total) if cap_gb else 1.0)


def attention_of(way: str, scale: Scale) -> AbstractContextManager[Any]:
    """With flash attention no other kernel may run, but memory-efficient attention, which stores no scores either."""
    if way == FLASH and scale.device == "cuda":
        context: AbstractContextManager[Any] = sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])
        return context
    return nullcontext()


def trial(scale: Scale, model: Any, length: int) -> tuple[float, float]:
    """Seconds of a step, and the peak of memory in GB. A short step runs twice, and the second one counts."""
    if scale.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    set_length(model, length)
    step = Steps(scale, model, 1, length)
    step.allocate()
    taken = 0.0
    for _ in range(2):
        synchronize(scale.device)
        start = time.perf_counter()
        step()
        synchronize(scale.device)
        taken = time.perf_counter() - start
        if taken > 3.0 and length > scale.start:  # the first length compiles kernels
            break
    return taken, torch.cuda.max_memory_reserved() / 1e9 if scale.device == "cuda" else 0.0


def longest(scale: Scale, size: str, way: str, limits: Limits) -> Row:
    """The longest sequence that fits, all lengths that fitted, and what ended the search."""
    is_sparse = way.startswith("sparse")
    pattern = bigbird(scale, scale.sizes[size][2]) if is_sparse else None
    model = bert(scale, size, "sdpa" if is_sparse or way == FLASH else "eager", pattern)
    if way.endswith("checkpointed"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    found: list[tuple[int, float, float]] = []  # length, seconds, GB
    fits, too_long, length, ended = 0, scale.most + 1, scale.start, "memory"
    with attention_of(way, scale):
        while length > fits and fits * 9 // 8 < too_long:
            if way == FLASH and fits and found[-1][1] * (length / fits) ** 2 > limits.trial_s:
                ended = "time of a step"
                break
            if time.time() > limits.deadline:
                ended = "budget"
                break
            try:
                found.append((length, *trial(scale, model, length)))
                fits = length
            except torch.OutOfMemoryError:
                too_long = length
            clear(model, scale)
            took = f"{found[-1][1]:.2f} s, {found[-1][2]:.1f} GB" if fits == length else "too long"
            print(f"{size}, {way}, {length} tokens: {took}", file=sys.stderr, flush=True)
            between = (fits + too_long) // 2 // scale.multiple * scale.multiple
            length = fits * 2 if 0 < fits * 2 < too_long else between
    row: Row = {"tokens": fits, "ended": ended, "trials": found, "by_memory": None}
    if fits * 2 > scale.most and too_long > scale.most:
        row["ended"] = "end of the search"
    if row["ended"] == "time of a step" and limits.cap_gb and len(found) > 1:
        (first, _, low), (second, _, high) = found[-2:]
        slope = (high - low) / (second - first)
        row["by_memory"] = int(second + (limits.cap_gb - high) / slope) if slope > 0.0 else None
    return row


def window_ms(scale: Scale, step: Callable[[], object], repeats: int) -> float:
    """Milliseconds a step of a window of steps, the host's part with them."""
    synchronize(scale.device)
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    synchronize(scale.device)
    return (time.perf_counter() - start) * 1e3 / repeats


def alternating(scale: Scale, steps: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Windows of each in turn. What fails in its first two steps is left out."""
    found: dict[str, list[float]] = {}
    for name, step in steps.items():
        try:
            step()
            step()
            found[name] = []
        except Exception:  # noqa: PERF203  # the others still get their times
            print(f"{name} fails:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            gc.collect()
    for _ in range(scale.windows):
        for name, times in found.items():
            times.append(window_ms(scale, steps[name], repeats))
    return found


def times_of(scale: Scale, size: str, limits: Limits) -> list[Row]:
    """Step times at each length, three ways; None where memory does not suffice."""
    models = {
        "eager": bert(scale, size, "eager"), "sdpa": bert(scale, size, "sdpa"),
        "sparse": bert(scale, size, "sdpa", bigbird(scale, scale.sizes[size][2])),
    }  # fmt: skip
    rows = []
    for length in scale.lengths:
        row: Row = {"tokens": length, "batch": scale.tokens // length}
        row["density"] = bigbird(scale, 1).layout(length).density
        for name, model in models.items():
            row[name] = None
            if time.time() > limits.deadline:
                continue
            set_length(model, length)
            found = alternating(scale, {name: Steps(scale, model, row["batch"], length)}, scale.repeats)
            row[name] = statistics.median(found[name]) if name in found else None
            clear(model, scale)
        rows.append(row)
        print(size, row, file=sys.stderr, flush=True)
    return rows


def measure_longest(scale: Scale, limits: Limits) -> None:
    row: Row = {}
    for size in scale.sizes:
        limit_memory(scale, 0.0)
        row[size] = {"error": check(scale, size), "longest": {}}
        limit_memory(scale, limits.cap_gb)
        for way in WAYS:
            gc.collect()
            try:
                row[size]["longest"][way] = longest(scale, size, way, limits)
            except Exception:  # the other ways are still worth a search
                print(f"{size}, {way} fails:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            report(row)


def measure_steps(scale: Scale, limits: Limits) -> None:
    row: Row = {}
    for size in scale.sizes:
        row[size] = times_of(scale, size, limits)
        report(row)


def peers_of(scale: Scale, rival: str) -> dict[str, Any]:
    """Models of base's shape by name. The first one is transformers' own."""
    from transformers import BigBirdConfig, BigBirdModel, LongformerConfig, LongformerModel

    layers, hidden, heads = scale.sizes["base"]
    window, most = 8 * scale.block, max(scale.peer_lengths) + 16
    shape: dict[str, Any] = {
        "vocab_size": scale.vocab, "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "intermediate_size": 4 * hidden, "max_position_embeddings": most, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    if rival == "longformer":
        wide = LongformerConfig(attention_window=window, **shape)
        return {
            "Longformer": made(scale, lambda: LongformerModel(wide, add_pooling_layer=False)),
            "sparse BERT, Longformer's pattern": bert(scale, "base", "sdpa", longformer(scale, heads)),
            "sparse BERT, Fixed": bert(scale, "base", "sdpa", fixed(scale, heads)),
            "dense BERT, sdpa": bert(scale, "base", "sdpa"),
        }
    random = BigBirdConfig(attention_type="block_sparse", block_size=scale.block, num_random_blocks=3, **shape)
    return {
        "BigBird": made(scale, lambda: BigBirdModel(random, add_pooling_layer=False)),
        "sparse BERT, BigBird's pattern": bert(scale, "base", "sdpa", bigbird(scale, heads)),
        "dense BERT, sdpa": bert(scale, "base", "sdpa"),
    }


def more_of(name: str, batch: int, length: int, scale: Scale) -> dict[str, Any]:
    """Longformer's global token is the first one."""
    if name != "Longformer":
        return {}
    mask = torch.zeros(batch, length, dtype=torch.long, device=scale.device)
    mask[:, 0] = 1
    return {"global_attention_mask": mask}


def measure_peers(scale: Scale, limits: Limits, rival: str) -> None:
    """Training steps and forwards of one sequence, at each length."""
    models = peers_of(scale, rival)
    row: Row = {"lengths": []}
    for length in scale.peer_lengths:
        if time.time() > limits.deadline:
            print(f"{rival}: no time for {length} tokens", file=sys.stderr, flush=True)
            break
        batch = max(1, scale.peer_tokens // length)
        for name, model in models.items():
            model.train()
            if "BERT" in name:
                set_length(model, length)
        steps: dict[str, Callable[[], object]] = {
            name: Steps(scale, model, batch, length, **more_of(name, batch, length, scale))
            for name, model in models.items()
        }
        found: Row = {"tokens": length, "batch": batch, "train_ms": alternating(scale, steps, scale.repeats)}
        steps.clear()
        for model in models.values():
            clear(model, scale)
            model.eval()
        with torch.no_grad():
            tokens = tokens_of(scale, 1, length)
            forwards: dict[str, Callable[[], object]] = {
                name: partial(hidden_of, model, tokens, **more_of(name, 1, length, scale))
                for name, model in models.items()
            }
            found["inference_ms"] = alternating(scale, forwards, 4 * scale.repeats)
        row["lengths"].append(found)
        print(rival, found, file=sys.stderr, flush=True)
        report(row)


def report(row: Row) -> None:
    """What is known so far. The parent takes the last line."""
    print("ROW " + json.dumps(row), flush=True)


def in_process(given: argparse.Namespace, part: str, budget: float) -> Row | None:
    """A part in a process of its own. What it had reported before a failure counts."""
    command = [sys.executable, __file__, "--cap", str(given.cap), "--trial", str(given.trial), "--part", part]
    command += ["--budget", str(budget), *(["--tiny"] if given.tiny else [])]
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    found = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if done.returncode:
        print(f"{part} failed with exit status {done.returncode}", file=sys.stderr, flush=True)
    row: Row | None = json.loads(found[-1].removeprefix("ROW ")) if found else None
    return row


def longest_lines(size: str, row: Row, cap_gb: float) -> list[str]:
    """What fits, and the times of a step at the lengths that both flash and sparse attention reached."""
    found = row["longest"]
    body = []
    for way, its in found.items():
        bases = [found.get(base, {"tokens": 0})["tokens"] for base in (DENSE, FLASH)]
        over = [its["tokens"] / base if base else None for base in bases]
        by_memory = f"{its['by_memory']:,}" if its["by_memory"] else ""
        cells = [way, f"{its['tokens']:,}", its["ended"], by_memory, *(shown(ratio) for ratio in over)]
        body.append(cells)
    heads = ["attention", "tokens", "limited by", f"would fit {cap_gb:g} GB (extrapolated)"]
    lines = table(f"{size}: longest sequence", [*heads, "over eager dense", "over dense flash"], body)
    if SPARSE in found and found.get(DENSE, {}).get("tokens"):
        ratio = found[SPARSE]["tokens"] / found[DENSE]["tokens"]
        lines += ["", f"Sparse with checkpointing over eager dense {ratio:.1f}, claimed {LONGER[size]:g}."]
    if found.get(SPARSE, {}).get("ended") == "memory" and found.get(FLASH, {}).get("by_memory"):
        ratio = found[SPARSE]["tokens"] / found[FLASH]["by_memory"]
        lines += ["", f"By memory alone, sparse over dense flash, both with checkpointing: {ratio:.2f}."]
    times = [{length: (s, gb) for length, s, gb in found.get(way, {"trials": []})["trials"]} for way in (FLASH, SPARSE)]
    body = []
    for length in sorted(times[0].keys() & times[1].keys()):
        (dense_s, dense_gb), (sparse_s, sparse_gb) = times[0][length], times[1][length]
        cells = [f"{length:,}", f"{dense_s:.3f}", f"{sparse_s:.3f}", f"{dense_s / sparse_s:.2f}"]
        body.append([*cells, f"{dense_gb:.1f}", f"{sparse_gb:.1f}"])
    heads = ["tokens", "dense flash, s", "sparse, s", "flash / sparse", "dense flash, GB", "sparse, GB"]
    return [*lines, *table(f"{size}: one step of one sequence, layers checkpointed", heads, body)]


def step_lines(size: str, rows: list[Row]) -> list[str]:
    body, best = [], 0.0
    for step in rows:
        ratios = [step[name] / step["sparse"] if step[name] and step["sparse"] else None for name in ("eager", "sdpa")]
        best = max(best, ratios[0] or 0.0)
        times = [shown(step[name], 1) for name in ("eager", "sdpa", "sparse")]
        first = [f"{step['tokens']:,}", str(step["batch"]), f"{step['density']:.3f}"]
        body.append([*first, *times, *(shown(ratio) for ratio in ratios)])
    heads = ["tokens", "sequences", "density", "eager, ms", "sdpa, ms", "sparse, ms", "eager / sparse", "sdpa / sparse"]
    lines = table(f"{size}: a training step", heads, body)
    return [*lines, "", f"Best over eager {best:.2f}, wanted >= {FASTER:g} at some length."]


def peer_lines(rival: str, row: Row) -> list[str]:
    """Times of other models: the median of the windows, the lowest and the highest."""
    lines: list[str] = []
    kinds = (
        ("train_ms", "a training step", PEERS_FASTER),
        ("inference_ms", "a forward of one sequence", INFERENCE_FASTER),
    )
    for kind, title, claimed in kinds:
        body = []
        for found in row["lengths"]:
            theirs = found[kind].get(rival)
            for name, times in found[kind].items():
                middle = statistics.median(times)
                cells = [f"{found['tokens']:,}", str(found["batch"] if kind == "train_ms" else 1), name]
                cells += [f"{middle:.2f} ({min(times):.2f} to {max(times):.2f})"]
                is_ours = theirs is not None and times is not theirs
                ratios = [a / b for a, b in zip(theirs or [], times, strict=False)]
                cells += [
                    f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if is_ours else ""
                ]
                body.append(cells)
        heads = ["tokens", "sequences", "model", "ms, median of windows (lowest to highest)", f"{rival}'s time / this"]
        lines += table(f"{rival}: {title}", heads, body)
        lines += ["", f"The article claims {claimed:g}, for sparse attention over Longformer."]
    return lines


def page(facts: Row, scale: Scale) -> str:
    """The result as Markdown, one JSON line last."""
    lines = [f"# BERT with sparse attention, {facts['date']}"]
    for part, row in facts["parts"].items():
        if row is None:
            lines += ["", f"`{part}` gave no result."]
        elif part in ("longest", "steps"):
            for size, its in row.items():
                lines += longest_lines(size, its, facts["cap_gb"]) if part == "longest" else step_lines(size, its)
        else:
            lines += peer_lines({"longformer": "Longformer", "bigbird": "BigBird"}[part], row)
    lines += ["", "## How it was measured", "", f"- `{facts['command']}`", *header()]
    lines += ["- weights, gradients and AdamW's state in " + str(scale.dtype).removeprefix("torch.")]
    lines += [f"- BigBird, block {scale.block}: 3 random, a window of 3, 2 global; loss at up to {POSITIONS} positions"]
    lines += [
        f"- Longformer: {4 * scale.block} tokens on each side, the first token global; its pattern in blocks: "
        f"4 blocks of {scale.block} on each side, the first block global; Fixed: windows of 8 blocks, one global"
    ]
    lines += [f"- `longest`: in {facts['cap_gb']:g} GB, one sequence; flash stops above {facts['trial_s']:g} s a step"]
    lines += [f"- `steps`: steps of {scale.tokens:,} tokens, not capped; other models: {scale.windows} alternating"]
    lines += [f"  windows of {scale.repeats} steps or {4 * scale.repeats} forwards"]
    return "\n".join([*lines, "", *to_json(facts)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, with commas between")
    parser.add_argument("--cap", type=float, default=32.0, help="GB of GPU memory that may be used")
    parser.add_argument("--trial", type=float, default=8.0, help="seconds that a step with flash attention may take")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds; what does not start in it is left out")
    parser.add_argument("--tiny", action="store_true", help="on the CPU")
    parser.add_argument("--save", action="store_true", help="write the result to a dated file")
    parser.add_argument("--save-to", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    scale = TINY if given.tiny else FULL
    if scale is FULL and not torch.cuda.is_available():
        raise SystemExit("needs CUDA but for --tiny")
    start = time.time()
    if given.part:
        limits = Limits(start + given.budget, given.trial, given.cap)
        if given.part in ("longest", "steps"):
            (measure_longest if given.part == "longest" else measure_steps)(scale, limits)
        else:
            measure_peers(scale, limits, given.part)
        return
    facts: Row = {"date": datetime.date.today().isoformat(), "cap_gb": given.cap, "trial_s": given.trial, "parts": {}}
    facts["command"] = f"python benchmarks/sparse_bert.py --only {given.only}"
    for part in parts_of(given.only, PARTS):
        begin = time.time()
        facts["parts"][part] = in_process(given, part, start + given.budget - begin)
        print(f"{part}: {time.time() - begin:.0f} s", file=sys.stderr, flush=True)
    text = page(facts, scale)
    print(text)
    if given.save:
        name = "sparse-bert" if given.only == ",".join(PARTS) else f"sparse-bert-{given.only.replace(',', '-')}"
        save(text, f"{facts['date']}-{name}", given.save_to)


if __name__ == "__main__":
    main()
