# SPDX-License-Identifier: Apache-2.0
"""Output of `twinflow plan` in a terminal: a table of cases, bars of memory, a recommendation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from twinflow.planner.cases import Case, Plan
from twinflow.planner.costs import Run
from twinflow.planner.fit import Fit

PIPE_WIDTH: Final = 100  # width of the output into a pipe
BOUND: Final = {"gpu": "GPU", "host": "host update", "disk": "disk", "copies": "PCIe", "gate": "clipping norm"}
CASE_COLUMNS: Final = ("offload", "states", "ratio", "GPU GB", "host GB", "s/step", "tokens/s", "bound by")
_BAR: Final = 34
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"


def make_console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=PIPE_WIDTH, highlight=False)


def make_table(names: Sequence[str], left: Sequence[str] = ()) -> Table:
    """A table with columns of these names, still without rows. It is printed without borders. Columns in `left` are
    aligned left, and so is "bound by", whose text may wrap. All other columns are aligned right.
    """
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold", collapse_padding=True)
    for name in names:
        is_text = name == "bound by"
        table.add_column(name, justify="left" if is_text or name in left else "right", no_wrap=not is_text)
    return table


def print_plan(plan: Plan, fit: Fit, machine: str, ignored: Sequence[str]) -> None:
    """Print the tables. `machine`: the description of the machine. `ignored`: keys of the config that are not used."""
    console, shown, memory = make_console(), fit.case, plan.setting.memory
    console.print(Text(title(plan.run), style="bold"))
    console.print(Text(f"{machine}\n{how(plan.run)}\n", style="dim"))
    console.print(case_table(plan))
    for where, used, limit in (("GPU", shown.used.gpu, memory.gpu_bytes), ("host", shown.used.host, memory.host_bytes)):
        total = f"{gb(sum(used.values()))} of {gb(limit)} GB"
        console.print(Text(f"\n{where}, {shown.kind}, {shown.run.states}: {total}", style="bold"))
        console.print(bars(used, limit))
    console.print(Text("\nlargest model of this shape that fits", style="bold"))
    for states, text in largest_rows(plan):
        console.print(Text(f"  {states}  {text}"))
    if ignored:
        console.print(Text(f"\n{ignored_text(ignored)}", style="dim"))
    console.print(Text(f"\n{advice(plan, fit)}", style="bold green" if fit.fits else "bold red"))


def ignored_text(ignored: Sequence[str]) -> str:
    return f"Keys of the config that do not influence the plan: {', '.join(ignored)}."


def title(run: Run) -> str:
    model = run.model
    active = f", of which a token uses {count(model.active_numel)}" if model.experts else ""
    text = f"{model.name}: {count(model.numel)} parameters{active}, {len(model.blocks)} blocks of width {model.hidden}"
    if not run.adapter_rank:
        return text
    base = "base in 4 bits" if run.four_bits else "frozen base"
    return f"{text}, {base}, {count(sum(run.trained_blocks))} trained in adapters of rank {run.adapter_rank}"


def how(run: Run) -> str:
    parts = [batch(run)]
    parts += [f"{run.weights} weights", "clipping" if run.clips else "no clipping"]
    kept = "cheap activations recomputed" if run.selective else "activations kept"
    parts.append("activations recomputed" if run.checkpointing else kept)
    parts += ["tiled"] if run.is_tiled else []
    parts += ["updates delayed by one step"] if run.delayed else []
    parts += [f"experts divided over {run.expert_parallel} GPUs"] if run.expert_parallel > 1 else []
    return ", ".join(parts)


def case_table(plan: Plan) -> Table:
    """A table with a row for each case. The row of a case that does not fit shows how many GB are missing."""
    table = make_table(CASE_COLUMNS, left=("offload", "states"))
    kind = ""
    for case in plan.cases:
        name, *cells = case_cells(case, "-")
        style = "green" if case is plan.best else "" if case.fits else "dim"
        table.add_row(name if name != kind else "", *cells, style=style)
        kind = name
    return table


def case_cells(case: Case, empty: str) -> list[str]:
    """The cells of `CASE_COLUMNS`. `empty`: text in place of the speed of a case that does not fit."""
    cells = [case.kind, case.run.states, f"{case.ratio:.2f}", gb(case.used.gpu_total), gb(case.used.host_total)]
    if not case.fits:
        return [*cells, empty, empty, lacks(case)]
    return [*cells, seconds(case.prediction.step_s), f"{case.tokens_s:,.0f}", BOUND[case.prediction.bound_by]]


def lacks(case: Case) -> str:
    missing = [("GPU", case.missing.gpu_bytes), ("host", case.missing.host_bytes)]
    parts = [f"{where} {gb(amount)} GB" for where, amount in missing if amount]
    return f"short by {' + '.join(parts)}"


def bars(used: Mapping[str, int], limit: int) -> Table:
    """A table of bytes by kind, with bars relative to the available memory."""
    table = Table.grid(padding=(0, 2))
    table.add_column(width=14)
    table.add_column(justify="right", width=10)
    table.add_column(no_wrap=True)
    for kind, amount in used.items():
        if amount:
            table.add_row(f"  {kind_name(kind)}", f"{gb(amount)} GB", Text(bar(amount / max(limit, 1)), style="cyan"))
    return table


def kind_name(kind: str) -> str:
    """The name of a kind of memory for readers."""
    return {"shadows": "speculative", "rings": "copy buffers"}.get(kind, kind)


def bar(share: float) -> str:
    """A bar with a resolution of an eighth of a character. A bar longer than the limit ends in an arrow."""
    if share > 1.0:
        return "█" * (_BAR - 1) + "▶"
    eighths = max(1, round(share * _BAR * 8))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def largest_rows(plan: Plan) -> list[tuple[str, str]]:
    """Each state format with the deepest model that fits."""
    return [
        (states, f"{count(plan.largest_numel(states))}, {layers:,} blocks" if layers else "none")
        for states, layers in plan.largest.items()
    ]


def advice(plan: Plan, fit: Fit) -> str:
    """The recommendation, or the reason why nothing fits and what to change."""
    if not fit.fits:
        sides = (("GPU", fit.short_gpu_bytes), ("host", fit.short_host_bytes))
        missing = " and ".join(f"short by {gb(amount)} GB of {side} memory" for side, amount in sides if amount)
        closest = f"{fit.case.kind}, {fit.states} states, {batch(fit.case.run)}"
        helps = f" What would help: {', or '.join(fit.helps)}." if fit.helps else ""
        return f"Nothing fits. The closest run ({closest}) is {missing}.{helps}"
    changes = "".join(f" {change}" for change in fit.changes)
    bound, step_s = BOUND[fit.bound_by], seconds(fit.step_s)
    speed = (
        f"A step takes {step_s} s ({fit.tokens_s:,.0f} tokens/s) and is bound by {bound}{_gain(fit.case, plan.cases)}."
    )
    return f"Use {', '.join(chosen(fit))}. {speed}{changes}"


def chosen(fit: Fit) -> list[str]:
    """The settings of a fit as phrases."""
    where = "weights on the host" if fit.offload_params else "weights on the GPU"
    where += ' with those of the embedding and output layers ("embeddings": true)' if fit.offload_embeddings else ""
    kept = "selective recomputation of activations" if fit.selective else "no activation checkpointing"
    again = "activation checkpointing" if fit.checkpointing else kept
    ratio = f'"ratio": {fit.ratio:.3g}, "states": "{fit.states}"'
    ratio += f', "placement": "{fit.case.run.placement}"' if fit.case.run.placement != "auto" else ""
    long = long_sequence(fit.case.run) if fit.case.run.is_tiled else []
    others = ["state on the disk"] if fit.case.run.on_disk else []
    others += ["weights on the disk"] if fit.case.run.weights_on_disk else []
    size = fit.case.run.expert_parallel
    others += [f'"expert_parallel_size": {size}'] if size > 1 else []
    others += [] if fit.clips else ["no gradient clipping"]
    return [ratio, batch(fit.case.run), again, *long, where, *others]


def long_sequence(run: Run) -> list[str]:
    """The settings of a tiled run as phrases."""
    kept, num_blocks = run.inputs, len(run.model.blocks)
    num_inputs = kept.num_inputs(num_blocks)
    form = " in float8" if kept.is_float8 else ""
    where = f", {kept.on_host} of them on the {'disk' if kept.on_disk else 'host'}" if kept.on_host else ""
    which = "each layer" if kept.every == 1 else f"every {kept.every}th layer" if kept.every > 2 else "every 2nd layer"
    return ["tile_sequence(model)", f"the input of {which} kept{form} ({num_inputs} inputs{where})"]


def batch(run: Run) -> str:
    """The batch of a step of a GPU, as text."""
    if run.micro_batches == 1:
        return f"1 micro-batch of {run.batch} x {run.tokens} tokens"
    return f"{run.micro_batches} micro-batches of {run.batch} x {run.tokens} tokens"


def _gain(best: Case, cases: Sequence[Case]) -> str:
    """The speedup over full offload in the same state format, as text."""
    full = [c for c in cases if c.kind == "full offload" and c.run.states == best.run.states and c.fits]
    gain = full[0].prediction.step_s / best.prediction.step_s if full and not best.run.offload_params else 1.0
    return f". It is {gain:.2f} times as fast as full offload" if gain >= 1.005 else ""


def gb(amount: float) -> str:
    return f"{amount / 1e9:,.1f}"


def seconds(value: float) -> str:
    """Seconds with three decimals below 10, else with one."""
    return f"{value:.3f}" if value < 10 else f"{value:,.1f}"


def count(numel: int) -> str:
    """A number of parameters in millions or billions."""
    return f"{numel / 1e9:.2f} B" if numel >= 10**9 else f"{numel / 1e6:.1f} M"
