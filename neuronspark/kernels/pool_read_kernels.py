# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""The pool read's Triton kernels; `pool_read_triton.py` says how they fit together and launches them.

Shapes of a tile: t queries, s keys, a address width in two parts, d value width. What every kernel shares: a clock is
counted from the first token of a 64-token block, in fp32 and in units of log2 (`clock_kernel`), and

    logit(t, s) = log2(e) Q_t . K_s + local_s          local_s = log2(e) (T_s - T_first(s) + log w_s)
    p(t, s)     = 2^(logit(t, s) - (lse_t - between))  between = log2(e) (T_first(s) - T_first(t))

where first(.) is the first token of the token's block. lse_t is thereby relative to the clock at the first query of t's
block. The three attention kernels form logit, `between`, p and dlogit by the same fp32 operations in the same order.

Inputs come through tensor descriptors: the copy engine fetches a tile without registers for its addresses, and what
lies past the row's end or past a part's width arrives as zeros, so that no loop masks its loads. Vectors of a number a
token are [Z, P], P the row padded to whole blocks of 128; a padding query has lse = infinity, and so p = 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

REFERENCE_TOKENS = tl.constexpr(64)
"""Tokens that share the clock's reference. Part of the numbers, not of the tiling."""
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tile(source, row, head, first, CHANNEL: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    """[TOKENS, CHANNELS] of a [B, h, L, width] tensor, from token `first` and channel CHANNEL on."""
    return source.load([row, head, first, CHANNEL]).reshape([TOKENS, CHANNELS])


@triton.jit
def _store_part(target, token, left, part, OFFSET: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr):
    """Stores channels OFFSET ... OFFSET + WIDTH of dense rows of STRIDE channels, for the tokens before `left`."""
    channel = tl.arange(0, part.shape[1])
    pointer = target + token[:, None] * STRIDE + (OFFSET + channel)[None, :]
    mask = (token < left)[:, None] & (channel < WIDTH)[None, :]
    tl.store(pointer, part.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _between(key_high, key_low, query_high, query_low):
    """log2(e) (T_first(s) - T_first(t)) from the two halves of both; right to fp32 however far the clock has run."""
    return (key_high - query_high) + (key_low - query_low)


@triton.jit
def clock_kernel(
    step, log_write, local, base_high, base_low, step_b, step_h, step_t, write_b, write_h, write_t, heads, tokens,
    padded, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One row and head: `local` [Z, P], and T at the first token of every block as two fp32 numbers [Z, P / 64].

    Sums in fp64: at T = 65,536 an fp32 sum would be wrong by 0.004 of a unit, and so the logits of neighbours.
    """
    z = tl.program_id(0)
    row, head = (z // heads).to(tl.int64), (z % heads).to(tl.int64)
    step += row * step_b + head * step_h
    log_write += row * write_b + head * write_h
    blocks = padded // REFERENCE_TOKENS
    local += z.to(tl.int64) * padded
    base_high += z.to(tl.int64) * blocks
    base_low += z.to(tl.int64) * blocks
    inside = tl.arange(0, REFERENCE_TOKENS)
    clock_before = tl.zeros((), dtype=tl.float64)
    for first_block in range(0, blocks, BLOCKS):
        block = first_block + tl.arange(0, BLOCKS)
        token = block[:, None] * REFERENCE_TOKENS + inside[None, :]
        steps = tl.load(step + token.to(tl.int64) * step_t, mask=token < tokens, other=0.0).to(tl.float64)
        writes = tl.load(log_write + token.to(tl.int64) * write_t, mask=token < tokens, other=0.0).to(tl.float64)
        first_step = tl.sum(tl.where(inside[None, :] == 0, steps, 0.0), 1)
        since_first = tl.cumsum(steps, 1) - first_step[:, None]
        tl.store(local + token, ((since_first + writes) * LOG2E).to(tl.float32), mask=token < padded)
        steps_of_block = tl.sum(steps, 1)
        base = (clock_before + (tl.cumsum(steps_of_block, 0) - steps_of_block) + first_step) * LOG2E
        high = base.to(tl.float32)
        tl.store(base_high + block, high, mask=block < blocks)
        tl.store(base_low + block, (base - high.to(tl.float64)).to(tl.float32), mask=block < blocks)
        clock_before += tl.sum(steps_of_block, 0)


@triton.jit
def step_gradient_kernel(column, row, dstep, tokens, BLOCK: tl.constexpr):
    """One row and head: dstep_t = sum over u >= t of (column_u - row_u), summed in fp64 from the row's end."""
    z = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(tokens, BLOCK)
    after = tl.zeros((), dtype=tl.float64)
    for block in range(blocks):
        token = (blocks - 1 - block) * BLOCK + tl.arange(0, BLOCK)
        mask = token < tokens
        received = tl.load(column + z * tokens + token, mask=mask, other=0.0).to(tl.float64)
        given = tl.load(row + z * tokens + token, mask=mask, other=0.0).to(tl.float64)
        moved = received - given
        tl.store(dstep + z * tokens + token, (tl.cumsum(moved, 0, reverse=True) + after).to(tl.float32), mask=mask)
        after += tl.sum(moved, 0)


@triton.jit
def _attend(
    sums, total, highest, query_0, query_1, t, query_high, query_low,
    key_0, key_1, value, local, base_high, base_low, row, head, z, begin, end,
    PART_0: tl.constexpr, WIDTH_0: tl.constexpr, PART_1: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_KEYS: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """The online softmax over the keys begin ... end; DIAGONAL where some of them come after some of the queries."""
    for first in range(begin, end, BLOCK_KEYS):
        block = first // REFERENCE_TOKENS
        between_t = _between(tl.load(base_high + block), tl.load(base_low + block), query_high, query_low)
        local_s = local.load([z, first]).reshape([BLOCK_KEYS])
        key_0_sa = _tile(key_0, row, head, first, 0, BLOCK_KEYS, PART_0)
        logit = tl.dot(query_0, tl.trans(key_0_sa), input_precision=PRECISION)
        if PART_1 > 0:
            key_1_sa = _tile(key_1, row, head, first, WIDTH_0, BLOCK_KEYS, PART_1)
            logit = tl.dot(query_1, tl.trans(key_1_sa), logit, input_precision=PRECISION)
        logit = logit * LOG2E + local_s[None, :]
        if DIAGONAL:
            s = first + tl.arange(0, BLOCK_KEYS)
            logit += tl.where(t[:, None] >= s[None, :], 0.0, float("-inf"))
        higher = tl.maximum(highest, tl.max(logit, 1) + between_t)
        p = tl.exp2(logit - (higher - between_t)[:, None])
        kept = tl.exp2(highest - higher)
        total = total * kept + tl.sum(p, 1)
        value_sd = _tile(value, row, head, first, 0, BLOCK_KEYS, VALUE_BLOCK)
        sums = tl.dot(p.to(value_sd.dtype), value_sd, sums * kept[:, None], input_precision=PRECISION)
        highest = higher
    return sums, total, highest


@triton.jit
def forward_kernel(
    query_0, query_1, key_0, key_1, value, local, base_high, base_low, read, lse, heads, tokens, padded,
    PART_0: tl.constexpr, WIDTH_0: tl.constexpr, PART_1: tl.constexpr, VALUE_BLOCK: tl.constexpr, VALUE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """One block of queries of one row and head: read [Z, L, d] and log2-sum-exp2 [Z, P]. The longest blocks first."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_QUERIES
    z = tl.program_id(1)
    row, head = z // heads, z % heads
    base_high += z.to(tl.int64) * (padded // REFERENCE_TOKENS)
    base_low += z.to(tl.int64) * (padded // REFERENCE_TOKENS)
    inside = tl.arange(0, BLOCK_QUERIES)
    t = first + inside
    query_0_ta = _tile(query_0, row, head, first, 0, BLOCK_QUERIES, PART_0)
    query_1_ta = query_0_ta
    if PART_1 > 0:
        query_1_ta = _tile(query_1, row, head, first, WIDTH_0, BLOCK_QUERIES, PART_1)
    query_high = tl.load(base_high + t // REFERENCE_TOKENS)
    query_low = tl.load(base_low + t // REFERENCE_TOKENS)
    sums = tl.zeros([BLOCK_QUERIES, VALUE_BLOCK], dtype=tl.float32)
    total = tl.zeros([BLOCK_QUERIES], dtype=tl.float32)
    highest = tl.full([BLOCK_QUERIES], float("-inf"), dtype=tl.float32)
    sums, total, highest = _attend(
        sums, total, highest, query_0_ta, query_1_ta, t, query_high, query_low,
        key_0, key_1, value, local, base_high, base_low, row, head, z, 0, first,
        PART_0, WIDTH_0, PART_1, VALUE_BLOCK, PRECISION, BLOCK_KEYS, False,
    )  # fmt: skip
    sums, total, highest = _attend(
        sums, total, highest, query_0_ta, query_1_ta, t, query_high, query_low,
        key_0, key_1, value, local, base_high, base_low, row, head, z, first, tl.minimum(first + BLOCK_QUERIES, tokens),
        PART_0, WIDTH_0, PART_1, VALUE_BLOCK, PRECISION, BLOCK_KEYS, True,
    )  # fmt: skip
    at = z.to(tl.int64) * tokens + first
    _store_part(read + at * VALUE, inside, tokens - first, sums / total[:, None], 0, VALUE, VALUE)
    lse_t = tl.where(t < tokens, highest + tl.log2(total), float("inf"))
    tl.store(lse + z.to(tl.int64) * padded + t, lse_t)


@triton.jit
def _query_gradient(
    dquery_0, dquery_1, row_sum, query_0, query_1, dread, t, lse_t, inner_t, query_high, query_low,
    key_0, key_1, value, local, base_high, base_low, row, head, z, begin, end,
    PART_0: tl.constexpr, WIDTH_0: tl.constexpr, PART_1: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_KEYS: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """Adds what the keys begin ... end give to the queries' gradients and to the row sums of dlogit."""
    for first in range(begin, end, BLOCK_KEYS):
        block = first // REFERENCE_TOKENS
        between_t = _between(tl.load(base_high + block), tl.load(base_low + block), query_high, query_low)
        local_s = local.load([z, first]).reshape([BLOCK_KEYS])
        key_0_sa = _tile(key_0, row, head, first, 0, BLOCK_KEYS, PART_0)
        logit = tl.dot(query_0, tl.trans(key_0_sa), input_precision=PRECISION)
        key_1_sa = key_0_sa
        if PART_1 > 0:
            key_1_sa = _tile(key_1, row, head, first, WIDTH_0, BLOCK_KEYS, PART_1)
            logit = tl.dot(query_1, tl.trans(key_1_sa), logit, input_precision=PRECISION)
        value_sd = _tile(value, row, head, first, 0, BLOCK_KEYS, VALUE_BLOCK)
        dp = tl.dot(dread, tl.trans(value_sd), input_precision=PRECISION)
        logit = logit * LOG2E + local_s[None, :]
        if DIAGONAL:
            s = first + tl.arange(0, BLOCK_KEYS)
            logit += tl.where(t[:, None] >= s[None, :], 0.0, float("-inf"))
        p = tl.exp2(logit - (lse_t - between_t)[:, None])
        dlogit = p * (dp - inner_t[:, None])
        row_sum += tl.sum(dlogit, 1)
        dlogit_low = dlogit.to(key_0_sa.dtype)
        dquery_0 = tl.dot(dlogit_low, key_0_sa, dquery_0, input_precision=PRECISION)
        if PART_1 > 0:
            dquery_1 = tl.dot(dlogit_low, key_1_sa, dquery_1, input_precision=PRECISION)
    return dquery_0, dquery_1, row_sum


@triton.jit
def query_gradient_kernel(
    query_0, query_1, key_0, key_1, value, local, base_high, base_low, read, lse, dread, dquery, inner, row_sum,
    heads, tokens, padded,
    PART_0: tl.constexpr, WIDTH_0: tl.constexpr, PART_1: tl.constexpr, WIDTH_1: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, VALUE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """One block of queries of one row and head: dquery, the row sums of dlogit, and inner_t = dread_t . read_t."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_QUERIES
    z = tl.program_id(1)
    row, head = z // heads, z % heads
    at, at_padded = z.to(tl.int64) * tokens + first, z.to(tl.int64) * padded + first
    base_high += z.to(tl.int64) * (padded // REFERENCE_TOKENS)
    base_low += z.to(tl.int64) * (padded // REFERENCE_TOKENS)
    inside = tl.arange(0, BLOCK_QUERIES)
    t = first + inside
    query_0_ta = _tile(query_0, row, head, first, 0, BLOCK_QUERIES, PART_0)
    query_1_ta = query_0_ta
    if PART_1 > 0:
        query_1_ta = _tile(query_1, row, head, first, WIDTH_0, BLOCK_QUERIES, PART_1)
    dread_td = _tile(dread, row, head, first, 0, BLOCK_QUERIES, VALUE_BLOCK)
    channel = tl.arange(0, VALUE_BLOCK)
    read_mask = (t < tokens)[:, None] & (channel < VALUE)[None, :]
    read_td = tl.load(read + at * VALUE + inside[:, None] * VALUE + channel[None, :], mask=read_mask, other=0.0)
    inner_t = tl.sum(dread_td.to(tl.float32) * read_td.to(tl.float32), 1)
    tl.store(inner + at_padded + inside, inner_t)
    lse_t = tl.load(lse + at_padded + inside)
    query_high = tl.load(base_high + t // REFERENCE_TOKENS)
    query_low = tl.load(base_low + t // REFERENCE_TOKENS)

    dquery_0 = tl.zeros([BLOCK_QUERIES, PART_0], dtype=tl.float32)
    dquery_1 = tl.zeros([BLOCK_QUERIES, PART_1 if PART_1 > 0 else 16], dtype=tl.float32)
    sums = tl.zeros([BLOCK_QUERIES], dtype=tl.float32)
    dquery_0, dquery_1, sums = _query_gradient(
        dquery_0, dquery_1, sums, query_0_ta, query_1_ta, dread_td, t, lse_t, inner_t, query_high, query_low,
        key_0, key_1, value, local, base_high, base_low, row, head, z, 0, first,
        PART_0, WIDTH_0, PART_1, VALUE_BLOCK, PRECISION, BLOCK_KEYS, False,
    )  # fmt: skip
    dquery_0, dquery_1, sums = _query_gradient(
        dquery_0, dquery_1, sums, query_0_ta, query_1_ta, dread_td, t, lse_t, inner_t, query_high, query_low,
        key_0, key_1, value, local, base_high, base_low, row, head, z, first, tl.minimum(first + BLOCK_QUERIES, tokens),
        PART_0, WIDTH_0, PART_1, VALUE_BLOCK, PRECISION, BLOCK_KEYS, True,
    )  # fmt: skip
    dquery += at * (WIDTH_0 + WIDTH_1)
    _store_part(dquery, inside, tokens - first, dquery_0, 0, WIDTH_0, WIDTH_0 + WIDTH_1)
    if PART_1 > 0:
        _store_part(dquery, inside, tokens - first, dquery_1, WIDTH_0, WIDTH_1, WIDTH_0 + WIDTH_1)
    tl.store(row_sum + at + inside, sums, mask=t < tokens)


@triton.jit
def _key_gradient(
    dkey_0, dkey_1, dvalue, column_sum, key_0, key_1, value_sd, s, local_s, key_high, key_low,
    query_0, query_1, dread, lse, inner, base_high, base_low, row, head, z, begin, end,
    PART_0: tl.constexpr, WIDTH_0: tl.constexpr, PART_1: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_QUERIES: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """Adds what the queries begin ... end give to the keys' and values' gradients and to the column sums of dlogit."""
    for first in range(begin, end, BLOCK_QUERIES):
        block = first // REFERENCE_TOKENS
        between_s = _between(key_high, key_low, tl.load(base_high + block), tl.load(base_low + block))
        lse_t = lse.load([z, first]).reshape([BLOCK_QUERIES])
        query_0_ta = _tile(query_0, row, head, first, 0, BLOCK_QUERIES, PART_0)
        logit = tl.dot(key_0, tl.trans(query_0_ta), input_precision=PRECISION)
        query_1_ta = query_0_ta
        if PART_1 > 0:
            query_1_ta = _tile(query_1, row, head, first, WIDTH_0, BLOCK_QUERIES, PART_1)
            logit = tl.dot(key_1, tl.trans(query_1_ta), logit, input_precision=PRECISION)
        logit = logit * LOG2E + local_s[:, None]
        if DIAGONAL:
            t = first + tl.arange(0, BLOCK_QUERIES)
            logit += tl.where(t[None, :] >= s[:, None], 0.0, float("-inf"))
        p = tl.exp2(logit - (lse_t[None, :] - between_s[:, None]))
        dread_td = _tile(dread, row, head, first, 0, BLOCK_QUERIES, VALUE_BLOCK)
        dvalue = tl.dot(p.to(dread_td.dtype), dread_td, dvalue, input_precision=PRECISION)
        dp = tl.dot(value_sd, tl.trans(dread_td), input_precision=PRECISION)
        inner_t = inner.load([z, first]).reshape([BLOCK_QUERIES])
        dlogit = p * (dp - inner_t[None, :])
        column_sum += tl.sum(dlogit, 1)
        dlogit_low = dlogit.to(query_0_ta.dtype)
        dkey_0 = tl.dot(dlogit_low, query_0_ta, dkey_0, input_precision=PRECISION)
        if PART_1 > 0:
            dkey_1 = tl.dot(dlogit_low, query_1_ta, dkey_1, input_precision=PRECISION)
    return dkey_0, dkey_1, dvalue, column_sum


@triton.jit
def key_gradient_kernel(
    query_0, query_1, key_0, key_1, value, local, base_high, base_low, lse, dread, inner, dkey, dvalue, column_sum,
    heads, tokens, padded,
    PART_0: tl.constexpr, WIDTH_0: tl.constexpr, PART_1: tl.constexpr, WIDTH_1: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, VALUE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """One block of keys of one row and head: dkey, dvalue and the column sums of dlogit. The longest blocks first."""
    first = tl.program_id(0) * BLOCK_KEYS
    z = tl.program_id(1)
    row, head = z // heads, z % heads
    at = z.to(tl.int64) * tokens + first
    base_high += z.to(tl.int64) * (padded // REFERENCE_TOKENS)
    base_low += z.to(tl.int64) * (padded // REFERENCE_TOKENS)
    inside = tl.arange(0, BLOCK_KEYS)
    s = first + inside
    key_0_sa = _tile(key_0, row, head, first, 0, BLOCK_KEYS, PART_0)
    key_1_sa = key_0_sa
    if PART_1 > 0:
        key_1_sa = _tile(key_1, row, head, first, WIDTH_0, BLOCK_KEYS, PART_1)
    value_sd = _tile(value, row, head, first, 0, BLOCK_KEYS, VALUE_BLOCK)
    local_s = tl.load(local + z.to(tl.int64) * padded + s)
    key_high = tl.load(base_high + s // REFERENCE_TOKENS)
    key_low = tl.load(base_low + s // REFERENCE_TOKENS)

    dkey_0 = tl.zeros([BLOCK_KEYS, PART_0], dtype=tl.float32)
    dkey_1 = tl.zeros([BLOCK_KEYS, PART_1 if PART_1 > 0 else 16], dtype=tl.float32)
    dvalue_sd = tl.zeros([BLOCK_KEYS, VALUE_BLOCK], dtype=tl.float32)
    sums = tl.zeros([BLOCK_KEYS], dtype=tl.float32)
    dkey_0, dkey_1, dvalue_sd, sums = _key_gradient(
        dkey_0, dkey_1, dvalue_sd, sums, key_0_sa, key_1_sa, value_sd, s, local_s, key_high, key_low,
        query_0, query_1, dread, lse, inner, base_high, base_low, row, head, z,
        first, tl.minimum(first + BLOCK_KEYS, tokens),
        PART_0, WIDTH_0, PART_1, VALUE_BLOCK, PRECISION, BLOCK_QUERIES, True,
    )  # fmt: skip
    dkey_0, dkey_1, dvalue_sd, sums = _key_gradient(
        dkey_0, dkey_1, dvalue_sd, sums, key_0_sa, key_1_sa, value_sd, s, local_s, key_high, key_low,
        query_0, query_1, dread, lse, inner, base_high, base_low, row, head, z,
        first + BLOCK_KEYS, tokens,
        PART_0, WIDTH_0, PART_1, VALUE_BLOCK, PRECISION, BLOCK_QUERIES, False,
    )  # fmt: skip
    left = tokens - first
    dkey += at * (WIDTH_0 + WIDTH_1)
    _store_part(dkey, inside, left, dkey_0, 0, WIDTH_0, WIDTH_0 + WIDTH_1)
    if PART_1 > 0:
        _store_part(dkey, inside, left, dkey_1, WIDTH_0, WIDTH_1, WIDTH_0 + WIDTH_1)
    _store_part(dvalue + at * VALUE, inside, left, dvalue_sd, 0, VALUE, VALUE)
    tl.store(column_sum + at + inside, sums, mask=s < tokens)
