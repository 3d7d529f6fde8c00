"""`twinflow attention`: what a pattern of sparse attention looks like, and what it costs."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from twinflow.attention.draw import Cost, Shades, cost_of, png_bytes, shades, text_lines
from twinflow.attention.layout import Layout
from twinflow.attention.patterns import SparsityConfig, pattern_from_config
from twinflow.errors import invalid_value

attention_app = typer.Typer(no_args_is_help=True, help="Sparse attention: look at patterns.")
PIPE_WIDTH = 100  # a pipe has no width of its own
MAX_CELLS = 64  # a side, in a terminal
MAX_DRAWN = 4  # patterns of heads
PNG_CELLS = 1024
_MODES = {"longformer": "bslongformer", "window": "local"}


class Pattern(str, Enum):
    """The patterns, by the names that papers use."""

    fixed = "fixed"
    variable = "variable"
    bigbird = "bigbird"
    longformer = "longformer"
    window = "window"
    dense = "dense"


@attention_app.callback()
def attention() -> None:
    """Sparse attention: look at patterns."""


@attention_app.command()
def show(
    pattern: Annotated[Pattern, typer.Option(help="Which blocks are kept.")] = Pattern.fixed,
    seq: Annotated[int, typer.Option(min=1, help="Tokens.")] = 4096,
    block: Annotated[int, typer.Option(help="Tokens of a block: 16, 32, 64 or 128.")] = 64,
    heads: Annotated[int, typer.Option(min=1, help="Heads; with random blocks each draws its own.")] = 1,
    head_dim: Annotated[int, typer.Option(min=1, help="Width of a head, for the cost.")] = 64,
    window: Annotated[int | None, typer.Option(help="Blocks of the window.")] = None,
    num_global: Annotated[int | None, typer.Option("--global", help="Global blocks.")] = None,
    random: Annotated[int | None, typer.Option(help="Random blocks of each row.")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="No token sees a later one.")] = False,
    png: Annotated[Path | None, typer.Option(help="Write a picture to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Draw a pattern, and say what it keeps and what that costs beside dense attention."""
    counts = {"--window": window, "--global": num_global, "--random": random}
    try:
        config = pattern_from_config(section(pattern.value, block, heads, counts, causal), heads)
        layout = config.layout(seq)
        cost = cost_of(layout, head_dim)
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    if png is not None:
        write_png(png, layout)
    if as_json:
        typer.echo(json.dumps(to_dict(config, layout, seq, cost)))
        return
    console = Console()
    print_layout(console if console.is_terminal else Console(width=PIPE_WIDTH), config, layout, seq, cost)
    if png is not None:
        typer.echo(f"picture: {png}")


def section(pattern: str, block: int, heads: int, counts: dict[str, int | None], causal: bool) -> dict[str, Any]:
    """The pattern as a config's `sparse_attention` has it; an option that it has no use for is refused."""
    names = {
        "fixed": {"--window": "num_local_blocks", "--global": "num_global_blocks"},
        "variable": {
            "--window": "local_window_blocks",
            "--global": "global_block_indices",
            "--random": "num_random_blocks",
        },
        "bigbird": {
            "--window": "num_sliding_window_blocks",
            "--global": "num_global_blocks",
            "--random": "num_random_blocks",
        },
        "longformer": {"--window": "num_sliding_window_blocks", "--global": "global_block_indices"},
        "window": {"--window": "num_sliding_window_blocks"},
        "dense": {},
    }[pattern]
    found: dict[str, Any] = {"mode": _MODES.get(pattern, pattern), "block": block}
    for option, count in counts.items():
        if count is None:
            continue
        if option not in names:
            allowed = f"left out with --pattern {pattern}"
            raise invalid_value(option, count, allowed, f"It takes {', '.join(names)}." if names else "")
        name = names[option]
        lists = {"local_window_blocks": [count], "global_block_indices": list(range(count))}
        found[name] = lists.get(name, count)
    if pattern == "bigbird":
        found.setdefault("num_random_blocks", 1)
    if found.get("num_random_blocks") and heads > 1:
        found["different_layout_per_head"] = True
    if pattern != "dense":
        found["attention"] = "unidirectional" if causal else "bidirectional"
    elif causal:
        raise invalid_value("--causal", True, "left out with --pattern dense, which keeps everything")
    return found


