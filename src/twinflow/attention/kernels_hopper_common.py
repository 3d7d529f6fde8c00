# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Functions that the kernels for Hopper share: the items of a program, the warp that loads, and the stores of results.

Programs are persistent. Of n programs, program i processes the items i, i + n, i + 2n and so on. Each of two warpgroups
computes 64 rows of the own tile of an item. They share the other tiles, which a separate warp loads by TMA. While one
warpgroup computes exponentials, the products of the other use the tensor cores. The tiles of the next item are loaded
while this item is processed.

- `own_bufs`: own tiles, [2 slots x 2 halves, 64, dim] each; results are stored through them.
- `other_bufs`: other tiles of two tensors, [stages, tile, dim]; and two vectors per tile if scores are [keys, queries].
- `bars`: barriers for full and for empty buffers: of own tiles, and of the other tiles of each of the two tensors.
- `plan`: items, codes and words of a CellPlan.
- `places`: two numbers for each tensor with rows, in the order of the descriptors, see launch.Rows.
- `sizes`: items of all heads, items of a head, long items, own rows, other rows and slots of a head.

Operands that are constant over a loop are read from shared memory, because ptxas 12.8 reuses registers that hold such
an operand. The length of a loop over tiles must also be used elsewhere, because otherwise Triton 3.6 does not keep its
value.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

BITS = gl.constexpr(8)  # as in tiles.py
ITEM_COLUMNS = gl.constexpr(5)
HALF = gl.constexpr(64)  # rows of a warpgroup, and tokens of a cell
OWN = gl.constexpr(128)
SUB = gl.constexpr(16)  # tokens per bit of the word of a cell, as in cells.py
WHOLE = gl.constexpr(0xFFFF)
DIAGONAL_BIT = gl.constexpr(16)
REGISTERS = gl.constexpr(240)  # per thread of the warpgroups that multiply
LOADER_REGISTERS = gl.constexpr(24)
LOG2E = gl.constexpr(1.4426950408889634)

sync = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # named thread_barrier until Triton 3.6


@gluon.jit
def read_item(items, number, sizes):
    """Fields of an item: head, own tile, first other tile, end of other tiles, and slot. After the last item, the last
    item is returned again.

    The order of items is that of kernels_common.own_item.
    """
    number = gl.minimum(number, sizes[0] - 1)
    num_heads = sizes[0] // sizes[1]
    is_long = number < sizes[2] * num_heads
    first = gl.where(is_long, 0, sizes[2])
    width = gl.where(is_long, sizes[2], sizes[1] - sizes[2])
    number -= first * num_heads
    row = items + (first + number % width) * ITEM_COLUMNS
    return number // width, gl.load(row), gl.load(row + 1), gl.load(row + 3), gl.load(row + 4)


@gluon.jit
def corner(head, num_rows, places, NUMBER: gl.constexpr):
    """First row and column of a head (over the whole batch) in the matrix of a tensor."""
    fold = places[2 * NUMBER]
    return head // fold * num_rows, head % fold * places[2 * NUMBER + 1]


@gluon.jit
def make_bars(STAGES: gl.constexpr):
    """Barriers for full and empty buffers: of own tiles, and of two kinds of other tiles. The loading warp fills
    buffers, and the two warpgroups empty them.
    """
    return (_bars(2, 1), _bars(2, 2), _bars(STAGES, 1), _bars(STAGES, 2), _bars(STAGES, 1), _bars(STAGES, 2))


@gluon.jit
def _bars(NUM: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def load_tiles(
    own, others, own_bufs, other_bufs, bars, plan, places, sizes, GROUP: gl.constexpr, MEMBERS: gl.constexpr
):
    """The work of the loading warp. `own` and `others` are descriptors, in the order of the buffers."""
    STAGES: gl.constexpr = other_bufs[0].shape[0]
    OTHER: gl.constexpr = other_bufs[0].shape[1]
    DIM: gl.constexpr = other_bufs[0].shape[2]
    HAS_VECTORS: gl.constexpr = len(other_bufs) == 4
    TILE_BYTES: gl.constexpr = OTHER * (DIM * 2 + (4 if HAS_VECTORS else 0))
    count = 0
    turn = 0
    for number in range(gl.program_id(0), sizes[0], gl.num_programs(0)):
        head, tile, start, stop, _ = read_item(plan[0], number, sizes)
        slot = turn & 1
        mbarrier.wait(bars[1].index(slot), ((turn >> 1) & 1) ^ 1)
        mbarrier.expect(bars[0].index(slot), len(own_bufs) * OWN * DIM * 2)
        for i in gl.static_range(len(own_bufs)):
            row, col = corner(head, sizes[3], places, i)
            for half in gl.static_range(2):
                at = row + tile * OWN + half * HALF
                buf = own_bufs[i].index(slot * 2 + half)
                tma.async_copy_global_to_shared(own[i], [at, col], bars[0].index(slot), buf)
        for member in range(MEMBERS):
            other_head = (head * MEMBERS + member) // GROUP
            row_a, col_a = corner(other_head, sizes[4], places, len(own_bufs))
            row_b, col_b = corner(other_head, sizes[4], places, len(own_bufs) + 1)
            code = gl.load(plan[1] + start)
            for t in range(start, stop):
                following = gl.load(plan[1] + t + 1)
                at = (code >> BITS) * OTHER
                stage = count % STAGES
                phase = ((count // STAGES) & 1) ^ 1
                mbarrier.wait(bars[3].index(stage), phase)
                full = bars[2].index(stage)
                mbarrier.expect(full, TILE_BYTES)
                tma.async_copy_global_to_shared(others[0], [row_a + at, col_a], full, other_bufs[0].index(stage))
                if HAS_VECTORS:
                    vector = other_head * sizes[4] + at
                    tma.async_copy_global_to_shared(others[2], [vector], full, other_bufs[2].index(stage))
                mbarrier.wait(bars[5].index(stage), phase)
                full = bars[4].index(stage)
                mbarrier.expect(full, TILE_BYTES)
                tma.async_copy_global_to_shared(others[1], [row_b + at, col_b], full, other_bufs[1].index(stage))
                if HAS_VECTORS:
                    vector = other_head * sizes[4] + at
                    tma.async_copy_global_to_shared(others[3], [vector], full, other_bufs[3].index(stage))
                count += 1
                code = following
        turn += 1


@gluon.jit
def give_back(bars, slot):
    """Release the own tiles of a slot for the next item, after the stores through them are complete."""
    tma.store_wait(0)
    mbarrier.arrive(bars[1].index(slot), count=1)


@gluon.jit
def store_rows(rows, row, col, buf, value):
    """Store rows by TMA through the buffer of an own tile that is not read any more."""
    buf.store(value)
    fence_async_shared()
    sync()
    tma.async_copy_shared_to_global(rows, [row, col], buf)


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
