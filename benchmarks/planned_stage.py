# SPDX-License-Identifier: Apache-2.0
"""One planned stage alone on one GPU: its memory beside what the planner says of it.

A layout of many GPUs is planned, and one rank of it runs here: its layers, the schedule's own list of actions, the real
engine, optimizer and gradient buckets. Other stages are a wire that gives random numbers at once and takes all; other
data ranks, and the other holder of a tied embedding, send back what this one has. So weights learn nothing: only
memory is measured, as the most that tensors took in some steps. With `--tiny`, and without a GPU, small stages run on
the CPU, where live tensors are counted. Prints the machine, a table and one JSON line; `--save` writes a dated file in
benchmarks/results.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from stage_stand_ins import LiveBytes, Mirror, Void, counting
from torch import Tensor

from twinflow.bench.machine import read_machine
from twinflow.build_optimizer import make_optimizer
from twinflow.build_parallel import make_deferral
from twinflow.config import load_config, resolve_batch
from twinflow.engine.base import EngineSettings
from twinflow.engine.pipeline import Links, PipelineEngine
from twinflow.engine.reports import Reports
from twinflow.launch.environment import ALONE
from twinflow.models.gpt import GPT, GPTConfig
from twinflow.offload.materialize import materialize
from twinflow.offload.plan import HOST
from twinflow.parallel.layout import Layout, stage_layers
from twinflow.parallel.memory import RankBytes, rank_bytes
from twinflow.parallel.pipeline import PipelineModule
from twinflow.parallel.shapes import Shape, shape_like
from twinflow.parallel.split import split_model
from twinflow.parallel.ties import TiedGradients

LIMIT = 0.05  # how far a measured peak may be from the plan
STEPS = 3  # one to make what is made when first needed, and two that are measured as well
GPU_SHAPE = shape_like(13e9)
TINY_SHAPE = Shape(8, 64, 2, 64, vocab_size=1024, name="tiny GPT")
TEXT = """# One planned stage alone on one GPU, {date}

- `python benchmarks/planned_stage.py`: {device}; {machine}; torch {torch}.
- {shape}, bf16, AdamW: one rank of each layout runs its part of {steps} steps, with stand-ins for other ranks.
- planned: `twinflow.parallel.memory.rank_bytes`. measured: the most that tensors took. rest: between steps.

{table}
"""
HEAD = "| layout | rank | layers | planned GB | measured GB | off | planned rest | rest | s/step |"


@dataclass(frozen=True)
class Case:
    """A layout, and the ranks of its pipeline that are run."""

    layout: Layout
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """One rank."""

    layout: str
    rank: int
    num_layers: int
    planned: float
    measured: float
    planned_rest: float
    rest: float
    step_s: float
    parts: dict[str, float]  # of the plan
    buffers: dict[str, float]  # of the engine

    @property
    def off(self) -> float:
        """How much more was measured than planned."""
        return self.measured / self.planned - 1.0

    def cells(self, unit: float) -> list[str]:
        """Of the table."""
        sizes = [f"{size / unit:.2f}" for size in (self.planned, self.measured)]
        rests = [f"{size / unit:.2f}" for size in (self.planned_rest, self.rest)]
        return [
            self.layout,
            str(self.rank),
            str(self.num_layers),
            *sizes,
            f"{self.off:+.1%}",
            *rests,
            f"{self.step_s:.2f}",
        ]


def gpu_cases() -> list[Case]:
    """13 B parameters on 8 and 16 GPUs."""
    eight = Layout(4, 1, 2, 8)
    return [
        Case(eight, (0, 1, 3)),
        Case(replace(eight, checkpointing=False), (0, 2, 3)),
        Case(replace(eight, schedule="zbv", num_chunks=2), (0, 3)),
        Case(replace(eight, schedule="interleaved", num_chunks=2, checkpointing=False), (1,)),
        Case(Layout(8, 1, 1, 16, zero=0, checkpointing=False), (1,)),
        Case(Layout(8, 1, 2, 16, offload=True), (0, 4)),
    ]


def tiny_cases() -> list[Case]:
    """The same kinds."""
    two = Layout(2, 1, 2, 4)
    return [
        Case(two, (0, 1)),
        Case(replace(two, checkpointing=False), (0, 1)),
        Case(Layout(3, 1, 1, 6, zero=0, checkpointing=False), (0, 1, 2)),
        Case(Layout(3, 1, 2, 6, zero=2, micro_batch=2), (1, 2)),
        Case(replace(two, schedule="zbv", num_chunks=2), (0, 1)),
        Case(replace(two, schedule="interleaved", num_chunks=2), (0, 1)),
        Case(replace(two, offload=True), (0, 1)),
    ]


def config_of(layout: Layout) -> dict[str, Any]:
    """As a user would write it, for a rank that has its stage already."""
    zero: dict[str, Any] = {"stage": layout.zero}
    if layout.offload:
        zero["offload_optimizer"] = {"device": "cpu", "shadow_bytes": 0}  # which is host memory
    return {
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.num_micro_batches,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6}},
        "zero_optimization": zero,
    }


def module_of(shape: Shape, layout: Layout, rank: int, device: torch.device) -> PipelineModule:
    """One rank's layers of a GPT, which is nowhere as a whole."""
    config = GPTConfig(shape.vocab_size, shape.sequence, shape.num_layers, shape.hidden, shape.num_heads)
    with torch.device("meta"):
        whole = GPT(config)
    again = int(layout.checkpointing)
    chunks = layout.num_chunks
    made = split_model(
        whole, layout.num_pp, rank, schedule=layout.schedule, num_chunks=chunks, activation_checkpoint_interval=again
    )
    counts = tuple(_num_blocks(made, stage) for stage in range(made.num_stages))
    assert counts == stage_layers(shape, layout), (counts, stage_layers(shape, layout))
    materialize(made, device, torch.bfloat16)
    return made


