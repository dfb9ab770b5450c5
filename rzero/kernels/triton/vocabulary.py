"""Kernels over a vocabulary: the one reduction behind log_softmax and linear_log_probs.

A row's logits are cut into splits of VOCAB_SPLIT, a split into tiles of VOCAB_TILE. Inside a split, ascending
tiles update

    m = max z     s = sum exp(z - m)     e = sum exp(z - m) (z - m)

each tile's sums by halving; all splits of a row are then rescaled to the largest m and summed by halving.
With M, S and E of a row, log p = (z - M) - log S and the entropy is log S - E / S.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
import triton
import triton.language as tl

from rzero.kernels.triton.language import divide, exp_or_zero, row_sum
from rzero.kernels.triton.products import product


@triton.jit
def update(m, s, e, z):
    """One tile z [R, W] more; impossible logits are -inf."""
    new = tl.maximum(m, tl.max(z, axis=1))
    shrink = exp_or_zero(m, new)
    shift = tl.where(s > 0, m - new, 0.0)
    d = z - tl.where(new == float("-inf"), 0.0, new)[:, None]
    p = tl.exp(d)
    e = (e + s * shift) * shrink + row_sum(tl.where(p > 0, p * d, 0.0))
    s = s * shrink + row_sum(p)
    return new, s, e


@triton.jit(do_not_specialize=["rows"])
def logits_split_kernel(
    logits,
    maxima,
    sums,
    entropies,
    rows,
    columns,
    splits,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """m, s and e of one split of BLOCK_M rows of logits, to [rows, splits]."""
    r = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    number = tl.program_id(1)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    s = tl.full([BLOCK_M], 0.0, tl.float32)
    e = tl.full([BLOCK_M], 0.0, tl.float32)
    for tile in range(0, SPLIT, TILE):
        n = number * SPLIT + tile + tl.arange(0, TILE)
        here = (r < rows)[:, None] & (n < columns)[None, :]
        z = tl.load(logits + r[:, None] * columns + n[None, :], mask=here, other=float("-inf"))
        m, s, e = update(m, s, e, z.to(tl.float32))
    tl.store(maxima + r * splits + number, m, mask=r < rows)
    tl.store(sums + r * splits + number, s, mask=r < rows)
    tl.store(entropies + r * splits + number, e, mask=r < rows)


@triton.jit
def merge_kernel(maxima, sums, entropies, row_max, row_log_sum, row_entropy, splits, BLOCK: tl.constexpr):
    """M, log S and the entropy of a row from its splits."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    m = tl.load(maxima + row * splits + i, mask=i < splits, other=float("-inf"))[None, :]
    s = tl.load(sums + row * splits + i, mask=i < splits, other=0.0)[None, :]
    e = tl.load(entropies + row * splits + i, mask=i < splits, other=0.0)[None, :]
    highest = tl.max(m, axis=1)
    weight = exp_or_zero(m, highest[:, None])
    shift = tl.where(s > 0, m - highest[:, None], 0.0)
    total = row_sum(s * weight)
    log_total = tl.log(total)
    place = row + tl.arange(0, 1)
    tl.store(row_max + place, highest)
    tl.store(row_log_sum + place, log_total)
    tl.store(row_entropy + place, log_total - divide(row_sum((e + s * shift) * weight), total))


