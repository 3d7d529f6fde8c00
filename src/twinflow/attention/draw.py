# SPDX-License-Identifier: Apache-2.0
"""The cost of a layout (the kept blocks of scores), and drawings of it: shades on a grid, text, or a PNG file."""

from __future__ import annotations

import struct
import zlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twinflow.attention.layout import Layout

Shades = Tensor  # float64 [cells, cells], 0 = nothing is kept, 1 = all is kept
# RGB of kept cells, of omitted cells, and of borders
_DARK, _LIGHT, _LINE = (38, 70, 128), (255, 255, 255), (225, 229, 236)
_HALVES: tuple[str, ...] = (" ", "▄", "▀", "█")
_GLYPHS = " ░▒▓█"
_DTYPE_BYTES = 2


@dataclass(frozen=True)
class Cost:
    """Cost of one forward of one sequence over all heads, compared with dense attention of the same kind (causal or
    not).

    Bytes are those of a fused kernel in bf16 that iterates over blocks of queries. It reads keys and values of each
    kept block, and reads queries and writes outputs once.
    """

    num_kept: int  # kept blocks of all heads
    num_blocks: int  # blocks of dense attention
    density: float  # kept share of the whole square
    flops: int
    dense_flops: int
    io_bytes: int
    dense_io_bytes: int
    index_bytes: int  # size of the layout's tensors

    @property
    def flops_share(self) -> float:
        """FLOPs as a share of those of dense attention."""
        return self.flops / self.dense_flops

    @property
    def bytes_share(self) -> float:
        """Bytes as a share of those of dense attention."""
        return self.io_bytes / self.dense_io_bytes

    def to_dict(self) -> dict[str, Any]:
        """All numbers as a dict for JSON."""
        return {**asdict(self), "flops_share": self.flops_share, "bytes_share": self.bytes_share}


def cost_of(layout: Layout, head_dim: int) -> Cost:
    kept = layout.row_starts[:, -1] - layout.row_starts[:, 0]
    num_kept = sum(int(kept[pattern]) for pattern in layout.head_to_pattern)
    rows, heads = layout.num_rows, layout.num_heads
    in_head = rows * (rows + 1) // 2 if layout.is_causal else rows * layout.num_cols
    flops_a_block = 4 * head_dim * layout.block**2  # two matrix products
    bytes_a_block = 2 * layout.block * head_dim * _DTYPE_BYTES
    once = 2 * heads * rows * layout.block * head_dim * _DTYPE_BYTES
    return Cost(
        num_kept,
        heads * in_head,
        layout.density,
        num_kept * flops_a_block,
        heads * in_head * flops_a_block,
        num_kept * bytes_a_block + once,
        heads * in_head * bytes_a_block + once,
        layout.cols.numel() * 4 + layout.row_starts.numel() * 8,
    )


def shades(layout: Layout, pattern: int, max_cells: int) -> Shades:
    """A pattern on a grid of at most `max_cells` per side. Each cell has the share of its blocks that are kept."""
    size = max(layout.num_rows, layout.num_cols)
    cells = min(size, max_cells)
    counts = torch.zeros(cells, cells, dtype=torch.float64)
    rows, cols = layout.rows_of(pattern).long() * cells // size, layout.cols_of(pattern).long() * cells // size
    counts.view(-1).index_add_(0, rows * cells + cols, torch.ones(rows.numel(), dtype=torch.float64))
    width = torch.bincount(torch.arange(size) * cells // size, minlength=cells).double()
    return counts / (width[:, None] * width)


def text_lines(grid: Shades) -> list[str]:
    """The grid as text, two rows of cells per line: half-block characters, or shades if some cell is partly kept."""
    if grid.shape[0] % 2:
        grid = torch.cat([grid, torch.zeros_like(grid[:1])])
    upper, lower = grid[0::2], grid[1::2]
    if bool(((grid == 0) | (grid == 1)).all()):
        codes, glyphs = upper.int() * 2 + lower.int(), _HALVES
    else:
        codes, glyphs = ((upper + lower) / 2).sqrt().mul(len(_GLYPHS) - 1).ceil().int(), tuple(_GLYPHS)
    return ["".join(glyphs[code] for code in line) for line in codes.tolist()]


def png_bytes(grids: list[Shades], max_pixels: int = 1024) -> bytes:
    """The grids side by side as a PNG image of at most about `max_pixels` in height."""
    scale = max(1, max_pixels // grids[0].shape[0])
    gap = max(scale, 16)
    parts: list[np.ndarray[Any, Any]] = []
    for number, grid in enumerate(grids):
        image = _pixels(grid, scale)
        if number:
            parts.append(np.full((image.shape[0], gap, 3), 255, dtype=np.uint8))
        parts.append(image)
    whole = np.concatenate(parts, axis=1)
    frame = np.full((whole.shape[0] + 2 * gap, whole.shape[1] + 2 * gap, 3), 255, dtype=np.uint8)
    frame[gap:-gap, gap:-gap] = whole
    return encode_png(frame)


def _pixels(grid: Shades, scale: int) -> np.ndarray[Any, Any]:
    """The grid as RGB pixels, with visible cells for small shares. Borders are drawn if cells are large enough."""
    share = np.sqrt(grid.numpy())[..., None]
    colour = np.asarray(_LIGHT) * (1 - share) + np.asarray(_DARK) * share
    image: np.ndarray[Any, Any] = np.kron(colour, np.ones((scale, scale, 1))).round().astype(np.uint8)
    if scale >= 6:
        image[::scale] = image[:, ::scale] = _LINE
    image[[0, -1]] = image[:, [0, -1]] = _DARK
    return image


def encode_png(image: np.ndarray[Any, Any]) -> bytes:
    """An RGB image, uint8 [height, width, 3], as a PNG file."""
    height, width, _ = image.shape
    lines = np.concatenate([np.zeros((height, 1), dtype=np.uint8), image.reshape(height, -1)], axis=1)  # no filter
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 6)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
