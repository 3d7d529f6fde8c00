# SPDX-License-Identifier: Apache-2.0
"""Does a model with sparse attention end where the same model with dense attention ends, also far across a sequence?

    python benchmarks/sparse_convergence.py --save         # 7 kinds of attention, 3 seeds: needs CUDA and transformers
    python benchmarks/sparse_convergence.py --tiny         # shows on any machine that the script works, nothing more
    python benchmarks/sparse_convergence.py --plot FILE    # draws the curves of a saved JSON file again

Trains small BERTs from scratch on sequences that ask two things. Text: a hidden Markov chain, whose state is the topic
and changes after 64 symbols on average; a quarter of the symbols is masked, and the symbols around a masked one tell
its topic. The lowest possible loss is known exactly, by the forward-backward algorithm, so a run that ends near it has
converged. Recall: facts at random places in the first quarter of a sequence, each a token that names a slot and its
value, and questions in the last quarter that name a slot. A fact is at least half a sequence away from its question,
further than all windows of all layers together reach. Training begins with short sequences, because attention over
thousands of tokens learns very slowly from nothing, and ends with long ones. Short sequences lie at random positions.

Attention is dense, each sparse pattern of twinflow, or Longformer as transformers implements it, with the same window
and the same global tokens as BSLongformer. A seed sets the initial weights and the data; sequences never repeat. All
runs have the same steps and learning rate, which were chosen for dense attention. Runs are processes that share the
GPU, so their times mean nothing. Prints tables and one JSON line; `--save` writes them, the curves and a picture.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import math
import multiprocessing
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sparse_common import Row, table
from torch import Tensor
from twin_flow_plot import STYLE, text

from twinflow.attention import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
    sparsify,
)
from twinflow.bench.machine import describe, read_machine, version_of
from twinflow.loss import IGNORE_INDEX
from twinflow.monitor.plot import tick_text, ticks

CUDA = torch.cuda.is_available()
LONGFORMER = "Longformer (transformers)"
WAYS = ("dense", "fixed", "variable", "bigbird", "bslongformer", "local", LONGFORMER)
COLORS = ("#0f172a", "#2563eb", "#0f766e", "#7c3aed", "#ea580c", "#94a3b8", "#be185d")
POINTS = 60  # of a curve
NUM_SYMBOLS, NUM_SLOTS, NUM_VALUES = 64, 8, 16
EVERY = 4  # one of so many symbols is masked
NUM_TOPICS, SWITCH = 16, 1 / 64  # the probability that a new topic is drawn
GRAIN = 4096  # probabilities of symbols are multiples of one over this
# Tokens. 0 and 1 pad in BERT and Longformer, and are not used.
MASK, SUMMARY, FIRST_SYMBOL = 2, 3, 4
FIRST_FACT = FIRST_SYMBOL + NUM_SYMBOLS
FIRST_QUESTION = FIRST_FACT + NUM_SLOTS * NUM_VALUES
VOCAB = FIRST_QUESTION + NUM_SLOTS
FIRST_POSITION = 2  # Longformer's first position; the position of padding comes before


@dataclasses.dataclass(frozen=True)
class Scale:
    """How large everything is."""

    layers: int
    hidden: int
    heads: int
    length: int
    block: int
    batch: int  # sequences of full length in a step; a step has the same number of tokens at each length
    steps: int
    seeds: int
    valid: int  # sequences
    lr: float
    processes: int


FULL = Scale(4, 256, 4, 2048, 16, 4, 1200, 3, 64, 1e-3, 12)
TINY = Scale(2, 32, 2, 256, 16, 1, 6, 1, 2, 1e-3, 1)
# Share of the steps, and by what the length is divided.
STAGES = ((0.3, 16), (0.2, 4), (0.5, 1))


def pattern_of(way: str, scale: Scale) -> SparsityConfig | None:
    """Windows of four blocks on each side, or of eight adjacent blocks; the first block is global where one is."""
    heads, block = scale.heads, scale.block
    if way == "fixed":
        return FixedSparsityConfig(heads, block, num_local_blocks=8)
    if way == "variable":
        return VariableSparsityConfig(
            heads, block, num_random_blocks=1, local_window_blocks=(4, 8), horizontal_global_attention=True
        )
    if way == "bigbird":
        return BigBirdSparsityConfig(heads, block, num_sliding_window_blocks=9)
    if way == "bslongformer":
        return BSLongformerSparsityConfig(heads, block, num_sliding_window_blocks=9)
    if way == "local":
        return LocalSlidingWindowSparsityConfig(heads, block, 9, "bidirectional")
    return None


def density(way: str, scale: Scale) -> float:
    """Share of the scores that are computed."""
    pattern = pattern_of(way, scale)
    if pattern is not None:
        return pattern.layout(scale.length).density
    # Longformer computes a window of 8 blocks, and the first block as rows and columns.
    return (10 * scale.block + 1) / scale.length if way == LONGFORMER else 1.0


def build(way: str, scale: Scale, device: str) -> Any:
    from transformers import BertConfig, BertModel, LongformerConfig, LongformerModel

    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "num_hidden_layers": scale.layers,
        "hidden_size": scale.hidden,
        "num_attention_heads": scale.heads,
        "intermediate_size": 4 * scale.hidden,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": scale.length + FIRST_POSITION,
        "initializer_range": scale.hidden**-0.5,
    }
    if way == LONGFORMER:
        config = LongformerConfig(attention_window=8 * scale.block, **shape)
        model = LongformerModel(config, add_pooling_layer=False)
    else:
        model = BertModel(BertConfig(attn_implementation="sdpa", **shape), add_pooling_layer=False)
    with torch.no_grad():
        places = model.embeddings.position_embeddings.weight[FIRST_POSITION:]
        places.copy_(sinusoids(*places.shape))
        for layer in model.encoder.layer:  # similar inputs, such as neighbours, attend to each other from the start
            its = layer.attention.self
            its.key.weight.copy_(its.query.weight)
            if way == LONGFORMER:
                its.key_global.weight.copy_(its.query_global.weight)
    model = model.to(device).train()
    pattern = pattern_of(way, scale)
    return model if pattern is None else sparsify(model, pattern)


def sinusoids(length: int, width: int) -> Tensor:
    """Initial positions of every model. With random ones, all of them learn slowly what a neighbour is."""
    rates = 1000.0 ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(length)[:, None] * rates
    return math.sqrt(2.0 / width) * torch.cat([angles.sin(), angles.cos()], dim=1)


def vocabulary(device: str) -> tuple[Tensor, Tensor]:
    """Symbols of each topic [topic, GRAIN], from which one is drawn, and their probabilities [topic, symbol]."""
    generator = torch.Generator().manual_seed(1)
    chances = torch.softmax(2.5 * torch.randn(NUM_TOPICS, NUM_SYMBOLS, generator=generator), dim=1)
    places = ((torch.arange(GRAIN) + 0.5) / GRAIN).repeat(NUM_TOPICS, 1)
    symbols = torch.searchsorted(chances.cumsum(1), places).clamp(max=NUM_SYMBOLS - 1)
    counts = F.one_hot(symbols, NUM_SYMBOLS).sum(1)
    return symbols.to(device), (counts / GRAIN).to(device)


def lengths_of(scale: Scale) -> list[int]:
    """The length of each step's sequences."""
    least = 8 * scale.block  # Longformer's window
    ends = [round(scale.steps * sum(share for share, _ in STAGES[: i + 1])) for i in range(len(STAGES))]
    by_stage = [max(least, scale.length // parts) for _, parts in STAGES]
    return [next(its for its, end in zip(by_stage, ends, strict=True) if step < end) for step in range(scale.steps)]


def batches(scale: Scale, seed: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and targets of each step."""
    for length, steps in Counter(lengths_of(scale)).items():
        batch = scale.batch * scale.length // length
        tokens, targets = sequences(batch * steps, length, 10000 * seed + length, scale, device)
        yield from zip(tokens.split(batch), targets.split(batch), strict=True)


def sequences(num: int, length: int, seed: int, scale: Scale, device: str) -> tuple[Tensor, Tensor]:
    """Tokens and targets [num, length]."""
    generator = torch.Generator(device).manual_seed(seed)
    num_questions = length // 16
    start = scale.block  # the first block has summary tokens, which are global in some patterns

    def drawn(high: int, width: int) -> Tensor:
        return torch.randint(0, high, (num, width), device=device, generator=generator)

    segment = (torch.rand(num, length, device=device, generator=generator) < SWITCH).cumsum(1)
    topic = drawn(NUM_TOPICS, length + 1).gather(1, segment)
    symbols = vocabulary(device)[0].flatten()[topic * GRAIN + drawn(GRAIN, length)]
    is_symbol = torch.ones_like(symbols, dtype=torch.bool)
    is_symbol[:, :start] = False

    def places(low: int, high: int, count: int) -> Tensor:
        return low + torch.rand(num, high - low, device=device, generator=generator).topk(count).indices

    slots = torch.arange(NUM_SLOTS, device=device)
    facts = FIRST_FACT + slots * NUM_VALUES + drawn(NUM_VALUES, NUM_SLOTS)
    asked = drawn(NUM_SLOTS, num_questions)
    fact_places = places(start, length // 4, NUM_SLOTS)
    question_places = places(length * 3 // 4, length, num_questions)
    is_symbol.scatter_(1, fact_places, False).scatter_(1, question_places, False)
    is_masked = ((torch.arange(length, device=device) + drawn(EVERY, 1)) % EVERY == 0) & is_symbol
    tokens = symbols + FIRST_SYMBOL
    targets = torch.where(is_masked, tokens, IGNORE_INDEX)
    tokens = tokens.masked_fill(is_masked, MASK)
    tokens[:, :start] = SUMMARY
    tokens.scatter_(1, fact_places, facts).scatter_(1, question_places, FIRST_QUESTION + asked)
    targets.scatter_(1, question_places, facts.gather(1, asked))
    return tokens, targets


def lowest_loss(tokens: Tensor, targets: Tensor) -> float:
    """The loss of the best possible prediction of masked symbols, by the forward-backward algorithm."""
    chances = vocabulary(str(tokens.device))[1].double()
    symbols = tokens - FIRST_SYMBOL
    is_seen = (symbols >= 0) & (symbols < NUM_SYMBOLS)
    seen = torch.where(is_seen[..., None], chances.T[symbols.clamp(0, NUM_SYMBOLS - 1)], 1.0)  # [num, length, topic]

    def beliefs(places: Sequence[int]) -> Tensor:
        """Probabilities of the topic at each place from what is seen before it, in the order of `places`."""
        belief = torch.full_like(seen[:, 0], 1.0 / NUM_TOPICS)
        found = torch.empty_like(seen)
        for place in places:
            belief = (1.0 - SWITCH) * belief + SWITCH / NUM_TOPICS
            found[:, place] = belief
            belief = belief * seen[:, place]
            belief = belief / belief.sum(1, keepdim=True)
        return found

    length = tokens.shape[1]
    topic = beliefs(range(length)) * beliefs(range(length - 1, -1, -1))
    is_asked = (targets >= FIRST_SYMBOL) & (targets < FIRST_FACT)
    topic = topic[is_asked]
    chance = (topic * chances.T[targets[is_asked] - FIRST_SYMBOL]).sum(1) / topic.sum(1)
    return float(-chance.log().mean())


def outputs(model: Any, tokens: Tensor, scale: Scale) -> Tensor:
    """Logits [tokens, vocabulary]. Each sequence starts at a random position from which it does not pass the last."""
    num, length = tokens.shape
    start = torch.randint(0, scale.length - length + 1, (num, 1), device=tokens.device)
    more = {"position_ids": FIRST_POSITION + start + torch.arange(length, device=tokens.device)}
    if type(model).__name__ == "LongformerModel":
        more["global_attention_mask"] = torch.zeros_like(tokens)
        more["global_attention_mask"][:, : scale.block] = 1
    hidden = model(input_ids=tokens, **more).last_hidden_state
    return F.linear(hidden, model.get_input_embeddings().weight).flatten(0, 1)


def losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of masked symbols, loss of answers, and the share of right answers."""
    targets = targets.flatten()
    is_answer = targets >= FIRST_FACT
    each = F.cross_entropy(logits.float(), targets, ignore_index=IGNORE_INDEX, reduction="none")
    num_answers = is_answer.sum()
    num_symbols = (targets != IGNORE_INDEX).sum() - num_answers
    answers = (each * is_answer).sum() / num_answers
    right = ((logits.argmax(-1) == targets) & is_answer).sum() / num_answers
    return (each * ~is_answer).sum() / num_symbols, answers, right


def autocast() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cuda", torch.bfloat16) if CUDA else contextlib.nullcontext()


def learning_rate(step: int, scale: Scale) -> float:
    """Warm-up, then constant, and from half of the steps on linearly down to a tenth."""
    done = step / scale.steps
    return scale.lr * min(1.0, (step + 1) / max(1, scale.steps // 20)) * min(1.0, 1.0 - 1.8 * (done - 0.5))


def train(way: str, seed: int, scale: Scale, deadline: float) -> Row:
    """One run. Gives its curve and its results on new sequences, or the step at which time was up."""
    torch.set_num_threads(1)
    device = "cuda" if CUDA else "cpu"
    row: Row = {"way": way, "seed": seed, "lr": scale.lr, "curve": [], "done": False}
    if time.time() > deadline:
        return {**row, "why": "not started"}
    torch.manual_seed(seed)
    model = build(way, scale, device)
    row["numel"] = sum(param.numel() for param in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=scale.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=CUDA)
    every = max(1, scale.steps // POINTS)
    since: list[Tensor] = []
    for step, (tokens, targets) in enumerate(batches(scale, 1 + seed, device)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, scale)
        with autocast():
            logits = outputs(model, tokens, scale)
        symbols, answers, right = losses(logits, targets)
        (symbols + answers).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        since.append(torch.stack([symbols.detach(), answers.detach(), right]))
        if len(since) == every:
            row["curve"].append([step + 1, *torch.stack(since).mean(0).tolist()])
            since = []
            if len(row["curve"]) % 15 == 0:
                _, its_text, _, its_right = row["curve"][-1]
                print(f"{way}, seed {seed}, step {step + 1}: text {its_text:.3f}, {its_right:.0%} right", flush=True)
            if time.time() > deadline and step + 1 < scale.steps:
                return {**row, "why": f"stopped at step {step + 1}"}
    row |= validate(model, scale, device)
    return {**row, "done": True}


@torch.no_grad()
def validate(model: Any, scale: Scale, device: str) -> Row:
    """Results on the same new sequences for every run."""
    model.eval()
    tokens, targets = sequences(scale.valid, scale.length, 1, scale, device)
    floor = lowest_loss(tokens, targets)
    found = []
    for some, wanted in zip(tokens.split(scale.batch), targets.split(scale.batch), strict=True):
        with autocast():
            logits = outputs(model, some, scale)
        found.append(torch.stack(losses(logits, wanted)))
    symbols, answers, right = torch.stack(found).mean(0).tolist()
    return {"text": symbols, "floor": floor, "answers": answers, "right": right}


def attempt(way: str, seed: int, scale: Scale, deadline: float) -> Row:
    """A run whose failure does not end the others."""
    try:
        return train(way, seed, scale, deadline)
    except Exception:
        return {"way": way, "seed": seed, "lr": scale.lr, "done": False, "curve": [], "why": traceback.format_exc()}


def train_all(scale: Scale, ways: Sequence[str], rates: Sequence[float], budget: float) -> list[Row]:
    deadline = time.time() + budget - 10.0
    # Longformer's steps are the longest, so its runs start first.
    jobs = [(way, seed) for way in ways if way == LONGFORMER for seed in range(scale.seeds)]
    jobs += [(way, seed) for seed in range(scale.seeds) for way in ways if way != LONGFORMER]
    cases = [(*job, dataclasses.replace(scale, lr=rate)) for job in jobs for rate in rates]
    start = time.time()
    found = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(cases), scale.processes), mp_context=context) as pool:
        pending = {pool.submit(attempt, *case, deadline): case for case in cases}
        for run in as_completed(pending):
            try:
                row = run.result()
            except Exception as error:  # a process died, and the pool with it
                way, seed, its = pending[run]
                row = {"way": way, "seed": seed, "lr": its.lr, "done": False, "curve": [], "why": repr(error)}
            found.append(row)
            ends = f"text {row['text']:.4f}, {row['right']:.1%} right" if row["done"] else row["why"]
            label = f"{row['way']}, seed {row['seed']}, learning rate {row['lr']:g}"
            print(f"{time.time() - start:4.0f} s: {label}: {ends}", flush=True)
    return sorted(found, key=lambda row: (WAYS.index(row["way"]), row["lr"], row["seed"]))


def last_fifth(curve: Sequence[Sequence[float]], column: int) -> float:
    """Change of a curve over its last fifth: slope of the least-squares line, times the steps of that fifth."""
    tail = [(point[0], point[column]) for point in curve[-max(2, len(curve) // 5) :]]
    if len(tail) < 2:
        return math.nan
    return statistics.linear_regression(*zip(*tail, strict=True)).slope * (tail[-1][0] - tail[0][0])


def spread(values: Sequence[float], form: str = ".4f") -> str:
    """The mean, and the lowest and the highest."""
    low, mean, high = (format(value, form) for value in (min(values), statistics.mean(values), max(values)))
    return f"{mean} ({low} to {high})"


def best_rate(runs: Sequence[Row]) -> list[Row]:
    """The runs with the learning rate whose mean loss of text and answers is lowest."""
    by_rate: dict[float, list[Row]] = {}
    for run in runs:
        by_rate.setdefault(run["lr"], []).append(run)
    return min(by_rate.values(), key=lambda some: statistics.mean(run["text"] + run["answers"] for run in some))


def result_rows(runs: Sequence[Row], scale: Scale) -> list[list[str]]:
    rows = []
    for way in dict.fromkeys(run["way"] for run in runs):
        done = [run for run in runs if run["way"] == way and run["done"]]
        if not done:
            continue
        best = best_rate(done)
        rows.append(
            [
                way,
                f"{density(way, scale):.3f}",
                f"{best[0]['numel'] / 1e6:.2f}",
                str(len(best)),
                spread([run["text"] for run in best]),
                f"{statistics.mean(run['text'] - run['floor'] for run in best):+.4f}",
                spread([run["right"] for run in best], ".1%"),
                f"{statistics.mean(last_fifth(run['curve'], 1) for run in best):+.4f}",
                f"{statistics.mean(last_fifth(run['curve'], 2) for run in best):+.4f}",
                f"{best[0]['lr']:g}",
            ]
        )
    return rows


def page(facts: Row, scale: Scale) -> str:
    runs = facts["runs"]
    floors = [run["floor"] for run in runs if run["done"]]
    heads = [
        "attention", "share of scores", "M parameters", "seeds", "text: loss, mean (lowest to highest)",
        "over the lowest possible", "answers that are right", "change of text over the last fifth",
        "change of answers' loss over the last fifth", "learning rate",
    ]  # fmt: skip
    lines = [f"# Training to convergence with sparse attention, {facts['date']}"]
    lines += table("Results on new sequences", heads, result_rows(runs, scale))
    reach = scale.layers * 5 * scale.block
    lines += [
        "",
        f"The lowest possible loss of text is {floors[0] if floors else math.nan:.4f} nats. By chance "
        f"{1 / NUM_VALUES:.1%} of the answers are right. All layers with only a window reach at most {reach} tokens; "
        f"a fact is {scale.length // 2:,} to {scale.length:,} tokens away from its questions.",
    ]
    left_out = [run for run in runs if not run["done"]]
    if left_out:
        lines += ["", "Not in the table:", ""]
        lines += [f"- {run['way']}, seed {run['seed']}: {run['why'].strip().splitlines()[-1]}" for run in left_out]
    counts = Counter(lengths_of(scale)).items()
    stages = "Sequences in training: " + ", then ".join(f"{its:,} tokens for {count:,} steps" for its, count in counts)
    gpu = torch.cuda.get_device_name() if CUDA else "no GPU"
    versions = ", ".join(f"{name} {version_of(name)}" for name in ("torch", "triton", "transformers"))
    lines += [
        "",
        "## How it was measured",
        "",
        f"- `{facts['command']}`: {gpu}; {describe(read_machine())}; {versions}",
        f"- BERT with {scale.layers} layers, hidden size {scale.hidden} and {scale.heads} heads; {scale.steps:,} steps "
        f"of {scale.batch} x {scale.length:,} tokens; AdamW, weights in fp32, "
        + ("bf16 autocast" if CUDA else "no autocast"),
        f"- Blocks of {scale.block} tokens. fixed: windows of 8 blocks, one of them global. variable: windows of 4 and "
        "8 blocks, one global and one random block. bigbird: 4 blocks on each side, one global, one random. "
        "bslongformer: 4 blocks on each side, one global. local: 4 blocks on each side.",
        f"- Longformer has {4 * scale.block} tokens on each side and {scale.block} global tokens. Its global tokens "
        "have projections of their own, so it has more parameters than the others.",
        f"- {stages}.",
        "- Sequences do not repeat, so the loss in training is that of new data.",
        f"- Learning rates that were tried, for every kind of attention: "
        f"{', '.join(f'{rate:g}' for rate in facts['rates'])}.",
        "",
    ]
    short = {**facts, "runs": [{key: value for key, value in run.items() if key != "curve"} for run in runs]}
    return "\n".join([*lines, "```json", json.dumps(short), "```", ""])


def mean_curve(runs: Sequence[Row], column: int) -> list[tuple[float, float]]:
    points = zip(*(run["curve"] for run in runs), strict=False)
    return [(at[0][0], statistics.mean(point[column] for point in at)) for at in points]


def panel(
    title: str, lines: Sequence[tuple[str, list[tuple[float, float]]]], y0: float, low: float, floor: float
) -> list[str]:
    """Curves over steps from the value `low` upwards, named at the right. A dashed line is at `floor`."""
    left, right, top, bottom = 56.0, 560.0, y0 + 34.0, y0 + 240.0
    last = max(x for _, points in lines for x, _ in points)
    high = max(1.05 * floor, *(y for _, points in lines for _, y in points))

    def at(x: float, y: float) -> tuple[float, float]:
        return round(left + x / last * (right - left), 1), round(bottom - (y - low) / (high - low) * (bottom - top), 1)

    parts = [text(left, y0 + 20, title, "title")]
    for y in ticks(low, high):
        parts.append(f'<polyline class="grid" points="{left},{at(0, y)[1]} {right},{at(0, y)[1]}"/>')
        parts.append(text(left - 8, at(0, y)[1] + 4, tick_text(y), "tick", "end"))
    parts += [text(at(x, low)[0], bottom + 18, tick_text(x), "tick", "middle") for x in ticks(0.0, last)]
    parts.append(text((left + right) / 2, bottom + 34, "steps", "tick", "middle"))
    line = f"{left},{at(0, floor)[1]} {right},{at(0, floor)[1]}"
    parts.append(f'<polyline stroke="#dc2626" stroke-width="1" stroke-dasharray="5 4" points="{line}"/>')
    for index, (label, points) in enumerate(lines):
        color = COLORS[WAYS.index(label)]
        path = " ".join(f"{x},{y}" for x, y in (at(*point) for point in points))
        parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="1.8" points="{path}"/>')
        parts.append(f'<text x="{right + 14}" y="{top + 10 + 20 * index}" style="fill:{color}">{label}</text>')
    return parts


def picture(facts: Row) -> str:
    """Mean curves over seeds of the finished runs: the loss of text, and the share of right answers."""
    runs = [run for run in facts["runs"] if run["done"] and run["curve"]]
    chosen = {way: [run for run in runs if run["way"] == way] for way in dict.fromkeys(run["way"] for run in runs)}
    chosen = {way: best_rate(some) for way, some in chosen.items()}
    parts = []
    if chosen:
        floor = runs[0]["floor"]
        curves = [(way, mean_curve(some, 1)) for way, some in chosen.items()]
        parts += panel("Text: loss in nats (dashed: the lowest possible)", curves, 0.0, 0.9 * floor, floor)
        curves = [(way, [(x, 100 * y) for x, y in mean_curve(some, 3)]) for way, some in chosen.items()]
        title = "Questions about facts far away: right answers in % (dashed: by chance)"
        parts += panel(title, curves, 290.0, 0.0, 100.0 / NUM_VALUES)
    size = 'width="780" height="580" viewBox="0 0 780 580"'
    back = '<rect width="100%" height="100%" fill="#fff"/>'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>{back}{body}</svg>\n'


def rounded(facts: Row) -> str:
    return json.dumps(json.loads(json.dumps(facts), parse_float=lambda value: float(f"{float(value):.5g}")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="on the CPU")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--length", type=int, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, help="sequences of a step")
    parser.add_argument("--rates", type=float, nargs="+", help="learning rates; every kind of attention gets all")
    parser.add_argument("--processes", type=int, help="that run at a time")
    parser.add_argument("--budget", type=float, default=250.0, help="seconds; runs that do not end in it are left out")
    parser.add_argument("--save", action="store_true", help="write the result to dated files")
    parser.add_argument("--save-to", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--plot", type=Path, help="a saved JSON file")
    options = parser.parse_args()
    if options.plot:
        facts = json.loads(options.plot.read_text(encoding="utf-8"))
        options.plot.with_suffix(".svg").write_text(picture(facts), encoding="utf-8")
        return
    if not (CUDA or options.tiny):
        raise SystemExit("This benchmark needs CUDA. Use --tiny to see on the CPU that it works.")
    names = ("seeds", "steps", "length", "batch", "processes")
    given = {name: getattr(options, name) for name in names if getattr(options, name)}
    scale = dataclasses.replace(TINY if options.tiny else FULL, **given)
    rates = options.rates or [scale.lr]
    command = "python benchmarks/sparse_convergence.py" + "".join(f" --{name} {given[name]}" for name in given)
    facts = {"date": str(datetime.date.today()), "command": command, "rates": rates}
    facts["scale"] = dataclasses.asdict(scale)
    facts["runs"] = train_all(scale, options.ways, rates, options.budget)
    result = page(facts, scale)
    print(result)
    if options.save:
        options.save_to.mkdir(parents=True, exist_ok=True)
        path = options.save_to / f"{facts['date']}-sparse-convergence"
        path.with_suffix(".md").write_text(result, encoding="utf-8")
        path.with_suffix(".json").write_text(rounded(facts), encoding="utf-8")
        path.with_suffix(".svg").write_text(picture(facts), encoding="utf-8")


if __name__ == "__main__":
    main()