def _num_blocks(module: PipelineModule, stage: int) -> int:
    facts = module.facts[module.bounds[stage] : module.bounds[stage + 1]]
    return sum(fact.type_name == "Block" for fact in facts)


@contextlib.contextmanager
def engine_of(shape: Shape, layout: Layout, rank: int, device: torch.device) -> Iterator[PipelineEngine]:
    """The engine as `initialize` makes it for this rank, with stand-ins for all others."""
    config = load_config(config_of(layout))
    batch = resolve_batch(config, layout.num_dp)
    module = module_of(shape, layout, rank, device)
    ranks = replace(ALONE, world_size=layout.num_dp)
    replicas = Mirror(layout.num_dp)
    ties = [TiedGradients(module.get_parameter(tie.local), Mirror(len(tie.ranks)), replicas) for tie in module.ties]
    with mock.patch("twinflow.zero.shared.new_group", side_effect=lambda *_, **__: Mirror(layout.num_dp)):
        twin = make_optimizer(config, batch, module, None, None, ranks)
    wire = Void(rank, device, (layout.micro_batch, shape.sequence, shape.hidden))
    settings = EngineSettings(layout.micro_batch, ranks, stage=layout.zero)
    links = Links(wire, ties, make_deferral(module, layout.zero))
    engine = PipelineEngine(module, twin, None, settings, Reports(), links)
    try:
        yield engine
    finally:
        engine.destroy()


def buffers_of(engine: PipelineEngine) -> dict[str, float]:
    """What the engine holds between steps, by kind: on a CPU nobody else counts it."""
    assert engine.optimizer is not None
    runtime = engine.optimizer.runtime
    on_device = [bucket for bucket in runtime.buckets if bucket.plan.place != HOST]
    shared: Any = runtime.sharing
    return {
        "weights": sum(param.numel() * param.element_size() for param in engine.module.parameters()),
        "sums": sum(_size(one) for one in runtime.collector._sums.values()),
        "waiting": runtime.executor.flats.num_bytes,
        "states": sum(bucket.nbytes for bucket in on_device),
        "whole": 0 if shared is None else shared._flats.num_bytes,
        "published": 0 if shared is None else _size(shared._publisher._raw),
    }


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def batches(shape: Shape, layout: Layout) -> Iterator[tuple[Tensor, Tensor]]:
    """Random tokens."""
    while True:
        inputs, targets = torch.randint(0, shape.vocab_size, (2, layout.micro_batch, shape.sequence))
        yield inputs, targets


