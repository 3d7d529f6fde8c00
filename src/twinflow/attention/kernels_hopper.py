# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment"
"""Kernels for Hopper: forward, gradients of queries, and gradients of keys and values. Results are those of the kernels
in kernels.py, whose `reduce_outputs` and `reduce_gradients` also combine the pieces of rows that are cut.

tiles.py explains items, own and other tiles, cells, words, pieces and slots. Of n programs, program i processes the
items i, i + n, i + 2n and so on. Each of two warpgroups computes 64 rows of the own tile of an item. The warpgroups
share the other tiles, which a separate warp loads by TMA. While one warpgroup computes exponentials, the products of
the other use the tensor cores. The tiles of the next item are loaded while this item is processed.

The three kernels differ only in the function that processes an item. The width of a head is divided into one or two
parts, because the sizes of tiles must be powers of two, see tuning.HOPPER. Tiles, sums and descriptors are tuples with
one entry for each part. Descriptors of rows have four dimensions: batch, head, row and column. TMA neither loads nor
stores what is outside of them: rows and columns that a tile has in addition to a head are zeros, and are not stored.
Common arguments:

- `q` and `q_rest`, and so on: descriptors of both parts of a tensor; the second is None if there is one part.
- `own`, `others`, `vectors`: descriptors of the tensors of own tiles and of other tiles, and of vectors with a number
  for each other token. The first LINES vectors have numbers for each head, the others for each element of the batch.
- `own_bufs`: for each tensor and part, own tiles [slots x 2 halves, 64, width]. Results are stored through them.
- `other_bufs`: for each of two tensors and each part, other tiles [stages, tile, width].
- `vector_bufs`: [stages, tile], with the stages of the first tensor of other tiles.
- `bars`: barriers for full and for empty buffers: of own tiles, and of the other tiles of each of the two tensors.
- `plan`: items, codes, words and heads of a TilePlan.
- `sizes`: items of all heads, items of a head, long items, own rows, other rows, slots and heads of an element of the
  batch. They are separate arguments of a kernel, because Triton compiles a kernel again if a number in a tuple is 1.
- `own_ids`: a number for each own token. If S.HAS_IDS, tokens with different numbers do not see each other.

Operands that are constant over a loop are read from shared memory, because ptxas 12.8 reuses registers that hold such
an operand. A number of an item that is handed on from one turn of the loop over items to the next must be used for more
than the bounds of inner loops: Triton 3.6 and 3.7 remove what a loop hands on if its only uses are such bounds, so that
all items would have the bounds of the first one. Tests of the compiled code look for such numbers.

The loop over tiles with a mask takes the own tile by another number than the loop over tiles without one, although both
numbers are the same. ptxas 12.8 computes parts of the address of an operand once for both loops, in a place where the
first loop is skipped if it has no tiles, so that the second loop would read any memory. It cannot know that a number of
an item, which is never negative, has no sign bit. Tests of the machine code look for such addresses.
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
EDGE_BIT = gl.constexpr(17)
WINDOW_BIT = gl.constexpr(18)  # of four bits for the ends of a window
REGISTERS = gl.constexpr(240)  # per thread of the warpgroups that multiply
LOADER_REGISTERS = gl.constexpr(24)
LOG2E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-1e30)  # lower than any real score, but finite, so that differences are never NaN
FORWARD = gl.constexpr(0)
QUERIES = gl.constexpr(1)
KEYS = gl.constexpr(2)

sync = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # named thread_barrier until Triton 3.6


@gluon.jit
def read_item(plan, number, sizes, ONE_PATTERN: gl.constexpr):
    """Fields of an item: head (over the batch), own tile, first other tile, first one with a mask, end of other tiles,
    and place in scratch memory or -1. After the last item, the last item is returned again.

    The order of items is that of kernels.own_item, but all patterns have the same number of items. The own tile of an
    item that only fills the list of a pattern is after the last token, where nothing is loaded or stored.
    """
    number = gl.minimum(number, sizes[0] - 1)
    num_heads = sizes[0] // sizes[1]
    is_long = number < sizes[2] * num_heads
    first = gl.where(is_long, 0, sizes[2])
    width = gl.where(is_long, sizes[2], sizes[1] - sizes[2])
    number -= first * num_heads
    head = number // width
    row = plan[0] + (first + number % width) * ITEM_COLUMNS
    first_slot = head % sizes[6] * (sizes[5] // sizes[6])
    if not ONE_PATTERN:
        pattern = plan[3] + head % sizes[6] * 2
        row += gl.load(pattern) * sizes[1] * ITEM_COLUMNS
        first_slot = gl.load(pattern + 1)
    slot = gl.load(row + 4)
    place = gl.where(slot < 0, -1, head // sizes[6] * sizes[5] + first_slot + slot)
    return head, gl.load(row), gl.load(row + 1), gl.load(row + 2), gl.load(row + 3), place


@gluon.jit
def buffers(descriptors, NUM: gl.constexpr):
    """For each descriptor, shared memory for NUM of the blocks that it copies."""
    found = ()
    for i in gl.static_range(len(descriptors)):
        found = found + (_buffer(descriptors[i], NUM),)  # noqa: RUF005
    return found


@gluon.jit
def _buffer(copied, NUM: gl.constexpr):
    """Blocks of rows have the two dimensions of operands. Their memory is that of the descriptor's four dimensions."""
    SHAPE: gl.constexpr = copied.block_type.shape
    if len(SHAPE) == 1:  # a vector
        return gl.allocate_shared_memory(copied.dtype, [NUM, SHAPE[0]], copied.layout)
    else:
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SHAPE[2], SHAPE[3]], copied.dtype)
        return gl.allocate_shared_memory(copied.dtype, [NUM, SHAPE[2], SHAPE[3]], LAYOUT)


