# SPDX-License-Identifier: Apache-2.0
"""Checks a machine with several GPUs in about three minutes: are results those of one process, how fast are
collectives, and how much of their time is hidden behind backward?

    python benchmarks/several_gpus.py                    # one process for each GPU, with NCCL
    python benchmarks/several_gpus.py --cpu --ranks 2    # gloo and small shapes: shows that the script works

No run of this project has had more than one GPU yet, so please send the report that it writes
(several-gpus-report.md).

1. Equality: a small GPT in fp32 is trained with ZeRO stages 0 to 3, with state on the GPU and on the host, with
   weights on the host, with 1-bit Adam, with pipeline stages and with tensor ranks. Its losses are compared with those
   of plain PyTorch, which trains the same global batch in one process. Replicas must have the same bits.
2. Communicators: four groups are used at once, each by its own thread on its own stream, and every result is compared
   with the exact one.
3. Collectives: GB/s of all-reduce, reduce-scatter and all-gather.
4. Overlap: the time that a ZeRO-2 step needs beyond forward and backward, beside the time of its collectives alone.

On a machine with one GPU the script makes two other runs. Their times mean nothing, so only results are compared.

- One rank: NCCL with world size 1. Every collective of a step is called (TWINFLOW_CHECK_COLLECTIVES=1), and the losses
  must have the bits of the run without a process group. Then part 2 runs.
- Two ranks on the one GPU: NCCL refuses this, because it would be slow, unless each rank pretends to be another machine
  (NCCL_HOSTID). The ranks then talk through sockets, and the GPU switches between them. Parts 1 and 2 run. This is NCCL
  between two ranks with all of its calls, but it is not NCCL between two GPUs.

`--budget SECONDS` limits all runs together. What does not fit is named in the report. `--save` writes the report to
benchmarks/results, and `--save-to` to another folder.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import twinflow
from twinflow.bench.machine import describe as describe_machine
from twinflow.bench.machine import read_machine
from twinflow.dist.group import CHECK, Group, backend_for, new_group, own_stream
from twinflow.models.gpt import GPT, GPTConfig
from twinflow.optim.onebit import OneBitAdam
from twinflow.optim.twin import TwinOptimizer
from twinflow.zero import Zero, partition

SMALL = GPTConfig(vocab_size=128, context=32, num_layers=4, hidden=64, num_heads=4)
LARGE = GPTConfig(vocab_size=32000, context=1024, num_layers=24, hidden=2048, num_heads=16)
NUM_STEPS = 6
MICRO_BATCHES = 2
CLIPPING = 0.5
RATE = 1e-2
TOLERANCE = 1e-4  # of a loss: sums over ranks are rounded in another order
GROUPS = ("data", "tensor", "pipeline", "publish")
ROUNDS = 5
RESERVE_S = 8.0  # of the budget, for the communicators
GRACE_S = 20.0  # after the end of the budget, for the way that has begun
FREEZE_STEP = 3  # last step of 1-bit Adam without compression
# Two ranks on one GPU: NCCL takes them for two machines, which are connected by sockets.
TWO_MACHINES = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_NCHANNELS": "2"}
TITLES = {
    "one": "One rank, world size 1",
    "shared": "Two ranks on one GPU, connected by sockets",
    "own": "One rank for each GPU",
    "cpu": "Ranks without GPUs",
}


@dataclass(frozen=True)
class Way:
    """One way to train, which must give the losses of plain PyTorch."""

    name: str
    config: dict[str, Any]
    num_ranks: int = 1  # the number of ranks must be a multiple of this
    num_stages: int = 1
    num_tensor_ranks: int = 1
    is_replicated: bool = True  # every rank has all weights
    num_compared: int = NUM_STEPS  # losses that must be equal; those of 1-bit Adam differ once it compresses


def ways() -> list[Way]:
    """The ways, those first that have communication of their own kind: what has no time is at the end."""
    host, half = {"device": "cpu"}, {"device": "cpu", "ratio": 0.5}
    onebit = {"type": "OneBitAdam", "params": {"lr": RATE, "freeze_step": FREEZE_STEP}}
    found = [
        Way("ZeRO-2", {"zero_optimization": {"stage": 2}}),
        Way("1-bit Adam", {"zero_optimization": {"stage": 1}, "optimizer": onebit}, num_compared=FREEZE_STEP),
    ]
    for schedule in ("1f1b", "zbv"):
        config = {"pipeline": {"stages": 2, "schedule": schedule}, "zero_optimization": {"stage": 1}}
        found.append(Way(f"two pipeline stages, {schedule}", config, 2, num_stages=2, is_replicated=False))
    config = {"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 1}}
    found.append(Way("two tensor ranks", config, 2, num_tensor_ranks=2, is_replicated=False))
    found += [
        Way("ZeRO-3", {"zero_optimization": {"stage": 3}}, is_replicated=False),
        Way("ZeRO-2, all state on the host", {"zero_optimization": {"stage": 2, "offload_optimizer": host}}),
        Way(
            "ZeRO-3, weights and state on the host",
            {"zero_optimization": {"stage": 3, "offload_optimizer": host, "offload_param": host}},
            is_replicated=False,
        ),
        *(Way(f"ZeRO-{stage}", {"zero_optimization": {"stage": stage}}) for stage in (0, 1)),
        Way("ZeRO-2, half of the state on the host", {"zero_optimization": {"stage": 2, "offload_optimizer": half}}),
        Way(
            "ZeRO-3, half of the state on the host",
            {"zero_optimization": {"stage": 3, "offload_optimizer": half}},
            is_replicated=False,
        ),
    ]
    return found


@dataclass(frozen=True)
class Alone:
    """One way to train with one rank, which must give the bits of the run without a process group."""

    name: str
    stage: int
    ratio: float = 1.0
    offloads_params: bool = False
    is_onebit: bool = False


def ways_alone() -> list[Alone]:
    """The ways, those first that share no path with another one: what has no time is at the end."""
    found = [
        Alone("1-bit Adam", 0, is_onebit=True),
        Alone("ZeRO-3, weights and state on the host", 3, offloads_params=True),
    ]
    places = {"on the host": 1.0, "on the GPU": 0.0, "half on the host": 0.5}
    for place, ratio in places.items():
        found += [Alone(f"ZeRO-{stage}, state {place}", stage, ratio) for stage in (3, 2, 1, 0)]
    return found


@dataclass
class Report:
    """What the first rank prints and writes, line by line, so that a run that is ended early leaves its lines."""

    path: Path
    deadline: float  # by time.time()
    num_failed: int = 0
    longest_s: float = 0.0  # of the ways so far
    control: Any = None  # a group on the host, made after the process group

    def add(self, text: str = "") -> None:
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(text, flush=True)
            with self.path.open("a") as file:
                file.write(text + "\n")

    def has_time(self) -> bool:
        """Whether one more way fits. All ranks get the same answer."""
        answers = [False] * dist.get_world_size()
        dist.all_gather_object(
            answers, time.time() + 1.5 * self.longest_s < self.deadline - RESERVE_S, group=self.control
        )
        return all(answers)


def tokens(step: int, num_sequences: int) -> Tensor:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, SMALL.vocab_size, (num_sequences, SMALL.context + 1), generator=generator)


def new_model() -> GPT:
    torch.manual_seed(0)  # every rank builds the same model
    return GPT(SMALL)


def train_plainly(device: torch.device, batch_size: int) -> list[float]:
    """The losses of PyTorch's AdamW in one process."""
    model = new_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    losses = []
    for step in range(NUM_STEPS):
        batch = tokens(step, batch_size).to(device)
        loss = model(batch[:, :-1], batch[:, 1:]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(way: Way, batch_size: int) -> tuple[list[float], str]:
    """The losses of the global batch on this rank, and a digest of this rank's weights."""
    rank, world = dist.get_rank(), dist.get_world_size()
    num_replicas = world // way.num_stages // way.num_tensor_ranks
    replica = rank // way.num_tensor_ranks % num_replicas
    micro = batch_size // num_replicas // MICRO_BATCHES
    config = {
        "train_batch_size": batch_size,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_clipping": CLIPPING,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.0}},
        **way.config,
    }
    engine, *_ = twinflow.initialize(model=new_model(), config=config)
    device = engine.device

    def micro_batches(step: int) -> Iterator[tuple[Tensor, Tensor]]:
        batch = tokens(step, batch_size).to(device)
        for part in range(MICRO_BATCHES):
            start = (part * num_replicas + replica) * micro
            yield batch[start : start + micro, :-1], batch[start : start + micro, 1:]

    losses = []
    for step in range(NUM_STEPS):
        if way.num_stages > 1:
            losses.append(float(engine.train_batch(micro_batches(step))))
            continue
        total = torch.zeros((), device=device)
        for inputs, targets in micro_batches(step):
            loss = engine(inputs, targets).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach() / MICRO_BATCHES / world
        dist.all_reduce(total)
        losses.append(total.item())
    digest = ""
    if way.is_replicated:
        bits = b"".join(p.detach().cpu().numpy().tobytes() for p in engine.module.parameters())
        digest = hashlib.sha256(bits).hexdigest()
    engine.destroy()
    return losses, digest


def check_equality(report: Report, device: torch.device) -> None:
    world = dist.get_world_size()
    batch_size = 2 * MICRO_BATCHES * world
    truth = train_plainly(device, batch_size)
    report.add("### Equality with one process of plain PyTorch")
    report.add()
    report.add("| way | largest difference of a loss | replicas | seconds | |")
    report.add("|---|---:|---|---:|---|")
    for way in ways():
        if world % way.num_ranks:
            report.add(f"| {way.name} | | | | not run: needs a multiple of {way.num_ranks} ranks |")
            continue
        if not report.has_time():
            report.add(f"| {way.name} | | | | not run: no time left |")
            continue
        start = time.perf_counter()
        losses, digest = train(way, batch_size)
        most = max(abs(losses[i] / truth[i] - 1.0) for i in range(way.num_compared))
        digests = [""] * world
        dist.all_gather_object(digests, digest, group=report.control)
        took = time.perf_counter() - start
        report.longest_s = max(report.longest_s, took)
        is_same = len(set(digests)) == 1
        is_failed = not (most <= TOLERANCE and is_same)
        report.num_failed += is_failed
        replicas = ("equal bits" if is_same else "differ") if way.is_replicated else "no replicas"
        verdict = "DIFFERENT" if is_failed else "ok"
        report.add(f"| {way.name} | {most:.1e} | {replicas} | {took:.1f} | {verdict} |")
    report.add()


def train_alone(way: Alone, device: torch.device, is_distributed: bool) -> tuple[list[float], int]:
    """The losses of one rank, the last one after the last update, and the number of collectives of the backend."""
    model: torch.nn.Module = new_model()
    zero = Zero(way.stage, parks=way.offloads_params) if is_distributed and not way.is_onebit else None
    if not way.offloads_params:
        model.to(device)
    if zero is not None and not zero.shares_buckets:
        partition(model, zero)
    optimizer: OneBitAdam | TwinOptimizer
    if way.is_onebit:
        optimizer = OneBitAdam(model.parameters(), lr=RATE, freeze_step=FREEZE_STEP, max_grad_norm=CLIPPING)
    else:
        optimizer = TwinOptimizer(
            model,
            "adamw",
            lr=RATE,
            weight_decay=0.0,
            ratio=way.ratio,
            offload_params=way.offloads_params,
            max_grad_norm=CLIPPING,
            accumulation_steps=MICRO_BATCHES,
            early=True,
            zero=zero,
        )
    losses = []
    for step in range(NUM_STEPS):
        total = 0.0
        for part in tokens(step, 2 * MICRO_BATCHES).to(device).chunk(MICRO_BATCHES):
            loss = model(part[:, :-1], part[:, 1:]).loss / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        batch = tokens(NUM_STEPS, 2 * MICRO_BATCHES).to(device)
        losses.append(model(batch[:, :-1], batch[:, 1:]).loss.item())
    groups: list[Group] = []
    if isinstance(optimizer, OneBitAdam):
        groups = [optimizer.group]
    else:
        groups = list(optimizer.team.groups.values()) if optimizer.team is not None else []
        optimizer.close()
    return losses, sum(group.num_calls for group in groups if group.is_on_host == (device.type == "cpu"))


def check_one_rank(report: Report, device: torch.device, truths: dict[str, list[float]]) -> None:
    report.add("### Equality with one process without a process group")
    report.add()
    report.add(f"| way | largest difference of a loss | calls of {dist.get_backend()} | |")
    report.add("|---|---:|---:|---|")
    for way in ways_alone():
        if way.name not in truths or not report.has_time():
            report.add(f"| {way.name} | | | not run: no time left, or the run without a group failed |")
            continue
        start = time.perf_counter()
        try:
            losses, num_calls = train_alone(way, device, is_distributed=True)
        except Exception:  # with one rank, no other rank waits for this one
            report.num_failed += 1
            report.add(f"| {way.name} | | | FAILED |")
            traceback.print_exc()
            continue
        report.longest_s = max(report.longest_s, time.perf_counter() - start)
        truth = truths[way.name]
        most = max(abs(loss / other - 1.0) for loss, other in zip(losses, truth, strict=True))
        is_failed = losses != truth
        report.num_failed += is_failed
        calls = "by `fully_shard`" if way.stage == 3 and not way.offloads_params else str(num_calls)
        verdict = "DIFFERENT" if is_failed else "ok"
        report.add(f"| {way.name} | {most:.1e} | {calls} | {verdict} |")
    report.add()


def use_group(group: Group, numel: int, device: torch.device) -> None:
    """Calls each collective once and compares its result with the exact one."""
    world, rank = group.world, group.rank
    whole = torch.arange(numel * world, device=device).remainder(251).float()
    given, factor = whole * (rank + 1), world * (world + 1) // 2
    own = slice(rank * numel, (rank + 1) * numel)
    out = torch.empty_like(whole)
    group.all_reduce(out, given, torch.float32)
    assert torch.equal(out, whole * factor), "all_reduce"
    part = torch.empty_like(whole[own])
    group.reduce_scatter(part, given, torch.float32)
    assert torch.equal(part, whole[own] * factor), "reduce_scatter"
    gathered = torch.full_like(whole, -1.0)
    gathered[own] = whole[own]
    group.all_gather(gathered)
    assert torch.equal(gathered, whole), "all_gather"
    rows = torch.arange(world, device=device, dtype=torch.uint8).view(-1, 1).repeat(1, numel) + 16 * rank
    taken = group.exchange(rows)
    sent = 16 * torch.arange(world, device=device, dtype=torch.uint8).view(-1, 1) + rank
    assert torch.equal(taken, sent.expand_as(taken)), "exchange"
    told = whole.clone() if rank == world - 1 else torch.zeros_like(whole)
    group.broadcast(told, world - 1)
    assert torch.equal(told, whole), "broadcast"


def check_communicators(report: Report, device: torch.device) -> None:
    """All groups at once, while the GPU multiplies matrices on the model's stream."""
    groups = {name: new_group(backend_for(device)) for name in GROUPS}
    errors: list[str] = []

    def work(name: str) -> None:
        try:
            with own_stream(device) if device.type == "cuda" else nullcontext():
                for turn in range(ROUNDS):
                    use_group(groups[name], (1 << 10) << (4 * (turn % 3)), device)
        except Exception:
            errors.append(f"{name}: {traceback.format_exc()}")

    threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in GROUPS]
    size = 2048 if device.type == "cuda" else 64
    matrix = torch.eye(size, device=device)
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for _ in range(10):
            matrix = matrix @ matrix
        _synchronize(device)
        if time.time() > report.deadline + GRACE_S / 2:
            errors.append("The threads did not end in time.")
            break
        time.sleep(0.002)
    if not errors and not torch.equal(matrix, torch.eye(size, device=device)):
        errors.append("The product of the model's stream is wrong.")
    everyones: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    if not any(thread.is_alive() for thread in threads):
        dist.all_gather_object(everyones, errors, group=report.control)
    told = [f"rank {rank}: {error}" for rank, one in enumerate(everyones) for error in one] or errors
    report.num_failed += bool(told)
    calls = sum(group.num_calls for group in groups.values())
    report.add("### Communicators at once")
    report.add()
    report.add(f"{len(GROUPS)} groups, each with its own thread and stream, {calls} collectives: ")
    report.add("all results are exact: ok" if not told else "FAILED")
    for error in told:
        report.add(f"\n```text\n{error}\n```")
    report.add()