def run(shape: Shape, layout: Layout, rank: int, device: torch.device) -> Row:
    """Some steps of one rank."""
    is_cuda = device.type == "cuda"
    before = _forget(device)
    with engine_of(shape, layout, rank, device) as engine:
        data, live = batches(shape, layout), LiveBytes()
        if is_cuda:
            torch.cuda.reset_peak_memory_stats(device)
        assert engine.optimizer is not None
        with contextlib.nullcontext() if is_cuda else counting(live, engine):
            engine.train_batch(data)
            engine.optimizer.wait()
            live.start()
            started = time.perf_counter()
            for _ in range(STEPS - 1):
                engine.train_batch(data)
        engine.optimizer.wait()
        if is_cuda:
            torch.cuda.synchronize(device)
        step_s = (time.perf_counter() - started) / (STEPS - 1)
        buffers = buffers_of(engine)
        rest = torch.cuda.memory_allocated(device) - before if is_cuda else sum(buffers.values())
        measured = torch.cuda.max_memory_allocated(device) - before if is_cuda else rest + live.most
        buffers["before"] = before
    planned = rank_bytes(shape, layout, rank)
    beside = planned.workspace if not is_cuda else 0.0
    num_layers = sum(stage_layers(shape, layout)[stage] for stage in engine.module.stages)
    whole, at_rest = planned.gpu_bytes - beside, _at_rest(planned) - beside
    return Row(str(layout), rank, num_layers, whole, measured, at_rest, rest, step_s, _parts(planned), buffers)


def tried(shape: Shape, layout: Layout, rank: int, device: torch.device) -> Row | str:
    """The same, or what went wrong: where one is out of memory, the others may still be measured."""
    try:
        return run(shape, layout, rank, device)
    except RuntimeError as error:
        return f"{layout}, rank {rank}: {error}"


def _forget(device: torch.device) -> int:
    """Let go of what earlier runs have left; bytes that are still there."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


def _at_rest(planned: RankBytes) -> float:
    return planned.state.gpu_bytes + planned.staging + planned.workspace


def _parts(planned: RankBytes) -> dict[str, float]:
    found = asdict(planned)
    return {**found.pop("state"), **found}


def report(rows: Sequence[Row], shape: Shape, device: torch.device, date: str) -> str:
    """The table and a line of JSON."""
    is_cuda, machine = device.type == "cuda", read_machine()
    unit, head = (1e9, HEAD) if is_cuda else (1e6, HEAD.replace("GB", "MB"))
    lines = [head, "|" + "---|" * (head.count("|") - 1), *(f"| {' | '.join(row.cells(unit))} |" for row in rows)]
    text = TEXT.format(
        date=date,
        device=torch.cuda.get_device_name() if is_cuda else "no GPU: live tensors on the CPU",
        machine=f"{machine.cpu}, {machine.usable_cores} cores",
        torch=torch.__version__,
        shape=f"{shape.name}, {shape.numel / 1e9:.4g} B parameters, sequences of {shape.sequence}",
        steps=STEPS,
        table="\n".join(lines),
    )
    return text + "\n".join(
        ["", "```json", json.dumps({"date": date, "rows": [asdict(row) for row in rows]}), "```", ""]
    )


def brief(row: Row) -> str:
    """A line for the eye."""
    sizes = f"planned {row.planned / 1e6:9,.2f} MB, measured {row.measured / 1e6:9,.2f} MB, {row.off:+.1%}"
    return f"{sizes}: rank {row.rank} of {row.layout}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="small stages, on the CPU")
    parser.add_argument("--only", type=int, help="one of the layouts, by its number from 0")
    parser.add_argument("--save", action="store_true", help="write the result to a dated file")
    given = parser.parse_args()
    is_tiny = given.tiny or not torch.cuda.is_available()
    device = torch.device("cpu") if is_tiny else torch.device("cuda", torch.cuda.current_device())
    shape, cases = (TINY_SHAPE, tiny_cases()) if is_tiny else (GPU_SHAPE, gpu_cases())
    cases = cases if given.only is None else [cases[given.only]]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # this process is alone
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = [tried(shape, case.layout, rank, device) for case in cases for rank in case.ranks]
    rows, failed = [one for one in found if isinstance(one, Row)], [one for one in found if isinstance(one, str)]
    date = datetime.date.today().isoformat()
    text = report(rows, shape, device, date)
    print(text, *(brief(row) for row in rows), sep="\n")
    failed += [f"{row.layout}, rank {row.rank}: {row.off:+.1%}" for row in rows if abs(row.off) > LIMIT]
    if failed:
        sys.exit(f"failed, or further than {LIMIT:.0%} from the plan:\n" + "\n".join(failed))
    if given.save and not is_tiny and given.only is None:
        (Path(__file__).parent / "results" / f"{date}-planned-stage.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
