# SPDX-License-Identifier: Apache-2.0
"""What sparse attention costs in quality: small GPTs trained alike, dense and sparse.

Parts (`--only`): `text`, the standard library's source in bytes, with dense, fixed and BigBird attention, the same
start and the same batches; `copy`, a key at the start of a sequence that must be given back thousands of tokens later,
with a window alone and with a window and global blocks; `continue`, a dense model of short sequences that goes on with
longer ones, its positions repeated, dense or sparse. Weights and AdamW in fp32, bf16 autocast. Before all that, a model
with every block kept must have the dense model's loss, and no token may see a later one. Prints the machine, tables and
one JSON line; `--save` writes a dated file in benchmarks/results. `--tiny` shows on the CPU that the script works,
nothing more.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from sparse_common import Row, header, parts_of, save, synchronize, table, to_json
from torch import Tensor

from twinflow.attention import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    sparsify,
)
from twinflow.data.tokens import TokenData, load_data
from twinflow.loss import IGNORE_INDEX
from twinflow.models.gpt import GPT, GPTConfig, count_params

PARTS = ("text", "copy", "continue")
MOST_WORSE = 0.03  # of dense attention's loss
CAUSAL = "unidirectional"
# Of the copy task: slots of a key, symbols of a slot, others, and questions at the end.
NUM_SLOTS, NUM_SYMBOLS, NUM_FILLERS, NUM_QUESTIONS = 8, 16, 32, 48
COPY_VOCAB = NUM_SLOTS * NUM_SYMBOLS + NUM_FILLERS + NUM_SLOTS

Batch = tuple[Tensor, Tensor]  # tokens, targets


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    device: str
    shape: GPTConfig  # of `text` and `continue`
    tokens: int  # of a step
    steps: int
    block: int
    num_valid: int  # batches
    copy_shape: GPTConfig
    copy_batch: int
    copy_steps: int
    distance: int
    copy_block: int
    short: int  # context of the model that goes on
    longer: int
    short_steps: int
    more_steps: int


FULL = Scale(
    "cuda", GPTConfig(256, 4096, num_layers=8, hidden=384, num_heads=6), 32768, 1000, 64, 8,
    GPTConfig(COPY_VOCAB, 3072, num_layers=2, hidden=128, num_heads=2), 32, 300, 3000, 16, 512, 2048, 400, 200,
)  # fmt: skip
TINY = Scale(
    "cpu", GPTConfig(256, 256, num_layers=2, hidden=64, num_heads=2), 256, 3, 16, 1,
    GPTConfig(COPY_VOCAB, 256, num_layers=2, hidden=64, num_heads=2), 4, 6, 200, 16, 64, 256, 3, 3,
)  # fmt: skip


def fixed(heads: int, block: int) -> SparsityConfig:
    """Windows of eight blocks; heads take turns with which of a window's blocks all later ones see."""
    different = min(4, heads)
    return FixedSparsityConfig(heads, block, different > 1, 8, 1, CAUSAL, False, different)


def bigbird(heads: int, block: int) -> SparsityConfig:
    """Four blocks back, two random ones, and the first two."""
    return BigBirdSparsityConfig(heads, block, False, 2, 9, 2, CAUSAL)


def window(heads: int, block: int) -> SparsityConfig:
    """Four blocks back."""
    return LocalSlidingWindowSparsityConfig(heads, block, 9)


def window_and_global(heads: int, block: int) -> SparsityConfig:
    """Four blocks back, and the first one."""
    return BSLongformerSparsityConfig(heads, block, False, 9, (0,), None, CAUSAL)


def build(scale: Scale, shape: GPTConfig, pattern: SparsityConfig | None) -> GPT:
    torch.manual_seed(0)
    with torch.device(scale.device):
        model = GPT(shape)
    return model if pattern is None else sparsify(model, pattern)


