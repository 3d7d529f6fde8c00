# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The update kernel: the state formats, the update rules, and the kernel that applies a rule to tiles.

A program reads a tile of weights, gradients and states, updates it and writes it back. Each thread has four elements.
All buffers are therefore read and written in the same layout: a thread accesses 16 bytes of fp32, 8 bytes of bf16 or 4
bytes of int8 at once. No value moves to another thread, and a block of 128 belongs to one warp. A tile has the shape
[blocks, 128]. Values per block, such as scale and hash, have the shape [blocks, 1] and are computed once.

If the model runs at the same time, a few large programs process all tiles one after the other and leave the other
multiprocessors to the model. Warps exchange no data, so that some warps load while others compute. The table row of the
next tile is read while this tile is updated, because the loads of the next tile need the addresses in that row.

The conversions between state formats and fp32 give the same bits as rules/formats.py and csrc/codecs.h. NaNs are
detected by integer comparisons of bit patterns. Triton may tell LLVM that floats are never NaN, and LLVM could then
remove a comparison of floats. Bit patterns are int32, or uint32 in hashes and in `to_bf16_stochastic`. Those of numbers
>= 0, compared as integers, have the order of the numbers, and a NaN is the largest.

The operations of the rules and their order are those of rules/rules.py. A rule takes the gradient g, the weight p, its
states m and v (zeros for a state without a buffer) and the address of its scalars. Divisions and square roots are
correctly rounded. The kernel is compiled without fused multiply-add, so that a product is rounded before it is added.
Subnormal numbers are not flushed to zero by the hardware.
"""

from __future__ import annotations

import triton
import triton.language as tl

from twinflow.rules import formats

BLOCK = tl.constexpr(formats.BLOCK)
MOMENT_MAX = tl.constexpr(formats.MOMENT_MAX)
VARIANCE_MAX = tl.constexpr(formats.VARIANCE_MAX)
MOMENT4_MAX = tl.constexpr(formats.MOMENT4_MAX)
VARIANCE4_MAX = tl.constexpr(formats.VARIANCE4_MAX)
MOMENT_SALT = tl.constexpr(formats.MOMENT_SALT)
WEIGHT_SALT = tl.constexpr(formats.WEIGHT_SALT)
NO_SALT = tl.constexpr((0, 0))
TINY_BITS = tl.constexpr(27 << 23)  # 2**-100, as in rules/rules.py

# Columns of the two tables that update.py fills. A piece is a slice of one parameter in the bucket.
# Tiles, int64: address of the weight, offset in the bucket, first block, number of elements, index of the piece.
TILE_COLUMNS = tl.constexpr(5)
# Numbers, int32: whether to update, factor (fp32 bits), key (two columns), hyperparameters (fp32 bits, up to 7).
NUMBER_COLUMNS = tl.constexpr(12)
FACTOR = tl.constexpr(1)
KEY = tl.constexpr(2)
HYPER = tl.constexpr(4)


@triton.jit
def bits(x):
    """The bit patterns of fp32 numbers as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def value(u):
    """The fp32 numbers with these bit patterns."""
    return u.to(tl.float32, bitcast=True)


@triton.jit
def is_nan(u):
    """Whether these are the bits of a NaN."""
    return (u & 0x7FFFFFFF) > 0x7F800000


@triton.jit
def from_bf16(upper):
    """Convert bf16 numbers, given as int16, to fp32."""
    return value(upper.to(tl.int32) << 16)


@triton.jit
def to_bf16(x):
    """Round to nearest, ties to even. The result is bf16 as int16. NaN becomes 0x7FC0."""
    u = bits(x)
    return tl.where(is_nan(u), 0x7FC0, (u + 0x7FFF + ((u >> 16) & 1)) >> 16).to(tl.int16)


@triton.jit
def to_bf16_stochastic(x, random):
    """Round numbers >= 0 to bf16, up or down at random.

    The random bits are added to the lower half, and a carry into the upper half rounds up. A finite number never
    becomes infinite.
    """
    u = x.to(tl.uint32, bitcast=True)  # unsigned, because a NaN may have a sign
    return (tl.where(u >= 0x7F7F0000, u, u + random.to(tl.uint32)) >> 16).to(tl.int16)


