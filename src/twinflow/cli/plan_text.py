"""Output of `twinflow plan` in a terminal: a table of cases, bars of memory, a recommendation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from twinflow.cli.plan_input import Place
from twinflow.planner.cases import Case
from twinflow.planner.costs import Run

PIPE_WIDTH: Final = 100  # for output into a pipe, which has no width
BOUND: Final = {"gpu": "GPU", "host": "host update", "copies": "PCIe", "gate": "clipping norm"}
_BAR: Final = 34
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"


def print_plan(
    console: Console,
    run: Run,
    place: Place,
    cases: Sequence[Case],
    best: Case | None,
    largest: Mapping[str, int],
) -> None:
    console.print(Text(title(run), style="bold"))
    console.print(Text(f"{place.text}\n{how(run)}\n", style="dim"))
    console.print(case_table(cases, best))
    shown = best or min(cases, key=lambda case: case.missing.gpu_bytes + case.missing.host_bytes)
    memory = place.setting.memory
    sides = (("GPU", shown.used.gpu, memory.gpu_bytes), ("host", shown.used.host, memory.host_bytes))
    for where, used, limit in sides:
        total = f"{gb(sum(used.values()))} of {gb(limit)} GB"
        console.print(Text(f"\n{where}, {shown.kind}, {shown.run.states}: {total}", style="bold"))
        console.print(bars(used, limit))
    console.print(Text("\nlargest model of this shape that fits", style="bold"))
    console.print(Text(f"{largest_text(run, largest)}\n"))
    console.print(Text(advice(best, shown, cases), style="bold green" if best is not None else "bold red"))


def title(run: Run) -> str:
    model = run.model
    return f"{model.name}: {count(model.numel)} parameters, {len(model.blocks)} blocks of width {model.hidden}"


def how(run: Run) -> str:
    parts = [f"micro-batches of {run.batch} x {run.tokens} tokens"]
    parts += [f"{run.micro_batches} micro-batches in a step"] if run.micro_batches > 1 else []
    parts += [f"{run.weights} weights", "clipping" if run.clips else "no clipping"]
    parts.append("activations recomputed" if run.checkpointing else "activations kept")
    parts += ["updates delayed by one step"] if run.delayed else []
    return ", ".join(parts)


def case_table(cases: Sequence[Case], best: Case | None) -> Table:
    """A table with a row for each case. The row of a case that does not fit shows how many GB are missing."""
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold", collapse_padding=True)
    table.add_column("offload", no_wrap=True)
    table.add_column("states", no_wrap=True)
    for name in ("ratio", "GPU GB", "host GB", "s/step", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bound by")
    kind = ""
    for case in cases:
        row = [case.kind if case.kind != kind else "", case.run.states, f"{case.ratio:.2f}"]
        row += [gb(case.used.gpu_total), gb(case.used.host_total)]
        if case.fits:
            row += [seconds(case.prediction.step_s), f"{case.tokens_s:,.0f}", BOUND[case.prediction.bound_by]]
        else:
            row += ["-", "-", lacks(case)]
        style = "green" if case is best else "" if case.fits else "dim"
        table.add_row(*row, style=style, end_section=False)
        kind = case.kind
    return table


def lacks(case: Case) -> str:
    """The memory that a case lacks on GPU and host."""
    missing = [("GPU", case.missing.gpu_bytes / 1e9), ("host", case.missing.host_bytes / 1e9)]
    return ", ".join(f"{where} +{amount:.{amount < 10:d}f}" for where, amount in missing if amount) + " GB"


def bars(used: Mapping[str, int], limit: int) -> Table:
    """A table of bytes by kind, with bars relative to the available memory."""
    table = Table.grid(padding=(0, 2))
    table.add_column(width=13)
    table.add_column(justify="right", width=8)
    table.add_column(no_wrap=True)
    for kind, amount in used.items():
        if amount:
            table.add_row(f"  {kind}", f"{gb(amount)} GB", Text(bar(amount / max(limit, 1)), style="cyan"))
    return table


def bar(share: float) -> str:
    """A bar with a resolution of an eighth of a character. A bar longer than the limit ends in an arrow."""
    if share > 1.0:
        return "█" * (_BAR - 1) + "▶"
    eighths = max(1, round(share * _BAR * 8))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def largest_text(run: Run, largest: Mapping[str, int]) -> str:
    """The deepest model that fits, for each state format."""
    found = [
        f"  {states}  {count(run.model.with_layers(layers).numel)}, {layers:,} blocks"
        if layers
        else f"  {states}  none"
        for states, layers in largest.items()
    ]
    return "\n".join(found)


def advice(best: Case | None, nearest: Case, cases: Sequence[Case]) -> str:
    """The recommendation, or the reason why nothing fits and what to change."""
    if best is None:
        case = f"{nearest.kind} with {nearest.run.states} states"
        sides = (("GPU", nearest.missing.gpu_bytes), ("host", nearest.missing.host_bytes))
        missing = " and ".join(f"{gb(amount)} GB of {side} memory" for side, amount in sides if amount)
        return f"Nothing fits. The closest is {case}, which lacks {missing}. {_remedy(nearest)}"
    keys = f'"ratio": {best.ratio:.3g}, "states": "{best.run.states}"'
    gain = _gain(best, cases)
    bound = BOUND[best.prediction.bound_by]
    return f"Use {keys}. A step takes {seconds(best.prediction.step_s)} s and is bound by {bound}{gain}."


def _gain(best: Case, cases: Sequence[Case]) -> str:
    """The speedup over full offload in the same state format, as text."""
    full = [c for c in cases if c.kind == "full offload" and c.run.states == best.run.states and c.fits]
    if not full or best.kind == "full offload":
        return ""
    return f". It is {full[0].prediction.step_s / best.prediction.step_s:.2f} times as fast as full offload"


def _remedy(case: Case) -> str:
    """Options that reduce memory, as a sentence."""
    found = []
    if case.missing.gpu_bytes:
        found.append("a smaller --batch-size")
        found += [] if case.run.checkpointing else ["--checkpoint-activations"]
        found.append("a larger --gpu")
    if case.run.clips and case.used.host["gradients"]:
        found.append("--grad-clip 0")
    found += ["more --ram"] if case.missing.host_bytes else []
    return f"Try {' or '.join(found)}."


def gb(amount: float) -> str:
    return f"{amount / 1e9:,.1f}"


def seconds(value: float) -> str:
    """Seconds with three decimals below 10, else with one."""
    return f"{value:.3f}" if value < 10 else f"{value:,.1f}"


def count(numel: int) -> str:
    """A number of parameters in millions or billions."""
    return f"{numel / 1e9:.2f} B" if numel >= 10**9 else f"{numel / 1e6:.1f} M"
