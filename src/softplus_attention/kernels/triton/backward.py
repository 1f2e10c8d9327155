"""The backward in two kernels, without atomics: dQ row by row, which also computes each row's terms, then dK and dV.

ds_ij = sigmoid(s_ij) (N_i / R_i) (alpha_i g_ij - eps_i), g_ij = u_ij^(p-1) (dP_ij - delta_i). The row term eps_i is a
sum over all g of the row: the dQ kernel accumulates sum sigmoid g k and sum sigmoid k separately and combines them at
the end. Without OFFSET eps_i is zero, and N / R is 1 by the choice of R.
In half precision u is scaled by W^(-1/p), so that u^p is the weight itself; alpha includes the factor. If PRECISE the
rounding error of that root, times p, would be too large, and the weights are divided by W instead.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from softplus_attention.kernels.triton.common import (
    LN2,
    MIN_EXPONENT,
    SERIES,
    Keys,
    RowRange,
    Sharpening,
    count_keys,
    excess,
    finite_rows,
    inverse_norm,
    key_range,
    key_regions,
    load_keys,
    load_rows,
    load_vector,
    mask_rows,
    norm_stride,
    raised,
    row_lift,
    row_power,
    score_factor,
    scores2,
    seen_by,
    softplus2,
    special_log2,
    store_rows,
)


class PowerMoments(NamedTuple):
    """[BM] each: sums over keys for the gradient of a row's power, the covariance of g and log u under the weights.

    The mean of g is zero except for the rounding of the weights in the output, but log u is far from zero: without
    subtracting the product of the means, that rounding would dominate the error.
    """

    product: tl.tensor
    gain: tl.tensor
    log: tl.tensor


@triton.jit
def dq_pass(
    b_steep, b_even, b_sum, moments, b_q, b_do, b_delta, b_factor, b_lift, b_flat, sharpening, keys, span,
    n_low, n_high,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr, PRECISE: tl.constexpr,
    LOG_MODE: tl.constexpr,
    POWER: tl.constexpr, OFFSET: tl.constexpr, POWER_GRAD: tl.constexpr, MASKED: tl.constexpr, HAS_MASK: tl.constexpr,
    CAREFUL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Adds the keys [n_low, n_high) to sum sigmoid g k, sum sigmoid k, sum g and the moments of each row. In float16
    the sigmoids are multiplied by ``row_lift``."""
    for n in tl.range(n_low, n_high, BN, num_stages=STAGES):
        o_n = n + tl.arange(0, BN)
        b_k, b_norm = load_keys(keys, o_n, D, BD, MASKED, PRECISE)  # [BN, BD], [BN]
        b_v = load_rows(keys.v, o_n, keys.count, keys.v_stride, DV, BDV, MASKED)  # [BN, BDV]
        t = scores2(b_q, b_k, b_norm, b_factor, PRECISE)  # [BM, BN]
        g = tl.dot(b_do, tl.trans(b_v), input_precision="ieee") - b_delta[:, None]
        f = softplus2(t, LOG_MODE)
        sigma = tl.exp2(t - f)  # the sigmoid
        if not PRECISE:
            sigma = sigma * b_norm[None, :]  # it multiplies the raw k below
            if b_k.dtype == tl.float16:
                sigma = sigma * b_lift[:, None]
        if MASKED:
            seen = seen_by(o_n, span, HAS_MASK)
            sigma = tl.where(seen, sigma, 0.0)
            g = tl.where(seen, g, 0.0)
            b_k = finite_rows(b_k)  # rows that see a NaN key are NaN by their sums; the others must not be
        if POWER != 0:
            u = excess(f, sharpening, PRECISE, OFFSET)
            if MASKED:
                u = tl.where(seen, u, 0.0)
            steepness = raised(u, sharpening.power[:, None], POWER, 1, LOG_MODE)
            if CAREFUL:
                steepness = tl.where(b_flat[:, None], 1.0, steepness)
                g = tl.where(steepness == 0, 0.0, g)  # also for values that are not finite
            g = g * steepness
            if OFFSET:
                b_sum += tl.sum(g, 1)
                b_even = tl.dot(sigma.to(b_k.dtype), b_k, b_even, input_precision="ieee")
            if POWER_GRAD:
                log_u = tl.log2(u) if LOG_MODE == SERIES else special_log2(u)
                log_u = tl.maximum(log_u, MIN_EXPONENT)  # finite where u, and so the weight, is 0
                moments = PowerMoments(
                    moments.product + tl.sum(u * g * log_u, 1),
                    moments.gain + tl.sum(u * g, 1),
                    moments.log + tl.sum(u * steepness * log_u, 1),
                )
        b_steep = tl.dot((sigma * g).to(b_k.dtype), b_k, b_steep, input_precision="ieee")
    return b_steep, b_even, b_sum, moments


