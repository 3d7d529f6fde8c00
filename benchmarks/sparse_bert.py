"""BERT with sparse attention: the longest sequence that trains in 32 GB, the step at equal length, and other models.

Parts (`--only`), each in a process of its own: `base` and `large`, BERT's two shapes; `peers`, transformers' own
Longformer and BigBird, and dense BERT, of base's shape, beside a sparse BERT with the same window. Random weights;
weights, gradients and AdamW's state (fused) in bf16; no dropout; the loss is that of masked language modelling at up to
512 positions of a batch, so that logits do not decide. The longest sequence is that of two whole steps of one sequence
under the cap, doubled, then halfway between until it is known within 1/8. Steps at equal length are without cap and
without checkpointing, with equal numbers of tokens. Before all that, hidden states of a sparse model must be those of a
dense one with the pattern as its mask. Prints the machine, tables and one JSON line; `--save` writes a dated file in
benchmarks/results. Needs transformers, and CUDA but for `--tiny`, which shows that the script works, nothing more.
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
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from sparse_common import Row, header, parts_of, save, shown, synchronize, table, to_json
from torch import Tensor, nn

from twinflow.attention import BigBirdSparsityConfig, BSLongformerSparsityConfig, SparsityConfig, sparsify

PARTS = ("base", "large", "peers")
WAYS = ("dense", "dense, checkpointed", "sparse, checkpointed")
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
    peer_length: int
    peer_batch: int
    inference_length: int
    repeats: int


SIZES = {"base": (12, 768, 12), "large": (24, 1024, 16)}
FULL = Scale(
    "cuda", torch.bfloat16, SIZES, 30522, 64, 1024, 2048, 1 << 20, 128, (512, 1024, 2048, 4096, 8192, 16384), 16384,
    4096, 4, 2048, 5,
)  # fmt: skip
TINY = Scale(
    "cpu", torch.float32, {"base": (2, 64, 2), "large": (2, 64, 4)}, 300, 16, 256, 64, 256, 32, (64, 256), 256, 256, 1,
    128, 1,
)  # fmt: skip


def bigbird(scale: Scale, heads: int) -> SparsityConfig:
    """The paper's: three random blocks, a window of three, two global ones."""
    return BigBirdSparsityConfig(heads, scale.block, False, 3, 3, 2)


def longformer(scale: Scale, heads: int) -> SparsityConfig:
    """A window of 256 tokens (four blocks) on each side, the first block global."""
    return BSLongformerSparsityConfig(heads, scale.block, False, 9)


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


class Steps:
    """Training steps on one batch."""

    def __init__(self, scale: Scale, model: Any, batch: int, length: int, **more: Any) -> None:
        self._model, self._tokens, self._more = model, tokens_of(scale, batch, length), more
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

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


def longest(scale: Scale, size: str, way: str) -> int:
    """The longest sequence of which two steps fit."""
    is_sparse = way.startswith("sparse")
    pattern = bigbird(scale, scale.sizes[size][2]) if is_sparse else None
    model = bert(scale, size, "sdpa" if is_sparse else "eager", pattern)
    if way.endswith("checkpointed"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    fits, too_long, length = 0, scale.most + 1, scale.start
    while length > fits and fits * 9 // 8 < too_long:
        try:
            set_length(model, length)
            step = Steps(scale, model, 1, length)
            step()
            step()
            synchronize(scale.device)
            fits = length
        except torch.OutOfMemoryError:
            too_long = length
        print(f"{size}, {way}, {length} tokens: {'fits' if fits == length else 'too long'}", file=sys.stderr)
        step = None
        clear(model, scale)
        between = (fits + too_long) // 2 // scale.multiple * scale.multiple
        length = fits * 2 if 0 < fits * 2 < too_long else between
    return fits


def step_ms(scale: Scale, step: Callable[[], None]) -> float:
    """The median of some steps, the host's part with them."""
    times = []
    for _ in range(2 + scale.repeats):
        synchronize(scale.device)
        start = time.perf_counter()
        step()
        synchronize(scale.device)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[2:])


