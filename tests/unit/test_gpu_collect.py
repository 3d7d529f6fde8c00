# SPDX-License-Identifier: Apache-2.0
"""Gradients gathered and measured in one pass: the bits of torch, and one norm to the last bit however they came.

The kernel runs in Triton's interpreter, which is chosen when Triton is first imported: so it gets a process of its own,
`TRITON_INTERPRET=1 python tests/unit/test_gpu_collect.py CASE ...`. Without the variable the same runs on CUDA.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter_support import in_the_interpreter, needs_triton, run_cases, wanted_cases
from torch import Tensor, nn

from twinflow.gpu import collect
from twinflow.offload import pack_gradients
from twinflow.offload.plan import BucketPlan, ParamSpec, Slice, plan_buckets
from twinflow.optim.twin import Tuning, TwinOptimizer

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NUMELS = (1, 1500, 128, 127, 5000, 4096)  # below, at and above a block; below, at and above a tile


# What runs in the other process, or on a GPU.


def plan_of(dtype: torch.dtype, numels: tuple[int, ...] = NUMELS) -> BucketPlan:
    plan = plan_buckets([ParamSpec(str(i), numel, 0, dtype) for i, numel in enumerate(numels)])
    assert len(plan) == 1
    return plan[0]


def make_grads(plan: BucketPlan, dtype: torch.dtype, device: str, seed: int = 0) -> list[Tensor]:
    """One for each slice, of all sizes: from fp16's subnormal numbers to some thousands."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(s.numel, generator=generator) * 2.0 ** torch.randint(-16, 10, (s.numel,), generator=generator))
        .to(dtype)
        .to(device)
        for s in plan.slices
    ]


