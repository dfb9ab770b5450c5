"""The backward kernels of attention: keys and values by loops over queries, queries by a loop over keys.

    P = exp(scale q k^T - L)    L: logarithms of the denominators, from the forward
    dV = P^T dO     dS = P (dO V^T - rowsum(dO O))     dQ = scale dS K     dK = scale dS^T Q

No atomics: the same from run to run.

Reference: Dao et al., "FlashAttention" (2022), algorithm 4.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
import triton
import triton.language as tl

from rzero.kernels.triton.attention_forward import first_key, key_rows, sequence_keys, visible_keys
from rzero.kernels.triton.language import locate, row_sum


@triton.jit(do_not_specialize=["rows"])
def attention_delta_kernel(grad, out, delta, rows, size, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Sum over the head of dO * O; rows [N H, D]."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = (row < rows)[:, None] & (d < size)[None, :]
    g = tl.load(grad + row[:, None] * size + d[None, :], mask=inside, other=0.0).to(tl.float32)
    o = tl.load(out + row[:, None] * size + d[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(delta + row, row_sum(g * o), mask=row < rows)


@triton.jit(do_not_specialize=["count"])
def attention_query_gradient_kernel(
    query,
    key,
    value,
    grad,
    log_sums,
    delta,
    offsets,
    lengths,
    page_table,
    mask,
    grad_query,
    scale,
    count,
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
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KV_TILE: tl.constexpr,
):
    """DQ of a tile of rows; keys ascend."""
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
    flat = place * heads + head
    inside = real[:, None] & (d < size)[None, :]
    q = tl.load(query + (place * stride_qt + head * stride_qh)[:, None] + d[None, :], mask=inside, other=0.0)
    g = tl.load(grad + flat[:, None] * size + d[None, :], mask=inside, other=0.0)
    log_sum = tl.load(log_sums + flat, mask=real, other=0.0)
    row_delta = tl.load(delta + flat, mask=real, other=0.0)
    key += group * stride_kh + first_key(start, sequence, stride_kp, stride_kt, PAGED, PADDED)
    value += group * stride_vh + first_key(start, sequence, stride_vp, stride_vt, PAGED, PADDED)
    acc = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
    for t_from in range(0, last, KV_TILE):
        t = t_from + tl.arange(0, KV_TILE)
        here = (t < keys)[:, None] & (d < size)[None, :]
        k_rows = key_rows(page_table, sequence, t, keys, table_width, page_size, stride_kp, stride_kt, PAGED)
        v_rows = key_rows(page_table, sequence, t, keys, table_width, page_size, stride_vp, stride_vt, PAGED)
        k = tl.load(key + k_rows[:, None] + d[None, :], mask=here, other=0.0)
        v = tl.load(value + v_rows[:, None] + d[None, :], mask=here, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = visible_keys(
            mask, sequence, head, token, position, t, keys, stride_mb, stride_mh, stride_mq, stride_mk, MASK
        )
        p = tl.where(seen, tl.exp(tl.where(seen, scores - log_sum[:, None], 0.0)), 0.0)
        ds = p * (tl.dot(g, tl.trans(v), input_precision="ieee") - row_delta[:, None])
        acc = tl.dot(ds.to(k.dtype), k, acc, input_precision="ieee")
    tl.store(
        grad_query + flat[:, None] * size + d[None, :],
        (acc * scale).to(grad_query.dtype.element_ty),
        mask=inside,
    )


@triton.jit(do_not_specialize=["count", "tiles"])
def attention_key_gradient_kernel(
    query,
    key,
    value,
    grad,
    log_sums,
    delta,
    offsets,
    lengths,
    page_table,
    mask,
    grad_key,
    grad_value,
    scale,
    count,
    heads,
    size,
    table_width,
    page_size,
    tiles,
    stride_qt,
    stride_qh,
    stride_kp,
    stride_kt,
    stride_kh,
    stride_vp,
    stride_vt,
    stride_vh,
    stride_gp,
    stride_gt,
    stride_gh,
    stride_mb,
    stride_mh,
    stride_mq,
    stride_mk,
    GROUP: tl.constexpr,
    PAGED: tl.constexpr,
    PADDED: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KV_TILE: tl.constexpr,
):
    """DK and DV of a tile of keys; queries ascend, the heads of a group side by side."""
    group = tl.program_id(1)
    if PADDED:
        sequence = tl.program_id(0) // tiles
        t_from = tl.program_id(0) % tiles * KV_TILE
        start, keys = sequence_keys(lengths, sequence, PAGED, PADDED)
    else:
        sequence = locate(lengths, count, tl.program_id(0), 1, KV_TILE)
        start, keys = sequence_keys(lengths, sequence, PAGED, PADDED)
        t_from = (tl.program_id(0) - (start // KV_TILE + sequence)) * KV_TILE
    if t_from >= keys:
        return
    first_token = tl.load(offsets + sequence).to(tl.int32)
    queries = tl.load(offsets + sequence + 1).to(tl.int32) - first_token
    t = t_from + tl.arange(0, KV_TILE)
    d = tl.arange(0, BLOCK_D)
    here = (t < keys)[:, None] & (d < size)[None, :]
    k_rows = key_rows(page_table, sequence, t, keys, table_width, page_size, stride_kp, stride_kt, PAGED)
    v_rows = key_rows(page_table, sequence, t, keys, table_width, page_size, stride_vp, stride_vt, PAGED)
    key += group * stride_kh + first_key(start, sequence, stride_kp, stride_kt, PAGED, PADDED)
    value += group * stride_vh + first_key(start, sequence, stride_vp, stride_vt, PAGED, PADDED)
    k = tl.load(key + k_rows[:, None] + d[None, :], mask=here, other=0.0)
    v = tl.load(value + v_rows[:, None] + d[None, :], mask=here, other=0.0)
    acc_k = tl.full([KV_TILE, BLOCK_D], 0.0, tl.float32)
    acc_v = tl.full([KV_TILE, BLOCK_D], 0.0, tl.float32)
    begin = tl.maximum(t_from - (keys - queries), 0) * GROUP // BLOCK_M * BLOCK_M
    if MASK:
        begin = 0
    for first in range(begin, queries * GROUP, BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)
        real = row < queries * GROUP
        token = tl.where(real, row // GROUP, 0)
        head = group * GROUP + row % GROUP
        place = (first_token + token).to(tl.int64)
        flat = place * heads + head
        inside = real[:, None] & (d < size)[None, :]
        q = tl.load(
            query + (place * stride_qt + head * stride_qh)[:, None] + d[None, :], mask=inside, other=0.0
        )
        g = tl.load(grad + flat[:, None] * size + d[None, :], mask=inside, other=0.0)
        log_sum = tl.load(log_sums + flat, mask=real, other=0.0)
        row_delta = tl.load(delta + flat, mask=real, other=0.0)
        seen = tl.trans(
            real[:, None]
            & visible_keys(
                mask,
                sequence,
                head,
                token,
                keys - queries + token,
                t,
                keys,
                stride_mb,
                stride_mh,
                stride_mq,
                stride_mk,
                MASK,
            )
        )
        scores = tl.dot(k, tl.trans(q), input_precision="ieee") * scale
        p = tl.where(seen, tl.exp(tl.where(seen, scores - log_sum[None, :], 0.0)), 0.0)
        acc_v = tl.dot(p.to(g.dtype), g, acc_v, input_precision="ieee")
        ds = p * (tl.dot(v, tl.trans(g), input_precision="ieee") - row_delta[None, :])
        acc_k = tl.dot(ds.to(q.dtype), q, acc_k, input_precision="ieee")
    g_rows = key_rows(page_table, sequence, t, keys, table_width, page_size, stride_gp, stride_gt, PAGED)
    first_row = first_key(start, sequence, stride_gp, stride_gt, PAGED, PADDED)
    places = group * stride_gh + first_row + g_rows[:, None] + d[None, :]
    tl.store(grad_key + places, (acc_k * scale).to(grad_key.dtype.element_ty), mask=here)
    tl.store(grad_value + places, acc_v.to(grad_value.dtype.element_ty), mask=here)
