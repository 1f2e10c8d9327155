"""The gradients of keys and values for ``hopper.forward``, from the terms of each row that ``hopper.dq`` stored."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from softplus_attention.kernels.hopper.backward import kept_rows, place_of_terms, score_terms, terms_of_a_row
from softplus_attention.kernels.hopper.common import (
    barriers,
    copy_tile,
    expect_copies,
    fineness,
    invalidate_copies,
    mark_for_fallback,
    not_finite,
    noted_place,
    product_layout,
    program_position,
    read_tile,
    rows_of,
    store_tile,
    tile_of,
    wait_for_copies,
)
from softplus_attention.kernels.triton.common import FALLBACK_PROGRAMS, ROW_BLOCK, finite_rows, norm_stride


@gluon.jit
def dkv_slopes(
    scores, b_norm, b_factor, b_slope, b_offset, b_below, seen,
    POWER: gl.constexpr, LOG_MODE: gl.constexpr, MASKED: gl.constexpr, FLAT_ROWS: gl.constexpr,
):  # fmt: skip
    """Three tensors [BN, BM] for one tile: weights, sigmoid, and the factor of g."""
    sigma, weight, steepness, _ = score_terms(
        scores, b_norm[:, None], b_factor[None, :], b_slope[None, :], b_offset[None, :], b_below[None, :],
        b_offset[None, :] < 0, seen, POWER, LOG_MODE, MASKED, FLAT_ROWS,
    )  # fmt: skip
    if POWER != 0:
        weight = weight * steepness
    return weight, sigma, steepness


@gluon.jit
def dkv_gradient(g, sigma, steepness, b_alpha, b_delta, b_epsilon, POWER: gl.constexpr):
    """[BN, BM]: gradients of the scores of one tile; b_delta includes the factor b_alpha."""
    g = g * b_alpha[None, :] - b_delta[None, :]
    if POWER != 0:
        g = g * steepness - b_epsilon[None, :]
    return sigma * g


@gluon.jit
def seeing_rows(o_m, o_n, t_q, t_k, window, HAS_WINDOW: gl.constexpr):
    """[BN, BM]: whether each row of a causal problem sees each key. Rows past the end have zero gradients, and the
    gradients of keys past the end are not stored."""
    seen = (o_n - (t_k - t_q))[:, None] <= o_m[None, :]
    if HAS_WINDOW:
        seen = seen & ((o_n - (t_k - t_q - window))[:, None] > o_m[None, :])
    return seen


@gluon.jit
def ranged_rows(o_n, b_start, b_end):
    """[BN, BM]: whether each row sees each key, for ranges given per row."""
    n = o_n.to(gl.float32)[:, None]
    return (n >= b_start[None, :]) & (n < b_end[None, :])


class RowTiles(NamedTuple):
    """Source and destination of the tiles of a head's rows."""

    q_ring: gl.shared_memory_descriptor
    do_ring: gl.shared_memory_descriptor
    term_ring: gl.shared_memory_descriptor
    copied: gl.shared_memory_descriptor
    Q: tma.tensor_descriptor
    GradOut: tma.tensor_descriptor
    place: gl.tuple  # sequence, head
    Terms: gl.tensor  # stored by ``gluon_dq_kernel`` for all rows
    first_row: gl.tensor  # of the head


