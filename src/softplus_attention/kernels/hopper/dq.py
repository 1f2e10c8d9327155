"""The gradient of the queries for ``hopper.forward``, and the terms of each row for ``hopper.dkv``."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from softplus_attention.kernels.hopper.backward import kept_rows, place_of_terms, score_terms, terms_of_a_row
from softplus_attention.kernels.hopper.common import (
    KeyTiles,
    RowScores,
    at_key,
    barriers,
    by_thread,
    copy_tile,
    expect_copies,
    fineness,
    invalidate_copies,
    load_columns,
    load_layout,
    mark_for_fallback,
    not_finite,
    noted_place,
    product_layout,
    program_position,
    query_norms,
    read_tile,
    row_scale,
    rows_and_keys,
    rows_of,
    seen_keys,
    store_tile,
    tile_of,
    wait_for_copies,
)
from softplus_attention.kernels.triton.common import (
    FALLBACK_PROGRAMS,
    LN2,
    MIN_EXPONENT,
    MIN_NORMAL,
    ROW_BLOCK,
    finite_rows,
    row_lift,
    score_factor,
)


class RowTerms(NamedTuple):
    """[BM] each: ``row_lift``; slope and offset of u; p - 1; sum of dO O; whether all scores are equal."""

    lift: gl.tensor
    slope: gl.tensor
    offset: gl.tensor
    below: gl.tensor
    delta: gl.tensor
    flat: gl.tensor


@gluon.jit
def dq_slopes(
    scores, b_norm, scoring, row, seen,
    POWER: gl.constexpr, LOG_MODE: gl.constexpr, MASKED: gl.constexpr, FLAT_ROWS: gl.constexpr, LIFTED: gl.constexpr,
):  # fmt: skip
    """Four tensors [BM, BN] for one tile: sigmoid over |k|, the factor of g, u and log2 u. LIFTED: the first is
    multiplied by ``row_lift``."""
    sigma, u, steepness, log_u = score_terms(
        scores, b_norm[None, :], scoring.factor[:, None], row.slope[:, None], row.offset[:, None], row.below[:, None],
        row.flat[:, None], seen, POWER, LOG_MODE, MASKED, FLAT_ROWS,
    )  # fmt: skip
    sigma = sigma * b_norm[None, :]
    if LIFTED:
        sigma = sigma * row.lift[:, None]
    return sigma, steepness, u, log_u


@gluon.jit
def dq_gradient(g, steepness, b_delta, POWER: gl.constexpr):
    """[BM, BN]: g of one tile."""
    g = g - b_delta[:, None]
    if POWER != 0:
        g = g * steepness
    return g


@gluon.jit
def with_moments(moments, u, g, steepness, log_u):
    """The three sums of ``triton.backward.PowerMoments``, separately in each thread."""
    log_u = gl.maximum(log_u, MIN_EXPONENT)  # finite where u, and so the weight, is 0
    return (
        moments[0] + gl.sum(by_thread(u * g * log_u), 1),
        moments[1] + gl.sum(by_thread(u * g), 1),
        moments[2] + gl.sum(by_thread(u * steepness * log_u), 1),
    )


@gluon.jit
def copy_keys(keys, j, n, wanted):
    """Starts the copies of the j-th tile of keys and values, from the n-th key in sight on, if wanted."""
    expect_copies(keys.copied, j, keys.k_ring, 2, wanted)
    copy_tile(keys.copied, j, keys.k_ring, j & 1, keys.K, at_key(keys, n), wanted)
    copy_tile(keys.copied, j, keys.v_ring, j & 1, keys.V, at_key(keys, n), wanted)


@gluon.jit
def dq_loop(
    b_steep, b_even, b_sum, moments, b_a, b_b, b_zero, q_tile, do_tile, scoring, row, keys, low, high,
    MASKED: gl.constexpr, HAS_STARTS: gl.constexpr, POWER: gl.constexpr, POWER_GRAD: gl.constexpr, BN: gl.constexpr,
    LAYOUT: gl.constexpr, OUT_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Adds the tiles [low, high) to each row's sum sigmoid g k, sum sigmoid k and, separately in each thread, sum g and
    moments.

    Products complete in order of issue. One of the four runs during all arithmetic that does not need it.
    """
    operand: gl.constexpr = gl.DotOperandLayout(0, OUT_LAYOUT, 2)
    fine: gl.constexpr = fineness(q_tile.dtype, POWER)
    for j in range(low, high):
        slot = j & 1
        wait_for_copies(keys.copied, j)
        k_tile = tile_of(keys.k_ring, slot)
        b_norm = load_columns(keys.p_norm + j * BN, BN, LAYOUT)
        scores = warpgroup_mma(q_tile, k_tile.permute([1, 0]), b_zero, use_acc=False, is_async=True)
        g = warpgroup_mma(do_tile, tile_of(keys.v_ring, slot).permute([1, 0]), b_zero, use_acc=False, is_async=True)
        if POWER != 0:
            scores, b_steep, b_even, b_a, b_b = warpgroup_mma_wait(1, deps=[scores, b_steep, b_even, b_a, b_b])
        else:
            scores, b_steep, b_a = warpgroup_mma_wait(1, deps=[scores, b_steep, b_a])
        copy_keys(keys, j + 1, (j + 1) * BN, j + 1 < keys.count)
        seen = seen_keys(j * BN, scoring.start, scoring.end, HAS_STARTS, BN, LAYOUT)
        sigma, steepness, u, log_u = dq_slopes(
            scores, b_norm, scoring, row, seen,
            POWER, fine, MASKED, False, q_tile.dtype == gl.float16,
        )  # fmt: skip
        if POWER != 0:
            b_b = gl.convert_layout(sigma.to(q_tile.dtype), operand, assert_trivial=True)
            b_even = warpgroup_mma(b_b, k_tile, b_even, is_async=True)
            g = warpgroup_mma_wait(1, deps=[g])
        else:
            g = warpgroup_mma_wait(0, deps=[g])
        g = dq_gradient(g, steepness, row.delta, POWER)
        if POWER != 0:
            b_sum += gl.sum(by_thread(g), 1)
        if POWER_GRAD:
            moments = with_moments(moments, u, g, steepness, log_u)
        b_a = gl.convert_layout((sigma * g).to(q_tile.dtype), operand, assert_trivial=True)
        b_steep = warpgroup_mma(b_a, k_tile, b_steep, is_async=True)
    return b_steep, b_even, b_sum, moments, b_a, b_b


