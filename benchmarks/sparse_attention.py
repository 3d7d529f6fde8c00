# SPDX-License-Identifier: Apache-2.0
"""Sparse attention beside FlexAttention and dense attention: forward, and forward with backward, on one GPU.

Parts (`--only`): `patterns`, structures of block 128 at 32k and 128k tokens; `blocks`, equal areas in smaller blocks;
`million`, a million tokens in one call, and its memory; `math`, dense attention with a mask; `shapes`, widths, padding,
odd lengths and more beside dense attention, see sparse_shapes.py. Limits stand beside what was measured. Dense is the
better of SDPA's flash and cuDNN kernels; Flex is compiled, by default and with the best of some `kernel_options`. Times
are those of the GPU, with work queued ahead; a forward is that of training. Results are checked first, against float64
and against Flex: no speed is printed where they differ. All kernels are compiled before that, in processes side by
side. `--tune` sweeps tiles, warps and stages of our kernels instead. Prints the machine, tables and one JSON line;
`--save` writes a dated file in benchmarks/results. Needs CUDA and Triton; `--tiny` shows on the CPU that the script
works, nothing more.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import sparse_shapes
import torch
from sparse_common import (
    FULL,
    PASSES,
    TINY,
    TOLERANCE,
    Clock,
    Row,
    Scale,
    Shape,
    Way,
    best,
    dense,
    header,
    inputs,
    layout_of,
    measure_dense,
    ours,
    parts_of,
    relative,
    run_jobs,
    run_once,
    save,
    shown,
    synchronize,
    table,
    to_json,
    try_passes,
    warm,
)
from torch import Tensor
from torch.nn.attention import SDPBackend

from twinflow.attention import Layout, LocalSlidingWindowSparsityConfig

PARTS = ("patterns", "blocks", "million", "math", "shapes")
WARM_S = 150.0  # a limit for compiling the kernels of `shapes`, in case that one of them does not end
PATTERNS = ("bigbird", "longformer", "fixed", "window", "random 10%", "random 25%")
CLUSTERED = ("window", "longformer", "fixed")
BLOCKED = (*CLUSTERED, "bigbird")  # in smaller blocks; the random ones of the last are not clustered there
FLEX_LIMITS = {"bigbird": 0.5, "longformer": 0.5, "fixed": 0.9}  # of Flex's time
OWN_SHARE, DENSE_SHARE, BLOCK_LIMIT, BEYOND_GB = 0.7, 0.5, 1.5, 4.0

# Of the forward: tile of queries, of keys, warps, stages. Of the backward: the same for its two loops.
_SAFE = {"ROWS_GUARANTEED_SAFE": True}
FLEX_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "safe rows": {**_SAFE, "PRESCALE_QK": True},
    "tiles of 64": {
        **_SAFE, "fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3,
        "bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64, "bwd_num_warps": 4,
        "bwd_num_stages": 2,
    },
    "tiles of 128 x 64": {
        **_SAFE, "fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3,
        "bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 128, "bwd_BLOCK_M2": 128, "bwd_BLOCK_N2": 32, "bwd_num_warps": 8,
        "bwd_num_stages": 3,
    },
}  # fmt: skip


def flex(layout: Layout, device: str, options: dict[str, Any]) -> Way:
    """FlexAttention over the same blocks; its index of blocks is shared by all heads, as is best for it."""
    from torch.nn.attention.flex_attention import BlockMask

    grid = layout.for_heads(0, 1).to_dense()[None].to(device)
    parts: list[Any] = []
    for kept in (torch.zeros_like(grid), grid):  # none is cut, all are whole
        order = torch.argsort(kept.to(torch.int8), dim=-1, descending=True, stable=True)
        parts += [kept.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()]
    length = layout.num_rows * layout.block
    mask = BlockMask.from_kv_blocks(*parts, BLOCK_SIZE=layout.block, seq_lengths=(length, length))
    compiled = compiled_flex()
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, kernel_options=options)


@lru_cache(maxsize=1)
def compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = 64
    return torch.compile(flex_attention, dynamic=False)


def check(scale: Scale) -> float:
    """The largest error of the structures and blocks against attention in float64; no figures if it is too large."""
    worst = 0.0
    for shape, block, pattern in itertools.product(scale.shapes, scale.blocks, PATTERNS):
        is_other = shape is not scale.shapes[0]
        if block != scale.base and (is_other or pattern.startswith("random")):  # dimensions with the largest block
            continue
        few = replace(shape, num_heads=min(2, shape.num_heads))
        layout = layout_of(pattern, few.num_heads, block, scale.check_length, scale.base)
        data = inputs(scale, few, scale.check_length)
        kept = layout.to_dense().repeat_interleave(block, 1).repeat_interleave(block, 2).to(scale.device)
        wide = tuple(tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in data)

        def truth(q: Tensor, k: Tensor, v: Tensor, kept: Tensor = kept) -> Tensor:
            scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            return scores.masked_fill(~kept, -math.inf).softmax(-1) @ v

        error = relative(run_once(ours(layout), data), run_once(truth, wide))
        if error > TOLERANCE:
            raise SystemExit(f"no speed is reported: {pattern}, block {block}, {shape}: error {error:.2e}")
        worst = max(worst, error)
    return worst


def measure_patterns(scale: Scale, clock: Clock, flex_names: list[str]) -> Iterator[Row]:
    """Each structure at each length and shape, beside Flex and dense attention."""
    for shape, length in itertools.product(scale.shapes, scale.lengths):
        data = inputs(scale, shape, length)
        whole = measure_dense(scale, clock, data)
        print(f"{shape}, {length} tokens, dense: {whole}", file=sys.stderr, flush=True)
        own = clock.passes(ours(layout_of("dense", shape.num_heads, scale.base, length, scale.base)), data)
        print(f"{shape}, {length} tokens, our dense: {own}", file=sys.stderr, flush=True)
        for pattern in PATTERNS:
            layout = layout_of(pattern, shape.num_heads, scale.base, length, scale.base)
            flexes: dict[str, dict[str, float]] = {}
            if scale.device == "cuda":
                ways = {name: flex(layout, scale.device, FLEX_OPTIONS[name]) for name in flex_names}
                error = relative(run_once(ours(layout), data), run_once(ways["default"], data))
                if error > TOLERANCE:
                    raise SystemExit(f"no speed is reported: {pattern}, {length}, {shape}: {error:.2e} from Flex")
                flexes = {name: try_passes(clock, name, way, data) for name, way in ways.items()}
            yield {
                "shape": str(shape), "tokens": length, "pattern": pattern, "block": scale.base,
                "density": layout.density, "ours": clock.passes(ours(layout), data), "flex": flexes.get("default"),
                "best_flex": best(list(flexes.values())) if flexes else None, "flex_options": flexes, "dense": whole,
                "own_dense": own,
            }  # fmt: skip


def measure_blocks(scale: Scale, clock: Clock) -> Iterator[Row]:
    """The same areas in smaller blocks, at the first length."""
    length = scale.lengths[0]
    for shape in scale.shapes:
        data = inputs(scale, shape, length)
        for pattern in BLOCKED:
            first: dict[str, float] = {}
            for block in scale.blocks:
                layout = layout_of(pattern, shape.num_heads, block, length, scale.base)
                found = clock.passes(ours(layout), data)
                first = first or found
                yield {
                    "shape": str(shape), "tokens": length, "pattern": pattern, "block": block,
                    "density": layout.density, "ours": found, "over_base": {p: found[p] / first[p] for p in PASSES},
                }  # fmt: skip


def makers_of_million(scale: Scale) -> dict[tuple[str, int], Callable[[], Layout]]:
    """Structures for as many tokens, by name and block."""
    num_heads, length, small = scale.shapes[0].num_heads, scale.most, min(scale.blocks)
    wide = LocalSlidingWindowSparsityConfig(num_heads, small, 64, "bidirectional")
    return {
        ("bigbird", scale.base): lambda: layout_of("bigbird", num_heads, scale.base, length, scale.base),
        ("window of 64 blocks", small): lambda: wide.layout(length),
    }


def measure_million(scale: Scale, clock: Clock) -> Iterator[Row]:
    """One call each, and the memory that it takes beyond its tensors and their gradients."""
    shape, length = scale.shapes[0], scale.most
    for (pattern, block), maker in makers_of_million(scale).items():
        start = time.perf_counter()
        layout = maker()
        layout_s = time.perf_counter() - start
        data = inputs(scale, shape, length)
        synchronize(scale.device)
        before = torch.cuda.memory_allocated() if scale.device == "cuda" else 0
        if scale.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in run_once(ours(layout), data))
        synchronize(scale.device)
        first_s = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated() if scale.device == "cuda" else before + num_bytes
        yield {
            "shape": str(shape), "tokens": length, "pattern": pattern, "block": block, "density": layout.density,
            "beyond_gb": (peak - before - num_bytes) / 1e9, "layout_s": layout_s, "first_s": first_s,
            "ours": clock.passes(ours(layout), data),
        }  # fmt: skip


def measure_math(scale: Scale, clock: Clock) -> Iterator[Row]:
    """Dense attention that makes all scores, with the structure as a mask, where it fits."""
    length = scale.math_length
    for shape in scale.shapes:
        data = inputs(scale, shape, length)
        layout = layout_of("bigbird", shape.num_heads, scale.base, length, scale.base)
        grid = layout.for_heads(0, 1).to_dense().to(scale.device)
        mask = grid.repeat_interleave(scale.base, 1).repeat_interleave(scale.base, 2)[None]
        yield {
            "shape": str(shape), "tokens": length, "pattern": "bigbird", "block": scale.base,
            "density": layout.density, "ours": clock.passes(ours(layout), data),
            "math": try_passes(clock, "math", dense(SDPBackend.MATH, mask), data),
        }  # fmt: skip


MEASURES: dict[str, Callable[..., Iterator[Row]]] = {
    "patterns": measure_patterns, "blocks": measure_blocks, "million": measure_million, "math": measure_math,
}  # fmt: skip


def jobs(scale: Scale, parts: list[str], flex_names: list[str]) -> list[Callable[[], object]]:
    """All that must be compiled, each to be run once."""
    found: list[Callable[[], object]] = []

    def own(shape: Shape, length: int, pattern: str, block: int) -> None:
        layout = layout_of(pattern, shape.num_heads, block, length, scale.base)
        run_once(ours(layout), inputs(scale, shape, length))

    def once(maker: Callable[[], Layout]) -> None:
        run_once(ours(maker()), inputs(scale, scale.shapes[0], scale.most))

    def other(shape: Shape, length: int, options: dict[str, Any]) -> None:
        layout = layout_of("bigbird", shape.num_heads, scale.base, length, scale.base)
        run_once(flex(layout, scale.device, options), inputs(scale, shape, length))

    if "patterns" in parts:  # the longest to compile come first
        cases = itertools.product(scale.shapes, scale.lengths, [FLEX_OPTIONS[name] for name in flex_names])
        found += [partial(other, *case) for case in cases]
        structures = (*PATTERNS, "dense")
        found += [
            partial(own, *case) for case in itertools.product(scale.shapes, scale.lengths, structures, (scale.base,))
        ]
    if parts != ["shapes"]:
        lengths = (scale.check_length, scale.lengths[0]) if "blocks" in parts else (scale.check_length,)
        found += [partial(own, *case) for case in itertools.product(scale.shapes, lengths, BLOCKED, scale.blocks)]
    if "million" in parts:
        found += [partial(once, maker) for maker in makers_of_million(scale).values()]
    return found


def over(a: dict[str, float] | None, b: dict[str, float] | None, name: str, factor: float = 1.0) -> float | None:
    """a / b of a pass, where both are there."""
    if a is None or b is None or math.inf in (a[name], b[name]):
        return None
    return a[name] * factor / b[name]


def limits_of(row: Row, name: str) -> list[tuple[str, float | None, str, float]]:
    """What is wanted of a row and a pass: what, measured, "at most" or "at least", the limit."""
    found: list[tuple[str, float | None, str, float]] = []
    if "own_dense" in row:
        if row["pattern"] in FLEX_LIMITS:
            found.append(("over Flex", over(row["ours"], row["best_flex"], name), "<=", FLEX_LIMITS[row["pattern"]]))
        if row["pattern"] == "random 10%":
            density = row["density"]
            found.append(("own dense", over(row["own_dense"], row["ours"], name, density), ">=", OWN_SHARE))
            found.append(("best dense", over(row["dense"], row["ours"], name, density), ">=", DENSE_SHARE))
    if "over_base" in row and row["pattern"] in CLUSTERED and row["over_base"][name] != 1.0:
        found.append(("over the largest block", row["over_base"][name], "<=", BLOCK_LIMIT))
    if "wanted" in row and name == "both":
        found.append(("of dense", sparse_shapes.share_of(row, name), ">=", row["wanted"]))
    if "beyond_gb" in row:
        found.append(("GB beyond", row["beyond_gb"], "<=", BEYOND_GB))
    return found


def cells_of(row: Row, name: str) -> list[str]:
    """A row's first cells, and its limits as the last one."""
    wanted = "; ".join(f"{what} {shown(found)} {sign} {limit}" for what, found, sign, limit in limits_of(row, name))
    first = [row["shape"], f"{row['tokens']:,}", row["pattern"], str(row["block"]), f"{row['density']:.4f}"]
    return [*first, {"forward": "forward", "both": "forward + backward"}[name], shown(row["ours"][name], 3), wanted]


