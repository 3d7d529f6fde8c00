# SPDX-License-Identifier: Apache-2.0
"""`twinflow plan --scaling`: a table of a model's speed on 1, 2, 4, ... GPUs, with offload and without."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import typer
from rich.table import Table
from rich.text import Text

from twinflow.cli import check_whole
from twinflow.cli.plan_input import MAX_GPUS, PlanOptions, choose_cluster, choose_host
from twinflow.cli.plan_text import BOUND, gb, make_console, make_table, seconds, title
from twinflow.cli.settings import MAX_BATCH
from twinflow.errors import incompatible
from twinflow.planner.costs import Run
from twinflow.planner.fit import Wish
from twinflow.planner.machines import link_rate
from twinflow.planner.scaling import (
    OFFLOAD,
    PLAIN,
    Ask,
    Cluster,
    Point,
    Row,
    crossover,
    doubling,
    efficiency,
    scaling,
)

TOTAL_BATCH: Final = 512  # sequences, as in the papers on offload


def scaling_run(wish: Wish) -> Run:
    """The run whose speed is compared. `scaling` chooses its batch for each number of GPUs."""
    wide = wish.model.hidden >= 1600
    return Run(
        model=wish.model,
        batch=wish.micro_batch or wish.sequences,
        tokens=wish.tokens,
        micro_batches=wish.accumulation or 1,
        states=wish.states or "fp32",
        clips=wish.clips is not False,
        delayed=wish.delayed,
        checkpointing=wide if wish.checkpointing is None else wish.checkpointing,
        weights=wish.weights,
        world=wish.world,
        stage=wish.stage,
        num_moments=wish.num_moments,
        matrix_steps=wish.matrix_steps,
        expert_parallel=wish.expert_parallel or 1,
    )


def show_scaling(options: PlanOptions, run: Run) -> int:
    """Print the table or the JSON object, and return the exit code: 1 if nothing fits on any number of GPUs."""
    assert options.scaling is not None
    why = "--scaling is computed from data sheets, so name the GPU."
    cluster = choose_cluster(options, choose_host(options), options.gpus, why)
    names = ("html", "write_config", "tokens", "layouts", "per_node", "sequences", "offload_params", "expert_parallel")
    unused = options.given(*names, "offload_embeddings", "gpu_memory", "gpu_tflops", "pcie")
    if unused:
        reason = "--scaling prints one table for all numbers of GPUs"
        remedy = f"Leave {' and '.join(unused)} out. To save the table, use --json."
        raise incompatible(f"--scaling {options.scaling}", " and ".join(unused), reason, remedy)
    check_whole("--scaling", options.scaling, most=MAX_GPUS)
    check_whole("--total-batch", options.total_batch, most=MAX_BATCH)
    total_batch = options.total_batch or TOTAL_BATCH
    rows = scaling(run, cluster, doubling(options.scaling), Ask(total_batch))
    if options.as_json:
        typer.echo(json.dumps(to_dict(run, cluster, rows)))
    else:
        console = make_console()
        console.print(Text(title(run), style="bold"))
        console.print(Text(f"{cluster_text(cluster)}\n{how(run, total_batch)}\n", style="dim"))
        console.print(scaling_table(rows))
        console.print(Text(f"\n{verdict(rows)}", style="bold"))
    return 0 if any(row.offload or row.plain for row in rows) else 1


def cluster_text(cluster: Cluster) -> str:
    gpu, host, num = cluster.machine.gpu, cluster.machine.host, cluster.machine.num_gpus
    links, network = (f"{rate / 1e9:.0f} GB/s" for rate in (link_rate(cluster.machine), cluster.network_rate))
    memory = f"{host.ram_bytes / 1e9:.0f} GB RAM at {host.dram_rate / 1e9:.0f} GB/s"
    machines = f"machines of {num} x {gpu.title}, {host.cores} cores, {memory}"
    return f"{machines}; {links} between GPUs,\n{network} between machines (from data sheets, not measured)"


def how(run: Run, total_batch: int) -> str:
    """One line on the run. Batch sizes are in the table."""
    again = "activations recomputed" if run.checkpointing else "activations kept"
    return f"at most {total_batch} x {run.tokens} tokens in a step, {run.weights} weights, {run.states} states, {again}"


def scaling_table(rows: Sequence[Row]) -> Table:
    """A table with two rows for each number of GPUs: with offload and without."""
    names = ("GPUs", "method", "batch", "GPU GB", "s/step", "TFLOPS/GPU", "total", "linear", "bound by")
    table = make_table(names, left=["method"])
    methods = _by_method(rows)
    for i, row in enumerate(rows):
        for name, points in methods.items():
            style = "green" if row.ahead == name else "" if points[i][0] is not None else "dim"
            table.add_row(str(row.world) if name == OFFLOAD else "", name, *_cells(*points[i]), style=style)
    return table


def _by_method(rows: Sequence[Row]) -> dict[str, list[tuple[Point | None, float | None]]]:
    """The points of each method, and their speed as a share of linear scaling."""
    points = {OFFLOAD: [row.offload for row in rows], PLAIN: [row.plain for row in rows]}
    return {name: list(zip(each, efficiency(each), strict=True)) for name, each in points.items()}


def _cells(point: Point | None, share: float | None) -> list[str]:
    if point is None or share is None:
        return ["-", "-", "-", "-", "-", "-", "does not fit"]
    return [
        f"{point.run.batch} x {point.run.micro_batches}",
        gb(point.used.gpu_total),
        seconds(point.step_s),
        f"{point.tflops:.1f}",
        f"{point.total_tflops:,.0f}",
        f"{100 * share:.1f}%",
        "link" if point.bound_by == "link" else BOUND[point.bound_by],
    ]


def verdict(rows: Sequence[Row]) -> str:
    """One sentence on the number of GPUs up to which offload is faster."""
    found = crossover(rows)
    if found is None:
        if not any(row.offload or row.plain for row in rows):
            return "Nothing fits on any number of GPUs."
        where = "on every" if rows[-1].ahead == OFFLOAD else "on no"
        return f"{OFFLOAD} is faster {where} number of GPUs."
    last, following = found
    return f"{OFFLOAD} is faster up to {last} GPUs. From {following} GPUs on {PLAIN} is as fast or faster."


def to_dict(run: Run, cluster: Cluster, rows: Sequence[Row]) -> dict[str, Any]:
    methods = _by_method(rows)
    return {
        "model": {"name": run.model.name, "params": run.model.numel},
        "cluster": {
            "gpu": cluster.machine.gpu.title,
            "gpus_per_machine": cluster.machine.num_gpus,
            "network_rate": cluster.network_rate,
            "link_rate": link_rate(cluster.machine),
        },
        "rows": [
            {
                "world": row.world,
                **{name: _point_dict(*points[i]) for name, points in methods.items()},
                "ahead": row.ahead,
            }
            for i, row in enumerate(rows)
        ],
        "crossover": crossover(rows),
    }


def _point_dict(point: Point | None, share: float | None) -> dict[str, Any] | None:
    if point is None:
        return None
    return {
        "batch": point.run.batch,
        "micro_batches": point.run.micro_batches,
        "gpu_bytes": point.used.gpu_total,
        "host_bytes": point.used.host_total,
        "step_s": point.step_s,
        "compute_s": point.compute_s,
        "scatter_s": point.talk.scatter_s,
        "gather_s": point.talk.gather_s,
        "exposed_s": point.talk.exposed_s,
        "waited_s": point.last.waited_s,
        "tflops": point.tflops,
        "total_tflops": point.total_tflops,
        "linear": share,
        "bound_by": point.bound_by,
    }
