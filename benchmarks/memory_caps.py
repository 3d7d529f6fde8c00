# SPDX-License-Identifier: Apache-2.0
"""How large a GPT-2 trains in 16 GB and in 32 GB of GPU memory: plain PyTorch and ZeRO-2 beside offload?

    python benchmarks/memory_caps.py --budget 300 --save                      # needs CUDA
    python benchmarks/memory_caps.py --rows weights --cap 16 --budget 130     # weights on the host too
    python benchmarks/memory_caps.py --tiny                                   # shows on any machine that it works

torch.cuda.set_per_process_memory_fraction limits the memory. One sequence of 1,024 tokens, checkpointing, no clipping.

- plain: fp32 weights, autocast to bf16, torch.optim.AdamW, as a user writes it.
- zero2: our engine with ZeRO stage 2 and no offload: bf16 weights with an fp32 master and fp32 state on the GPU.
- deepspeed: DeepSpeed's engine with the same settings and torch's AdamW, where the package can be imported.
- offload: our engine with ZeRO stage 2 and all state on the host, in the widest format that fits there. Also its speed.
- weights: weights on the host too. The host's memory limits the size then, not the GPU's.

Width 1600 for the first three and 4096 for the others; depth is searched in at most eight trials, which begin at a
prediction. A row gives the deepest model that trained and the next one that failed. The baselines run last, at the same
time, each under its limit. A row with offload first looks for the depth by at most three trials of forward and backward
alone, beside a tensor as large as the gradients on their way to the host, because allocating the state on the host
takes long. Prints a table; `--save` writes it to `--save-to`.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from offload import CUDA, DEVICE, Watch, free_bytes, state_of, synchronize, told_if_stuck

import twinflow
from twinflow.bench.machine import describe, read_machine
from twinflow.models.gpt import GPT, PRESETS, GPTConfig, cost_of, count_params, flops_per_token
from twinflow.offload.materialize import build
from twinflow.planner.costs import HOST_RESERVE, Memory, Placed, Run, bytes_of
from twinflow.planner.formats import STATES

GB = 10**9
DTYPE = torch.bfloat16 if CUDA else torch.float32
ROWS = ("plain", "zero2", "deepspeed", "offload", "weights")
BASELINES = ROWS[:3]
MAX_TRIALS = 8
BASELINES_S = 60.0  # of the budget, for the rows without offload
FEWER = 2  # blocks that the next trial of a row with offload has less than one that failed
TINY_GPT = GPTConfig(vocab_size=256, context=32, num_layers=2, hidden=32, num_heads=2, recompute="full")
# Bytes a parameter that the first trial assumes. Plain: fp32 weight, gradient and two moments, and what AdamW computes
# in between. DeepSpeed: bf16 weight and gradient, fp32 master, moments and gradient.
GUESS = {"plain": 20.0, "deepspeed": 22.0}


def shape_of(row: str, num_layers: int, is_tiny: bool) -> GPTConfig:
    if is_tiny:
        return replace(TINY_GPT, num_layers=num_layers)
    preset = PRESETS["gpt2-1.5b" if row in BASELINES else "gpt2-13b"]
    return replace(preset, num_layers=num_layers, recompute="full")


def run_of(shape: GPTConfig, states: str, keeps_gradients: bool = False) -> Run:
    return Run(cost_of(shape), 1, shape.context, states=states, clips=keeps_gradients)


def predicted(row: str, cap: int, host_bytes: int, is_tiny: bool) -> int:
    """Blocks of the deepest model that should fit."""
    if is_tiny:
        return 3
    deepest = 1
    for num_layers in range(1, 400):
        shape = shape_of(row, num_layers, False)
        numel = count_params(shape)
        run = run_of(shape, "int8") if row in ("offload", "weights") else run_of(shape, "fp32", keeps_gradients=True)
        memory = Memory(cap, host_bytes)
        on_host = Placed(numel) if row in ("offload", "weights") else Placed(0, numel)
        used = bytes_of(run, on_host, memory)
        gpu, host = used.gpu_total, used.host_total
        if row in GUESS:
            gpu = int(GUESS[row] * numel) + used.gpu["activations"]
        if row == "weights":  # while the state is filled, the host has the weights twice
            gpu, host = 0, host + 2 * numel
        if gpu > cap or host > host_bytes:
            break
        deepest = num_layers
    return max(1, int(0.97 * deepest)) if row == "offload" else deepest


def search(trains: Callable[[int], bool], first: int, until: float, max_trials: int = MAX_TRIALS) -> dict[str, Any]:
    """The largest number that trains and the least that fails, by at most `max_trials` trials."""
    good, bad, trial, stride = 0, 0, first, 1
    tried: list[tuple[int, bool]] = []
    while len(tried) < max_trials and trial > 0 and (not tried or time.perf_counter() < until):
        start = time.perf_counter()
        ok = trains(trial)
        tried.append((trial, ok))
        say(f"    {trial} blocks: {'trains' if ok else 'does not fit'}, {time.perf_counter() - start:.1f} s")
        good, bad = (max(good, trial), bad) if ok else (good, min(bad or trial, trial))
        if good and bad:
            if bad - good == 1:
                break
            trial = (good + bad) // 2
        else:
            trial += stride if ok else -stride
            stride *= 2
    return {"layers": good, "fails_at": bad, "trials": tried}


def free() -> None:
    gc.collect()  # an exception inside a checkpointed block keeps its model until then
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def is_full(error: BaseException) -> bool:
    """Whether memory of the GPU was full. Our engine reports this as MemoryError."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in str(error).lower()


