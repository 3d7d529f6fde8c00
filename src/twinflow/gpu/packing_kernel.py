# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The kernels for packing.py. There is one program for each block of 4096 numbers of a row, or in `mean` of all rows.
codes/reference.py is the reference.

A tile has the shape [1024, 4]. A row of a tile belongs to one thread, whatever the dtype, so that all buffers are read
and written in one layout, for example 16 bytes of fp32 at once. The codes of four adjacent elements are one word: 2
bytes for 4-bit codes, 4 bytes for 8-bit codes. With 1-bit codes two threads share a byte. `encode` reads a block once
and keeps it in registers until its rounding error is written.

Words may extend beyond the last code of a row, but not beyond the row: rows are padded with zeros to 16 bytes.

Products are rounded before they are added, because the launch forbids fused multiply-add. NaNs are detected by integer
comparisons, as in kernel.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from twinflow.codes import BLOCK as BLOCK_NUMEL
from twinflow.gpu.kernel import bits, from_bf16, to_bf16, value

BLOCK = tl.constexpr(BLOCK_NUMEL)
WIDTH = tl.constexpr(4)  # width of a tile
HEIGHT = tl.constexpr(BLOCK_NUMEL // 4)
GROUP = tl.constexpr(4)  # number of rows that `mean` loads at once, so that loads overlap
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(0x7F800000)
NAN = tl.constexpr(0x7FC00000)
TINY = tl.constexpr(27 << 23)  # 2**-100 as bits
SHIFT = tl.constexpr(1.5 * 2**23)  # the sum with a small number has that number, rounded to even, in its lowest bits
SHIFT_BITS = tl.constexpr(0x4B400000)


@triton.jit(do_not_specialize=["numel"])
def encode(words, scales, values, base, error, exponents, factor, base_factor, numel, part_stride,
           row_stride, BITS: tl.constexpr, TOP: tl.constexpr, IS_SCALED: tl.constexpr):  # fmt: skip
    """Pack rows. The grid is [blocks, rows]. Tensors that are not used are None.

    `words` and `scales` are the packed rows as words and as fp32. `numel` is the number of elements of a row. The
    distance between rows is `part_stride` elements in `values` and tensors like it, and `row_stride` bytes in `words`.
    """
    block, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    start = block * BLOCK
    at = row * part_stride + start
    codes = _codes_of(words, row, row_stride, BITS)
    scale = scales + row * (row_stride // 4) + block
    # Whole blocks use no mask, because a mask prevents wide loads and stores.
    if start + BLOCK <= numel:
        _encode_block(codes, scale, values, base, error, exponents, factor, base_factor, at, start, numel, BITS, TOP,
                      IS_SCALED, False)  # fmt: skip
    else:
        _encode_block(codes, scale, values, base, error, exponents, factor, base_factor, at, start, numel, BITS, TOP,
                      IS_SCALED, True)  # fmt: skip
    if start + BLOCK >= numel:
        _pad_row(codes, numel, BITS)


@triton.jit
def _codes_of(words, row, row_stride, BITS: tl.constexpr):
    """Address of the codes of a row, which follow the scales."""
    WORD_BYTES: tl.constexpr = (BITS + 1) // 2
    return words + row * (row_stride // WORD_BYTES) + tl.num_programs(0) * (4 // WORD_BYTES)


@triton.jit
def _encode_block(codes, scale, values, base, error, exponents, factor, base_factor, at, start, numel,
                  BITS: tl.constexpr, TOP: tl.constexpr, IS_SCALED: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    index = tl.arange(0, HEIGHT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]  # [1024, 4]
    mask = start + index < numel if MASKED else tl.full([HEIGHT, WIDTH], True, tl.int1)
    is_in = mask
    # All tensors are [1024, 4].
    c = _load(values + at + index, mask) * factor
    if base is not None:
        c = _load(base + at + index, mask) * base_factor + c
    if exponents is not None:
        exponent = tl.load(exponents + at + index, mask=mask, other=0).to(tl.int32)
        is_in = exponent != 0
        if IS_SCALED:
            c = c * value(exponent << 23)
    if error is not None:
        c = c + _load(error + at + index, mask)
    if MASKED or exponents is not None:
        c = tl.where(is_in, c, 0.0)

    count = tl.sum(is_in.to(tl.int32)) if exponents is not None else tl.minimum(numel - start, BLOCK).to(tl.int32)
    s, is_finite = _scale(c, count, BITS, TOP)
    tl.store(scale, s)
    code, told = _signs(c, s, is_finite) if BITS == 1 else _numbers(c, s, is_finite, TOP)
    _store_codes(codes, code, mask, start, numel, BITS, MASKED)
    if error is not None:
        if is_finite:
            left = c - told
            if BITS > 1:
                left = left + 0.0  # -0 minus a code of +0 is -0, but the reference computes -0 minus -0, which is +0
            if exponents is not None:
                left = tl.where(is_in, left, 0.0)
            tl.store(error + at + index, left, mask=mask)
        elif exponents is not None:
            tl.store(error + at + index, tl.zeros([HEIGHT, WIDTH], tl.float32), mask=mask & (exponent == 0))


@triton.jit
def _scale(c, count, BITS: tl.constexpr, TOP: tl.constexpr):
    """The scale of a block, and whether it is finite. `count`: number of elements that are not excluded."""
    magnitudes = bits(c) & MAGNITUDE
    if BITS == 1:
        s = tl.math.div_rn(tl.sum(value(magnitudes)), tl.maximum(count, 1).to(tl.float32))
    else:
        s = tl.math.div_rn(value(tl.max(magnitudes)), tl.full([], TOP, tl.float32))
    u = bits(s) & MAGNITUDE
    is_finite = u < INFINITY
    return value(tl.where(is_finite, tl.where(u < TINY, 0, u), NAN)), is_finite


@triton.jit
def _signs(c, s, is_finite):
    """The 1-bit codes as int32, and the decoded numbers."""
    u = bits(c)
    is_below = (u < 0) & ((u & MAGNITUDE) != 0) & is_finite
    return is_below.to(tl.int32), tl.where(is_below, -s, s)


@triton.jit
def _numbers(c, s, is_finite, TOP: tl.constexpr):
    """The 4-bit or 8-bit codes as int32, and the decoded numbers."""
    is_zero = bits(s) == 0
    inverse = tl.where(is_zero, 0.0, tl.math.div_rn(tl.full([], 1.0, tl.float32), tl.where(is_zero, 1.0, s)))
    code = bits(c * inverse + SHIFT) - SHIFT_BITS
    code = tl.where(is_finite, tl.minimum(tl.maximum(code, -TOP), TOP), 0)
    return code, code.to(tl.float32) * s


@triton.jit
def _store_codes(codes, code, mask, start, numel, BITS: tl.constexpr, MASKED: tl.constexpr):
    """Store the words of a block. Unused bits are zero."""
    EACH: tl.constexpr = 8 if BITS == 1 else WIDTH  # elements of a word
    if BITS == 4:
        code = code + 8
    if BITS == 8:
        code = code & 255
    if MASKED:
        code = tl.where(mask, code, 0)
    parts = tl.reshape(code, [BLOCK // EACH, EACH]) << (tl.arange(0, EACH) * BITS)[None, :]
    at = start // EACH + tl.arange(0, BLOCK // EACH)  # [512] or [1024]
    is_there = at * EACH < numel if MASKED else tl.full([BLOCK // EACH], True, tl.int1)
    tl.store(codes + at, tl.sum(parts, axis=1).to(codes.dtype.element_ty), mask=is_there)


@triton.jit
def _pad_row(codes, numel, BITS: tl.constexpr):
    """Store zeros after the last word of a row, up to a multiple of 16 bytes."""
    EACH: tl.constexpr = 8 if BITS == 1 else WIDTH
    WORD_BYTES: tl.constexpr = (BITS + 1) // 2
    num_words = (numel.to(tl.int64) + EACH - 1) // EACH
    row_bytes = (tl.num_programs(0) * 4 + num_words * WORD_BYTES + 15) // 16 * 16
    at = num_words + tl.arange(0, 16)  # [16]
    end = (row_bytes - tl.num_programs(0) * 4) // WORD_BYTES
    tl.store(codes + at, tl.zeros([16], codes.dtype.element_ty), mask=at < end)


@triton.jit(do_not_specialize=["numel"])
def mean(out, words, scales, exponents, numel, row_stride, NUM_ROWS: tl.constexpr, BITS: tl.constexpr):
    """Compute the mean of rows. The grid is [blocks]. Rows are added in their order."""
    block = tl.program_id(0).to(tl.int64)
    start = block * BLOCK
    if start + BLOCK <= numel:
        _mean_block(out, words, scales + block, exponents, start, numel, row_stride, NUM_ROWS, BITS, False)
    else:
        _mean_block(out, words, scales + block, exponents, start, numel, row_stride, NUM_ROWS, BITS, True)


@triton.jit
def _mean_block(out, words, scale, exponents, start, numel, row_stride, NUM_ROWS: tl.constexpr,
                BITS: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    index = tl.arange(0, HEIGHT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]  # [1024, 4]
    mask = start + index < numel if MASKED else tl.full([HEIGHT, WIDTH], True, tl.int1)
    GROUPED: tl.constexpr = 1 + (NUM_ROWS - 1) // GROUP * GROUP
    total = _unpacked_row(words, scale, 0, start, numel, row_stride, BITS, MASKED)
    if GROUPED > 1:
        for first in range(1, GROUPED, GROUP):
            for i in tl.static_range(GROUP):
                total = total + _unpacked_row(words, scale, first + i, start, numel, row_stride, BITS, MASKED)
    for row in tl.static_range(GROUPED, NUM_ROWS):
        total = total + _unpacked_row(words, scale, row, start, numel, row_stride, BITS, MASKED)
    total = total * (1.0 / NUM_ROWS)
    if exponents is not None:
        total, _ = _without_exponents(total, exponents + start + index, mask, True)
    _store_rounded(out + start + index, total, mask)


@triton.jit(do_not_specialize=["numel"])
def decode(out, words, scales, exponents, numel, part_stride, row_stride, BITS: tl.constexpr,
           IS_SCALED: tl.constexpr, IS_ADDED: tl.constexpr):  # fmt: skip
    """Unpack rows. The grid is [blocks, rows]. IS_ADDED: add to `out`. The other arguments are those of `encode`."""
    block, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    start = block * BLOCK
    at = row * part_stride + start
    codes = _codes_of(words, row, row_stride, BITS)
    scale = scales + row * (row_stride // 4) + block
    if start + BLOCK <= numel:
        _decode_block(out, codes, scale, exponents, at, start, numel, BITS, IS_SCALED, IS_ADDED, False)
    else:
        _decode_block(out, codes, scale, exponents, at, start, numel, BITS, IS_SCALED, IS_ADDED, True)


@triton.jit
def _decode_block(out, codes, scale, exponents, at, start, numel, BITS: tl.constexpr,
                  IS_SCALED: tl.constexpr, IS_ADDED: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    index = tl.arange(0, HEIGHT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]  # [1024, 4]
    mask = start + index < numel if MASKED else tl.full([HEIGHT, WIDTH], True, tl.int1)
    found = _unpacked(codes, scale, start, numel, BITS, MASKED)
    is_in = mask
    if exponents is not None:
        found, is_in = _without_exponents(found, exponents + at + index, mask, IS_SCALED)
    if IS_ADDED:
        before = _load(out + at + index, mask)
        found = tl.where(is_in, before + found, before)
    _store_rounded(out + at + index, found, mask)


@triton.jit
def _unpacked_row(words, scale, row, start, numel, row_stride, BITS: tl.constexpr, MASKED: tl.constexpr):
    """The decoded block at `start` of the row with index `row`."""
    stride = row_stride.to(tl.int64)
    return _unpacked(_codes_of(words, row, stride, BITS), scale + row * (stride // 4), start, numel, BITS, MASKED)


@triton.jit
def _unpacked(codes, scale, start, numel, BITS: tl.constexpr, MASKED: tl.constexpr):
    """The decoded numbers of a block, [1024, 4]."""
    line, column = tl.arange(0, HEIGHT)[:, None], tl.arange(0, WIDTH)[None, :]
    at = start // 8 + line // 2 if BITS == 1 else start // WIDTH + line  # [1024, 1]: words
    is_there = start + line * WIDTH < numel if MASKED else tl.full([HEIGHT, 1], True, tl.int1)
    s = tl.load(scale)
    word = tl.load(codes + at, mask=is_there, other=0).to(tl.int32)
    if BITS == 1:
        below = word << (31 - line % 2 * WIDTH - column)  # the highest bit is now the sign
        x = value((below & ~MAGNITUDE) ^ bits(s))
    elif BITS == 4:
        x = (((word >> (column * 4)) & 15) - 8).to(tl.float32) * s
    else:
        x = (word << (24 - column * 8) >> 24).to(tl.float32) * s
    return x


@triton.jit
def _without_exponents(x, pointers, mask, IS_SCALED: tl.constexpr):
    """`x`, if IS_SCALED divided by 2**k, with zeros for excluded elements (exponent 0), and a mask of the others."""
    exponent = tl.load(pointers, mask=mask, other=0).to(tl.int32)
    if IS_SCALED:
        x = x * value((254 - exponent) << 23)
    return tl.where(exponent != 0, x, 0.0), exponent != 0


@triton.jit
def _load(pointers, mask):
    x = tl.load(pointers, mask=mask, other=0)
    return from_bf16(x.to(tl.int16, bitcast=True)) if x.dtype == tl.bfloat16 else x.to(tl.float32)


@triton.jit
def _store_rounded(pointers, x, mask):
    """Store fp32 numbers, rounded to the dtype of the pointers."""
    if pointers.dtype.element_ty == tl.bfloat16:
        tl.store(pointers, to_bf16(x).to(tl.bfloat16, bitcast=True), mask=mask)
    else:
        tl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)