def times_of(scale: Scale, size: str) -> list[Row]:
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
            set_length(model, length)
            try:
                row[name] = step_ms(scale, Steps(scale, model, row["batch"], length))
            except torch.OutOfMemoryError:
                row[name] = None
            clear(model, scale)
        rows.append(row)
        print(size, row, file=sys.stderr)
    return rows


def measure_size(scale: Scale, size: str, cap_gb: float) -> Row:
    row: Row = {"error": check(scale, size)}
    limit_memory(scale, cap_gb)
    row["longest"] = {way: longest(scale, size, way) for way in WAYS}
    limit_memory(scale, 0.0)
    row["steps"] = times_of(scale, size)
    return row


def peers_of(scale: Scale) -> dict[str, tuple[Callable[[], Any], str | None]]:
    """Models of base's shape by name, and which of them a sparse one is compared with."""
    from transformers import BigBirdConfig, BigBirdModel, LongformerConfig, LongformerModel

    layers, hidden, heads = scale.sizes["base"]
    window, most = 8 * scale.block, scale.peer_length + 16
    shape: dict[str, Any] = {
        "vocab_size": scale.vocab, "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "intermediate_size": 4 * hidden, "max_position_embeddings": most, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    wide = LongformerConfig(attention_window=window, **shape)
    random = BigBirdConfig(attention_type="block_sparse", block_size=scale.block, num_random_blocks=3, **shape)
    return {
        "Longformer": (lambda: made(scale, lambda: LongformerModel(wide, add_pooling_layer=False)), None),
        "BigBird": (lambda: made(scale, lambda: BigBirdModel(random, add_pooling_layer=False)), None),
        "dense BERT, eager": (lambda: bert(scale, "base", "eager"), None),
        "dense BERT, sdpa": (lambda: bert(scale, "base", "sdpa"), None),
        "sparse BERT, Longformer's pattern": (
            lambda: bert(scale, "base", "sdpa", longformer(scale, heads)),
            "Longformer",
        ),
        "sparse BERT, BigBird's pattern": (lambda: bert(scale, "base", "sdpa", bigbird(scale, heads)), "BigBird"),
    }


def measure_peers(scale: Scale) -> Row:
    """A training step and a forward of each."""
    rows: dict[str, Row] = {}
    for name, (maker, rival) in peers_of(scale).items():
        model = maker()
        found: Row = {"rival": rival}
        kinds = (("train_ms", scale.peer_batch, scale.peer_length), ("inference_ms", 1, scale.inference_length))
        for kind, batch, length in kinds:
            more: dict[str, Any] = {}
            if name == "Longformer":
                more["global_attention_mask"] = torch.zeros(batch, length, dtype=torch.long, device=scale.device)
                more["global_attention_mask"][:, 0] = 1
            if "BERT" in name:
                set_length(model, length)
            if kind == "train_ms":
                found[kind] = step_ms(scale, Steps(scale, model, batch, length, **more))
                clear(model, scale)
                continue
            tokens = tokens_of(scale, batch, length)
            with torch.inference_mode():
                found[kind] = step_ms(scale, partial(hidden_of, model.eval(), tokens, **more))  # type: ignore[arg-type]
        rows[name] = found
        print(name, found, file=sys.stderr)
        del model
        gc.collect()
    return rows


def in_process(given: argparse.Namespace, part: str) -> Row:
    """A part in a process of its own."""
    command = [sys.executable, __file__, "--cap", str(given.cap), "--part", part, *(["--tiny"] if given.tiny else [])]
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    found = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if not found:
        raise SystemExit(f"{part}: no result")
    row: Row = json.loads(found[0].removeprefix("ROW "))
    return row


def size_lines(size: str, row: Row) -> list[str]:
    """Tables of a shape."""
    plain, checkpointed, sparse = (row["longest"][way] for way in WAYS)
    body = [[way, f"{length:,}", f"{length / plain:.2f}"] for way, length in row["longest"].items()]
    lines = table(f"{size}: longest sequence", ["attention", "tokens", "over dense"], body)
    lines += ["", f"Sparse over dense {sparse / plain:.1f}, wanted >= {LONGER[size]:g}; over dense with checkpointing"]
    lines += [f"{sparse / checkpointed:.1f}."]
    body, best = [], 0.0
    for step in row["steps"]:
        ratios = [step[name] / step["sparse"] if step[name] else None for name in ("eager", "sdpa")]
        best = max(best, ratios[0] or 0.0)
        times = [shown(step[name], 1) for name in ("eager", "sdpa", "sparse")]
        first = [f"{step['tokens']:,}", str(step["batch"]), f"{step['density']:.3f}"]
        body.append([*first, *times, *(shown(ratio) for ratio in ratios)])
    heads = ["tokens", "sequences", "density", "eager, ms", "sdpa, ms", "sparse, ms", "eager / sparse", "sdpa / sparse"]
    lines += table(f"{size}: a training step", heads, body)
    return [*lines, "", f"Best over eager {best:.2f}, wanted >= {FASTER:g} at some length."]


def peer_lines(rows: Row) -> list[str]:
    """The table of other models."""
    body = []
    for name, row in rows.items():
        cells = [name, shown(row["train_ms"], 1), shown(row["inference_ms"], 2)]
        rival = rows.get(row["rival"])
        if rival:
            train, inference = (rival[kind] / row[kind] for kind in ("train_ms", "inference_ms"))
            cells += [f"{row['rival']}: {train:.2f} >= {PEERS_FASTER:g}", f"{inference:.2f} >= {INFERENCE_FASTER:g}"]
        body.append([*cells, *[""] * (5 - len(cells))])
    return table("Other models", ["model", "step, ms", "forward, ms", "step over", "forward over"], body)


def page(facts: Row, scale: Scale) -> str:
    """The result as Markdown, one JSON line last."""
    lines = [f"# BERT with sparse attention, {facts['date']}", "", *header()]
    lines += [f"- longest sequences in {facts['cap_gb']:g} GB; steps of {scale.tokens:,} tokens, not capped"]
    lines += ["- weights, gradients and AdamW's state in " + str(scale.dtype).removeprefix("torch.")]
    lines += [f"- BigBird, block {scale.block}: 3 random, a window of 3, 2 global; loss at up to {POSITIONS} positions"]
    lines += [f"- other models: {scale.peer_batch} x {scale.peer_length:,} tokens to train on, 1 x"]
    lines += [f"  {scale.inference_length:,} for a forward"]
    for part, row in facts["parts"].items():
        lines += peer_lines(row) if part == "peers" else size_lines(part, row)
    return "\n".join([*lines, "", *to_json(facts)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, with commas between")
    parser.add_argument("--cap", type=float, default=32.0, help="GB of GPU memory that may be used")
    parser.add_argument("--tiny", action="store_true", help="on the CPU")
    parser.add_argument("--save", action="store_true", help="write the result to a dated file")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    scale = TINY if given.tiny else FULL
    if scale is FULL and not torch.cuda.is_available():
        raise SystemExit("needs CUDA but for --tiny")
    if given.part:
        row = measure_peers(scale) if given.part == "peers" else measure_size(scale, given.part, given.cap)
        print("ROW " + json.dumps(row), flush=True)
        return
    facts: Row = {"date": datetime.date.today().isoformat(), "cap_gb": given.cap, "parts": {}}
    for part in parts_of(given.only, PARTS):
        start = time.perf_counter()
        facts["parts"][part] = in_process(given, part)
        print(f"{part}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    text = page(facts, scale)
    print(text)
    if given.save:
        save(text, f"{facts['date']}-sparse-bert")


if __name__ == "__main__":
    main()
