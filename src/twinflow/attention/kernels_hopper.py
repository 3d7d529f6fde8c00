# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Kernels for Hopper: forward, gradients of queries, and gradients of keys and values. Results are those of the kernels
in kernels.py, whose `reduce_outputs` and `reduce_gradients` also combine the pieces of rows that are cut.

tiles.py explains items, own and other tiles, cells, words, pieces and slots. Of n programs, program i processes the
items i, i + n, i + 2n and so on. Each of two warpgroups computes 64 rows of the own tile of an item. The warpgroups
share the other tiles, which a separate warp loads by TMA. While one warpgroup computes exponentials, the products of
the other use the tensor cores. The tiles of the next item are loaded while this item is processed. Common arguments:

- `own_bufs`: own tiles, [2 slots x 2 halves, 64, dim] each; results are stored through them.
- `other_bufs`: other tiles of two tensors, [stages, tile, dim]; and two vectors per tile if scores are [keys, queries].
- `bars`: barriers for full and for empty buffers: of own tiles, and of the other tiles of each of the two tensors.
- `plan`: items, codes and words of a TilePlan.
- `sizes`: items of all heads, items of a head, long items, own rows, other rows, slots of a head, and own heads of an
  element of the batch. They are separate arguments of a kernel, because Triton compiles a kernel again if a number in a
  tuple is 1.

Descriptors of tensors with rows have four dimensions: batch, head, row and column. TMA neither loads nor stores what is
outside of them: columns that a tile has in addition to a head are zeros, and are not stored.

Operands that are constant over a loop are read from shared memory, because ptxas 12.8 reuses registers that hold such
an operand. The length of a loop over tiles must also be used elsewhere, because otherwise Triton 3.6 does not keep its
value.
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

BITS = gl.constexpr(8)  # as in tiles.py
ITEM_COLUMNS = gl.constexpr(5)
HALF = gl.constexpr(64)  # rows of a warpgroup, and tokens of a cell
OWN = gl.constexpr(128)
SUB = gl.constexpr(16)  # tokens per bit of the word of a cell, as in tiles.py
WHOLE = gl.constexpr(0xFFFF)
DIAGONAL_BIT = gl.constexpr(16)
REGISTERS = gl.constexpr(240)  # per thread of the warpgroups that multiply
LOADER_REGISTERS = gl.constexpr(24)
LOG2E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-1e30)  # lower than any real score, but finite, so that differences are never NaN

sync = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # named thread_barrier until Triton 3.6


@gluon.jit
def read_item(plan, number, sizes):
    """Fields of an item: head, own tile, first other tile, end of other tiles, and slot. After the last item, the last
    item is returned again.

    The order of items is that of kernels.own_item.
    """
    number = gl.minimum(number, sizes[0] - 1)
    num_heads = sizes[0] // sizes[1]
    is_long = number < sizes[2] * num_heads
    first = gl.where(is_long, 0, sizes[2])
    width = gl.where(is_long, sizes[2], sizes[1] - sizes[2])
    number -= first * num_heads
    row = plan[0] + (first + number % width) * ITEM_COLUMNS
    return number // width, gl.load(row), gl.load(row + 1), gl.load(row + 3), gl.load(row + 4)


@gluon.jit
def buffers(rows, NUM: gl.constexpr):
    """Shared memory for NUM blocks of rows that a TMA descriptor copies."""
    SHAPE: gl.constexpr = [rows.block_type.shape[2], rows.block_type.shape[3]]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE, rows.dtype)
    return gl.allocate_shared_memory(rows.dtype, [NUM, SHAPE[0], SHAPE[1]], LAYOUT)


@gluon.jit
def vector_buffers(numbers, NUM: gl.constexpr):
    """Shared memory for NUM blocks of numbers that a TMA descriptor copies."""
    return gl.allocate_shared_memory(numbers.dtype, [NUM, numbers.block_type.shape[0]], numbers.layout)


@gluon.jit
def make_bars(STAGES: gl.constexpr):
    """Barriers for full and empty buffers: of own tiles, and of two kinds of other tiles. The loading warp fills
    buffers, and the two warpgroups empty them.
    """
    bars = (_bars(2, 1), _bars(2, 2), _bars(STAGES, 1), _bars(STAGES, 2), _bars(STAGES, 1), _bars(STAGES, 2))
    fence_async_shared()
    sync()
    return bars


