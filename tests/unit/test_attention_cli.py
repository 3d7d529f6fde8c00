# SPDX-License-Identifier: Apache-2.0
"""`twinflow attention show`: the drawing, the numbers and the picture."""

from __future__ import annotations

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from twinflow import attention as att
from twinflow.attention.draw import cost_of, png_bytes, shades, text_lines
from twinflow.cli.attention import print_layout
from twinflow.cli.main import app


def show(*options: str) -> Result:
    return CliRunner().invoke(app, ["attention", "show", *options])


def as_json(*options: str) -> dict[str, Any]:
    result = show(*options, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def decoded(data: bytes) -> Any:
    """The pixels of an RGB PNG without filters, and all its checksums looked at."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + body)
        chunks[kind] = body
        at += 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, depth, colours = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert (depth, colours) == (8, 2)
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), dtype=np.uint8).reshape(height, 1 + 3 * width)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(height, width, 3)


def test_the_example_of_the_readme() -> None:
    result = show("--pattern", "bigbird", "--seq", "4096")
    assert result.exit_code == 0, result.output
    kept = att.BigBirdSparsityConfig(1, 64).layout(4096).num_kept
    assert f"{kept:,} of the 4,096 of dense attention" in result.output
    assert f"{kept / 4096:.2%} of the square" in result.output
    drawn = [line.strip("│") for line in result.output.splitlines() if line.startswith("│")]
    assert len(drawn) == 32
    assert set("".join(drawn)) == set(" ▀▄█")
    assert all(len(line) == 64 for line in drawn)


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (["--pattern", "fixed", "--causal"], att.FixedSparsityConfig(1, 64, attention="unidirectional")),
        (["--pattern", "fixed", "--window", "8", "--global", "2"], att.FixedSparsityConfig(1, 64, False, 8, 2)),
        (
            ["--pattern", "variable", "--window", "2", "--global", "3"],
            att.VariableSparsityConfig(1, 64, local_window_blocks=[2], global_block_indices=[0, 1, 2]),
        ),
        (["--pattern", "bigbird", "--random", "3"], att.BigBirdSparsityConfig(1, 64, num_random_blocks=3)),
        (
            ["--pattern", "bigbird", "--heads", "3"],
            att.BigBirdSparsityConfig(3, 64, True),
        ),
        (["--pattern", "longformer"], att.BSLongformerSparsityConfig(1, 64)),
        (
            ["--pattern", "window", "--window", "5", "--block", "16"],
            att.LocalSlidingWindowSparsityConfig(1, 16, 5, "bidirectional"),
        ),
        (["--pattern", "dense", "--heads", "2"], att.DenseSparsityConfig(2, 64)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_numbers_are_those_of_the_layout(options: list[str], pattern: att.SparsityConfig) -> None:
    found = as_json(*options, "--seq", "1000", "--head-dim", "32")
    dense = pattern.layout(1000).to_dense()
    rows, block = dense.shape[1], pattern.block
    everything = torch.ones(rows, rows).tril() if pattern.is_causal else torch.ones(rows, rows)
    assert found["num_kept"] == int(dense.sum())
    assert found["density"] == pytest.approx(float(dense.double().mean()))
    assert found["flops"] == int(dense.sum()) * 4 * 32 * block**2
    assert found["flops_share"] == pytest.approx(float(dense.sum() / (everything.sum() * pattern.num_heads)))
    queries_and_outputs = 2 * 2 * pattern.num_heads * rows * block * 32
    keys_and_values = 2 * 2 * int(dense.sum()) * block * 32
    assert found["io_bytes"] == queries_and_outputs + keys_and_values
    assert found["heads"] == pattern.num_heads


def test_heads_that_differ_are_drawn_apart() -> None:
    result = show("--pattern", "bigbird", "--heads", "6", "--seq", "512")
    assert result.exit_code == 0, result.output
    assert [f"head {head}\n" in result.output for head in range(6)] == [True] * 4 + [False] * 2
    assert "and 2 more patterns" in result.output
    assert "6 patterns" in result.output
    assert "all keep the same blocks" in show("--heads", "6", "--seq", "512").output


def test_many_blocks_become_shades() -> None:
    result = show("--pattern", "fixed", "--causal", "--seq", "16384", "--block", "16")
    assert "A cell stands for up to 16 x 16 blocks" in result.output
    assert "▒" in result.output
    layout = att.FixedSparsityConfig(1, 16).layout(16384)
    grid = shades(layout, 0, 50)
    assert grid.shape == (50, 50)
    assert float(grid.max()) < 1
    widths = torch.bincount(torch.arange(1024) * 50 // 1024, minlength=50)
    assert float((grid * widths[:, None] * widths).sum()) == pytest.approx(layout.num_kept)


def test_a_terminal_with_colours_shows_every_block() -> None:
    pattern = att.LocalSlidingWindowSparsityConfig(1, 16)
    layout = pattern.layout(16 * 21)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="truecolor", width=80)
    print_layout(console, pattern, layout, 16 * 21, cost_of(layout, 64))
    assert out.getvalue().count("▀") == 21 * 11  # two rows a line, the last one half empty
    assert "38;2;110;190;255" in out.getvalue()
    assert "\x1b[2;38;2" not in out.getvalue(), "shades are not dimmed by the style of the frame"


def test_text_is_the_grid() -> None:
    grid = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    assert text_lines(grid) == ["█▄ ", "  ▀"]
    assert text_lines(grid * 0.25) == ["▒▒ ", "  ▒"]


def test_the_picture_has_the_blocks(tmp_path: Path) -> None:
    file = tmp_path / "layout.png"
    assert show("--pattern", "bigbird", "--seq", "2048", "--png", str(file)).exit_code == 0
    pixels = decoded(file.read_bytes())
    kept = att.BigBirdSparsityConfig(1, 64).layout(2048).to_dense()[0].numpy()
    scale, frame = 1024 // 32, 1024 // 32
    centres = pixels[frame + scale // 2 : -frame : scale, frame + scale // 2 : -frame : scale]
    assert np.array_equal(centres.sum(-1) < 400, kept)


def test_a_picture_of_two_heads_is_twice_as_wide() -> None:
    layout = att.BigBirdSparsityConfig(2, 16, True).layout(64 * 16)
    grids = [shades(layout, pattern, 64) for pattern in range(2)]
    pixels = decoded(png_bytes(grids, 128))
    assert pixels.shape == (2 * 16 + 128, 3 * 16 + 2 * 128, 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--block", "17"], ["block is 17", "16, 32, 64, 128"]),
        (["--pattern", "dense", "--window", "3"], ["--window 3 cannot be used with --pattern dense"]),
        (["--pattern", "window", "--random", "3"], ["--random 3 cannot be used with --pattern window", "--window"]),
        (["--pattern", "dense", "--causal"], ["--causal cannot be used with --pattern dense"]),
        (["--window", "3", "--global", "2"], ["num_global_blocks is 2", "divisor"]),
        (["--png", "/nowhere/at/all.png"], ["--png", "/nowhere/at/all.png"]),
        (["--pattern", "star"], ["star", "bigbird"]),
    ],
)
def test_mistakes_are_named(options: list[str], words: list[str]) -> None:
    result = show(*options)
    assert result.exit_code == 2
    for word in words:
        assert word in result.output
