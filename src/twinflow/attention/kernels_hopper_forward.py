# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Forward for Hopper. See kernels_hopper_common.py. Results are those of kernels_forward.py, whose `reduce` also
combines the pieces of rows that are cut.
"""

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

LOWEST = gl.constexpr(-1e30)  # lower than any real score, but finite, so that differences are never NaN


@gluon.jit(do_not_specialize=["total", "num_items", "num_long", "num_own", "num_other", "num_slots"])
def forward(q, k, v, out, lse, sums, tops, weights, plan, places, total, num_items, num_long, num_own, num_other,
            num_slots, scale, S: gl.constexpr):  # fmt: skip
    """Compute outputs and log-sum-exp for tiles of queries. q, k, v and out are TMA descriptors. If S.HAS_CELLS is
    false, every tile is whole.
    """
    OTHER: gl.constexpr = k.block_type.shape[0]
    DIM: gl.constexpr = k.block_type.shape[1]
    own_bufs = (gl.allocate_shared_memory(q.dtype, [4, HALF, DIM], q.layout),)
    other_bufs = (
        gl.allocate_shared_memory(k.dtype, [S.STAGES, OTHER, DIM], k.layout),
        gl.allocate_shared_memory(k.dtype, [S.STAGES, OTHER, DIM], k.layout),
    )
    bars = make_bars(S.STAGES)
    fence_async_shared()
    sync()
    sizes = (total, num_items, num_long, num_own, num_other, num_slots)
    results = (out, lse, sums, tops, weights)
    loads = ((q,), (k, v), own_bufs, other_bufs, bars, plan, places, sizes, gl.constexpr(S.GROUP), gl.constexpr(1))
    gl.warp_specialize(
        [
            (_own_rows, (gl.constexpr(0), own_bufs, other_bufs, bars, plan, places, sizes, results, scale, S)),
            (_own_rows, (gl.constexpr(1), own_bufs, other_bufs, bars, plan, places, sizes, results, scale, S)),
            (load_tiles, loads),
        ],
        [4, 1],
        [REGISTERS, LOADER_REGISTERS],
    )


@gluon.jit
def _own_rows(PART: gl.constexpr, own_bufs, other_bufs, bars, plan, places, sizes, results, scale, S: gl.constexpr):
    """The work of one warpgroup, which computes one half of each own tile."""
    DIM: gl.constexpr = other_bufs[0].shape[2]
    OTHER: gl.constexpr = other_bufs[0].shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OTHER, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    rows = gl.arange(0, HALF, gl.SliceLayout(1, SCORES))
    out, lse, sums, tops, weights = results
    count = 0
    turn = 0
    is_held = 0  # whether the previous item still uses its own tile
    head, tile, start, stop, piece = read_item(plan[0], gl.program_id(0), sizes)
    for number in range(gl.program_id(0), sizes[0], gl.num_programs(0)):
        following = read_item(plan[0], number + gl.num_programs(0), sizes)  # read early to hide the latency
        slot = turn & 1
        num_tiles = stop - start
        mbarrier.wait(bars[0].index(slot), (turn >> 1) & 1)
        q_tile = own_bufs[0].index(slot * 2 + PART)
        acc = gl.full([HALF, DIM], 0.0, gl.float32, SUMS)
        top = gl.full([HALF], LOWEST, gl.float32, gl.SliceLayout(1, SCORES))
        weight = gl.full([HALF], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
        state = (acc, top, weight)
        if S.HAS_CELLS:
            state, is_held = _walk_cells(state, q_tile, other_bufs, bars, plan[2] + start * 2 + PART, num_tiles, count,
                                         slot, is_held, scale * LOG2E, S.CAUSAL, SCORES, SUMS)  # fmt: skip
        else:
            state, is_held = _walk(state, q_tile, other_bufs, bars, num_tiles, count, slot, is_held, scale * LOG2E,
                                   SCORES, SUMS)  # fmt: skip
        count += num_tiles
        acc, top, weight = state
        if is_held != 0:
            give_back(bars, slot ^ 1)
        is_held = 1
        if S.HAS_CUTS and piece >= 0:
            place = (head * sizes[5] + piece).to(gl.int64)
            store_piece(sums, place, acc, PART, SUMS)
            gl.store(tops + place * OWN + PART * HALF + rows, top)
            gl.store(weights + place * OWN + PART * HALF + rows, weight)
        else:
            row, col = corner(head, sizes[3], places, 3)
            at = head * sizes[3] + tile * OWN + PART * HALF
            is_empty = weight == 0.0
            divisor = gl.where(is_empty, 1.0, weight)
            gl.store(lse + at.to(gl.int64) + rows, gl.where(is_empty, float("inf"), top + gl.log2(divisor)))
            acc = acc / gl.convert_layout(divisor, gl.SliceLayout(1, SUMS))[:, None]
            store_rows(out, row + tile * OWN + PART * HALF, col, q_tile, acc.to(q_tile.dtype))
        turn += 1
        head, tile, start, stop, piece = following
    tma.store_wait(0)


@gluon.jit
def _walk(
    state, q_tile, other_bufs, bars, num_tiles, count, slot, is_held, factor, SCORES: gl.constexpr, SUMS: gl.constexpr
):
    """Process whole tiles. The product of probabilities and values of a tile overlaps with the next tile's scores."""
    k_bufs, v_bufs = other_bufs
    STAGES: gl.constexpr = k_bufs.shape[0]
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    acc, top, weight = state
    zeros = gl.full([HALF, k_bufs.shape[1]], 0.0, gl.float32, SCORES)
    if num_tiles > 0:
        stage = count % STAGES
        phase = (count // STAGES) & 1
        mbarrier.wait(bars[2].index(stage), phase)
        scores = warpgroup_mma(q_tile, k_bufs.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(bars[3].index(stage), count=1)
        p, top, fade, weight = _weigh(scores, top, weight, factor)
        operand = gl.convert_layout(p.to(k_bufs.dtype), OPERAND)
        for t in range(1, num_tiles):
            next_stage = (count + t) % STAGES
            next_phase = ((count + t) // STAGES) & 1
            mbarrier.wait(bars[2].index(next_stage), next_phase)
            k_tile = k_bufs.index(next_stage).permute((1, 0))
            scores = warpgroup_mma(q_tile, k_tile, zeros, use_acc=False, is_async=True)
            mbarrier.wait(bars[4].index(stage), phase)
            acc = warpgroup_mma(operand, v_bufs.index(stage), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[scores])
            mbarrier.arrive(bars[3].index(next_stage), count=1)
            p, top, fade, weight = _weigh(scores, top, weight, factor)
            acc, p, operand = warpgroup_mma_wait(0, deps=[acc, p, operand])
            mbarrier.arrive(bars[5].index(stage), count=1)
            acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, SUMS))[:, None]
            operand = gl.convert_layout(p.to(k_bufs.dtype), OPERAND)
            stage = next_stage
            phase = next_phase
            if is_held != 0:
                give_back(bars, slot ^ 1)
                is_held = 0
        mbarrier.wait(bars[4].index(stage), phase)
        acc = warpgroup_mma(operand, v_bufs.index(stage), acc, is_async=True)
        acc, operand = warpgroup_mma_wait(0, deps=[acc, operand])
        mbarrier.arrive(bars[5].index(stage), count=1)
    return (acc, top, weight), is_held


@gluon.jit
def _walk_cells(state, q_tile, other_bufs, bars, words, num_tiles, count, slot, is_held, factor, CAUSAL: gl.constexpr,
                SCORES: gl.constexpr, SUMS: gl.constexpr):  # fmt: skip
    """Process the cells that this half keeps, whole or in part."""
    k_bufs, v_bufs = other_bufs
    STAGES: gl.constexpr = k_bufs.shape[0]
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    acc, top, weight = state
    zeros = gl.full([HALF, k_bufs.shape[1]], 0.0, gl.float32, SCORES)
    word = gl.load(words)
    for t in range(num_tiles):
        next_word = gl.load(words + (t + 1) * 2)
        stage = (count + t) % STAGES
        phase = ((count + t) // STAGES) & 1
        mbarrier.wait(bars[2].index(stage), phase)
        if word != 0:
            scores = warpgroup_mma(q_tile, k_bufs.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            if word != WHOLE:
                scores = masked(scores, word, CAUSAL, False, SCORES)
            p, top, fade, weight = _weigh(scores, top, weight, factor)
            acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, SUMS))[:, None]
            operand = gl.convert_layout(p.to(k_bufs.dtype), OPERAND)
            mbarrier.wait(bars[4].index(stage), phase)
            acc = warpgroup_mma(operand, v_bufs.index(stage), acc, is_async=True)
            acc, operand = warpgroup_mma_wait(0, deps=[acc, operand])
        else:
            mbarrier.wait(bars[4].index(stage), phase)
        mbarrier.arrive(bars[3].index(stage), count=1)
        mbarrier.arrive(bars[5].index(stage), count=1)
        word = next_word
        if is_held != 0:
            give_back(bars, slot ^ 1)
            is_held = 0
    return (acc, top, weight), is_held


@gluon.jit
def _weigh(scores, top, weight, factor):
    """Probabilities relative to the new maximum, the new maximum, the factor for sums relative to the old maximum, and
    the sum of weights.
    """
    new_top = gl.maximum(top, gl.max(scores, 1) * factor)
    p = gl.exp2(scores * factor - new_top[:, None])
    fade = gl.exp2(top - new_top)
    return p, new_top, fade, weight * fade + gl.sum(p, 1)
