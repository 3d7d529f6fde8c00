"""Checks a machine with several GPUs in about five minutes: are results those of one process, how fast are collectives,
and how much of their time is hidden behind backward?

    python benchmarks/several_gpus.py

It starts one process for each GPU, with NCCL. No run of this project has had more than one GPU yet, so please send the
report that it writes (several-gpus-report.md). Without GPUs, `--cpu --ranks 2` runs the same checks with gloo and small
shapes, which shows that the script works, nothing more.

1. Equality: a small GPT in fp32 is trained with ZeRO stages 0 to 3, with state on the GPU and on the host, with
   weights on the host, with 1-bit Adam, with pipeline stages and with tensor ranks. Its losses are compared with those
   of plain PyTorch, which trains the same global batch in one process. Replicas must have the same bits.
2. Collectives: GB/s of all-reduce, reduce-scatter and all-gather.
3. Overlap: the time that a ZeRO-2 step needs beyond forward and backward, beside the time of its collectives alone.
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
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import twinflow
from twinflow.models.gpt import GPT, GPTConfig

SMALL = GPTConfig(vocab_size=128, context=32, num_layers=4, hidden=64, num_heads=4)
LARGE = GPTConfig(vocab_size=32000, context=1024, num_layers=24, hidden=2048, num_heads=16)
NUM_STEPS = 6
MICRO_BATCHES = 2
CLIPPING = 0.5
RATE = 1e-2
TOLERANCE = 1e-4  # of a loss: sums over ranks are rounded in another order


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
    host, half = {"device": "cpu"}, {"device": "cpu", "ratio": 0.5}
    found = [Way(f"ZeRO-{stage}", {"zero_optimization": {"stage": stage}}) for stage in (0, 1, 2)]
    found += [
        Way("ZeRO-2, all state on the host", {"zero_optimization": {"stage": 2, "offload_optimizer": host}}),
        Way("ZeRO-2, half of the state on the host", {"zero_optimization": {"stage": 2, "offload_optimizer": half}}),
        Way("ZeRO-3", {"zero_optimization": {"stage": 3}}, is_replicated=False),
        Way(
            "ZeRO-3, weights and state on the host",
            {"zero_optimization": {"stage": 3, "offload_optimizer": host, "offload_param": host}},
            is_replicated=False,
        ),
        Way(
            "1-bit Adam",
            {
                "zero_optimization": {"stage": 1},
                "optimizer": {"type": "OneBitAdam", "params": {"lr": RATE, "freeze_step": 3}},
            },
            num_compared=3,
        ),
    ]
    for schedule in ("1f1b", "zbv"):
        config = {"pipeline": {"stages": 2, "schedule": schedule}, "zero_optimization": {"stage": 1}}
        found.append(Way(f"two pipeline stages, {schedule}", config, 2, num_stages=2, is_replicated=False))
    config = {"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 1}}
    found.append(Way("two tensor ranks", config, 2, num_tensor_ranks=2, is_replicated=False))
    return found


@dataclass
class Report:
    """What the first rank writes."""

    lines: list[str] = field(default_factory=list)
    num_failed: int = 0

    def add(self, text: str = "") -> None:
        self.lines.append(text)
        if dist.get_rank() == 0:
            print(text, flush=True)


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
    report.add("## Equality with one process of plain PyTorch")
    report.add()
    report.add("| way | largest difference of a loss | replicas | |")
    report.add("|---|---:|---|---|")
    for way in ways():
        if world % way.num_ranks:
            report.add(f"| {way.name} | | | not run: needs a multiple of {way.num_ranks} ranks |")
            continue
        losses, digest = train(way, batch_size)
        most = max(abs(losses[i] / truth[i] - 1.0) for i in range(way.num_compared))
        digests = [""] * world
        dist.all_gather_object(digests, digest)
        is_same = len(set(digests)) == 1
        is_failed = not (most <= TOLERANCE and is_same)
        report.num_failed += is_failed
        replicas = ("equal bits" if is_same else "differ") if way.is_replicated else "no replicas"
        report.add(f"| {way.name} | {most:.1e} | {replicas} | {'DIFFERENT' if is_failed else 'ok'} |")
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
    report.add("## Collectives, bf16")
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
    report.add(f"## Overlap: ZeRO-2 with {numel / 1e9:.2f} B parameters, 4 x {shape.context} tokens on each rank")
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
        if (tool := shutil.which("nvidia-smi")) is not None:
            done = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, check=False, timeout=60)
            lines += ["", "```text", done.stdout.strip(), "```"]
    return lines


def run_rank(rank: int, world: int, port: int, is_cpu: bool, out: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if is_cpu:
        torch.set_num_threads(1)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    device = torch.device("cpu") if is_cpu else torch.device("cuda", rank)
    if not is_cpu:
        torch.cuda.set_device(device)
    twinflow.init_distributed()
    report = Report()
    report.add(f"# Several GPUs, {datetime.date.today()}")
    report.add()
    for line in describe(device):
        report.add(line)
    report.add()
    check_equality(report, device)
    measure_collectives(report, device)
    measure_overlap(report, device)
    report.add("All ways agree." if not report.num_failed else f"{report.num_failed} ways differ or failed.")
    if rank == 0:
        Path(out).write_text("\n".join(report.lines) + "\n")
        print(f"Report: {out}", flush=True)
    dist.destroy_process_group()
    if report.num_failed:
        raise SystemExit(1)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="number of processes; by default the number of GPUs")
    parser.add_argument("--cpu", action="store_true", help="use gloo and the CPU")
    parser.add_argument("--out", default="several-gpus-report.md")
    options = parser.parse_args()
    ranks = options.ranks or torch.cuda.device_count()
    if not options.cpu and (ranks > torch.cuda.device_count() or ranks < 1):
        parser.error(
            f"{ranks} ranks need {max(1, ranks)} GPUs, and this machine has {torch.cuda.device_count()}; try --cpu"
        )
    mp.start_processes(run_rank, (ranks, free_port(), options.cpu, options.out), ranks, start_method="spawn")


if __name__ == "__main__":
    main()
