# SPDX-License-Identifier: Apache-2.0
"""Training steps of published shapes (Qwen2.5, Llama, OLMoE) beside forward and backward alone: eager, with compiled
blocks, and with compiled blocks in float8 (torchao).

Random weights, bf16, 4 x 2048 tokens, activation checkpointing for each block, AdamW with fp32 state, clipping on but
not triggered. Every figure is the median of repeated windows, and the spread is printed beside it. Also printed: the
time that our hooks take on the threads that launch forward and backward, for each parameter. It is measured twice: by a
clock around our own functions, and as what launching forward and backward takes longer than without an optimizer, which
includes what torch needs to call a hook. Needs CUDA and transformers; `--cases tiny:eager` shows on any machine that it
works, nothing more. `--save` writes a dated file in benchmarks/results.

python benchmarks/real_models.py --cases qwen2.5-1.5b:eager qwen2.5-1.5b:compiled qwen2.5-0.5b:eager 3b:eager
python benchmarks/real_models.py --cases olmoe:eager --ratios auto --torch    # experts, beside torch without offload
"""

from __future__ import annotations

import argparse
import datetime
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
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
    "qwen2.5-7b": (3584, 28, 18944, 28, 4, 152064, False),
    "llama3-8b": (4096, 32, 14336, 32, 8, 128256, False),
    "13b": (5120, 40, 13824, 40, 40, 32000, False),
    "llama2-70b": (8192, 80, 28672, 64, 8, 32000, False),
    "olmoe": (2048, 16, 1024, 16, 16, 50304, False),
    "qwen3-30b-a3b": (2048, 48, 768, 32, 4, 151936, False),
    "tiny": (64, 3, 128, 4, 2, 512, True),
    "tiny-moe": (64, 3, 32, 4, 2, 512, False),
}
EXPERTS = {"olmoe": (64, 8), "qwen3-30b-a3b": (128, 8), "tiny-moe": (8, 2)}  # in a layer, and for a token
HEAD_SIZES = {"qwen3-30b-a3b": 128}  # other than the hidden size over the heads


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


WAYS = ("eager", "compiled", "float8")


def sizes_of(shape: str) -> tuple[int, int, int, int, int, int, bool]:
    """The sizes of a shape. `llama2-70b@16` is the shape llama2-70b with 16 layers."""
    name, _, layers = shape.partition("@")
    hidden, depth, *rest = SHAPES[name]
    return hidden, int(layers or depth), *rest


