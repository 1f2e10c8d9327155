"""The forward in two passes over the keys: first the row's sum and largest score, then its weights and output."""

from __future__ import annotations

import triton
import triton.language as tl

from softplus_attention.kernels.triton_common import (
    EQUAL_SCORES,
    LOG2E,
    NOWHERE,
    inverse_norm,
    key_range,
    load_rows,
    raised,
    row_power,
    seen_by,
    softplus2,
    store_rows,
)


@triton.jit
def key_norms_kernel(K, Norms, t_k, h_kv, stride_kb, stride_kh, stride_kt, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr):
    """1 / ||k|| of every key, (B, H_kv, T_k)."""
    bh = tl.program_id(1).to(tl.int64)
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    p_k = K + (bh // h_kv) * stride_kb + (bh % h_kv) * stride_kh
    b_k = load_rows(p_k, o_n.to(tl.int64), t_k, stride_kt, tl.arange(0, BD), D, BD, True).to(tl.float32)
    tl.store(Norms + bh * t_k + o_n, inverse_norm(b_k), mask=o_n < t_k)


@triton.jit
def scores2(b_q, b_factor, p_k, p_norm, o_n, t_k, stride_kt, o_d, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr):
    """[BM, BN]: base-2 scores. The norms apply after the product of the raw vectors, which loses nothing."""
    b_k = load_rows(p_k, o_n.to(tl.int64), t_k, stride_kt, o_d, D, BD, MASKED)  # [BN, BD]
    if MASKED:
        b_norm = tl.load(p_norm + o_n, mask=o_n < t_k, other=0.0)  # [BN]
    else:
        b_norm = tl.load(p_norm + o_n)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    return b_s * b_norm[None, :] * b_factor[:, None]


@triton.jit
def first_pass(
    b_total, b_largest, b_q, b_factor, p_k, p_norm, n_low, n_high, t_k, stride_kt, o_d, b_start, b_end, p_mask, stride_mask_n,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Adds the keys [n_low, n_high) to each row's sum of f' and largest t."""
    for n in range(n_low, n_high, BN):
        o_n = n + tl.arange(0, BN)
        t = scores2(b_q, b_factor, p_k, p_norm, o_n, t_k, stride_kt, o_d, D, BD, MASKED)
        f = softplus2(t, PRECISE)
        if MASKED:
            seen = seen_by(o_n, b_start, b_end, p_mask, stride_mask_n, HAS_MASK)
            f = tl.where(seen, f, 0.0)
            t = tl.where(seen, t, float("-inf"))
        b_total += tl.sum(f, 1)
        b_largest = tl.maximum(b_largest, tl.max(t, 1))
    return b_total, b_largest


@triton.jit
def second_pass(
    b_out, b_weight, b_slope, b_offset, b_p, b_q, b_factor, p_k, p_norm, p_v, n_low, n_high, t_k, stride_kt, stride_vt, o_d, o_dv,
    b_start, b_end, p_mask, stride_mask_n,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr, PRECISE: tl.constexpr,
    POWER: tl.constexpr, MASKED: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Adds the keys [n_low, n_high) to each row's output and sum of weights."""
    for n in range(n_low, n_high, BN):
        o_n = n + tl.arange(0, BN)
        t = scores2(b_q, b_factor, p_k, p_norm, o_n, t_k, stride_kt, o_d, D, BD, MASKED)
        b_v = load_rows(p_v, o_n.to(tl.int64), t_k, stride_vt, o_dv, DV, BDV, MASKED)  # [BN, BDV]
        w = softplus2(t, PRECISE)
        if POWER != 0:
            w = raised(tl.maximum(w * b_slope[:, None] - b_offset[:, None], 0.0), b_p[:, None], POWER, 0)
        if MASKED:
            w = tl.where(seen_by(o_n, b_start, b_end, p_mask, stride_mask_n, HAS_MASK), w, 0.0)
        b_weight += tl.sum(w, 1)
        b_out = tl.dot(w.to(b_v.dtype), b_v, b_out, input_precision="ieee")
    return b_out, b_weight


@triton.jit
def careful_pass(
    b_out, b_weight, b_flat, b_slope, b_offset, b_p, b_q, b_factor, p_k, p_norm, p_v, n_low, n_high, t_k, stride_kt, stride_vt,
    o_d, o_dv, b_start, b_end, p_mask, stride_mask_n,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr, PRECISE: tl.constexpr,
    POWER: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """The second pass for blocks that hold rows of equal scores (stage 1 stands) or meet values that are not finite.

    A value that is not finite makes NaN of the rows that give it weight, and of no other row.
    """
    b_bad = tl.zeros_like(b_out)
    for n in range(n_low, n_high, BN):
        o_n = n + tl.arange(0, BN)
        t = scores2(b_q, b_factor, p_k, p_norm, o_n, t_k, stride_kt, o_d, D, BD, True)
        b_v = load_rows(p_v, o_n.to(tl.int64), t_k, stride_vt, o_dv, DV, BDV, True)
        f = softplus2(t, PRECISE)
        w = f
        if POWER != 0:
            w = raised(tl.maximum(f * b_slope[:, None] - b_offset[:, None], 0.0), b_p[:, None], POWER, 0)
            w = tl.where(b_flat[:, None], f, w)
        w = tl.where(seen_by(o_n, b_start, b_end, p_mask, stride_mask_n, HAS_MASK), w, 0.0)
        b_weight += tl.sum(w, 1)
        finite = (b_v - b_v) == 0
        b_out = tl.dot(w.to(b_v.dtype), tl.where(finite, b_v, 0.0).to(b_v.dtype), b_out, input_precision="ieee")
        some = tl.where(w != 0, 1.0, 0.0).to(b_v.dtype)
        b_bad = tl.dot(some, tl.where(finite, 0.0, 1.0).to(b_v.dtype), b_bad, input_precision="ieee")
    return tl.where(b_bad > 0, float("nan"), b_out), b_weight


@triton.jit
def forward_kernel(
    Q, K, V, Out, Norms, Total, Height, Weight, Flat,
    Start, End, Mask, Counts, Power,
    t_q, t_k, h, h_kv, window, score_scale, power_base, power_slope, power_n0,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_ob, stride_oh, stride_ot, stride_rb, stride_mb, stride_mh, stride_mm, stride_mn,
    stride_cb, stride_ch, stride_pb, stride_ph, stride_pm,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_RANGES: tl.constexpr, HAS_MASK: tl.constexpr,
    POWER: tl.constexpr, HAS_POWER_ROWS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """POWER 0 is LSSA (one pass), > 0 an integer power, -1 a power per row.

    Total = sum f' and Height = max x (0 where scores are equal) are written in LSSAR only; Weight = sum w, in LSSA sum f'.
    """
    # The longest rows of a causal problem come first, so that no multiprocessor ends with one of them alone.
    m = tl.num_programs(0) - 1 - tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    b, head = bh // h, bh % h
    kv_head = head // (h // h_kv)
    o_m = m * BM + tl.arange(0, BM)
    m_rows = o_m < t_q
    o_d, o_dv = tl.arange(0, BD), tl.arange(0, BDV)
    p_k = K + b * stride_kb + kv_head * stride_kh
    p_v = V + b * stride_vb + kv_head * stride_vh
    p_norm = Norms + (b * h_kv + kv_head) * t_k

    b_start, b_end = key_range(o_m, t_q, t_k, window, Start + b * stride_rb, End + b * stride_rb, CAUSAL, HAS_WINDOW, HAS_RANGES)
    p_mask = Mask
    if HAS_MASK:
        p_mask = Mask + b * stride_mb + head * stride_mh + tl.where(m_rows, o_m, 0).to(tl.int64) * stride_mm  # [BM]
        b_counts = tl.load(Counts + b * stride_cb + head * stride_ch + o_m, mask=m_rows, other=0).to(tl.float32)
    else:
        b_counts = (b_end - b_start).to(tl.float32)
    b_p = row_power(
        b_counts, Power + b * stride_pb + head * stride_ph, o_m, m_rows, stride_pm, power_base, power_slope, power_n0,
        POWER, HAS_POWER_ROWS,
    )  # fmt: skip

    b_q = load_rows(Q + b * stride_qb + head * stride_qh, o_m.to(tl.int64), t_q, stride_qt, o_d, D, BD, True)  # [BM, BD]
    b_factor = score_scale * LOG2E * tl.log(tl.maximum(b_counts, 1.0)) * inverse_norm(b_q.to(tl.float32))  # [BM]

    # [n_low, n_high) holds every visible key; the tiles of [full_low, full_high) are visible to all rows.
    some = b_end > b_start
    n_low = tl.min(tl.where(some, b_start, NOWHERE)) // BN * BN
    n_high = tl.max(tl.where(some, b_end, 0))
    full_low = tl.cdiv(tl.max(tl.where(m_rows, b_start, 0)), BN) * BN
    full_high = tl.min(tl.where(m_rows, b_end, NOWHERE)) // BN * BN
    if HAS_MASK:
        full_high = full_low
    if full_high <= full_low:
        full_low = n_low
        full_high = n_low

    p_row = bh * t_q + o_m
    b_flat = b_counts < 0
    b_slope = tl.zeros([BM], tl.float32)
    b_offset = b_slope
    if POWER != 0:
        b_total = tl.zeros([BM], tl.float32)
        b_largest = tl.full([BM], float("-inf"), tl.float32)
        if HAS_WINDOW or HAS_RANGES:
            b_total, b_largest = first_pass(
                b_total, b_largest, b_q, b_factor, p_k, p_norm, n_low, full_low, t_k, stride_kt, o_d, b_start, b_end, p_mask,
                stride_mn, D, BD, BN, PRECISE, True, HAS_MASK,
            )  # fmt: skip
        if not HAS_MASK:
            b_total, b_largest = first_pass(
                b_total, b_largest, b_q, b_factor, p_k, p_norm, full_low, full_high, t_k, stride_kt, o_d, b_start, b_end, p_mask,
                stride_mn, D, BD, BN, PRECISE, False, HAS_MASK,
            )  # fmt: skip
        b_total, b_largest = first_pass(
            b_total, b_largest, b_q, b_factor, p_k, p_norm, full_high, n_high, t_k, stride_kt, o_d, b_start, b_end, p_mask,
            stride_mn, D, BD, BN, PRECISE, True, HAS_MASK,
        )  # fmt: skip
        b_total = tl.where(b_counts > 0, b_total, 1.0)
        b_excess = tl.where(b_counts > 3, 1.0, 0.0)
        b_height = b_counts / b_total * softplus2(b_largest, PRECISE) - b_excess
        b_sharp = b_height > EQUAL_SCORES  # not where NaN
        b_flat = (b_counts > 0) & (b_sharp == 0)
        b_divisor = tl.where(b_sharp, b_height, 1.0)
        b_slope = b_counts / b_total / b_divisor
        b_offset = b_excess / b_divisor
        tl.store(Total + p_row, b_total, mask=m_rows)
        tl.store(Height + p_row, tl.where(b_sharp, b_height, 0.0), mask=m_rows)

    b_out = tl.zeros([BM, BDV], tl.float32)
    b_weight = tl.zeros([BM], tl.float32)
    if HAS_WINDOW or HAS_RANGES:
        b_out, b_weight = second_pass(
            b_out, b_weight, b_slope, b_offset, b_p, b_q, b_factor, p_k, p_norm, p_v, n_low, full_low, t_k, stride_kt,
            stride_vt, o_d, o_dv, b_start, b_end, p_mask, stride_mn, D, BD, DV, BDV, BN, PRECISE, POWER, True, HAS_MASK,
        )  # fmt: skip
    if not HAS_MASK:
        b_out, b_weight = second_pass(
            b_out, b_weight, b_slope, b_offset, b_p, b_q, b_factor, p_k, p_norm, p_v, full_low, full_high, t_k, stride_kt,
            stride_vt, o_d, o_dv, b_start, b_end, p_mask, stride_mn, D, BD, DV, BDV, BN, PRECISE, POWER, False, HAS_MASK,
        )  # fmt: skip
    b_out, b_weight = second_pass(
        b_out, b_weight, b_slope, b_offset, b_p, b_q, b_factor, p_k, p_norm, p_v, full_high, n_high, t_k, stride_kt,
        stride_vt, o_d, o_dv, b_start, b_end, p_mask, stride_mn, D, BD, DV, BDV, BN, PRECISE, POWER, True, HAS_MASK,
    )  # fmt: skip

    trouble = tl.max(tl.max(tl.where((b_out - b_out) == 0, 0, 1), 1))
    any_flat = tl.max(b_flat.to(tl.int32))
    if (trouble > 0) | (any_flat > 0):
        b_out, b_weight = careful_pass(
            tl.zeros([BM, BDV], tl.float32), tl.zeros([BM], tl.float32), b_flat, b_slope, b_offset, b_p, b_q, b_factor,
            p_k, p_norm, p_v, n_low, n_high, t_k, stride_kt, stride_vt, o_d, o_dv, b_start, b_end, p_mask, stride_mn,
            D, BD, DV, BDV, BN, PRECISE, POWER, HAS_MASK,
        )  # fmt: skip
        if any_flat > 0:
            tl.atomic_max(Flat + bh, 1)
    b_weight = tl.where(b_weight == 0, 1.0, b_weight)
    tl.store(Weight + p_row, b_weight, mask=m_rows)
    store_rows(Out + b * stride_ob + head * stride_oh, b_out / b_weight[:, None], o_m.to(tl.int64), t_q, stride_ot, o_dv, DV)
