"""Shared by the Triton kernels: the positive map, powers, visible keys, tile loads.

Scores are kept in base 2: t = s * log2(e), f' = log2(1 + 2^t) = f / ln 2. Names: o_* offsets, m_* masks, p_* pointers,
b_* blocks in registers, with the shape in a comment; *_strides are those of batch, head and token.

LOG_MODE is the precision of logarithms: SHORT, LONG or SERIES. PRECISE is float32: vectors are normalised before the
product and the steps follow the reference. In half precision the norms are applied after the product of the raw
vectors, which loses no precision, and steps are fused to save work.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import triton
import triton.language as tl

from softplus_attention import reference
from softplus_attention.kernels import arguments

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
EQUAL_SCORES = tl.constexpr(reference.EQUAL_SCORES)
NOWHERE = tl.constexpr(1 << 30)
NORM_BLOCK = tl.constexpr(arguments.NORM_BLOCK)
ROW_BLOCK = tl.constexpr(arguments.ROW_BLOCK)
INVERSE_BITS = tl.constexpr(arguments.INVERSE_BITS)
FALLBACK_PROGRAMS = tl.constexpr(arguments.FALLBACK_PROGRAMS)
SHORT = tl.constexpr(arguments.SHORT)
LONG = tl.constexpr(arguments.LONG)
SERIES = tl.constexpr(arguments.SERIES)
MIN_EXPONENT = tl.constexpr(-126.0)
MIN_NORMAL = tl.constexpr(2.0**-126)  # the special functions treat smaller numbers as 0
LARGEST_LIFTED = tl.constexpr(0.125)
LARGEST_LIFT = tl.constexpr(2.0**60)
# For squared norms between these no square overflows or underflows.
SMALLEST_SQUARE = tl.constexpr(2.0**-60)
LARGEST_SQUARE = tl.constexpr(2.0**100)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


class Keys(NamedTuple):
    """Keys and values of one head: pointers, their number, and token strides."""

    k: tl.tensor
    v: tl.tensor
    norm: tl.tensor
    count: tl.tensor
    k_stride: tl.tensor
    v_stride: tl.tensor


class RowRange(NamedTuple):
    """The keys that a block of rows may see: [BM] ranges, [BM] pointers to the mask's rows, and its key stride."""

    start: tl.tensor
    end: tl.tensor
    p_mask: tl.tensor
    mask_stride: tl.tensor


class Sharpening(NamedTuple):
    """[BM] each: u = relu(slope * f' - offset), times inverse_height if PRECISE, raised to the row's power."""

    slope: tl.tensor
    offset: tl.tensor
    inverse_height: tl.tensor
    power: tl.tensor


@triton.jit
def special_log2(x):
    """log2(x) for x >= 0 in one instruction, with an error of 2^-22: absolute between 1/2 and 2, else relative.
    Triton's log2 takes twenty instructions."""
    if INTERPRETED:
        y = tl.log2(x)
    else:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def special_inverse(x):
    """1 / x in one instruction, to one ulp; x below 2^-126 counts as 0. Triton's division takes ten instructions."""
    if INTERPRETED:
        y = 1.0 / x
    else:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def log2_one_plus(e, LOG_MODE: tl.constexpr):
    """log2(1 + e) for e in [0, 1], exact in relative terms for small e.

    The special-function unit has an eighth of the throughput of the multiply-add units. With polynomials (minimax in
    relative error) it is called once per score. SERIES is the series of 2 atanh(z), z = e / (2 + e).
    """
    if LOG_MODE == SERIES:
        z = e / (2.0 + e)
        y = z * z
        r = 0.221953083 * y + 0.262308189
        r = r * y + 0.320598898
        r = r * y + 0.412198583
        r = r * y + 0.577078016
        r = r * y + 0.961796694
        r = r * y + 2.88539008
        return r * z
    elif LOG_MODE == LONG:
        r = 0.0204011854 * e - 0.0957975462
        r = r * e + 0.215284541
        r = r * e - 0.339089036
        r = r * e + 0.477668375
        r = r * e - 0.721159458
        r = r * e + 1.44269323
        return r * e
    else:
        r = -0.107254397 * e + 0.36648057
        r = r * e - 0.701747244
        r = r * e + 1.44212809
        return r * e


@triton.jit
def softplus2(t, LOG_MODE: tl.constexpr):
    """log2(1 + 2^t)"""
    # Times -1, not minus: the compiler folds it into the special-function call; 0 - x would be an extra instruction.
    return log2_one_plus(tl.exp2(tl.abs(t) * -1.0), LOG_MODE) + tl.maximum(t, 0.0)