def config_of(shape: str) -> dict[str, Any]:
    """The Hugging Face config of a shape."""
    hidden, layers, inner, heads, kv_heads, vocabulary, tied = sizes_of(shape)
    name = shape.partition("@")[0]
    config = {
        "model_type": "qwen2" if name.startswith(("qwen2", "tiny")) else "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }
    if name in EXPERTS:
        num_experts, num_active = EXPERTS[name]
        config |= {"num_experts": num_experts, "num_experts_per_tok": num_active, "moe_intermediate_size": inner}
        config["model_type"] = "olmoe" if name == "olmoe" else "qwen3_moe"
    if name in HEAD_SIZES:
        config["head_dim"] = HEAD_SIZES[name]
    return config


def bare(shape: str, dtype: torch.dtype | None = None) -> torch.nn.Module:
    """The model in bf16 (fp32 without a GPU), or in `dtype`, on torch's present default device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**config_of(shape), use_cache=False)
    torch.manual_seed(0)
    dtype = dtype or (torch.bfloat16 if CUDA else torch.float32)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model


def build(shape: str, way: str) -> torch.nn.Module:
    with torch.device(DEVICE):
        model: Any = bare(shape)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    if way == "float8":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        blocks = Float8LinearConfig(emulate=not CUDA)
        convert_to_float8_training(model.model.layers, config=blocks)  # the head stays in bf16
    if way != "eager":
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

    NAMES = ("before_model", "before_forward", "before_recompute", "after_model")

    def __init__(self, runtime: Any) -> None:
        self.seconds = 0.0
        self._depth = 0
        runtime._taker.take_queue = self._timed(runtime._taker.take_queue)
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


def launch_seconds(model: Any, data: torch.Tensor, after: Callable[[], None]) -> float:
    """What the launching threads need for forward and backward: the least of some steps, since only other work on the
    machine makes it longer. With so few tokens that no launch waits for the device."""
    found = []
    for _ in range(20):
        synchronize()
        start = time.perf_counter()
        model(input_ids=data, labels=data).loss.backward()
        found.append(time.perf_counter() - start)
        after()
    return min(found)


def hook_seconds(model: Any, optimizer: Any, data: torch.Tensor, alone_s: float) -> tuple[float, float]:
    """Of one step: inside our functions, and all that forward and backward take beyond `alone_s`."""

    def after() -> None:
        optimizer.step()
        optimizer.zero_grad()
        optimizer.wait()

    beyond_s = launch_seconds(model, data, after) - alone_s
    clock = HookClock(optimizer.runtime)
    inside: list[float] = []

    def read_clock() -> None:
        inside.append(clock.seconds)
        after()
        clock.seconds = 0.0

    launch_seconds(model, data, read_clock)
    return statistics.median(inside), beyond_s


def host_rate(states: str = "fp32") -> float:
    """Parameters a second of the host update alone, as this machine does it now."""
    model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16) for _ in range(8)])
    optimizer = TwinOptimizer(model.parameters(), "adamw", lr=1e-4, states=states)
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


@dataclass
class Setting:
    """One optimizer to measure."""

    name: str
    options: dict[str, Any]
    against: float  # seconds
    limit: float | None
    num_backwards: int = 1


def run_case(shape: str, way: str, options: argparse.Namespace, rate: float) -> list[Row]:
    model = build(shape, way)
    numel = sum(p.numel() for p in model.parameters())
    num_params = len(list(model.parameters()))
    data = torch.randint(0, SHAPES[shape][5], (BATCH, TOKENS), generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def forward_backward() -> None:
        model(input_ids=data, labels=data).loss.backward()
        for param in model.parameters():
            param.grad = None

    def forward() -> None:
        model(input_ids=data, labels=data)

    windows, steps = options.windows, options.steps
    alone = measure(forward_backward, 3, windows, steps)
    few = data[:1, :64]  # after the others: blocks are compiled for the first shape that they get
    alone_s = 0.0 if options.no_hooks else launch_seconds(model, few, lambda: model.zero_grad(set_to_none=True))
    base = statistics.median(alone)
    forward_s = statistics.median(measure(forward, 1, windows, steps))
    label = f"{shape}, {way}"
    rows = [Row(f"{label}: forward + backward alone", alone, base, None, f"{numel / 1e9:.2f} B parameters")]
    limits = {"qwen2.5-1.5b": 1.10 if way == "compiled" else 1.08, "qwen2.5-0.5b": 1.15, "3b": 1.03}
    limits |= {"llama3-8b": 1.05, "13b": 1.06, "olmoe": 1.20}
    settings: list[Setting] = []
    for text in options.ratios:
        ratio, _, clipped = text.partition(":")
        value: Any = ratio if ratio == "auto" else float(ratio)
        limit = limits.get(shape) if ratio in ("auto", "0") else None
        limit = 1.08 if clipped and limit is not None else limit
        name = f"ratio {ratio}" + (", every step clipped" if clipped else "")
        settings.append(Setting(name, {"ratio": value, "max_grad_norm": ALWAYS if clipped else NEVER}, base, limit))
    if options.full:
        update_s = numel / rate
        bound = max(base, update_s)
        clipped_bound = base - forward_s + max(forward_s, update_s)
        whole = {"ratio": 1.0}
        settings.append(Setting("all state on the host, no clipping, of its bound", whole, bound, 1.06))
        clipped = {"ratio": 1.0, "max_grad_norm": ALWAYS}
        settings.append(
            Setting("all state on the host, every step clipped, of its bound", clipped, clipped_bound, 1.08)
        )
        four = {"ratio": "auto", "max_grad_norm": NEVER, "accumulation_steps": 4}
        settings.append(Setting("four micro-batches, ratio auto", four, 4 * base, 1.05, 4))
    if options.torch:
        rows.append(Row(f"{label}: torch without offload", measure_torch(model, data, windows, steps), base, None))
        print(rows[-1].text, flush=True)
    wanted = [one for one in settings if options.only in one.name]
    for setting, bucket_numel in product(wanted, options.bucket_numel or [None]):
        gc.collect()
        tuning = Tuning() if bucket_numel is None else Tuning(bucket_numel=bucket_numel)
        threads = options.host_threads
        optimizer = TwinOptimizer(
            model, "adamw", lr=1e-5, early=True, tuning=tuning, host_threads=threads, **setting.options
        )

        def step(optimizer: Any = optimizer, num_backwards: int = setting.num_backwards) -> None:
            for _ in range(num_backwards):
                (model(input_ids=data, labels=data).loss / num_backwards).backward()
            optimizer.step()
            optimizer.zero_grad()

        measure(step, 5, 1, 1)
        while not optimizer.is_placed:  # "auto" measures and moves state during the first steps
            step()
        measure(step, 1, 1, 1)
        before_s = optimizer.metrics()["host_busy_s"]
        num_steps = max(1, steps // setting.num_backwards)
        found = measure(step, 0, windows, num_steps)
        busy_s = (optimizer.metrics()["host_busy_s"] - before_s) / (windows * num_steps)
        more = f"{optimizer.host_share:.2f} of the state on the host, which is busy for {busy_s:.3f} s"
        if setting.num_backwards == 1 and not options.no_hooks:
            inside, beyond = (1e6 * s / num_params for s in hook_seconds(model, optimizer, few, alone_s))
            more = (
                f"hooks {inside:.1f} us a parameter in our functions, {beyond:.1f} us beyond forward + backward alone, "
                f"{more}"
            )
        if optimizer.auto_report:
            more = f"{more}; {optimizer.auto_report}"
        size = "" if bucket_numel is None else f", buckets of {bucket_numel:,}"
        rows.append(Row(f"{label}: {setting.name}{size}", found, setting.against, setting.limit, more))
        print(rows[-1].text, flush=True)
        if options.full and setting.options == {"ratio": 1.0}:
            rows.append(busy_row(label, optimizer, step, base / 2))
            print(rows[-1].text, flush=True)
        optimizer.close()
        del optimizer, step
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()
    return rows


def measure_torch(model: Any, data: torch.Tensor, windows: int, steps: int) -> list[float]:
    """torch's fused AdamW with fp32 masters and all state on the GPU. A gradient is converted to fp32 when its
    parameter is updated, because a second copy of all gradients would not fit beside the state of 7 B parameters.
    """
    params = list(model.parameters())
    masters = [torch.nn.Parameter(p.detach().float()) for p in params]
    optimizers = [torch.optim.AdamW([master], lr=1e-5, fused=True) for master in masters]

    def step() -> None:
        model(input_ids=data, labels=data).loss.backward()
        torch.nn.utils.clip_grad_norm_(params, NEVER)
        for param, master, optimizer in zip(params, masters, optimizers, strict=True):
            if param.grad is not None:
                master.grad, param.grad = param.grad.float(), None
                optimizer.step()
                master.grad = None
                param.detach().copy_(master.detach())

    return measure(step, 2, windows, steps)


def busy_row(label: str, optimizer: Any, step: Callable[[], None], seconds: float) -> Row:
    """From the call of a step until its weights are there, while the main thread computes in Python or sleeps."""

    def compute() -> None:
        end = time.perf_counter() + seconds
        total = 0
        while time.perf_counter() < end:
            total += sum(range(100))

    def until_updated(meanwhile: Callable[[], None]) -> list[float]:
        found = []
        for _ in range(7):
            synchronize()
            start = time.perf_counter()
            step()
            meanwhile()
            optimizer.wait()
            synchronize()
            found.append(time.perf_counter() - start)
        return found[2:]

    asleep = statistics.median(until_updated(lambda: time.sleep(seconds)))
    return Row(
        f"{label}: a step and its updates, a busy main thread beside a sleeping one",
        until_updated(compute),
        asleep,
        1.05,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["qwen2.5-1.5b:eager", "qwen2.5-1.5b:compiled", "3b:eager"])
    parser.add_argument("--ratios", nargs="*", default=["0", "auto"], help="auto:clipped clips every step")
    parser.add_argument("--full", action="store_true", help="all state on the host too, without clipping and clipped")
    parser.add_argument("--only", default="", help="only settings whose name holds this text")
    parser.add_argument("--bucket-numel", type=int, nargs="+", help="sizes of buckets to compare, in elements")
    parser.add_argument("--host-threads", type=int, help="threads of the host update, instead of the default")
    parser.add_argument("--torch", action="store_true", help="torch without offload too, with fp32 masters")
    parser.add_argument("--no-hooks", action="store_true", help="do not measure the time of the hooks")
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    machine = read_machine()
    rate = host_rate()
    lines = [
        f"# Published shapes beside forward and backward alone, {datetime.date.today()}",
        "",
        f"{torch.cuda.get_device_name() if CUDA else 'no GPU'}, {describe(machine)}; torch "
        f"{torch.__version__}; {BATCH} x {TOKENS} tokens, native {native.available()}",
        f"Host update alone: {rate / 1e9:.2f} G param/s",
        "",
        "| case | s/step | spread | x | wanted | |",
        "|---|---:|---|---:|---|---|",
    ]
    for case in options.cases:
        shape, _, way = case.partition(":")
        if shape not in SHAPES or way not in WAYS:
            parser.error(f"{case}: SHAPE:WAY, with a shape of {', '.join(SHAPES)} and a way of {', '.join(WAYS)}")
        lines += [row.text for row in run_case(shape, way, options, rate)]
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