@triton.jit
def to_bf16_weight(x, random):
    """Round weights without master to bf16, up or down at random. NaN becomes 0x7FC0."""
    u = bits(x)
    rounded = tl.where((u & 0x7FFFFFFF) >= 0x7F7F0000, u, u + random) >> 16
    return tl.where(is_nan(u), 0x7FC0, rounded).to(tl.int16)


@triton.jit
def join(upper, lower):
    """The fp32 numbers from the halves (both int16) that `split` returns."""
    return value((upper.to(tl.int32) << 16) + lower.to(tl.int32))


@triton.jit
def split(x):
    """Upper and lower halves of fp32 numbers, both int16."""
    u = bits(x)
    upper = tl.where(is_nan(u), (u >> 16) | 0x40, (u + 0x8000) >> 16)
    return upper.to(tl.int16), tl.where(is_nan(u), 0, u).to(tl.int16)


@triton.jit
def random_bits(first_block, key_pointer, BLOCKS: tl.constexpr, SALT: tl.constexpr = NO_SALT):
    """16 random bits, as int32, for each element of a tile. The tile starts at block `first_block` of its parameter."""
    first_key = tl.load(key_pointer).to(tl.uint32, bitcast=True) ^ SALT[0]
    second_key = tl.load(key_pointer + 1).to(tl.uint32, bitcast=True) ^ SALT[1]
    h = first_block.to(tl.uint32) + tl.arange(0, BLOCKS).to(tl.uint32)[:, None] + first_key  # [blocks, 1]
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = ((h ^ (h >> 15)) + second_key) * 0x846CA68B
    h = h ^ (h >> 16)
    x = (tl.arange(0, BLOCK).to(tl.uint32)[None, :] + h) & 0xFFFF  # [blocks, 128]
    x = ((x ^ (x >> 8)) * 0x88B5) & 0xFFFF
    x = ((((x ^ (x >> 7)) + (h >> 16)) & 0xFFFF) * 0xDB2D) & 0xFFFF
    return (x ^ (x >> 9)).to(tl.int32)


@triton.jit
def block_scales(x, TOP: tl.constexpr):
    """Return for each block: the inverse scale, which brings its elements into the range of the codes, the scale, and
    whether all elements are finite.

    A block with an infinity or a NaN has the scale NaN, and its codes are 0.
    """
    largest = tl.max(bits(x) & 0x7FFFFFFF, axis=1, keep_dims=True)  # [blocks, 1]
    is_finite = largest < 0x7F800000
    divisor = value(tl.where(largest == 0, 0x3F800000, largest))
    inverse = tl.where(largest == 0, 0.0, tl.math.div_rn(tl.full(largest.shape, TOP, tl.float32), divisor))
    return inverse, tl.where(is_finite, value(largest) * (1.0 / TOP), float("nan")), is_finite


@triton.jit
def encode_e4m3(x, random):
    """Codes (rounded stochastically) and scales."""
    inverse, scales, is_finite = block_scales(x, MOMENT_MAX)
    scaled = bits(x * inverse)
    magnitude = value(scaled & 0x7FFFFFFF)
    is_small = (scaled & 0x7FFFFFFF) < (121 << 23)  # below 2**-6 the values of adjacent codes differ by 2**-9
    u = bits(tl.where(is_small, magnitude + 2.0**-6, magnitude))
    code = ((u + (random << 4)) >> 20) - tl.where(is_small, 121 << 3, 120 << 3)
    code = tl.minimum(code, 126) | ((scaled >> 24) & 0x80)
    return tl.where(is_finite, code, 0).to(tl.uint8), scales


@triton.jit
def encode_e5m3(x, random):
    """Codes (rounded stochastically; in a finite block, only 0 has the code 0) and scales, for x >= 0."""
    inverse, scales, is_finite = block_scales(x, VARIANCE_MAX)
    scaled = x * inverse
    is_small = bits(scaled) < (113 << 23)  # below 2**-14 the values of adjacent codes differ by 2**-17
    u = bits(tl.where(is_small, scaled + 2.0**-14, scaled))
    code = ((u + (random << 4)) >> 20) - tl.where(is_small, 113 << 3, 112 << 3)
    code = tl.minimum(tl.maximum(code, tl.minimum(bits(x), 1)), 247)
    return tl.where(is_finite, code, 0).to(tl.uint8), scales


@triton.jit
def decode_e4m3(codes, scales):
    """Decode e4m3. `code << 7` has the bits of value * 2**-8 in fp16, except that the sign is in bit 14, not 15."""
    half = codes.to(tl.int32) << 7
    half = half + (half & 0x4000)
    return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * (scales * 256.0)


