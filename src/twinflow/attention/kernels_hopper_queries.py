# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Gradients of queries for Hopper. See kernels_hopper_common.py. Results are those of kernels_backward.py."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from twinflow.attention.kernels_hopper_common import (
    HALF,
    LOADER_REGISTERS,
    LOG2E,
    OWN,
    REGISTERS,
    WHOLE,
    corner,
    give_back,
    load_tiles,
    make_bars,
    masked,
    read_item,
    store_piece,
    store_rows,
    sync,
)


@gluon.jit(do_not_specialize=["total", "num_items", "num_long", "num_own", "num_other", "num_slots"])
def query_gradients(q, grad, k, v, dq, out, lse, delta, sums, plan, places, total, num_items, num_long, num_own,
                    num_other, num_slots, scale, S: gl.constexpr):  # fmt: skip
    """Compute the gradients of tiles of queries. q, grad, k, v and dq are TMA descriptors."""
    OTHER: gl.constexpr = k.block_type.shape[0]
    DIM: gl.constexpr = k.block_type.shape[1]
    own_bufs = (
        gl.allocate_shared_memory(q.dtype, [4, HALF, DIM], q.layout),
        gl.allocate_shared_memory(q.dtype, [4, HALF, DIM], q.layout),
    )
    other_bufs = (
        gl.allocate_shared_memory(k.dtype, [S.STAGES, OTHER, DIM], k.layout),
        gl.allocate_shared_memory(k.dtype, [S.STAGES, OTHER, DIM], k.layout),
    )
    bars = make_bars(S.STAGES)
    fence_async_shared()
    sync()
    sizes = (total, num_items, num_long, num_own, num_other, num_slots)
    results = (out, lse, delta, dq, sums)
    loads = ((q, grad), (k, v), own_bufs, other_bufs, bars, plan, places, sizes, gl.constexpr(S.GROUP), gl.constexpr(1))
    gl.warp_specialize(
        [
            (_query_rows, (gl.constexpr(0), own_bufs, other_bufs, bars, plan, places, sizes, results, scale, S)),
            (_query_rows, (gl.constexpr(1), own_bufs, other_bufs, bars, plan, places, sizes, results, scale, S)),
            (load_tiles, loads),
        ],
        [4, 1],
        [REGISTERS, LOADER_REGISTERS],
    )


