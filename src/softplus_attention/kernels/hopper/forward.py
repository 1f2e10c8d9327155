"""The forward for Hopper: half precision, no mask, any power with the offset, or LSSA.

Triton waits for a product where it is issued. Here the tensor cores compute the scores of the next tile and the output
of the last one during the arithmetic of this tile. One warp group has 64 rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from softplus_attention.kernels.hopper.common import (
    KeyTiles,
    RowScores,
    RowWeights,
    at_key,
    barriers,
    by_thread,
    copy_tile,
    expect_copies,
    fineness,
    invalidate_copies,
    load_columns,
    mark_for_fallback,
    not_finite,
    product_layout,
    program_position,
    query_norms,
    row_scale,
    rows_and_keys,
    rows_of,
    saturated,
    seen_keys,
    store_tile,
    tile_of,
    wait_for_copies,
    wrapped,
)
from softplus_attention.kernels.triton.common import (
    EQUAL_SCORES,
    LONG,
    ROW_BLOCK,
    SHORT,
    log2_one_plus,
    raised,
    score_factor,
    softplus2,
    special_inverse,
    special_log2,
)

# From this head dimension on queries stay in registers, so that products read only keys from shared memory. Heads of 64
# do not gain from it, and LSSAR has no registers left there.
LONG_HEAD = gl.constexpr(128)
MAX_FACTORS = gl.constexpr(96)  # factors between 1 and 2, whose product float32 holds
# The logarithms of products in the first pass and the short polynomial in the second differ by up to 4e-4. If a row's
# largest excess is far above that, and its scores are not all far below 0, the difference does not matter. (With the
# long polynomial these limits are stricter than necessary.)
MIN_HEIGHT = gl.constexpr(0.25)
MIN_SHARE = gl.constexpr(2.0**-8)
MIN_SCORE = gl.constexpr(-2.0)
MIN_MEAN = gl.constexpr(2.0**-10)
# Many equal keys just below the row's average may then get an excess of 1.6e-3 of the largest instead of none. The
# weights of a million such keys add up to 1e-8 with this power, but to 4e-3 with 3. With the long polynomial, whose
# error is 1.4e-6, the excess is 6e-6 of the largest: with the power 2 a million add up to 3e-5.
MIN_POWER = gl.constexpr(5)
MIN_POWER_OF_LONG = gl.constexpr(2)


OWN = gl.constexpr(9)  # in place of a number of terms: the polynomial of LOG_MODE, as in sums and backward


@gluon.constexpr_function
def terms_above(fine, far):
    """The terms of ``softplus_above`` in place of the short or the long polynomial."""
    return 5 - far if fine == LONG else 3 - far


@gluon.constexpr_function
def least_mean(terms):
    """If every row's mean of f' is at least this, ``softplus_above`` with that many terms is valid for keys that have
    weight."""
    return {2: 2.07, 3: 1.2, 4: 2.07, 5: 1.5, OWN.value: 1.001}[terms]


@gluon.constexpr_function
def least_rise(terms):
    """By how much, per unit of the power, every row's largest f' must exceed its mean. The error of the largest weight
    is then 4e-3, half an ulp of bfloat16, or 5e-4, half an ulp of float16."""
    return 0.1 if terms < 4 else 0.002


@gluon.jit
def softplus_above(t, TERMS: gl.constexpr, LOG_MODE: gl.constexpr):
    """log2(1 + 2^t) where it is above ``least_mean``, and a number below that elsewhere.

    There 2^-t is at most 0.31, 0.55 or 0.77, for which log2(1 + e) is a polynomial with fewer terms than the short one
    (2 and 3: error at most 4e-4) or the long one (4 and 5: 1.0e-6). Those have the same error for e up to 1, but less
    for small e: ``least_rise`` says where that does not matter. OWN is the short or long polynomial itself.
    """
    e = gl.exp2(gl.abs(t) * -1.0)
    if TERMS == 2:
        log = (-0.55673027 * e + 1.4281935) * e
    elif TERMS == 3:
        log = ((0.20146992 * e - 0.62514659) * e + 1.43216531) * e
    elif TERMS == 4:
        log = (((-0.2090692 * e + 0.44628737) * e - 0.71802695) * e + 1.4425937) * e
    elif TERMS == 5:
        r = (0.09401079 * e - 0.27248671) * e + 0.46019851
        log = ((r * e - 0.71911207) * e + 1.44261486) * e
    else:
        log = log2_one_plus(e, LOG_MODE)
    return log + t


@gluon.jit
def first_loop(
    b_scaled, b_product, b_total, b_top, b_zero, queries, scoring, keys, ahead, first, low, high,
    MASKED: gl.constexpr, HAS_STARTS: gl.constexpr, BY_PRODUCT: gl.constexpr, BITS: gl.constexpr,
    LOG_MODE: gl.constexpr,
    BN: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Adds the tiles [low, high) to each row's sum of f' and largest t, separately in each thread. ``ahead`` has the
    first key of the next tile to copy and of the next tile whose norms are read.

    BY_PRODUCT: f' is max(t, 0) + log2(1 + 2^-|t|), and the logarithms are summed as the logarithm of a product, which
    takes one instruction per score instead of four for a polynomial. b_product can hold at most MAX_FACTORS tiles.

    BITS: b_top is int32, the bits of floats, since one instruction compares three of them. For floats >= 0 the order is
    the same.
    """
    n_ahead, n_next = ahead
    for j in range(low, high):
        s = first + j
        wait_for_copies(keys.copied, s + 1)
        k_tile = tile_of(keys.k_ring, (s + 1) & 1)
        scores = warpgroup_mma(queries, k_tile.permute([1, 0]), b_zero, use_acc=False, is_async=True)
        b_norm = load_columns(keys.p_norm + n_next, BN, LAYOUT)
        n_next = wrapped(n_next + BN, keys.count * BN)
        t = b_scaled * scoring.factor[:, None]  # [BM, BN]
        if MASKED:
            t = gl.where(seen_keys(j * BN, scoring.start, scoring.end, HAS_STARTS, BN, LAYOUT), t, float("-inf"))
        if BY_PRODUCT:
            b_product += b_product * gl.exp2(gl.abs(t) * -1.0)
            f = gl.maximum(t, 0.0)
        else:
            f = softplus2(t, LOG_MODE)
        b_total += gl.sum(by_thread(f), 1)
        if BITS:
            t = t.to(gl.int32, bitcast=True)
        b_top = gl.maximum(b_top, gl.max(by_thread(t), 1))
        scores = warpgroup_mma_wait(0, deps=[scores])
        b_scaled = scores * b_norm[None, :]
        expect_copies(keys.copied, s + 1, keys.k_ring, 1)  # s + 3, which has the same barrier and the same slot
        copy_tile(keys.copied, s + 1, keys.k_ring, (s + 1) & 1, keys.K, at_key(keys, n_ahead))
        n_ahead = wrapped(n_ahead + BN, keys.count * BN)
    return b_scaled, b_product, b_total, b_top, (n_ahead, n_next)