@triton.jit
def decode_e5m3(codes, scales):
    """Decode e5m3. `code << 7` has the bits of the value in fp16."""
    half = (codes.to(tl.int32) << 7).to(tl.int16)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * scales


@triton.jit
def encode_4bit(m, v, m_random, v_random):
    """Codes of both states in a byte, rounded stochastically, and the scales of both (formats.py: encode_moment4 and
    encode_variance4).
    """
    inverse, m_scales, is_finite = block_scales(m, MOMENT4_MAX)
    u = bits(m * inverse)
    magnitude = value(u & 0x7FFFFFFF)
    is_small = (u & 0x7FFFFFFF) < (127 << 23)
    moved = bits(tl.where(is_small, magnitude + 1.0, magnitude)) - tl.where(is_small, 1 << 23, 0)
    low = tl.minimum(((moved + (m_random << 7) + 64) >> 23) - 126, 7) | ((u >> 28) & 8)
    codes = tl.where(is_finite, low, 0)
    inverse, v_scales, is_finite = block_scales(v, VARIANCE4_MAX)
    u = tl.maximum(bits(v * inverse), 127 << 23)
    coarse = ((u + (v_random << 7) + 64) >> 23) - 127
    fine = ((u + (v_random << 6) + 32) >> 22) - (2 * 135 - 8)
    high = tl.minimum(tl.where(u < (135 << 23), coarse, fine), 15)
    return (codes | (tl.where(is_finite, high, 0) << 4)).to(tl.uint8), m_scales, v_scales


@triton.jit
def decode_4bit(codes, m_scales, v_scales):
    """Momentum and variance from the halves of each byte (formats.py: decode_moment4 and decode_variance4)."""
    code = codes.to(tl.int32)
    magnitude = code & 7
    m = value(tl.where(magnitude == 0, 0, (magnitude + 126) << 23) | ((code & 8) << 28))
    upper = code >> 4
    v = value(tl.where(upper < 8, (upper + 127) << 23, (upper + (2 * 135 - 8)) << 22))
    return m * m_scales, v * v_scales


@triton.jit
def flush(x):
    """`x` with all values below 2**-100 in magnitude replaced by +0. NaN stays."""
    u = bits(x)
    return value(tl.where((u & 0x7FFFFFFF) < TINY_BITS, 0, u))


@triton.jit
def scalar(hyper, INDEX: tl.constexpr):
    """One of the scalars of the rule. The scalars are stored as fp32 bits in a table of integers."""
    return tl.load(hyper + INDEX).to(tl.float32, bitcast=True)


@triton.jit
def adam(g, p, m, v, hyper, COUPLED: tl.constexpr):
    """Adam (COUPLED: weight decay is added to the gradient) and AdamW (weight decay scales the weight)."""
    if COUPLED:
        l2 = scalar(hyper, 6)
        g = tl.where(l2 != 0.0, flush(g + l2 * p), g)
    m = flush(m + (g - m) * scalar(hyper, 0))
    v = flush(scalar(hyper, 1) * v + (scalar(hyper, 2) * g) * g)
    move = scalar(hyper, 4) * tl.math.div_rn(m, tl.math.sqrt_rn(v) + scalar(hyper, 3))
    if not COUPLED:
        p = p * scalar(hyper, 5)
    return flush(p - move), m, v


@triton.jit
def adagrad(g, p, v, hyper):
    """Adagrad with L2 weight decay."""
    g = flush(g + scalar(hyper, 2) * p)
    v = flush(v + g * g)
    return flush(p - scalar(hyper, 1) * tl.math.div_rn(g, tl.math.sqrt_rn(v) + scalar(hyper, 0))), v


@triton.jit
def lion(g, p, m, hyper):
    """Lion. Where the interpolated momentum, which gives the sign, is NaN, the weight becomes NaN."""
    lr = scalar(hyper, 2)
    difference = g - m
    direction = flush(m + difference * scalar(hyper, 0))
    u = bits(direction)
    move = tl.where(is_nan(u) | (u == 0), direction, tl.where(u < 0, -lr, lr))
    return flush(p * scalar(hyper, 3) - move), flush(m + difference * scalar(hyper, 1))