def page(facts: Row) -> str:
    """The result as Markdown, one JSON line last."""
    lines = [f"# Sparse attention, {facts['date']}", "", *header(), f"- {facts['dtype']}, batch 1"]
    if facts["kernels"]:
        lines += [f"- `--kernels {facts['kernels']}`"]
    if facts["error"] is not None:
        where = f"at {facts['check_length']} tokens, of the norm"
        lines += [f"- largest error against float64 {where}: {facts['error']:.1e}"]
    lines += ["- cut short: what was measured until then"] if facts["was_cut"] else []
    first = ["heads", "tokens", "structure", "block", "density", "pass", "ours, ms"]
    parts = facts["parts"]
    body = []
    for row, name in itertools.product(parts.get("patterns", []), PASSES):
        *cells, wanted = cells_of(row, name)
        ours, whole = row["ours"], row["dense"]
        cells += [shown(row[key] and row[key][name], 3) for key in ("flex", "best_flex", "dense", "own_dense")]
        cells += [shown(over(ours, row["flex"], name)), shown(over(ours, row["best_flex"], name))]
        cells += [
            shown(over(row["own_dense"], ours, name, row["density"])),
            shown(over(whole, ours, name, row["density"])),
        ]
        body.append([*cells, shown(over(whole, ours, name)), wanted])
    if body:
        heads = [*first, "Flex, ms", "best Flex, ms", "dense, ms", "own dense, ms", "ours / Flex", "ours / best Flex"]
        heads += ["own dense x density / ours", "dense x density / ours", "dense / ours", "limits"]
        lines += table("Structures", heads, body)
    body = []
    for row, name in itertools.product(parts.get("blocks", []), PASSES):
        *cells, wanted = cells_of(row, name)
        body.append([*cells, shown(row["over_base"][name]), wanted])
    if body:
        lines += table("Smaller blocks", [*first, "over the largest block", "limit"], body)
    body = []
    for row, name in itertools.product(parts.get("million", []), PASSES):
        *cells, wanted = cells_of(row, name)
        body.append([*cells, shown(row["layout_s"]), shown(row["first_s"]), shown(row["beyond_gb"], 3), wanted])
    if body:
        lines += table("A million tokens", [*first, "layout, s", "first call, s", "GB beyond", "limit"], body)
    body = []
    for row, name in itertools.product(parts.get("math", []), PASSES):
        *cells, _ = cells_of(row, name)
        body.append([*cells, shown(row["math"][name], 3), shown(over(row["math"], row["ours"], name))])
    if body:
        lines += table("Dense attention with a mask", [*first, "math, ms", "math / ours"], body)
    lines += sparse_shapes.lines_of(parts["shapes"]) if parts.get("shapes") else []
    lines += ["", *(missed(parts) if torch.cuda.is_available() else ["Without a GPU no limit means anything."]), ""]
    return "\n".join([*lines, *to_json(facts)])