@triton.jit(do_not_specialize=["rows"])
def log_softmax_kernel(
    logits, row_max, row_log_sum, out, rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """(z - M) - log S."""
    r = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    here = (r < rows)[:, None] & (n < columns)[None, :]
    z = tl.load(logits + r[:, None] * columns + n[None, :], mask=here, other=0.0).to(tl.float32)
    highest = tl.load(row_max + r, mask=r < rows, other=0.0)
    log_sum = tl.load(row_log_sum + r, mask=r < rows, other=0.0)
    y = (z - highest[:, None]) - log_sum[:, None]
    tl.store(out + r[:, None] * columns + n[None, :], y, mask=here)


@triton.jit
def log_softmax_backward_kernel(grad, log_probs, out, columns, BLOCK: tl.constexpr):
    """Write g - p sum(g), a row per program."""
    row = tl.program_id(0).to(tl.int64)
    acc = tl.full([BLOCK], 0.0, tl.float32)
    for start in range(0, columns, BLOCK):
        n = start + tl.arange(0, BLOCK)
        acc += tl.load(grad + row * columns + n, mask=n < columns, other=0.0)
    total = row_sum(acc[None, :])
    for start in range(0, columns, BLOCK):
        n = start + tl.arange(0, BLOCK)
        g = tl.load(grad + row * columns + n, mask=n < columns, other=0.0)
        p = tl.exp(tl.load(log_probs + row * columns + n, mask=n < columns, other=0.0))
        tl.store(out + row * columns + n, (g - p * total).to(out.dtype.element_ty), mask=n < columns)


@triton.jit
def logit_tile(
    hidden,
    weight,
    n,
    columns,
    depth,
    stride_w,
    temperature,
    SEGMENTS: tl.constexpr,
    DIVIDE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Logits of classes ``n`` as ``linear`` gives them, divided by the temperature; -inf past the end.

    ``hidden`` is an operand as in ``products.segment``.
    """
    real = n < columns
    weight_rows = weight + n.to(tl.int64)[None, :] * stride_w
    z = product(hidden, (weight_rows, real, 1), depth, SEGMENTS, BLOCK_K, WHOLE)
    z = z.to(weight.dtype.element_ty).to(tl.float32)
    if DIVIDE:
        z = divide(z, temperature)
    return tl.where(real[None, :], z, float("-inf"))


@triton.jit(do_not_specialize=["rows"])
def linear_split_kernel(
    hidden,
    weight,
    token_ids,
    maxima,
    sums,
    entropies,
    selected,
    splits,
    rows,
    columns,
    depth,
    stride_h,
    stride_w,
    temperature,
    SEGMENTS: tl.constexpr,
    DIVIDE: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One split of the logits of BLOCK_M tokens: m, s, e, and the selected logit if it is in the split."""
    # Programs that run together read the same weights.
    heights = (rows + BLOCK_M - 1) // BLOCK_M
    number = tl.program_id(0) // heights
    r = (tl.program_id(0) % heights * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    token = tl.load(token_ids + r, mask=r < rows, other=-1)
    operand = (hidden + r[:, None] * stride_h, r < rows, 1)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    s = tl.full([BLOCK_M], 0.0, tl.float32)
    e = tl.full([BLOCK_M], 0.0, tl.float32)
    chosen = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for tile in range(0, SPLIT, TILE):
        n = number * SPLIT + tile + tl.arange(0, TILE)
        z = logit_tile(
            operand, weight, n, columns, depth, stride_w, temperature, SEGMENTS, DIVIDE, BLOCK_K, WHOLE
        )
        m, s, e = update(m, s, e, z)
        # One element at most is not -inf: a maximum, which has no order, picks it.
        chosen = tl.maximum(chosen, tl.max(tl.where(n[None, :] == token[:, None], z, float("-inf")), axis=1))
    tl.store(maxima + r * splits + number, m, mask=r < rows)
    tl.store(sums + r * splits + number, s, mask=r < rows)
    tl.store(entropies + r * splits + number, e, mask=r < rows)
    here = (token >= 0) & (token < columns) & (token // SPLIT == number)
    tl.store(selected + r, chosen, mask=(r < rows) & here)


@triton.jit(do_not_specialize=["rows", "first"])
def logit_gradient_kernel(
    hidden,
    weight,
    token_ids,
    row_max,
    row_log_sum,
    row_entropy,
    grad_log_probs,
    grad_entropies,
    out,
    first,
    width,
    rows,
    columns,
    depth,
    stride_h,
    stride_w,
    temperature,
    SEGMENTS: tl.constexpr,
    DIVIDE: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write dz = (g_p (1[token] - p) - g_H p (log p + H)) / T for logits first .. first + width."""
    heights = (rows + BLOCK_M - 1) // BLOCK_M
    r = (tl.program_id(0) % heights * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = tl.program_id(0) // heights * BLOCK_N + tl.arange(0, BLOCK_N)
    n = first + column
    real = r < rows
    operand = (hidden + r[:, None] * stride_h, real, 1)
    z = logit_tile(
        operand, weight, n, columns, depth, stride_w, temperature, SEGMENTS, DIVIDE, BLOCK_K, WHOLE
    )
    token = tl.load(token_ids + r, mask=real, other=-1)
    highest = tl.load(row_max + r, mask=real, other=0.0)
    log_sum = tl.load(row_log_sum + r, mask=real, other=0.0)
    entropy = tl.load(row_entropy + r, mask=real, other=0.0)
    grad_p = tl.load(grad_log_probs + r, mask=real, other=0.0)
    grad_h = tl.load(grad_entropies + r, mask=real, other=0.0)
    log_p = (z - highest[:, None]) - log_sum[:, None]
    p = tl.exp(log_p)
    spread = tl.where(p > 0, p * (log_p + entropy[:, None]), 0.0)
    hit = tl.where(n[None, :] == token[:, None], 1.0, 0.0)
    dz = grad_p[:, None] * (hit - p) - grad_h[:, None] * spread
    if DIVIDE:
        dz = divide(dz, temperature)
    here = real[:, None] & (column < width)[None, :]
    tl.store(out + r[:, None] * width + column[None, :], dz.to(out.dtype.element_ty), mask=here)
