"""Shared by the Hopper kernels: copies into rings of tiles, loads along columns, sums within a thread.

Tiles are copied by TMA from a tensor descriptor. One thread starts a copy, rows beyond the tensor's end are filled with
zeros, and a barrier in shared memory signals completion. Copies that are awaited together share a number s and the
barrier s & 1 of the two in ``copied``.

Names as in ``triton.common``; *_ring is shared memory for several tiles of keys or rows, *_tile for one.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from softplus_attention.kernels.triton.common import (
    INVERSE_BITS,
    LN2,
    LONG,
    NOWHERE,
    SHORT,
    any_extreme,
    inverse_norm,
    norm_stride,
    row_power,
    special_log2,
)


class KeyTiles(NamedTuple):
    """Source and destination of the tiles of keys and values that a block of rows sees."""

    k_ring: gl.shared_memory_descriptor
    v_ring: gl.shared_memory_descriptor
    copied: gl.shared_memory_descriptor
    K: tma.tensor_descriptor
    V: tma.tensor_descriptor
    place: gl.tuple  # sequence, head, first key
    p_norm: gl.tensor  # of the first key
    count: gl.tensor


class RowScores(NamedTuple):
    """[BM] each, for a block's rows: the factor from products to base-2 scores, and the visible keys [start, end)."""

    factor: gl.tensor
    start: gl.tensor
    end: gl.tensor


class RowWeights(NamedTuple):
    """[BM] each: u = slope * f' - offset, clamped to [0, 1], raised to the row's power."""

    slope: gl.tensor
    offset: gl.tensor
    power: gl.tensor


@gluon.jit
def mark_for_fallback(Fallback, trouble):
    """Leaves this program's block to the fallback launch: Fallback holds the number of such blocks, and then their
    indices among the blocks of all heads.

    Rows of equal scores and numbers that are not finite are rare. Handling them inside the kernels would cost every
    block, since that code needs more registers than all else.
    """
    if trouble > 0:
        gl.store(Fallback + 1 + gl.atomic_add(Fallback, 1), gl.program_id(1) + gl.num_programs(1) * own_head())


@gluon.constexpr_function
def fineness(dtype, power):
    """LOG_MODE: the short polynomial's error of 4e-4 is below the rounding of bfloat16, but not of float16. It also
    matters for some powers; see ``arguments.needs_long_polynomial``."""
    return SHORT if dtype == gl.bfloat16 and power not in (1, -1) else LONG


@gluon.jit
def own_head():
    """This program's head among those of all sequences. The grid is ``hopper.launch.grid_of``."""
    return gl.program_id(2) * gl.num_programs(0) + gl.program_id(0)


@gluon.jit
def program_position(heads, inverse):
    """This program's block, head and sequence; ``inverse`` is ``hopper.launch.inverse_of(heads)``, since a division at
    a program's start would take longer than its first loads."""
    bh = own_head()
    b = ((bh.to(gl.int64) * inverse) >> INVERSE_BITS).to(gl.int32)
    return gl.program_id(1), bh - b * heads, b


@gluon.jit
def noted_place(number, blocks, heads):
    """The same for a block marked by ``mark_for_fallback``."""
    return number % blocks, number // blocks % heads, number // (blocks * heads)