@triton.jit
def norm_stride(t_k):
    """Inverse norms of a head's keys are padded to whole blocks, so that loading a tile needs no mask."""
    return tl.cdiv(t_k, NORM_BLOCK) * NORM_BLOCK


@triton.jit
def score_factor(b_scale, b_inverse):
    """[BM]: the factor from q . k to a base-2 score, without the key's norm. All kernels must round in the same order:
    the backward uses the forward's sums, and the power would amplify any difference between their scores."""
    return b_scale * LOG2E * b_inverse


@triton.jit
def excess(f, sharpening, PRECISE: tl.constexpr, OFFSET: tl.constexpr):
    """[BM, BN]: u, a key's excess over the row's average (over 0 without OFFSET)."""
    u = f * sharpening.slope[:, None]
    if OFFSET:
        u = tl.maximum(u - sharpening.offset[:, None], 0.0)
    if PRECISE:
        u = u * sharpening.inverse_height[:, None]
    return u


@triton.jit
def scores2(b_q, b_k, b_norm, b_factor, PRECISE: tl.constexpr):
    """[BM, BN]: base-2 scores; if PRECISE, b_q is already multiplied by the row's factor and b_k is normalised."""
    t = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    if not PRECISE:
        t = t * b_norm[None, :] * b_factor[:, None]
    return t


@triton.jit
def raised(u, b_p, POWER: tl.constexpr, BELOW: tl.constexpr, LOG_MODE: tl.constexpr):
    """u^(p - BELOW), with 0^0 = 0. POWER from 1 to 1023 is computed by multiplication; -1 reads b_p [BM, 1]."""
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
    elif LOG_MODE == SERIES:
        w = tl.where(u == 0, 0.0, tl.exp2((b_p - BELOW) * tl.log2(u)))  # a NaN stays one
    else:
        w = tl.exp2((b_p - BELOW) * special_log2(u))
        if BELOW != 0:  # p may be 1, and 0 * log(0) is NaN
            w = tl.where(u >= MIN_NORMAL, w, 0.0)
    return w


@triton.jit
def load_rows(p_base, o_rows, n_rows, stride, D: tl.constexpr, BD: tl.constexpr, MASK_ROWS: tl.constexpr):
    """[ROWS, BD]: zero beyond n_rows rows and D columns."""
    o_d = tl.arange(0, BD)
    p = p_base + o_rows.to(tl.int64)[:, None] * stride + o_d[None, :]
    if MASK_ROWS:
        if D == BD:
            return tl.load(p, mask=o_rows[:, None] < n_rows, other=0.0)
        else:
            return tl.load(p, mask=(o_rows[:, None] < n_rows) & (o_d[None, :] < D), other=0.0)
    else:
        if D == BD:
            return tl.load(p)
        else:
            return tl.load(p, mask=o_d[None, :] < D, other=0.0)


@triton.jit
def load_vector(p_base, o_rows, n_rows, MASK_ROWS: tl.constexpr):
    """[ROWS]: zero beyond n_rows."""
    if MASK_ROWS:
        return tl.load(p_base + o_rows, mask=o_rows < n_rows, other=0.0)
    else:
        return tl.load(p_base + o_rows)


@triton.jit
def load_keys(keys, o_n, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr, PRECISE: tl.constexpr):
    """([BN, BD], [BN]): keys, normalised if PRECISE, and their inverse norms."""
    b_k = load_rows(keys.k, o_n, keys.count, keys.k_stride, D, BD, MASKED)
    b_norm = load_vector(keys.norm, o_n, keys.count, MASKED)
    if PRECISE:
        b_k = b_k * b_norm[:, None]
    return b_k, b_norm


@triton.jit
def finite_rows(b_x):
    """[ROWS, D] with every row that holds a NaN or Inf set to 0, since 0 * NaN is NaN in a matrix product."""
    # Not x - x == 0: if x is itself a product, the compiler fuses the two, and a rounding error remains.
    spoilt = tl.max(tl.where(tl.abs(b_x) < float("inf"), 0, 1), 1)
    return tl.where(spoilt[:, None] > 0, 0.0, b_x).to(b_x.dtype)


@triton.jit
def store_rows(p_base, b_x, o_rows, n_rows, stride, D: tl.constexpr, BD: tl.constexpr):
    o_d = tl.arange(0, BD)
    p = p_base + o_rows.to(tl.int64)[:, None] * stride + o_d[None, :]
    tl.store(p, b_x.to(p_base.dtype.element_ty), mask=(o_rows[:, None] < n_rows) & (o_d[None, :] < D))


