# SPDX-License-Identifier: Apache-2.0
"""How much shorter is a step with a lower `ratio`, for the models of the Twin-Flow article and its tutorial?

    python benchmarks/twin_flow_opt.py --shape opt-13b --budget 230      # bf16 state, ratios 1 to 0: needs CUDA
    python benchmarks/twin_flow_opt.py --shape opt-30b --budget 150      # int8 state, the ratios that fit
    python benchmarks/twin_flow_opt.py --shape gpt-350m --budget 150     # beside DeepSpeed's Twin-Flow
    python benchmarks/twin_flow_opt.py --tiny                            # shows on any machine that the script works

Random weights in bf16, built on the GPU, AdamW. The planner says which ratios fit on GPU and host. Ratios that do not
fit are named with what they lack.

- `opt-13b` and `opt-30b`: one process, checkpointing, no clipping, one sequence of 512 or 2048 tokens. The state moves
  from ratio to ratio, as `ratio="auto"` moves it: every second ratio rising, then the others falling. Windows of both
  lengths alternate. DeepSpeed does not run here: its state does not fit on this host. Every window is printed, and a
  step that takes longer than 20 s prints the stacks of all threads.
- `gpt-350m` (tutorial) and `opt-1.3b`: a process for each system and ratio, all at the same time, without
  checkpointing. They are built one after the other, and their windows alternate, so that only one computes at a time.
  A process that does not compute keeps only weights and state on the GPU. DeepSpeed runs with ZeRO-3, which its
  Twin-Flow needs, and with sub-groups of a twentieth of the model: a ratio moves whole sub-groups, and the default of
  10^9 elements would be one group.

A window is one step that is not measured and some that are. Prints a table; `--save` writes it with a JSON line and a
picture to `--save-to`; `--plot FILE.md` draws the picture again.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import queue
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from offload import CUDA, DEVICE, Watch, free_bytes, state_of, synchronize, told_if_stuck
from seed_predictions import OPT
from twin_flow_plot import Line, drawing

from twinflow.bench.machine import describe, read_machine
from twinflow.offload import reconfigure
from twinflow.offload.plan import HOST, RESIDENT
from twinflow.optim.twin import TwinOptimizer
from twinflow.planner.costs import GPU_RESERVE, HOST_RESERVE, Bytes, Memory, Run, bytes_of, placed_at
from twinflow.planner.models import from_hf

DTYPE = torch.bfloat16 if CUDA else torch.float32
RATIOS = (1.0, 0.75, 0.5, 0.25, 0.0)
GB = 1e9
ALONE = "forward + backward alone"
IMPORT_S = 30.0  # all processes are waited for so long before the first one builds
GRACE_S = 60.0  # after the budget, a run that hangs is ended
WINDOW_S = 45.0  # a window that takes longer ends its process


@dataclass(frozen=True)
class Shape:
    """A model and how it is trained."""

    config: Mapping[str, Any]  # of transformers
    states: str
    lengths: tuple[int, ...]  # tokens of a sequence
    batch: int = 1
    clip: float = 0.0  # 0: no clipping
    ratios: tuple[float, ...] = RATIOS
    is_parallel: bool = False  # a process for each system and ratio, all at the same time
    checkpoints: bool = True


def opt(hidden: int, layers: int, heads: int, vocab_size: int = 50272) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "ffn_dim": 4 * hidden, "num_attention_heads": heads}
    return {"model_type": "opt", "vocab_size": vocab_size, "max_position_embeddings": 2048, **sizes}


def opt_of(name: str) -> dict[str, Any]:
    sizes = OPT[name]
    return opt(sizes["hidden_size"], sizes["num_hidden_layers"], sizes["num_attention_heads"])


def gpt2(hidden: int, layers: int, heads: int, context: int, vocab_size: int) -> dict[str, Any]:
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": context}
    return {"model_type": "gpt2", "vocab_size": vocab_size, **sizes}


SHAPES = {
    "opt-13b": Shape(opt_of("OPT-13B"), "bf16", (512, 2048)),
    "opt-30b": Shape(opt_of("OPT-30B"), "int8", (512, 2048), ratios=(1.0, 0.75, 0.65, 0.5, 0.4, 0.25, 0.0)),
    "opt-1.3b": Shape(
        opt(2048, 24, 32), "fp32", (512, 2048), ratios=(1.0, 0.5, 0.0), is_parallel=True, checkpoints=False
    ),
    "gpt-350m": Shape(
        gpt2(1024, 24, 16, 2048, 50304), "fp32", (2048,), batch=8, clip=1.0, is_parallel=True, checkpoints=False
    ),
    "tiny": Shape(opt(64, 4, 4, 512), "bf16", (16, 32), ratios=(1.0, 0.5, 0.0)),
    "tiny-parallel": Shape(
        gpt2(64, 3, 4, 32, 512), "fp32", (32,), batch=2, clip=1.0, ratios=(1.0, 0.0), is_parallel=True,
        checkpoints=False,
    ),
}  # fmt: skip


def build(shape: Shape) -> Any:
    """The model with random weights, built on the GPU: on the CPU that would take minutes."""
    from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

    sizes = {key: value for key, value in shape.config.items() if key != "model_type"}
    common = {"use_cache": False, "attn_implementation": "sdpa"}
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    model: Any
    try:
        with torch.device(DEVICE):
            if shape.config["model_type"] == "opt":
                off = {"dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0}
                width = sizes["hidden_size"]
                model = OPTForCausalLM(OPTConfig(**sizes, **off, **common, word_embed_proj_dim=width))
            else:
                off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
                model = GPT2LMHeadModel(GPT2Config(**sizes, **off, **common))
    finally:
        torch.set_default_dtype(before)
    if shape.checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def data_of(shape: Shape, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, shape.config["vocab_size"], (shape.batch, tokens), generator=generator).to(DEVICE)


# Which ratios fit.


def room() -> Memory:
    """What GPU and host have, less what the planner leaves free."""
    gpu = torch.cuda.get_device_properties(0).total_memory if CUDA else 8 * 10**9
    host = min(read_machine().memory_bytes, free_bytes())
    return Memory(int(gpu * (1.0 - GPU_RESERVE)), int(host * (1.0 - HOST_RESERVE)))


def need(shape: Shape, ratio: float, memory: Memory) -> Bytes:
    """Bytes of the planner."""
    cost = from_hf(dict(shape.config))
    run = Run(
        cost,
        shape.batch,
        max(shape.lengths),
        states=shape.states,
        clips=bool(shape.clip),
        checkpointing=shape.checkpoints,
        weights="bf16",
    )
    return bytes_of(run, placed_at(run, ratio), memory)


def why_not(used: Bytes, memory: Memory) -> str:
    """What a ratio lacks; "" if it fits. Memory for updates ahead of the clipping decision is not counted."""
    gpu, host = used.gpu_total, used.host_total - used.host["shadows"]
    lacks = []
    if gpu > memory.gpu_bytes:
        lacks.append(f"{gpu / GB:.0f} GB on the GPU, which has {memory.gpu_bytes / GB:.0f}")
    if host > memory.host_bytes:
        lacks.append(f"{host / GB:.0f} GB on the host, which has {memory.host_bytes / GB:.0f}")
    return " and ".join(lacks)


def all_formats(shape: Shape, memory: Memory) -> list[dict[str, Any]]:
    """Whether each ratio fits, for every format of the state."""
    rows = []
    for states in ("fp32", "bf16", "int8"):
        for ratio in shape.ratios:
            used = need(replace(shape, states=states), ratio, memory)
            row = {"states": states, "ratio": ratio, "gpu_gb": used.gpu_total / GB}
            row["host_gb"] = (used.host_total - used.host["shadows"]) / GB
            rows.append(row | {"lacks": why_not(used, memory)})
    return rows


# One process, one model: the state moves.


def move_to(optimizer: TwinOptimizer, ratio: float) -> None:
    """Moves state until `ratio` of it is on the host, to one bucket. The device has the state of those weights that a
    forward needs first, as with `placement="auto"`."""
    runtime = optimizer.runtime
    runtime.wait()
    runtime.wait_for_copies()
    total = sum(bucket.plan.numel for bucket in runtime.buckets)
    passed = 0
    for bucket in sorted(runtime.buckets, key=lambda bucket: bucket.plan.block):  # outside of blocks: -1
        is_resident = passed + bucket.plan.numel / 2 <= (1.0 - ratio) * total
        passed += bucket.plan.numel
        reconfigure.move(runtime, bucket, RESIDENT if is_resident else HOST)


def new_peak() -> None:
    if CUDA:
        torch.cuda.reset_peak_memory_stats()


def peak_gb() -> float:
    return torch.cuda.max_memory_allocated() / GB if CUDA else 0.0


def window(step: Callable[[int], None], tokens: int, steps: int) -> float:
    """Seconds a step. The step before is not measured; its update may still run when the window begins, as the update
    of the last step runs when it ends."""
    step(tokens)
    synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step(tokens)
    synchronize()
    return (time.perf_counter() - start) / steps


def steps_for(seconds: float) -> int:
    """Steps of a window: at least about a second, at most four steps."""
    return max(1, min(4, round(1.2 / max(seconds, 1e-3)))) if CUDA else 1


def first_window(step: Callable[[int], None], tokens: int, until: float, state: Callable[[], str]) -> float:
    """Two single steps, or one if time is up, each printed when the GPU has finished it. Seconds of the last one."""
    seconds = 0.0
    for which in ("first", "second"):
        if seconds and time.perf_counter() > until:
            break
        start = time.perf_counter()
        with told_if_stuck(state):
            step(tokens)
            synchronize()
        seconds = time.perf_counter() - start
        say(f"    {tokens} tokens, {which} step: {seconds:.2f} s. {state()}")
    return seconds


def alternating(
    step: Callable[[int], None], lengths: Sequence[int], num: int, until: float, state: Callable[[], str] = lambda: ""
) -> dict[int, list[float]]:
    """Windows of each length, in turns. If time is up, a length may have only its last single step, or be missing."""
    guess: dict[int, float] = {}
    for tokens in lengths:
        if not guess or time.perf_counter() < until:
            guess[tokens] = first_window(step, tokens, until, state)
    found: dict[int, list[float]] = {tokens: [] for tokens in guess}
    for turn in range(num):
        for tokens in guess:
            if time.perf_counter() > until:
                break
            with told_if_stuck(state):
                found[tokens].append(window(step, tokens, steps_for(guess[tokens])))
            say(f"    {tokens} tokens, window {turn + 1} of {num}: {found[tokens][-1]:.3f} s a step. {state()}")
    return {tokens: seconds or [guess[tokens]] for tokens, seconds in found.items()}


def in_order(ratios: Sequence[float]) -> list[float]:
    """Every second ratio rising, then the others falling: the outer ones come early, and each state is allocated on
    the host only once."""
    rising = sorted(ratios)
    return [*rising[::2], *reversed(rising[1::2])]


Rows = list[dict[str, Any]]


def sweep(
    shape: Shape,
    options: argparse.Namespace,
    begin: float,
    memory: Memory,
    save: Callable[[Rows, list[str]], object] | None = None,
) -> tuple[Rows, list[str]]:
    """Rows, and what was left out and why. `save` is called after each ratio, because the next one could fail."""
    until = begin + options.budget
    left_out, ratios = [], []
    for ratio in in_order(options.ratios or shape.ratios):
        reason = why_not(need(shape, ratio, memory), memory)
        if reason:
            left_out.append(f"ratio {ratio:g}, {shape.states} state: needs {reason}")
        else:
            ratios.append(ratio)
    if not ratios:
        return [], left_out
    watch = Watch()
    model = build(shape)
    numel = sum(p.numel() for p in model.parameters())
    data = {tokens: data_of(shape, tokens) for tokens in shape.lengths}
    say(f"built {numel / 1e9:.2f} B parameters after {time.perf_counter() - begin:.0f} s")

    def alone(tokens: int) -> None:
        model(input_ids=data[tokens], labels=data[tokens]).loss.backward()

    handles = [p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for p in model.parameters()]
    new_peak()
    seconds = alternating(alone, shape.lengths, options.windows, until)
    for handle in handles:
        handle.remove()
    base = {"params": numel, "states": shape.states, "system": "twinflow", "batch": shape.batch}
    rows: Rows = [
        base | {"system": ALONE, "tokens": tokens, "s": s, "gpu_gb": peak_gb()} for tokens, s in seconds.items()
    ]
    start = time.perf_counter()
    say(f"forward and backward alone measured after {start - begin:.0f} s")
    with told_if_stuck(lambda: f"building the optimizer, {free_bytes() / GB:.0f} GB of host memory free"):
        optimizer = TwinOptimizer(
            model, lr=1e-6, early=True, ratio=ratios[0], states=shape.states, max_grad_norm=shape.clip or None
        )
    say(f"optimizer with ratio {ratios[0]:g} in {time.perf_counter() - start:.1f} s")

    def state() -> str:
        return state_of(optimizer)

    def step(tokens: int) -> None:
        model(input_ids=data[tokens], labels=data[tokens]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for ratio in ratios:
        if time.perf_counter() > until:
            left_out.append(f"ratio {ratio:g}: the time budget of {options.budget:g} s was used up")
            continue
        try:
            started = time.perf_counter()
            if ratio != ratios[0]:
                with told_if_stuck(state):
                    move_to(optimizer, ratio)
                    synchronize()
                say(f"moved to ratio {ratio:g} in {time.perf_counter() - started:.1f} s")
            new_peak()
            watch.least = free_bytes()
            limit = min(until, time.perf_counter() + options.ratio_limit)
            found = alternating(step, shape.lengths, options.windows, limit, state)
            with told_if_stuck(state):
                optimizer.wait()
            facts = {"ratio": ratio, "host_share": optimizer.host_share, "gpu_gb": peak_gb()}
            facts["host_gb"] = max(0.0, watch.used() / GB)
            rows += [base | facts | {"tokens": tokens, "s": s} for tokens, s in found.items()]
            missing = [tokens for tokens in shape.lengths if tokens not in found]
            left_out += [f"ratio {ratio:g}, {tokens} tokens: its time was up" for tokens in missing]
            say(f"ratio {ratio:g}: {found}, {facts}, after {time.perf_counter() - begin:.0f} s")
            if save is not None:
                save(rows, left_out)
        except (RuntimeError, MemoryError) as error:  # out of memory is a RuntimeError
            traceback.print_exc()
            left_out.append(f"ratio {ratio:g}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
            break  # the state may have moved in part
    return rows, left_out


# A process for each system and ratio.


def contestant(shape: Shape, system: str, ratio: float) -> None:
    """Says that it has imported all it needs, then answers every line of stdin: the word build, or tokens and steps of
    a window. It keeps no memory of activations in between, because the others need it."""
    from transformers import GPT2LMHeadModel, OPTForCausalLM

    assert all((GPT2LMHeadModel, OPTForCausalLM))  # imported before the first process builds
    if system == "deepspeed":
        import deepspeed
        from deepspeed.ops.op_builder import CPUAdamBuilder

        assert deepspeed
        CPUAdamBuilder().load()  # compiled once; processes wait for each other
    if CUDA:
        torch.zeros(1, device=DEVICE)
    answer({})
    sys.stdin.readline()
    before = free_bytes()
    model = build(shape)
    numel = sum(p.numel() for p in model.parameters())
    step = STEPPERS[system](model, shape, ratio)
    data = {tokens: data_of(shape, tokens) for tokens in shape.lengths}
    for _ in range(3):
        step(data[max(shape.lengths)])
    synchronize()
    release_cache()
    answer({"params": numel, "host_gb": max(0, before - free_bytes()) / GB})
    for line in sys.stdin:
        tokens, steps = map(int, line.split())
        seconds = window(lambda tokens: step(data[tokens]), tokens, steps)
        found = {"s": seconds, "gpu_gb": peak_gb()}
        release_cache()
        answer(found)
    sys.stdout.flush()
    os._exit(0)


def release_cache() -> None:
    if CUDA:
        torch.cuda.empty_cache()


def answer(found: Mapping[str, Any]) -> None:
    print("ANSWER " + json.dumps(found), flush=True)


Step = Callable[[torch.Tensor], None]


def twin_stepper(model: Any, shape: Shape, ratio: float) -> Step:
    optimizer = TwinOptimizer(
        model, lr=1e-6, early=True, ratio=ratio, states=shape.states, max_grad_norm=shape.clip or None
    )

    def step(x: torch.Tensor) -> None:
        model(input_ids=x, labels=x).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def alone_stepper(model: Any, shape: Shape, ratio: float) -> Step:
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    def step(x: torch.Tensor) -> None:
        model(input_ids=x, labels=x).loss.backward()

    return step


def deepspeed_stepper(model: Any, shape: Shape, ratio: float) -> Step:
    """DeepSpeed's Twin-Flow, with the options of its tutorial."""
    import deepspeed

    numel = sum(p.numel() for p in model.parameters())
    zero = {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": ratio},
        "sub_group_size": max(1, numel // 20),
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    config = {
        "train_micro_batch_size_per_gpu": shape.batch,
        "bf16": {"enabled": True},
        "gradient_clipping": shape.clip,
        "prescale_gradients": False,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6}},
        "zero_optimization": zero,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(x: torch.Tensor) -> None:
        engine.backward(engine(input_ids=x, labels=x).loss)
        engine.step()

    return step


STEPPERS: dict[str, Callable[[Any, Shape, float], Step]] = {
    "twinflow": twin_stepper,
    ALONE: alone_stepper,
    "deepspeed": deepspeed_stepper,
}


class Contest:
    """A process of `contestant`. A thread of its own reads its answers, so that none has to wait to be read."""

    def __init__(self, name: str, layers: int, system: str, ratio: float, port: int) -> None:
        self.system = system
        self.ratio = ratio
        self.label = system if system == ALONE else f"{system}, ratio {ratio:g}"
        self.facts: dict[str, Any] = {}
        self.seconds: dict[int, list[float]] = {}
        self.trouble = ""
        ours = [sys.executable, __file__, "--shape", name, "--layers", str(layers)]
        ours += ["--contestant", system, str(ratio)]
        env = dict(os.environ) | {"PYTHONUNBUFFERED": "1"}
        if system == "deepspeed":
            env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
            env |= {"MASTER_PORT": str(port), "DS_SKIP_CUDA_CHECK": "1"}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            ours, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=env
        )
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                self._answers.put(json.loads(line.removeprefix("ANSWER ")))
        self._answers.put(None)

    @property
    def has_answered(self) -> bool:
        return not self._answers.empty()

    def read(self, seconds: float) -> dict[str, Any] | None:
        """The next answer; None if the process ended without one, or did not answer in time and was ended."""
        try:
            found = self._answers.get(timeout=max(0.1, seconds))
        except queue.Empty:
            self.end()
            self.trouble = f"no answer within {seconds:.0f} s"
            found = None
        if found is not None:
            return found
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        say(f"{self.label} ended:\n" + "\n".join(lines[-25:]))
        code = self._process.wait()
        self.trouble = self.trouble or (lines[-1][:200] if lines else f"exit code {code}")
        return None

    def ask(self, line: str, seconds: float) -> dict[str, Any] | None:
        """The answer to a line."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError:  # the process has ended
            pass
        return self.read(seconds)

    def run(self, tokens: int, steps: int) -> float | None:
        """A window."""
        found = self.ask(f"{tokens} {steps}", WINDOW_S)
        if found is None:
            return None
        self.facts["gpu_gb"] = found["gpu_gb"]
        seconds: float = found["s"]
        return seconds

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def by_importance(ratios: Sequence[float], deepspeed_ratios: Sequence[float]) -> list[tuple[str, float]]:
    """Systems and ratios in the order in which they are built: what may be missing most easily comes last."""
    wanted = [("twinflow", ratio) for ratio in ratios] + [("deepspeed", ratio) for ratio in deepspeed_ratios]
    first = [1.0, *(ratio for ratio in ratios if ratio != 1.0 and ratio in deepspeed_ratios)]
    order = [(system, ratio) for ratio in first for system in ("twinflow", "deepspeed")]
    return [(ALONE, 1.0), *sorted(wanted, key=lambda one: order.index(one) if one in order else len(order))]


def build_all(running: Sequence[Contest], begin: float, until: float) -> list[Contest]:
    """Lets the processes build one after the other, so that the memory that is gone is their own. Returns those that
    are ready. The others have `trouble`."""
    waiting, ready = list(running), []
    all_by = min(until, time.perf_counter() + IMPORT_S)  # imports take memory too
    while time.perf_counter() < all_by and not all(one.has_answered for one in waiting):
        time.sleep(0.1)
    while waiting and time.perf_counter() < until:
        one = next((one for one in waiting if one.has_answered), None)
        if one is None:
            time.sleep(0.1)
            continue
        waiting.remove(one)
        start = time.perf_counter()
        if one.read(0.1) is not None and (found := one.ask("build", until - start + 5.0)) is not None:
            one.facts = found
            ready.append(one)
            now = time.perf_counter()
            say(f"{one.label}: built in {now - start:.1f} s, ready after {now - begin:.0f} s")
    for one in waiting:
        one.end()
        one.trouble = "not built, because its time was up"
    return ready


def contests(
    name: str, shape: Shape, options: argparse.Namespace, begin: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of all systems, and what was left out and why."""
    wanted = by_importance(options.ratios or shape.ratios, options.deepspeed_ratios if options.deepspeed else ())
    until = begin + options.budget
    running = [
        Contest(name, options.layers, system, ratio, 29_511 + i) for i, (system, ratio) in enumerate(wanted)
    ]  # fmt: skip
    try:
        ready = build_all(running, begin, begin + 0.65 * options.budget)
        guess: dict[tuple[Contest, int], float] = {}
        for turn in range(options.windows + 1):
            for tokens, one in ((tokens, one) for tokens in shape.lengths for one in ready):
                if one.trouble or (turn > 1 and time.perf_counter() > until):
                    continue
                seconds = one.run(tokens, 1 if not turn else steps_for(guess[one, tokens]))
                if seconds is not None and not turn:
                    guess[one, tokens] = seconds
                elif seconds is not None:
                    one.seconds.setdefault(tokens, []).append(seconds)
            say(f"windows {turn} of {options.windows} after {time.perf_counter() - begin:.0f} s")
    finally:
        for one in running:
            one.end()
    rows = [
        {"system": one.system, "ratio": one.ratio, "states": shape.states, "batch": shape.batch, "tokens": tokens}
        | {"params": one.facts["params"], "s": seconds, "gpu_gb": one.facts.get("gpu_gb")}
        | {"host_gb": one.facts["host_gb"]}
        for one in running
        for tokens, seconds in one.seconds.items()
    ]
    for row in rows:
        if row["system"] == "deepspeed":
            row["states"] = "fp32"
        if row["system"] == ALONE:
            del row["ratio"]
    return rows, [f"{one.label}: {one.trouble}" for one in running if one.trouble]