@gluon.jit
def block_of_rows(place, t_q, shared, h_kv, BM: gl.constexpr):
    """A block's first row, its head among those of all sequences, and its sequence, head and key head.

    The longest rows of a causal problem come first, so that none of them runs alone at the end.
    """
    block, head, b = place
    m = (gl.cdiv(t_q, BM) - 1 - block) * BM
    # int64, since they are multiplied by 32-bit strides.
    b, kv_head, head = b.to(gl.int64), (head // shared).to(gl.int64), head.to(gl.int64)
    return m, b * (shared * h_kv) + head, b, head, kv_head


@gluon.jit
def keys_in_sight(
    m, o_m, t_q, t_k, window, p_start, p_end,
    CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_RANGES: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """For the rows from m on: the first key that any of them sees, rounded down to a tile, and relative to it

    - ([BM], [BM]): the keys [start, end) that each row sees, none for rows beyond t_q,
    - the tiles [full_from, full_high) that all rows see completely, and [0, tiles), which hold all visible keys.

    Without window and ranges the first key is 0.
    """
    m_rows = o_m < t_q
    past = gl.minimum(m + BM, t_q)
    own = t_k - t_q + 1
    if HAS_RANGES:
        b_start = gl.load(p_start + o_m, mask=m_rows, other=0)
        b_end = gl.load(p_end + o_m, mask=m_rows, other=0)
        if CAUSAL:
            b_end = gl.minimum(b_end, o_m + own)
            if HAS_WINDOW:
                b_start = gl.maximum(b_start, o_m + own - window)
        b_end = gl.where(m_rows, gl.maximum(b_start, b_end), b_start)
        some = b_end > b_start
        high = gl.max(gl.where(some, b_end, 0), 0)
        low = gl.minimum(gl.min(gl.where(some, b_start, NOWHERE), 0), high)
        full_low = gl.max(gl.where(m_rows, b_start, 0), 0)
        full_high = gl.min(gl.where(m_rows, b_end, NOWHERE), 0)
    elif CAUSAL:
        b_end = gl.where(m_rows, gl.maximum(o_m + own, 0), 0)
        b_start = b_end * 0
        high = gl.maximum(past - 1 + own, 0)
        full_high = gl.maximum(m + own, 0)
        if HAS_WINDOW:
            b_start = gl.maximum(b_end - window, 0)
            low = gl.maximum(m + own - window, 0)
            full_low = gl.maximum(past - 1 + own - window, 0)
    else:
        b_end = gl.where(m_rows, t_k, 0)
        b_start = b_end * 0
        high = t_k
        full_high = t_k
    first = 0
    full_from = 0
    if HAS_WINDOW or HAS_RANGES:
        first = low // BN * BN
        b_start = b_start - first
        b_end = b_end - first
        high = high - first
        full_from = gl.minimum(gl.cdiv(gl.maximum(full_low - first, 0), BN), gl.cdiv(high, BN))
        full_high = gl.maximum(gl.minimum(full_high - first, high), full_from * BN)
    return first, b_start, b_end, full_from, full_high // BN, gl.cdiv(high, BN)


@gluon.jit
def rows_and_keys(
    place, Norms, Start, End, Power, t_q, t_k, shared, h_kv, window, growth, range_stride, power_strides,
    CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_RANGES: gl.constexpr, POWER: gl.constexpr,
    HAS_POWER_ROWS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """For a block of rows, with ``shared`` query heads per key head:

    - its first row, head among those of all sequences, sequence, head and key head,
    - [BM] each: its rows, how many keys each sees, its power,
    - the result of ``keys_in_sight``, and a pointer to the norm of the first of these keys.
    """
    m, bh, b, head, kv_head = block_of_rows(place, t_q, shared, h_kv, BM)
    o_m = m + gl.arange(0, BM, layout=gl.SliceLayout(1, LAYOUT))
    span = keys_in_sight(
        m, o_m, t_q, t_k, window, Start + b * range_stride, End + b * range_stride,
        CAUSAL, HAS_WINDOW, HAS_RANGES, BM, BN,
    )  # fmt: skip
    p_norm = Norms + (b * h_kv + kv_head) * norm_stride(t_k) + span[0]
    b_counts = (span[2] - span[1]).to(gl.float32)
    b_p = b_counts * 0.0 + POWER
    if POWER < 0:
        p_power = Power + b * power_strides[0] + head * power_strides[1]
        b_p = row_power(b_counts, p_power, o_m, t_q, power_strides[2], growth, POWER, HAS_POWER_ROWS)
    return (m, bh, b, head, kv_head), (o_m, b_counts, b_p), span, p_norm


@gluon.jit
def seen_keys(n, b_start, b_end, HAS_STARTS: gl.constexpr, BN: gl.constexpr, LAYOUT: gl.constexpr):
    """[BM, BN]: whether each row sees each key of the tile from n on."""
    o_n = gl.arange(0, BN, layout=gl.SliceLayout(0, LAYOUT))[None, :]  # relative to n, which is subtracted once per row
    seen = o_n < (b_end - n)[:, None]
    if HAS_STARTS:
        seen = seen & (o_n >= (b_start - n)[:, None])
    return seen


@gluon.jit
def saturated(f, slope, offset):
    """slope * f - offset, clamped to [0, 1], in one instruction; 0 for NaN."""
    return gl.inline_asm_elementwise(
        "fma.rn.sat.f32 $0, $1, $2, $3;", "=f,f,f,f", [f, slope, 0.0 - offset], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def product_layout(width):
    """The layout of a product with 64 rows: 16 for each of four warps."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])


@gluon.constexpr_function
def columns_of(width):
    """The distribution of such a product's columns over threads, as [width / 8, 8]: two neighbours of every eight."""
    registers = [[0, 1]] + [[1 << i, 0] for i in range((width // 8).bit_length() - 1)]
    lanes = [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0], [0, 0]], [], [width // 8, 8])


@gluon.jit
def load_columns(p, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """[WIDTH] from p on, along the columns of LAYOUT; p is aligned to 16 numbers.

    Loaded as [WIDTH / 8, 8], so that the address differences between a thread's loads are compile-time constants.
    """
    square: gl.constexpr = columns_of(WIDTH)
    p = gl.multiple_of(p, 16) + gl.arange(0, 8, layout=gl.SliceLayout(0, square))[None, :]
    p = p + (gl.arange(0, WIDTH // 8, layout=gl.SliceLayout(1, square)) * 8)[:, None]
    return gl.convert_layout(gl.reshape(gl.load(p), [WIDTH]), gl.SliceLayout(0, LAYOUT), assert_trivial=True)


@gluon.jit
def not_finite(x):
    """1 if any number of x [BM, BN] is not finite, else 0."""
    return gl.max(gl.max(gl.where(gl.sum(by_thread(x * 0.0), 1) == 0, 0, 1), 1), 0)


@gluon.jit
def by_thread(x):
    """[BM, BN] -> [BM, BN / 8, 8]: a reduction over the middle axis stays within each thread."""
    return gl.reshape(x, [x.shape[0], x.shape[1] // 8, 8])


@gluon.constexpr_function
def load_layout(width, num_warps):
    """Each thread holds 16 bytes of a row in half precision."""
    return gl.BlockedLayout([1, 8], [32 * 8 // width, width // 8], [num_warps, 1], [1, 0])


@gluon.constexpr_function
def norm_layout(width, num_warps):
    """Each thread holds a quarter of a row, so that summing a row takes few shuffles."""
    return gl.BlockedLayout([1, width // 4], [8, 4], [num_warps, 1], [1, 0])


@gluon.jit
def query_norms(q_tile, LAYOUT: gl.constexpr):
    """[BM], along the rows of LAYOUT: ``inverse_norm`` of each query of a tile.

    The tensor cores add up the squares, as the diagonal of the product of 16 queries with themselves. Without them it
    would take three times the instructions, and then moving the norms to the threads that hold the scores.
    """
    rows: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    count: gl.constexpr = q_tile.shape[0]
    width: gl.constexpr = q_tile.shape[1]
    by_warp: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [count // 16, 1, 1], [1, 16, 8])
    tiles = q_tile.reshape([count // 16, 16, width])
    b_left = tiles.load(gl.DotOperandLayout(0, by_warp, 2))
    b_right = tiles.permute([0, 2, 1]).load(gl.DotOperandLayout(1, by_warp, 2))
    products = mma_v2(b_left, b_right, gl.zeros([count // 16, 16, 16], gl.float32, by_warp))
    o_left = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, by_warp)))[None, :, None]
    o_right = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, by_warp)))[None, None, :]
    square = gl.sum(gl.where(o_left == o_right, products, 0.0), 2)
    square = gl.convert_layout(gl.reshape(square, [count]), rows, assert_trivial=True)
    inverse = gl.rsqrt(square)
    if any_extreme(square):
        b_q = q_tile.load(norm_layout(width, gl.num_warps())).to(gl.float32)
        inverse = gl.convert_layout(inverse_norm(b_q), rows)
    return inverse


@gluon.jit
def row_scale(score_scale, b_counts):
    """[BM]: the factor of the cosines in rows that see ``b_counts`` keys."""
    return score_scale * (special_log2(gl.maximum(b_counts, 1.0)) * LN2)


@gluon.jit
def tile_offsets(stride, ROWS: gl.constexpr, D: gl.constexpr):
    """[ROWS, D] int32: offsets of a tile's elements from its first."""
    layout: gl.constexpr = load_layout(D, gl.num_warps())
    o_rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    return o_rows[:, None] * stride + gl.arange(0, D, layout=gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def rows_of(X, b, head, first, strides):
    """Pointer to a head's row ``first``."""
    return X + b * strides[0] + head * strides[1] + first.to(gl.int64) * strides[2]


@gluon.jit
def read_tile(p, left, stride, ROWS: gl.constexpr, D: gl.constexpr):
    """[ROWS, D] from p on, zeros beyond ``left`` rows. For the few fallback blocks."""
    o_rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, load_layout(D, gl.num_warps())))
    return gl.load(p + tile_offsets(stride, ROWS, D), mask=(o_rows < left)[:, None], other=0.0)


@gluon.jit
def barriers(COUNT: gl.constexpr):
    """New barriers ``copied``: two, or one if there are only the copies 0."""
    copied = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(copied.index(i), count=1)
    return copied


@gluon.jit
def invalidate_copies(copied):
    """Must follow the last wait for any of them: from here on the compiler and the hardware may reuse their memory."""
    count: gl.constexpr = copied.shape[0]
    for i in gl.static_range(count):
        mbarrier.invalidate(copied.index(i))


@gluon.jit
def expect_copies(copied, s, ring, TILES: gl.constexpr, wanted=True):
    """Tells the barrier of copies s how many tiles of the ring's size to expect. Must precede the copies."""
    mbarrier.expect(copied.index(s & 1), TILES * ring.shape[3] * ring.shape[4] * 2, pred=wanted)


@gluon.jit
def copy_tile(copied, s, ring, slot, X, at, wanted=True):
    """Starts the copy of a tile of X into a slot of a ring, as one of the copies s; ``at`` is (sequence, head, first
    row)."""
    place = [at[0].to(gl.int32), at[1].to(gl.int32), at[2], 0]
    tma.async_copy_global_to_shared(X, place, copied.index(s & 1), ring.index(slot), pred=wanted)


@gluon.jit
def at_key(keys, n):
    """``at`` of ``copy_tile`` for the tile from the n-th key in sight on."""
    return keys.place[0], keys.place[1], keys.place[2] + n


@gluon.jit
def wait_for_copies(copied, s):
    """Waits for the copies s. Copies s + 2, which use the same barrier, must not be expected before this."""
    mbarrier.wait(copied.index(s & 1), (s >> 1) & 1)


@gluon.jit
def tile_of(ring, slot):
    """[ROWS, D]: a slot of a ring [SLOTS, 1, 1, ROWS, D], whose other axes are those of the copied tensors."""
    tile = ring.index(slot)
    return tile.reshape([tile.shape[2], tile.shape[3]])


@gluon.jit
def wrapped(n, high):
    """The first key of the next tile in order of use: the first tile follows the last."""
    return gl.where(n >= high, 0, n)


@gluon.jit
def store_tile(p, x, tile, left, stride):
    """Writes the first ``left`` rows of x [ROWS, D] from p on, through a tile of shared memory, 16 bytes per thread."""
    tile.store(x.to(tile.dtype))
    layout: gl.constexpr = load_layout(x.shape[1], gl.num_warps())
    o_rows = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, layout))
    gl.store(p + tile_offsets(stride, x.shape[0], x.shape[1]), tile.load(layout), mask=(o_rows < left)[:, None])