def fresh(plan: BucketPlan, device: str) -> tuple[Tensor, Tensor]:
    """A flat buffer as pools give it out, with old gradients but zeros between slices, and rows of an older step."""
    flat = torch.zeros(plan.numel, dtype=plan.dtype, device=device)
    for s in plan.slices:
        flat[s.offset : s.offset + s.numel] = math.nan
    return flat, torch.full((plan.numel // 128,), math.nan, device=device)


def in_parts(plan: BucketPlan, grads: list[Tensor]) -> list[tuple[Slice, Tensor]]:
    """Every gradient cut in two where it is longer than a block, the second half as a piece of its own."""
    found = []
    for s, grad in zip(plan.slices, grads, strict=True):
        cut = min(s.numel, (s.numel // 2 + 127) // 128 * 128)
        parts = [(0, cut), (cut, s.numel - cut)] if cut < s.numel else [(0, s.numel)]
        found += [(Slice(s.param, at, numel, s.offset + at), grad[at : at + numel]) for at, numel in parts]
    return found


def totals(plan: BucketPlan, grads: list[Tensor] | None, device: str) -> Tensor:
    """An fp32 sum; NaN between slices, where nothing may be read."""
    total = torch.full((plan.numel,), math.nan, device=device)
    for i, s in enumerate(plan.slices):
        total[s.offset : s.offset + s.numel] = grads[i].float() if grads is not None else 0.0
    return total


def strided(grad: Tensor) -> Tensor:
    """The same numbers, not side by side."""
    room = torch.full((grad.numel(), 2), math.nan, dtype=grad.dtype, device=grad.device)
    room[:, 0] = grad
    return room[:, 0]


def pieces_of(pairs: Sequence[tuple[Slice, Tensor]], is_first: bool = True) -> list[pack_gradients.Piece]:
    return [(cut, values, is_first) for cut, values in pairs]


def ways(plan: BucketPlan, grads: list[Tensor], device: str) -> dict[str, Callable[[Tensor], None]]:
    """All that end in the same flat buffer."""
    whole, parts = list(zip(plan.slices, grads, strict=True)), in_parts(plan, grads)
    apart = [(s, strided(grad)) for s, grad in whole]
    zeros = [(s, torch.zeros_like(grad)) for s, grad in whole]

    def twice(flat: Tensor) -> None:
        pack_gradients.add(flat, pieces_of(zeros))
        pack_gradients.add(flat, pieces_of(whole, is_first=False))

    def twice_apart(flat: Tensor) -> None:
        pack_gradients.add(flat, pieces_of(zeros))
        pack_gradients.add(flat, pieces_of(apart, is_first=False))

    return {
        "whole": lambda flat: pack_gradients.add(flat, pieces_of(whole)),
        "in parts": lambda flat: pack_gradients.add(flat, pieces_of(parts)),
        "strided": lambda flat: pack_gradients.add(flat, pieces_of(apart)),
        "added": twice,
        "added, strided": twice_apart,
        "last": lambda flat: pack_gradients.add_last(flat, totals(plan, None, device), pieces_of(whole)),
        "last, in parts": lambda flat: pack_gradients.add_last(flat, totals(plan, None, device), pieces_of(parts)),
        "cast": lambda flat: pack_gradients.cast(flat, totals(plan, grads, device), plan.slices),
    }


def same(a: Tensor, b: Tensor, note: str) -> None:
    """Numbers that are the same; zeros may differ in their sign."""
    differs = ((a != b) & ~(a.isnan() & b.isnan())).nonzero().flatten()
    assert not len(differs), (note, differs[:3].tolist(), a[differs[:3]], b[differs[:3]])


def check_ways(device: str, flat_dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    """Each way: the flat buffer torch would make, the rows of the truth, and one and the same norm."""
    plan = plan_of(flat_dtype)
    grads = make_grads(plan, grad_dtype, device)
    expected = torch.zeros(plan.numel, dtype=flat_dtype, device=device)
    for cut, grad in zip(plan.slices, grads, strict=True):
        expected[cut.offset : cut.offset + cut.numel] = grad
    norms = {}
    for name, run in ways(plan, grads, device).items():
        flat, rows = fresh(plan, device)
        run(flat)
        same(flat, expected, f"{name}: flat")
        collect.put_norms(rows, 0, flat)
        same(rows, collect.row_norms(flat), f"{name}: rows")
        norms[name] = torch.full((), math.nan, dtype=torch.float64, device=device)
        pack_gradients.measure(norms[name], flat)
    sources = [(s.offset, expected[s.offset : s.offset + s.numel]) for s in plan.slices]
    for name, measure in {
        "measured": partial(pack_gradients.measure, flat=expected),
        "measured in parts": partial(pack_gradients.measure_parts, sources=sources, numel=plan.numel),
        "measured apart": partial(
            pack_gradients.measure_parts, sources=[(at, strided(x)) for at, x in sources], numel=plan.numel
        ),
    }.items():
        norms[name] = torch.full((), math.nan, dtype=torch.float64, device=device)
        measure(norms[name])
    several = torch.full((4,), math.nan, dtype=torch.float64, device=device)
    other = torch.ones(128, dtype=flat_dtype, device=device)
    pack_gradients.measure_many(several, [(2, other), (0, expected), (3, expected.clone())])
    norms |= {"measured with others": several[0], "measured after others": several[3]}
    assert several.isnan().tolist() == [False, True, False, False]
    assert math.isclose(several[2].item(), math.sqrt(128), rel_tol=1e-6)
    found = {name: norm.item() for name, norm in norms.items()}
    assert len(set(found.values())) == 1, found
    truth = expected.double().norm().item()
    assert math.isclose(found["whole"], truth, rel_tol=1e-6), (found["whole"], truth)


def check_sums(device: str, flat_dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    """Sums have torch's rounding: of a total and the last gradient, and of two gradients in the flat buffer."""
    plan = plan_of(flat_dtype)
    first, second = (make_grads(plan, grad_dtype, device, seed) for seed in (1, 2))
    last, added = fresh(plan, device)[0], fresh(plan, device)[0]
    seconds = list(zip(plan.slices, second, strict=True))
    pack_gradients.add_last(last, totals(plan, first, device), pieces_of(seconds))
    pack_gradients.add(added, pieces_of(list(zip(plan.slices, first, strict=True))))
    pack_gradients.add(added, pieces_of(seconds, is_first=False))
    for cut, a, b in zip(plan.slices, first, second, strict=True):
        where = slice(cut.offset, cut.offset + cut.numel)
        same(last[where], (a.float() + b).to(flat_dtype), "last")
        same(added[where], a.to(flat_dtype).add_(b), "added")


def check_missing(device: str) -> None:
    """Slices without a gradient have no part in the norm, whatever their flat buffer holds."""
    plan = plan_of(BF16)
    grads, present = make_grads(plan, BF16, device), (1, 3, 4)
    norm = torch.zeros((), dtype=torch.float64, device=device)
    pack_gradients.measure_parts(norm, [(plan.slices[i].offset, grads[i]) for i in present], plan.numel)
    truth = math.sqrt(sum(grads[i].double().square().sum().item() for i in present))
    assert math.isclose(norm.item(), truth, rel_tol=1e-6)


def check_bad_numbers(device: str) -> None:
    """One gradient that is not finite makes the norm so: the clipping decision needs to know."""
    plan = plan_of(BF16)
    for value in (math.inf, -math.inf, math.nan):
        grads = make_grads(plan, BF16, device)
        grads[4][4999] = value
        flat, _ = fresh(plan, device)
        pack_gradients.put(flat, pieces_of(list(zip(plan.slices, grads, strict=True))))
        norm = torch.zeros((), dtype=torch.float64, device=device)
        pack_gradients.measure(norm, flat)
        assert math.isnan(norm.item()) if math.isnan(value) else norm.item() == math.inf, (value, norm)


class Branches(nn.Module):
    """A parameter that some steps do not use, one that is used twice, and sizes that fill no block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.twice, self.rare = nn.Linear(9, 37), nn.Linear(37, 37), nn.Linear(37, 37)

    def forward(self, x: Tensor, is_rare: bool) -> Tensor:
        x = self.twice(self.twice(self.first(x)).tanh())
        return (self.rare(x) if is_rare else x).square().mean()


def train(device: str, parts: int, **options: Any) -> tuple[Tensor, list[float]]:
    """Weights and norms after some steps; every one of them is clipped."""
    model = Branches().to(device)
    if options.get("early"):
        options["accumulation_steps"] = parts
    optimizer = TwinOptimizer(model, lr=1e-2, max_grad_norm=1e-3, tuning=Tuning(bucket_numel=1024), **options)
    norms = []
    for step in range(3):
        for part in range(parts):
            generator = torch.Generator().manual_seed(10 * step + part)
            loss = model(torch.randn(4, 9, generator=generator).to(device), is_rare=(step + part) % 2 == 0)
            (loss / parts).backward()
        optimizer.step()
        norms.append(optimizer.grad_norm or 0.0)
        optimizer.zero_grad()
    optimizer.wait()
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).cpu()
    optimizer.close()
    return weights, norms


def check_runtime(device: str, parts: int, ways: Sequence[tuple[float, bool]]) -> None:
    """Through the whole runtime: gathered as they come or taken at the end, state on the host or on the device."""
    assert collect.is_usable(torch.device(device))
    weights, norms = train(device, parts, ratio=1.0)
    for ratio, early in ways:
        other, other_norms = train(device, parts, ratio=ratio, early=early)
        assert torch.equal(weights, other), (ratio, early)
        assert len(set(norms)) == 3
        # The places are buckets of their own: sums of other buckets' norms differ in the last bits.
        assert (
            other_norms == norms if ratio == 1.0 else all(map(partial(math.isclose, rel_tol=1e-6), norms, other_norms))
        )


PAIRS = list(itertools.product((BF16, FP16, FP32), repeat=2))
FEW = ((1.0, True), (0.5, False), (0.0, True))  # ratios, and whether updates are early
EVERY = tuple(itertools.product((1.0, 0.5, 0.0), (False, True)))
CASES: dict[str, Callable[[str], None]] = {
    **{f"ways-{str(f)[6:]}-{str(g)[6:]}": partial(check_ways, flat_dtype=f, grad_dtype=g) for f, g in PAIRS},
    **{f"sums-{str(f)[6:]}-{str(g)[6:]}": partial(check_sums, flat_dtype=f, grad_dtype=g) for f, g in PAIRS},
    "missing": check_missing,
    "bad numbers": check_bad_numbers,
    "runtime": partial(check_runtime, parts=1, ways=FEW),
    "runtime, accumulated": partial(check_runtime, parts=3, ways=FEW),
    "runtime, every way": partial(check_runtime, parts=1, ways=EVERY),
    "runtime, accumulated, every way": partial(check_runtime, parts=3, ways=EVERY),
}


# The tests.

QUICK = ("bfloat16-float32",)  # the pairs of dtypes that are most in use


def _param(name: str) -> Any:
    is_rare = name.startswith(("ways-", "sums-")) and not name.endswith(QUICK)
    return pytest.param(name, marks=pytest.mark.matrix) if is_rare or name.endswith("every way") else name


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest) -> dict[str, str]:
    """What went wrong in each case that this session runs, all of them in one process with the interpreter on."""
    return in_the_interpreter(__file__, *wanted_cases(request))


@needs_triton
@pytest.mark.parametrize("name", [_param(name) for name in CASES])
def test_one_pass(name: str, interpreted: dict[str, str]) -> None:
    assert not interpreted[name], interpreted[name]


def test_without_triton_or_a_gpu_nothing_is_fused() -> None:
    assert not collect.is_usable(torch.device("cpu"))


def test_rows_are_checked() -> None:
    """The kernel writes wherever it is told to."""
    rows = collect.new_rows(256, torch.device("cpu"))
    for offset, numel in ((64, 100), (128, 129), (256, 1)):
        with pytest.raises(AssertionError):
            collect.put_norms(rows, offset, torch.zeros(numel))
    with pytest.raises(AssertionError):
        collect.put_norms(rows, 0, torch.zeros(128, device="meta"))


def compiled(values: str, monkeypatch: pytest.MonkeyPatch, to: Path) -> str:
    """The PTX for an H100 or H200."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(to))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from twinflow.gpu import collect_kernel

    types = [values, "*fp32", "i32", "i32"]
    names = collect_kernel.collect.arg_names
    signature = {name: kind or "constexpr" for name, kind in zip(names, [*types, None], strict=True)}
    constexprs = {(len(types),): collect.TILE}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(3)}
    source = ASTSource(collect_kernel.collect, signature, constexprs, aligned)
    options = {"num_warps": 8, "enable_fp_fusion": False}
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


@needs_triton
@pytest.mark.parametrize(("values", "loads"), [("*bf16", 2), ("*fp32", 4)])
def test_compiled_it_reads_wide_words(values: str, loads: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whole tiles 16 bytes at a time, sixteen elements for each thread; squares are rounded before they are added."""
    text = compiled(values, monkeypatch, tmp_path)
    assert text.count("ld.global.v4.b32") == loads
    assert not re.search(r"\bfma\.|\.ftz|\.approx", text)
    assert "sqrt.rn.f32" in text


if __name__ == "__main__":
    run_cases(CASES)