@gluon.jit
def parts(main, rest):
    """The descriptors of the parts of a tensor."""
    if rest is None:
        return (main,)
    else:
        return (main, rest)


@gluon.jit
def with_ids(vectors, ids):
    """Vectors, and that of ids if there is one."""
    if ids is None:
        return vectors
    else:
        return vectors + (ids,)  # noqa: RUF005


@gluon.jit
def matrices(bufs, number):
    """The parts of a block of rows in shared memory."""
    if len(bufs) == 1:
        return (bufs[0].index(number),)
    else:
        return (bufs[0].index(number), bufs[1].index(number))


@gluon.jit
def make_bars(SLOTS: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr):
    """Barriers for full and empty buffers: of own tiles, and of two kinds of other tiles. The loading warp fills
    buffers, and the two warpgroups empty them.
    """
    bars = (_bars(SLOTS, 1), _bars(SLOTS, 2), _bars(FIRST, 1), _bars(FIRST, 2), _bars(SECOND, 1), _bars(SECOND, 2))
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
def run(KIND: gl.constexpr, own, others, vectors, results, own_ids, plan, sizes, factors, S: gl.constexpr,
        GROUP: gl.constexpr, MEMBERS: gl.constexpr, LINES: gl.constexpr):  # fmt: skip
    """A program: two warpgroups that compute, and a warp that loads."""
    own_bufs = (buffers(own[0], 2 * S.SLOTS),)
    if len(own) == 2:
        own_bufs = own_bufs + (buffers(own[1], 2 * S.SLOTS),)  # noqa: RUF005
    other_bufs = (buffers(others[0], S.FIRST), buffers(others[1], S.SECOND))
    vector_bufs = buffers(vectors, S.FIRST)
    bars = make_bars(S.SLOTS, S.FIRST, S.SECOND)
    # fmt: off
    gl.warp_specialize(
        [
            (process_items, (gl.constexpr(0), KIND, own_bufs, other_bufs, vector_bufs, bars, plan, sizes, results,
                             own_ids, factors, S)),
            (process_items, (gl.constexpr(1), KIND, own_bufs, other_bufs, vector_bufs, bars, plan, sizes, results,
                             own_ids, factors, S)),
            (load_tiles, (own, others, vectors, own_bufs, other_bufs, vector_bufs, bars, plan, sizes, GROUP, MEMBERS,
                          LINES, gl.constexpr(S.ONE_PATTERN))),
        ],
        [4, 1],
        [REGISTERS, LOADER_REGISTERS],
    )
    # fmt: on


@gluon.jit
def load_rows(tensor, bufs, number, batch, head, row, bar):
    """Load a block of rows of a head, part by part."""
    col = 0
    for i in gl.static_range(len(bufs)):
        tma.async_copy_global_to_shared(tensor[i], [batch, head, row, col], bar, bufs[i].index(number))
        col += bufs[i].shape[2]


