"""What the Triton kernels share: the positive map, powers, which keys a row sees, tile loads.

Scores are kept in base 2: t = s * log2(e), f' = log2(1 + 2^t) = f / ln 2. Names: o_* offsets, m_* masks, p_* pointers,
b_* blocks in registers, with the shape in a comment.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
EQUAL_SCORES = tl.constexpr(2.0**-10)
NOWHERE = tl.constexpr(1 << 30)


@triton.jit
def log2_one_plus(e, PRECISE: tl.constexpr):
    """log2(1 + e) for e in [0, 1], as e times a polynomial: relative error 4e-4, or 2e-7 where PRECISE.

    Minimax in relative error, so that very negative scores keep their ratio. The special-function unit has an eighth of
    the throughput of the multiply-add units; this leaves it one call per score.
    """
    if PRECISE:
        r = 0.00754917981 * e - 0.0425670526
        r = r * e + 0.112856178
        r = r * e - 0.197118957
        r = r * e + 0.275641406
        r = r * e - 0.358408471
        r = r * e + 0.480692957
        r = r * e - 0.721340208
        r = r * e + 1.442695
    else:
        r = -0.107254397 * e + 0.36648057
        r = r * e - 0.701747244
        r = r * e + 1.44212809
    return r * e


@triton.jit
def softplus2(t, PRECISE: tl.constexpr):
    """log2(1 + 2^t)"""
    return log2_one_plus(tl.exp2(-tl.abs(t)), PRECISE) + tl.maximum(t, 0.0)


@triton.jit
def raised(u, b_p, POWER: tl.constexpr, BELOW: tl.constexpr):
    """u^(p - BELOW), where 0^0 is 0. POWER from 1 to 1023 goes by multiplication; -1 reads b_p [BM, 1]."""
    if POWER > 0:
        n: tl.constexpr = POWER - BELOW
        if n == 0:
            w = tl.where(u > 0, 1.0, 0.0)
        elif n == 15:
            u3 = u * u * u
            u6 = u3 * u3
            w = u6 * u6 * u3
        else:
            w = u
            square = u
            for i in tl.static_range(0, 10):
                if (n >> i) & 1:
                    if (n & ((1 << i) - 1)) == 0:
                        w = square
                    else:
                        w = w * square
                if (n >> (i + 1)) > 0:
                    square = square * square
    else:
        w = tl.where(u > 0, tl.exp2((b_p - BELOW) * tl.log2(u)), 0.0)
    return w


@triton.jit
def load_rows(p_base, o_rows, n_rows, stride, o_d, D: tl.constexpr, BLOCK_D: tl.constexpr, MASK_ROWS: tl.constexpr):
    """[ROWS, BLOCK_D]: zero beyond n_rows rows and D columns."""
    p = p_base + o_rows[:, None] * stride + o_d[None, :]
    if MASK_ROWS:
        if D == BLOCK_D:
            return tl.load(p, mask=o_rows[:, None] < n_rows, other=0.0)
        else:
            return tl.load(p, mask=(o_rows[:, None] < n_rows) & (o_d[None, :] < D), other=0.0)
    else:
        if D == BLOCK_D:
            return tl.load(p)
        else:
            return tl.load(p, mask=o_d[None, :] < D, other=0.0)


@triton.jit
def store_rows(p_base, b_x, o_rows, n_rows, stride, o_d, D: tl.constexpr):
    p = p_base + o_rows[:, None] * stride + o_d[None, :]
    tl.store(p, b_x.to(p_base.dtype.element_ty), mask=(o_rows[:, None] < n_rows) & (o_d[None, :] < D))


@triton.jit
def inverse_norm(b_x):
    """[ROWS, D] -> [ROWS]: 1 / ||x||, 0 for a zero vector, with no overflow or underflow of the squares."""
    size = tl.max(tl.abs(b_x), 1)
    # max drops a NaN; the sum of squares keeps it
    size = tl.where(size > 0, size, 1.0)
    x = b_x / size[:, None]
    square = tl.sum(x * x, 1)
    return tl.where(square == 0, 0.0, 1.0 / (tl.sqrt(square) * size))


@triton.jit
def key_range(
    o_m,
    t_q,
    t_k,
    window,
    p_start,
    p_end,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_RANGES: tl.constexpr,
):
    """([ROWS], [ROWS]): the keys [start, end) that each row may see; nothing for rows beyond t_q."""
    m_rows = o_m < t_q
    start = tl.zeros_like(o_m)
    end = start + t_k
    if HAS_RANGES:
        start = tl.load(p_start + o_m, mask=m_rows, other=0)
        end = tl.load(p_end + o_m, mask=m_rows, other=0)
    if CAUSAL:
        own = o_m + (t_k - t_q)
        end = tl.minimum(end, own + 1)
        if HAS_WINDOW:
            start = tl.maximum(start, own + 1 - window)
    end = tl.where(m_rows, tl.maximum(start, end), start)
    return start, end


@triton.jit
def seen_by(o_n, b_start, b_end, p_mask, stride_mask_n, HAS_MASK: tl.constexpr):
    """[BM, BN]: whether a row sees a key. p_mask [BM] points at each row of the mask."""
    seen = (o_n[None, :] >= b_start[:, None]) & (o_n[None, :] < b_end[:, None])
    if HAS_MASK:
        seen &= tl.load(p_mask[:, None] + o_n[None, :].to(tl.int64) * stride_mask_n, mask=seen, other=0) != 0
    return seen


@triton.jit
def row_power(
    b_counts, p_power, o_m, m_rows, stride_power, base, slope, n0, POWER: tl.constexpr, HAS_POWER_ROWS: tl.constexpr
):
    """[ROWS]: the power of each row, read or computed from its number of keys (a constant has slope 0)."""
    if POWER >= 0:
        return tl.zeros_like(b_counts) + POWER
    else:
        if HAS_POWER_ROWS:
            return tl.load(p_power + o_m.to(tl.int64) * stride_power, mask=m_rows, other=1.0).to(tl.float32)
        else:
            return base + slope * tl.log(tl.maximum(b_counts, n0) / n0)