@triton.jit
def sgd(g, p, m, hyper):
    """SGD. The weight is computed in fp64. So is the momentum if dampening, weight decay or Nesterov is in effect."""
    keep, l2, nesterov = scalar(hyper, 1), scalar(hyper, 3), scalar(hyper, 4)
    weight = p.to(tl.float64)
    momentum, lr = scalar(hyper, 0).to(tl.float64), scalar(hyper, 2).to(tl.float64)
    if (keep == 1.0) & (l2 == 0.0) & (nesterov == 0.0):
        m = flush(scalar(hyper, 0) * m + g)
        direction = m.to(tl.float64)
    else:
        grad = g.to(tl.float64) + l2.to(tl.float64) * weight
        exact = momentum * m.to(tl.float64) + keep.to(tl.float64) * grad
        m = flush(exact.to(tl.float32))
        direction = tl.where(nesterov != 0.0, grad + momentum * exact, exact)
    return flush((weight - lr * direction).to(tl.float32)), m


@triton.jit
def apply(g, p, m, v, hyper, RULE: tl.constexpr):
    """One step of the rule with the name RULE. Returns the new weight and states."""
    if RULE == "adamw" or RULE == "adam":
        p, m, v = adam(g, p, m, v, hyper, RULE == "adam")
    elif RULE == "adagrad":
        p, v = adagrad(g, p, v, hyper)
    elif RULE == "lion":
        p, m = lion(g, p, m, hyper)
    else:
        tl.static_assert(RULE == "sgd")
        p, m = sgd(g, p, m, hyper)
    return p, m, v


@triton.jit(do_not_specialize=["num_tiles"])
def update(tiles, numbers, decision, grads, master, first, second, first_scales, second_scales, num_tiles,
           RULE: tl.constexpr, FORMAT: tl.constexpr, WEIGHT: tl.constexpr, ALIGNMENT: tl.constexpr,
           TILE: tl.constexpr, LOOPS: tl.constexpr):  # fmt: skip
    """One step of every tile whose piece is updated. Buffers that do not exist are None.

    decision: norm, factor and whether to skip, in fp64, or None. The gradient is multiplied by this factor and by the
    factor in `numbers`.

    With LOOPS, any number of programs process all tiles in turn. Otherwise there is one program per tile.

    RULE: name of the rule. FORMAT: format of the states. WEIGHT: "split" (bf16, the upper halves), "none" (bf16 without
    a master), "fp16" or "fp32" (the master itself). ALIGNMENT: of the addresses of weights, in bytes. Tensors of bf16
    are passed as int16.
    """
    program = tl.program_id(0)
    factor = 1.0
    keeps = 1
    if decision is not None:
        factor = tl.load(decision + 1).to(tl.float32)
        keeps = (tl.load(decision + 2) == 0).to(tl.int32)
    buffers = (grads, master, first, second, first_scales, second_scales)
    tile = _read_tile(tiles, program)
    if LOOPS:
        step = tl.num_programs(0)
        is_wanted = tl.load(numbers + tile[4] * NUMBER_COLUMNS)
        for number in range(program, num_tiles, step):
            # At the last tile its own row is read again, because there is no next row.
            following = _read_tile(tiles, tl.where(number + step < num_tiles, number + step, number))
            if is_wanted * keeps != 0:
                _update_tile(tile, numbers, factor, buffers, RULE, FORMAT, WEIGHT, ALIGNMENT, TILE)
            tile = following
            is_wanted = tl.load(numbers + tile[4] * NUMBER_COLUMNS)
    elif tl.load(numbers + tile[4] * NUMBER_COLUMNS) * keeps != 0:
        _update_tile(tile, numbers, factor, buffers, RULE, FORMAT, WEIGHT, ALIGNMENT, TILE)


@triton.jit
def _read_tile(tiles, number):
    row = tiles + number.to(tl.int64) * TILE_COLUMNS
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)