@gluon.jit
def dq_carefully(
    q_tile, do_tile, scoring, row, k_ring, v_ring, p_k, p_v, p_norm, count, k_stride, v_stride, tiles,
    HAS_STARTS: gl.constexpr, POWER: gl.constexpr, POWER_GRAD: gl.constexpr, D: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, LAYOUT: gl.constexpr, OUT_LAYOUT: gl.constexpr,
):  # fmt: skip
    """All tiles of a block with rows of equal scores or with numbers that are not finite: keys that a row does not see
    are ignored even if they are NaN. Rare, and not optimized."""
    operand: gl.constexpr = gl.DotOperandLayout(0, OUT_LAYOUT, 2)
    dtype: gl.constexpr = q_tile.dtype
    b_zero = gl.zeros([BM, BN], gl.float32, LAYOUT)
    b_steep = gl.zeros([BM, D], gl.float32, OUT_LAYOUT)
    b_even = gl.zeros([BM, D], gl.float32, OUT_LAYOUT)
    b_sum = gl.sum(by_thread(b_zero), 1)
    moments = (b_sum, b_sum, b_sum)
    for j in range(0, tiles):
        n = j * BN
        b_k = read_tile(p_k + n.to(gl.int64) * k_stride, count - n, k_stride, BN, D)
        k_tile, finite_tile, v_tile = tile_of(k_ring, 0), tile_of(k_ring, 1), tile_of(v_ring, 0)
        k_tile.store(b_k)
        finite_tile.store(finite_rows(b_k))  # rows that see a NaN key are NaN by their sums
        v_tile.store(read_tile(p_v + n.to(gl.int64) * v_stride, count - n, v_stride, BN, D))
        fence_async_shared()
        scores = warpgroup_mma(q_tile, k_tile.permute([1, 0]), b_zero, use_acc=False)
        g = warpgroup_mma(do_tile, v_tile.permute([1, 0]), b_zero, use_acc=False)
        seen = seen_keys(n, scoring.start, scoring.end, HAS_STARTS, BN, LAYOUT)
        b_norm = load_columns(p_norm + n, BN, LAYOUT)
        sigma, steepness, u, log_u = dq_slopes(
            scores, b_norm, scoring, row, seen,
            POWER, fineness(dtype, POWER), True, True, dtype == gl.float16,
        )  # fmt: skip
        if POWER != 0:
            g = gl.where(steepness == 0, row.delta[:, None], g)  # also for values that are not finite
        g = gl.where(seen, dq_gradient(g, steepness, row.delta, POWER), 0.0)
        sigma = gl.where(seen, sigma, 0.0)  # it may be 0 times the norm of a NaN key
        b_sum += gl.sum(by_thread(g), 1)
        if POWER_GRAD:
            moments = with_moments(moments, u, g, steepness, log_u)
        b_even = warpgroup_mma(gl.convert_layout(sigma.to(dtype), operand), finite_tile, b_even)
        b_steep = warpgroup_mma(gl.convert_layout((sigma * g).to(dtype), operand), finite_tile, b_steep)
    return b_steep, b_even, b_sum, moments


