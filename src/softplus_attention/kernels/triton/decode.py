"""The decode kernels: a few new rows over a long cache, with the keys of one sequence and head split among programs.

There are three kernels. The first reads K once and stores f' of every visible score, with each split's sum and maximum.
The second combines these to the terms of the whole row, and reads the rows of V that some query row gives weight. The
third adds up the splits. A program takes all query rows that share a key head (G heads times t_q positions), so each
cache row is read once.

Tiles of keys are dealt to the splits in turn, from the first visible one on: however much of the cache is filled, all
programs share the work, while the grid follows from shapes alone.

The kernels communicate through one float32 tensor, Scratch: F (f_units of SCRATCH_UNIT numbers), Total, Largest and
Weight (partial_units each), Partial.
"""

from __future__ import annotations

import triton
import triton.language as tl

from softplus_attention.kernels.triton.common import EQUAL_SCORES, NOWHERE, raised, row_power, softplus2

SCRATCH_UNIT = tl.constexpr(32)
COLUMNS = tl.constexpr(16)  # of a vector, read and multiplied at a time for precision or to save registers
# Lengths and counts are not specialized: no value of theirs recompiles a kernel.
NUMBERS = ["rows", "t_q", "t_max", "h_kv", "splits", "window", "f_units", "partial_units"]


@triton.jit
def scratch_at(Scratch, units):
    return Scratch + units.to(tl.int64) * SCRATCH_UNIT


