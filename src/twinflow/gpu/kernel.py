# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The update kernel. A program reads a tile of weights, gradients and states, updates it and writes it back.

Each thread has four elements. All buffers are therefore read and written in the same layout: a thread accesses 16 bytes
of fp32, 8 bytes of bf16 or 4 bytes of int8 at once. No value moves to another thread, and a block of 128 belongs to one
warp.

If the model runs at the same time, a few large programs process all tiles one after the other and leave the other
multiprocessors to the model. Warps exchange no data, so that some warps load while others compute. The table row of the
next tile is read while this tile is updated, because the loads of the next tile need the addresses in that row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from twinflow.gpu.codecs import (
    BLOCK,
    decode_e4m3,
    decode_e5m3,
    encode_e4m3,
    encode_e5m3,
    from_bf16,
    join,
    random_bits,
    split,
    to_bf16,
    to_bf16_stochastic,
)
from twinflow.gpu.rules import apply, scalar

# Columns of the two tables that update.py fills.
# Tiles, int64: address of the weight, offset in the bucket, first block, number of elements, index of the piece.
TILE_COLUMNS = tl.constexpr(5)
# Numbers, int32: whether to update, factor (fp32 bits), key (two columns), hyperparameters (fp32 bits, up to 7).
NUMBER_COLUMNS = tl.constexpr(12)
FACTOR = tl.constexpr(1)
KEY = tl.constexpr(2)
HYPER = tl.constexpr(4)


@triton.jit(do_not_specialize=["num_tiles"])
def update(tiles, numbers, decision, grads, master, first, second, first_scales, second_scales, num_tiles,
           RULE: tl.constexpr, FORMAT: tl.constexpr, WEIGHT: tl.constexpr, ALIGNMENT: tl.constexpr,
           TILE: tl.constexpr, LOOPS: tl.constexpr):  # fmt: skip
    """One step of every tile whose piece is updated. Buffers that do not exist are None.

    decision: norm, factor and whether to skip, in fp64. The gradient is multiplied by this factor and by the factor in
    `numbers`.

    There is one program per tile. With LOOPS, any number of programs process all tiles in turn.

    RULE: name of the rule. FORMAT: format of the states. WEIGHT: "split" (bf16, the upper halves), "fp16" or "fp32"
    (the master itself). ALIGNMENT: alignment of the addresses of weights. Tensors of bf16 are passed as int16.
    """
    program = tl.program_id(0)
    factor = 1.0
    keeps = 1
    if decision is not None:
        factor = tl.load(decision + 1).to(tl.float32)
        keeps = (tl.load(decision + 2) == 0).to(tl.int32)
    if LOOPS:
        step = tl.num_programs(0)
        weight, at, first_block, count, piece = _read_tile(tiles, program)
        is_wanted = tl.load(numbers + piece * NUMBER_COLUMNS)
        for number in range(program, num_tiles, step):
            # At the last tile its own row is read again, because there is no next row.
            following = _read_tile(tiles, tl.where(number + step < num_tiles, number + step, number))
            if is_wanted * keeps != 0:
                _update_tile(weight, at, first_block, count, numbers + piece * NUMBER_COLUMNS, factor, grads, master,
                             first, second, first_scales, second_scales, RULE, FORMAT, WEIGHT, ALIGNMENT,
                             TILE)  # fmt: skip
            weight, at, first_block, count, piece = following
            is_wanted = tl.load(numbers + piece * NUMBER_COLUMNS)
    else:
        weight, at, first_block, count, piece = _read_tile(tiles, program)
        own = numbers + piece * NUMBER_COLUMNS
        if tl.load(own) * keeps != 0:
            _update_tile(weight, at, first_block, count, own, factor, grads, master, first, second, first_scales,
                         second_scales, RULE, FORMAT, WEIGHT, ALIGNMENT, TILE)  # fmt: skip


@triton.jit
def _read_tile(tiles, number):
    row = tiles + number.to(tl.int64) * TILE_COLUMNS
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)