@triton.jit
def any_extreme(b_square):
    """Whether any of the sums of squares [ROWS] may have overflowed or underflowed, or is 0."""
    return tl.min(((b_square > SMALLEST_SQUARE) & (b_square < LARGEST_SQUARE)).to(tl.int32), 0) == 0


@triton.jit
def inverse_norm(b_x):
    """[ROWS, D] -> [ROWS]: 1 / ||x||, 0 for a zero vector, with no overflow or underflow of the squares; NaN if x is
    not finite."""
    square = tl.sum(b_x * b_x, 1)
    inverse = 1.0 / tl.sqrt(square)
    if any_extreme(square):
        size = tl.max(tl.abs(b_x), 1)  # drops a NaN; the sum of squares keeps it
        # A power of two near 1 / size, at least 2^-126: the products are exact, so the result is the same.
        exponent = tl.minimum(size.to(tl.int32, bitcast=True) & 0x7F800000, 0x7E800000)
        scale = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
        x = b_x * scale[:, None]
        square = tl.sum(x * x, 1)
        inverse = tl.where(square == 0, 0.0, scale / tl.sqrt(square) + (square - square))
    return inverse


@triton.jit
def row_lift(b_bound):
    """[BM]: a factor >= 1 for a row's sigmoids before they are rounded to float16, whose smallest number is 6e-8. No
    sigmoid exceeds ``b_bound``: the row's largest f' (LSSAR), or the sum of f' (LSSA, which does not compute the
    largest). The products stay below LARGEST_LIFTED, since they are divided by |k| afterwards."""
    return tl.minimum(tl.maximum(1.0 / b_bound * LARGEST_LIFTED, 1.0), LARGEST_LIFT)


@triton.jit
def key_range(
    o_m, t_q, t_k, window, p_start, p_end, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_RANGES: tl.constexpr
):
    """([BM], [BM]): the keys [start, end) that each row may see; empty for rows beyond t_q."""
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
    return start, tl.where(m_rows, tl.maximum(start, end), start)


@triton.jit
def mask_rows(p_mask, o_m, t_q, row_stride, HAS_MASK: tl.constexpr):
    """[BM] pointers to the rows of a head's mask; the plain pointer without a mask."""
    if HAS_MASK:
        return p_mask + tl.where(o_m < t_q, o_m, 0).to(tl.int64) * row_stride
    else:
        return p_mask


@triton.jit
def seen_by(o_n, span, HAS_MASK: tl.constexpr):
    """[BM, BN]: whether each row sees each key."""
    seen = (o_n[None, :] >= span.start[:, None]) & (o_n[None, :] < span.end[:, None])
    if HAS_MASK:
        p = span.p_mask[:, None] + o_n[None, :].to(tl.int64) * span.mask_stride
        seen &= tl.load(p, mask=seen, other=0) != 0
    return seen


@triton.jit
def count_keys(span, p_counts, o_m, t_q, HAS_MASK: tl.constexpr):
    """[BM]: N_i; with a mask it is counted before the launch."""
    if HAS_MASK:
        return tl.load(p_counts + o_m, mask=o_m < t_q, other=0).to(tl.float32)
    else:
        return (span.end - span.start).to(tl.float32)


@triton.jit
def key_regions(span, m_rows, BN: tl.constexpr, HAS_MASK: tl.constexpr):
    """(low, full_low, full_high, high): [low, high) holds every visible key, and the tiles of [full_low, full_high) are
    visible to all rows. If that middle part is empty, the last part covers everything."""
    some = span.end > span.start
    low = tl.min(tl.where(some, span.start, NOWHERE)) // BN * BN
    high = tl.max(tl.where(some, span.end, 0))
    full_low = tl.cdiv(tl.max(tl.where(m_rows, span.start, 0)), BN) * BN
    full_high = tl.min(tl.where(m_rows, span.end, NOWHERE)) // BN * BN
    if HAS_MASK:
        full_high = full_low
    if full_high <= full_low:
        full_low = low
        full_high = low
    return low, full_low, full_high, high


@triton.jit
def row_power(b_counts, p_power, o_m, t_q, power_stride, growth, POWER: tl.constexpr, HAS_POWER_ROWS: tl.constexpr):
    """[BM]: the power of each row, loaded or computed from its number of keys; growth is (base, slope, n0)."""
    if POWER >= 0:
        return tl.zeros_like(b_counts) + POWER
    else:
        if HAS_POWER_ROWS:
            return tl.load(p_power + o_m.to(tl.int64) * power_stride, mask=o_m < t_q, other=1.0).to(tl.float32)
        else:
            return growth[0] + growth[1] * tl.log(tl.maximum(b_counts, growth[2]) / growth[2])