def missed(parts: dict[str, list[Row]]) -> list[str]:
    """One line for each limit that is not met."""
    lines = []
    for row, name in itertools.product(itertools.chain(*parts.values()), PASSES):
        for what, found, sign, limit in limits_of(row, name):
            if found is not None and (found <= limit if sign == "<=" else found >= limit):
                continue
            where = f"{row['pattern']}, {row['shape']}, {row['tokens']:,} tokens, block {row['block']}, {name}"
            lines.append(f"- missed: {where}: {what} {shown(found)}, wanted {sign} {limit}")
    return lines or ["All limits are met."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, with commas between")
    parser.add_argument("--flex", default=",".join(FLEX_OPTIONS), help="its options to try, with commas between")
    parser.add_argument("--tune", action="store_true", help="sweep our kernels' tiles, warps and stages instead")
    parser.add_argument("--widths", type=int, nargs="+", help="widths of heads for --tune: 64, 80, 96, 128 or 256")
    parser.add_argument("--tokens", type=int, nargs="+", help="lengths of `patterns`, `blocks` and `shapes`")
    parser.add_argument(
        "--kernels", choices=("hopper", "triton"), help="use these kernels wherever they support a call"
    )
    parser.add_argument("--case", nargs="+", help="only lines of `shapes` that contain one of these words")
    parser.add_argument("--tiny", action="store_true", help="on the CPU")
    parser.add_argument("--save", action="store_true", help="write the result to a dated file")
    parser.add_argument("--warm", type=int, nargs=2, help=argparse.SUPPRESS)
    given, rest = parser.parse_args(), [word for word in sys.argv[1:] if word != "--save"]
    scale, parts = TINY if given.tiny else FULL, parts_of(given.only, PARTS)
    if given.tune and given.tiny:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported
    if scale is FULL and not torch.cuda.is_available():
        raise SystemExit("needs CUDA but for --tiny")
    if given.kernels:
        sparse_shapes.use_kernels(given.kernels)
    if given.tokens:
        scale = replace(scale, lengths=tuple(given.tokens))
    if given.tune:
        import sparse_tuning

        found = sparse_tuning.jobs(scale, given.widths)
    else:
        found = jobs(scale, parts, parts_of(given.flex, tuple(FLEX_OPTIONS)))
        found += sparse_shapes.jobs(scale, given.case) if "shapes" in parts else []
    if given.warm:
        return run_jobs(found, *given.warm)
    start = time.perf_counter()
    if scale.device == "cuda":
        if not warm(rest, len(found), WARM_S if parts == ["shapes"] else math.inf):
            raise SystemExit(f"Some kernels did not end within {WARM_S} s. The last case of a process is one of them.")
        print(f"compiled in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    if given.tune:
        return sparse_tuning.report(scale, given.widths)
    error, clock = None if parts == ["shapes"] else check(scale), Clock(scale.device)
    print(f"checked after {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    facts: Row = {"date": datetime.date.today().isoformat(), "dtype": str(scale.dtype).removeprefix("torch.")}
    facts |= {
        "kernels": given.kernels,
        "check_length": scale.check_length,
        "error": error,
        "was_cut": False,
        "parts": {},
    }
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for part in parts:
        begin = time.perf_counter()
        measure = {**MEASURES, "shapes": partial(sparse_shapes.measure, words=given.case)}[part]
        measure = measure if part != "patterns" else partial(measure, flex_names=given.flex.split(","))
        facts["parts"][part] = []
        try:
            for row in measure(scale, clock):
                facts["parts"][part].append(row)
                for name in PASSES:
                    print(*cells_of(row, name), sep=" | ", file=sys.stderr, flush=True)
        except KeyboardInterrupt:  # or somebody's limit: what there is counts
            facts["was_cut"] = True
            break
        print(f"{part}: {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    facts["seconds"] = round(time.perf_counter() - start)
    text = page(facts)
    print(text)
    if given.save:
        save(text, f"{facts['date']}-sparse-attention")


if __name__ == "__main__":
    main()
