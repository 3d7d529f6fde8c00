"""Training steps of published shapes (Qwen2.5, Llama) beside forward and backward alone, eager and with compiled
blocks.

Random weights, bf16, 4 x 2048 tokens, activation checkpointing for each block, AdamW with fp32 state, clipping on but
not triggered. Every figure is the median of repeated windows, and the spread is printed beside it. Also printed: the
time that our hooks take on the threads that launch forward and backward, for each parameter. Needs CUDA and
transformers; `--size tiny` shows on any machine that it works, nothing more. `--save` writes a dated file in
benchmarks/results.

python benchmarks/real_models.py --cases qwen2.5-1.5b:eager qwen2.5-1.5b:compiled qwen2.5-0.5b:eager 3b:eager
"""

from __future__ import annotations

import argparse
import datetime
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from twinflow import native
from twinflow.bench.machine import describe, read_machine
from twinflow.optim.twin import Tuning, TwinOptimizer

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
BATCH, TOKENS = (4, 2048) if CUDA else (2, 32)
NEVER, ALWAYS = 1e6, 1e-3  # norms that are never and always exceeded
# hidden, layers, intermediate, heads, key-value heads, vocabulary, tied
SHAPES = {
    "qwen2.5-1.5b": (1536, 28, 8960, 12, 2, 151936, True),
    "qwen2.5-0.5b": (896, 24, 4864, 14, 2, 151936, True),
    "3b": (3200, 26, 8640, 32, 32, 32000, False),
    "tiny": (64, 3, 128, 4, 2, 512, True),
}


@dataclass
class Row:
    """One line of the table."""

    name: str
    seconds: list[float]  # of each window, for a step
    against: float  # forward and backward alone, or a bound
    limit: float | None  # that the quotient should not exceed
    more: str = ""

    @property
    def text(self) -> str:
        median = statistics.median(self.seconds)
        spread = f"{min(self.seconds):.4f} to {max(self.seconds):.4f}"
        limit = f"<= {self.limit:.2f}" if self.limit is not None else ""
        return f"| {self.name} | {median:.4f} | {spread} | {median / self.against:.3f} | {limit} | {self.more} |"


def build(shape: str, is_compiled: bool) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    hidden, layers, inner, heads, kv_heads, vocabulary, tied = SHAPES[shape]
    kinds = (Qwen2Config, Qwen2ForCausalLM) if kv_heads != heads else (LlamaConfig, LlamaForCausalLM)
    config = kinds[0](
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if CUDA else torch.float32)
    with torch.device(DEVICE):
        model: Any = kinds[1](config)
    torch.set_default_dtype(before)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    if is_compiled:
        for layer in model.model.layers:
            layer.compile()
    return model


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def measure(step: Callable[[], None], warm_up: int, windows: int, steps: int) -> list[float]:
    for _ in range(warm_up):
        step()
    found = []
    for _ in range(windows):
        synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize()
        found.append((time.perf_counter() - start) / steps)
    return found


class HookClock:
    """Adds up the time that the runtime's hooks take."""

    NAMES = ("grad_ready", "before_model", "before_forward", "before_recompute", "after_model")

    def __init__(self, runtime: Any) -> None:
        self.seconds = 0.0
        self._depth = 0
        for name in self.NAMES:
            setattr(runtime, name, self._timed(getattr(runtime, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            self._depth += 1
            try:
                return call(*args)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - start

        return timed


def hook_seconds(model: Any, optimizer: Any, data: torch.Tensor) -> float:
    """Of one step, with so few tokens that no launch waits for the device."""
    clock = HookClock(optimizer.runtime)
    num_steps = 5
    for step in range(num_steps + 2):
        if step == 2:
            clock.seconds = 0.0
        model(input_ids=data, labels=data).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.wait()
        synchronize()
    return clock.seconds / num_steps


def host_rate() -> float:
    """Parameters a second of the host update alone, as this machine does it now."""
    model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16) for _ in range(8)])
    optimizer = TwinOptimizer(model.parameters(), "adamw", lr=1e-4)
    for param in model.parameters():
        param.grad = torch.randn_like(param) * 1e-3
    for _ in range(3):
        optimizer.step()
    before = optimizer.metrics()["host_busy_s"]
    for _ in range(10):
        optimizer.step()
    rate = 10 * sum(p.numel() for p in model.parameters()) / (optimizer.metrics()["host_busy_s"] - before)
    optimizer.close()
    return rate


