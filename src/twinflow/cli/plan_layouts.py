# SPDX-License-Identifier: Apache-2.0
"""`twinflow plan` for several machines: layouts of pipeline, tensor and data parallelism, with the reasons for their
speed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

import typer
from rich.table import Table
from rich.text import Text

from twinflow.cli import check_whole
from twinflow.cli.plan_input import (
    CORES,
    MAX_GPUS,
    RAM,
    PlanOptions,
    choose_cluster,
    choose_host,
    choose_model,
    parse_count,
    sequence_length,
)
from twinflow.cli.plan_scaling import cluster_text
from twinflow.cli.plan_text import count, gb, make_console, make_table, seconds
from twinflow.cli.settings import MAX_BATCH
from twinflow.errors import incompatible
from twinflow.parallel.costs import Estimate
from twinflow.parallel.search import MICRO_BATCHES, Found, LayoutAsk, reasons, search
from twinflow.parallel.shapes import Shape, shape_like, shape_of
from twinflow.planner.machines import gpu_named

MAX_LAYOUT_NUMEL: Final = 1e14
SHOWN: Final = 5  # default of --layouts
LEAST_BATCH: Final = 512  # default number of sequences in a step, without --total-batch
SEQUENCE: Final = 2048
_DRAM_RATE: Final = 300e9  # bytes/s of a machine with two sockets
_UNUSED: Final = (
    "config",
    "states",
    "accumulation",
    "sequences",
    "offload_params",
    "offload_embeddings",
    "expert_parallel",
    "grad_clip",
    "gpu_memory",
    "gpu_tflops",
    "pcie",
    "html",
    "write_config",
)


def wants_layouts(options: PlanOptions) -> bool:
    """Whether to search layouts: there are more GPUs than in one machine, or a flag that only applies to layouts."""
    check_whole("--per-node", options.per_node, most=MAX_GPUS)
    check_whole("--gpus", options.gpus, most=MAX_GPUS)
    check_whole("--layouts", options.layouts)
    check_whole("--total-batch", options.total_batch, most=MAX_BATCH)
    return bool(options.given("tokens", "layouts", "total_batch")) or options.gpus > _per_node(options)


def show_layouts(options: PlanOptions) -> int:
    """Print the table or the JSON object, and return the exit code: 1 if nothing fits."""
    for name, value in options.given(*_UNUSED).items():
        reason = "the search over layouts does not use this option"
        remedy = (
            f"Leave {name} out, or plan one machine: use at most --gpus {_per_node(options)}, and leave out --tokens, "
            "--layouts and --total-batch."
        )
        raise incompatible(f"{name} {value}", "a plan of parallel layouts", reason, remedy)
    per_node = _per_node(options)
    # Values of options that are not given are those of a DGX with such GPUs.
    host = choose_host(options, RAM * per_node, CORES * per_node, _DRAM_RATE)
    cluster = choose_cluster(options, host, per_node, "Layouts are planned from data sheets, so name the GPU.")
    shape = choose_shape(options)
    tokens = parse_count("--tokens", options.tokens) if options.tokens is not None else None
    check_whole("--batch-size", options.batch_size, most=MAX_BATCH)
    checkpointing = options.checkpoint_activations
    default_batch = -(-LEAST_BATCH // max(1, options.gpus)) * options.gpus
    ask = LayoutAsk(
        shape=shape,
        cluster=cluster,
        num_gpus=options.gpus,
        batch=default_batch if options.total_batch is None else options.total_batch,
        micro_batches=MICRO_BATCHES if options.batch_size is None else (options.batch_size,),
        checkpointing=(False, True) if checkpointing is None else (checkpointing,),
    )
    found = search(ask, options.layouts if options.layouts is not None else SHOWN)
    if options.as_json:
        typer.echo(json.dumps(to_dict(ask, found, tokens)))
    else:
        print_layouts(ask, found, tokens)
    return 0 if found.best else 1


def choose_shape(options: PlanOptions) -> Shape:
    """The model that the options name. With --params, a shape that is typical for published models of this size."""
    tokens = sequence_length(options)
    if options.params is not None and options.preset is None and options.model is None:
        return shape_like(parse_count("--params", options.params, MAX_LAYOUT_NUMEL), tokens or SEQUENCE)
    cost, _ = choose_model(options)
    return shape_of(cost, tokens or cost.context)


def _per_node(options: PlanOptions) -> int:
    """GPUs in a machine: --per-node, or else 16 for V100 (DGX-2) and 8 for later GPUs."""
    if options.per_node is not None:
        return options.per_node
    return 16 if options.gpu is not None and gpu_named(options.gpu).pcie == 3 else 8


def print_layouts(ask: LayoutAsk, found: Found, tokens: float | None) -> None:
    """Print the model, the machines, the table of layouts and the reasons."""
    console, shape = make_console(), ask.shape
    title = f"{shape.name}: {count(shape.numel)} parameters, {shape.num_layers} layers, {shape.num_heads} heads"
    console.print(Text(title, style="bold"))
    how = f"{ask.num_gpus:,} GPUs, {ask.batch:,} x {shape.sequence:,} tokens in a step, Adam in mixed precision"
    console.print(Text(f"{cluster_text(ask.cluster)}\n{how}\n", style="dim"))
    if not found.best:
        assert found.nearest is not None
        console.print(Text(missing_text(found.nearest, found.num_tried), style="bold red"))
        return
    console.print(layout_table(found.best, tokens))
    for number, one in enumerate(found.best, 1):
        console.print(Text(f"\n{number}. {one.layout}", style="bold" if number == 1 else ""))
        for reason in reasons(one):
            console.print(Text(f"   {reason}"))
    console.print(Text(f"\n{verdict(found)}", style="dim"))


def layout_table(best: Sequence[Estimate], tokens: float | None) -> Table:
    names = ["", "pp", "tp", "dp", "ZeRO", "schedule", "micro-batches", "GPU GB", "bubble", "s/step", "TFLOPS/GPU"]
    table = make_table([*names, "days"] if tokens else names, left=["schedule"])
    for number, one in enumerate(best, 1):
        layout = one.layout
        chunks = f" x {layout.num_chunks}" if layout.schedule == "interleaved" else ""
        row = [str(number), str(layout.num_pp), str(layout.num_tp), str(layout.num_dp), str(layout.zero)]
        row += [f"{layout.schedule}{chunks}" if layout.num_pp > 1 else "-"]
        row += [f"{layout.num_micro_batches} x {layout.micro_batch}", gb(one.fullest.gpu_bytes)]
        row += [f"{100 * one.seconds.bubble:.1f}%", seconds(one.seconds.step_s), f"{one.tflops:.0f}"]
        row += [f"{one.days(tokens):,.1f}"] if tokens else []
        table.add_row(*row, style="green" if number == 1 else "")
    return table


def verdict(found: Found) -> str:
    """How many layouts were tried, and how accurate the numbers are."""
    tried = f"{found.num_fitting:,} of {found.num_tried:,} layouts fit."
    return f"{tried} The times are simulated from data sheets: their order is more reliable than their values."


def missing_text(nearest: Estimate, num_tried: int) -> str:
    """The memory that the closest layout lacks, and what to change."""
    lacks = [f"{gb(nearest.missing_bytes)} GB on the GPU"] if nearest.missing_bytes else []
    over = nearest.host_bytes - nearest.host_limit
    lacks += [f"{gb(over)} GB of host memory"] if over > 0 else []
    remedy = "Try more --gpus, a larger --gpu or more --ram." if over > 0 else "Try more --gpus or a larger --gpu."
    closest = f"The closest one ({nearest.layout}) lacks {' and '.join(lacks)}."
    return f"None of {num_tried:,} layouts fits. {closest} {remedy}"


def to_dict(ask: LayoutAsk, found: Found, tokens: float | None) -> dict[str, Any]:
    shape, machine = ask.shape, ask.cluster.machine
    return {
        "model": {**asdict(shape), "params": shape.numel},
        "cluster": {
            "gpu": machine.gpu.title,
            "gpus": ask.num_gpus,
            "gpus_per_machine": machine.num_gpus,
            "network_rate": ask.cluster.network_rate,
        },
        "batch": ask.batch,
        "tokens": tokens,
        "tried": found.num_tried,
        "fitting": found.num_fitting,
        "layouts": [layout_dict(one, tokens) for one in found.best],
        "nearest": layout_dict(found.nearest, tokens) if found.nearest is not None else None,
    }


def layout_dict(one: Estimate, tokens: float | None) -> dict[str, Any]:
    return {
        **asdict(one.layout),
        "fits": one.fits,
        "gpu_bytes": one.fullest.gpu_bytes,
        "gpu_limit": one.gpu_limit,
        "fullest": asdict(one.fullest),
        "host_bytes": one.host_bytes,
        "volume": asdict(one.volume),
        "data_groups": asdict(one.data_groups),
        "crosses": list(one.crosses),
        "bubble": one.seconds.bubble,
        "step_s": one.seconds.step_s,
        **asdict(one.seconds),
        "tflops": one.tflops,
        "days": one.days(tokens) if tokens else None,
        "reasons": reasons(one),
    }
