"""What sparse attention is expected to show on one GPU, in one command: CPU time of a call, speed beside dense
attention for many shapes, and compiled training steps of BERT.

    python benchmarks/sparse_speed.py --save            # all parts
    python benchmarks/sparse_speed.py --only cpu        # 60 s
    python benchmarks/sparse_speed.py --only table      # 200 s; --lengths 32768 takes half of it
    python benchmarks/sparse_speed.py --only bert       # 90 s, needs transformers
    python benchmarks/sparse_speed.py --only flex       # 120 s, FlexAttention with every backend of the installed torch
    python benchmarks/sparse_speed.py --tiny            # shows on any machine that the script works

`cpu` measures the time until a call returns, for a forward and for a forward with its backward, and the time on the GPU
beside that of dense flash attention. `table` measures forward and backward in bf16. The time of dense attention is that
of the faster of SDPA's flash and cuDNN kernels. The ratio is the speed of our products over that of the dense kernel's:
dense time x kept share / our time. The kept share counts scores that the pattern, causality and padding keep, over
those of dense attention (all, or those that causality keeps). Each row is first compared with float64 at 1,024 tokens.
For width 64 both kinds of kernels are measured, those for Hopper and those in plain Triton, and the faster one counts
as chosen well. `bert` compiles the layers of BERT-base and measures steps with a fixed number of tokens.

Before all else, small calls of each width run in processes of their own. Widths whose kernels for Hopper give wrong
results, or do not end, are measured with the kernels in plain Triton. Each row is independent: one that fails prints
its error. Rows are printed as they come, on stderr; the tables come last on stdout. Kernels are compiled before, in
processes side by side.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import math
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from sparse_common import (
    Clock,
    Row,
    Shape,
    header,
    layout_of,
    parts_of,
    relative,
    run_jobs,
    run_once,
    save,
    shown,
    synchronize,
    table,
    to_json,
    warm,
)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from twinflow.attention import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    Layout,
    dense_attention,
    from_flat,
    sparse_attention,
    triton_attention,
)
from twinflow.attention.tuning import HOPPER, Tunings, tunings_for

PARTS = ("cpu", "table", "bert", "flex")
TOLERANCE = 1e-2  # of the norm, in bf16
CHECK_LENGTH = 1024
SMOKE_S = 120.0
WANTED_MAIN, WANTED_OTHER = 0.8, 0.7
# Products of 2 x kept scores x width: a dense kernel needs 2 in forward and 5 in backward. Ours needs 3 for queries and
# 4 for keys and values, because it adds without atomics. For widths above 128 keys and values take one pass each.
DENSE_PRODUCTS, OUR_PRODUCTS, OUR_WIDE_PRODUCTS = 7, 9, 10
CPU_WANTED_MS = {"forward": 0.10, "both": 0.30}
BERT_WANTED = {512: 0.98, 1024: 0.98, 2048: 1.15, 4096: 1.4}
MAIN = ("random 10%", "fixed", "bigbird", "longformer", "window")


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    pattern: str
    shape: Shape
    kind: str = ""  # "", "causal", "padding", "heads" (a pattern for each head) or "odd" (length)

    @property
    def is_main(self) -> bool:
        return not self.kind and self.shape.head_dim in (64, 128)

    @property
    def name(self) -> str:
        return f"{self.pattern}, {self.shape}" + (f", {self.kind}" if self.kind else "")


@dataclass(frozen=True)
class Sizes:
    """How large everything is."""

    device: str
    dtype: torch.dtype
    base: int
    lengths: tuple[int, ...]
    check_length: int
    cpu_batch: int
    cpu_length: int
    narrow: Shape
    wide: Shape
    others: tuple[Shape, ...]


FULL = Sizes("cuda", torch.bfloat16, 128, (32768, 131072), CHECK_LENGTH, 8, 2048, Shape(12, 64), Shape(16, 128),
             (Shape(16, 96), Shape(8, 256), Shape(16, 80)))  # fmt: skip
TINY = Sizes("cpu", torch.float32, 16, (128,), 64, 1, 64, Shape(2, 16), Shape(1, 32), (Shape(1, 8),))


def cases(sizes: Sizes) -> list[Case]:
    found = [Case(pattern, shape) for shape in (sizes.narrow, sizes.wide) for pattern in MAIN]
    found += [Case(pattern, shape) for shape in sizes.others for pattern in ("bigbird", "random 10%")]
    kinds = ("causal", "padding", "heads", "odd")
    for shape, kind in itertools.product((sizes.wide, sizes.narrow), kinds):
        found.append(Case("random 10%" if kind == "heads" else "bigbird", shape, kind))
    return [*found, Case("longformer", sizes.wide, "causal")]


@lru_cache(maxsize=4)
def layout_for(case: Case, length: int, base: int) -> Layout:
    num_heads = case.shape.num_heads
    if case.kind == "causal":
        options: dict[str, Any] = {"num_sliding_window_blocks": 3, "attention": "unidirectional"}
        if case.pattern == "bigbird":
            return BigBirdSparsityConfig(num_heads, base, False, 1, num_global_blocks=1, **options).layout(length)
        return BSLongformerSparsityConfig(num_heads, base, False, **options).layout(length)
    if case.kind == "heads":
        num = -(-length // base)
        flats = []
        for head in range(num_heads):
            generator = torch.Generator().manual_seed(head)
            drawn = torch.rand(num, num, generator=generator).topk(max(1, round(0.1 * num))).indices
            flats.append((torch.arange(num)[:, None] * num + drawn).reshape(-1))
        return from_flat(flats, num, num, base)
    return layout_of(case.pattern, num_heads, base, -(-length // base) * base, base)


def tensors_of(sizes: Sizes, case: Case, length: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """q, k, v and the gradient of the result; and options of the call."""
    length = length - 37 if case.kind == "odd" else length
    shape = (1, case.shape.num_heads, length, case.shape.head_dim)
    generator = torch.Generator(sizes.device).manual_seed(length)
    drawn = [torch.randn(shape, generator=generator, device=sizes.device).to(sizes.dtype) for _ in range(4)]
    options: dict[str, Any] = {}
    if case.kind == "padding":  # a tenth of the keys, at the end
        options["key_padding"] = (torch.arange(length, device=sizes.device) < length * 9 // 10)[None]
    return (*(tensor.requires_grad_() for tensor in drawn[:3]), drawn[3]), options


def kept_share(layout: Layout, length: int, options: dict[str, Any]) -> float:
    """Kept scores over those of dense attention."""
    num_keys = int(options["key_padding"].sum()) if "key_padding" in options else length
    block, kept = layout.block, 0.0
    for pattern in range(layout.num_patterns):
        rows, cols = layout.rows_of(pattern).long(), layout.cols_of(pattern).long()
        sizes = [(stop - part * block).clamp(0, block).double() for part, stop in ((rows, length), (cols, num_keys))]
        scores = sizes[0] * sizes[1]
        if layout.is_causal:
            scores -= torch.where(rows == cols, scores - sizes[0] * (sizes[0] + 1) / 2, 0.0)
        kept += float(scores.sum())
    whole = length * (length + 1) / 2 if layout.is_causal else float(length) ** 2
    return kept / layout.num_patterns / whole


@contextmanager
def kernels(is_hopper: bool) -> Iterator[None]:
    """Within it, calls use the kernels for Hopper whatever their rows, or never."""

    def chosen(head_dim: int, dtype: torch.dtype) -> Tunings:
        found = tunings_for(head_dim, dtype)
        return replace(found, hopper=is_hopper and found.hopper, hopper_tokens=math.inf)

    old = triton_attention.tunings_for
    triton_attention.tunings_for = chosen  # type: ignore[assignment]
    triton_attention._CALLS.clear()
    try:
        yield
    finally:
        triton_attention.tunings_for = old
        triton_attention._CALLS.clear()


def ours(layout: Layout, options: dict[str, Any]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: sparse_attention(q, k, v, layout, **options)


def check(sizes: Sizes, case: Case) -> float:
    """The error of results and gradients, by norm."""
    layout = layout_for(case, sizes.check_length, sizes.base)
    data, options = tensors_of(sizes, case, sizes.check_length)
    exact = tuple(tensor.detach().double() for tensor in data)
    for tensor in exact[:3]:
        tensor.requires_grad_()
    truth = run_once(lambda q, k, v: dense_attention(q, k, v, layout, **options), exact)
    return relative(run_once(ours(layout, options), data), truth)


def dense_times(sizes: Sizes, shape: Shape, length: int, is_causal: bool, clock: Clock) -> dict[str, float]:
    """Milliseconds of forward and of both passes of the faster dense kernel."""
    case = Case("dense", shape)
    data, _ = tensors_of(sizes, case, length)
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION] if sizes.device == "cuda" else [SDPBackend.MATH]
    found: dict[str, float] = {"forward": math.inf, "both": math.inf}
    for backend in backends:

        def dense(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

        try:
            found["forward"] = min(found["forward"], clock.ms(lambda: dense(*data[:3])))
            found["both"] = min(found["both"], clock.ms(lambda: run_once(dense, data)))
        except RuntimeError as error:
            print(f"{backend.name}, {shape}: {str(error)[:100]}", file=sys.stderr, flush=True)
    return found


def measure_table(sizes: Sizes, deadline: float) -> Iterator[Row]:
    clock = Clock(sizes.device)
    errors: dict[Case, float] = {}
    dense: dict[tuple[Shape, int, bool], dict[str, float]] = {}
    for length, case in itertools.product(sizes.lengths, cases(sizes)):
        if case.shape.head_dim == 80 and length != sizes.lengths[0]:
            continue  # to save time
        row: Row = {"case": case.name, "tokens": length, "is_main": case.is_main, "width": case.shape.head_dim}
        if time.time() > deadline:
            yield row | {"problem": "no time"}
            continue
        try:
            if case not in errors:
                errors[case] = check(sizes, case)
            key = (case.shape, length, case.kind == "causal")
            if key not in dense:
                dense[key] = dense_times(sizes, *key, clock)
            layout = layout_for(case, length, sizes.base)
            data, options = tensors_of(sizes, case, length)
            way = ours(layout, options)
            row |= {"error": errors[case], "share": kept_share(layout, data[0].shape[2], options)}
            row |= {"dense": dense[key], "ours": clock.passes(way, data)}
            if case.shape.head_dim == 64 and sizes.device == "cuda":
                for name, is_hopper in (("hopper", True), ("triton", False)):
                    with kernels(is_hopper):
                        row[name] = clock.passes(way, data)
            if errors[case] > TOLERANCE:
                row["problem"] = f"wrong: the error is {errors[case]:.1e}"
        except Exception as error:
            row["problem"] = f"{type(error).__name__}: {str(error)[:150]}"
            print(traceback.format_exc(limit=-3), file=sys.stderr, flush=True)
        yield row


def ratio(row: Row, name: str) -> float | None:
    if "ours" not in row or "problem" in row:
        return None
    found = row["dense"][name] * row["share"] / row["ours"][name]
    return found if math.isfinite(found) else None


def table_lines(rows: list[Row]) -> list[str]:
    body = []
    for row in rows:
        wanted = WANTED_MAIN if row["is_main"] else WANTED_OTHER
        found = ratio(row, "both")
        cells = [row["case"], f"{row['tokens']:,}", shown(row.get("share"), 4)]
        names = ("ours", "hopper", "triton", "dense")
        cells += [shown(row[name]["both"], 3) if name in row else "" for name in names]
        verdict = row.get("problem") or ("" if found is None else "met" if found >= wanted else "below")
        cells += [shown(ratio(row, "forward")), shown(found), f"{wanted:g}", verdict]
        body.append(cells)
    heads = ["case", "tokens", "kept", "ours, ms", "Hopper, ms", "Triton, ms", "dense, ms", "forward ratio"]
    lines = table(
        "Speed of products over the dense kernel's, forward + backward", [*heads, "ratio", "wanted", ""], body
    )
    ceilings = f"{DENSE_PRODUCTS / OUR_PRODUCTS:.2f}, above width 128 {DENSE_PRODUCTS / OUR_WIDE_PRODUCTS:.2f}"
    return [*lines, "", f"At the dense kernel's speed for every product, forward + backward has the ratio {ceilings}."]


def host_ms(work: Callable[[], object], device: str) -> float:
    """Milliseconds until a call returns, the median of groups whose work fits into the queue of the GPU."""
    repeats = 10 if device == "cuda" else 1
    times = []
    for _ in range(16):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        times.append((time.perf_counter() - start) * 1e3 / repeats)
    return statistics.median(times)


def measure_cpu(sizes: Sizes, deadline: float) -> Iterator[Row]:
    clock = Clock(sizes.device)
    for shape in (sizes.narrow, sizes.wide):
        if time.time() > deadline:
            return
        row: Row = {"shape": f"{sizes.cpu_batch} x {sizes.cpu_length} x {shape}"}
        try:
            layout = layout_of("bigbird", shape.num_heads, sizes.base, sizes.cpu_length, sizes.base)
            size = (sizes.cpu_batch, shape.num_heads, sizes.cpu_length, shape.head_dim)
            drawn = [torch.randn(size, device=sizes.device).to(sizes.dtype) for _ in range(4)]
            data = (*(tensor.requires_grad_() for tensor in drawn[:3]), drawn[3])
            way = ours(layout, {})
            row["host"] = {
                "forward": host_ms(lambda: way(*data[:3]), sizes.device),  # noqa: B023
                "both": host_ms(lambda: run_once(way, data), sizes.device),  # noqa: B023
            }

            def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                with sdpa_kernel(SDPBackend.FLASH_ATTENTION if q.is_cuda else SDPBackend.MATH):
                    return F.scaled_dot_product_attention(q, k, v)

            row["dense_host"] = {
                "forward": host_ms(lambda: dense(*data[:3]), sizes.device),  # noqa: B023
                "both": host_ms(lambda: run_once(dense, data), sizes.device),  # noqa: B023
            }
            row["gpu"] = clock.passes(way, data)
            row["dense_gpu"] = clock.passes(dense, data)
            wall = min(timed(lambda: run_once(way, data), sizes.device) for _ in range(3))  # noqa: B023
            dense_wall = min(timed(lambda: run_once(dense, data), sizes.device) for _ in range(3))  # noqa: B023
            row |= {"wall_ms": wall, "dense_wall_ms": dense_wall}
        except Exception as error:
            row["problem"] = f"{type(error).__name__}: {str(error)[:150]}"
            print(traceback.format_exc(limit=-3), file=sys.stderr, flush=True)
        yield row


def timed(work: Callable[[], object], device: str, repeats: int = 10) -> float:
    """Milliseconds of a call, with the host's part."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3 / repeats