def run_case(shape: str, is_compiled: bool, options: argparse.Namespace) -> list[Row]:
    model = build(shape, is_compiled)
    numel = sum(p.numel() for p in model.parameters())
    num_params = len(list(model.parameters()))
    data = torch.randint(0, SHAPES[shape][5], (BATCH, TOKENS), generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def forward_backward() -> None:
        model(input_ids=data, labels=data).loss.backward()
        for param in model.parameters():
            param.grad = None

    windows, steps = options.windows, options.steps
    alone = measure(forward_backward, 3, windows, steps)
    base = statistics.median(alone)
    label = f"{shape}, {'compiled' if is_compiled else 'eager'}"
    rows = [Row(f"{label}: forward + backward alone", alone, base, None, f"{numel / 1e9:.2f} B parameters")]
    limits = {"qwen2.5-1.5b": 1.10 if is_compiled else 1.08, "qwen2.5-0.5b": 1.15, "3b": 1.03}
    settings: list[tuple[str, dict[str, Any], int, float | None]] = []
    for ratio in options.ratios:
        value: Any = ratio if ratio == "auto" else float(ratio)
        settings.append(
            (f"ratio {ratio}", {"ratio": value, "max_grad_norm": NEVER}, 12 if ratio == "auto" else 5, None)
        )
    if options.full:
        settings.append(("all state on the host, no clipping", {"ratio": 1.0}, 5, None))
        settings.append(
            ("all state on the host, every step clipped", {"ratio": 1.0, "max_grad_norm": ALWAYS}, 10, None)
        )
    for name, given, warm_up, _ in settings:
        gc.collect()
        optimizer = TwinOptimizer(model, "adamw", lr=1e-5, early=True, tuning=Tuning(), **given)

        def step(optimizer: Any = optimizer) -> None:
            model(input_ids=data, labels=data).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        found = measure(step, warm_up, windows, steps)
        microseconds = 1e6 * hook_seconds(model, optimizer, data[:1, :64]) / num_params
        limit = limits.get(shape) if name in ("ratio auto", "ratio 0") and "clipped" not in name else None
        more = f"hooks {microseconds:.1f} us a parameter, {optimizer.host_share:.2f} of the state on the host"
        rows.append(Row(f"{label}: {name}", found, base, limit, more))
        print(rows[-1].text, flush=True)
        optimizer.close()
        del optimizer, step
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["qwen2.5-1.5b:eager", "qwen2.5-1.5b:compiled", "3b:eager"])
    parser.add_argument("--ratios", nargs="+", default=["0", "auto"])
    parser.add_argument("--full", action="store_true", help="all state on the host too, without clipping and clipped")
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    machine = read_machine()
    lines = [
        f"# Published shapes beside forward and backward alone, {datetime.date.today()}",
        "",
        f"{torch.cuda.get_device_name() if CUDA else 'no GPU'}, {describe(machine)}; torch "
        f"{torch.__version__}; {BATCH} x {TOKENS} tokens, native {native.available()}",
        f"Host update alone: {host_rate() / 1e9:.2f} G param/s",
        "",
        "| case | s/step | spread | x | wanted | |",
        "|---|---:|---|---:|---|---|",
    ]
    for case in options.cases:
        shape, _, way = case.partition(":")
        lines += [row.text for row in run_case(shape, way == "compiled", options)]
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()
    text = "\n".join(lines)
    print(text)
    if options.save:
        path = Path(__file__).parent / "results" / f"{datetime.date.today()}-real-models.md"
        path.write_text(text + "\n")


if __name__ == "__main__":
    main()
