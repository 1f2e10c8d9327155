"""The forward. LSSAR takes two passes over the keys: sum and largest score, then weights and output. LSSA, and in half
precision LSSAR without OFFSET, take one.

It supports any mask, power and dtype; ``hopper.forward`` has the common case on Hopper.
"""

from __future__ import annotations

import triton
import triton.language as tl

from softplus_attention.kernels.triton.common import (
    EQUAL_SCORES,
    Keys,
    RowRange,
    Sharpening,
    count_keys,
    excess,
    inverse_norm,
    key_range,
    key_regions,
    load_keys,
    load_rows,
    mask_rows,
    norm_stride,
    raised,
    row_power,
    score_factor,
    scores2,
    seen_by,
    softplus2,
    store_rows,
)


@triton.jit
def key_norms_kernel(
    K, Norms, Flat, t_k, h_kv, k_strides, flags,
    NORMALIZED: tl.constexpr, BY_TOKEN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """1 / ||k|| of every key, (B, H_kv, norm_stride), finite beyond T_k. NORMALIZED keys get 1, or NaN if not finite.
    Also sets the first ``flags`` numbers of Flat to 0, since a separate kernel for that would cost more.

    BY_TOKEN: the heads of a token are adjacent in memory, and programs that run at the same time read all of them."""
    program = tl.program_id(0)
    if program == 0:
        for first in range(0, flags, 128):
            o_flags = first + tl.arange(0, 128)
            tl.store(Flat + o_flags, 0, mask=o_flags < flags)
    blocks = norm_stride(t_k) // BN
    if BY_TOKEN:
        head = program % h_kv
        block = program // h_kv % blocks
        b = program // h_kv // blocks
    else:
        block = program % blocks
        head = program // blocks % h_kv
        b = program // blocks // h_kv
    b, head = b.to(tl.int64), head.to(tl.int64)
    bh = b * h_kv + head
    o_n = block * BN + tl.arange(0, BN)
    p_k = K + b * k_strides[0] + head * k_strides[1]
    b_k = load_rows(p_k, o_n, t_k, k_strides[2], D, BD, True).to(tl.float32)
    if NORMALIZED:
        b_norm = tl.where(tl.sum(b_k - b_k, 1) == 0, 1.0, float("nan"))
    else:
        b_norm = inverse_norm(b_k)
    tl.store(Norms + bh * norm_stride(t_k) + o_n, b_norm)


@triton.jit
def first_pass(
    b_total, b_largest, b_q, b_factor, keys, span, n_low, n_high,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, PRECISE: tl.constexpr, LOG_MODE: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_MASK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Adds the keys [n_low, n_high) to each row's sum of f' and largest t.

    The sum is compensated, since the equal terms of equal keys all round in the same direction.
    """
    b_lost = tl.zeros_like(b_total)
    for n in tl.range(n_low, n_high, BN, num_stages=STAGES):
        o_n = n + tl.arange(0, BN)
        b_k, b_norm = load_keys(keys, o_n, D, BD, MASKED, PRECISE)  # [BN, BD], [BN]
        t = scores2(b_q, b_k, b_norm, b_factor, PRECISE)  # [BM, BN]
        f = softplus2(t, LOG_MODE)
        if MASKED:
            seen = seen_by(o_n, span, HAS_MASK)
            f = tl.where(seen, f, 0.0)
            t = tl.where(seen, t, float("-inf"))
        b_part = tl.sum(f, 1) - b_lost
        b_next = b_total + b_part
        b_lost = b_next - b_total - b_part
        b_total = b_next
        b_largest = tl.maximum(b_largest, tl.max(t, 1))
    return b_total, b_largest


@triton.jit
def second_pass(
    b_out, b_weight, b_q, b_factor, sharpening, keys, span, n_low, n_high,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr, PRECISE: tl.constexpr,
    LOG_MODE: tl.constexpr,
    POWER: tl.constexpr, OFFSET: tl.constexpr, MASKED: tl.constexpr, HAS_MASK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Adds the keys [n_low, n_high) to each row's output and sum of weights."""
    for n in tl.range(n_low, n_high, BN, num_stages=STAGES):
        o_n = n + tl.arange(0, BN)
        b_k, b_norm = load_keys(keys, o_n, D, BD, MASKED, PRECISE)  # [BN, BD], [BN]
        w = softplus2(scores2(b_q, b_k, b_norm, b_factor, PRECISE), LOG_MODE)  # [BM, BN]
        b_v = load_rows(keys.v, o_n, keys.count, keys.v_stride, DV, BDV, MASKED)  # [BN, BDV]
        if POWER != 0:
            w = raised(excess(w, sharpening, PRECISE, OFFSET), sharpening.power[:, None], POWER, 0, LOG_MODE)
        if MASKED:
            w = tl.where(seen_by(o_n, span, HAS_MASK), w, 0.0)
        b_weight += tl.sum(w, 1)
        b_out = tl.dot(w.to(b_v.dtype), b_v, b_out, input_precision="ieee")
    return b_out, b_weight


@triton.jit
def only_pass(
    b_out, b_weight, b_largest, b_q, b_factor, b_p, keys, span, n_low, n_high,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr, LOG_MODE: tl.constexpr,
    POWER: tl.constexpr, MASKED: tl.constexpr, HAS_MASK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Adds the keys [n_low, n_high) to each row's output and sum of weights, both relative to the weight of the largest
    t so far. Without OFFSET no row needs its average first. Half precision only."""
    for n in tl.range(n_low, n_high, BN, num_stages=STAGES):
        o_n = n + tl.arange(0, BN)
        b_k, b_norm = load_keys(keys, o_n, D, BD, MASKED, False)  # [BN, BD], [BN]
        t = scores2(b_q, b_k, b_norm, b_factor, False)  # [BM, BN]
        b_v = load_rows(keys.v, o_n, keys.count, keys.v_stride, DV, BDV, MASKED)  # [BN, BDV]
        if MASKED:
            t = tl.where(seen_by(o_n, span, HAS_MASK), t, float("-inf"))
        larger = tl.maximum(b_largest, tl.max(t, 1))
        b_inverse = tl.where(larger > float("-inf"), 1.0 / softplus2(larger, LOG_MODE), 0.0)
        before = raised(
            (softplus2(b_largest, LOG_MODE) * b_inverse)[:, None], b_p[:, None], POWER, 0, LOG_MODE
        )  # [BM, 1]
        w = raised(softplus2(t, LOG_MODE) * b_inverse[:, None], b_p[:, None], POWER, 0, LOG_MODE)
        b_weight = b_weight * tl.sum(before, 1) + tl.sum(w, 1)
        b_out = tl.dot(w.to(b_v.dtype), b_v, b_out * before, input_precision="ieee")
        b_largest = larger
    return b_out, b_weight, b_largest


@triton.jit
def nan_safe_pass(
    b_out, b_weight, b_flat, b_level, b_q, b_factor, sharpening, keys, span, n_low, n_high,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr, PRECISE: tl.constexpr,
    LOG_MODE: tl.constexpr,
    POWER: tl.constexpr, OFFSET: tl.constexpr, HAS_MASK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The second pass again, for blocks that hold rows of equal scores (which keep stage 1's weights), rows whose f'
    float16 cannot hold, or values that are not finite.

    b_level scales f' to about 1. A value that is not finite gives NaN only in the rows that give it weight.
    """
    b_bad = tl.zeros_like(b_out)
    for n in tl.range(n_low, n_high, BN, num_stages=STAGES):
        o_n = n + tl.arange(0, BN)
        b_k, b_norm = load_keys(keys, o_n, D, BD, True, PRECISE)
        f = softplus2(scores2(b_q, b_k, b_norm, b_factor, PRECISE), LOG_MODE)
        b_v = load_rows(keys.v, o_n, keys.count, keys.v_stride, DV, BDV, True)
        w = f * b_level[:, None]
        if POWER != 0:
            sharp = raised(excess(f, sharpening, PRECISE, OFFSET), sharpening.power[:, None], POWER, 0, LOG_MODE)
            w = tl.where(b_flat[:, None], w, sharp)
        w = tl.where(seen_by(o_n, span, HAS_MASK), w, 0.0)
        b_weight += tl.sum(w, 1)
        finite = (b_v - b_v) == 0
        b_out = tl.dot(w.to(b_v.dtype), tl.where(finite, b_v, 0.0).to(b_v.dtype), b_out, input_precision="ieee")
        some = tl.where(w != 0, 1.0, 0.0).to(b_v.dtype)
        b_bad = tl.dot(some, tl.where(finite, 0.0, 1.0).to(b_v.dtype), b_bad, input_precision="ieee")
    return tl.where(b_bad > 0, float("nan"), b_out), b_weight


@triton.jit
def forward_kernel(
    Q, K, V, Out, Residual, Norms, Total, Height, Weight, Flat, Start, End, Mask, Counts, Power,
    t_q, t_k, h, h_kv, window, score_scale, growth, q_strides, k_strides, v_strides, out_strides,
    range_stride, mask_strides, count_strides, power_strides,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_RANGES: tl.constexpr, HAS_MASK: tl.constexpr,
    POWER: tl.constexpr, OFFSET: tl.constexpr, HAS_POWER_ROWS: tl.constexpr, HAS_REST: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISE: tl.constexpr, LOG_MODE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """POWER 0 is LSSA, > 0 an integer power, -1 a power per row.

    Writes Weight = sum w (in LSSA sum f') of each row, and in LSSAR Total = sum f' (N without OFFSET, where it cancels)
    and Height = max x (0 where the scores are equal). Flat marks heads with rows of equal scores or with values that
    are not finite. Residual is the rounding error of Out.
    """
    # The longest rows of a causal problem first, so that none of them runs alone at the end.
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
    b_scale = score_scale * tl.log(tl.maximum(b_counts, 1.0))
    b_factor = score_factor(b_scale, inverse_norm(b_q.to(tl.float32)))  # [BM]
    if PRECISE:
        b_q = b_q * b_factor[:, None]

    b_flat = b_counts < 0
    b_out = tl.zeros([BM, BDV], tl.float32)
    b_weight = tl.zeros([BM], tl.float32)
    b_slope = b_weight
    b_offset = b_weight
    b_inverse = b_weight
    b_largest = tl.full([BM], float("-inf"), tl.float32)
    # Not if PRECISE: rescaling earlier sums has p times the rounding error, which the backward does not reproduce.
    ONE_PASS: tl.constexpr = not OFFSET and not PRECISE
    if POWER != 0 and not ONE_PASS:
        b_total = tl.zeros([BM], tl.float32)
        if HAS_WINDOW or HAS_RANGES:
            b_total, b_largest = first_pass(
                b_total, b_largest, b_q, b_factor, keys, span, n_low, full_low,
                D, BD, BN, PRECISE, LOG_MODE, True, HAS_MASK, STAGES,
            )  # fmt: skip
        if not HAS_MASK:
            b_total, b_largest = first_pass(
                b_total, b_largest, b_q, b_factor, keys, span, full_low, full_high,
                D, BD, BN, PRECISE, LOG_MODE, False, HAS_MASK, STAGES,
            )  # fmt: skip
        b_total, b_largest = first_pass(
            b_total, b_largest, b_q, b_factor, keys, span, full_high, n_high,
            D, BD, BN, PRECISE, LOG_MODE, True, HAS_MASK, STAGES,
        )  # fmt: skip
    if POWER != 0 and ONE_PASS:
        if HAS_WINDOW or HAS_RANGES:
            b_out, b_weight, b_largest = only_pass(
                b_out, b_weight, b_largest, b_q, b_factor, b_p, keys, span, n_low, full_low,
                D, BD, DV, BDV, BN, LOG_MODE, POWER, True, HAS_MASK, STAGES,
            )  # fmt: skip
        if not HAS_MASK:
            b_out, b_weight, b_largest = only_pass(
                b_out, b_weight, b_largest, b_q, b_factor, b_p, keys, span, full_low, full_high,
                D, BD, DV, BDV, BN, LOG_MODE, POWER, False, HAS_MASK, STAGES,
            )  # fmt: skip
        b_out, b_weight, b_largest = only_pass(
            b_out, b_weight, b_largest, b_q, b_factor, b_p, keys, span, full_high, n_high,
            D, BD, DV, BDV, BN, LOG_MODE, POWER, True, HAS_MASK, STAGES,
        )  # fmt: skip
    if POWER != 0:
        if OFFSET:
            b_total = tl.where(b_counts > 0, b_total, 1.0)
            b_offset = tl.where(b_counts > 3, 1.0, 0.0)
        else:
            b_total = tl.maximum(b_counts, 1.0)  # any number would do: it cancels
        b_slope = b_counts / b_total
        b_height = b_slope * softplus2(b_largest, LOG_MODE) - b_offset
        b_sharp = b_counts > 0
        if OFFSET:
            b_sharp = b_height > EQUAL_SCORES  # not where NaN
        b_flat = (b_counts > 0) & (b_sharp == 0)
        b_divisor = tl.where(b_sharp, b_height, 1.0)
        b_inverse = 1.0 / b_divisor
        if not PRECISE:
            b_slope = b_slope / b_divisor
            b_offset = b_offset / b_divisor
        tl.store(Total + p_row, b_total, mask=m_rows)
        tl.store(Height + p_row, tl.where(b_sharp, b_height, 0.0), mask=m_rows)
    sharpening = Sharpening(b_slope, b_offset, b_inverse, b_p)

    if POWER == 0 or not ONE_PASS:
        if HAS_WINDOW or HAS_RANGES:
            b_out, b_weight = second_pass(
                b_out, b_weight, b_q, b_factor, sharpening, keys, span, n_low, full_low,
                D, BD, DV, BDV, BN, PRECISE, LOG_MODE, POWER, OFFSET, True, HAS_MASK, STAGES,
            )  # fmt: skip
        if not HAS_MASK:
            b_out, b_weight = second_pass(
                b_out, b_weight, b_q, b_factor, sharpening, keys, span, full_low, full_high,
                D, BD, DV, BDV, BN, PRECISE, LOG_MODE, POWER, OFFSET, False, HAS_MASK, STAGES,
            )  # fmt: skip
        b_out, b_weight = second_pass(
            b_out, b_weight, b_q, b_factor, sharpening, keys, span, full_high, n_high,
            D, BD, DV, BDV, BN, PRECISE, LOG_MODE, POWER, OFFSET, True, HAS_MASK, STAGES,
        )  # fmt: skip

    any_flat = tl.max(b_flat.to(tl.int32))
    trouble = tl.max(tl.max(tl.where((b_out - b_out) == 0, 0, 1), 1))
    if POWER == 0:
        b_total = b_weight
        if V.dtype.element_ty == tl.float16:
            trouble = tl.maximum(trouble, tl.max((b_total < b_counts * 1e-3).to(tl.int32)))
    if (trouble > 0) | (any_flat > 0):
        b_level = b_counts / tl.where(b_total == 0, 1.0, b_total)
        b_out, b_weight = nan_safe_pass(
            tl.zeros([BM, BDV], tl.float32), tl.zeros([BM], tl.float32), b_flat, b_level, b_q, b_factor, sharpening,
            keys, span, n_low, n_high, D, BD, DV, BDV, BN, PRECISE, LOG_MODE, POWER, OFFSET, HAS_MASK, STAGES,
        )  # fmt: skip
        tl.atomic_max(Flat + bh, 1)
    b_out = b_out / tl.where(b_weight == 0, 1.0, b_weight)[:, None]
    if POWER == 0:
        b_weight = b_total
    tl.store(Weight + p_row, tl.where(b_weight == 0, 1.0, b_weight), mask=m_rows)
    p_out = Out + b * out_strides[0] + head * out_strides[1]
    store_rows(p_out, b_out, o_m, t_q, out_strides[2], DV, BDV)
    if HAS_REST:
        residual = b_out - b_out.to(Out.dtype.element_ty).to(tl.float32)
        store_rows(Residual + b * out_strides[0] + head * out_strides[1], residual, o_m, t_q, out_strides[2], DV, BDV)