@gluon.jit
def _bars(NUM: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def load_tiles(own, others, own_bufs, other_bufs, bars, plan, sizes, GROUP: gl.constexpr, MEMBERS: gl.constexpr):
    """The work of the loading warp. `own` and `others` are descriptors, in the order of the buffers."""
    STAGES: gl.constexpr = other_bufs[0].shape[0]
    OTHER: gl.constexpr = other_bufs[0].shape[1]
    DIM: gl.constexpr = other_bufs[0].shape[2]
    HAS_VECTORS: gl.constexpr = len(other_bufs) == 4
    TILE_BYTES: gl.constexpr = OTHER * (DIM * 2 + (4 if HAS_VECTORS else 0))
    count = 0
    turn = 0
    for number in range(gl.program_id(0), sizes[0], gl.num_programs(0)):
        head, tile, start, stop, _ = read_item(plan, number, sizes)
        slot = turn & 1
        mbarrier.wait(bars[1].index(slot), ((turn >> 1) & 1) ^ 1)
        mbarrier.expect(bars[0].index(slot), len(own_bufs) * OWN * DIM * 2)
        batch = head // sizes[6]
        inner = head % sizes[6]
        for i in gl.static_range(len(own_bufs)):
            for half in gl.static_range(2):
                place = [batch, inner, tile * OWN + half * HALF, 0]
                tma.async_copy_global_to_shared(own[i], place, bars[0].index(slot), own_bufs[i].index(slot * 2 + half))
        for member in range(MEMBERS):
            other_inner = (inner * MEMBERS + member) // GROUP
            line = (head * MEMBERS + member) // GROUP * sizes[4]
            code = gl.load(plan[1] + start)
            for t in range(start, stop):
                following = gl.load(plan[1] + t + 1)
                at = (code >> BITS) * OTHER
                stage = count % STAGES
                phase = ((count // STAGES) & 1) ^ 1
                for i in gl.static_range(2):
                    mbarrier.wait(bars[3 + 2 * i].index(stage), phase)
                    full = bars[2 + 2 * i].index(stage)
                    mbarrier.expect(full, TILE_BYTES)
                    place = [batch, other_inner, at, 0]
                    tma.async_copy_global_to_shared(others[i], place, full, other_bufs[i].index(stage))
                    if HAS_VECTORS:
                        start_of_tile = [line + at]
                        tma.async_copy_global_to_shared(
                            others[2 + i], start_of_tile, full, other_bufs[2 + i].index(stage)
                        )
                count += 1
                code = following
        turn += 1


@gluon.jit
def give_back(bars, slot, is_held):
    """Release the own tiles of a slot, if they are still held, after the stores through them are complete. Return 0 as
    the new value of `is_held`.
    """
    if is_held != 0:
        tma.store_wait(0)
        mbarrier.arrive(bars[1].index(slot), count=1)
    return 0


@gluon.jit
def store_rows(rows, head, row, sizes, buf, value):
    """Store rows of a head by TMA, through the buffer of an own tile that is not read any more."""
    buf.store(value)
    fence_async_shared()
    sync()
    tma.async_copy_shared_to_global(rows, [head // sizes[6], head % sizes[6], row, 0], buf)


@gluon.jit
def store_piece(sums, place, value, PART: gl.constexpr, LAYOUT: gl.constexpr):
    """Store a piece to scratch memory in fp32."""
    DIM: gl.constexpr = value.shape[1]
    rows = gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT)) + PART * HALF
    cols = gl.arange(0, DIM, gl.SliceLayout(0, LAYOUT))
    gl.store(sums + place * (OWN * DIM) + (rows[:, None] * DIM + cols[None, :]), value)


@gluon.jit
def masked(scores, word, CAUSAL: gl.constexpr, BY_KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    """The scores of a cell, with minus infinity for scores that are not kept."""
    rows = gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))[:, None]
    cols = gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))[None, :]
    keep = ((word >> (rows // SUB * (HALF // SUB) + cols // SUB)) & 1) != 0
    if CAUSAL:
        is_seen = (cols >= rows) if BY_KEYS else (cols <= rows)
        keep = keep & (is_seen | ((word >> DIAGONAL_BIT) == 0))
    return gl.where(keep, scores, float("-inf"))


@gluon.jit(do_not_specialize=["total", "num_items", "num_long", "num_own", "num_other", "num_slots", "num_heads"])
def forward(q, k, v, out, lse, sums, tops, weights, plan, total, num_items, num_long, num_own, num_other, num_slots,
            num_heads, scale, S: gl.constexpr):  # fmt: skip
    """Compute outputs and log-sum-exp for tiles of queries. q, k, v and out are TMA descriptors. If S.HAS_CELLS is
    false, every tile is whole.
    """
    own_bufs = (buffers(q, 4),)
    other_bufs = (buffers(k, S.STAGES), buffers(v, S.STAGES))
    bars = make_bars(S.STAGES)
    sizes = (total, num_items, num_long, num_own, num_other, num_slots, num_heads)
    results = (out, lse, sums, tops, weights)
    loads = ((q,), (k, v), own_bufs, other_bufs, bars, plan, sizes, gl.constexpr(S.GROUP), gl.constexpr(1))
    gl.warp_specialize(
        [
            (_own_rows, (gl.constexpr(0), own_bufs, other_bufs, bars, plan, sizes, results, scale, S)),
            (_own_rows, (gl.constexpr(1), own_bufs, other_bufs, bars, plan, sizes, results, scale, S)),
            (load_tiles, loads),
        ],
        [4, 1],
        [REGISTERS, LOADER_REGISTERS],
    )


@gluon.jit
def _own_rows(PART: gl.constexpr, own_bufs, other_bufs, bars, plan, sizes, results, scale, S: gl.constexpr):
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
    head, tile, start, stop, piece = read_item(plan, gl.program_id(0), sizes)
    for number in range(gl.program_id(0), sizes[0], gl.num_programs(0)):
        following = read_item(plan, number + gl.num_programs(0), sizes)  # read early to hide the latency
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
        give_back(bars, slot ^ 1, is_held)
        is_held = 1
        if S.HAS_CUTS and piece >= 0:
            place = (head * sizes[5] + piece).to(gl.int64)
            store_piece(sums, place, acc, PART, SUMS)
            gl.store(tops + place * OWN + PART * HALF + rows, top)
            gl.store(weights + place * OWN + PART * HALF + rows, weight)
        else:
            at = head * sizes[3] + tile * OWN + PART * HALF
            is_empty = weight == 0.0
            divisor = gl.where(is_empty, 1.0, weight)
            gl.store(lse + at.to(gl.int64) + rows, gl.where(is_empty, float("inf"), top + gl.log2(divisor)))
            acc = acc / gl.convert_layout(divisor, gl.SliceLayout(1, SUMS))[:, None]
            store_rows(out, head, tile * OWN + PART * HALF, sizes, q_tile, acc.to(q_tile.dtype))
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
            is_held = give_back(bars, slot ^ 1, is_held)
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
        is_held = give_back(bars, slot ^ 1, is_held)
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


@gluon.jit(do_not_specialize=["total", "num_items", "num_long", "num_own", "num_other", "num_slots", "num_heads"])
def query_gradients(q, grad, k, v, dq, out, steps, lse, delta, sums, plan, total, num_items, num_long, num_own,
                    num_other, num_slots, num_heads, scale, S: gl.constexpr):  # fmt: skip
    """Compute the gradients of tiles of queries. q, grad, k, v and dq are TMA descriptors. `steps` are the strides of
    `out`.
    """
    own_bufs = (buffers(q, 4), buffers(grad, 4))
    other_bufs = (buffers(k, S.STAGES), buffers(v, S.STAGES))
    bars = make_bars(S.STAGES)
    sizes = (total, num_items, num_long, num_own, num_other, num_slots, num_heads)
    results = (out, steps, lse, delta, dq, sums)
    loads = ((q, grad), (k, v), own_bufs, other_bufs, bars, plan, sizes, gl.constexpr(S.GROUP), gl.constexpr(1))
    gl.warp_specialize(
        [
            (_query_rows, (gl.constexpr(0), own_bufs, other_bufs, bars, plan, sizes, results, scale, S)),
            (_query_rows, (gl.constexpr(1), own_bufs, other_bufs, bars, plan, sizes, results, scale, S)),
            (load_tiles, loads),
        ],
        [4, 1],
        [REGISTERS, LOADER_REGISTERS],
    )


@gluon.jit
def _query_rows(PART: gl.constexpr, own_bufs, other_bufs, bars, plan, sizes, results, scale, S: gl.constexpr):
    """The work of one warpgroup, which computes one half of each own tile. Rows of `out` are read one item ahead."""
    STAGES: gl.constexpr = other_bufs[0].shape[0]
    DIM: gl.constexpr = other_bufs[0].shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    out, steps, lse, delta, dq, sums = results
    count = 0
    turn = 0
    is_held = 0  # whether the previous item still uses its own tiles
    head, tile, start, stop, piece = read_item(plan, gl.program_id(0), sizes)
    out_tile = _read_out(out, steps, head, tile * OWN + PART * HALF, sizes, S.HEAD_DIM, DIM, ROWS)
    for number in range(gl.program_id(0), sizes[0], gl.num_programs(0)):
        following = read_item(plan, number + gl.num_programs(0), sizes)
        slot = turn & 1
        num_tiles = stop - start
        at = head * sizes[3] + tile * OWN + PART * HALF
        base = at.to(gl.int64)
        row_lse = gl.load(lse + base + gl.arange(0, HALF, gl.SliceLayout(1, SCORES)))
        mbarrier.wait(bars[0].index(slot), (turn >> 1) & 1)
        q_tile = own_bufs[0].index(slot * 2 + PART)
        g_tile = own_bufs[1].index(slot * 2 + PART)
        row_delta = gl.sum(out_tile.to(gl.float32) * g_tile.load(ROWS).to(gl.float32), 1)
        out_tile = _read_out(out, steps, following[0], following[1] * OWN + PART * HALF, sizes, S.HEAD_DIM, DIM, ROWS)
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
            is_held = give_back(bars, slot ^ 1, is_held)
        count += num_tiles
        give_back(bars, slot ^ 1, is_held)
        is_held = 1
        acc = acc * scale
        if S.HAS_CUTS and piece >= 0:
            store_piece(sums, (head * sizes[5] + piece).to(gl.int64), acc, PART, SUMS)
        else:
            store_rows(dq, head, tile * OWN + PART * HALF, sizes, q_tile, acc.to(q_tile.dtype))
        turn += 1
        head, tile, start, stop, piece = following
    tma.store_wait(0)


@gluon.jit
def _read_out(out, steps, head, position, sizes, HEAD_DIM: gl.constexpr, DIM: gl.constexpr, ROWS: gl.constexpr):
    """Load rows of the output of a head. Columns that it does not have are zeros."""
    rows = gl.arange(0, HALF, gl.SliceLayout(1, ROWS))
    cols = gl.arange(0, DIM, gl.SliceLayout(0, ROWS))
    first = out + (head // sizes[6]).to(gl.int64) * steps[0] + (head % sizes[6]).to(gl.int64) * steps[1]
    places = first + position.to(gl.int64) * steps[2] + (rows[:, None] * steps[2] + cols[None, :])
    if HEAD_DIM == DIM:
        return gl.load(places)
    else:
        return gl.load(places, mask=(cols < HEAD_DIM)[None, :], other=0.0)


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


@gluon.jit(do_not_specialize=["total", "num_items", "num_long", "num_own", "num_other", "num_slots", "num_heads"])
def key_gradients(k, v, q, grad, dk, dv, lse, delta, sums_k, sums_v, plan, total, num_items, num_long, num_own,
                  num_other, num_slots, num_heads, scale, S: gl.constexpr):  # fmt: skip
    """Compute the gradients of tiles of keys and values, summed over the query heads that share them. All tensors
    except the scratch memory and the plan are TMA descriptors.
    """
    own_bufs = (buffers(k, 4), buffers(v, 4))
    other_bufs = (buffers(q, S.STAGES), buffers(grad, S.STAGES), vector_buffers(lse, S.STAGES),
                  vector_buffers(delta, S.STAGES))  # fmt: skip
    bars = make_bars(S.STAGES)
    sizes = (total, num_items, num_long, num_own, num_other, num_slots, num_heads)
    results = (dk, dv, sums_k, sums_v)
    others = (q, grad, lse, delta)
    loads = ((k, v), others, own_bufs, other_bufs, bars, plan, sizes, gl.constexpr(1), gl.constexpr(S.GROUP))
    gl.warp_specialize(
        [
            (_key_rows, (gl.constexpr(0), own_bufs, other_bufs, bars, plan, sizes, results, scale, S)),
            (_key_rows, (gl.constexpr(1), own_bufs, other_bufs, bars, plan, sizes, results, scale, S)),
            (load_tiles, loads),
        ],
        [4, 1],
        [REGISTERS, LOADER_REGISTERS],
    )


@gluon.jit
def _key_rows(PART: gl.constexpr, own_bufs, other_bufs, bars, plan, sizes, results, scale, S: gl.constexpr):
    """The work of one warpgroup, which computes one half of each own tile. Scores are [keys, queries]."""
    STAGES: gl.constexpr = other_bufs[0].shape[0]
    DIM: gl.constexpr = other_bufs[0].shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    dk, dv, sums_k, sums_v = results
    count = 0
    turn = 0
    is_held = 0  # whether the previous item still uses its own tiles
    head, tile, start, stop, piece = read_item(plan, gl.program_id(0), sizes)
    for number in range(gl.program_id(0), sizes[0], gl.num_programs(0)):
        following = read_item(plan, number + gl.num_programs(0), sizes)
        slot = turn & 1
        num_tiles = stop - start
        mbarrier.wait(bars[0].index(slot), (turn >> 1) & 1)
        own = (own_bufs[0].index(slot * 2 + PART), own_bufs[1].index(slot * 2 + PART))
        dk_acc = gl.full([HALF, DIM], 0.0, gl.float32, SUMS)
        dv_acc = gl.full([HALF, DIM], 0.0, gl.float32, SUMS)
        words = plan[2] + start * 2 + PART
        for _ in range(S.GROUP):
            word = gl.load(words) if S.HAS_CELLS else WHOLE
            for t in range(num_tiles):
                stage = (count + t) % STAGES
                phase = ((count + t) // STAGES) & 1
                if S.HAS_CELLS:
                    next_word = gl.load(words + (t + 1) * 2)
                    mbarrier.wait(bars[2].index(stage), phase)
                    mbarrier.wait(bars[4].index(stage), phase)
                    if word != 0:
                        dk_acc, dv_acc = _add_to_keys(dk_acc, dv_acc, own, other_bufs, bars, stage, phase, scale, word,
                                                      S, SCORES)  # fmt: skip
                    word = next_word
                else:
                    dk_acc, dv_acc = _add_to_keys(dk_acc, dv_acc, own, other_bufs, bars, stage, phase, scale, WHOLE,
                                                  S, SCORES)  # fmt: skip
                mbarrier.arrive(bars[3].index(stage), count=1)
                mbarrier.arrive(bars[5].index(stage), count=1)
                is_held = give_back(bars, slot ^ 1, is_held)
            count += num_tiles
        give_back(bars, slot ^ 1, is_held)
        is_held = 1
        dk_acc = dk_acc * scale
        if S.HAS_CUTS and piece >= 0:
            place = (head * sizes[5] + piece).to(gl.int64)
            store_piece(sums_k, place, dk_acc, PART, SUMS)
            store_piece(sums_v, place, dv_acc, PART, SUMS)
        else:
            at = tile * OWN + PART * HALF
            store_rows(dk, head, at, sizes, own[0], dk_acc.to(own[0].dtype))
            store_rows(dv, head, at, sizes, own[1], dv_acc.to(own[1].dtype))
        turn += 1
        head, tile, start, stop, piece = following
    tma.store_wait(0)


@gluon.jit
def _add_to_keys(dk, dv, own, other_bufs, bars, stage, phase, scale, word, S: gl.constexpr, SCORES: gl.constexpr):
    """Add the contribution of one tile of queries to the gradients of keys and values."""
    k_tile, v_tile = own
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    QUERIES: gl.constexpr = gl.SliceLayout(0, SCORES)
    zeros = gl.full([HALF, HALF], 0.0, gl.float32, SCORES)
    q_tile = other_bufs[0].index(stage)
    g_tile = other_bufs[1].index(stage)
    if not S.HAS_CELLS:
        mbarrier.wait(bars[2].index(stage), phase)
    scores = warpgroup_mma(k_tile, q_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if not S.HAS_CELLS:
        mbarrier.wait(bars[4].index(stage), phase)
    dp = warpgroup_mma(v_tile, g_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    row_lse = other_bufs[2].index(stage).load(QUERIES)
    scores = warpgroup_mma_wait(1, deps=[scores])
    if S.HAS_CELLS and word != WHOLE:
        scores = masked(scores, word, S.CAUSAL, True, SCORES)
    p = gl.exp2(scores * (scale * LOG2E) - row_lse[None, :])
    operand = gl.convert_layout(p.to(q_tile.dtype), OPERAND)
    dv = warpgroup_mma(operand, g_tile, dv, is_async=True)
    row_delta = other_bufs[3].index(stage).load(QUERIES)
    dp = warpgroup_mma_wait(1, deps=[dp])
    ds = gl.convert_layout((p * (dp - row_delta[None, :])).to(q_tile.dtype), OPERAND)
    dk = warpgroup_mma(ds, q_tile, dk, is_async=True)
    dk, dv, operand, ds = warpgroup_mma_wait(0, deps=[dk, dv, operand, ds])
    return dk, dv