@triton.jit
def _update_tile(tile, numbers, factor, buffers, RULE: tl.constexpr, FORMAT: tl.constexpr, WEIGHT: tl.constexpr,
                 ALIGNMENT: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    # Whole tiles use no mask, because a mask prevents wide loads and stores.
    if tile[3] == TILE:
        _update_elements(tile, numbers, factor, buffers, RULE, FORMAT, WEIGHT, ALIGNMENT, TILE, False)
    else:
        _update_elements(tile, numbers, factor, buffers, RULE, FORMAT, WEIGHT, ALIGNMENT, TILE, True)


@triton.jit
def _update_elements(tile, numbers, factor, buffers, RULE: tl.constexpr, FORMAT: tl.constexpr, WEIGHT: tl.constexpr,
                     ALIGNMENT: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    BLOCKS: tl.constexpr = TILE // BLOCK
    weight, at, first_block, count, piece = tile
    grads, master, first, second, first_scales, second_scales = buffers
    own = numbers + piece * NUMBER_COLUMNS
    # `at` is a multiple of BLOCK. This product tells it to the compiler, because a hint for an argument has no effect.
    at = at // BLOCK * BLOCK
    block = tl.arange(0, BLOCKS)[:, None]  # [blocks, 1]
    index = block * BLOCK + tl.arange(0, BLOCK)[None, :]  # [blocks, 128]
    mask = index < count if MASKED else tl.full([BLOCKS, BLOCK], True, tl.int1)
    block_mask = block * BLOCK < count if MASKED else tl.full([BLOCKS, 1], True, tl.int1)
    scales_at = at // BLOCK + block
    IS_BF16: tl.constexpr = WEIGHT == "split" or WEIGHT == "none"
    ELEMENT: tl.constexpr = tl.int16 if IS_BF16 else tl.float16 if WEIGHT == "fp16" else tl.float32
    # The hint must be given for the pointer, because a hint for the integer is lost in the conversion.
    weight = tl.multiple_of(weight.to(tl.pointer_type(ELEMENT)), ALIGNMENT) + index

    # All tensors are [blocks, 128]. Masked elements are zero and their states stay zero, so they do not change a scale.
    g = _load_gradient(grads + at + index, mask) * (scalar(own, FACTOR) * factor)
    p = _load_weight(weight, master, at + index, mask, WEIGHT)
    if FORMAT == "4bit":
        m_scales = tl.load(first_scales + scales_at, mask=block_mask, other=0.0)  # [blocks, 1]
        v_scales = tl.load(second_scales + scales_at, mask=block_mask, other=0.0)
        m, v = decode_4bit(tl.load(first + at + index, mask=mask, other=0), m_scales, v_scales)
    else:
        m = _load_state(first, first_scales, at + index, scales_at, mask, block_mask, FORMAT, 0)
        v = _load_state(second, second_scales, at + index, scales_at, mask, block_mask, FORMAT, 1)
    p, m, v = apply(g, p, m, v, own + HYPER, RULE)
    if WEIGHT == "none":
        random = random_bits(first_block, own + KEY, BLOCKS, WEIGHT_SALT)
        tl.store(weight, to_bf16_weight(p, random), mask=mask)
    else:
        _store_weight(p, weight, master, at + index, mask, WEIGHT)
    if FORMAT == "4bit":
        m_random = random_bits(first_block, own + KEY, BLOCKS, MOMENT_SALT)
        v_random = random_bits(first_block, own + KEY, BLOCKS)
        codes, m_scales, v_scales = encode_4bit(m, v, m_random, v_random)
        tl.store(first + at + index, codes, mask=mask)
        tl.store(first_scales + scales_at, m_scales, mask=block_mask)
        tl.store(second_scales + scales_at, v_scales, mask=block_mask)
    elif second is not None:
        random = random_bits(first_block, own + KEY, BLOCKS)
        _store_state(v, random, second, second_scales, at + index, scales_at, mask, block_mask, FORMAT, 1)
        if first is not None:
            _store_state(m, random, first, first_scales, at + index, scales_at, mask, block_mask, FORMAT, 0)
    elif first is not None:  # a rule with one state, which is not rounded at random
        tl.static_assert(FORMAT != "int8")
        _store_state(m, 0, first, first_scales, at + index, scales_at, mask, block_mask, FORMAT, 0)


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
    elif WEIGHT == "none":
        p = from_bf16(tl.load(weight, mask=mask, other=0))
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
        codes, scale = encode_e4m3(x, random) if WHICH == 0 else encode_e5m3(x, random)
        tl.store(state + at, codes, mask=mask)
        tl.store(scales + scales_at, scale, mask=block_mask)
    elif FORMAT == "bf16":
        tl.store(state + at, to_bf16(x) if WHICH == 0 else to_bf16_stochastic(x, random), mask=mask)
    else:
        tl.store(state + at, x, mask=mask)