def tokens_of(shape: GPTConfig) -> torch.Tensor:
    return torch.randint(0, shape.vocab_size, (1, shape.context), device=DEVICE)


def attempt(steps: Callable[[], None]) -> bool:
    """Whether the steps run. Memory is freed when no traceback holds the model any more."""
    ok = _runs(steps)
    free()
    return ok


def _runs(steps: Callable[[], None]) -> bool:
    try:
        steps()
        synchronize()
    except Exception as error:
        if not is_full(error):
            raise
        return False
    return True


def plain_steps(shape: GPTConfig) -> None:
    with torch.device(DEVICE):
        model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = tokens_of(shape)
    for _ in range(2):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = model(x, x).loss
        assert loss is not None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def config_of(zero: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """A config without clipping, for both engines."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": CUDA},
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, **options}},
        "zero_optimization": dict(zero),
    }


def our_config(zero: Mapping[str, Any]) -> dict[str, Any]:
    """As `twinflow train --grad-clip 0` makes it: no update waits for the last gradient."""
    return config_of(zero) | {"bf16": {"enabled": CUDA, "check_grad_overflow": False}}


def two_steps(engine: Any, shape: GPTConfig) -> None:
    """Two steps of an engine of either library, which is closed then."""
    try:
        x = tokens_of(shape)
        for _ in range(2):
            engine.backward(engine(x, x).loss)
            engine.step()
    finally:
        engine.destroy()


def engine_steps(shape: GPTConfig) -> None:
    """ZeRO-2 with all state on the GPU, by our engine."""
    engine, *_ = twinflow.initialize(model=build(lambda: GPT(shape), DEVICE, DTYPE), config=our_config({"stage": 2}))
    two_steps(engine, shape)


def deepspeed_steps(shape: GPTConfig) -> None:
    """The same by DeepSpeed's engine. FusedAdam would have to be compiled, so torch's AdamW updates."""
    import deepspeed

    model = build(lambda: GPT(shape), DEVICE, DTYPE)
    config = config_of({"stage": 2}, torch_adam=True) | {"steps_per_print": 10**9}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    two_steps(engine, shape)


STEPS = {"plain": plain_steps, "zero2": engine_steps, "deepspeed": deepspeed_steps}


def set_cap(cap: float) -> None:
    if CUDA:
        torch.cuda.set_per_process_memory_fraction(cap * GB / torch.cuda.get_device_properties(0).total_memory)


def baseline(row: str, cap: float, given: argparse.Namespace, until: float) -> dict[str, Any]:
    """The deepest model of a row without offload."""
    set_cap(cap)
    first = predicted(row, int(cap * GB), 1 << 60, given.tiny)

    def trains(num_layers: int) -> bool:
        return attempt(lambda: STEPS[row](shape_of(row, num_layers, given.tiny)))

    return search(trains, first, until, 2 if given.tiny else MAX_TRIALS) | {"first": first}


def alone_steps(shape: GPTConfig, cap: float) -> None:
    """Forward and backward beside a tensor for gradients on their way to the host. The optimizer's own limit for them
    is not enough: the embedding, which the head uses too, has its gradient last, and all of its buckets wait at once.
    """
    model = build(lambda: GPT(shape), DEVICE, DTYPE)
    run = run_of(shape, "int8")
    used = bytes_of(run, Placed(run.own_numel), Memory(int(cap * GB), 1 << 60))
    waiting = used.gpu["gradients"] + run.model.embedding_numel * DTYPE.itemsize
    beside = torch.empty(waiting, dtype=torch.uint8, device=DEVICE)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    x = tokens_of(shape)
    for _ in range(2):
        loss = model(x, x).loss  # type: ignore[operator]
        loss.backward()
    del beside


def widest(shape: GPTConfig, host_bytes: int, extra_bytes: int = 0) -> str:
    """The widest format whose state fits on the host."""
    for states in STATES:
        run = run_of(shape, states)
        if bytes_of(run, Placed(run.own_numel), Memory(1 << 60, host_bytes)).host_total + extra_bytes <= host_bytes:
            return states
    return STATES[-1]


def offloaded(row: str, cap: float, given: argparse.Namespace, until: float) -> dict[str, Any]:
    """The deepest model with all state on the host, and its speed."""
    set_cap(cap)
    host = int(free_bytes() * (1.0 - HOST_RESERVE))
    found: dict[str, Any] = {"layers": given.depth}
    if not given.depth:
        found["layers"] = found["first"] = predicted(row, int(cap * GB), host, given.tiny)
        if row == "offload":
            trains = lambda n: attempt(lambda: alone_steps(shape_of(row, n, given.tiny), cap))  # noqa: E731
            found |= search(trains, found["first"], until, max_trials=3)
    if not found["layers"]:
        return found | {"error": "forward and backward alone do not fit"}
    try:
        return found | speed_of(row, shape_of(row, found["layers"], given.tiny), host, given)
    except Exception as error:
        if not is_full(error):
            raise
        say(f"    {found['layers']} blocks: {error}")
        return found | {"layers": 0, "fails_at": found["layers"], "error": f"does not fit: {error}"[:200]}


def speed_of(row: str, shape: GPTConfig, host_bytes: int, given: argparse.Namespace) -> dict[str, Any]:
    """Training steps of the model."""
    states = widest(shape, host_bytes, 2 * count_params(shape) if row == "weights" else 0)
    zero: dict[str, Any] = {"stage": 2, "offload_optimizer": {"device": "cpu", "states": states, "early": True}}
    if row == "weights":
        zero |= {"stage": 3, "offload_param": {"device": "cpu"}}
    watch, start = Watch(), time.perf_counter()
    if row == "weights":
        engine, *_ = twinflow.initialize(model=lambda: GPT(shape), config=our_config(zero))
    else:
        engine, *_ = twinflow.initialize(model=build(lambda: GPT(shape), DEVICE, DTYPE), config=our_config(zero))
    init_s = time.perf_counter() - start
    say(f"    {count_params(shape) / 1e9:.2f} B, {states} state: built in {init_s:.0f} s")
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    x, losses, seconds = tokens_of(shape), [], []

    def state() -> str:
        return state_of(engine.optimizer)

    for _ in range(2 + given.windows):
        synchronize()
        start = time.perf_counter()
        with told_if_stuck(state):
            loss = engine(x, x).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
            synchronize()
        seconds.append(time.perf_counter() - start)
        say(f"    step {len(seconds)}: {seconds[-1]:.2f} s. {state()}")
    del seconds[:2]
    return {
        "states": states,
        "s": seconds,
        "tflops": flops_per_token(shape) * shape.context / statistics.median(seconds) / 1e12,
        "gpu_gb": torch.cuda.max_memory_allocated() / GB if CUDA else 0.0,
        "host_gb": watch.used() / GB,
        "init_s": init_s,
        "first_loss": float(losses[0]),
        "last_loss": float(losses[-1]),
    }


def child(row: str, given: argparse.Namespace) -> None:
    """The row under all caps. A failure does not end the other caps."""
    until = time.perf_counter() + given.budget
    for cap in given.cap:
        say(f"  {row}, {cap:g} GB")
        start = time.perf_counter()
        try:
            found = (baseline if row in BASELINES else offloaded)(row, cap, given, until)
        except Exception as error:
            traceback.print_exc()
            found = {"layers": 0, "error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
        for key in ("layers", "fails_at"):
            if found.get(key):
                name = "params" if key == "layers" else "fails_params"
                found[name] = count_params(shape_of(row, found[key], given.tiny))
        wall_s = time.perf_counter() - start
        print("ROW " + json.dumps({"row": row, "cap": cap, "wall_s": wall_s, **found}), flush=True)
    os._exit(0)  # giving a hundred gigabytes back in order takes longer than the steps


def start_row(
    row: str, caps: Sequence[float], given: argparse.Namespace, budget: float, port: int = 0, depth: int = 0
) -> Any:
    """A process for a row; its progress goes to stderr."""
    command = [sys.executable, __file__, "--child", row, "--cap", *map(str, caps), "--budget", str(budget)]
    command += ["--windows", str(given.windows), "--depth", str(depth), *(["--tiny"] if given.tiny else [])]
    env = dict(os.environ)
    if row == "deepspeed":
        env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        env |= {"MASTER_PORT": str(port), "DS_SKIP_CUDA_CHECK": "1"}
    output = tempfile.TemporaryFile("w+")  # noqa: SIM115
    return row, caps, subprocess.Popen(command, stdout=output, env=env), output


def finish(started: Any, timeout_s: float) -> list[dict[str, Any]]:
    """The rows of a process, and a row with an error for each cap without a result."""
    row, caps, process, output = started
    trouble = ""
    try:
        process.wait(max(1.0, timeout_s))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        trouble = "stopped, because its time was up"
    output.seek(0)
    lines = [line for line in output.read().splitlines() if line.startswith("ROW ")]
    rows: list[dict[str, Any]] = [json.loads(line.removeprefix("ROW ")) for line in lines]
    missing = [cap for cap in caps if cap not in {found["cap"] for found in rows}]
    trouble = trouble or f"exit code {process.returncode}"
    return rows + [{"row": row, "cap": cap, "layers": 0, "error": trouble} for cap in missing]


def offload_row(row: str, cap: float, given: argparse.Namespace, until: float) -> dict[str, Any]:
    """The row of the deepest model that trained. After a failure, which keeps its memory, another process takes FEWER
    blocks less."""
    depth, fails = 0, 0
    while True:
        left = until - time.perf_counter()
        (found,) = finish(start_row(row, [cap], given, left, depth=depth), left + 15.0)
        fails = found.get("fails_at") or fails
        is_done = found.get("params") or not found.get("fails_at") or found["fails_at"] <= 1
        if is_done or until - time.perf_counter() < 0.5 * found["wall_s"]:
            break
        depth = max(1, found["fails_at"] - FEWER)
    if fails:
        found |= {"fails_at": fails, "fails_params": count_params(shape_of(row, fails, given.tiny))}
    return found


def page(rows: Sequence[Mapping[str, Any]], command: str) -> str:
    gpu = torch.cuda.get_device_name() if CUDA else "no GPU"
    lines = [
        f"# Largest GPT-2 by GPU memory, {datetime.date.today()}",
        "",
        f"`{command}`: {gpu}; {describe(read_machine())}; torch {torch.__version__}",
        "",
        "One sequence of 1,024 tokens, checkpointing, no clipping. x plain: parameters beside those of plain PyTorch "
        "under the same limit.",
        "",
        "| limit | what | parameters | blocks | the next that failed | x plain | s/step | TFLOPS | GPU GB | host GB |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    plain = {row["cap"]: row["params"] for row in rows if row["row"] == "plain" and row.get("params")}
    names = {
        "plain": "plain PyTorch, autocast, AdamW",
        "zero2": "ZeRO-2, no offload (twinflow)",
        "deepspeed": "ZeRO-2, no offload (DeepSpeed)",
        "offload": "all state on the host",
        "weights": "state and weights on the host",
    }
    for row in sorted(rows, key=lambda row: (row["cap"], ROWS.index(row["row"]))):
        name = names[row["row"]] + (f", {row['states']} state" if "states" in row else "")
        if not row.get("params"):
            lines.append(f"| {row['cap']:g} GB | {name} | {row.get('error', 'no trial trained')} |" + " |" * 7)
            continue
        cells = [f"{row['cap']:g} GB", name, f"{row['params'] / 1e9:.2f} B", str(row["layers"])]
        cells.append(f"{row['fails_params'] / 1e9:.2f} B" if row.get("fails_params") else "")
        cells.append(f"{row['params'] / plain[row['cap']]:.2f}" if row["cap"] in plain else "")
        spread = f" ({min(row['s']):.2f} to {max(row['s']):.2f})" if "s" in row else ""
        cells.append(f"{statistics.median(row['s']):.2f}{spread}" if "s" in row else "")
        cells += [f"{row[key]:.1f}" if key in row else "" for key in ("tflops", "gpu_gb", "host_gb")]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", 'An empty cell in "the next that failed": no trial failed, or the host\'s memory was the limit.']
    return "\n".join([*lines, "", "```json", json.dumps({"rows": rows}), "```", ""])


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def main() -> None:
    begin = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--cap", type=float, nargs="+", default=[16.0, 32.0], help="GB of GPU memory")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS[:4]))
    parser.add_argument("--windows", type=int, default=4, help="steps that are timed")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds after which no new row is begun")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--save-to", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--depth", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=ROWS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        return child(given.child, given)
    until = begin + given.budget
    baselines = [row for row in given.rows if row in BASELINES]
    rows = []
    for row in (row for row in given.rows if row not in BASELINES):
        for cap in given.cap:
            last = until - (BASELINES_S if baselines else 0.0)
            if last - time.perf_counter() < 0.15 * given.budget:
                rows.append({"row": row, "cap": cap, "layers": 0, "error": "not begun: the time budget was used up"})
            else:
                now = time.perf_counter()
                num_left = len(given.cap) - given.cap.index(cap)
                rows.append(offload_row(row, cap, given, now + (last - now) / num_left))
            say(f"{rows[-1]}, after {time.perf_counter() - begin:.0f} s")
    left = max(BASELINES_S, until - time.perf_counter())
    started = [start_row(row, given.cap, given, left - 10.0, 29_520 + i) for i, row in enumerate(baselines)]
    for one in started:
        rows += finish(one, left)
    say(f"all rows after {time.perf_counter() - begin:.0f} s")
    command = re.sub(r" --save(-to \S+)?", "", " ".join(["python benchmarks/memory_caps.py", *sys.argv[1:]]))
    text = page(rows, command)
    print(text, flush=True)
    if given.save:
        given.save_to.mkdir(parents=True, exist_ok=True)
        which = "-weights" if given.rows == ["weights"] else ""
        (given.save_to / f"{datetime.date.today()}-memory-caps{which}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
