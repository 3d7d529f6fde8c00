# SPDX-License-Identifier: Apache-2.0
"""Large models with all parameters trained on one GPU. Default: Llama-2-70B, 4-bit states, bf16 weights without master.

Weights and state of the first blocks are on the GPU, those of the others on the host, in the share that the planner
chooses. The model is built block by block into these places from the meta device. No disk, no clipping, one fixed batch
of 4 x 2,048 tokens, activation checkpointing, the loss in chunks. Prints the plan, a line with the memory every ten
seconds, a line for each step, and at the end planned and measured bytes and seconds. Nothing is built if the plan does
not fit. After `--budget` seconds no further step begins. Needs transformers.

python benchmarks/largest_model.py --rehearse
python benchmarks/largest_model.py --budget 300 --save
python benchmarks/largest_model.py --shape qwen3-30b-a3b --states int8 --master fp32 --sequences 16 --alone --save

`--rehearse` trains 8 blocks with the ratio of the whole model, first with all of the GPU and then with its memory
limited to the plan, so that the same mixture of placed and fetched blocks runs within a minute. `--layers` lowers the
depth. `--alone` first measures forward and backward with all weights on the GPU, if it has room for them.
`--shape tiny --layers 8` and `--shape tiny-moe` run on any machine.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import faulthandler
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

START = time.perf_counter()
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch  # noqa: E402
from real_models import CUDA, DEVICE, TOKENS, bare, config_of, measure, sizes_of, synchronize  # noqa: E402
from weights_on_host import checkpoint_blocks, data_of, limit_memory, memory_available, prepared  # noqa: E402

from twinflow.bench.machine import describe, read_machine  # noqa: E402
from twinflow.device import Device, device_for  # noqa: E402
from twinflow.loss import LOSS_CHUNK  # noqa: E402
from twinflow.offload.materialize import build  # noqa: E402
from twinflow.offload.plan import RESIDENT  # noqa: E402
from twinflow.optim import twin_build  # noqa: E402
from twinflow.optim.twin import Tuning, TwinOptimizer  # noqa: E402
from twinflow.planner import costs  # noqa: E402
from twinflow.planner.cases import ON_HOST, Case, Setting, case_at  # noqa: E402
from twinflow.planner.machines import GPUS, Host, Machine, rates_of, recognise  # noqa: E402
from twinflow.planner.models import ModelCost, from_hf  # noqa: E402

DRAM_RATE = 150e9  # bytes/s, for the plan
LEAST_FREE = 2 * 10**9  # bytes of host memory; with less the run ends before the system ends it
REHEARSED_LAYERS = 8
FREE_AT_START = memory_available()


def say(text: str) -> None:
    print(f"[{time.perf_counter() - START:6.1f} s] {text}", flush=True)


class Watch:
    """A thread that shows the memory every ten seconds, and ends the process before the host's memory is full."""

    def __init__(self) -> None:
        self.phase = "start"
        self.host_bytes = 0  # most that were in use since the start
        threading.Thread(target=self._loop, daemon=True).start()

    def _loop(self) -> None:
        for count in range(1 << 30):
            time.sleep(0.25)
            left = memory_available()
            self.host_bytes = max(self.host_bytes, FREE_AT_START - left)
            if left < LEAST_FREE:
                say(f"only {left / 1e9:.1f} GB of host memory are left during {self.phase}: stopped")
                os._exit(3)
            if count % 40 == 39:
                gpu_gb = torch.cuda.memory_allocated() / 1e9 if CUDA else 0.0
                say(f"  {self.phase}: GPU {gpu_gb:.1f} GB, host {(FREE_AT_START - left) / 1e9:.1f} GB")