@gluon.jit
def dq_block(
    place, Q, K, V, GradOut, Out, Residual, Norms, Total, Height, Weight, Fallback, Start, End, Power, GradQ, GradPower,
    Rows, t_q, t_k, shared, h_kv, window, score_scale, growth, q_strides, k_strides, v_strides, out_strides,
    grad_out_strides, dq_strides, range_stride, power_strides,
    CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_RANGES: gl.constexpr, POWER: gl.constexpr,
    HAS_POWER_ROWS: gl.constexpr, POWER_GRAD: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, BLOCK: gl.constexpr,
    AGAIN: gl.constexpr,
):  # fmt: skip
    """One block of rows. AGAIN is the fallback, for blocks that the first launch has marked. Q, K, V and GradOut are
    descriptors, in the fallback pointers."""
    BM: gl.constexpr = ROW_BLOCK
    has_starts: gl.constexpr = HAS_WINDOW or HAS_RANGES
    layout: gl.constexpr = product_layout(BN)
    out_layout: gl.constexpr = product_layout(D)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    out_rows: gl.constexpr = gl.SliceLayout(1, out_layout)
    by_row: gl.constexpr = load_layout(D, gl.num_warps())
    dtype: gl.constexpr = Out.dtype.element_ty

    place, of_rows, of_keys, p_norm = rows_and_keys(
        place, Norms, Start, End, Power, t_q, t_k, shared, h_kv, window, growth, range_stride, power_strides,
        CAUSAL, HAS_WINDOW, HAS_RANGES, POWER, HAS_POWER_ROWS, BM, BN, layout,
    )  # fmt: skip
    m, bh, b, head, kv_head = place
    o_m, b_counts, b_p = of_rows
    first_key, b_start, b_end, full_low, full_high, tiles = of_keys
    m_rows = o_m < t_q
    b_below = gl.maximum(b_p - 1.0, MIN_NORMAL)  # 0 * log(0) would be NaN
    p_row = bh * t_q + o_m

    row_tiles: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, BM, D], dtype)
    key_tiles: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, BN, D], dtype)
    q_ring = gl.allocate_shared_memory(dtype, [2, 1, 1, BM, D], row_tiles)  # q and the gradient of the output
    k_ring = gl.allocate_shared_memory(dtype, [2, 1, 1, BN, D], key_tiles)
    v_ring = gl.allocate_shared_memory(dtype, [2, 1, 1, BN, D], key_tiles)
    q_tile = tile_of(q_ring, 0)
    do_tile = tile_of(q_ring, 1)
    if not AGAIN:
        keys = KeyTiles(k_ring, v_ring, barriers(2), K, V, (b, kv_head, first_key), p_norm, tiles)
        rows_copied = barriers(1)
        expect_copies(rows_copied, 0, q_ring, 2)
        copy_tile(rows_copied, 0, q_ring, 0, Q, (b, head, m))
        copy_tile(rows_copied, 0, q_ring, 1, GradOut, (b, head, m))
        copy_keys(keys, 0, 0, tiles > 0)

    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, by_row))
    o_out = m + gl.arange(0, BM, layout=gl.SliceLayout(1, by_row))
    p_out = o_out.to(gl.int64)[:, None] * out_strides[2] + o_d[None, :] + (b * out_strides[0] + head * out_strides[1])
    m_out = (o_out < t_q)[:, None]
    b_o = gl.load(Out + p_out, mask=m_out, other=0.0).to(gl.float32)
    b_o += gl.load(Residual + p_out, mask=m_out, other=0.0).to(gl.float32)
    if AGAIN:
        q_tile.store(read_tile(rows_of(Q, b, head, m, q_strides), t_q - m, q_strides[2], BM, D))
        do_tile.store(read_tile(rows_of(GradOut, b, head, m, grad_out_strides), t_q - m, grad_out_strides[2], BM, D))
    else:
        wait_for_copies(rows_copied, 0)
    b_delta = gl.convert_layout(gl.sum(b_o * do_tile.load(by_row).to(gl.float32), 1), rows)  # [BM]
    b_inverse = query_norms(q_tile, layout)
    b_scale = row_scale(score_scale, b_counts)
    b_factor = score_factor(b_scale, b_inverse)

    b_weight = gl.load(Weight + p_row, mask=m_rows, other=1.0)
    b_least = gl.maximum(b_counts, 1.0)
    b_excess = gl.where(b_counts > 3, 1.0, 0.0)
    b_flat = b_counts < 0
    b_offset = gl.zeros([BM], gl.float32, rows)
    if POWER == 0:
        b_ratio = b_counts / (b_weight * LN2)  # N / R
        b_lift = row_lift(b_weight)
        b_slope = 1.0 / b_weight
        b_alpha = 1.0 / b_least
    else:
        b_total = gl.load(Total + p_row, mask=m_rows, other=1.0)
        b_height = gl.load(Height + p_row, mask=m_rows, other=1.0)
        b_ratio = b_counts / (b_total * LN2)
        b_lift = row_lift((b_height + b_excess) * b_total / b_least)
        b_flat = b_height == 0
        b_divisor = gl.where(b_flat, 1.0, b_height)
        b_root = gl.exp2(-gl.log2(b_weight) / b_p)  # W^(-1/p)
        b_slope = gl.where(b_flat, 1.0 / b_total, b_counts / b_total / b_divisor * b_root)
        b_offset = gl.where(b_flat, 0.0, b_excess / b_divisor * b_root)
        b_alpha = gl.where(b_flat, 1.0 / b_least, b_p / b_divisor * b_root)

    scoring = RowScores(b_factor, b_start, b_end)
    row = RowTerms(b_lift, b_slope, b_offset, b_below, b_delta, b_flat)
    if AGAIN:
        b_steep, b_even, b_sum, moments = dq_carefully(
            q_tile, do_tile, scoring, row, k_ring, v_ring, rows_of(K, b, kv_head, first_key, k_strides),
            rows_of(V, b, kv_head, first_key, v_strides), p_norm, t_k - first_key, k_strides[2], v_strides[2], tiles,
            has_starts, POWER, POWER_GRAD, D, BM, BN, layout, out_layout,
        )  # fmt: skip
    else:
        b_zero = gl.zeros([BM, BN], gl.float32, layout)
        b_none = gl.zeros([BM, BN], dtype, gl.DotOperandLayout(0, out_layout, 2))
        b_steep = warpgroup_mma_init(gl.zeros([BM, D], gl.float32, out_layout))
        b_even = warpgroup_mma_init(gl.zeros([BM, D], gl.float32, out_layout))
        b_sum = gl.sum(by_thread(b_zero), 1)
        moments = (b_sum, b_sum, b_sum)
        b_a = b_none
        b_b = b_none
        if has_starts:
            b_steep, b_even, b_sum, moments, b_a, b_b = dq_loop(
                b_steep, b_even, b_sum, moments, b_a, b_b, b_zero, q_tile, do_tile, scoring, row, keys,
                0, full_low, True, True, POWER, POWER_GRAD, BN, layout, out_layout,
            )  # fmt: skip
        b_steep, b_even, b_sum, moments, b_a, b_b = dq_loop(
            b_steep, b_even, b_sum, moments, b_a, b_b, b_zero, q_tile, do_tile, scoring, row, keys,
            full_low, full_high, False, has_starts, POWER, POWER_GRAD, BN, layout, out_layout,
        )  # fmt: skip
        b_steep, b_even, b_sum, moments, b_a, b_b = dq_loop(
            b_steep, b_even, b_sum, moments, b_a, b_b, b_zero, q_tile, do_tile, scoring, row, keys,
            full_high, tiles, True, has_starts, POWER, POWER_GRAD, BN, layout, out_layout,
        )  # fmt: skip
        b_steep, b_even, b_a, b_b = warpgroup_mma_wait(0, deps=[b_steep, b_even, b_a, b_b])
        invalidate_copies(keys.copied)
        invalidate_copies(rows_copied)
        trouble = gl.maximum(not_finite(b_steep + b_even), gl.max((b_flat & (b_counts > 0)).to(gl.int32), 0))
        mark_for_fallback(Fallback, trouble)

    b_epsilon = gl.zeros([BM], gl.float32, rows)
    b_grad = gl.convert_layout(b_alpha, out_rows)[:, None] * b_steep
    if POWER != 0:
        b_sums = gl.convert_layout(gl.sum(b_sum, 1), rows)
        b_epsilon = gl.where(b_flat, 0.0, b_excess / b_least * b_alpha * b_sums)
        b_grad -= gl.convert_layout(b_epsilon, out_rows)[:, None] * b_even
    b_chain = b_ratio * b_scale
    if dtype == gl.float16:
        b_chain = b_chain / b_lift
    b_grad = b_grad * gl.convert_layout(b_chain, out_rows)[:, None]
    b_length = gl.convert_layout(b_inverse, out_rows)[:, None]
    b_unit = q_tile.load(out_layout).to(gl.float32) * b_length
    b_grad = (b_grad - b_unit * gl.sum(b_unit * b_grad, 1)[:, None]) * b_length
    b_grad = gl.where(gl.convert_layout(b_counts, out_rows)[:, None] > 0, b_grad, 0.0)
    store_tile(rows_of(GradQ, b, head, m, dq_strides), b_grad, do_tile, t_q - m, dq_strides[2])

    if POWER_GRAD:
        b_product = gl.convert_layout(gl.sum(moments[0], 1), rows)
        b_gain = gl.convert_layout(gl.sum(moments[1], 1), rows)
        b_log = gl.convert_layout(gl.sum(moments[2], 1), rows)
        gl.store(GradPower + p_row, gl.where(b_flat, 0.0, (b_product - b_gain * b_log) * LN2), mask=m_rows)

    b_outer = b_ratio * b_scale * b_inverse
    # Also for rows past the end: they multiply zeros.
    p_terms = Rows + place_of_terms(bh * kept_rows(t_q) + o_m, terms_of_a_row(POWER, HAS_RANGES), BLOCK)
    gl.store(p_terms, b_factor)
    gl.store(p_terms + BLOCK, b_slope)
    gl.store(p_terms + 2 * BLOCK, gl.where(b_flat, -1e-30, b_offset))
    gl.store(p_terms + 3 * BLOCK, b_alpha * b_outer)
    gl.store(p_terms + 4 * BLOCK, b_alpha * b_outer * b_delta)
    gl.store(p_terms + 5 * BLOCK, b_epsilon * b_outer)
    if POWER < 0:
        gl.store(p_terms + 6 * BLOCK, b_below)
    if HAS_RANGES:
        p_terms += (terms_of_a_row(POWER, HAS_RANGES) - 2) * BLOCK
        gl.store(p_terms, (b_start + first_key).to(gl.float32))
        gl.store(p_terms + BLOCK, (b_end + first_key).to(gl.float32))


