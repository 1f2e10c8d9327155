"""The backward in two kernels without atomics: dQ row by row, which also finds each row's terms, then dK and dV key by key.

ds_ij = sigmoid(s_ij) * (N_i / R_i) * (alpha_i g_ij - eps_i) with g_ij = u_ij^(p-1) (dP_ij - delta_i). The row term eps_i is a sum
over the row's own g, known only at the end of the row: the dQ kernel therefore keeps sum sigmoid g k and sum sigmoid k apart.
"""

from __future__ import annotations

import triton
import triton.language as tl

from softplus_attention.kernels.triton_common import (
    LN2,
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
def dq_pass(
    b_steep, b_even, b_sum, b_dp, b_q, b_do, b_delta, b_factor, b_slope, b_offset, b_flat, b_p,
    p_k, p_norm, p_v, n_low, n_high, t_k, stride_kt, stride_vt, o_d, o_dv, b_start, b_end, p_mask, stride_mask_n,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr, PRECISE: tl.constexpr,
    POWER: tl.constexpr, POWER_GRAD: tl.constexpr, MASKED: tl.constexpr, HAS_MASK: tl.constexpr, FLAT_ROWS: tl.constexpr,
):  # fmt: skip
    """Adds the keys [n_low, n_high) to sum sigmoid g k, sum sigmoid k, sum g and the power's gradient of each row."""
    for n in range(n_low, n_high, BN):
        o_n = n + tl.arange(0, BN)
        b_k = load_rows(p_k, o_n.to(tl.int64), t_k, stride_kt, o_d, D, BD, MASKED)  # [BN, BD]
        b_v = load_rows(p_v, o_n.to(tl.int64), t_k, stride_vt, o_dv, DV, BDV, MASKED)  # [BN, BDV]
        if MASKED:
            b_norm = tl.load(p_norm + o_n, mask=o_n < t_k, other=0.0)  # [BN]
        else:
            b_norm = tl.load(p_norm + o_n)
        t = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * b_norm[None, :] * b_factor[:, None]  # [BM, BN]
        g = tl.dot(b_do, tl.trans(b_v), input_precision="ieee") - b_delta[:, None]
        f = softplus2(t, PRECISE)
        sigma = tl.exp2(t - f) * b_norm[None, :]
        if MASKED:
            seen = seen_by(o_n, b_start, b_end, p_mask, stride_mask_n, HAS_MASK)
            sigma = tl.where(seen, sigma, 0.0)
        if POWER != 0:
            u = tl.maximum(f * b_slope[:, None] - b_offset[:, None], 0.0)
            if MASKED:
                u = tl.where(seen, u, 0.0)
            steepness = raised(u, b_p[:, None], POWER, 1)
            if POWER_GRAD:
                b_dp += tl.sum(tl.where((u > 0) & (b_flat[:, None] == 0), steepness * u * tl.log2(u) * g, 0.0), 1)
            if FLAT_ROWS:
                steepness = tl.where(b_flat[:, None], 1.0, steepness)
            g = g * steepness
            b_sum += tl.sum(g, 1)
            b_even = tl.dot(sigma.to(b_k.dtype), b_k, b_even, input_precision="ieee")
        b_steep = tl.dot((sigma * g).to(b_k.dtype), b_k, b_steep, input_precision="ieee")
    return b_steep, b_even, b_sum, b_dp


@triton.jit
def dq_kernel(
    Q, K, V, Out, GradOut, Norms, Total, Height, Weight, Flat, Start, End, Mask, Counts, Power,
    GradQ, GradPower, Rows,
    t_q, t_k, h, h_kv, n_rows, window, score_scale, power_base, power_slope, power_n0,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_ob, stride_oh, stride_ot, stride_gb, stride_gh, stride_gt, stride_dqb, stride_dqh, stride_dqt,
    stride_rb, stride_mb, stride_mh, stride_mm, stride_mn, stride_cb, stride_ch, stride_pb, stride_ph, stride_pm,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_RANGES: tl.constexpr, HAS_MASK: tl.constexpr,
    POWER: tl.constexpr, HAS_POWER_ROWS: tl.constexpr, POWER_GRAD: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISE: tl.constexpr,
):  # fmt: skip
    m = tl.num_programs(0) - 1 - tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    b, head = bh // h, bh % h
    kv_head = head // (h // h_kv)
    o_m = m * BM + tl.arange(0, BM)
    m_rows = o_m < t_q
    o_d, o_dv = tl.arange(0, BD), tl.arange(0, BDV)
    o_rows = o_m.to(tl.int64)
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

    b_q = load_rows(Q + b * stride_qb + head * stride_qh, o_rows, t_q, stride_qt, o_d, D, BD, True)  # [BM, BD]
    b_do = load_rows(GradOut + b * stride_gb + head * stride_gh, o_rows, t_q, stride_gt, o_dv, DV, BDV, True)  # [BM, BDV]
    b_o = load_rows(Out + b * stride_ob + head * stride_oh, o_rows, t_q, stride_ot, o_dv, DV, BDV, True)
    b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)  # [BM]
    b_inverse = inverse_norm(b_q.to(tl.float32))
    b_scale = score_scale * tl.log(tl.maximum(b_counts, 1.0))
    b_factor = b_scale * LOG2E * b_inverse

    p_row = bh * t_q + o_m
    b_weight = tl.load(Weight + p_row, mask=m_rows, other=1.0)
    b_least = tl.maximum(b_counts, 1.0)
    b_flat = b_counts < 0
    b_offset = tl.zeros([BM], tl.float32)
    b_excess = tl.where(b_counts > 3, 1.0, 0.0)
    if POWER == 0:
        b_ratio = b_counts / (b_weight * LN2)  # N / R
        b_slope = 1.0 / b_weight
        b_alpha = 1.0 / b_least
    else:
        b_total = tl.load(Total + p_row, mask=m_rows, other=1.0)
        b_height = tl.load(Height + p_row, mask=m_rows, other=1.0)
        b_ratio = b_counts / (b_total * LN2)
        b_flat = b_height == 0
        # u is scaled so that u^p is the weight itself: u / W^(1/p).
        b_root = tl.exp2(-tl.log2(b_weight) / b_p)
        b_divisor = tl.where(b_flat, 1.0, b_height)
        b_slope = tl.where(b_flat, 1.0 / b_total, b_counts / b_total / b_divisor * b_root)
        b_offset = tl.where(b_flat, 0.0, b_excess / b_divisor * b_root)
        b_alpha = tl.where(b_flat, 1.0 / b_least, b_p * b_root / b_divisor)

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

    b_steep = tl.zeros([BM, BD], tl.float32)
    b_even = tl.zeros([BM, BD], tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    b_dp = tl.zeros([BM], tl.float32)
    has_flat = 0
    if POWER != 0:
        has_flat = tl.load(Flat + bh)
    if has_flat > 0:
        b_steep, b_even, b_sum, b_dp = dq_pass(
            b_steep, b_even, b_sum, b_dp, b_q, b_do, b_delta, b_factor, b_slope, b_offset, b_flat, b_p, p_k, p_norm, p_v,
            n_low, n_high, t_k, stride_kt, stride_vt, o_d, o_dv, b_start, b_end, p_mask, stride_mn,
            D, BD, DV, BDV, BN, PRECISE, POWER, POWER_GRAD, True, HAS_MASK, True,
        )  # fmt: skip
    else:
        if HAS_WINDOW or HAS_RANGES:
            b_steep, b_even, b_sum, b_dp = dq_pass(
                b_steep, b_even, b_sum, b_dp, b_q, b_do, b_delta, b_factor, b_slope, b_offset, b_flat, b_p, p_k, p_norm, p_v,
                n_low, full_low, t_k, stride_kt, stride_vt, o_d, o_dv, b_start, b_end, p_mask, stride_mn,
                D, BD, DV, BDV, BN, PRECISE, POWER, POWER_GRAD, True, HAS_MASK, False,
            )  # fmt: skip
        if not HAS_MASK:
            b_steep, b_even, b_sum, b_dp = dq_pass(
                b_steep, b_even, b_sum, b_dp, b_q, b_do, b_delta, b_factor, b_slope, b_offset, b_flat, b_p, p_k, p_norm, p_v,
                full_low, full_high, t_k, stride_kt, stride_vt, o_d, o_dv, b_start, b_end, p_mask, stride_mn,
                D, BD, DV, BDV, BN, PRECISE, POWER, POWER_GRAD, False, HAS_MASK, False,
            )  # fmt: skip
        b_steep, b_even, b_sum, b_dp = dq_pass(
            b_steep, b_even, b_sum, b_dp, b_q, b_do, b_delta, b_factor, b_slope, b_offset, b_flat, b_p, p_k, p_norm, p_v,
            full_high, n_high, t_k, stride_kt, stride_vt, o_d, o_dv, b_start, b_end, p_mask, stride_mn,
            D, BD, DV, BDV, BN, PRECISE, POWER, POWER_GRAD, True, HAS_MASK, False,
        )  # fmt: skip

    b_epsilon = tl.zeros([BM], tl.float32)
    b_grad = b_alpha[:, None] * b_steep
    if POWER != 0:
        b_epsilon = tl.where(b_flat, 0.0, b_excess / b_least * b_alpha * b_sum)
        b_grad -= b_epsilon[:, None] * b_even
    b_grad = b_grad * (b_ratio * b_scale)[:, None]
    b_unit = b_q.to(tl.float32) * b_inverse[:, None]
    b_grad = (b_grad - b_unit * tl.sum(b_unit * b_grad, 1)[:, None]) * b_inverse[:, None]
    store_rows(GradQ + b * stride_dqb + head * stride_dqh, b_grad, o_rows, t_q, stride_dqt, o_d, D)
    if POWER_GRAD:
        tl.store(GradPower + p_row, b_dp * LN2, mask=m_rows)

    # What the other kernel needs of each row. A row of equal scores is marked by its offset.
    b_outer = b_ratio * b_scale * b_inverse
    tl.store(Rows + p_row, b_factor, mask=m_rows)
    tl.store(Rows + n_rows + p_row, b_slope, mask=m_rows)
    tl.store(Rows + 2 * n_rows + p_row, tl.where(b_flat, -1e-30, b_offset), mask=m_rows)
    tl.store(Rows + 3 * n_rows + p_row, b_delta, mask=m_rows)
    tl.store(Rows + 4 * n_rows + p_row, b_alpha * b_outer, mask=m_rows)
    tl.store(Rows + 5 * n_rows + p_row, b_epsilon * b_outer, mask=m_rows)


@triton.jit
def dkv_pass(
    b_dk, b_dv, b_k, b_v, b_norm, o_n, p_q, p_do, p_rows, p_start, p_end, p_mask, p_counts, p_power, m_low, m_high,
    t_q, t_k, n_rows, window, power_base, power_slope, power_n0,
    stride_qt, stride_gt, stride_mm, stride_mn, stride_pm, o_d, o_dv,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_RANGES: tl.constexpr, HAS_MASK: tl.constexpr,
    POWER: tl.constexpr, HAS_POWER_ROWS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    BM: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, FLAT_ROWS: tl.constexpr,
):  # fmt: skip
    """Adds the rows [m_low, m_high) to the gradients of a block of keys. Rows beyond t_q read as zeros and add nothing."""
    for m in range(m_low, m_high, BM):
        o_m = m + tl.arange(0, BM)
        m_rows = o_m < t_q
        o_rows = o_m.to(tl.int64)
        b_q = load_rows(p_q, o_rows, t_q, stride_qt, o_d, D, BD, True)  # [BM, BD]
        b_do = load_rows(p_do, o_rows, t_q, stride_gt, o_dv, DV, BDV, True)  # [BM, BDV]
        b_factor = tl.load(p_rows + o_m, mask=m_rows, other=0.0)
        b_slope = tl.load(p_rows + n_rows + o_m, mask=m_rows, other=0.0)
        b_offset = tl.load(p_rows + 2 * n_rows + o_m, mask=m_rows, other=0.0)
        b_delta = tl.load(p_rows + 3 * n_rows + o_m, mask=m_rows, other=0.0)
        b_alpha = tl.load(p_rows + 4 * n_rows + o_m, mask=m_rows, other=0.0)
        b_epsilon = tl.load(p_rows + 5 * n_rows + o_m, mask=m_rows, other=0.0)

        t = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * b_norm[None, :] * b_factor[:, None]  # [BM, BN]
        f = softplus2(t, PRECISE)
        sigma = tl.exp2(t - f)
        if MASKED:
            b_start, b_end = key_range(o_m, t_q, t_k, window, p_start, p_end, CAUSAL, HAS_WINDOW, HAS_RANGES)
            p_mask_rows = p_mask
            if HAS_MASK:
                p_mask_rows = p_mask + tl.where(m_rows, o_m, 0).to(tl.int64) * stride_mm
            seen = seen_by(o_n, b_start, b_end, p_mask_rows, stride_mn, HAS_MASK)
            f = tl.where(seen, f, 0.0)
            sigma = tl.where(seen, sigma, 0.0)
        weight = tl.maximum(f * b_slope[:, None] - b_offset[:, None], 0.0)  # u
        if POWER != 0:
            b_p = b_slope
            if POWER < 0:
                if HAS_MASK:
                    b_counts = tl.load(p_counts + o_m, mask=m_rows, other=0).to(tl.float32)
                else:
                    b_start, b_end = key_range(o_m, t_q, t_k, window, p_start, p_end, CAUSAL, HAS_WINDOW, HAS_RANGES)
                    b_counts = (b_end - b_start).to(tl.float32)
                b_p = row_power(
                    b_counts, p_power, o_m, m_rows, stride_pm, power_base, power_slope, power_n0, POWER, HAS_POWER_ROWS
                )
            steepness = raised(weight, b_p[:, None], POWER, 1)
            if FLAT_ROWS:
                steepness = tl.where(b_offset[:, None] < 0, 1.0, steepness)
            weight = weight * steepness
        b_dv = tl.dot(tl.trans(weight.to(b_do.dtype)), b_do, b_dv, input_precision="ieee")
        g = tl.dot(b_do, tl.trans(b_v), input_precision="ieee") - b_delta[:, None]
        if POWER != 0:
            g = g * steepness
        ds = sigma * (g * b_alpha[:, None] - b_epsilon[:, None])
        b_dk = tl.dot(tl.trans(ds.to(b_q.dtype)), b_q, b_dk, input_precision="ieee")
    return b_dk, b_dv


@triton.jit
def dkv_kernel(
    Q, K, V, GradOut, Norms, Flat, Start, End, Mask, Counts, Power, Rows, FirstRow, LastRow,
    GradK, GradV,
    t_q, t_k, h, h_kv, n_rows, window, power_base, power_slope, power_n0,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_gb, stride_gh, stride_gt, stride_dkb, stride_dkh, stride_dkt, stride_dvb, stride_dvh, stride_dvt,
    stride_rb, stride_mb, stride_mh, stride_mm, stride_mn, stride_cb, stride_ch, stride_pb, stride_ph, stride_pm,
    stride_fb,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_RANGES: tl.constexpr, HAS_MASK: tl.constexpr,
    POWER: tl.constexpr, HAS_POWER_ROWS: tl.constexpr, NORMALIZED_KEYS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)  # the first keys are seen by the most rows
    bh = tl.program_id(1).to(tl.int64)
    b, kv_head = bh // h_kv, bh % h_kv
    shared = h // h_kv
    n = block * BN
    o_n = n + tl.arange(0, BN)
    o_keys = o_n.to(tl.int64)
    o_d, o_dv = tl.arange(0, BD), tl.arange(0, BDV)
    b_k = load_rows(K + b * stride_kb + kv_head * stride_kh, o_keys, t_k, stride_kt, o_d, D, BD, True)  # [BN, BD]
    b_v = load_rows(V + b * stride_vb + kv_head * stride_vh, o_keys, t_k, stride_vt, o_dv, DV, BDV, True)
    b_norm = tl.load(Norms + bh * t_k + o_n, mask=o_n < t_k, other=0.0)
    p_start = Start + b * stride_rb
    p_end = End + b * stride_rb

    # Rows [m_low, m_high) see some of these keys; the tiles of [full_low, full_high) see all of them.
    m_low, m_high = 0, t_q
    full_low, full_high = 0, t_q
    if CAUSAL:
        m_low = tl.maximum(n - (t_k - t_q), 0) // BM * BM
        full_low = tl.cdiv(tl.maximum(tl.minimum(n + BN, t_k) - 1 - (t_k - t_q), 0), BM) * BM
        if HAS_WINDOW:
            m_high = tl.maximum(tl.minimum(t_q, tl.minimum(n + BN, t_k) + window - 1 - (t_k - t_q)), 0)
            full_high = tl.maximum(tl.minimum(t_q, n + window - (t_k - t_q)), 0)
    if HAS_RANGES:
        m_low = tl.maximum(m_low, tl.load(FirstRow + b * stride_fb + block)) // BM * BM
        m_high = tl.minimum(m_high, tl.load(LastRow + b * stride_fb + block))
    if HAS_RANGES or HAS_MASK:
        full_high = 0
    if HAS_WINDOW:
        full_high = full_high // BM * BM
    if full_high <= full_low:
        full_low = m_high
        full_high = m_high

    b_dk = tl.zeros([BN, BD], tl.float32)
    b_dv = tl.zeros([BN, BDV], tl.float32)
    for i in range(0, shared):
        head = kv_head * shared + i
        p_q = Q + b * stride_qb + head * stride_qh
        p_do = GradOut + b * stride_gb + head * stride_gh
        p_rows = Rows + (b * h + head) * t_q
        p_mask = Mask + b * stride_mb + head * stride_mh
        p_counts = Counts + b * stride_cb + head * stride_ch
        p_power = Power + b * stride_pb + head * stride_ph
        has_flat = 0
        if POWER != 0:
            has_flat = tl.load(Flat + b * h + head)
        if has_flat > 0:
            b_dk, b_dv = dkv_pass(
                b_dk, b_dv, b_k, b_v, b_norm, o_n, p_q, p_do, p_rows, p_start, p_end, p_mask, p_counts, p_power, m_low, m_high,
                t_q, t_k, n_rows, window, power_base, power_slope, power_n0, stride_qt, stride_gt, stride_mm, stride_mn, stride_pm,
                o_d, o_dv, CAUSAL, HAS_WINDOW, HAS_RANGES, HAS_MASK, POWER, HAS_POWER_ROWS, D, DV, BD, BDV, BM, PRECISE, True, True,
            )  # fmt: skip
        else:
            b_dk, b_dv = dkv_pass(
                b_dk, b_dv, b_k, b_v, b_norm, o_n, p_q, p_do, p_rows, p_start, p_end, p_mask, p_counts, p_power, m_low, full_low,
                t_q, t_k, n_rows, window, power_base, power_slope, power_n0, stride_qt, stride_gt, stride_mm, stride_mn, stride_pm,
                o_d, o_dv, CAUSAL, HAS_WINDOW, HAS_RANGES, HAS_MASK, POWER, HAS_POWER_ROWS, D, DV, BD, BDV, BM, PRECISE, True, False,
            )  # fmt: skip
            if not (HAS_RANGES or HAS_MASK):
                b_dk, b_dv = dkv_pass(
                    b_dk, b_dv, b_k, b_v, b_norm, o_n, p_q, p_do, p_rows, p_start, p_end, p_mask, p_counts, p_power, full_low,
                    full_high, t_q, t_k, n_rows, window, power_base, power_slope, power_n0, stride_qt, stride_gt, stride_mm,
                    stride_mn, stride_pm, o_d, o_dv, CAUSAL, HAS_WINDOW, HAS_RANGES, HAS_MASK, POWER, HAS_POWER_ROWS, D, DV, BD,
                    BDV, BM, PRECISE, False, False,
                )  # fmt: skip
            if HAS_WINDOW or HAS_RANGES or HAS_MASK:
                b_dk, b_dv = dkv_pass(
                    b_dk, b_dv, b_k, b_v, b_norm, o_n, p_q, p_do, p_rows, p_start, p_end, p_mask, p_counts, p_power, full_high,
                    m_high, t_q, t_k, n_rows, window, power_base, power_slope, power_n0, stride_qt, stride_gt, stride_mm,
                    stride_mn, stride_pm, o_d, o_dv, CAUSAL, HAS_WINDOW, HAS_RANGES, HAS_MASK, POWER, HAS_POWER_ROWS, D, DV, BD,
                    BDV, BM, PRECISE, True, False,
                )  # fmt: skip

    if not NORMALIZED_KEYS:
        b_unit = b_k.to(tl.float32) * b_norm[:, None]
        b_dk = (b_dk - b_unit * tl.sum(b_unit * b_dk, 1)[:, None]) * b_norm[:, None]
    store_rows(GradK + b * stride_dkb + kv_head * stride_dkh, b_dk, o_keys, t_k, stride_dkt, o_d, D)
    store_rows(GradV + b * stride_dvb + kv_head * stride_dvh, b_dv, o_keys, t_k, stride_dvt, o_dv, DV)