def share(shape: GPTConfig, pattern: SparsityConfig | None) -> float:
    """Blocks kept, of those that causal attention has."""
    if pattern is None:
        return 1.0
    num = -(-shape.context // pattern.block)
    return pattern.layout(shape.context).density * num * num / (num * (num + 1) / 2)


def patterns(scale: Scale) -> dict[str, SparsityConfig | None]:
    """Of `text` and `continue`."""
    heads = scale.shape.num_heads
    return {"dense": None, "fixed": fixed(heads, scale.block), "bigbird": bigbird(heads, scale.block)}


def autocast(scale: Scale) -> Any:
    return torch.autocast("cuda", torch.bfloat16) if scale.device == "cuda" else contextlib.nullcontext()


def train(scale: Scale, model: GPT, batch_of: Callable[[int], Batch], steps: int, lr: float = 1e-3) -> float:
    """AdamW with a short warm-up and a cosine; gives seconds a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), fused=True)
    model.train()
    begin = 0.0
    for step in range(steps):
        if step == min(5, steps - 1):  # kernels are compiled before
            synchronize(scale.device)
            begin = time.perf_counter()
        warm, done = min(1.0, (step + 1) / max(1, steps // 20)), step / steps
        for group in optimizer.param_groups:
            group["lr"] = lr * warm * (0.1 + 0.45 * (1.0 + math.cos(math.pi * done)))
        tokens, targets = batch_of(step)
        with autocast(scale):
            loss = model(tokens, targets).loss
        assert loss is not None
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    synchronize(scale.device)
    return (time.perf_counter() - begin) / max(1, steps - min(5, steps - 1))


def text_batches(scale: Scale, data: TokenData, context: int, start: int = 0) -> Callable[[int], Batch]:
    def batch_of(step: int) -> Batch:
        tokens, targets = data.batch("train", start + step, max(1, scale.tokens // context), context)
        return tokens.to(scale.device, non_blocking=True), targets.to(scale.device, non_blocking=True)

    return batch_of


@torch.no_grad()
def valid_loss(scale: Scale, model: GPT, data: TokenData, context: int) -> float:
    """In nats a byte, on the same batches for all."""
    model.eval()
    losses = []
    for index in range(scale.num_valid):
        tokens, targets = data.batch("valid", index, max(1, scale.tokens // context), context)
        with autocast(scale):
            loss = model(tokens.to(scale.device), targets.to(scale.device)).loss
        assert loss is not None
        losses.append(float(loss))
    return sum(losses) / len(losses)


@torch.no_grad()
def check(scale: Scale, data: TokenData) -> Row:
    """Every block kept: the dense loss. A later token changed: no earlier logit changes."""
    tokens, targets = text_batches(scale, data, scale.shape.context)(0)
    losses, leak = [], 0.0
    kinds = patterns(scale)
    every = DenseSparsityConfig(scale.shape.num_heads, scale.block)
    for pattern in (kinds.pop("dense"), every, *kinds.values()):
        model = build(scale, scale.shape, pattern).eval()
        with autocast(scale):
            loss = model(tokens[:1], targets[:1]).loss
            half = scale.shape.context // 2 + 5
            changed = tokens[:1].clone()
            changed[:, half:] = 255 - changed[:, half:]
            before, after = (model(x).logits for x in (tokens[:1], changed))
        assert loss is not None
        assert before is not None
        assert after is not None
        losses.append(float(loss))
        change = (before - after).abs()
        leak = max(leak, float(change[:, :half].max() / change[:, half:].max()))
    apart = abs(losses[1] / losses[0] - 1.0)
    if apart > 1e-3 or leak > 0.0:
        raise SystemExit(
            f"no figures: losses are {apart:.1e} apart, a later token changes earlier logits by {leak:.1e}"
        )
    return {"apart": apart, "leak": leak}


def measure_text(scale: Scale, data: TokenData) -> list[Row]:
    rows: list[Row] = []
    for name, pattern in patterns(scale).items():
        model = build(scale, scale.shape, pattern)
        step_s = train(scale, model, text_batches(scale, data, scale.shape.context), scale.steps)
        loss = valid_loss(scale, model, data, scale.shape.context)
        kept = share(scale.shape, pattern)
        rows.append({"attention": name, "kept": kept, "loss": loss, "step_ms": step_s * 1e3})
        print(rows[-1], file=sys.stderr)
    return rows


def copy_batches(scale: Scale, first_seed: int) -> Callable[[int], Batch]:
    """A key at the start, one symbol for each slot, twice; then fillers; `distance` later, questions for slots.

    Each slot has symbols of its own. Wanted is the asked slot's symbol, and nothing elsewhere.
    """
    batch, context = scale.copy_batch, scale.copy_shape.context

    def batch_of(step: int) -> Batch:
        generator = torch.Generator(scale.device).manual_seed(first_seed + step)

        def drawn(high: int, width: int) -> Tensor:
            return torch.randint(0, high, (batch, width), device=scale.device, generator=generator)

        key = drawn(NUM_SYMBOLS, NUM_SLOTS) + torch.arange(NUM_SLOTS, device=scale.device) * NUM_SYMBOLS
        tokens = drawn(NUM_FILLERS, context) + NUM_SLOTS * NUM_SYMBOLS
        tokens[:, : 2 * NUM_SLOTS] = key.repeat(1, 2)
        asked = drawn(NUM_SLOTS, NUM_QUESTIONS)
        here = slice(scale.distance, scale.distance + NUM_QUESTIONS)
        tokens[:, here] = asked + NUM_SLOTS * NUM_SYMBOLS + NUM_FILLERS
        targets = torch.full_like(tokens, IGNORE_INDEX)
        targets[:, here] = key.gather(1, asked)
        return tokens, targets

    return batch_of


def measure_copy(scale: Scale, data: TokenData) -> list[Row]:
    rows: list[Row] = []
    heads, block = scale.copy_shape.num_heads, scale.copy_block
    kinds = {"window": window(heads, block), "window and global": window_and_global(heads, block)}
    for name, pattern in kinds.items():
        model = build(scale, scale.copy_shape, pattern)
        step_s = train(scale, model, copy_batches(scale, 0), scale.copy_steps, lr=3e-3)
        tokens, targets = copy_batches(scale, 1 << 20)(0)
        with torch.no_grad(), autocast(scale):
            logits = model.eval()(tokens).logits
        assert logits is not None
        counted = targets != IGNORE_INDEX
        right = float((logits.argmax(-1) == targets)[counted].float().mean())
        kept = share(scale.copy_shape, pattern)
        rows.append({"attention": name, "kept": kept, "accuracy": right, "step_ms": step_s * 1e3})
        print(rows[-1], file=sys.stderr)
    return rows


def longer_model(scale: Scale, short: GPT, pattern: SparsityConfig | None) -> GPT:
    """The same weights for longer sequences, the table of positions repeated."""
    model = build(scale, replace(scale.shape, context=scale.longer), pattern)
    state = short.state_dict()
    name = "position_embedding.weight"
    state[name] = state[name].repeat(scale.longer // scale.short, 1)
    model.load_state_dict(state)
    return model


def measure_continue(scale: Scale, data: TokenData) -> list[Row]:
    """Losses at once and after some steps."""
    short = build(scale, replace(scale.shape, context=scale.short), None)
    train(scale, short, text_batches(scale, data, scale.short), scale.short_steps)
    before = valid_loss(scale, short, data, scale.short)
    rows: list[Row] = [{"attention": f"dense, {scale.short} tokens", "kept": 1.0, "at_once": before, "later": None}]
    for name, pattern in patterns(scale).items():
        model = longer_model(scale, short, pattern)
        at_once = valid_loss(scale, model, data, scale.longer)
        batches = text_batches(scale, data, scale.longer, scale.short_steps)
        step_s = train(scale, model, batches, scale.more_steps, lr=3e-4)
        row: Row = {"attention": f"{name}, {scale.longer} tokens", "at_once": at_once, "step_ms": step_s * 1e3}
        row["later"] = valid_loss(scale, model, data, scale.longer)
        rows.append({**row, "kept": share(model.config, pattern)})
        print(rows[-1], file=sys.stderr)
    return rows


MEASURES: dict[str, Callable[[Scale, TokenData], list[Row]]] = {
    "text": measure_text, "copy": measure_copy, "continue": measure_continue,
}  # fmt: skip


def text_lines(scale: Scale, rows: list[Row]) -> list[str]:
    dense = rows[0]["loss"]
    body = []
    for row in rows:
        cells = [row["attention"], f"{row['kept']:.3f}", f"{row['step_ms']:.1f}", f"{row['loss']:.4f}"]
        body.append([*cells, f"{row['loss'] / dense - 1.0:+.2%}"])
    title = f"Text: {scale.shape.context:,} tokens, {scale.steps} steps of {scale.tokens:,}"
    lines = table(title, ["attention", "kept of causal", "step, ms", "loss, nats a byte", "over dense"], body)
    return [*lines, "", f"Wanted: at most {MOST_WORSE:+.0%} over dense."]


def copy_lines(scale: Scale, rows: list[Row]) -> list[str]:
    body = [[row["attention"], f"{row['kept']:.3f}", f"{row['step_ms']:.1f}", f"{row['accuracy']:.1%}"] for row in rows]
    title = f"A key of {NUM_SLOTS} symbols, given back {scale.distance:,} tokens later, {scale.copy_steps} steps"
    lines = table(title, ["attention", "kept of causal", "step, ms", "right"], body)
    reach = scale.copy_shape.num_layers * 5 * scale.copy_block
    return [*lines, "", f"By chance {1 / NUM_SYMBOLS:.1%} are right. All windows together reach {reach} tokens back."]


def continue_lines(scale: Scale, rows: list[Row]) -> list[str]:
    dense = next((row["later"] for row in rows if row["later"] is not None), 1.0)
    body = []
    for row in rows:
        cells = [row["attention"], f"{row['kept']:.3f}", f"{row['at_once']:.4f}"]
        later = row["later"]
        body.append([*cells, *(["", ""] if later is None else [f"{later:.4f}", f"{later / dense - 1.0:+.2%}"])])
    title = f"Going on from {scale.short} to {scale.longer:,} tokens, {scale.more_steps} steps more"
    return table(title, ["attention", "kept of causal", "loss at once", "loss later", "over dense"], body)


def page(scale: Scale, facts: Row) -> str:
    """The result as Markdown, one JSON line last."""
    lines = [f"# Quality with sparse attention, {facts['date']}", "", *header(), f"- {facts['data']}"]
    lines += [
        f"- {count_params(scale.shape) / 1e6:.1f} M parameters, {count_params(scale.copy_shape) / 1e6:.1f} M to copy"
    ]
    lines += [f"- fixed: windows of 8 blocks of {scale.block}, heads with up to 4 choices of a global block each;"]
    lines += ["  bigbird: 4 blocks back, 2 random, 2 global; all exact to the token"]
    for part, writer in (("text", text_lines), ("copy", copy_lines), ("continue", continue_lines)):
        if part in facts["parts"]:
            lines += writer(scale, facts["parts"][part])
    return "\n".join([*lines, "", *to_json(facts)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, with commas between")
    parser.add_argument("--steps", type=int, help="of `text`")
    parser.add_argument("--tiny", action="store_true", help="on the CPU")
    parser.add_argument("--save", action="store_true", help="write the result to a dated file")
    given = parser.parse_args()
    scale, parts = TINY if given.tiny else FULL, parts_of(given.only, PARTS)
    scale = replace(scale, steps=given.steps or scale.steps)
    if scale.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("needs CUDA but for --tiny")
    data = load_data("stdlib")
    facts: Row = {"date": datetime.date.today().isoformat(), "data": data.describe(), "check": check(scale, data)}
    facts["parts"] = {}
    for part in parts:
        start = time.perf_counter()
        facts["parts"][part] = MEASURES[part](scale, data)
        print(f"{part}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    text = page(scale, facts)
    print(text)
    if given.save:
        save(text, f"{facts['date']}-sparse-quality")


if __name__ == "__main__":
    main()