def cpu_lines(rows: list[Row]) -> list[str]:
    body = []
    for row, name in itertools.product(rows, ("forward", "both")):
        if "problem" in row:
            body.append([row["shape"], name, row["problem"], *[""] * 5])
            continue
        cells = [row["shape"], name, shown(row["host"][name], 3), f"{CPU_WANTED_MS[name]:.2f}"]
        cells += [shown(row["dense_host"][name], 3), shown(row["gpu"][name], 3), shown(row["dense_gpu"][name], 3)]
        walls = f"{row['wall_ms']:.3f} / {row['dense_wall_ms']:.3f}" if name == "both" else ""
        body.append([*cells, walls])
    heads = ["batch x tokens x heads x width", "pass", "ms until a call returns", "wanted", "dense flash"]
    heads += ["on the GPU, ms", "dense flash on the GPU, ms", "with the host's part, ours / dense"]
    return table("CPU time of a call, BigBird", heads, body)


def bert_step(is_sparse: bool, length: int, scale: Any) -> Callable[[], None]:
    import sparse_bert

    pattern = sparse_bert.bigbird(scale, scale.sizes["base"][2]) if is_sparse else None
    model = sparse_bert.bert(scale, "base", "sdpa", pattern)
    for layer in model.encoder.layer:
        layer.compile(dynamic=False)
    sparse_bert.set_length(model, length)
    return sparse_bert.Steps(scale, model, scale.tokens // length, length)


def bert_once(is_sparse: bool, length: int, scale: Any) -> None:
    step = bert_step(is_sparse, length, scale)
    step()
    synchronize(scale.device)


def measure_bert(sizes: Sizes, deadline: float) -> Iterator[Row]:
    """Steps in alternating windows. For sparse attention with each kind of kernels."""
    scale, lengths = bert_scale(sizes)
    for length in lengths:
        row: Row = {"tokens": length, "sequences": scale.tokens // length}
        if time.time() > deadline:
            return
        try:
            torch._dynamo.reset()
            dense, sparse = (bert_step(is_sparse, length, scale) for is_sparse in (False, True))
            times: dict[str, list[float]] = {"dense": [], "sparse": [], "sparse, Triton": []}
            for step in (dense, sparse):
                for _ in range(3):
                    step()
            for _ in range(5 if scale.device == "cuda" else 1):
                times["dense"].append(timed(dense, scale.device, 4))
                times["sparse"].append(timed(sparse, scale.device, 4))
            if scale.device == "cuda":
                with kernels(False):
                    sparse()
                    times["sparse, Triton"] = [timed(sparse, scale.device, 4) for _ in range(4)]
            row |= {name: statistics.median(found) for name, found in times.items() if found}
        except Exception as error:
            row["problem"] = f"{type(error).__name__}: {str(error)[:150]}"
            print(traceback.format_exc(limit=-3), file=sys.stderr, flush=True)
        yield row


def bert_scale(sizes: Sizes) -> tuple[Any, tuple[int, ...]]:
    import sparse_bert

    if sizes.device == "cpu":
        return sparse_bert.TINY, (64,)
    return sparse_bert.FULL, tuple(BERT_WANTED)


def bert_lines(rows: list[Row]) -> list[str]:
    body = []
    for row in rows:
        found = row["dense"] / row["sparse"] if "sparse" in row and "dense" in row else None
        wanted = BERT_WANTED.get(row["tokens"], 0.0)
        cells = [f"{row['tokens']:,}", str(row["sequences"])]
        cells += [shown(row.get(name), 2) for name in ("dense", "sparse", "sparse, Triton")]
        verdict = row.get("problem") or ("" if found is None else "met" if found >= wanted else "below")
        body.append([*cells, shown(found), f"{wanted:g}", verdict])
    heads = ["tokens", "sequences", "dense flash, ms", "sparse, ms", "sparse with Triton kernels, ms", "dense / sparse"]
    return table("A step of BERT-base, layers compiled, no dropout", [*heads, "wanted", ""], body)


def flex_backends() -> tuple[str, ...]:
    """The backends that the installed torch offers."""
    from torch.nn.attention import flex_attention

    offered = getattr(flex_attention, "_Backend", None)
    names = getattr(offered, "__args__", ())
    return tuple(name for name in names if name != "TRITON_DECODE") or ("default",)


def measure_flex(sizes: Sizes, deadline: float) -> Iterator[Row]:
    if sizes.device != "cuda":
        return
    import sparse_attention

    clock, length = Clock(sizes.device), sizes.lengths[0]
    for shape, backend in itertools.product((sizes.narrow, sizes.wide), flex_backends()):
        for pattern in ("bigbird", "random 10%"):
            row: Row = {"case": f"{pattern}, {shape}", "tokens": length, "backend": backend}
            if time.time() > deadline:
                return
            try:
                case = Case(pattern, shape)
                layout, (data, _) = layout_for(case, length, sizes.base), tensors_of(sizes, case, length)
                options = {} if backend == "default" else {"BACKEND": backend}
                way = sparse_attention.flex(layout, sizes.device, options)
                row |= {"flex": clock.passes(way, data), "ours": clock.passes(ours(layout, {}), data)}
            except Exception as error:
                row["problem"] = f"{type(error).__name__}: {str(error)[:150]}"
            yield row


def flex_lines(rows: list[Row]) -> list[str]:
    body = []
    for row in rows:
        cells = [row["case"], f"{row['tokens']:,}", row["backend"]]
        if "problem" in row:
            body.append([*cells, row["problem"].replace("\n", " "), "", ""])
            continue
        found = row["ours"]["both"] / row["flex"]["both"]
        body.append([*cells, shown(row["flex"]["both"], 3), shown(row["ours"]["both"], 3), shown(found)])
    heads = ["case", "tokens", "backend", "FlexAttention, ms", "ours, ms", "ours / FlexAttention"]
    return table("FlexAttention, forward + backward", heads, body)


MEASURES: dict[str, tuple[Callable[[Sizes, float], Iterator[Row]], Callable[[list[Row]], list[str]], float]] = {
    "cpu": (measure_cpu, cpu_lines, 60.0),
    "table": (measure_table, table_lines, 240.0),
    "bert": (measure_bert, bert_lines, 120.0),
    "flex": (measure_flex, flex_lines, 120.0),
}


def jobs(sizes: Sizes, parts: list[str]) -> list[Callable[[], object]]:
    """All that must be compiled, each to be run once."""
    found: list[Callable[[], object]] = []

    def once(case: Case, lengths: tuple[int, ...], is_hopper: bool | None) -> None:
        for length in lengths:
            layout = layout_for(case, length, sizes.base)
            data, options = tensors_of(sizes, case, length)
            if is_hopper is None:
                run_once(ours(layout, options), data)
            else:
                with kernels(is_hopper):
                    run_once(ours(layout, options), data)

    if "bert" in parts:
        scale, lengths = bert_scale(sizes)
        found += [partial(bert_once, is_sparse, length, scale) for is_sparse in (True, False) for length in lengths]
    if "table" in parts:
        for case in cases(sizes):
            ways = (True, False) if case.shape.head_dim == 64 else (None,)
            found += [partial(once, case, (sizes.check_length, *sizes.lengths), way) for way in ways]
    if "cpu" in parts or "flex" in parts:
        shapes = (sizes.narrow, sizes.wide)
        found += [partial(once, Case("bigbird", shape), (sizes.cpu_length,), None) for shape in shapes]
    return found


def smoke(sizes: Sizes, width: int) -> None:
    """Run and check small calls with heads of a width. Raises an error if a result is wrong."""
    shape = Shape(2, width)
    for case in (Case("bigbird", shape), *(Case("bigbird", shape, kind) for kind in ("causal", "padding", "odd"))):
        error = check(sizes, case)
        if not error < TOLERANCE:
            raise SystemExit(f"{case.name}: the error is {error:.1e}")


def failing_widths(widths: list[int]) -> list[int]:
    """Widths whose kernels for Hopper fail or do not end. They are tried in processes, because a kernel that does not
    end can only be killed."""
    command = [sys.executable, sys.argv[0], "--smoke"]
    processes = {width: subprocess.Popen([*command, str(width)]) for width in widths}
    end, failed = time.time() + SMOKE_S, []
    for width, process in processes.items():
        try:
            code = process.wait(max(1.0, end - time.time()))
        except subprocess.TimeoutExpired:
            process.kill()
            code = -1
        if code:
            print(f"width {width}: the kernels for Hopper fail or do not end", file=sys.stderr, flush=True)
            failed.append(width)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="cpu,table,bert", help="parts to run, with commas between")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of the table")
    parser.add_argument("--tiny", action="store_true", help="on the CPU")
    parser.add_argument("--save", action="store_true", help="write the result to a dated file")
    parser.add_argument("--without", type=int, nargs="*", default=[], help="widths without kernels for Hopper")
    parser.add_argument("--warm", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--smoke", type=int, help=argparse.SUPPRESS)
    given, rest = parser.parse_args(), [word for word in sys.argv[1:] if word != "--save"]
    for width in given.without:
        HOPPER.pop(width, None)
    sizes, parts = TINY if given.tiny else FULL, parts_of(given.only, PARTS)
    if given.lengths:
        sizes = replace(sizes, lengths=tuple(given.lengths))
    if sizes is not TINY and not torch.cuda.is_available():
        raise SystemExit("needs CUDA but for --tiny")
    if given.smoke:
        return smoke(sizes, given.smoke)
    found = jobs(sizes, parts)
    if given.warm:
        return run_jobs(found, *given.warm)
    start = time.time()
    if sizes.device == "cpu":
        torch.set_num_threads(1)
    failed: list[int] = []
    if sizes.device == "cuda":
        failed = failing_widths(sorted(HOPPER))
        for width in failed:
            del HOPPER[width]
        if failed:
            rest += ["--without", *map(str, (*given.without, *failed))]
        print(f"tried after {time.time() - start:.0f} s", file=sys.stderr, flush=True)
        warm(rest, len(found))
        print(f"compiled in {time.time() - start:.0f} s", file=sys.stderr, flush=True)
    facts: Row = {"date": datetime.date.today().isoformat(), "parts": {}}
    lines = [f"# Speed of sparse attention, {facts['date']}", "", *header(), f"- {sizes.dtype}, batch 1 in the table"]
    lines += [f"- without kernels for Hopper, because they failed: widths {failed}"] if failed else []
    for part in parts:
        begin = time.time()
        measure, shown_as, budget = MEASURES[part]
        rows: list[Row] = []
        facts["parts"][part] = rows
        try:
            for row in measure(sizes, begin + budget):
                rows.append(row)
                print(part, row, file=sys.stderr, flush=True)
        except Exception:
            print(f"{part} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        lines += shown_as(rows)
        print(f"{part}: {time.time() - begin:.0f} s", file=sys.stderr, flush=True)
    facts["seconds"] = round(time.time() - start)
    text = "\n".join([*lines, "", *to_json(facts)])
    if given.save:
        save(text, f"{facts['date']}-sparse-speed")
    print(text.split("```json", maxsplit=1)[0])  # the file has the numbers too


if __name__ == "__main__":
    main()