@gluon.jit
def _query_rows(PART: gl.constexpr, own_bufs, other_bufs, bars, plan, places, sizes, results, scale, S: gl.constexpr):
    """The work of one warpgroup, which computes one half of each own tile. Rows of `out` are read one item ahead."""
    STAGES: gl.constexpr = other_bufs[0].shape[0]
    DIM: gl.constexpr = other_bufs[0].shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    out, lse, delta, dq, sums = results
    count = 0
    turn = 0
    is_held = 0  # whether the previous item still uses its own tiles
    head, tile, start, stop, piece = read_item(plan[0], gl.program_id(0), sizes)
    out_tile = _read_out(out, head, tile * OWN + PART * HALF, places, sizes, DIM, ROWS)
    for number in range(gl.program_id(0), sizes[0], gl.num_programs(0)):
        following = read_item(plan[0], number + gl.num_programs(0), sizes)
        slot = turn & 1
        num_tiles = stop - start
        at = head * sizes[3] + tile * OWN + PART * HALF
        base = at.to(gl.int64)
        row_lse = gl.load(lse + base + gl.arange(0, HALF, gl.SliceLayout(1, SCORES)))
        mbarrier.wait(bars[0].index(slot), (turn >> 1) & 1)
        q_tile = own_bufs[0].index(slot * 2 + PART)
        g_tile = own_bufs[1].index(slot * 2 + PART)
        row_delta = gl.sum(out_tile.to(gl.float32) * g_tile.load(ROWS).to(gl.float32), 1)
        out_tile = _read_out(out, following[0], following[1] * OWN + PART * HALF, places, sizes, DIM, ROWS)
        gl.store(delta + base + gl.arange(0, HALF, gl.SliceLayout(1, ROWS)), row_delta)
        row_delta = gl.convert_layout(row_delta, gl.SliceLayout(1, SCORES))
        acc = gl.full([HALF, DIM], 0.0, gl.float32, SUMS)
        words = plan[2] + start * 2 + PART
        word = gl.load(words) if S.HAS_CELLS else WHOLE
        for t in range(num_tiles):
            stage = (count + t) % STAGES
            phase = ((count + t) // STAGES) & 1
            own = (q_tile, g_tile, row_lse, row_delta)
            if S.HAS_CELLS:
                next_word = gl.load(words + (t + 1) * 2)
                mbarrier.wait(bars[2].index(stage), phase)
                mbarrier.wait(bars[4].index(stage), phase)
                if word != 0:
                    acc = _add_to_queries(acc, own, other_bufs, bars, stage, phase, scale, word, S, SCORES)
                word = next_word
            else:
                acc = _add_to_queries(acc, own, other_bufs, bars, stage, phase, scale, WHOLE, S, SCORES)
            mbarrier.arrive(bars[3].index(stage), count=1)
            mbarrier.arrive(bars[5].index(stage), count=1)
            if is_held != 0:
                give_back(bars, slot ^ 1)
                is_held = 0
        count += num_tiles
        if is_held != 0:
            give_back(bars, slot ^ 1)
        is_held = 1
        acc = acc * scale
        if S.HAS_CUTS and piece >= 0:
            store_piece(sums, (head * sizes[5] + piece).to(gl.int64), acc, PART, SUMS)
        else:
            row, col = corner(head, sizes[3], places, 4)
            store_rows(dq, row + tile * OWN + PART * HALF, col, q_tile, acc.to(q_tile.dtype))
        turn += 1
        head, tile, start, stop, piece = following
    tma.store_wait(0)


@gluon.jit
def _read_out(out, head, position, places, sizes, DIM: gl.constexpr, ROWS: gl.constexpr):
    """Load rows of `out`, the sixth tensor in `places`. Its stride between rows is stored after all places."""
    row, col = corner(head, sizes[3], places, 5)
    stride = places[12]
    rows = gl.arange(0, HALF, gl.SliceLayout(1, ROWS))
    cols = gl.arange(0, DIM, gl.SliceLayout(0, ROWS))
    first = out + (row + position).to(gl.int64) * stride + col
    return gl.load(first + (rows[:, None] * stride + cols[None, :]))


@gluon.jit
def _add_to_queries(acc, own, other_bufs, bars, stage, phase, scale, word, S: gl.constexpr, SCORES: gl.constexpr):
    """Add the contribution of one tile of keys to the gradients of queries."""
    q_tile, g_tile, row_lse, row_delta = own
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    zeros = gl.full([HALF, HALF], 0.0, gl.float32, SCORES)
    k_tile = other_bufs[0].index(stage)
    if not S.HAS_CELLS:
        mbarrier.wait(bars[2].index(stage), phase)
    scores = warpgroup_mma(q_tile, k_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if not S.HAS_CELLS:
        mbarrier.wait(bars[4].index(stage), phase)
    v_tile = other_bufs[1].index(stage).permute((1, 0))
    dp = warpgroup_mma(g_tile, v_tile, zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    if S.HAS_CELLS and word != WHOLE:
        scores = masked(scores, word, S.CAUSAL, False, SCORES)
    p = gl.exp2(scores * (scale * LOG2E) - row_lse[:, None])
    dp = warpgroup_mma_wait(0, deps=[dp])
    ds = gl.convert_layout((p * (dp - row_delta[:, None])).to(k_tile.dtype), OPERAND)
    acc = warpgroup_mma(ds, k_tile, acc, is_async=True)
    acc, ds = warpgroup_mma_wait(0, deps=[acc, ds])
    return acc
