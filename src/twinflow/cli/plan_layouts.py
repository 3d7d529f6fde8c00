"""`twinflow plan` for several machines: layouts of pipeline, tensor and data parallelism, with the reasons for their
speed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from twinflow.cli.plan_input import CORES, RAM, choose_model, parse_count
from twinflow.cli.plan_scaling import cluster_text, parse_rate
from twinflow.cli.plan_text import PIPE_WIDTH, count, gb, seconds
from twinflow.cli.settings import parse_bytes
from twinflow.errors import incompatible, invalid_value
from twinflow.parallel.costs import Estimate
from twinflow.parallel.search import MICRO_BATCHES, Found, LayoutAsk, reasons, search
from twinflow.parallel.shapes import Shape, shape_like, shape_of
from twinflow.planner.machines import GPUS, Host, Machine, gpu_named
from twinflow.planner.scaling import Cluster, default_network

SHOWN: Final = 5
LEAST_BATCH: Final = 512  # sequences in a step without --total-batch
SEQUENCE: Final = 2048
_DRAM_RATE: Final = 300e9  # bytes/s of a machine with two sockets


@dataclass(frozen=True)
class Flags:
    """The flags of the command line. None: not given."""

    preset: str | None
    model: str | None
    params: str | None
    gpu: str | None
    gpus: int
    per_node: int | None
    ram: str | None
    cores: int | None
    dram: str | None
    network: str | None
    batch: int | None
    batch_size: int | None
    seq_length: int | None
    checkpointing: bool | None
    tokens: str | None
    layouts: int | None


def wants_layouts(flags: Flags) -> bool:
    """Whether to search layouts: there are more GPUs than in one machine, or a flag that only applies to layouts."""
    if flags.per_node is not None and flags.per_node < 1:
        raise invalid_value("--per-node", flags.per_node, "a whole number >= 1")
    if flags.tokens is not None or flags.layouts is not None or flags.batch is not None:
        return True
    return flags.gpus > _per_node(flags)


def show_layouts(flags: Flags, others: dict[str, object], as_json: bool) -> int:
    """Print the table or the JSON object, and return the exit code: 1 if nothing fits.

    `others`: flags that must not be given.
    """
    for name, value in others.items():
        if value is not None:
            reason = "the search over layouts does not use it"
            remedy = (
                f"Leave it out, or plan one machine with at most --gpus {_per_node(flags)} and without --tokens, "
                "--layouts and --total-batch."
            )
            raise incompatible(f"{name} {value}", "a plan of parallel layouts", reason, remedy)
    cluster, shape = choose_machines(flags), choose_shape(flags)
    tokens = parse_count("--tokens", flags.tokens) if flags.tokens is not None else None
    batch = flags.batch if flags.batch is not None else -(-LEAST_BATCH // max(1, flags.gpus)) * flags.gpus
    ask = LayoutAsk(
        shape=shape,
        cluster=cluster,
        num_gpus=flags.gpus,
        batch=batch,
        micro_batches=MICRO_BATCHES if flags.batch_size is None else (_positive("--batch-size", flags.batch_size),),
        checkpointing=(False, True) if flags.checkpointing is None else (flags.checkpointing,),
    )
    found = search(ask, flags.layouts if flags.layouts is not None else SHOWN)
    if as_json:
        typer.echo(json.dumps(to_dict(ask, found, tokens)))
    else:
        print_layouts(ask, found, tokens)
    return 0 if found.best else 1


def choose_machines(flags: Flags) -> Cluster:
    """The machines, from data sheets. Values that the flags do not give are those of a DGX with such GPUs."""
    if flags.gpu is None:
        raise invalid_value("--gpu", None, GPUS, "Layouts are planned from data sheets, so name the GPU.")
    per_node = _per_node(flags)
    ram = parse_bytes("--ram", flags.ram) or RAM * per_node
    cores = _positive("--cores", flags.cores) if flags.cores is not None else CORES * per_node
    host = Host(ram, cores, parse_rate("--dram", flags.dram) or _DRAM_RATE)
    machine = Machine(gpu_named(flags.gpu), host, per_node)
    return Cluster(machine, parse_rate("--network", flags.network) or default_network(machine))


def choose_shape(flags: Flags) -> Shape:
    """The model that the flags name. With --params, a shape that is typical for published models of this size."""
    sequence = flags.seq_length if flags.seq_length is None else _positive("--seq-length", flags.seq_length)
    if flags.params is not None and flags.preset is None and flags.model is None:
        return shape_like(parse_count("--params", flags.params), sequence or SEQUENCE)
    cost, _ = choose_model(flags.preset, flags.model, flags.params)
    return shape_of(cost, sequence or cost.context)


def _per_node(flags: Flags) -> int:
    """GPUs in a machine: 16 for V100 (DGX-2), 8 for later GPUs."""
    if flags.per_node is not None:
        return flags.per_node
    return 16 if flags.gpu is not None and gpu_named(flags.gpu).pcie == 3 else 8


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise invalid_value(name, value, "a whole number >= 1")
    return value


def print_layouts(ask: LayoutAsk, found: Found, tokens: float | None) -> None:
    """Print the model, the machines, the table of layouts and the reasons."""
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(width=PIPE_WIDTH, highlight=False)
    shape = ask.shape
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
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold", collapse_padding=True)
    for name in ("", "pp", "tp", "dp", "ZeRO"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("schedule", no_wrap=True)
    names = ["micro-batches", "GPU GB", "bubble", "s/step", "TFLOPS/GPU", *(["days"] if tokens else [])]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
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