@triton.jit
def rows_of_program(rows, t_q, h_kv, BM: tl.constexpr):
    """(b * h_kv + kv_head, b, [BM] row within its key head, [BM] head, [BM] index among the new tokens)."""
    bh = tl.program_id(1).to(tl.int64)
    o_r = tl.program_id(2) * BM + tl.arange(0, BM)
    head = (bh % h_kv) * (rows // t_q) + o_r // t_q
    return bh, bh // h_kv, o_r, head, o_r % t_q


@triton.jit
def cache_range(
    o_r, o_i, rows, p_length, p_first, t_q, t_max, window,
    HAS_LENGTHS: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """([BM], [BM]): the keys [start, end) that each row sees; empty for rows beyond the last."""
    own = t_max - t_q + o_i
    if HAS_LENGTHS:
        own = tl.load(p_length).to(tl.int32) - t_q + o_i
    start = tl.zeros_like(o_r)
    if HAS_STARTS:
        start += tl.load(p_first).to(tl.int32)
    if HAS_WINDOW:
        start = tl.maximum(start, own + 1 - window)
    start = tl.minimum(tl.maximum(start, 0), t_max)
    end = tl.minimum(own + 1, t_max)
    end = tl.where(o_r < rows, tl.maximum(start, end), start)
    return start, end


@triton.jit
def keys_of_split(b_start, b_end, BN: tl.constexpr):
    """(first key of this program's first tile, end of the keys that any of its rows sees)."""
    some = b_end > b_start
    n_low = tl.min(tl.where(some, b_start, NOWHERE)) // BN * BN
    return n_low + tl.program_id(0) * BN, tl.max(tl.where(some, b_end, 0))


@triton.jit
def inverse_size(b_x):
    """[ROWS, D] -> [ROWS]: 1 over the power of two below the largest component; multiplying by it is exact."""
    return inverse_power(tl.max(tl.abs(b_x), 1))


@triton.jit
def inverse_power(size):
    """1 over the power of two below each number >= 0."""
    size = tl.maximum(size, 2.0**-120)
    return 1.0 / (size.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def careful_squares(p_rows, m_rows, ROWS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """([ROWS], [ROWS]): ``inverse_size`` of each vector, and the sum of squares of the vector times that.

    Reads the vectors again, a few columns at a time: loading a whole tile would raise the kernel's registers from 110
    to 187 per thread.
    """
    b_largest = tl.zeros([ROWS], tl.float32)
    for column in tl.range(0, BD, COLUMNS, num_stages=1):
        b_largest = tl.maximum(b_largest, tl.max(tl.abs(some_columns(p_rows, m_rows, column, D)), 1))
    b_inverse = inverse_power(b_largest)
    b_square = tl.zeros([ROWS], tl.float32)
    for column in tl.range(0, BD, COLUMNS, num_stages=1):
        b_part = some_columns(p_rows, m_rows, column, D) * b_inverse[:, None]
        b_square += tl.sum(b_part * b_part, 1)
    return b_inverse, b_square


@triton.jit
def some_columns(p_rows, m_rows, column, D: tl.constexpr):
    """[ROWS, COLUMNS] float32"""
    o_d = column + tl.arange(0, COLUMNS)
    return tl.load(p_rows[:, None] + o_d[None, :], mask=m_rows[:, None] & (o_d < D)[None, :], other=0.0).to(tl.float32)


@triton.jit
def precise_product(
    p_q, m_q, b_q_scale, b_factor, p_keys, m_keys, b_k_scale, b_k_inverse,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """[BM, BN]: factor * (scale q) . (inverse scale k) in float32, summed by COLUMNS: a running sum of 256 products has
    several times the rounding error, which a power of 15 amplifies."""
    t = tl.zeros([BM, BN], tl.float32)
    for column in tl.range(0, BD, COLUMNS, num_stages=1):
        b_q = some_columns(p_q, m_q, column, D) * b_q_scale[:, None]
        b_k = some_columns(p_keys, m_keys, column, D) * b_k_scale[:, None] * b_k_inverse[:, None]
        # Multiplied inside the loop, since the compiler would fuse a plain dot + t into one running sum.
        t += tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * b_factor[:, None]
    return t


@triton.jit
def squares_by_product(b_k):
    """[BN, BD] -> [BN]: the diagonals of K K^T for every 16 keys. This small product costs less than converting and
    squaring the tile."""
    b_groups = tl.reshape(b_k, [b_k.shape[0] // 16, 16, b_k.shape[1]])
    b_products = tl.dot(b_groups, tl.permute(b_groups, (0, 2, 1)))  # [BN / 16, 16, 16]
    diagonal = tl.arange(0, 16)[:, None] == tl.arange(0, 16)[None, :]
    return tl.reshape(tl.sum(tl.where(diagonal[None, :, :], b_products, 0.0), 1), [b_k.shape[0]])


@triton.jit
def inverse_root(square, PRECISE: tl.constexpr):
    """1 / sqrt(square), 0 for 0."""
    if PRECISE:
        root = tl.div_rn(1.0, tl.sqrt_rn(tl.where(square == 0, 1.0, square)))
    else:
        root = tl.rsqrt(square)
    return tl.where(square == 0, 0.0, root)


@triton.jit(do_not_specialize=NUMBERS)
def scores_kernel(
    Q, K, Scratch, Lengths, Starts,
    rows, t_q, t_max, h_kv, splits, window, f_units, partial_units, score_scale, q_strides, k_strides, f_stride,
    HAS_LENGTHS: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_WINDOW: tl.constexpr, NORMALIZED_KEYS: tl.constexpr,
    WIDE: tl.constexpr, PRECISE: tl.constexpr, LOG_MODE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr, BY_PRODUCT: tl.constexpr,
):  # fmt: skip
    """F (B, H_kv, rows, f_stride): f', 0 where a row does not see the key, unwritten in tiles that no row sees.

    Total, Largest (B, H_kv, rows, splits): sum and maximum of f' over the tiles of a split. WIDE is for dtypes whose
    squares may not fit float32: vectors are scaled first. PRECISE is float32, with sums and roots as exact as the
    reference's.
    """
    bh, b, o_r, head, o_i = rows_of_program(rows, t_q, h_kv, BM)
    b_start, b_end = cache_range(
        o_r, o_i, rows, Lengths + b, Starts + b, t_q, t_max, window, HAS_LENGTHS, HAS_STARTS, HAS_WINDOW
    )
    n_first, n_high = keys_of_split(b_start, b_end, BN)
    o_d = tl.arange(0, BD)
    m_rows = o_r < rows
    p_k = K + b * k_strides[0] + (bh % h_kv) * k_strides[1]
    p_f = Scratch + (bh * rows + o_r) * f_stride  # [BM]

    p_q = Q + b * q_strides[0] + head * q_strides[1] + o_i.to(tl.int64) * q_strides[2]  # [BM]
    b_q = tl.load(p_q[:, None] + o_d[None, :], mask=m_rows[:, None] & (o_d[None, :] < D), other=0.0)  # [BM, BD]
    b_q_scale = tl.full([BM], 1.0, tl.float32)
    if WIDE:
        # Times 2^-9, so that no product of up to 256 columns with a finite key overflows.
        b_q_scale = inverse_size(b_q.to(tl.float32)) * 2.0**-9
        b_q = (b_q.to(tl.float32) * b_q_scale[:, None]).to(b_q.dtype)
    b_square = tl.sum(b_q.to(tl.float32) * b_q.to(tl.float32), 1)
    b_counts = (b_end - b_start).to(tl.float32)
    b_factor = score_scale * tl.log2(tl.maximum(b_counts, 1.0)) * inverse_root(b_square, PRECISE)  # [BM]

    b_total = tl.zeros([BM], tl.float32)
    b_largest = tl.zeros([BM], tl.float32)
    for n in tl.range(n_first, n_high, splits * BN, num_stages=STAGES):
        o_n = n + tl.arange(0, BN)
        p_keys = p_k + o_n.to(tl.int64) * k_strides[2]  # [BN]
        if PRECISE:
            m_keys = o_n < n_high
            b_k_scale = tl.full([BN], 1.0, tl.float32)
            b_k_inverse = b_k_scale
            if not NORMALIZED_KEYS:
                b_k_scale, b_key_square = careful_squares(p_keys, m_keys, BN, D, BD)
                b_k_inverse = inverse_root(b_key_square, PRECISE)
            t = precise_product(p_q, m_rows, b_q_scale, b_factor, p_keys, m_keys, b_k_scale, b_k_inverse, BM, BN, D, BD)
        else:
            m_k = o_n[:, None] < n_high
            if D != BD:
                m_k &= o_d[None, :] < D
            b_k = tl.load(p_keys[:, None] + o_d[None, :], mask=m_k, other=0.0)  # [BN, BD]
            t = tl.dot(b_q, tl.trans(b_k)) * b_factor[:, None]  # [BM, BN]
            if not NORMALIZED_KEYS:
                if BY_PRODUCT:
                    b_key_square = squares_by_product(b_k)
                else:
                    b_wide = b_k.to(tl.float32)
                    b_key_square = tl.sum(b_wide * b_wide, 1)  # [BN]
                if WIDE:
                    extreme = (b_key_square < 2.0**-100) | ((b_key_square < 2.0**100) == 0)
                    if tl.max(extreme.to(tl.int32)) > 0:
                        b_inverse, b_key_square = careful_squares(p_keys, o_n < n_high, BN, D, BD)
                        t *= b_inverse[None, :]
                t *= inverse_root(b_key_square, PRECISE)[None, :]
        if NORMALIZED_KEYS:
            # Softplus would turn -inf into 0. Not by t - t, which with a fused multiply-add may not be 0.
            t = tl.where(tl.abs(t) < float("inf"), t, float("nan"))
        seen = (o_n[None, :] >= b_start[:, None]) & (o_n[None, :] < b_end[:, None])
        f = tl.where(seen, softplus2(t, LOG_MODE), 0.0)
        b_total += tl.sum(f, 1)
        b_largest = tl.maximum(b_largest, tl.max(f, 1))
        tl.store(p_f[:, None] + o_n[None, :], f, mask=m_rows[:, None])

    o_partial = (bh * rows + o_r) * splits + tl.program_id(0)
    tl.store(scratch_at(Scratch, f_units) + o_partial, b_total, mask=m_rows)
    tl.store(scratch_at(Scratch, f_units + partial_units) + o_partial, b_largest, mask=m_rows)


@triton.jit
def weights_of(
    p_f, o_n, m_rows, b_pivot, b_slope, b_bias, b_flat, b_least, b_p, POWER: tl.constexpr, LOG_MODE: tl.constexpr
):
    """[BR, BN]: w relative to the row's largest, 0 if negligible. A NaN stays."""
    f = tl.load(p_f[:, None] + o_n[None, :], mask=m_rows[:, None], other=0.0)
    w = (f - b_pivot[:, None]) * b_slope[:, None] + b_bias[:, None]
    if POWER != 0:
        # Not tl.maximum, which turns NaN into 0.
        w = tl.where(b_flat[:, None], w, raised(tl.where(w < 0, 0.0, w), b_p[:, None], POWER, 0, LOG_MODE))
    return tl.where(w <= b_least[:, None], 0.0, w)


@triton.jit
def load_values(p_v, w, o_n, v_stride, o_dv, DV: tl.constexpr, BDV: tl.constexpr):
    """[BN, BDV]: the values that some row gives weight; the others are not loaded."""
    m_v = (tl.max((w != 0).to(tl.int32), 0) > 0)[:, None]
    if DV != BDV:
        m_v &= o_dv[None, :] < DV
    return tl.load(p_v + o_n.to(tl.int64)[:, None] * v_stride + o_dv[None, :], mask=m_v, other=0.0)


@triton.jit
def repeated(w, BM: tl.constexpr):
    """[BR, BN] -> [BM, BN]: rows repeated, since a matrix product needs at least 16."""
    if w.shape[0] < BM:
        w = tl.broadcast_to(w[None, :, :], [BM // w.shape[0], w.shape[0], w.shape[1]])
        w = tl.reshape(w, [BM, w.shape[2]])
    return w


@triton.jit(do_not_specialize=NUMBERS)
def values_kernel(
    V, Scratch, Lengths, Starts, Power,
    rows, t_q, t_max, h_kv, splits, window, f_units, partial_units, negligible, growth, v_strides, power_strides,
    f_stride, HAS_LENGTHS: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_WINDOW: tl.constexpr, POWER: tl.constexpr,
    HAS_POWER_ROWS: tl.constexpr, OFFSET: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, BR: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, LIFT: tl.constexpr, STAGES: tl.constexpr,
    LOG_MODE: tl.constexpr,
):  # fmt: skip
    """Weight (B, H_kv, rows, splits): sum w. Partial (B, H_kv, rows, splits, DV): sum w v, undefined where Weight is 0.
    A program has BR rows, padded to BM in matrix products.

    POWER 0 is LSSA, > 0 an integer power, -1 a power per row. w <= 1 is multiplied by LIFT before it is rounded for the
    product, so that float16 can represent the weight of one key among a million.
    """
    bh, b, o_r, head, o_i = rows_of_program(rows, t_q, h_kv, BR)
    b_start, b_end = cache_range(
        o_r, o_i, rows, Lengths + b, Starts + b, t_q, t_max, window, HAS_LENGTHS, HAS_STARTS, HAS_WINDOW
    )
    n_first, n_high = keys_of_split(b_start, b_end, BN)
    m_rows = o_r < rows
    o_row = bh * rows + o_r
    Total = scratch_at(Scratch, f_units)
    Largest = scratch_at(Scratch, f_units + partial_units)
    p_weight = scratch_at(Scratch, f_units + 2 * partial_units) + o_row * splits + tl.program_id(0)
    if n_first >= n_high:
        tl.store(p_weight, tl.zeros([BR], tl.float32), mask=m_rows)
        return

    b_counts = (b_end - b_start).to(tl.float32)
    p_power = Power + b * power_strides[0] + head * power_strides[1] + o_i.to(tl.int64) * power_strides[2]  # [BR]
    b_p = row_power(b_counts, p_power, o_r, rows, 0, growth, POWER, HAS_POWER_ROWS)
    b_totals = tl.zeros([BR, BS], tl.float32)
    b_tops = tl.zeros([BR, BS], tl.float32)
    for s in tl.range(0, splits, BS, num_stages=1):
        o_s = s + tl.arange(0, BS)
        o_partial = o_row[:, None] * splits + o_s[None, :]  # [BR, BS]
        m_partial = m_rows[:, None] & (o_s[None, :] < splits)
        b_totals += tl.load(Total + o_partial, mask=m_partial, other=0.0)
        b_tops = tl.maximum(b_tops, tl.load(Largest + o_partial, mask=m_partial, other=0.0))
    b_total = tl.sum(b_totals, 1)
    b_largest = tl.max(b_tops, 1)

    # w before its power is f / largest if nothing is subtracted, else x / max x = 1 + (f - largest) * slope, which is
    # exactly 1 at the largest and precise near it.
    b_flat = b_counts < 0
    b_slope = 1.0 / tl.where(b_counts > 0, b_largest, 1.0)
    b_pivot = tl.zeros([BR], tl.float32)
    b_bias = b_pivot
    if POWER != 0 and OFFSET:
        b_scale = b_counts / tl.where(b_counts > 0, b_total, 1.0)
        excess = b_counts > 3
        b_height = b_scale * b_largest - tl.where(excess, 1.0, 0.0)
        b_sharp = b_height > EQUAL_SCORES  # not where NaN
        b_flat = b_sharp == 0
        lifted = b_sharp & excess
        b_slope = tl.where(lifted, b_scale / tl.where(lifted, b_height, 1.0), b_slope)
        b_pivot = tl.where(lifted, b_largest, 0.0)
        b_bias = tl.where(lifted, 1.0, 0.0)
    b_least = negligible / tl.maximum(b_counts, 1.0)

    o_dv = tl.arange(0, BDV)
    p_v = V + b * v_strides[0] + (bh % h_kv) * v_strides[1]
    p_f = Scratch + o_row * f_stride  # [BR]
    b_weight = tl.zeros([BR], tl.float32)
    b_out = tl.zeros([BM, BDV], tl.float32)
    for n in tl.range(n_first, n_high, splits * BN, num_stages=STAGES):
        o_n = n + tl.arange(0, BN)
        w = weights_of(p_f, o_n, m_rows, b_pivot, b_slope, b_bias, b_flat, b_least, b_p, POWER, LOG_MODE)
        b_weight += tl.sum(w, 1)
        b_v = load_values(p_v, w, o_n, v_strides[2], o_dv, DV, BDV)
        b_out = tl.dot(repeated((w * LIFT).to(b_v.dtype), BM), b_v, b_out, input_precision="ieee")

    unspoilt = (b_out - b_out) == 0
    if tl.max(tl.max(tl.where(unspoilt, 0, 1), 1)) > 0:
        # A value that is not finite gives NaN only in the rows that give it weight.
        b_again = tl.zeros([BM, BDV], tl.float32)
        b_bad = tl.zeros([BM, BDV], tl.float32)
        for n in tl.range(n_first, n_high, splits * BN, num_stages=1):
            for part in tl.range(0, BN, 16, num_stages=1):  # needs no more registers than the usual case
                o_n = n + part + tl.arange(0, 16)
                w = weights_of(p_f, o_n, m_rows, b_pivot, b_slope, b_bias, b_flat, b_least, b_p, POWER, LOG_MODE)
                b_v = load_values(p_v, w, o_n, v_strides[2], o_dv, DV, BDV)
                finite = (b_v - b_v) == 0
                b_clean = tl.where(finite, b_v, 0.0).to(b_v.dtype)
                b_again = tl.dot(repeated((w * LIFT).to(b_v.dtype), BM), b_clean, b_again, input_precision="ieee")
                some = tl.where(w != 0, 1.0, 0.0).to(b_v.dtype)
                b_bad = tl.dot(
                    repeated(some, BM), tl.where(finite, 0.0, 1.0).to(b_v.dtype), b_bad, input_precision="ieee"
                )
        b_out = tl.where(unspoilt, b_out, tl.where(b_bad > 0, float("nan"), b_again))

    tl.store(p_weight, b_weight, mask=m_rows)
    o_m = tl.arange(0, BM)
    o_row = bh * rows + tl.program_id(2) * BR + o_m
    p_out = scratch_at(Scratch, f_units + 3 * partial_units) + (o_row * splits + tl.program_id(0)) * DV  # [BM]
    m_out = ((o_m < BR) & (tl.program_id(2) * BR + o_m < rows))[:, None] & (o_dv[None, :] < DV)
    tl.store(p_out[:, None] + o_dv[None, :], b_out * (1.0 / LIFT), mask=m_out)


@triton.jit(do_not_specialize=NUMBERS)
def combine_kernel(
    Scratch, Out, rows, t_q, h_kv, splits, f_units, partial_units, out_strides,
    DV: tl.constexpr, BDV: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Out (B, H, T_q, DV): one program per row adds up the splits."""
    row = tl.program_id(0).to(tl.int64)
    bh, r = row // rows, row % rows
    head = (bh % h_kv) * (rows // t_q) + r // t_q
    o_dv = tl.arange(0, BDV)
    Weight = scratch_at(Scratch, f_units + 2 * partial_units)
    Partial = scratch_at(Scratch, f_units + 3 * partial_units)
    b_weight = tl.zeros([BS], tl.float32)
    b_out = tl.zeros([BS, BDV], tl.float32)
    for s in range(0, splits, BS):
        o_s = row * splits + s + tl.arange(0, BS)
        b_w = tl.load(Weight + o_s, mask=o_s < (row + 1) * splits, other=0.0)
        b_weight += b_w
        m_out = (b_w != 0)[:, None] & (o_dv[None, :] < DV)
        b_out += tl.load(Partial + o_s[:, None] * DV + o_dv[None, :], mask=m_out, other=0.0)
    weight = tl.sum(b_weight, 0)
    b_row = tl.sum(b_out, 0) / tl.where(weight == 0, 1.0, weight)
    p_out = Out + (bh // h_kv) * out_strides[0] + head * out_strides[1] + (r % t_q) * out_strides[2]
    tl.store(p_out + o_dv, b_row.to(Out.dtype.element_ty), mask=o_dv < DV)


@triton.jit(do_not_specialize=["rows", "heads", "t"])
def unit_kernel(X, Out, rows, heads, t, x_strides, out_strides, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr):
    """Out = X / ||X|| for vectors (B, H, T, D), 0 for a zero vector: the keys of a cache."""
    o_r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    batch, head, i = o_r // (heads * t), o_r // t % heads, o_r % t
    o_d = tl.arange(0, BD)
    m = (o_r < rows)[:, None] & (o_d < D)[None, :]
    p_x = X + batch * x_strides[0] + head * x_strides[1] + i * x_strides[2]
    p_out = Out + batch * out_strides[0] + head * out_strides[1] + i * out_strides[2]
    b_x = tl.load(p_x[:, None] + o_d[None, :], mask=m, other=0.0).to(tl.float32)
    b_x *= inverse_size(b_x)[:, None]
    b_length = tl.sqrt_rn(tl.sum(b_x * b_x, 1))
    b_unit = tl.div_rn(b_x, tl.where(b_length == 0, 1.0, b_length)[:, None])
    tl.store(p_out[:, None] + o_d[None, :], b_unit.to(Out.dtype.element_ty), mask=m)