@gluon.jit
def logarithms(b_product):
    """The sum of the logarithms of each thread's numbers."""
    return gl.sum(by_thread(special_log2(b_product)), 1)


@gluon.jit
def chunked_loop(
    b_scaled, b_sum, b_logs, b_top, b_zero, queries, scoring, keys, ahead, first, low, high,
    MASKED: gl.constexpr, HAS_STARTS: gl.constexpr, BY_PRODUCT: gl.constexpr, LOG_MODE: gl.constexpr, BN: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """``first_loop`` over [low, high), with a separate product and sum for every MAX_FACTORS tiles.

    A product can hold no more. And the equal terms of many equal keys all round in the same direction: with partial
    sums the error is at most 1.5e-6 instead of 3e-5 (131,072 keys).

    In tiles that are not MASKED, which take most of the time, the largest t is found only if it is above 0.
    """
    b_none = gl.sum(by_thread(b_zero), 1)
    bits: gl.constexpr = BY_PRODUCT and not MASKED
    b_high = b_none.to(gl.int32) if bits else b_top
    for begin in range(low, high, MAX_FACTORS):
        b_scaled, b_product, b_part, b_high, ahead = first_loop(
            b_scaled, b_zero + 1.0, b_none, b_high, b_zero, queries, scoring, keys, ahead, first, begin,
            gl.minimum(begin + MAX_FACTORS, high),
            MASKED, HAS_STARTS, BY_PRODUCT, bits, LOG_MODE, BN, LAYOUT,
        )  # fmt: skip
        b_sum += b_part
        if BY_PRODUCT:
            b_logs += logarithms(b_product)
    if bits:
        b_high = gl.maximum(b_top, gl.where(b_high > 0, b_high.to(gl.float32, bitcast=True), float("-inf")))
    return b_scaled, b_sum, b_logs, b_high, ahead


@gluon.jit
def sums(
    b_scaled, b_zero, queries, scoring, keys, full_low, full_high, ahead, first,
    HAS_STARTS: gl.constexpr, BY_PRODUCT: gl.constexpr, LOG_MODE: gl.constexpr, BN: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """[BM] each: a row's sum of f', its largest t (BY_PRODUCT valid only if above 0 or if all tiles are masked), and
    BY_PRODUCT the logarithms' part of the sum."""
    b_sum = gl.sum(by_thread(b_zero), 1)
    b_logs = b_sum
    b_top = b_sum + float("-inf")
    if HAS_STARTS:
        b_scaled, b_sum, b_logs, b_top, ahead = chunked_loop(
            b_scaled, b_sum, b_logs, b_top, b_zero, queries, scoring, keys, ahead, first, 0, full_low,
            True, True, BY_PRODUCT, LOG_MODE, BN, LAYOUT,
        )  # fmt: skip
    b_scaled, b_sum, b_logs, b_top, ahead = chunked_loop(
        b_scaled, b_sum, b_logs, b_top, b_zero, queries, scoring, keys, ahead, first, full_low, full_high,
        False, HAS_STARTS, BY_PRODUCT, LOG_MODE, BN, LAYOUT,
    )  # fmt: skip
    b_scaled, b_sum, b_logs, b_top, ahead = chunked_loop(
        b_scaled, b_sum, b_logs, b_top, b_zero, queries, scoring, keys, ahead, first, full_high, keys.count,
        True, HAS_STARTS, BY_PRODUCT, LOG_MODE, BN, LAYOUT,
    )  # fmt: skip
    rows: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    b_total = gl.convert_layout(gl.sum(b_sum + b_logs, 1), rows)
    b_bent = gl.convert_layout(gl.sum(b_logs, 1), rows)
    return b_scaled, b_total, gl.convert_layout(gl.max(b_top, 1), rows), b_bent, ahead


@gluon.jit
def second_loop(
    b_scaled, b_out, b_w, b_weight, b_zero, queries, scoring, weighing, keys, ahead, first, low, high,
    MASKED: gl.constexpr, HAS_STARTS: gl.constexpr, ABOVE: gl.constexpr, POWER: gl.constexpr, LOG_MODE: gl.constexpr,
    BN: gl.constexpr, LAYOUT: gl.constexpr, OUT_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Adds the tiles [low, high) to each row's output and, separately in each thread, to its sum of weights.

    ABOVE: if not 0, the terms of ``softplus_above``. Then no key whose f' is below ``least_mean`` has any weight.
    """
    n_ahead, n_next = ahead
    for j in range(low, high):
        s = first + j
        wait_for_copies(keys.copied, s + 1)
        k_tile = tile_of(keys.k_ring, (s + 1) & 1)
        scores = warpgroup_mma(queries, k_tile.permute([1, 0]), b_zero, use_acc=False, is_async=True)
        b_norm = load_columns(keys.p_norm + n_next, BN, LAYOUT)
        n_next = wrapped(n_next + BN, keys.count * BN)
        t = b_scaled * scoring.factor[:, None]
        w = softplus_above(t, ABOVE, LOG_MODE) if ABOVE > 0 else softplus2(t, LOG_MODE)  # [BM, BN]
        if POWER != 0:
            u = saturated(w, weighing.slope[:, None], weighing.offset[:, None])
            w = raised(u, weighing.power[:, None], POWER, 0, LOG_MODE)
        if MASKED:
            w = gl.where(seen_keys(j * BN, scoring.start, scoring.end, HAS_STARTS, BN, LAYOUT), w, 0.0)
        b_weight += gl.sum(by_thread(w), 1)
        # The last tile's product still reads b_w, so w is rounded after it. Products complete in order of issue.
        b_out, b_w, w = warpgroup_mma_wait(1, deps=[b_out, b_w, w])
        b_w = gl.convert_layout(w.to(queries.dtype), gl.DotOperandLayout(0, OUT_LAYOUT, 2), assert_trivial=True)
        b_out = warpgroup_mma(b_w, tile_of(keys.v_ring, j & 3), b_out, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        b_scaled = scores * b_norm[None, :]
        wanted = j + 2 < keys.count
        expect_copies(keys.copied, s + 1, keys.k_ring, 2, wanted)
        copy_tile(keys.copied, s + 1, keys.k_ring, (s + 1) & 1, keys.K, at_key(keys, n_ahead), wanted)
        n_ahead = wrapped(n_ahead + BN, keys.count * BN)
        copy_tile(keys.copied, s + 1, keys.v_ring, (j + 2) & 3, keys.V, at_key(keys, (j + 2) * BN), wanted)
    return b_scaled, b_out, b_w, b_weight, (n_ahead, n_next)


@gluon.jit
def gluon_forward_kernel(
    Q, K, V, Out, Residual, Norms, Total, Height, Weight, Flat, Fallback, Start, End, Power,
    t_q, t_k, shared, h_kv, inverse, window, score_scale, growth, q_strides, k_strides, v_strides, out_strides,
    range_stride, power_strides,
    CAUSAL: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_RANGES: gl.constexpr, POWER: gl.constexpr,
    HAS_POWER_ROWS: gl.constexpr, HAS_REST: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Reads and writes the same as ``forward_kernel``, Weight only for a backward or for LSSA's fallback; Q, K and V
    are descriptors. POWER 0 is LSSA, -1 a power per row.
    Blocks with rows of equal scores or with values that are not finite are left to ``gluon_forward_again_kernel``,
    which takes the same arguments: the strides of Q, K and V are used only there."""
    BM: gl.constexpr = ROW_BLOCK
    has_starts: gl.constexpr = HAS_WINDOW or HAS_RANGES
    layout: gl.constexpr = product_layout(BN)
    out_layout: gl.constexpr = product_layout(D)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    dtype: gl.constexpr = Q.dtype
    fine: gl.constexpr = fineness(dtype, POWER)

    place, of_rows, of_keys, p_norm = rows_and_keys(
        program_position(shared * h_kv, inverse), Norms, Start, End, Power, t_q, t_k, shared, h_kv, window, growth,
        range_stride, power_strides, CAUSAL, HAS_WINDOW, HAS_RANGES, POWER, HAS_POWER_ROWS, BM, BN, layout,
    )  # fmt: skip
    m, bh, b, head, kv_head = place
    o_m, b_counts, b_p = of_rows
    first_key, b_start, b_end, full_low, full_high, tiles = of_keys
    m_rows = o_m < t_q
    p_row = bh * t_q + o_m

    q_ring = gl.allocate_shared_memory(dtype, [1, 1, 1, BM, D], Q.layout)
    k_ring = gl.allocate_shared_memory(dtype, [2, 1, 1, BN, D], K.layout)
    v_ring = gl.allocate_shared_memory(dtype, [4, 1, 1, BN, D], V.layout)
    copied = barriers(2)
    keys = KeyTiles(k_ring, v_ring, copied, K, V, (b, kv_head, first_key), p_norm, tiles)
    gl.static_assert(BM == BN)  # a tile of queries is as large as one of keys
    q_tile = tile_of(q_ring, 0)
    n_next = wrapped(gl.to_tensor(BN), tiles * BN)
    expect_copies(copied, 0, k_ring, 2)
    copy_tile(copied, 0, q_ring, 0, Q, (b, head, m))
    copy_tile(copied, 0, k_ring, 0, K, at_key(keys, 0))
    expect_copies(copied, 1, k_ring, 3)
    copy_tile(copied, 1, k_ring, 1, K, at_key(keys, n_next))
    copy_tile(copied, 1, v_ring, 0, V, at_key(keys, 0))
    copy_tile(copied, 1, v_ring, 1, V, at_key(keys, BN))
    wait_for_copies(copied, 0)
    b_factor = score_factor(row_scale(score_scale, b_counts), query_norms(q_tile, layout))  # [BM]
    scoring = RowScores(b_factor, b_start, b_end)

    queries = q_tile
    if D >= LONG_HEAD:
        queries = q_tile.load(gl.DotOperandLayout(0, layout, 2))
    b_zero = gl.zeros([BM, BN], gl.float32, layout)
    scores = warpgroup_mma(queries, tile_of(k_ring, 0).permute([1, 0]), b_zero, use_acc=False)
    b_scaled = scores * load_columns(p_norm, BN, layout)[None, :]
    n_ahead = wrapped(n_next + BN, tiles * BN)
    expect_copies(copied, 2, k_ring, 1)
    copy_tile(copied, 2, k_ring, 0, K, at_key(keys, n_ahead))
    n_ahead = wrapped(n_ahead + BN, tiles * BN)
    ahead = (n_ahead, n_next)  # tile 3 to copy, tile 1 for its norms

    b_partial = gl.sum(by_thread(b_zero), 1)
    b_slope = gl.zeros([BM], gl.float32, rows)
    b_offset = b_slope
    b_total = b_slope
    first = gl.to_tensor(0)
    any_flat = 0
    far_above = full_low  # tiles
    above = full_low
    least_power: gl.constexpr = MIN_POWER if fine == SHORT else MIN_POWER_OF_LONG
    low_power: gl.constexpr = POWER > 0 and least_power > POWER
    far: gl.constexpr = terms_above(fine, True)
    near: gl.constexpr = OWN if low_power else terms_above(fine, False)
    if POWER != 0:
        b_excess = gl.where(b_counts > 3, 1.0, 0.0)
        by_polynomial = gl.to_tensor(1 if low_power else 0)
        if POWER < 0:
            by_polynomial = gl.max(((b_counts > 0) & (b_p < least_power)).to(gl.int32), 0)
        b_largest = b_slope
        b_bent = b_slope
        if not low_power:  # noqa: SIM102 (the first is decided when compiling)
            if by_polynomial == 0:
                b_scaled, b_total, b_largest, b_bent, ahead = sums(
                    b_scaled, b_zero, queries, scoring, keys, full_low, full_high, ahead, 0,
                    has_starts, True, fine, BN, layout,
                )  # fmt: skip
                first = tiles
                b_high = b_counts * softplus2(b_largest, fine) - b_excess * b_total
                sure = (b_high > MIN_HEIGHT * b_bent + MIN_SHARE * b_total) & (b_largest > MIN_SCORE)
                sure = sure & (b_total > MIN_MEAN * b_counts) & ((b_largest > 0) | (full_high == full_low))
                by_polynomial = gl.max(((b_counts > 0) & (sure == 0)).to(gl.int32), 0)
        if by_polynomial > 0:
            b_scaled, b_total, b_largest, b_bent, ahead = sums(
                b_scaled, b_zero, queries, scoring, keys, full_low, full_high, ahead, first,
                has_starts, False, fine, BN, layout,
            )  # fmt: skip
            first += tiles
        b_total = gl.where(b_counts > 0, b_total, 1.0)
        b_height = b_counts / b_total * softplus2(b_largest, fine) - b_excess
        b_sharp = b_height > EQUAL_SCORES  # not where NaN
        b_divisor = gl.where(b_sharp, b_height, 1.0)
        b_slope = b_counts / b_total / b_divisor
        b_offset = b_excess / b_divisor
        # What a row needs: 0 the fewest terms of a polynomial, 1 and 2 more of them, 3 the fallback.
        b_needs = ((b_counts > 0) & (b_sharp == 0)).to(gl.int32) * 3
        b_needs = gl.maximum(b_needs, (b_excess * b_total < least_mean(near) * b_counts).to(gl.int32) * 2)
        if not low_power:
            b_needs = gl.maximum(b_needs, (b_excess * b_total < least_mean(far) * b_counts).to(gl.int32))
            # The power amplifies the error of the largest f' above the mean.
            b_needs = gl.maximum(b_needs, (b_height * b_total < least_rise(far) * b_p * b_counts).to(gl.int32) * 2)
        needs = gl.max(b_needs, 0)
        any_flat = (needs == 3).to(gl.int32)
        above = gl.where(needs < 2, full_high, full_low)
        if not low_power:
            # Rows summed with a polynomial must be weighted with the same one.
            above = gl.where(by_polynomial > 0, full_low, above)
            far_above = gl.where((needs == 0) & (by_polynomial == 0), full_high, full_low)
        gl.store(Total + p_row, b_total, mask=m_rows)
        gl.store(Height + p_row, gl.where(b_sharp, b_height, 0.0), mask=m_rows)

    weighing = RowWeights(b_slope, b_offset, b_p)
    b_w = gl.zeros([BM, BN], dtype, gl.DotOperandLayout(0, out_layout, 2))
    b_out = warpgroup_mma_init(gl.zeros([BM, D], gl.float32, out_layout))
    if has_starts:
        b_scaled, b_out, b_w, b_partial, ahead = second_loop(
            b_scaled, b_out, b_w, b_partial, b_zero, queries, scoring, weighing, keys, ahead, first,
            0, full_low, True, True, 0, POWER, fine, BN, layout, out_layout,
        )  # fmt: skip
    b_scaled, b_out, b_w, b_partial, ahead = second_loop(
        b_scaled, b_out, b_w, b_partial, b_zero, queries, scoring, weighing, keys, ahead, first,
        full_low, far_above, False, has_starts, far, POWER, fine, BN, layout, out_layout,
    )  # fmt: skip
    b_scaled, b_out, b_w, b_partial, ahead = second_loop(
        b_scaled, b_out, b_w, b_partial, b_zero, queries, scoring, weighing, keys, ahead, first,
        far_above, above, False, has_starts, near, POWER, fine, BN, layout, out_layout,
    )  # fmt: skip
    b_scaled, b_out, b_w, b_partial, ahead = second_loop(
        b_scaled, b_out, b_w, b_partial, b_zero, queries, scoring, weighing, keys, ahead, first,
        above, full_high, False, has_starts, 0, POWER, fine, BN, layout, out_layout,
    )  # fmt: skip
    b_scaled, b_out, b_w, b_partial, ahead = second_loop(
        b_scaled, b_out, b_w, b_partial, b_zero, queries, scoring, weighing, keys, ahead, first,
        full_high, tiles, True, has_starts, 0, POWER, fine, BN, layout, out_layout,
    )  # fmt: skip
    b_out, b_w = warpgroup_mma_wait(0, deps=[b_out, b_w])
    for s in range(first + tiles + 1, first + 3):  # with fewer than two tiles, copies not awaited yet
        wait_for_copies(copied, s)
    invalidate_copies(copied)

    b_weight = gl.convert_layout(gl.sum(b_partial, 1), rows)
    too_small = gl.to_tensor(0)
    if POWER == 0 and dtype == gl.float16:  # it cannot hold f' of rows with such a mean: the fallback scales them
        too_small = gl.max((b_weight < b_counts * 1e-3).to(gl.int32), 0)
    b_weight = gl.where(b_weight == 0, 1.0, b_weight)
    b_out = b_out * gl.convert_layout(special_inverse(b_weight), gl.SliceLayout(1, out_layout))[:, None]
    trouble = gl.maximum(gl.maximum(not_finite(b_out), too_small), any_flat)
    mark_for_fallback(Fallback, trouble)
    if trouble > 0:
        gl.atomic_max(Flat + bh, 1)
    if HAS_REST or POWER == 0:  # for the backward, and for the fallback of LSSA
        gl.store(Weight + p_row, b_weight, mask=m_rows & (HAS_REST or trouble > 0))
    store_tile(rows_of(Out, b, head, m, out_strides), b_out, q_tile, t_q - m, out_strides[2])
    if HAS_REST:
        residual = b_out - b_out.to(dtype).to(gl.float32)
        store_tile(rows_of(Residual, b, head, m, out_strides), residual, q_tile, t_q - m, out_strides[2])
