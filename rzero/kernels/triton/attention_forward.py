"""The forward kernels of attention: one for prefill and decode, packed and paged.

The rows of a tile are the queries of one key head: row r of a sequence is token r // GROUP, query head
r % GROUP of the group. Keys are taken in tiles of KV_TILE from position 0 of their sequence on, whichever
query asks; tiles are gathered in splits of KV_SPLIT, each started afresh, and splits are merged in ascending
order. A tile or split that a row may not see leaves its state as it was, to the bit: exp(0) = 1, and zeros
are added.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
import triton
import triton.language as tl

from rzero.kernels.triton.language import divide, exp_or_zero, locate, row_sum


@triton.jit
def key_rows(
    page_table, sequence, t, length, table_width, page_size, stride_page, stride_t, PAGED: tl.constexpr
):
    """Offsets [T] of the keys at positions ``t``, from the first key of the sequence or of the first page."""
    if PAGED:
        entry = page_table + sequence.to(tl.int64) * table_width + t // page_size
        page = tl.load(entry, mask=t < length, other=0).to(tl.int64)
        rows = page * stride_page + (t % page_size).to(tl.int64) * stride_t
    else:
        rows = t * stride_t
    return rows


@triton.jit
def first_key(start, sequence, stride_page, stride_t, PAGED: tl.constexpr, PADDED: tl.constexpr):
    """Offset of the first key of a sequence: its row of a padded batch, or its place in the packed tensor."""
    if PAGED:
        offset = tl.full([], 0, tl.int64)
    elif PADDED:
        offset = sequence.to(tl.int64) * stride_page
    else:
        offset = start.to(tl.int64) * stride_t
    return offset


@triton.jit
def sequence_keys(lengths, sequence, PAGED: tl.constexpr, PADDED: tl.constexpr):
    """First key in the packed tensor and number of keys."""
    first = tl.load(lengths + sequence).to(tl.int32)
    if PAGED or PADDED:
        start = tl.full([], 0, tl.int32)
        count = first
    else:
        start = first
        count = tl.load(lengths + sequence + 1).to(tl.int32) - first
    return start, count


@triton.jit
def visible_keys(
    mask,
    sequence,
    head,
    query,
    position,
    t,
    length,
    stride_mb,
    stride_mh,
    stride_mq,
    stride_mk,
    MASK: tl.constexpr,
):
    """Bool [R, T]: the keys at ``t`` that each row may see, by ``mask`` or by its position."""
    seen = (t < length)[None, :]
    if MASK:
        rows = mask + sequence.to(tl.int64) * stride_mb
        offset = (head * stride_mh + query * stride_mq)[:, None] + t[None, :] * stride_mk
        seen = tl.load(rows + offset, mask=seen & (head >= 0)[:, None], other=0) != 0
    else:
        seen = seen & (t[None, :] <= position[:, None])
    return seen


@triton.jit
def merge(m, total, acc, other_m, other_total, other_acc):
    """The state (m, sum, weighted values) of more keys, in this order."""
    new = tl.maximum(m, other_m)
    a = exp_or_zero(m, new)
    b = exp_or_zero(other_m, new)
    return new, total * a + other_total * b, acc * a[:, None] + other_acc * b[:, None]


@triton.jit(do_not_specialize=["count", "tokens"])
def attention_kernel(
    query,
    key,
    value,
    offsets,
    lengths,
    page_table,
    mask,
    out,
    log_sums,
    parts,
    part_states,
    scale,
    count,
    tokens,
    heads,
    size,
    table_width,
    page_size,
    stride_qt,
    stride_qh,
    stride_kp,
    stride_kt,
    stride_kh,
    stride_vp,
    stride_vt,
    stride_vh,
    stride_mb,
    stride_mh,
    stride_mq,
    stride_mk,
    GROUP: tl.constexpr,
    PAGED: tl.constexpr,
    PADDED: tl.constexpr,
    MASK: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KV_TILE: tl.constexpr,
    KV_SPLIT: tl.constexpr,
):
    """A tile of rows over all its keys, or with ``SPLIT`` over split program_id(2), to ``parts``."""
    tile = tl.program_id(0)
    group = tl.program_id(1)
    sequence = locate(offsets, count, tile, GROUP, BLOCK_M)
    first_token = tl.load(offsets + sequence).to(tl.int32)
    queries = tl.load(offsets + sequence + 1).to(tl.int32) - first_token
    first = (tile - (first_token * GROUP // BLOCK_M + sequence)) * BLOCK_M
    if first >= queries * GROUP:
        return
    start, keys = sequence_keys(lengths, sequence, PAGED, PADDED)
    row = first + tl.arange(0, BLOCK_M)
    real = row < queries * GROUP
    token = tl.where(real, row // GROUP, 0)
    head = group * GROUP + row % GROUP
    position = keys - queries + token
    last = tl.minimum(keys, keys - queries + (first + BLOCK_M - 1) // GROUP + 1)
    if MASK:
        last = keys

    d = tl.arange(0, BLOCK_D)
    place = (first_token + token).to(tl.int64)
    q_ptrs = query + (place * stride_qt + head * stride_qh)[:, None] + d[None, :]
    q = tl.load(q_ptrs, mask=real[:, None] & (d < size)[None, :], other=0.0)
    key += group * stride_kh + first_key(start, sequence, stride_kp, stride_kt, PAGED, PADDED)
    value += group * stride_vh + first_key(start, sequence, stride_vp, stride_vt, PAGED, PADDED)

    m_all = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_all = tl.full([BLOCK_M], 0.0, tl.float32)
    acc_all = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
    split_from = 0
    split_to = last
    if SPLIT:
        split_from = tl.program_id(2) * KV_SPLIT
        split_to = tl.minimum(split_from + KV_SPLIT, last)
        if split_from >= last:
            return
    for split in range(split_from, split_to, KV_SPLIT):
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.full([BLOCK_M], 0.0, tl.float32)
        acc = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
        for t_from in range(split, tl.minimum(split + KV_SPLIT, last), KV_TILE):
            t = t_from + tl.arange(0, KV_TILE)
            # Zeros past the end, not whatever a page holds there: 0 * NaN would be NaN.
            here = (t < keys)[:, None] & (d < size)[None, :]
            k_rows = key_rows(
                page_table, sequence, t, keys, table_width, page_size, stride_kp, stride_kt, PAGED
            )
            k = tl.load(key + k_rows[:, None] + d[None, :], mask=here, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            seen = visible_keys(
                mask,
                sequence,
                head,
                token,
                position,
                t,
                keys,
                stride_mb,
                stride_mh,
                stride_mq,
                stride_mk,
                MASK,
            )
            scores = tl.where(seen, scores, float("-inf"))
            new = tl.maximum(m, tl.max(scores, axis=1))
            p = exp_or_zero(scores, new[:, None])
            shrink = exp_or_zero(m, new)
            total = total * shrink + row_sum(p)
            v_rows = key_rows(
                page_table, sequence, t, keys, table_width, page_size, stride_vp, stride_vt, PAGED
            )
            v = tl.load(value + v_rows[:, None] + d[None, :], mask=here, other=0.0)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
            m = new
        if SPLIT:
            m_all, total_all, acc_all = m, total, acc
        else:
            m_all, total_all, acc_all = merge(m_all, total_all, acc_all, m, total, acc)

    row_out = place * heads + head
    if SPLIT:
        row_part = tl.program_id(2).to(tl.int64) * tokens * heads + row_out
        inside = real[:, None] & (d < size)[None, :]
        tl.store(parts + row_part[:, None] * size + d[None, :], acc_all, mask=inside)
        tl.store(part_states + row_part * 2, m_all, mask=real)
        tl.store(part_states + row_part * 2 + 1, total_all, mask=real)
    else:
        finish(out, log_sums, row_out, real, size, m_all, total_all, acc_all, BLOCK_D)


@triton.jit
def finish(out, log_sums, row, real, size, m, total, acc, BLOCK_D: tl.constexpr):
    """Divide once, round once; a row that saw nothing gives zeros."""
    d = tl.arange(0, BLOCK_D)
    result = tl.where((total == 0)[:, None], 0.0, divide(acc, tl.where(total == 0, 1.0, total)[:, None]))
    inside = real[:, None] & (d < size)[None, :]
    tl.store(out + row[:, None] * size + d[None, :], result.to(out.dtype.element_ty), mask=inside)
    tl.store(log_sums + row, m + tl.log(total), mask=real)


@triton.jit(do_not_specialize=["count", "tokens"])
def attention_merge_kernel(
    offsets,
    lengths,
    out,
    log_sums,
    parts,
    part_states,
    count,
    tokens,
    heads,
    size,
    PAGED: tl.constexpr,
    PADDED: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KV_SPLIT: tl.constexpr,
):
    """Merge the splits that a row may see, in ascending order."""
    token = tl.program_id(0)
    low = 0
    high = count
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(offsets + middle).to(tl.int32) <= token:
            low = middle
        else:
            high = middle
    first = tl.load(offsets + low).to(tl.int32)
    queries = tl.load(offsets + low + 1).to(tl.int32) - first
    _, keys = sequence_keys(lengths, low + tl.full([], 0, tl.int32), PAGED, PADDED)
    last = keys - queries + token - first + 1
    if MASK:
        last = keys
    d = tl.arange(0, BLOCK_D)
    row = token.to(tl.int64) * heads + tl.program_id(1) + tl.arange(0, 1)
    m = tl.full([1], float("-inf"), tl.float32)
    total = tl.full([1], 0.0, tl.float32)
    acc = tl.full([1, BLOCK_D], 0.0, tl.float32)
    for split in range(0, (last + KV_SPLIT - 1) // KV_SPLIT):
        row_part = split * tokens.to(tl.int64) * heads + row
        m_part = tl.load(part_states + row_part * 2)
        total_part = tl.load(part_states + row_part * 2 + 1)
        acc_part = tl.load(parts + row_part[:, None] * size + d[None, :], mask=(d < size)[None, :], other=0.0)
        m, total, acc = merge(m, total, acc, m_part, total_part, acc_part)
    finish(out, log_sums, row, row >= 0, size, m, total, acc, BLOCK_D)