@triton.jit
def dq_kernel(
    Q, K, V, Out, Residual, GradOut, Norms, Total, Height, Weight, Flat, Start, End, Mask, Counts, Power,
    GradQ, GradPower, Rows,
    t_q, t_k, h, h_kv, n_rows, window, score_scale, growth, q_strides, k_strides, v_strides, out_strides,
    grad_out_strides, dq_strides, range_stride, mask_strides, count_strides, power_strides,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_RANGES: tl.constexpr, HAS_MASK: tl.constexpr,
    POWER: tl.constexpr, OFFSET: tl.constexpr, HAS_POWER_ROWS: tl.constexpr, POWER_GRAD: tl.constexpr,
    HAS_REST: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, PRECISE: tl.constexpr, LOG_MODE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    n_rows = tl.cast(n_rows, tl.int64)  # multiples of it may not fit int32
    blocks = tl.cdiv(t_q, BM)
    m = blocks - 1 - tl.program_id(0) % blocks
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    b, head = bh // h, bh % h
    kv_head = head // (h // h_kv)
    o_m = m * BM + tl.arange(0, BM)
    m_rows = o_m < t_q
    p_row = bh * t_q + o_m
    keys = Keys(
        K + b * k_strides[0] + kv_head * k_strides[1], V + b * v_strides[0] + kv_head * v_strides[1],
        Norms + (b * h_kv + kv_head) * norm_stride(t_k), t_k, k_strides[2], v_strides[2],
    )  # fmt: skip
    b_start, b_end = key_range(
        o_m, t_q, t_k, window, Start + b * range_stride, End + b * range_stride, CAUSAL, HAS_WINDOW, HAS_RANGES
    )
    p_mask = mask_rows(Mask + b * mask_strides[0] + head * mask_strides[1], o_m, t_q, mask_strides[2], HAS_MASK)
    span = RowRange(b_start, b_end, p_mask, mask_strides[3])
    b_counts = count_keys(span, Counts + b * count_strides[0] + head * count_strides[1], o_m, t_q, HAS_MASK)
    p_power = Power + b * power_strides[0] + head * power_strides[1]
    b_p = row_power(b_counts, p_power, o_m, t_q, power_strides[2], growth, POWER, HAS_POWER_ROWS)
    n_low, full_low, full_high, n_high = key_regions(span, m_rows, BN, HAS_MASK)

    b_q = load_rows(Q + b * q_strides[0] + head * q_strides[1], o_m, t_q, q_strides[2], D, BD, True)  # [BM, BD]
    p_do = GradOut + b * grad_out_strides[0] + head * grad_out_strides[1]
    b_do = load_rows(p_do, o_m, t_q, grad_out_strides[2], DV, BDV, True)  # [BM, BDV]
    b_o = load_rows(Out + b * out_strides[0] + head * out_strides[1], o_m, t_q, out_strides[2], DV, BDV, True)
    b_o = b_o.to(tl.float32)
    if HAS_REST:
        b_o += load_rows(Residual + b * out_strides[0] + head * out_strides[1], o_m, t_q, out_strides[2], DV, BDV, True)
    b_delta = tl.sum(b_o * b_do.to(tl.float32), 1)  # [BM]
    b_inverse = inverse_norm(b_q.to(tl.float32))
    b_unit = b_q.to(tl.float32) * b_inverse[:, None]
    b_scale = score_scale * tl.log(tl.maximum(b_counts, 1.0))
    b_factor = score_factor(b_scale, b_inverse)
    if PRECISE:
        b_q = b_q * b_factor[:, None]

    b_weight = tl.load(Weight + p_row, mask=m_rows, other=1.0)
    b_least = tl.maximum(b_counts, 1.0)
    b_excess = tl.zeros([BM], tl.float32)
    if OFFSET:
        b_excess = tl.where(b_counts > 3, 1.0, 0.0)
    b_flat = b_counts < 0
    b_offset = tl.zeros([BM], tl.float32)
    b_share = b_offset + 1.0
    b_inverse_height = b_share
    if POWER == 0:
        b_ratio = b_counts / (b_weight * LN2)  # N / R
        b_lift = row_lift(b_weight)
        b_slope = 1.0 / b_weight
        b_alpha = 1.0 / b_least
    else:
        b_total = tl.load(Total + p_row, mask=m_rows, other=1.0)
        b_height = tl.load(Height + p_row, mask=m_rows, other=1.0)
        b_ratio = b_counts / (b_total * LN2)
        b_lift = row_lift((b_height + b_excess) * b_total / b_least)
        b_flat = b_height == 0
        b_divisor = tl.where(b_flat, 1.0, b_height)
        b_slope = b_counts / b_total
        b_offset = b_excess
        b_alpha = b_p / b_divisor
        if PRECISE:
            b_share = 1.0 / b_weight
            b_alpha = b_alpha / b_weight
            b_inverse_height = tl.where(b_flat, 1.0, 1.0 / b_divisor)
        else:
            b_root = tl.exp2(-tl.log2(b_weight) / b_p)  # W^(-1/p)
            b_slope = b_slope / b_divisor * b_root
            b_offset = b_offset / b_divisor * b_root
            b_alpha = b_alpha * b_root
        b_share = tl.where(b_flat, 1.0, b_share)
        b_slope = tl.where(b_flat, 1.0 / b_total, b_slope)
        b_offset = tl.where(b_flat, 0.0, b_offset)
        b_alpha = tl.where(b_flat, 1.0 / b_least, b_alpha)
    sharpening = Sharpening(b_slope, b_offset, b_inverse_height, b_p)

    b_steep = tl.zeros([BM, BD], tl.float32)
    b_even = tl.zeros([BM, BD], tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    moments = PowerMoments(b_sum, b_sum, b_sum)
    needs_care = 0
    if POWER != 0:
        needs_care = tl.load(Flat + bh)
    if needs_care > 0:
        b_steep, b_even, b_sum, moments = dq_pass(
            b_steep, b_even, b_sum, moments, b_q, b_do, b_delta, b_factor, b_lift, b_flat, sharpening, keys, span,
            n_low, n_high, D, BD, DV, BDV, BN, PRECISE, LOG_MODE, POWER, OFFSET, POWER_GRAD, True, HAS_MASK, True,
            STAGES,
        )  # fmt: skip
    else:
        if HAS_WINDOW or HAS_RANGES:
            b_steep, b_even, b_sum, moments = dq_pass(
                b_steep, b_even, b_sum, moments, b_q, b_do, b_delta, b_factor, b_lift, b_flat, sharpening,
                keys, span, n_low, full_low, D, BD, DV, BDV, BN, PRECISE, LOG_MODE, POWER, OFFSET, POWER_GRAD, True,
                HAS_MASK, False, STAGES,
            )  # fmt: skip
        if not HAS_MASK:
            b_steep, b_even, b_sum, moments = dq_pass(
                b_steep, b_even, b_sum, moments, b_q, b_do, b_delta, b_factor, b_lift, b_flat, sharpening,
                keys, span, full_low, full_high, D, BD, DV, BDV, BN, PRECISE, LOG_MODE, POWER, OFFSET, POWER_GRAD,
                False,
                HAS_MASK, False, STAGES,
            )  # fmt: skip
        b_steep, b_even, b_sum, moments = dq_pass(
            b_steep, b_even, b_sum, moments, b_q, b_do, b_delta, b_factor, b_lift, b_flat, sharpening, keys, span,
            full_high, n_high, D, BD, DV, BDV, BN, PRECISE, LOG_MODE, POWER, OFFSET, POWER_GRAD, True, HAS_MASK, False,
            STAGES,
        )  # fmt: skip

    b_epsilon = tl.zeros([BM], tl.float32)
    b_grad = b_alpha[:, None] * b_steep
    if POWER != 0 and OFFSET:
        b_epsilon = tl.where(b_flat, 0.0, b_excess / b_least * b_alpha * b_sum)
        b_grad -= b_epsilon[:, None] * b_even
    b_chain = b_ratio * b_scale
    if Q.dtype.element_ty == tl.float16:
        b_chain = b_chain / b_lift
    b_grad = b_grad * b_chain[:, None]
    b_grad = (b_grad - b_unit * tl.sum(b_unit * b_grad, 1)[:, None]) * b_inverse[:, None]
    b_grad = tl.where(b_counts[:, None] > 0, b_grad, 0.0)  # even if a row that sees no key holds NaN
    store_rows(GradQ + b * dq_strides[0] + head * dq_strides[1], b_grad, o_m, t_q, dq_strides[2], D, BD)
    if POWER_GRAD:
        b_dp = (moments.product - moments.gain * moments.log * b_share) * LN2 * b_share
        tl.store(GradPower + p_row, tl.where(b_flat, 0.0, b_dp), mask=m_rows)

    # The row terms for dkv_kernel. A negative offset marks a row of equal scores.
    b_outer = b_ratio * b_scale * b_inverse
    tl.store(Rows + p_row, b_factor, mask=m_rows)
    tl.store(Rows + n_rows + p_row, b_slope, mask=m_rows)
    tl.store(Rows + 2 * n_rows + p_row, tl.where(b_flat, -1e-30, b_offset), mask=m_rows)
    tl.store(Rows + 3 * n_rows + p_row, b_delta, mask=m_rows)
    tl.store(Rows + 4 * n_rows + p_row, b_alpha * b_outer, mask=m_rows)
    tl.store(Rows + 5 * n_rows + p_row, b_epsilon * b_outer, mask=m_rows)
    if PRECISE:
        tl.store(Rows + 6 * n_rows + p_row, b_share, mask=m_rows)
        tl.store(Rows + 7 * n_rows + p_row, b_inverse_height, mask=m_rows)


@triton.jit
def dkv_pass(
    b_dk, b_dv, b_k, b_v, b_norm, o_n, p_q, p_do, p_rows, p_start, p_end, p_mask, p_counts, p_power,
    m_low, m_high, t_q, t_k, n_rows, window, growth, q_stride, do_stride, mask_stride_m, mask_stride_n, power_stride,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_RANGES: tl.constexpr, HAS_MASK: tl.constexpr,
    POWER: tl.constexpr, OFFSET: tl.constexpr, HAS_POWER_ROWS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, PRECISE: tl.constexpr, LOG_MODE: tl.constexpr,
    MASKED: tl.constexpr, CAREFUL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Adds the rows [m_low, m_high) to the gradients of a block of keys. Rows beyond t_q read as 0 and add nothing."""
    for m in tl.range(m_low, m_high, BM, num_stages=STAGES):
        o_m = m + tl.arange(0, BM)
        b_q = load_rows(p_q, o_m, t_q, q_stride, D, BD, True)  # [BM, BD]
        b_do = load_rows(p_do, o_m, t_q, do_stride, DV, BDV, True)  # [BM, BDV]
        b_factor = load_vector(p_rows, o_m, t_q, True)  # [BM]
        b_slope = load_vector(p_rows + n_rows, o_m, t_q, True)
        b_offset = load_vector(p_rows + 2 * n_rows, o_m, t_q, True)
        b_delta = load_vector(p_rows + 3 * n_rows, o_m, t_q, True)
        b_alpha = load_vector(p_rows + 4 * n_rows, o_m, t_q, True)
        if POWER != 0 and OFFSET:
            b_epsilon = load_vector(p_rows + 5 * n_rows, o_m, t_q, True)

        if PRECISE:
            t = scores2(b_q * b_factor[:, None], b_k, b_norm, b_factor, PRECISE)  # [BM, BN]
        else:
            t = scores2(b_q, b_k, b_norm, b_factor, PRECISE)
        f = softplus2(t, LOG_MODE)
        sigma = tl.exp2(t - f)
        if MASKED or POWER < 0:
            b_start, b_end = key_range(o_m, t_q, t_k, window, p_start, p_end, CAUSAL, HAS_WINDOW, HAS_RANGES)
            span = RowRange(b_start, b_end, mask_rows(p_mask, o_m, t_q, mask_stride_m, HAS_MASK), mask_stride_n)
        weight = f * b_slope[:, None]  # u
        if POWER != 0 and OFFSET:
            weight = tl.maximum(weight - b_offset[:, None], 0.0)
        if PRECISE:
            weight = weight * load_vector(p_rows + 7 * n_rows, o_m, t_q, True)[:, None]
        if POWER != 0:
            b_p = b_slope  # unused if the power is a number
            if POWER < 0:
                b_counts = count_keys(span, p_counts, o_m, t_q, HAS_MASK)
                b_p = row_power(b_counts, p_power, o_m, t_q, power_stride, growth, POWER, HAS_POWER_ROWS)
            steepness = raised(weight, b_p[:, None], POWER, 1, LOG_MODE)
            if CAREFUL:
                steepness = tl.where(b_offset[:, None] < 0, 1.0, steepness)
            weight = weight * steepness
        if PRECISE:
            weight = weight * load_vector(p_rows + 6 * n_rows, o_m, t_q, True)[:, None]
        if MASKED:
            seen = seen_by(o_n, span, HAS_MASK)
            weight = tl.where(seen, weight, 0.0)
        b_dv = tl.dot(tl.trans(weight.to(b_do.dtype)), b_do, b_dv, input_precision="ieee")
        g = tl.dot(b_do, tl.trans(b_v), input_precision="ieee") - b_delta[:, None]
        if POWER != 0:
            if CAREFUL:
                g = tl.where(steepness == 0, 0.0, g)
            g = g * steepness
        dx = g * b_alpha[:, None]
        if POWER != 0 and OFFSET:
            dx -= b_epsilon[:, None]
        ds = sigma * dx
        if MASKED:
            ds = tl.where(seen, ds, 0.0)
            b_q = finite_rows(b_q)
        b_dk = tl.dot(tl.trans(ds.to(b_q.dtype)), b_q, b_dk, input_precision="ieee")
    return b_dk, b_dv


@triton.jit
def dkv_kernel(
    Q, K, V, GradOut, Norms, Flat, Start, End, Mask, Counts, Power, Rows, FirstRow, LastRow, GradK, GradV,
    t_q, t_k, h, h_kv, n_rows, window, growth, q_strides, k_strides, v_strides, grad_out_strides, dk_strides,
    dv_strides, range_stride, mask_strides, count_strides, power_strides, seen_stride,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_RANGES: tl.constexpr, HAS_MASK: tl.constexpr,
    POWER: tl.constexpr, OFFSET: tl.constexpr, HAS_POWER_ROWS: tl.constexpr, NORMALIZED_KEYS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISE: tl.constexpr, LOG_MODE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A block of keys of one key head, over all query heads that share it."""
    n_rows = tl.cast(n_rows, tl.int64)
    blocks = tl.cdiv(t_k, BN)
    block = tl.program_id(0) % blocks  # the first keys are seen by the most rows
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    b, kv_head = bh // h_kv, bh % h_kv
    shared = h // h_kv
    n = block * BN
    o_n = n + tl.arange(0, BN)
    b_k = load_rows(K + b * k_strides[0] + kv_head * k_strides[1], o_n, t_k, k_strides[2], D, BD, True)  # [BN, BD]
    b_v = load_rows(V + b * v_strides[0] + kv_head * v_strides[1], o_n, t_k, v_strides[2], DV, BDV, True)  # [BN, BDV]
    b_norm = load_vector(Norms + bh * norm_stride(t_k), o_n, t_k, True)  # [BN]
    if PRECISE:
        b_k = b_k * b_norm[:, None]
    p_start = Start + b * range_stride
    p_end = End + b * range_stride

    # Rows [m_low, m_high) see some of these keys; the tiles of [full_low, full_high) see all of them.
    m_low, m_high = 0, t_q
    full_low, full_high = 0, t_q
    if CAUSAL:
        past = tl.minimum(n + BN, t_k)
        m_low = tl.maximum(n - (t_k - t_q), 0) // BM * BM
        full_low = tl.cdiv(tl.maximum(past - 1 - (t_k - t_q), 0), BM) * BM
        if HAS_WINDOW:
            m_high = tl.maximum(tl.minimum(t_q, past + window - 1 - (t_k - t_q)), 0)
            full_high = tl.maximum(tl.minimum(t_q, n + window - (t_k - t_q)), 0) // BM * BM
    if HAS_RANGES:
        m_low = tl.maximum(m_low, tl.load(FirstRow + b * seen_stride + block)) // BM * BM
        m_high = tl.minimum(m_high, tl.load(LastRow + b * seen_stride + block))
    if HAS_RANGES or HAS_MASK:
        full_high = 0
    if full_high <= full_low:
        full_low = m_high
        full_high = m_high

    b_dk = tl.zeros([BN, BD], tl.float32)
    b_dv = tl.zeros([BN, BDV], tl.float32)
    for i in range(0, shared):
        head = kv_head * shared + i
        p_q = Q + b * q_strides[0] + head * q_strides[1]
        p_do = GradOut + b * grad_out_strides[0] + head * grad_out_strides[1]
        p_rows = Rows + (b * h + head) * t_q
        p_mask = Mask + b * mask_strides[0] + head * mask_strides[1]
        p_counts = Counts + b * count_strides[0] + head * count_strides[1]
        p_power = Power + b * power_strides[0] + head * power_strides[1]
        needs_care = 0
        if POWER != 0:
            needs_care = tl.load(Flat + b * h + head)
        if needs_care > 0:
            b_dk, b_dv = dkv_pass(
                b_dk, b_dv, b_k, b_v, b_norm, o_n, p_q, p_do, p_rows, p_start, p_end, p_mask, p_counts, p_power,
                m_low, m_high, t_q, t_k, n_rows, window, growth, q_strides[2], grad_out_strides[2], mask_strides[2],
                mask_strides[3], power_strides[2], CAUSAL, HAS_WINDOW, HAS_RANGES, HAS_MASK, POWER, OFFSET,
                HAS_POWER_ROWS, D, DV, BD, BDV, BM, PRECISE, LOG_MODE, True, True, STAGES,
            )  # fmt: skip
        else:
            b_dk, b_dv = dkv_pass(
                b_dk, b_dv, b_k, b_v, b_norm, o_n, p_q, p_do, p_rows, p_start, p_end, p_mask, p_counts, p_power,
                m_low, full_low, t_q, t_k, n_rows, window, growth, q_strides[2], grad_out_strides[2], mask_strides[2],
                mask_strides[3], power_strides[2], CAUSAL, HAS_WINDOW, HAS_RANGES, HAS_MASK, POWER, OFFSET,
                HAS_POWER_ROWS, D, DV, BD, BDV, BM, PRECISE, LOG_MODE, True, False, STAGES,
            )  # fmt: skip
            if not (HAS_RANGES or HAS_MASK):
                b_dk, b_dv = dkv_pass(
                    b_dk, b_dv, b_k, b_v, b_norm, o_n, p_q, p_do, p_rows, p_start, p_end, p_mask, p_counts, p_power,
                    full_low, full_high, t_q, t_k, n_rows, window, growth, q_strides[2], grad_out_strides[2],
                    mask_strides[2], mask_strides[3], power_strides[2], CAUSAL, HAS_WINDOW, HAS_RANGES, HAS_MASK,
                    POWER, OFFSET, HAS_POWER_ROWS, D, DV, BD, BDV, BM, PRECISE, LOG_MODE, False, False, STAGES,
                )  # fmt: skip
            if HAS_WINDOW:
                b_dk, b_dv = dkv_pass(
                    b_dk, b_dv, b_k, b_v, b_norm, o_n, p_q, p_do, p_rows, p_start, p_end, p_mask, p_counts, p_power,
                    full_high, m_high, t_q, t_k, n_rows, window, growth, q_strides[2], grad_out_strides[2],
                    mask_strides[2], mask_strides[3], power_strides[2], CAUSAL, HAS_WINDOW, HAS_RANGES, HAS_MASK,
                    POWER, OFFSET, HAS_POWER_ROWS, D, DV, BD, BDV, BM, PRECISE, LOG_MODE, True, False, STAGES,
                )  # fmt: skip

    if not NORMALIZED_KEYS:
        b_unit = b_k
        if not PRECISE:
            b_unit = b_k.to(tl.float32) * b_norm[:, None]
        nobody = tl.sum(tl.abs(b_dk), 1) == 0  # sees this key, which may hold NaN
        b_dk = (b_dk - b_unit * tl.sum(b_unit * b_dk, 1)[:, None]) * b_norm[:, None]
        b_dk = tl.where(nobody[:, None], 0.0, b_dk)
    store_rows(GradK + b * dk_strides[0] + kv_head * dk_strides[1], b_dk, o_n, t_k, dk_strides[2], D, BD)
    store_rows(GradV + b * dv_strides[0] + kv_head * dv_strides[1], b_dv, o_n, t_k, dv_strides[2], DV, BDV)
