# SPDX-License-Identifier: Apache-2.0
"""`twinflow attention`: draws a pattern of sparse attention and computes its cost."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from twinflow.attention.draw import Cost, Shades, cost_of, png_bytes, shades, text_lines
from twinflow.attention.layout import Layout
from twinflow.attention.patterns import SparsityConfig, pattern_from_config
from twinflow.cli import check_whole, told_errors
from twinflow.errors import incompatible

attention_app = typer.Typer(no_args_is_help=True, help="Show patterns of sparse attention.")
MAX_SEQ = 2**20
MAX_BLOCKS = 2**28  # blocks of all heads: one byte for each
PIPE_WIDTH = 100  # width of the output into a pipe
MAX_CELLS = 64  # cells in a row of the drawing in a terminal
MAX_DRAWN = 4  # maximum number of patterns that are drawn, if heads have different patterns
PNG_CELLS = 1024
_MODES = {"longformer": "bslongformer", "window": "local"}


class Pattern(str, Enum):
    """Patterns of sparse attention, by the names in the literature."""

    fixed = "fixed"
    variable = "variable"
    bigbird = "bigbird"
    longformer = "longformer"
    window = "window"
    dense = "dense"


@attention_app.callback()
def attention() -> None:
    """Show patterns of sparse attention."""


@attention_app.command()
def show(
    pattern: Pattern = typer.Option(Pattern.fixed, help="Pattern of the blocks of scores that are computed."),
    seq: int = typer.Option(4096, min=1, help="Number of tokens in a sequence."),
    block: int = typer.Option(64, help="Tokens in a block: 16, 32, 64 or 128."),
    heads: int = typer.Option(1, min=1, help="Number of heads. With random blocks every head has its own pattern."),
    head_dim: int = typer.Option(64, min=1, help="Width of a head, for the cost estimate."),
    window: int | None = typer.Option(None, help="Number of blocks in the window."),
    num_global: int | None = typer.Option(None, "--global", help="Number of global blocks."),
    random: int | None = typer.Option(None, help="Number of random blocks in each row."),
    causal: bool = typer.Option(False, "--causal", help="A token does not attend to later tokens."),
    png: Path | None = typer.Option(None, help="Write a PNG image to this file."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of the drawing."),
) -> None:
    """Draw a pattern and compare its cost with dense attention."""
    counts = {"--window": window, "--global": num_global, "--random": random}
    with told_errors(exit_code=2):
        check_size(seq, block, heads, head_dim, counts)
        config = pattern_from_config(section(pattern.value, block, heads, counts, causal), heads)
        layout = config.layout(seq)
        cost = cost_of(layout, head_dim)
    if png is not None:
        write_png(png, layout)
    if as_json:
        typer.echo(json.dumps(to_dict(config, layout, seq, cost)))
        return
    console = Console()
    print_layout(console if console.is_terminal else Console(width=PIPE_WIDTH), config, layout, seq, cost)
    if png is not None:
        typer.echo(f"image: {png}")


def check_size(seq: int, block: int, heads: int, head_dim: int, counts: dict[str, int | None]) -> None:
    """Raise a ValueError if the pattern has too many blocks to draw."""
    check_whole("--block", block, most=MAX_SEQ)
    check_whole("--seq", seq, most=MAX_SEQ)
    check_whole("--head-dim", head_dim, most=MAX_SEQ)
    num_blocks = -(-seq // block)
    check_whole("--heads", heads, most=max(1, MAX_BLOCKS // num_blocks**2))
    for name, count in counts.items():
        check_whole(name, None if count is None else max(count, 0), least=0, most=MAX_SEQ)


def section(pattern: str, block: int, heads: int, counts: dict[str, int | None], causal: bool) -> dict[str, Any]:
    """The pattern as the config section `sparse_attention`. Raises ValueError for an option that the pattern does not
    have.
    """
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
            remedy = f"Use only {' and '.join(names)} with this pattern." if names else f"Leave {option} out."
            reason = f"this pattern has no {option[2:]} blocks"
            raise incompatible(f"{option} {count}", f"--pattern {pattern}", reason, remedy)
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
        reason = "the dense pattern keeps all blocks"
        raise incompatible("--causal", "--pattern dense", reason, "Choose another pattern, or leave --causal out.")
    return found


def to_dict(config: SparsityConfig, layout: Layout, seq: int, cost: Cost) -> dict[str, Any]:
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
    """Write an image with one square for each pattern, at most `MAX_DRAWN`."""
    grids = [shades(layout, pattern, PNG_CELLS) for pattern in range(min(layout.num_patterns, MAX_DRAWN))]
    try:
        path.write_bytes(png_bytes(grids))
    except OSError as error:
        typer.echo(f"error: The image {str(path)!r} cannot be written: {error}. Choose another --png.", err=True)
        raise typer.Exit(2) from None


def print_layout(console: Console, config: SparsityConfig, layout: Layout, seq: int, cost: Cost) -> None:
    console.print(Text(f"{type(config).__name__}, {seq} tokens in blocks of {layout.block}", style="bold"))
    cells = min(MAX_CELLS, console.width - 4)
    for pattern in range(min(layout.num_patterns, MAX_DRAWN)):
        grid = shades(layout, pattern, cells)
        if layout.num_patterns > 1:
            heads = [str(head) for head, its in enumerate(layout.head_to_pattern) if its == pattern]
            console.print(Text(f"head{'s' * (len(heads) > 1)} {', '.join(heads)}", style="dim"))
        console.print(framed(grid, console.color_system is not None))
    if layout.num_patterns > MAX_DRAWN:
        console.print(Text(f"and {layout.num_patterns - MAX_DRAWN} more patterns", style="dim"))
    if layout.num_rows > cells:
        each = -(-layout.num_rows // cells)
        note = f"A cell stands for up to {each} x {each} blocks. Its shade shows the share of blocks that are kept."
        console.print(Text(note, style="dim"))
    console.print(table(layout, cost))


def framed(grid: Shades, has_colours: bool) -> Text:
    """The drawing in a frame. Rows are queries and columns are keys, starting at the top left."""
    width = grid.shape[0]
    lines = shaded(grid) if has_colours else [Text(line) for line in text_lines(grid)]
    # Only the frame is dim: a style of the whole text would also dim the shades.
    text = Text().append("┌" + "─" * width + "┐\n", style="dim")
    for line in lines:
        text.append_text(Text.assemble(("│", "dim"), line, ("│\n", "dim")))
    return text.append("└" + "─" * width + "┘", style="dim")


def shaded(grid: Shades) -> list[Text]:
    """Two rows of cells in each line of half blocks. A cell is brighter if more of its blocks are kept."""
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
    kind = "causal dense" if layout.is_causal else "dense"
    heads, patterns = layout.num_heads, layout.num_patterns
    fewer = f"{1 / cost.flops_share:,.1f} times fewer"
    rows = {
        "kept blocks": f"{cost.num_kept:,} of the {cost.num_blocks:,} of {kind} attention",
        "density": f"{cost.density:.2%} of the square of all blocks",
        "FLOPs": f"{cost.flops / 1e9:,.2f} G forward, {cost.flops_share:.2%} of {kind}: {fewer}",
        "memory traffic": f"{cost.io_bytes / 2**20:,.1f} MiB, {cost.bytes_share:.2%} of {kind}",
        "index of blocks": f"{cost.index_bytes / 2**10:,.1f} KiB for {patterns} pattern{'s' * (patterns > 1)}",
    }
    if heads > 1:
        rows["heads"] = f"{heads}, " + ("all keep the same blocks" if patterns == 1 else f"{patterns} patterns")
    shown = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        shown.add_row(Text(name, style="dim"), Text(value))
    return shown