@triton.jit
def _update_tile(weight, at, first_block, count, own, factor, grads, master, first, second, first_scales,
                 second_scales, RULE: tl.constexpr, FORMAT: tl.constexpr, WEIGHT: tl.constexpr,
                 ALIGNMENT: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    # Whole tiles use no mask, because a mask prevents wide loads and stores.
    if count == TILE:
        _update_elements(weight, at, first_block, count, own, factor, grads, master, first, second, first_scales,
                         second_scales, RULE, FORMAT, WEIGHT, ALIGNMENT, TILE, False)  # fmt: skip
    else:
        _update_elements(weight, at, first_block, count, own, factor, grads, master, first, second, first_scales,
                         second_scales, RULE, FORMAT, WEIGHT, ALIGNMENT, TILE, True)  # fmt: skip


@triton.jit
def _update_elements(weight, at, first_block, count, own, factor, grads, master, first, second,
                     first_scales, second_scales, RULE: tl.constexpr, FORMAT: tl.constexpr,
                     WEIGHT: tl.constexpr, ALIGNMENT: tl.constexpr, TILE: tl.constexpr,
                     MASKED: tl.constexpr):  # fmt: skip
    BLOCKS: tl.constexpr = TILE // BLOCK
    # `at` is a multiple of BLOCK. This product tells it to the compiler, because a hint for an argument has no effect.
    at = at // BLOCK * BLOCK
    block = tl.arange(0, BLOCKS)[:, None]  # [blocks, 1]
    index = block * BLOCK + tl.arange(0, BLOCK)[None, :]  # [blocks, 128]
    mask = index < count if MASKED else tl.full([BLOCKS, BLOCK], True, tl.int1)
    block_mask = block * BLOCK < count if MASKED else tl.full([BLOCKS, 1], True, tl.int1)
    scales_at = at // BLOCK + block
    ELEMENT: tl.constexpr = tl.int16 if WEIGHT == "split" else tl.float16 if WEIGHT == "fp16" else tl.float32
    # The hint must be given for the pointer, because a hint for the integer is lost in the conversion.
    weight = tl.multiple_of(weight.to(tl.pointer_type(ELEMENT)), ALIGNMENT) + index

    # All tensors are [blocks, 128]. Masked elements are zero and their states stay zero, so they do not change a scale.
    g = _load_gradient(grads + at + index, mask) * (scalar(own, FACTOR) * factor)
    p = _load_weight(weight, master, at + index, mask, WEIGHT)
    m = _load_state(first, first_scales, at + index, scales_at, mask, block_mask, FORMAT, 0)
    v = _load_state(second, second_scales, at + index, scales_at, mask, block_mask, FORMAT, 1)
    p, m, v = apply(g, p, m, v, own + HYPER, RULE)
    _store_weight(p, weight, master, at + index, mask, WEIGHT)
    if first is not None:
        _store_state(m, 0, first, first_scales, at + index, scales_at, mask, block_mask, FORMAT, 0)
    if second is not None:
        random = random_bits(first_block, own + KEY, BLOCKS)
        _store_state(v, random, second, second_scales, at + index, scales_at, mask, block_mask, FORMAT, 1)


@triton.jit
def _load_gradient(pointers, mask):
    grads = tl.load(pointers, mask=mask, other=0)
    return from_bf16(grads) if grads.dtype == tl.int16 else grads.to(tl.float32)


@triton.jit
def _load_weight(weight, master, at, mask, WEIGHT: tl.constexpr):
    if WEIGHT == "fp32":
        p = tl.load(weight, mask=mask, other=0.0)
    elif WEIGHT == "fp16":
        p = tl.load(master + at, mask=mask, other=0.0)
    else:
        tl.static_assert(WEIGHT == "split")
        upper = tl.load(weight, mask=mask, other=0)
        p = join(upper, tl.load(master + at, mask=mask, other=0))
    return p


@triton.jit
def _store_weight(p, weight, master, at, mask, WEIGHT: tl.constexpr):
    if WEIGHT == "fp32":
        tl.store(weight, p, mask=mask)
    elif WEIGHT == "fp16":
        tl.store(master + at, p, mask=mask)
        tl.store(weight, p.to(tl.float16), mask=mask)
    else:
        upper, lower = split(p)
        tl.store(weight, upper, mask=mask)
        tl.store(master + at, lower, mask=mask)


@triton.jit
def _load_state(state, scales, at, scales_at, mask, block_mask, FORMAT: tl.constexpr, WHICH: tl.constexpr):
    """The first (WHICH = 0) or second (WHICH = 1) state in fp32. Zeros if it is None."""
    if state is None:
        x = tl.zeros(mask.shape, tl.float32)
    else:
        raw = tl.load(state + at, mask=mask, other=0)
        if FORMAT == "int8":
            scale = tl.load(scales + scales_at, mask=block_mask, other=0.0)  # [blocks, 1]
            x = decode_e4m3(raw, scale) if WHICH == 0 else decode_e5m3(raw, scale)
        else:
            x = from_bf16(raw) if FORMAT == "bf16" else raw
    return x


@triton.jit
def _store_state(x, random, state, scales, at, scales_at, mask, block_mask, FORMAT: tl.constexpr, WHICH: tl.constexpr):
    if FORMAT == "int8":
        codes, scale = encode_e4m3(x) if WHICH == 0 else encode_e5m3(x, random)
        tl.store(state + at, codes, mask=mask)
        tl.store(scales + scales_at, scale, mask=block_mask)
    elif FORMAT == "bf16":
        tl.store(state + at, to_bf16(x) if WHICH == 0 else to_bf16_stochastic(x, random), mask=mask)
    else:
        tl.store(state + at, x, mask=mask)