class Clock:
    """Seconds inside of functions that are called by name from elsewhere."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def measure(self, owner: Any, name: str, label: str) -> None:
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                self.seconds[label] = self.seconds.get(label, 0.0) + time.perf_counter() - start

        setattr(owner, name, timed)


def cost_of(shape: str) -> ModelCost:
    model = from_hf(config_of(shape), shape)
    # `chunk_loss` keeps its input and its gradient, and the logits of a chunk in bf16 and fp32.
    chunked = {
        "loss_bytes": 4.0 * model.hidden,
        "chunk_tokens": LOSS_CHUNK,
        "chunk_bytes": 6.0 * sizes_of(shape)[5],
    }
    return replace(model, activations=replace(model.activations, **chunked))


def setting_of() -> Setting:
    """This machine by the data sheet of its GPU; without a GPU an H200 with 16 cores and 125 GiB."""
    if CUDA:
        gpu = recognise(torch.cuda.get_device_name()) or GPUS["h200"]
        host = Host(FREE_AT_START, len(os.sched_getaffinity(0)), DRAM_RATE)
        gpu_bytes = device_for(torch.device(DEVICE, 0)).capacity_bytes() or 0
    else:
        gpu, host = GPUS["h200"], Host(125 << 30, 16, DRAM_RATE)
        gpu_bytes = gpu.memory_bytes
    return Setting(rates_of(Machine(gpu, host)), costs.Memory(gpu_bytes, host.ram_bytes))


def planned(shape: str, options: argparse.Namespace, ratio: float | None, setting: Setting) -> Case:
    """The plan with this ratio, or with the least that fits. Its bytes include the larger buffers for gradients of this
    script. Its seconds are those with the default buffers.
    """
    tokens = 2048 if options.plan_only else TOKENS
    model, sequences = cost_of(shape), options.sequences
    run = costs.Run(
        model,
        sequences,
        tokens,
        states=options.states,
        master=options.master,
        clips=False,
        offload_params=True,
        placement=options.placement,
    )
    slot = 2 * costs.bucket_numel(run)
    gpu = {"buffers": int(options.flat_gb * 1e9) - costs.FLAT_BYTES}
    host = {"slots": max(0, options.slots - costs.NUM_SLOTS) * slot}
    memory = costs.Memory(setting.memory.gpu_bytes - sum(gpu.values()), setting.memory.host_bytes - sum(host.values()))
    if ratio is None:
        ratio = costs.least_ratio(run, memory)
    case = case_at(ON_HOST, run, replace(setting, memory=memory), ratio)
    used = costs.Bytes({**case.used.gpu, **gpu}, {**case.used.host, **host})
    return replace(case, used=used)


def show_plan(case: Case, setting: Setting) -> None:
    used, memory = case.used, setting.memory
    parts = ", ".join(f"{name} {count / 1e9:.1f}" for name, count in used.gpu.items() if count)
    say(f"plan: {case.run.model.numel / 1e9:.2f} B parameters, {100 * case.ratio:.1f}% on the host")
    say(f"plan: GPU {used.gpu_total / 1e9:.1f} of {memory.gpu_bytes / 1e9:.1f} GB ({parts})")
    parts = ", ".join(f"{name} {count / 1e9:.1f}" for name, count in used.host.items() if count)
    say(f"plan: host {used.host_total / 1e9:.1f} of {memory.host_bytes / 1e9:.1f} GB ({parts})")
    say(f"plan: {case.prediction.step_s:.2f} s/step, {case.tokens_s:.0f} tokens/s, bound by {case.prediction.bound_by}")


def seconds_alone(shape: str, sequences: int) -> float:
    """Seconds of a forward and backward with all weights on the GPU. Gradients are dropped."""
    model: Any = prepared(build(lambda: bare(shape), DEVICE))
    checkpoint_blocks(model, keeps_inputs_on_host=False)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    data = data_of(shape, sequences)

    def both() -> None:
        model(input_ids=data, labels=data).loss.backward()

    return min(measure(both, 1, 3, 1))


def built(shape: str, ratio: float, options: argparse.Namespace, watch: Watch) -> tuple[Any, TwinOptimizer, Clock]:
    watch.phase = "construction"
    clock = Clock()
    clock.measure(twin_build, "materialised", "random weights, and copies of those for the host")
    clock.measure(type(device_for(torch.device(DEVICE))) if CUDA else Device, "pinned", "page-locked memory")
    clock.measure(twin_build.Aside, "fill", "copies into page-locked memory")
    with torch.device("meta"):
        model: Any = bare(shape, torch.bfloat16)
    say(f"model on the meta device: {sum(p.numel() for p in model.parameters()) / 1e9:.2f} B parameters")
    optimizer = TwinOptimizer(
        model,
        "adamw",
        lr=options.lr,
        states=options.states,
        master=options.master,
        ratio=ratio,
        placement=options.placement,
        early=True,
        offload_params=True,
        tuning=Tuning(num_slots=options.slots, flat_bytes=int(options.flat_gb * 1e9)),
    )
    synchronize()
    prepared(model)
    checkpoint_blocks(model, keeps_inputs_on_host=False)
    for label, seconds in clock.seconds.items():
        say(f"  {seconds:.1f} s: {label}")
    gc.collect()
    say("\n" + f"{optimizer!r}".partition("Parameter Group")[0].rstrip())
    return model, optimizer, clock


def trained(
    model: Any, optimizer: TwinOptimizer, data: torch.Tensor, num_steps: int, options: argparse.Namespace, watch: Watch
) -> list[dict[str, float]]:
    """Steps with one batch, at most `num_steps`, as long as the budget lasts."""
    runtime = optimizer.runtime
    assert runtime.param_offload is not None
    fetcher = runtime.param_offload.fetcher
    found: list[dict[str, float]] = []
    for number in range(1, num_steps + 1):
        watch.phase = f"step {number}"
        left_s = options.budget - (time.perf_counter() - START)
        if found and left_s < 1.2 * found[-1]["seconds"]:
            say(f"the budget of {options.budget:g} s ends: no step {number}")
            break
        for group in optimizer.param_groups:
            group["lr"] = options.lr * min(1.0, number / max(1, options.warm_up))
        before = (fetcher.fetched_bytes, runtime.executor.counters.bytes_out, optimizer.metrics()["host_busy_s"])
        start = time.perf_counter()
        loss = model(input_ids=data, labels=data).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = float(loss.detach())
        seconds = time.perf_counter() - start
        after = (fetcher.fetched_bytes, runtime.executor.counters.bytes_out, optimizer.metrics()["host_busy_s"])
        step = {
            "loss": value,
            "seconds": seconds,
            "tokens_s": data.numel() / seconds,
            "in_gb": (after[0] - before[0]) / 1e9,
            "out_gb": (after[1] - before[1]) / 1e9,
            "busy_s": after[2] - before[2],
            "used_gb": torch.cuda.max_memory_allocated() / 1e9 if CUDA else 0.0,
            "reserved_gb": torch.cuda.max_memory_reserved() / 1e9 if CUDA else 0.0,
            "host_gb": watch.host_bytes / 1e9,
        }
        found.append(step)
        say(f"step {number}: " + ", ".join(f"{name} {figure:.4g}" for name, figure in step.items()))
    return found


def steady(steps: list[dict[str, float]], name: str) -> float:
    """The mean without the first step, in which kernels are compiled."""
    later = steps[1:] or steps
    return sum(step[name] for step in later) / len(later)


def report(case: Case, steps: list[dict[str, float]], facts: dict[str, Any]) -> str:
    """The table of planned and measured figures, and the steps."""
    rows = [
        ("seconds of a step", case.prediction.step_s, steady(steps, "seconds")),
        ("tokens a second", case.tokens_s, steady(steps, "tokens_s")),
        ("GB of the GPU", case.used.gpu_total / 1e9, max(step["used_gb"] for step in steps)),
        ("GB of the host", case.used.host_total / 1e9, max(step["host_gb"] for step in steps)),
        ("seconds of host updates in a step", case.prediction.host_busy_s, steady(steps, "busy_s")),
    ]
    date = datetime.date.today().isoformat()
    gpu = torch.cuda.get_device_name() if CUDA else "no GPU"
    lines = [f"# All parameters of a large model on one GPU, {date}", ""]
    lines += [f"`python benchmarks/largest_model.py {' '.join(sys.argv[1:])}`", ""]
    lines += [f"{gpu}; {describe(read_machine())}; torch {torch.__version__}", ""]
    lines += [f"{name}: {value}" + "  " for name, value in facts.items()]
    lines += ["", "| | plan | measured |", "|---|---:|---:|"]
    lines += [f"| {name} | {plan:.4g} | {measured:.4g} |" for name, plan, measured in rows]
    names = list(steps[0])
    lines += ["", f"| step | {' | '.join(names)} |", "|---:" * (len(names) + 1) + "|"]
    lines += [f"| {i + 1} | " + " | ".join(f"{step[n]:.5g}" for n in names) + " |" for i, step in enumerate(steps)]
    lines += [
        "",
        "used_gb, reserved_gb: of the GPU, in use at the same time and reserved by torch; host_gb: host memory",
    ]
    lines += [
        "that is no longer available since the start; busy_s: the time of updates on the host; the table compares"
    ]
    lines += ["the mean of all steps but the first.", ""]
    record = {"date": date, "facts": facts, "plan": {n: p for n, p, _ in rows}, "steps": steps}
    return "\n".join([*lines, "```json", json.dumps(record), "```", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama2-70b", help="of real_models.py")
    parser.add_argument("--layers", type=int, help="the depth, if it is not that of the shape")
    parser.add_argument("--states", default="4bit", help="the format of the state")
    parser.add_argument("--master", default="none", choices=("none", "fp32"), help="of the weights")
    parser.add_argument("--alone", action="store_true", help="measure forward and backward alone first")
    parser.add_argument("--ratio", type=float, help="share on the host; default: the least that fits by the plan")
    parser.add_argument("--placement", default="spread", help="of the blocks on the GPU")
    parser.add_argument("--slots", type=int, default=16, help="page-locked buffers for the gradients of a bucket each")
    parser.add_argument("--flat-gb", type=float, default=3.5, help="GPU memory for gradients on their way, two blocks")
    parser.add_argument("--sequences", type=int, default=4, help="of 2,048 tokens")
    parser.add_argument("--steps", type=int, help="default: 10, and 5 in a rehearsal")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--warm-up", type=int, default=1, help="steps in which the learning rate rises")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds after which no step begins")
    parser.add_argument("--rehearse", action="store_true", help="few blocks, all of the GPU and then what is planned")
    parser.add_argument("--plan-only", action="store_true")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--save-to", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    options = parser.parse_args()
    faulthandler.enable()
    faulthandler.dump_traceback_later(options.budget + 20.0, exit=True)
    watch = Watch()
    setting = setting_of()
    name = options.shape.partition("@")[0]
    layers = options.layers or (REHEARSED_LAYERS if options.rehearse else sizes_of(options.shape)[1])
    shape, ratio = f"{name}@{layers}", options.ratio
    if ratio is None:  # a rehearsal has the ratio of the whole model
        ratio = planned(options.shape if options.rehearse else shape, options, None, setting).ratio
    case = planned(shape, options, ratio, setting)
    show_plan(case, setting)
    if not case.fits:
        missing = case.missing
        short = f"{missing.gpu_bytes / 1e9:.1f} GB of GPU memory and {missing.host_bytes / 1e9:.1f} GB of host memory"
        raise SystemExit(f"The plan does not fit: {short} are missing. Use another --ratio or fewer --layers.")
    if options.plan_only:
        return
    alone_s = 0.0
    if options.alone:
        watch.phase = "forward and backward alone"
        alone_s = seconds_alone(shape, options.sequences)
        say(f"forward and backward alone: {alone_s:.3f} s")
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    model, optimizer, clock = built(shape, ratio, options, watch)
    built_s = time.perf_counter() - START
    say(f"built {built_s:.1f} s after the start")
    data = data_of(shape, options.sequences)
    num_steps = options.steps or (5 if options.rehearse else 10)
    steps = trained(model, optimizer, data, num_steps, options, watch)
    plans = [bucket.plan for bucket in optimizer.runtime.buckets]
    facts: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        **({"forward and backward alone, s": round(alone_s, 3)} if alone_s else {}),
        "share on the host": round(optimizer.host_share, 4),
        "state with its weights on the GPU, GB": round(
            sum(optimizer.kind.nbytes(plan) for plan in plans if plan.place == RESIDENT) / 1e9, 1
        ),
        "ready after, s": round(built_s, 1),
        **{f"s of {label}": round(seconds, 1) for label, seconds in clock.seconds.items()},
    }
    if options.rehearse and CUDA:
        limit_bytes = case.used.gpu_total / (1.0 - costs.GPU_RESERVE)
        say(f"GPU limited to {limit_bytes / 1e9:.1f} GB")
        with contextlib.suppress(torch.OutOfMemoryError):
            limit_memory(limit_bytes / 1e9)
            torch.cuda.reset_peak_memory_stats()
            more = trained(model, optimizer, data, 3, options, watch)
            facts["with the GPU limited"] = {n: round(steady(more, n), 4) for n in ("seconds", "used_gb")}
    text = report(case, steps, facts)
    print(text, flush=True)
    if options.save:
        options.save_to.mkdir(parents=True, exist_ok=True)
        path = options.save_to / f"{datetime.date.today().isoformat()}-{name}.md"
        path.write_text(text, encoding="utf-8")
    os._exit(0)  # unlocking a hundred gigabytes takes longer than all of this


if __name__ == "__main__":
    try:
        main()
    except (torch.OutOfMemoryError, MemoryError) as error:
        say(f"not enough memory: {error}")
        os._exit(4)  # at once, so that a run with another --ratio can follow
