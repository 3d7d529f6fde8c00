# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Gradients of keys and values for Hopper. See kernels_hopper_common.py. Results are those of kernels_backward.py."""

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
def key_gradients(k, v, q, grad, dk, dv, lse, delta, sums_k, sums_v, plan, places, total, num_items, num_long, num_own,
                  num_other, num_slots, scale, S: gl.constexpr):  # fmt: skip
    """Compute the gradients of tiles of keys and values, summed over the query heads that share them. All tensors
    except the scratch memory and the plan are TMA descriptors.
    """
    OTHER: gl.constexpr = q.block_type.shape[0]
    DIM: gl.constexpr = q.block_type.shape[1]
    own_bufs = (
        gl.allocate_shared_memory(k.dtype, [4, HALF, DIM], k.layout),
        gl.allocate_shared_memory(k.dtype, [4, HALF, DIM], k.layout),
    )
    other_bufs = (
        gl.allocate_shared_memory(q.dtype, [S.STAGES, OTHER, DIM], q.layout),
        gl.allocate_shared_memory(q.dtype, [S.STAGES, OTHER, DIM], q.layout),
        gl.allocate_shared_memory(gl.float32, [S.STAGES, OTHER], lse.layout),
        gl.allocate_shared_memory(gl.float32, [S.STAGES, OTHER], lse.layout),
    )
    bars = make_bars(S.STAGES)
    fence_async_shared()
    sync()
    sizes = (total, num_items, num_long, num_own, num_other, num_slots)
    others = (q, grad, lse, delta)
    results = (dk, dv, sums_k, sums_v)
    loads = ((k, v), others, own_bufs, other_bufs, bars, plan, places, sizes, gl.constexpr(1), gl.constexpr(S.GROUP))
    gl.warp_specialize(
        [
            (_key_rows, (gl.constexpr(0), own_bufs, other_bufs, bars, plan, places, sizes, results, scale, S)),
            (_key_rows, (gl.constexpr(1), own_bufs, other_bufs, bars, plan, places, sizes, results, scale, S)),
            (load_tiles, loads),
        ],
        [4, 1],
        [REGISTERS, LOADER_REGISTERS],
    )


@gluon.jit
def _key_rows(PART: gl.constexpr, own_bufs, other_bufs, bars, plan, places, sizes, results, scale, S: gl.constexpr):
    """The work of one warpgroup, which computes one half of each own tile. Scores are [keys, queries]."""
    STAGES: gl.constexpr = other_bufs[0].shape[0]
    DIM: gl.constexpr = other_bufs[0].shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    dk, dv, sums_k, sums_v = results
    count = 0
    turn = 0
    is_held = 0  # whether the previous item still uses its own tiles
    head, tile, start, stop, piece = read_item(plan[0], gl.program_id(0), sizes)
    for number in range(gl.program_id(0), sizes[0], gl.num_programs(0)):
        following = read_item(plan[0], number + gl.num_programs(0), sizes)
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
                if is_held != 0:
                    give_back(bars, slot ^ 1)
                    is_held = 0
            count += num_tiles
        if is_held != 0:
            give_back(bars, slot ^ 1)
        is_held = 1
        dk_acc = dk_acc * scale
        if S.HAS_CUTS and piece >= 0:
            place = (head * sizes[5] + piece).to(gl.int64)
            store_piece(sums_k, place, dk_acc, PART, SUMS)
            store_piece(sums_v, place, dv_acc, PART, SUMS)
        else:
            at = tile * OWN + PART * HALF
            row, col = corner(head, sizes[3], places, 4)
            store_rows(dk, row + at, col, own[0], dk_acc.to(own[0].dtype))
            row, col = corner(head, sizes[3], places, 5)
            store_rows(dv, row + at, col, own[1], dv_acc.to(own[1].dtype))
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