@gluon.jit
def gluon_dq_kernel(
    Q, K, V, GradOut, Out, Residual, Norms, Total, Height, Weight, Fallback, Start, End, Power, GradQ, GradPower, Rows,
    t_q, t_k, shared, h_kv, inverse, window, score_scale, growth, q_strides, k_strides, v_strides, out_strides,
    grad_out_strides, dq_strides, range_stride, power_strides,
    CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_RANGES: gl.constexpr, POWER: gl.constexpr,
    HAS_POWER_ROWS: gl.constexpr, POWER_GRAD: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, BLOCK: gl.constexpr,
    AGAIN: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Reads and writes the same as ``dq_kernel``; BLOCK is the BM of ``gluon_dkv_kernel``, which reads Rows.

    AGAIN: only the blocks that the first launch has listed in Fallback, as in ``gluon_forward_again_kernel``.
    """
    if AGAIN:
        for i in range(gl.program_id(0), gl.load(Fallback), FALLBACK_PROGRAMS):
            dq_block(
                noted_place(gl.load(Fallback + 1 + i), gl.cdiv(t_q, ROW_BLOCK), shared * h_kv),
                Q, K, V, GradOut, Out, Residual, Norms, Total, Height, Weight, Fallback, Start, End,
                Power, GradQ, GradPower, Rows, t_q, t_k, shared, h_kv, window, score_scale, growth, q_strides,
                k_strides, v_strides, out_strides, grad_out_strides, dq_strides, range_stride, power_strides,
                CAUSAL, HAS_WINDOW, HAS_RANGES, POWER, HAS_POWER_ROWS, POWER_GRAD, D, BN, BLOCK, True,
            )  # fmt: skip
    else:
        dq_block(
            program_position(shared * h_kv, inverse), Q, K, V, GradOut, Out, Residual, Norms, Total, Height, Weight,
            Fallback, Start,
            End, Power, GradQ, GradPower, Rows, t_q, t_k, shared, h_kv, window, score_scale, growth, q_strides,
            k_strides, v_strides, out_strides, grad_out_strides, dq_strides, range_stride, power_strides,
            CAUSAL, HAS_WINDOW, HAS_RANGES, POWER, HAS_POWER_ROWS, POWER_GRAD, D, BN, BLOCK, False,
        )  # fmt: skip
