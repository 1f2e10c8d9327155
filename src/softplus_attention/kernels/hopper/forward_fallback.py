"""The fallback of the Hopper forward, for the few blocks with rows of equal scores or values that are not finite."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from softplus_attention.kernels.hopper.common import (
    by_thread,
    fineness,
    load_columns,
    noted_place,
    product_layout,
    query_norms,
    read_tile,
    row_scale,
    rows_and_keys,
    rows_of,
    seen_keys,
    store_tile,
)
from softplus_attention.kernels.triton.common import (
    FALLBACK_PROGRAMS,
    ROW_BLOCK,
    raised,
    score_factor,
    softplus2,
)


@gluon.jit
def nan_safe_pass(
    b_flat, b_level, b_factor, b_slope, b_offset, b_p, b_start, b_end, q_tile, k_ring, v_ring, p_k, p_v, p_norm, count,
    k_stride, v_stride, tiles,
    HAS_STARTS: gl.constexpr, POWER: gl.constexpr, LOG_MODE: gl.constexpr, D: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, LAYOUT: gl.constexpr, OUT_LAYOUT: gl.constexpr,
):  # fmt: skip
    """As ``triton.forward.nan_safe_pass``: output and sum of weights of a block with rows of equal scores, rows whose
    f' float16 cannot hold, or values that are not finite. Rare, and not optimized."""
    b_zero = gl.zeros([BM, BN], gl.float32, LAYOUT)
    b_out = gl.zeros([BM, D], gl.float32, OUT_LAYOUT)
    b_bad = gl.zeros([BM, D], gl.float32, OUT_LAYOUT)
    b_weight = gl.sum(by_thread(b_zero), 1)
    dtype: gl.constexpr = q_tile.dtype
    for j in range(0, tiles):
        n = j * BN
        k_ring.index(0).store(read_tile(p_k + n.to(gl.int64) * k_stride, count - n, k_stride, BN, D))
        b_v = read_tile(p_v + n.to(gl.int64) * v_stride, count - n, v_stride, BN, D)
        finite = (b_v - b_v) == 0
        v_ring.index(0).store(gl.where(finite, b_v, 0.0).to(dtype))
        v_ring.index(1).store(gl.where(finite, 0.0, 1.0).to(dtype))
        fence_async_shared()
        scores = warpgroup_mma(q_tile, k_ring.index(0).permute([1, 0]), b_zero, use_acc=False)
        f = softplus2(scores * load_columns(p_norm + n, BN, LAYOUT)[None, :] * b_factor[:, None], LOG_MODE)
        w = f * b_level[:, None]
        if POWER != 0:
            sharp = raised(gl.maximum(f * b_slope[:, None] - b_offset[:, None], 0.0), b_p[:, None], POWER, 0, LOG_MODE)
            w = gl.where(b_flat[:, None], w, sharp)
        w = gl.where(seen_keys(n, b_start, b_end, HAS_STARTS, BN, LAYOUT), w, 0.0)
        b_weight += gl.sum(by_thread(w), 1)
        operand: gl.constexpr = gl.DotOperandLayout(0, OUT_LAYOUT, 2)
        b_out = warpgroup_mma(gl.convert_layout(w.to(dtype), operand), v_ring.index(0), b_out)
        some = gl.convert_layout(gl.where(w != 0, 1.0, 0.0).to(dtype), operand)
        b_bad = warpgroup_mma(some, v_ring.index(1), b_bad)
    return gl.where(b_bad > 0, float("nan"), b_out), b_weight