def to_dict(config: SparsityConfig, layout: Layout, seq: int, cost: Cost) -> dict[str, Any]:
    """Everything for JSON."""
    return {
        "pattern": type(config).__name__,
        "seq": seq,
        "block": layout.block,
        "rows": layout.num_rows,
        "heads": layout.num_heads,
        "patterns": layout.num_patterns,
        "causal": layout.is_causal,
        **cost.to_dict(),
    }


def write_png(path: Path, layout: Layout) -> None:
    """The picture: one square a pattern, a few at most."""
    grids = [shades(layout, pattern, PNG_CELLS) for pattern in range(min(layout.num_patterns, MAX_DRAWN))]
    try:
        path.write_bytes(png_bytes(grids))
    except OSError as error:
        typer.echo(f"--png is {str(path)!r}, but must be a file that can be written ({error}).", err=True)
        raise typer.Exit(2) from None


def print_layout(console: Console, config: SparsityConfig, layout: Layout, seq: int, cost: Cost) -> None:
    """A drawing a pattern, and the numbers."""
    console.print(Text(f"{type(config).__name__}, {seq} tokens in blocks of {layout.block}", style="bold"))
    cells = min(MAX_CELLS, console.width - 4)
    for pattern in range(min(layout.num_patterns, MAX_DRAWN)):
        grid = shades(layout, pattern, cells)
        if layout.num_patterns > 1:
            heads = [str(head) for head, its in enumerate(layout.head_to_pattern) if its == pattern]
            console.print(
                Text(f"head {', '.join(heads)}" if len(heads) == 1 else f"heads {', '.join(heads)}", style="dim")
            )
        console.print(framed(grid, console.color_system is not None))
    if layout.num_patterns > MAX_DRAWN:
        console.print(Text(f"and {layout.num_patterns - MAX_DRAWN} more patterns", style="dim"))
    if layout.num_rows > cells:
        each = -(-layout.num_rows // cells)
        note = f"a cell stands for up to {each} x {each} blocks, and is the fuller, the more of them are kept"
        console.print(Text(note, style="dim"))
    console.print(table(layout, cost))


def framed(grid: Shades, has_colours: bool) -> Text:
    """Rows are queries and columns keys, from the top left."""
    width = grid.shape[0]
    lines = shaded(grid) if has_colours else [Text(line) for line in text_lines(grid)]
    text = Text().append("┌" + "─" * width + "┐\n", style="dim")  # a style of the whole would dim the shades
    for line in lines:
        text.append_text(Text.assemble(("│", "dim"), line, ("│\n", "dim")))
    return text.append("└" + "─" * width + "┘", style="dim")


def shaded(grid: Shades) -> list[Text]:
    """Half blocks in shades: the more of a cell is kept, the brighter."""
    rows = [*grid.sqrt().tolist(), [0.0] * grid.shape[1]]
    lines = []
    for upper, lower in zip(rows[0::2], rows[1::2], strict=False):
        line = Text()
        for above, below in zip(upper, lower, strict=True):
            line.append("▀", style=Style(color=_colour(above), bgcolor=_colour(below)))
        lines.append(line)
    return lines


def _colour(share: float) -> str:
    dark, bright = (24, 26, 32), (110, 190, 255)
    red, green, blue = (round(low + (high - low) * share) for low, high in zip(dark, bright, strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"


def table(layout: Layout, cost: Cost) -> Table:
    """The numbers."""
    kind = "causal dense" if layout.is_causal else "dense"
    heads, patterns = layout.num_heads, layout.num_patterns
    fewer = f"{1 / cost.flops_share:,.1f} times fewer"
    rows = {
        "kept blocks": f"{cost.num_kept:,} of the {cost.num_blocks:,} of {kind} attention",
        "density": f"{cost.density:.2%} of the square",
        "FLOPs": f"{cost.flops / 1e9:,.2f} G forward, {cost.flops_share:.2%} of {kind}: {fewer}",
        "memory traffic": f"{cost.io_bytes / 2**20:,.1f} MiB, {cost.bytes_share:.2%} of {kind}",
        "index": f"{cost.index_bytes / 2**10:,.1f} KiB for {patterns} pattern{'s' * (patterns > 1)}",
    }
    if heads > 1:
        rows["heads"] = f"{heads}, " + ("all keep the same blocks" if patterns == 1 else f"{patterns} patterns")
    shown = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        shown.add_row(Text(name, style="dim"), Text(value))
    return shown
