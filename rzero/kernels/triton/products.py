"""Kernels of linear and matmul: K in segments, each an ascending chain, added by a tree in the source."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rzero.kernels.triton.contract import ROW_BLOCK, ROW_SEGMENT, chain_k
from rzero.kernels.triton.devices import architecture, family, run
from rzero.kernels.triton.language import column_halves_sum
from rzero.kernels.triton.launch import FEW, Launch, options, product_launch

__all__ = ["launch_column_sum", "launch_product"]


@triton.jit
def segment(number, a, b, depth, SEGMENTS: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr):
    """Segment ``number`` of the product: from zero, in ascending steps; the only one may end inside a step.

    ``a`` is a triple: pointers [M, 1] to its rows, which of them are real [M], and the stride along k; ``b``
    likewise, with pointers [1, N] to its columns. ``WHOLE`` says that no step is cut short.
    """
    a_rows, a_real, stride_ak = a
    b_columns, b_real, stride_bk = b
    length = (depth + BLOCK_K * SEGMENTS - 1) // (BLOCK_K * SEGMENTS) * BLOCK_K
    start = number * length
    stop = tl.minimum(start + length, depth)
    acc = tl.full([a_rows.shape[0], b_columns.shape[1]], 0.0, tl.float32)
    ks = tl.arange(0, BLOCK_K)
    for step in range(start, stop, BLOCK_K):
        k = step + ks
        a_mask = a_real[:, None]
        b_mask = b_real[None, :]
        if not WHOLE:
            a_mask = a_mask & (k < stop)[None, :]
            b_mask = b_mask & (k < stop)[:, None]
        a_tile = tl.load(a_rows + k[None, :] * stride_ak, mask=a_mask, other=0.0)
        b_tile = tl.load(b_columns + k[:, None] * stride_bk, mask=b_mask, other=0.0)
        acc = tl.dot(a_tile, b_tile, acc, input_precision="ieee")
    return acc


@triton.jit
def product(a, b, depth, SEGMENTS: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr):
    """(0 + 1) + (2 + 3) of the segments there are; operands as in ``segment``."""
    acc = segment(0, a, b, depth, SEGMENTS, BLOCK_K, WHOLE)
    if SEGMENTS >= 2:
        acc += segment(1, a, b, depth, SEGMENTS, BLOCK_K, WHOLE)
    if SEGMENTS >= 4:
        pair = segment(2, a, b, depth, SEGMENTS, BLOCK_K, WHOLE)
        pair += segment(3, a, b, depth, SEGMENTS, BLOCK_K, WHOLE)
        acc += pair
    return acc


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    a,
    b,
    bias,
    out,
    rows,
    columns,
    depth,
    stride_az,
    stride_am,
    stride_ak,
    stride_bz,
    stride_bk,
    stride_bn,
    stride_oz,
    stride_om,
    SEGMENTS: tl.constexpr,
    SPLIT: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of a @ b. ``SPLIT``: only segment program_id(1), to float32 [SEGMENTS, rows, columns].

    ``ADD``: out += product, for float32 ``out``.
    """
    batch = tl.program_id(2).to(tl.int64)
    # Programs that run together share rows and columns: eight row tiles, then the next column tile.
    strip = 8 * ((columns + BLOCK_N - 1) // BLOCK_N)
    top = tl.program_id(0) // strip * 8
    height = tl.minimum((rows + BLOCK_M - 1) // BLOCK_M - top, 8)
    within = tl.program_id(0) % strip
    m = (top + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = within // height * BLOCK_N + tl.arange(0, BLOCK_N)
    a_rows = a + batch * stride_az + m.to(tl.int64)[:, None] * stride_am
    b_columns = b + batch * stride_bz + n.to(tl.int64)[None, :] * stride_bn
    if ALIGNED:  # so that the compiler knows it, and loads widely along m
        rows = rows // 16 * 16
    a_real = m < rows
    b_real = n < columns
    stored = a_real[:, None] & b_real[None, :]
    a_operand = (a_rows, a_real, stride_ak)
    b_operand = (b_columns, b_real, stride_bk)
    if SPLIT:
        number = tl.program_id(1)
        acc = segment(number, a_operand, b_operand, depth, SEGMENTS, BLOCK_K, WHOLE)
        row = number.to(tl.int64) * rows + m
        tl.store(out + row[:, None] * columns + n[None, :], acc, mask=stored)
    else:
        acc = product(a_operand, b_operand, depth, SEGMENTS, BLOCK_K, WHOLE)
        if BIAS:
            acc += tl.load(bias + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
        places = out + batch * stride_oz + m.to(tl.int64)[:, None] * stride_om + n[None, :]
        if ADD:
            acc = tl.load(places, mask=stored, other=0.0) + acc
        tl.store(places, acc.to(out.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["rows"])
def combine_kernel(
    parts,
    bias,
    out,
    rows,
    columns,
    stride_om,
    SEGMENTS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The tree of ``product`` over segments that lie in memory."""
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = n < columns
    size = rows.to(tl.int64) * columns
    first = parts + row.to(tl.int64) * columns + n
    acc = tl.load(first, mask=here, other=0.0) + tl.load(first + size, mask=here, other=0.0)
    if SEGMENTS >= 4:
        acc += tl.load(first + 2 * size, mask=here, other=0.0) + tl.load(
            first + 3 * size, mask=here, other=0.0
        )
    if BIAS:
        acc += tl.load(bias + n, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * stride_om + n, acc.to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["rows"])
def column_sum_kernel(
    x,
    y,
    scale,
    out,
    rows,
    columns,
    stride_x,
    stride_y,
    WEIGHTED: tl.constexpr,
    SEGMENT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum over SEGMENT rows of x, or of x * (y * scale[row]): blocks of ROWS by halving, ascending."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = tl.program_id(1) * SEGMENT
    acc = tl.full([BLOCK], 0.0, tl.float32)
    for start in range(first, tl.minimum(first + SEGMENT, rows), ROWS):
        m = (start + tl.arange(0, ROWS)).to(tl.int64)
        here = (m < rows)[:, None] & (n < columns)[None, :]
        value = tl.load(x + m[:, None] * stride_x + n[None, :], mask=here, other=0.0).to(tl.float32)
        if WEIGHTED:
            other = tl.load(y + m[:, None] * stride_y + n[None, :], mask=here, other=0.0).to(tl.float32)
            value *= other * tl.load(scale + m, mask=m < rows, other=0.0)[:, None]
        acc += column_halves_sum(value)
    place = tl.program_id(1).to(tl.int64) * columns + n
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=n < columns)


def launch_product(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    segments: int,
    add: bool = False,
    launch: Launch | None = None,
    split: bool | None = None,
) -> None:
    """Write a @ b + bias into ``out``, or add it.

    Args:
        a: [Z, M, K], any strides.
        b: [Z, K, N], any strides.
        bias: [N] contiguous, or None.
        out: [Z, M, N], its last stride 1.
        segments: Of K: 1, 2 or 4.
        add: Add to ``out``, which is float32.
        launch: Parameters; the tables' by default.
        split: Segments as programs of their own; by default where Z is 1 and rows are few.
    """
    batch, rows, depth = a.shape
    columns = b.shape[2]
    a, b = (x if 1 in x.stride()[1:] else x.contiguous() for x in (a, b))
    chips = family(architecture(a.device))
    launch = launch or product_launch(rows, columns, depth, a.dtype, chips, segments=segments)
    if split is None:
        split = batch == 1 and rows <= FEW
    split = split and segments > 1 and not add
    block_k = chain_k(a.dtype)
    target = torch.empty(segments, rows, columns, dtype=torch.float32, device=a.device) if split else out
    tiles = triton.cdiv(rows, launch.block_m) * triton.cdiv(columns, launch.block_n)
    run(
        product_kernel,
        (tiles, segments if split else 1, batch),
        *(a, b, bias, target, rows, columns, depth),
        *(*a.stride(), *b.stride(), *out.stride()[:2]),
        SEGMENTS=segments,
        SPLIT=split,
        ADD=add,
        BIAS=bias is not None and not split,
        WHOLE=depth % (block_k * segments) == 0,
        ALIGNED=a.stride(1) == 1 and rows % 16 == 0,
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        BLOCK_K=block_k,
        **options(launch, chips),
    )
    if split:
        grid, last = (rows, triton.cdiv(columns, 1024)), (out, rows, columns, out.stride(1))
        has_bias = bias is not None
        run(combine_kernel, grid, target, bias, *last, SEGMENTS=segments, BIAS=has_bias, BLOCK=1024)


def launch_column_sum(x: Tensor, out: Tensor, *, weight: tuple[Tensor, Tensor] | None = None) -> None:
    """Write the sum over rows of x [M, N] into ``out`` [N]; with weight (y [M, N], s [M]) of x * (y * s).

    Segments of ROW_SEGMENT rows first, then their sums.
    """
    rows, columns = x.shape
    count, block = triton.cdiv(rows, ROW_SEGMENT), 64
    sums = torch.empty(count, columns, dtype=torch.float32, device=x.device)
    for source, target, height, parts in ((x, sums, rows, count), (sums, out, count, 1)):
        factors = weight if source is x else None
        y, scale = factors or (source, source)
        run(
            column_sum_kernel,
            (triton.cdiv(columns, block), parts),
            *(source, y, scale, target, height, columns, source.stride(0), y.stride(0)),
            WEIGHTED=factors is not None,
            SEGMENT=ROW_SEGMENT if source is x else 1 << 30,
            ROWS=ROW_BLOCK,
            BLOCK=block,
        )