@gluon.jit
def gluon_forward_again_kernel(
    Q, K, V, Out, Residual, Norms, Total, Height, Weight, Flat, Fallback, Start, End, Power,
    t_q, t_k, shared, h_kv, inverse, window, score_scale, growth, q_strides, k_strides, v_strides, out_strides,
    range_stride, power_strides,
    CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_RANGES: gl.constexpr, POWER: gl.constexpr,
    HAS_POWER_ROWS: gl.constexpr, HAS_REST: gl.constexpr, D: gl.constexpr, BN: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Output and weights of the blocks marked by ``gluon_forward_kernel``, from its sums and largest scores."""
    BM: gl.constexpr = ROW_BLOCK
    has_starts: gl.constexpr = HAS_WINDOW or HAS_RANGES
    layout: gl.constexpr = product_layout(BN)
    out_layout: gl.constexpr = product_layout(D)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    dtype: gl.constexpr = Q.dtype.element_ty
    of_keys: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, D], dtype)
    q_tile = gl.allocate_shared_memory(dtype, [BM, D], gl.NVMMASharedLayout.get_default_for([BM, D], dtype))
    k_ring = gl.allocate_shared_memory(dtype, [1, BN, D], of_keys)
    v_ring = gl.allocate_shared_memory(dtype, [2, BN, D], of_keys)
    for i in range(gl.program_id(0), gl.load(Fallback), FALLBACK_PROGRAMS):
        place, of_rows, span, p_norm = rows_and_keys(
            noted_place(gl.load(Fallback + 1 + i), gl.cdiv(t_q, BM), shared * h_kv), Norms, Start, End, Power,
            t_q, t_k, shared, h_kv, window, growth, range_stride, power_strides,
            CAUSAL, HAS_WINDOW, HAS_RANGES, POWER, HAS_POWER_ROWS, BM, BN, layout,
        )  # fmt: skip
        m, bh, b, head, kv_head = place
        o_m, b_counts, b_p = of_rows
        first_key, b_start, b_end, _, _, tiles = span
        p_k = rows_of(K, b, kv_head, first_key, k_strides)
        p_v = rows_of(V, b, kv_head, first_key, v_strides)
        m_rows = o_m < t_q
        p_row = bh * t_q + o_m

        q_tile.store(read_tile(rows_of(Q, b, head, m, q_strides), t_q - m, q_strides[2], BM, D))
        b_factor = score_factor(row_scale(score_scale, b_counts), query_norms(q_tile, layout))  # [BM]
        b_slope = gl.zeros([BM], gl.float32, rows)
        b_offset = b_slope
        b_flat = b_counts < 0
        if POWER == 0:
            b_total = gl.load(Weight + p_row, mask=m_rows, other=1.0)
        else:
            b_total = gl.load(Total + p_row, mask=m_rows, other=1.0)
            b_height = gl.load(Height + p_row, mask=m_rows, other=1.0)
            b_flat = (b_counts > 0) & (b_height == 0)
            b_divisor = gl.where(b_height == 0, 1.0, b_height)
            b_slope = b_counts / b_total / b_divisor
            b_offset = gl.where(b_counts > 3, 1.0, 0.0) / b_divisor
        b_level = b_counts / gl.where(b_total == 0, 1.0, b_total)
        b_out, b_partial = nan_safe_pass(
            b_flat, b_level, b_factor, b_slope, b_offset, b_p, b_start, b_end, q_tile, k_ring, v_ring, p_k, p_v, p_norm,
            t_k - first_key, k_strides[2], v_strides[2], tiles,
            has_starts, POWER, fineness(dtype, POWER), D, BM, BN, layout, out_layout,
        )  # fmt: skip
        b_weight = gl.convert_layout(gl.sum(b_partial, 1), rows)
        b_weight = gl.where(b_weight == 0, 1.0, b_weight)
        b_out = b_out * gl.convert_layout(1.0 / b_weight, gl.SliceLayout(1, out_layout))[:, None]
        if POWER != 0:
            gl.store(Weight + p_row, b_weight, mask=m_rows)
        store_tile(rows_of(Out, b, head, m, out_strides), b_out, q_tile, t_q - m, out_strides[2])
        if HAS_REST:
            residual = b_out - b_out.to(dtype).to(gl.float32)
            store_tile(rows_of(Residual, b, head, m, out_strides), residual, q_tile, t_q - m, out_strides[2])