@gluon.jit
def load_tiles(own, others, vectors, own_bufs, other_bufs, vector_bufs, bars, plan, sizes, GROUP: gl.constexpr,
               MEMBERS: gl.constexpr, LINES: gl.constexpr, ONE_PATTERN: gl.constexpr):  # fmt: skip
    """The work of the loading warp. An own head has MEMBERS other heads, or shares its other head with GROUP - 1."""
    SLOTS: gl.constexpr = own_bufs[0][0].shape[0] // 2
    OTHER: gl.constexpr = other_bufs[0][0].shape[1]
    DIM: gl.constexpr = own_bufs[0][0].shape[2] + (own_bufs[0][1].shape[2] if len(own_bufs[0]) == 2 else 0)
    count = 0
    turn = 0
    item = read_item(plan, gl.program_id(0), sizes, ONE_PATTERN)
    first_code = gl.load(plan[1] + item[2])
    for number in range(gl.program_id(0), sizes[0], gl.num_programs(0)):
        following = read_item(plan, number + gl.num_programs(0), sizes, ONE_PATTERN)  # read early, also the code below
        head = item[0] % sizes[6]
        batch = item[0] // sizes[6]
        slot = turn % SLOTS
        mbarrier.wait(bars[1].index(slot), ((turn // SLOTS) & 1) ^ 1)
        mbarrier.expect(bars[0].index(slot), len(own_bufs) * OWN * DIM * 2)
        for i in gl.static_range(len(own_bufs)):
            for half in gl.static_range(2):
                at = item[1] * OWN + half * HALF
                load_rows(own[i], own_bufs[i], slot * 2 + half, batch, head, at, bars[0].index(slot))
        num_tiles = item[4] - item[2]
        for member in range(MEMBERS):
            other_head = (head * MEMBERS + member) // GROUP
            line = (batch * (sizes[6] * MEMBERS // GROUP) + other_head) * sizes[4]
            code = first_code
            for t in range(num_tiles):
                next_code = gl.load(plan[1] + item[2] + t + 1)
                at = (code >> BITS) * OTHER
                number_of_tile = count + t
                for i in gl.static_range(2):
                    stages = other_bufs[i][0].shape[0]
                    stage = number_of_tile % stages
                    full = bars[2 + 2 * i].index(stage)
                    mbarrier.wait(bars[3 + 2 * i].index(stage), ((number_of_tile // stages) & 1) ^ 1)
                    mbarrier.expect(full, OTHER * (DIM * 2 + (len(vectors) * 4 if i == 0 else 0)))
                    load_rows(others[i], other_bufs[i], stage, batch, other_head, at, full)
                    if i == 0:
                        for j in gl.static_range(len(vectors)):
                            start = (line if j < LINES else batch * sizes[4]) + at
                            tma.async_copy_global_to_shared(vectors[j], [start], full, vector_bufs[j].index(stage))
                code = next_code
            count += num_tiles  # also so that Triton hands the number on to this loop, see above
        turn += 1
        item = following
        first_code = gl.load(plan[1] + item[2])


@gluon.jit
def process_items(PART: gl.constexpr, KIND: gl.constexpr, own_bufs, other_bufs, vector_bufs, bars, plan, sizes, results,
                  own_ids, factors, S: gl.constexpr):  # fmt: skip
    """The work of one warpgroup, which computes one half of each own tile."""
    SLOTS: gl.constexpr = own_bufs[0][0].shape[0] // 2
    factors = (factors[0], factors[1], sizes[4] % HALF)  # with the number of tokens of the last cell
    count = 0
    turn = 0
    is_held = 0  # whether the previous item still uses its own tile
    item = read_item(plan, gl.program_id(0), sizes, S.ONE_PATTERN)
    early = read_early(KIND, SLOTS == 2, results, item, sizes, PART, S)
    for number in range(gl.program_id(0), sizes[0], gl.num_programs(0)):
        following = read_item(plan, number + gl.num_programs(0), sizes, S.ONE_PATTERN)  # early, to hide the latency
        slot = turn % SLOTS
        num_whole = item[3] - item[2]
        num_masked = item[4] - item[3]
        at = item[1] * OWN + PART * HALF
        ids = read_ids(own_ids, item[0] // sizes[6] * sizes[3] + at, sizes[3] - at, S)
        mbarrier.wait(bars[0].index(slot), (turn // SLOTS) & 1)
        words = plan[2] + item[3] * 2 + PART
        loop = (count, num_whole, num_masked, words, (slot + 1) % SLOTS, is_held)
        again = slot * 2 + PART + (item[4] >> 31)  # the same number, see above
        if KIND == FORWARD:
            own = matrices(own_bufs[0], slot * 2 + PART)
            both_tiles = (own, matrices(own_bufs[0], again))
            acc, top, weight, is_held = forward_sums(both_tiles, other_bufs, vector_bufs, bars, loop, ids, factors, S)
            is_held = release_own(bars, (slot + 1) % SLOTS, is_held)
            acc = store_weights(results, acc, top, weight, item, at, sizes, PART, S)
            store_rows(results[0], own, own_bufs[0], slot * 2 + PART, acc, results[2], item, at, sizes, PART, S)
        elif KIND == QUERIES:
            own = (matrices(own_bufs[0], slot * 2 + PART), matrices(own_bufs[1], slot * 2 + PART))
            outs = early if SLOTS == 2 else read_early(KIND, True, results, item, sizes, PART, S)
            lines = read_lines(results, own[1], outs, item[0] * sizes[3] + at, sizes[3] - at, S)
            if SLOTS == 2:
                early = read_early(KIND, True, results, following, sizes, PART, S)
            both_tiles = (own, (matrices(own_bufs[0], again), matrices(own_bufs[1], again)))
            dq, is_held = query_sums(both_tiles, lines, other_bufs, vector_bufs, bars, loop, ids, factors, S)
            is_held = release_own(bars, (slot + 1) % SLOTS, is_held)
            dq = scaled(dq, factors[0])
            store_rows(results[0], own[0], own_bufs[0], slot * 2 + PART, dq, results[4], item, at, sizes, PART, S)
        else:
            own = (matrices(own_bufs[0], slot * 2 + PART), matrices(own_bufs[1], slot * 2 + PART))
            both_tiles = (own, (matrices(own_bufs[0], again), matrices(own_bufs[1], again)))
            dk, dv, is_held = key_sums(both_tiles, other_bufs, vector_bufs, bars, loop, ids, factors, S)
            is_held = release_own(bars, (slot + 1) % SLOTS, is_held)
            if S.WANTS_K:
                dk = scaled(dk, factors[0])
                store_rows(results[0], own[0], own_bufs[0], slot * 2 + PART, dk, results[2], item, at, sizes, PART, S)
            if S.WANTS_V:
                store_rows(results[1], own[1], own_bufs[1], slot * 2 + PART, dv, results[3], item, at, sizes, PART, S)
        is_held = 1
        if SLOTS == 1:
            is_held = release_own(bars, slot, 1)  # the next own tile needs the memory of this one
        count += (num_whole + num_masked) * (S.GROUP if KIND == KEYS else 1)
        turn += 1
        item = following
    tma.store_wait(0)


@gluon.jit
def release_own(bars, slot, is_held):
    """Release the own tiles of a slot, if they are still held, after the stores through them are complete. Return 0 as
    the new value of `is_held`.
    """
    if is_held != 0:
        tma.store_wait(0)
        mbarrier.arrive(bars[1].index(slot), count=1)
    return 0


@gluon.jit
def read_ids(own_ids, start, num_rows, S: gl.constexpr):
    """The ids of the own rows of a warpgroup, or 0 without ids."""
    if S.HAS_IDS:
        rows = gl.arange(0, HALF, gl.SliceLayout(1, S.SCORES))
        return gl.load(own_ids + start + rows, mask=rows < num_rows, other=0)
    else:
        return 0


@gluon.jit
def hidden(scores, ids, vector_bufs, stage, S: gl.constexpr):
    """Scores with minus infinity where the ids of both tokens differ. The ids of other tokens are the last vector."""
    if S.HAS_IDS:
        others = vector_bufs[len(vector_bufs) - 1].index(stage).load(gl.SliceLayout(0, S.SCORES))
        is_seen = ids[:, None] == others.to(gl.int32, bitcast=True)[None, :]
        return gl.where(is_seen, scores, float("-inf"))
    else:
        return scores


@gluon.jit
def masked(scores, word, edge, BY_KEYS: gl.constexpr, S: gl.constexpr):
    """The scores of a cell, with minus infinity for scores that are not kept. `edge`: tokens of the last cell."""
    rows = gl.arange(0, HALF, gl.SliceLayout(1, S.SCORES))[:, None]
    cols = gl.arange(0, HALF, gl.SliceLayout(0, S.SCORES))[None, :]
    keep = ((word >> (rows // SUB * (HALF // SUB) + cols // SUB)) & 1) != 0
    if S.CAUSAL:
        is_seen = (cols >= rows) if BY_KEYS else (cols <= rows)
        keep = keep & (is_seen | (((word >> DIAGONAL_BIT) & 1) == 0))
    if S.HAS_EDGE:
        keep = keep & ((cols < edge) | (((word >> EDGE_BIT) & 1) == 0))
    if S.HAS_WINDOW:
        for i in gl.static_range(4):
            distance = (rows - cols) if i < 2 else (cols - rows)
            keep = keep & ((distance < S.WINDOW_REST - i % 2 * HALF) | (((word >> (WINDOW_BIT + i)) & 1) == 0))
    return gl.where(keep, scores, float("-inf"))


@gluon.jit
def capped(scores, factors, S: gl.constexpr):
    """Scores with a softcap: c * tanh(score * scale / c) / scale. `factors` are the scale and c."""
    if S.HAS_CAP:
        limit = factors[1] / factors[0]
        return limit - (2.0 * limit) / (gl.exp2(scores * (2.0 * LOG2E / limit)) + 1.0)
    else:
        return scores


@gluon.jit
def cap_slope(ds, scores, factors, S: gl.constexpr):
    """Score gradients times the derivative of the softcap at scores that are capped."""
    if S.HAS_CAP:
        share = scores * (factors[0] / factors[1])
        return ds * (1.0 - share * share)
    else:
        return ds


@gluon.jit
def start_scores(rows, cols, S: gl.constexpr):
    """Start the products of all rows and all columns."""
    zeros = gl.full([HALF, S.OTHER], 0.0, gl.float32, S.SCORES)
    scores = warpgroup_mma(rows[0], cols[0].permute((1, 0)), zeros, use_acc=False, is_async=True)
    if len(rows) == 2:
        scores = warpgroup_mma(rows[1], cols[1].permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def zero_sums(S: gl.constexpr):
    """Sums of zero, part by part."""
    first = gl.full([HALF, S.WIDTHS[0]], 0.0, gl.float32, S.SUMS[0])
    if len(S.WIDTHS) == 1:
        return (first,)
    else:
        return (first, gl.full([HALF, S.WIDTHS[1]], 0.0, gl.float32, S.SUMS[1]))


@gluon.jit
def operands(weights, dtype: gl.constexpr, S: gl.constexpr):
    """Weights as the first operand of the products of each part."""
    weights = weights.to(dtype)
    first = gl.convert_layout(weights, gl.DotOperandLayout(0, S.SUMS[0], 2))
    if len(S.WIDTHS) == 1:
        return (first,)
    else:
        return (first, gl.convert_layout(weights, gl.DotOperandLayout(0, S.SUMS[1], 2)))


@gluon.jit
def start_sums(weights, rows, sums):
    """Start adding the products of weights and rows to sums."""
    first = warpgroup_mma(weights[0], rows[0], sums[0], is_async=True)
    if len(sums) == 1:
        return (first,)
    else:
        return (first, warpgroup_mma(weights[1], rows[1], sums[1], is_async=True))


@gluon.jit
def finish_sums(sums, weights):
    """Wait for all products. The operands must be kept until then."""
    if len(sums) == 1:
        first, weight = warpgroup_mma_wait(0, deps=[sums[0], weights[0]])
        return (first,), (weight,)
    else:
        first, second, weight, other = warpgroup_mma_wait(0, deps=[sums[0], sums[1], weights[0], weights[1]])
        return (first, second), (weight, other)


@gluon.jit
def scaled(sums, factor):
    """The sums of all parts, each element times the same number."""
    if len(sums) == 1:
        return (sums[0] * factor,)
    else:
        return (sums[0] * factor, sums[1] * factor)


@gluon.jit
def row_scaled(sums, factor, S: gl.constexpr):
    """The sums of all parts, each row times its own number of `factor`."""
    first = sums[0] * gl.convert_layout(factor, gl.SliceLayout(1, S.SUMS[0]))[:, None]
    if len(sums) == 1:
        return (first,)
    else:
        return (first, sums[1] * gl.convert_layout(factor, gl.SliceLayout(1, S.SUMS[1]))[:, None])


@gluon.jit
def store_rows(tensor, own, own_bufs, number, sums, pieces, item, at, sizes, PART: gl.constexpr, S: gl.constexpr):
    """Store rows by TMA through the buffers of an own tile that is not read any more, or a piece to scratch memory."""
    if S.HAS_CUTS and item[5] >= 0:
        store_piece(pieces, item[5].to(gl.int64), sums, PART, S)
    else:
        for i in gl.static_range(len(sums)):
            own[i].store(sums[i].to(own[i].dtype))
        fence_async_shared()
        sync()
        col = 0
        for i in gl.static_range(len(sums)):
            place = [item[0] // sizes[6], item[0] % sizes[6], at, col]
            tma.async_copy_shared_to_global(tensor[i], place, own_bufs[i].index(number))
            col += S.WIDTHS[i]


@gluon.jit
def store_piece(pieces, place, sums, PART: gl.constexpr, S: gl.constexpr):
    """Store a piece to scratch memory in fp32."""
    col = 0
    for i in gl.static_range(len(sums)):
        rows = gl.arange(0, HALF, gl.SliceLayout(1, S.SUMS[i])) + PART * HALF
        cols = gl.arange(0, S.WIDTHS[i], gl.SliceLayout(0, S.SUMS[i])) + col
        gl.store(pieces + place * (OWN * S.PADDED) + (rows[:, None] * S.PADDED + cols[None, :]), sums[i])
        col += S.WIDTHS[i]


@gluon.jit
def forward_sums(both_tiles, other_bufs, vector_bufs, bars, loop, ids, factors, S: gl.constexpr):
    """Sums of weighted values, maxima in base 2, and sums of weights. The product of weights and values of a tile that
    has no mask overlaps with the next tile's scores. `both_tiles`: the own tile for the
    loops over other tiles without and with a mask.
    """
    own, own_masked = both_tiles
    k_bufs, v_bufs = other_bufs
    count, num_whole, num_masked, words, other_slot, is_held = loop
    factor = factors[0] * LOG2E
    FIRST: gl.constexpr = k_bufs[0].shape[0]
    SECOND: gl.constexpr = v_bufs[0].shape[0]
    acc = zero_sums(S)
    top = gl.full([HALF], LOWEST, gl.float32, gl.SliceLayout(1, S.SCORES))
    weight = gl.full([HALF], 0.0, gl.float32, gl.SliceLayout(1, S.SCORES))
    if num_whole > 0:
        stage = count % FIRST
        mbarrier.wait(bars[2].index(stage), (count // FIRST) & 1)
        scores = start_scores(own, matrices(k_bufs, stage), S)
        scores = warpgroup_mma_wait(0, deps=[scores])
        scores = hidden(capped(scores, factors, S), ids, vector_bufs, stage, S)
        mbarrier.arrive(bars[3].index(stage), count=1)
        p, top, fade, weight = weigh(scores, top, weight, factor)
        operand = operands(p, own[0].dtype, S)
        for t in range(1, num_whole):
            stage = (count + t) % FIRST
            mbarrier.wait(bars[2].index(stage), ((count + t) // FIRST) & 1)
            scores = start_scores(own, matrices(k_bufs, stage), S)
            v_stage = (count + t - 1) % SECOND
            mbarrier.wait(bars[4].index(v_stage), ((count + t - 1) // SECOND) & 1)
            acc = start_sums(operand, matrices(v_bufs, v_stage), acc)
            scores = warpgroup_mma_wait(S.NUM_PARTS, deps=[scores])
            scores = hidden(capped(scores, factors, S), ids, vector_bufs, stage, S)
            mbarrier.arrive(bars[3].index(stage), count=1)
            p, top, fade, weight = weigh(scores, top, weight, factor)
            acc, operand = finish_sums(acc, operand)
            mbarrier.arrive(bars[5].index(v_stage), count=1)
            acc = row_scaled(acc, fade, S)
            operand = operands(p, own[0].dtype, S)
            is_held = release_own(bars, other_slot, is_held)
        v_stage = (count + num_whole - 1) % SECOND
        mbarrier.wait(bars[4].index(v_stage), ((count + num_whole - 1) // SECOND) & 1)
        acc = start_sums(operand, matrices(v_bufs, v_stage), acc)
        acc, operand = finish_sums(acc, operand)
        mbarrier.arrive(bars[5].index(v_stage), count=1)
    if S.HAS_MASKED:
        word = gl.load(words)
        for t in range(num_masked):
            next_word = gl.load(words + (t + 1) * 2)
            number = count + num_whole + t
            stage = number % FIRST
            v_stage = number % SECOND
            mbarrier.wait(bars[2].index(stage), (number // FIRST) & 1)
            if word != 0:
                scores = start_scores(own_masked, matrices(k_bufs, stage), S)
                scores = warpgroup_mma_wait(0, deps=[scores])
                scores = capped(scores, factors, S)
                if word != WHOLE:
                    scores = masked(scores, word, factors[2], False, S)
                scores = hidden(scores, ids, vector_bufs, stage, S)
                p, top, fade, weight = weigh(scores, top, weight, factor)
                acc = row_scaled(acc, fade, S)
                operand = operands(p, own[0].dtype, S)
                mbarrier.wait(bars[4].index(v_stage), (number // SECOND) & 1)
                acc = start_sums(operand, matrices(v_bufs, v_stage), acc)
                acc, operand = finish_sums(acc, operand)
            else:
                mbarrier.wait(bars[4].index(v_stage), (number // SECOND) & 1)
            mbarrier.arrive(bars[3].index(stage), count=1)
            mbarrier.arrive(bars[5].index(v_stage), count=1)
            word = next_word
            is_held = release_own(bars, other_slot, is_held)
    return acc, top, weight, is_held


@gluon.jit
def weigh(scores, top, weight, factor):
    """Probabilities relative to the new maximum, the new maximum, the factor for sums relative to the old maximum, and
    the sum of weights.
    """
    new_top = gl.maximum(top, gl.max(scores, 1) * factor)
    p = gl.exp2(scores * factor - new_top[:, None])
    fade = gl.exp2(top - new_top)
    return p, new_top, fade, weight * fade + gl.sum(p, 1)


@gluon.jit
def store_weights(results, acc, top, weight, item, at, sizes, PART: gl.constexpr, S: gl.constexpr):
    """Store the log-sum-exp of rows and return normalised outputs, or store maxima and weights of a piece."""
    rows = gl.arange(0, HALF, gl.SliceLayout(1, S.SCORES))
    if S.HAS_CUTS and item[5] >= 0:
        first = item[5].to(gl.int64) * OWN + PART * HALF
        gl.store(results[3] + first + rows, top)
        gl.store(results[4] + first + rows, weight)
    else:
        first = (item[0] * sizes[3] + at).to(gl.int64)
        is_empty = weight == 0.0
        weight = gl.where(is_empty, 1.0, weight)
        lse = gl.where(is_empty, float("inf"), top + gl.log2(weight))
        gl.store(results[1] + first + rows, lse, mask=rows < sizes[3] - at)
        acc = row_scaled(acc, 1.0 / weight, S)
    return acc


@gluon.jit
def read_early(KIND: gl.constexpr, IS_EARLY: gl.constexpr, results, item, sizes, PART: gl.constexpr,
               S: gl.constexpr):  # fmt: skip
    """For the gradients of queries, load rows of the output of an item, part by part. They are read one item ahead if
    there are enough registers.
    """
    if KIND == QUERIES and IS_EARLY:
        first = read_out(results, item, sizes, PART, 0, S.WIDTHS[0], S.HEAD_DIM)
        if S.NUM_PARTS == 1:
            return (first,)
        else:
            return (first, read_out(results, item, sizes, PART, S.WIDTHS[0], S.WIDTHS[1], S.HEAD_DIM))
    else:
        return 0


@gluon.jit
def read_out(results, item, sizes, PART: gl.constexpr, COL: gl.constexpr, WIDTH: gl.constexpr,
             HEAD_DIM: gl.constexpr):  # fmt: skip
    """Load rows of one part of the output, whose strides of batch, head and token are the last results. Columns that a
    head does not have are zeros.
    """
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    strides = results[5]
    at = item[1] * OWN + PART * HALF
    rows = at + gl.arange(0, HALF, gl.SliceLayout(1, ROWS))
    cols = COL + gl.arange(0, WIDTH, gl.SliceLayout(0, ROWS))
    head = (item[0] // sizes[6]).to(gl.int64) * strides[0] + (item[0] % sizes[6]).to(gl.int64) * strides[1]
    places = rows.to(gl.int64)[:, None] * strides[2] + cols[None, :]
    is_there = (rows < sizes[3])[:, None]
    if COL + WIDTH > HEAD_DIM:
        is_there = is_there & (cols < HEAD_DIM)[None, :]
    return gl.load(results[3] + head + places, mask=is_there, other=0.0)


@gluon.jit
def read_lines(results, grads, outs, start, num_rows, S: gl.constexpr):
    """Log-sum-exp and delta of the own rows. Delta, the sum of out * grad of a row, is also stored."""
    delta = product_sum(outs[0], grads[0], S)
    if S.NUM_PARTS == 2:
        delta += product_sum(outs[1], grads[1], S)
    rows = gl.arange(0, HALF, gl.SliceLayout(1, S.SCORES))
    first = start.to(gl.int64)
    is_there = rows < num_rows
    gl.store(results[2] + first + rows, delta, mask=is_there)
    return gl.load(results[1] + first + rows, mask=is_there, other=float("inf")), delta


@gluon.jit
def product_sum(out, grad, S: gl.constexpr):
    """Sums over rows of the products of both tensors. `grad` is in shared memory."""
    total = gl.sum(out.to(gl.float32) * grad.load(out.type.layout).to(gl.float32), 1)
    return gl.convert_layout(total, gl.SliceLayout(1, S.SCORES))


@gluon.jit
def query_sums(both_tiles, lines, other_bufs, vector_bufs, bars, loop, ids, factors, S: gl.constexpr):
    """The gradients of queries, without the factor `scale`. `both_tiles`: as in `forward_sums`."""
    own, own_masked = both_tiles
    count, num_whole, num_masked, words, other_slot, is_held = loop
    FIRST: gl.constexpr = other_bufs[0][0].shape[0]
    SECOND: gl.constexpr = other_bufs[1][0].shape[0]
    dq = zero_sums(S)
    for t in range(num_whole):
        number = count + t
        dq = add_to_queries(dq, own, lines, other_bufs, vector_bufs, bars, number, ids, factors, WHOLE, True, False, S)
        mbarrier.arrive(bars[3].index(number % FIRST), count=1)
        mbarrier.arrive(bars[5].index(number % SECOND), count=1)
        is_held = release_own(bars, other_slot, is_held)
    if S.HAS_MASKED:
        word = gl.load(words)
        for t in range(num_masked):
            next_word = gl.load(words + (t + 1) * 2)
            number = count + num_whole + t
            wait_for_tile(bars, number, FIRST, SECOND)
            if word != 0:
                dq = add_to_queries(dq, own_masked, lines, other_bufs, vector_bufs, bars, number, ids, factors, word,
                                    False, True, S)  # fmt: skip
            mbarrier.arrive(bars[3].index(number % FIRST), count=1)
            mbarrier.arrive(bars[5].index(number % SECOND), count=1)
            word = next_word
            is_held = release_own(bars, other_slot, is_held)
    return dq, is_held


@gluon.jit
def wait_for_tile(bars, number, FIRST: gl.constexpr, SECOND: gl.constexpr):
    """Wait until both tensors of an other tile are there."""
    mbarrier.wait(bars[2].index(number % FIRST), (number // FIRST) & 1)
    mbarrier.wait(bars[4].index(number % SECOND), (number // SECOND) & 1)


@gluon.jit
def add_to_queries(dq, own, lines, other_bufs, vector_bufs, bars, number, ids, factors, word, WAITS: gl.constexpr,
                   MASKED: gl.constexpr, S: gl.constexpr):  # fmt: skip
    """Add the contribution of one tile of keys to the gradients of queries."""
    FIRST: gl.constexpr = other_bufs[0][0].shape[0]
    SECOND: gl.constexpr = other_bufs[1][0].shape[0]
    stage = number % FIRST
    if WAITS:
        mbarrier.wait(bars[2].index(stage), (number // FIRST) & 1)
    k_tile = matrices(other_bufs[0], stage)
    scores = start_scores(own[0], k_tile, S)
    if WAITS:
        mbarrier.wait(bars[4].index(number % SECOND), (number // SECOND) & 1)
    dp = start_scores(own[1], matrices(other_bufs[1], number % SECOND), S)
    scores = warpgroup_mma_wait(S.NUM_PARTS, deps=[scores])
    scores = capped(scores, factors, S)
    p = scores
    if MASKED and word != WHOLE:
        p = masked(p, word, factors[2], False, S)
    p = hidden(p, ids, vector_bufs, stage, S)
    p = gl.exp2(p * (factors[0] * LOG2E) - lines[0][:, None])
    dp = warpgroup_mma_wait(0, deps=[dp])
    ds = operands(cap_slope(p * (dp - lines[1][:, None]), scores, factors, S), own[0][0].dtype, S)
    dq = start_sums(ds, k_tile, dq)
    dq, ds = finish_sums(dq, ds)
    return dq


@gluon.jit
def key_sums(both_tiles, other_bufs, vector_bufs, bars, loop, ids, factors, S: gl.constexpr):
    """The gradients of keys, without the factor `scale`, and of values. Scores are [keys, queries]. `both_tiles`: as in
    `forward_sums`.
    """
    own, own_masked = both_tiles
    count, num_whole, num_masked, words, other_slot, is_held = loop
    FIRST: gl.constexpr = other_bufs[0][0].shape[0]
    SECOND: gl.constexpr = other_bufs[1][0].shape[0]
    dk = zero_sums(S)
    dv = zero_sums(S)
    for _ in range(S.GROUP):
        for t in range(num_whole):
            number = count + t
            dk, dv = add_to_keys(
                dk, dv, own, other_bufs, vector_bufs, bars, number, ids, factors, WHOLE, True, False, S
            )
            mbarrier.arrive(bars[3].index(number % FIRST), count=1)
            mbarrier.arrive(bars[5].index(number % SECOND), count=1)
            is_held = release_own(bars, other_slot, is_held)
        if S.HAS_MASKED:
            word = gl.load(words)
            for t in range(num_masked):
                next_word = gl.load(words + (t + 1) * 2)
                number = count + num_whole + t
                wait_for_tile(bars, number, FIRST, SECOND)
                if word != 0:
                    dk, dv = add_to_keys(dk, dv, own_masked, other_bufs, vector_bufs, bars, number, ids, factors, word,
                                         False, True, S)  # fmt: skip
                mbarrier.arrive(bars[3].index(number % FIRST), count=1)
                mbarrier.arrive(bars[5].index(number % SECOND), count=1)
                word = next_word
                is_held = release_own(bars, other_slot, is_held)
        count += num_whole + num_masked
    return dk, dv, is_held


@gluon.jit
def add_to_keys(dk, dv, own, other_bufs, vector_bufs, bars, number, ids, factors, word, WAITS: gl.constexpr,
                MASKED: gl.constexpr, S: gl.constexpr):  # fmt: skip
    """Add the contribution of one tile of queries to the gradients of keys and values."""
    FIRST: gl.constexpr = other_bufs[0][0].shape[0]
    SECOND: gl.constexpr = other_bufs[1][0].shape[0]
    COLS: gl.constexpr = gl.SliceLayout(0, S.SCORES)
    stage = number % FIRST
    if WAITS:
        mbarrier.wait(bars[2].index(stage), (number // FIRST) & 1)
    q_tile = matrices(other_bufs[0], stage)
    scores = start_scores(own[0], q_tile, S)
    if WAITS:
        mbarrier.wait(bars[4].index(number % SECOND), (number // SECOND) & 1)
    g_tile = matrices(other_bufs[1], number % SECOND)
    row_lse = vector_bufs[0].index(stage).load(COLS)
    if S.WANTS_K:
        dp = start_scores(own[1], g_tile, S)
    scores = warpgroup_mma_wait(S.NUM_PARTS if S.WANTS_K else 0, deps=[scores])
    scores = capped(scores, factors, S)
    p = scores
    if MASKED and word != WHOLE:
        p = masked(p, word, factors[2], True, S)
    p = hidden(p, ids, vector_bufs, stage, S)
    p = gl.exp2(p * (factors[0] * LOG2E) - row_lse[None, :])
    if S.WANTS_V:
        operand = operands(p, own[0][0].dtype, S)
        dv = start_sums(operand, g_tile, dv)
    if S.WANTS_K:
        row_delta = vector_bufs[1].index(stage).load(COLS)
        dp = warpgroup_mma_wait(S.NUM_PARTS if S.WANTS_V else 0, deps=[dp])
        ds = cap_slope(p * (dp - row_delta[None, :]), scores, factors, S)
        ds = operands(ds, own[0][0].dtype, S)
        dk = start_sums(ds, q_tile, dk)
        dk, ds = finish_sums(dk, ds)
    if S.WANTS_V:
        dv, operand = finish_sums(dv, operand)
    return dk, dv


@gluon.jit(do_not_specialize=["total", "num_items", "num_long", "num_own", "num_other", "num_slots", "num_heads"])
def forward(q, q_rest, k, k_rest, v, v_rest, out, out_rest, ids, own_ids, lse, sums, tops, weights, plan, total,
            num_items, num_long, num_own, num_other, num_slots, num_heads, scale, softcap,
            S: gl.constexpr):  # fmt: skip
    """Compute outputs and log-sum-exp for tiles of queries. q, k, v, out and ids are TMA descriptors."""
    others = (parts(k, k_rest), parts(v, v_rest))
    results = (parts(out, out_rest), lse, sums, tops, weights)
    sizes = (total, num_items, num_long, num_own, num_other, num_slots, num_heads)
    run(FORWARD, (parts(q, q_rest),), others, with_ids((), ids), results, own_ids, plan, sizes, (scale, softcap), S,
        gl.constexpr(S.GROUP), gl.constexpr(1), gl.constexpr(0))  # fmt: skip


@gluon.jit(do_not_specialize=["total", "num_items", "num_long", "num_own", "num_other", "num_slots", "num_heads"])
def query_gradients(q, q_rest, grad, grad_rest, k, k_rest, v, v_rest, dq, dq_rest, ids, own_ids, out, strides, lse,
                    delta, sums, plan, total, num_items, num_long, num_own, num_other, num_slots, num_heads, scale,
                    softcap, S: gl.constexpr):  # fmt: skip
    """Compute the gradients of tiles of queries. q, grad, k, v, dq and ids are TMA descriptors."""
    own = (parts(q, q_rest), parts(grad, grad_rest))
    others = (parts(k, k_rest), parts(v, v_rest))
    results = (parts(dq, dq_rest), lse, delta, out, sums, strides)
    sizes = (total, num_items, num_long, num_own, num_other, num_slots, num_heads)
    run(QUERIES, own, others, with_ids((), ids), results, own_ids, plan, sizes, (scale, softcap), S,
        gl.constexpr(S.GROUP), gl.constexpr(1), gl.constexpr(0))  # fmt: skip


@gluon.jit(do_not_specialize=["total", "num_items", "num_long", "num_own", "num_other", "num_slots", "num_heads"])
def key_gradients(k, k_rest, v, v_rest, q, q_rest, grad, grad_rest, dk, dk_rest, dv, dv_rest, ids, own_ids, lse, delta,
                  sums_k, sums_v, plan, total, num_items, num_long, num_own, num_other, num_slots, num_heads, scale,
                  softcap, S: gl.constexpr):  # fmt: skip
    """Compute the gradients of tiles of keys, of values, or of both, summed over the query heads that share them. All
    tensors except own_ids, the scratch memory and the plan are TMA descriptors.
    """
    own = (parts(k, k_rest), parts(v, v_rest))
    others = (parts(q, q_rest), parts(grad, grad_rest))
    results = (parts(dk, dk_rest), parts(dv, dv_rest), sums_k, sums_v)
    sizes = (total, num_items, num_long, num_own, num_other, num_slots, num_heads)
    run(KEYS, own, others, with_ids((lse, delta), ids), results, own_ids, plan, sizes, (scale, softcap), S,
        gl.constexpr(1), gl.constexpr(S.GROUP), gl.constexpr(2))  # fmt: skip
