"""Shared by the two kernels of the Hopper backward; the formulas are those of ``triton.backward``.

``hopper.dq`` stores the terms of each row that ``hopper.dkv`` reads. In both, tiles are copied ahead, and products
overlap with arithmetic: of the same warp group where it does not need them yet, and of other warp groups.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from softplus_attention.kernels.hopper.common import saturated
from softplus_attention.kernels.triton.common import ROW_BLOCK, raised, softplus2, special_log2


@gluon.jit
def kept_rows(t_q):
    """The number of rows of a head, padded to whole blocks, for which terms are stored."""
    return gl.cdiv(t_q, ROW_BLOCK) * ROW_BLOCK


@gluon.constexpr_function
def terms_of_a_row(power, ranges):
    """How many numbers ``gluon_dq_kernel`` stores per row: six, p - 1 if rows have their own power, and the keys
    [start, end) that it sees if given as ranges."""
    return 6 + (power < 0) + 2 * ranges


@gluon.jit
def place_of_terms(row, TERMS: gl.constexpr, BLOCK: gl.constexpr):
    """The offset of a row's first term; the others follow BLOCK apart. The terms of a block of rows are contiguous, so
    that they are one copy."""
    return row // BLOCK * (TERMS * BLOCK) + row % BLOCK


@gluon.jit
def score_terms(
    scores, norm, factor, slope, offset, below, flat, seen,
    POWER: gl.constexpr, LOG_MODE: gl.constexpr, MASKED: gl.constexpr, FLAT_ROWS: gl.constexpr,
):  # fmt: skip
    """Four tensors of the shape of scores: sigmoid, u, u^(p-1), which multiplies g, and log2 u if rows have their own
    powers. In LSSA u is the weight. MASKED: the first three are 0 where a row does not see a key (except u^(p-1) in
    flat rows).

    Arguments per key or per row have an axis of length 1.
    """
    t = scores * norm * factor
    if MASKED:
        t = gl.where(seen, t, float("-inf"))
    f = softplus2(t, LOG_MODE)
    sigma = gl.exp2(t - f)
    u = saturated(f, slope, offset)
    steepness = u
    log_u = u
    if POWER != 0:
        if POWER < 0:
            log_u = special_log2(u)
            steepness = gl.exp2(below * log_u)
        else:
            steepness = raised(u, 0.0, POWER, 1, LOG_MODE)
        if FLAT_ROWS:
            steepness = gl.where(flat, 1.0, steepness)
    return sigma, u, steepness, log_u
