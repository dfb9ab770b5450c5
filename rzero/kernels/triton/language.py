"""Pieces that the kernels share: sums whose order stands in the source, and row addresses."""

import triton
import triton.language as tl


@triton.constexpr_function
def log2(n):
    """Of a power of two."""
    return n.bit_length() - 1


@triton.jit
def row_sum(x):
    """[R, W] -> [R], W a power of two: the upper half is added to the lower until one column is left.

    Each addition has two operands, so no layout, warp count or compiler can choose another order, as it may
    inside ``tl.sum`` over more.
    """
    steps: tl.constexpr = log2(x.shape[1])
    for _ in tl.static_range(steps):  # type: ignore[misc]
        x = tl.sum(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), axis=1)
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def column_halves_sum(x):
    """[W, C] -> [C], W a power of two: the same tree over rows."""
    steps: tl.constexpr = log2(x.shape[0])
    for _ in tl.static_range(steps):  # type: ignore[misc]
        x = tl.sum(tl.reshape(x, [2, x.shape[0] // 2, x.shape[1]]), axis=0)
    return tl.reshape(x, [x.shape[1]])


@triton.jit
def divide(x, y):
    """IEEE division; ``/`` may be an approximation on a GPU."""
    return tl.math.div_rn(x, y)


@triton.jit
def exp_or_zero(x, shift):
    """exp(x - shift) with 0 where x is -inf, also if ``shift`` is -inf: nothing was seen yet."""
    return tl.exp(x - tl.where(shift == float("-inf"), 0.0, shift))


@triton.jit
def locate(offsets, count, tile, GROUP: tl.constexpr, SIZE: tl.constexpr):
    """Which of ``count`` sequences owns tile number ``tile``, if each starts a tile of its own.

    Sequence b owns the tiles from offsets[b] * GROUP // SIZE + b on: room for cdiv(length * GROUP, SIZE).
    """
    low = 0
    high = count
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(offsets + middle).to(tl.int32) * GROUP // SIZE + middle <= tile:
            low = middle
        else:
            high = middle
    return low