# The result.


def with_factors(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Adds how many steps fit into one of full offload: of the same system, and of DeepSpeed's."""
    full = {(row["system"], row["tokens"]): statistics.median(row["s"]) for row in rows if row.get("ratio") == 1.0}
    found = []
    for row in rows:
        step_s = statistics.median(row["s"])
        more: dict[str, Any] = {"step_s": step_s}
        for key, system in (("x_full", row["system"]), ("x_deepspeed", "deepspeed")):
            if (system, row["tokens"]) in full and "ratio" in row:
                more[key] = full[system, row["tokens"]] / step_s
        found.append({**row, **more})
    return found


def estimated_full(rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Seconds of full offload where it does not fit, by length: in proportion to the highest ratio, at which the
    host's update takes the whole step."""
    ours = [row for row in rows if row["system"] == "twinflow"]
    found = {}
    for tokens in {row["tokens"] for row in ours}:
        top = max((row for row in ours if row["tokens"] == tokens), key=lambda row: row["ratio"])
        if 0.0 < top["ratio"] < 1.0:
            found[tokens] = statistics.median(top["s"]) / top.get("host_share", top["ratio"])
    return found


def page(
    name: str,
    shape: Shape,
    rows: Sequence[Mapping[str, Any]],
    left_out: Sequence[str],
    memory: Memory,
    command: str,
) -> str:
    gpu = torch.cuda.get_device_name() if CUDA else "no GPU"
    numel = max((row["params"] for row in rows), default=0)
    clip = f"clipping at {shape.clip:g}" if shape.clip else "no clipping"
    kept = "checkpointing" if shape.checkpoints else "no checkpointing"
    together = (
        "A process for each row, windows in turns."
        if shape.is_parallel
        else "One process, the state moves from ratio to ratio; windows of both lengths in turns."
    )
    lines = [
        f"# Twin-Flow with the shape of {name}, {datetime.date.today()}",
        "",
        f"`{command}`: {gpu}; {describe(read_machine())}; torch {torch.__version__}",
        "",
        f"{numel / 1e9:.2f} B parameters, random weights in bf16, {shape.states} state (DeepSpeed: fp32), AdamW, "
        f"{shape.batch} sequence{'s' * (shape.batch > 1)}, {kept}, {clip}. {together}",
        "",
        "| system | ratio | tokens | s/step, median | windows | x full offload | x DeepSpeed's full offload | GPU GB | "
        "host GB |",
        "|---|---:|---:|---:|---|---:|---:|---:|---:|",
    ]
    found = with_factors(rows)
    for row in sorted(found, key=lambda row: (row["tokens"], row["system"], -row.get("ratio", 2.0))):
        cells = [row["system"], f"{row['ratio']:g}" if "ratio" in row else "", f"{row['batch']} x {row['tokens']}"]
        cells += [f"{row['step_s']:.4f}", f"{len(row['s'])}: {min(row['s']):.4f} to {max(row['s']):.4f}"]
        cells += [f"{row[key]:.2f}" if key in row else "" for key in ("x_full", "x_deepspeed")]
        cells += [f"{row[key]:.1f}" if row.get(key) is not None else "" for key in ("gpu_gb", "host_gb")]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "x full offload: how many steps fit into one step of the same system with ratio 1."]
    lines += ["host GB: what the machine's available memory fell by, exact to about 0.5 GB."]
    lacks = why_not(need(shape, 1.0, memory), memory)
    for tokens, seconds in sorted(estimated_full(rows).items()) if lacks else ():
        ours = [row["step_s"] for row in found if row["tokens"] == tokens and row["system"] == "twinflow"]
        lines.append(
            f"Full offload does not fit. An estimate for {shape.batch} x {tokens} tokens, in proportion to the highest "
            f"ratio that fits: {seconds:.2f} s, {seconds / min(ours):.2f} times the shortest step of the table."
        )
    if left_out:
        lines += ["", "Not measured:", "", *(f"- {one}" for one in left_out)]
    formats = all_formats(shape, memory)
    lines += ["", "What the planner says a ratio needs, without memory for updates ahead of the clipping decision:", ""]
    lines += ["| state | ratio | GPU GB | host GB | |", "|---|---:|---:|---:|---|"]
    for row in formats:
        fits = f"does not fit: {row['lacks']}" if row["lacks"] else "fits"
        lines.append(f"| {row['states']} | {row['ratio']:g} | {row['gpu_gb']:.1f} | {row['host_gb']:.1f} | {fits} |")
    facts = {"name": name, "rows": rows, "left_out": left_out, "formats": formats}
    return "\n".join([*lines, "", "```json", json.dumps(facts), "```", ""])


def picture(text: str) -> str:
    """From a saved page, or its JSON."""
    found = re.search(r"```json\n(.*?)\n```", text, re.S)
    facts = json.loads(found[1] if found else text)
    rows = with_factors(facts["rows"])
    panels: list[tuple[str, Sequence[Line]]] = []
    for tokens in sorted({row["tokens"] for row in rows}):
        now = [row for row in rows if row["tokens"] == tokens]
        times: list[Line] = []
        for system in dict.fromkeys(row["system"] for row in now):
            points = [(row["ratio"], row["step_s"]) for row in now if row["system"] == system and "ratio" in row]
            alone = [row["step_s"] for row in now if row["system"] == system and "ratio" not in row]
            times.append((system, points or [(0.0, alone[0]), (1.0, alone[0])]))
        batch = now[0]["batch"]
        panels.append((f"Seconds a step: {facts['name']}, {batch} x {tokens} tokens", times))
    longest = [row for row in rows if row["tokens"] == max(row["tokens"] for row in rows) and "ratio" in row]
    memory: list[Line] = []
    for system in dict.fromkeys(row["system"] for row in longest):
        own = [row for row in longest if row["system"] == system]
        memory += [(f"{system}, GPU", [(row["ratio"], row["gpu_gb"]) for row in own if row["gpu_gb"]])]
        memory += [(f"{system}, host", [(row["ratio"], row["host_gb"]) for row in own])]
    memory = [line for line in memory if line[1]]
    return drawing([*panels, ("Memory, GB", memory)] if memory else panels)


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def end_now() -> None:
    say("This run did not end in time. What was measured before is saved.")
    os._exit(1)


def main() -> None:
    begin = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="opt-13b")
    parser.add_argument("--tiny", action="store_true", help="both ways to measure, with tiny models")
    parser.add_argument("--layers", type=int, default=0, help="blocks instead of the shape's own number")
    parser.add_argument("--ratios", type=float, nargs="+", help="instead of the shape's own")
    parser.add_argument("--states", choices=["fp32", "bf16", "int8"], help="format, instead of the shape's own")
    parser.add_argument("--deepspeed-ratios", type=float, nargs="+", default=[1.0, 0.5, 0.0])
    parser.add_argument("--no-deepspeed", dest="deepspeed", action="store_false")
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--budget", type=float, default=170.0, help="seconds after which no new ratio is begun")
    parser.add_argument("--ratio-limit", type=float, default=40.0, help="seconds of the windows of one ratio")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--save-to", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--plot", type=Path, help="draw the picture of a saved result, measure nothing")
    parser.add_argument("--contestant", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plot:
        options.plot.with_suffix(".svg").write_text(picture(options.plot.read_text(encoding="utf-8")))
        return
    command = re.sub(r" --save(-to \S+)?", "", "python benchmarks/twin_flow_opt.py " + " ".join(sys.argv[1:]))
    for name in ("tiny", "tiny-parallel") if options.tiny else (options.shape,):
        shape = SHAPES[name]
        if options.states:
            shape = replace(shape, states=options.states)
        if options.layers:
            key = "n_layer" if shape.config["model_type"] == "gpt2" else "num_hidden_layers"
            shape = replace(shape, config={**shape.config, key: options.layers})
        if options.contestant:
            system, ratio = options.contestant
            return contestant(shape, system, float(ratio))
        shown = f"{name} with {options.layers} blocks" if options.layers else name
        memory = room()  # before the state takes it

        def save(
            rows: Rows, left_out: list[str], shown: str = shown, shape: Shape = shape, memory: Memory = memory
        ) -> str:
            text = page(shown, shape, rows, left_out, memory, command)
            if options.save:
                options.save_to.mkdir(parents=True, exist_ok=True)
                path = options.save_to / f"{datetime.date.today()}-twin-flow-{shown.replace(' ', '-')}.md"
                path.write_text(text, encoding="utf-8")
                if rows:
                    path.with_suffix(".svg").write_text(picture(text), encoding="utf-8")
            return text

        stop = threading.Timer(options.budget + GRACE_S, end_now)
        stop.daemon = True
        stop.start()
        if shape.is_parallel:
            print(save(*contests(name, shape, options, begin)), flush=True)
        else:
            print(save(*sweep(shape, options, begin, memory, save)), flush=True)
        stop.cancel()
    sys.stdout.flush()
    os._exit(0)  # giving a hundred gigabytes back in order takes longer than the steps


if __name__ == "__main__":
    main()