@gluon.jit
def copy_rows(rows, s, i, wanted, TERMS: gl.constexpr, BM: gl.constexpr):
    """Starts the copies s if wanted: the i-th tile of a head's queries and output gradients by TMA, and the terms of
    its rows by cp.async."""
    at = (rows.place[0], rows.place[1], i * BM)
    expect_copies(rows.copied, s, rows.q_ring, 2, wanted)
    copy_tile(rows.copied, s, rows.q_ring, s & 1, rows.Q, at, wanted)
    copy_tile(rows.copied, s, rows.do_ring, s & 1, rows.GradOut, at, wanted)
    o = gl.arange(0, rows.term_ring.shape[1], layout=gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
    p_terms = rows.Terms + (rows.first_row + i * BM) * TERMS + o
    async_copy.async_copy_global_to_shared(rows.term_ring.index(s & 1), p_terms, mask=(o < TERMS * BM) & wanted)
    async_copy.commit_group()


@gluon.jit
def term(terms, PLACE: gl.constexpr, BM: gl.constexpr, LAYOUT: gl.constexpr):
    """[BM]: one of the terms of each row, along the columns of LAYOUT."""
    return terms.slice(PLACE * BM, BM).load(gl.SliceLayout(0, LAYOUT))


@gluon.jit
def dkv_loop(
    b_dk, b_dv, b_w, b_ds, b_zero, b_norm, o_n, k_tile, v_tile, rows, t_q, t_k, window, first, low, high, end,
    MASKED: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_RANGES: gl.constexpr, POWER: gl.constexpr, BM: gl.constexpr,
    LAYOUT: gl.constexpr, OUT_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Adds the tiles [low, high) of rows to the gradients of a block of keys. Products overlap as in ``dq_loop``. The
    copies of tile i have the number first + i; ``end`` is the end of all tiles."""
    count: gl.constexpr = terms_of_a_row(POWER, HAS_RANGES)
    operand: gl.constexpr = gl.DotOperandLayout(0, OUT_LAYOUT, 2)
    dtype: gl.constexpr = k_tile.dtype
    for i in range(low, high):
        s = first + i
        async_copy.wait_group(0)
        wait_for_copies(rows.copied, s)
        q_tile = tile_of(rows.q_ring, s & 1)
        do_tile = tile_of(rows.do_ring, s & 1)
        scores = warpgroup_mma(k_tile, q_tile.permute([1, 0]), b_zero, use_acc=False, is_async=True)
        g = warpgroup_mma(v_tile, do_tile.permute([1, 0]), b_zero, use_acc=False, is_async=True)
        scores, b_dk, b_dv, b_w, b_ds = warpgroup_mma_wait(1, deps=[scores, b_dk, b_dv, b_w, b_ds])
        copy_rows(rows, s + 1, i + 1, i + 1 < end, count, BM)
        terms = rows.term_ring.index(s & 1)
        o_m = i * BM + gl.arange(0, BM, layout=gl.SliceLayout(0, LAYOUT))
        if HAS_RANGES:
            seen = ranged_rows(o_n, term(terms, count - 2, BM, LAYOUT), term(terms, count - 1, BM, LAYOUT))
        else:
            seen = seeing_rows(o_m, o_n, t_q, t_k, window, HAS_WINDOW)
        b_offset = term(terms, 2, BM, LAYOUT)
        b_below = b_offset  # unused if the power is a number
        if POWER < 0:
            b_below = term(terms, 6, BM, LAYOUT)
        weight, sigma, steepness = dkv_slopes(
            scores, b_norm, term(terms, 0, BM, LAYOUT), term(terms, 1, BM, LAYOUT), b_offset, b_below,
            seen, POWER, fineness(dtype, POWER), MASKED, False,
        )  # fmt: skip
        b_w = gl.convert_layout(weight.to(dtype), operand, assert_trivial=True)
        b_dv = warpgroup_mma(b_w, do_tile, b_dv, is_async=True)
        g = warpgroup_mma_wait(1, deps=[g])
        ds = dkv_gradient(
            g, sigma, steepness, term(terms, 3, BM, LAYOUT), term(terms, 4, BM, LAYOUT), term(terms, 5, BM, LAYOUT),
            POWER,
        )  # fmt: skip
        b_ds = gl.convert_layout(ds.to(dtype), operand, assert_trivial=True)
        b_dk = warpgroup_mma(b_ds, q_tile, b_dk, is_async=True)
    return b_dk, b_dv, b_w, b_ds


@gluon.jit
def dkv_carefully(
    b_dk, b_dv, b_zero, b_norm, o_n, k_tile, v_tile, q_ring, do_ring, p_q, p_do, Rows, first_row, t_q, t_k, window,
    q_stride, do_stride, low, high,
    CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_RANGES: gl.constexpr, POWER: gl.constexpr, D: gl.constexpr,
    BM: gl.constexpr, LAYOUT: gl.constexpr, OUT_LAYOUT: gl.constexpr,
):  # fmt: skip
    """As ``dq_carefully``: rows of equal scores are handled, and rows that do not see a key ignored even if NaN."""
    operand: gl.constexpr = gl.DotOperandLayout(0, OUT_LAYOUT, 2)
    dtype: gl.constexpr = k_tile.dtype
    count: gl.constexpr = terms_of_a_row(POWER, HAS_RANGES)
    for i in range(low, high):
        m = i * BM
        b_q = read_tile(p_q + m.to(gl.int64) * q_stride, t_q - m, q_stride, BM, D)
        q_tile, finite_tile, do_tile = tile_of(q_ring, 0), tile_of(q_ring, 1), tile_of(do_ring, 0)
        q_tile.store(b_q)
        finite_tile.store(finite_rows(b_q))
        do_tile.store(read_tile(p_do + m.to(gl.int64) * do_stride, t_q - m, do_stride, BM, D))
        fence_async_shared()
        scores = warpgroup_mma(k_tile, q_tile.permute([1, 0]), b_zero, use_acc=False)
        g = warpgroup_mma(v_tile, do_tile.permute([1, 0]), b_zero, use_acc=False)
        o_m = m + gl.arange(0, BM, layout=gl.SliceLayout(0, LAYOUT))
        p = Rows + place_of_terms(first_row + o_m, count, BM)
        seen = (o_m < t_q)[None, :] & (o_n < t_k)[:, None]
        if HAS_RANGES:
            seen = seen & ranged_rows(o_n, gl.load(p + (count - 2) * BM), gl.load(p + (count - 1) * BM))
        elif CAUSAL:
            seen = seen & seeing_rows(o_m, o_n, t_q, t_k, window, HAS_WINDOW)
        b_offset = gl.load(p + 2 * BM)
        b_below = b_offset
        if POWER < 0:
            b_below = gl.load(p + 6 * BM)
        weight, sigma, steepness = dkv_slopes(
            scores, b_norm, gl.load(p), gl.load(p + BM), b_offset, b_below, seen,
            POWER, fineness(dtype, POWER), True, True,
        )  # fmt: skip
        b_delta = gl.load(p + 4 * BM)
        if POWER != 0:
            g = gl.where(steepness == 0, b_delta[None, :], g)
        ds = dkv_gradient(g, sigma, steepness, gl.load(p + 3 * BM), b_delta, gl.load(p + 5 * BM), POWER)
        ds = gl.where(seen, ds, 0.0)
        b_dv = warpgroup_mma(gl.convert_layout(weight.to(dtype), operand), do_tile, b_dv)
        b_dk = warpgroup_mma(gl.convert_layout(ds.to(dtype), operand), finite_tile, b_dk)
    return b_dk, b_dv


@gluon.jit
def dkv_block(
    place, Q, K, V, GradOut, Norms, Flat, Fallback, Rows, FirstRow, LastRow, GradK, GradV,
    t_q, t_k, shared, h_kv, window, q_strides, k_strides, v_strides, grad_out_strides, dk_strides, dv_strides,
    seen_stride,
    CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_RANGES: gl.constexpr, POWER: gl.constexpr,
    NORMALIZED_KEYS: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, AGAIN: gl.constexpr,
):  # fmt: skip
    """One block of keys. AGAIN is the fallback, for blocks that the first launch has marked. Q, K, V and GradOut are
    descriptors, in the fallback pointers."""
    BN: gl.constexpr = ROW_BLOCK
    layout: gl.constexpr = product_layout(BM)
    out_layout: gl.constexpr = product_layout(D)
    dtype: gl.constexpr = GradK.dtype.element_ty

    block, kv_head, b = place
    n = block * BN  # the first keys are seen by the most rows
    b, kv_head = b.to(gl.int64), kv_head.to(gl.int64)  # int64, since they are multiplied by 32-bit strides
    bh = b * h_kv + kv_head
    h = shared * h_kv
    o_n = n + gl.arange(0, BN, layout=gl.SliceLayout(1, layout))
    b_norm = gl.load(Norms + bh * norm_stride(t_k) + o_n)
    # The tiles [low, high) of rows see some of these keys; those of [full_low, full_high) see all of them.
    low = 0
    full_low = 0
    high = gl.cdiv(t_q, BM)
    full_high = high
    if CAUSAL:
        before = t_k - t_q
        past = gl.minimum(n + BN, t_k)
        if HAS_WINDOW:
            high = gl.cdiv(gl.maximum(gl.minimum(t_q, past + window - 1 - before), 0), BM)
            full_high = gl.maximum(gl.minimum(t_q, n + window - before), 0) // BM
        low = gl.minimum(gl.maximum(n - before, 0) // BM, high)
        full_low = gl.minimum(gl.cdiv(gl.maximum(past - 1 - before, 0), BM), high)
        if HAS_WINDOW:
            full_high = gl.maximum(full_high, full_low)
    if HAS_RANGES:
        p_seen = b * seen_stride + n // BN
        high = gl.minimum(high, gl.cdiv(gl.load(LastRow + p_seen), BM))
        low = gl.minimum(gl.maximum(low, gl.load(FirstRow + p_seen) // BM), high)
        full_low = high
        full_high = high

    of_rows: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, BM, D], dtype)
    of_keys: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, BN, D], dtype)
    of_terms: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_ring = gl.allocate_shared_memory(dtype, [2, 1, 1, BN, D], of_keys)  # keys and values
    q_ring = gl.allocate_shared_memory(dtype, [2, 1, 1, BM, D], of_rows)
    do_ring = gl.allocate_shared_memory(dtype, [2, 1, 1, BM, D], of_rows)
    count: gl.constexpr = terms_of_a_row(POWER, HAS_RANGES)
    term_ring = gl.allocate_shared_memory(gl.float32, [2, (8 if count <= 8 else 16) * BM], of_terms)
    k_tile = tile_of(k_ring, 0)
    v_tile = tile_of(k_ring, 1)

    b_zero = gl.zeros([BN, BM], gl.float32, layout)
    b_none = gl.zeros([BN, BM], dtype, gl.DotOperandLayout(0, out_layout, 2))
    b_dk = gl.zeros([BN, D], gl.float32, out_layout)
    b_dv = gl.zeros([BN, D], gl.float32, out_layout)
    if AGAIN:
        k_tile.store(read_tile(rows_of(K, b, kv_head, n, k_strides), t_k - n, k_strides[2], BN, D))
        v_tile.store(read_tile(rows_of(V, b, kv_head, n, v_strides), t_k - n, v_strides[2], BN, D))
        for i in range(0, shared):
            head = kv_head * shared + i
            b_dk, b_dv = dkv_carefully(
                b_dk, b_dv, b_zero, b_norm, o_n, k_tile, v_tile, q_ring, do_ring,
                Q + b * q_strides[0] + head * q_strides[1],
                GradOut + b * grad_out_strides[0] + head * grad_out_strides[1],
                Rows, (b * h + head) * kept_rows(t_q), t_q, t_k, window, q_strides[2], grad_out_strides[2],
                low, high, CAUSAL, HAS_WINDOW, HAS_RANGES, POWER, D, BM, layout, out_layout,
            )  # fmt: skip
    else:
        copied = barriers(2)
        keys_copied = barriers(1)
        expect_copies(keys_copied, 0, k_ring, 2)
        copy_tile(keys_copied, 0, k_ring, 0, K, (b, kv_head, n))
        copy_tile(keys_copied, 0, k_ring, 1, V, (b, kv_head, n))
        wait_for_copies(keys_copied, 0)
        trouble = 0
        first = gl.to_tensor(0) - low
        for i in range(0, shared):
            head = kv_head * shared + i
            if POWER != 0:
                trouble = gl.maximum(trouble, gl.load(Flat + b * h + head))
            first_row = (b * h + head) * kept_rows(t_q)
            rows = RowTiles(q_ring, do_ring, term_ring, copied, Q, GradOut, (b, head), Rows, first_row)
            copy_rows(rows, first + low, low, low < high, count, BM)
            t_dk = warpgroup_mma_init(b_dk)
            t_dv = warpgroup_mma_init(b_dv)
            b_w = b_none
            b_ds = b_none
            t_dk, t_dv, b_w, b_ds = dkv_loop(
                t_dk, t_dv, b_w, b_ds, b_zero, b_norm, o_n, k_tile, v_tile, rows, t_q, t_k, window, first,
                low, full_low, high, True, HAS_WINDOW, HAS_RANGES, POWER, BM, layout, out_layout,
            )  # fmt: skip
            t_dk, t_dv, b_w, b_ds = dkv_loop(
                t_dk, t_dv, b_w, b_ds, b_zero, b_norm, o_n, k_tile, v_tile, rows, t_q, t_k, window, first,
                full_low, full_high, high, False, HAS_WINDOW, HAS_RANGES, POWER, BM, layout, out_layout,
            )  # fmt: skip
            if HAS_WINDOW:
                t_dk, t_dv, b_w, b_ds = dkv_loop(
                    t_dk, t_dv, b_w, b_ds, b_zero, b_norm, o_n, k_tile, v_tile, rows, t_q, t_k, window, first,
                    full_high, high, high, True, HAS_WINDOW, HAS_RANGES, POWER, BM, layout, out_layout,
                )  # fmt: skip
            b_dk, b_dv, b_w, b_ds = warpgroup_mma_wait(0, deps=[t_dk, t_dv, b_w, b_ds])
            async_copy.wait_group(0)
            first += high - low
        invalidate_copies(copied)
        invalidate_copies(keys_copied)
        mark_for_fallback(Fallback, gl.maximum(trouble, not_finite(b_dk + b_dv)))

    if not NORMALIZED_KEYS:
        o_keys = n + gl.arange(0, BN, layout=gl.SliceLayout(1, out_layout))
        b_length = gl.load(Norms + bh * norm_stride(t_k) + o_keys, mask=o_keys < t_k, other=0.0)[:, None]
        b_unit = k_tile.load(out_layout).to(gl.float32) * b_length
        nobody = gl.sum(gl.abs(b_dk), 1) == 0  # sees this key, which may hold NaN
        b_dk = (b_dk - b_unit * gl.sum(b_unit * b_dk, 1)[:, None]) * b_length
        b_dk = gl.where(nobody[:, None], 0.0, b_dk)
    store_tile(rows_of(GradK, b, kv_head, n, dk_strides), b_dk, k_tile, t_k - n, dk_strides[2])
    store_tile(rows_of(GradV, b, kv_head, n, dv_strides), b_dv, v_tile, t_k - n, dv_strides[2])


@gluon.jit
def gluon_dkv_kernel(
    Q, K, V, GradOut, Norms, Flat, Fallback, Rows, FirstRow, LastRow, GradK, GradV,
    t_q, t_k, shared, h_kv, inverse, window, q_strides, k_strides, v_strides, grad_out_strides, dk_strides, dv_strides,
    seen_stride,
    CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_RANGES: gl.constexpr, POWER: gl.constexpr,
    NORMALIZED_KEYS: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, AGAIN: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """A block of keys of one key head, over all query heads that share it, as ``dkv_kernel``; AGAIN as in
    ``gluon_dq_kernel``."""
    if AGAIN:
        for i in range(gl.program_id(0), gl.load(Fallback), FALLBACK_PROGRAMS):
            dkv_block(
                noted_place(gl.load(Fallback + 1 + i), gl.cdiv(t_k, ROW_BLOCK), h_kv),
                Q, K, V, GradOut, Norms, Flat, Fallback, Rows, FirstRow, LastRow, GradK, GradV, t_q, t_k, shared, h_kv,
                window, q_strides, k_strides, v_strides, grad_out_strides, dk_strides, dv_strides, seen_stride,
                CAUSAL, HAS_WINDOW, HAS_RANGES, POWER, NORMALIZED_KEYS, D, BM, True,
            )  # fmt: skip
    else:
        dkv_block(
            program_position(h_kv, inverse), Q, K, V, GradOut, Norms, Flat, Fallback, Rows, FirstRow, LastRow, GradK,
            GradV,
            t_q, t_k, shared, h_kv, window, q_strides, k_strides, v_strides, grad_out_strides, dk_strides, dv_strides,
            seen_stride, CAUSAL, HAS_WINDOW, HAS_RANGES, POWER, NORMALIZED_KEYS, D, BM, False,
        )  # fmt: skip