def timed(call: Callable[[], object], device: torch.device, repeats: int = 7) -> list[float]:
    """Seconds of each call, after two that are not counted. All ranks start together."""
    found = []
    for _ in range(repeats + 2):
        dist.barrier()
        _synchronize(device)
        start = time.perf_counter()
        call()
        _synchronize(device)
        found.append(time.perf_counter() - start)
    return found[2:]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def spread(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.2f} ms ({1e3 * min(seconds):.2f} to {1e3 * max(seconds):.2f})"


def collectives(numel: int, device: torch.device) -> dict[str, Callable[[], object]]:
    world = dist.get_world_size()
    part = -(-numel // world)
    whole = torch.zeros(part * world, dtype=torch.bfloat16, device=device)
    own = torch.zeros(part, dtype=torch.bfloat16, device=device)
    return {
        "all-reduce": lambda: dist.all_reduce(whole),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(own, whole),
        "all-gather": lambda: dist.all_gather_into_tensor(whole, own),
    }


def measure_collectives(report: Report, device: torch.device) -> None:
    """Bus bandwidth: the bytes that a link must carry at least, divided by the time."""
    world = dist.get_world_size()
    report.add("### Collectives, bf16")
    report.add()
    report.add("| collective | MiB | time | bus bandwidth |")
    report.add("|---|---:|---|---:|")
    for mib in (1, 16, 256) if device.type == "cuda" else (1, 4):
        for name, call in collectives((mib << 20) // 2, device).items():
            found = timed(call, device)
            share = (world - 1) / world * (2 if name == "all-reduce" else 1)
            rate = share * (mib << 20) / statistics.median(found) / 1e9
            report.add(f"| {name} | {mib} | {spread(found)} | {rate:.1f} GB/s |")
    report.add()


def measure_overlap(report: Report, device: torch.device) -> None:
    shape = LARGE if device.type == "cuda" else SMALL
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    model = GPT(shape).to(device, dtype)
    numel = sum(p.numel() for p in model.parameters())
    batch = torch.randint(0, shape.vocab_size, (4, shape.context + 1), device=device)

    def forward_backward() -> None:
        model(batch[:, :-1], batch[:, 1:]).loss.backward()
        for param in model.parameters():
            param.grad = None

    alone = timed(forward_backward, device)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": None,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6}},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = twinflow.initialize(model=model, config=config)

    def step() -> None:
        engine.backward(engine(batch[:, :-1], batch[:, 1:]).loss)
        engine.step()

    whole = timed(step, device)
    engine.destroy()
    calls = collectives(numel, device)
    talk = [
        sum(times) for times in zip(*(timed(calls[n], device) for n in ("reduce-scatter", "all-gather")), strict=True)
    ]
    extra = statistics.median(whole) - statistics.median(alone)
    hidden = 1.0 - max(0.0, extra) / statistics.median(talk)
    report.add(f"### Overlap: ZeRO-2 with {numel / 1e9:.2f} B parameters, 4 x {shape.context} tokens on each rank")
    report.add()
    report.add("| | |")
    report.add("|---|---|")
    report.add(f"| forward and backward alone | {spread(alone)} |")
    report.add(f"| step | {spread(whole)} |")
    report.add(f"| its reduce-scatter and all-gather alone | {spread(talk)} |")
    report.add(f"| hidden, if the update itself took no time | {max(0.0, hidden):.0%} of the collectives |")
    report.add()


def describe(device: torch.device) -> list[str]:
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    lines = [f"{dist.get_world_size()} ranks, {dist.get_backend()}, {versions}"]
    if device.type == "cuda":
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        lines.append(f"{names}; NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
        if dist.get_rank() == 0 and (tool := shutil.which("nvidia-smi")) is not None:
            done = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, check=False, timeout=60)
            lines += ["", "```text", done.stdout.strip(), "```"]
    return lines


def run_rank(rank: int, world: int, port: int, mode: str, out: Path, deadline: float) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if mode == "shared":
        os.environ |= {**TWO_MACHINES, "NCCL_HOSTID": f"twinflow-{rank}"}
    is_cpu = mode == "cpu"
    if is_cpu:
        torch.set_num_threads(1)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    device = torch.device("cpu") if is_cpu else torch.device("cuda", 0 if mode == "shared" else rank)
    if not is_cpu:
        torch.cuda.set_device(device)
    report = Report(out, deadline)
    truths = {}
    for way in ways_alone() if world == 1 else ():
        if time.time() < deadline - GRACE_S:
            try:
                truths[way.name] = train_alone(way, device, is_distributed=False)[0]
            except Exception:
                traceback.print_exc()
    if mode == "shared":  # init_distributed would choose gloo
        dist.init_process_group("nccl")
    else:
        twinflow.init_distributed()
    report.control = dist.new_group(backend="gloo")
    report.add(f"## {TITLES['one' if world == 1 else mode]}")
    report.add()
    for line in describe(device):
        report.add(line)
    report.add()
    os.environ[CHECK] = "1"  # a wrong order is an error instead of a hang
    if world == 1:
        check_one_rank(report, device, truths)
        check_communicators(report, device)
    else:
        check_equality(report, device)
        check_communicators(report, device)
        os.environ[CHECK] = "0"
        if mode != "shared":
            measure_collectives(report, device)
            measure_overlap(report, device)
    report.add("All ways agree." if not report.num_failed else f"{report.num_failed} ways differ or failed.")
    report.add()
    dist.barrier(group=report.control)
    if mode == "own":
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(1 if report.num_failed else 0)  # several communicators may be destroyed in different orders


def run_ranks(ranks: int, mode: str, out: Path, deadline: float) -> bool:
    """Whether all ranks ended without an error and in time."""
    context = mp.start_processes(
        run_rank, (ranks, free_port(), mode, out, deadline), ranks, join=False, start_method="spawn"
    )
    assert context is not None
    note = ""
    try:
        while not context.join(timeout=1.0):
            if time.time() > deadline + GRACE_S:
                note = "The run did not end in time and was ended."
                break
    except Exception as error:
        print(error, flush=True)
        lines = [line for line in str(error).strip().splitlines() if line.strip()]
        note = f"The run ended with an error: {lines[-1] if lines else error}"
    for process in context.processes:
        if process.is_alive():
            process.kill()
    if note:
        print(note, flush=True)
        with out.open("a") as file:
            file.write(f"\n{note}\n\n")
    return not note


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="number of processes; by default the number of GPUs")
    parser.add_argument("--cpu", action="store_true", help="use gloo and the CPU")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds of all runs together")
    parser.add_argument("--out", type=Path, default=Path("several-gpus-report.md"))
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--save-to", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    num_gpus = torch.cuda.device_count()
    ranks = options.ranks or num_gpus
    if not options.cpu and (ranks > num_gpus or ranks < 1):
        parser.error(f"{ranks} ranks need {max(1, ranks)} GPUs, and this machine has {num_gpus}; try --cpu")
    out = options.save_to / f"{datetime.date.today()}-several-gpus.md" if options.save else options.out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(f"# Several GPUs, {datetime.date.today()}\n\n`python benchmarks/several_gpus.py` on\n")
    with out.open("a") as file:
        file.write(f"{describe_machine(read_machine())}\n\n")
    deadline = time.time() + options.budget
    if options.cpu:
        runs = [(ranks, "cpu", deadline)]
    elif ranks == 1:
        runs = [(1, "own", time.time() + 0.5 * options.budget), (2, "shared", deadline)]
    else:
        runs = [(ranks, "own", deadline)]
    is_good = [run_ranks(num, mode, out, end) for num, mode, end in runs]
    print(f"Report: {out}", flush=True)
    if not all(is_good):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
