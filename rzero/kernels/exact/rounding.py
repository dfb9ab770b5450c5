"""Rounding to grids of powers of two, so that float64 sums of products are exact in any order.

The idea of the whole backend. Let every x_k be an integer multiple of a power of two g, every w_k of h. Then
every product x_k w_k, and every partial sum of such products in any order, is an integer multiple of g h. If
no partial sum can exceed 2**53 g h in magnitude, float64 holds each of them exactly: nothing is ever
rounded, so the order of the sum, blocking, fused multiply-adds, the number of threads, the BLAS and the
device cannot change the result. What is left is a single rounding of the exact sum to the output's dtype,
element by element.

Rounding to a grid is (x + c) - c with c = 1.5 * 2**52 * grid: two IEEE additions in float64, exact as a
round-half-even while |x| <= 2**51 grid. A power-of-two grid chosen from a row alone makes the rounded row
depend on that row alone.

Two ways to choose a row's grid without an order creeping back in:

* from max |x_k|, which has no order;
* from the 2-norm, which gives rows with outliers float32's accuracy. A floating-point norm depends on the
  order of its sum in the last bits, and near a power of two those could tip the exponent. ``settle`` decides
  by the rounded norm only where the rounding cannot matter, and by a correctly rounded sum (``math.fsum``)
  in the few rows where it could.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rzero.kernels.exact.scratch import scratch

__all__ = ["max_scale", "norm_scale", "power_above_sum", "round_to_grid", "row_norm", "settle"]

# 2**52: the float64 mantissa. A scale s taken by norm satisfies norm < THRESHOLD * s, and THRESHOLD**2 < 2
# keeps the product of two such norms, each at most THRESHOLD * 2**26, below 2**53. The odd value keeps
# common norms (1, sqrt(n), small integers) away from the tipping point.
MANTISSA = 1 << 52
EXPONENT_FIELD = 0x7FF << 52
THRESHOLD = 1.389
LOG2_NORM = 26
MAGIC = 1.5 * 2.0**52
EXPONENT_OFFSET = MANTISSA - round((THRESHOLD - 1) * MANTISSA)
NORM_DROP = (
    26  # row_norm keeps 52 - 26 bits of mantissa: a relative error of 2**-27, an eighth of a float32 ulp
)


def round_to_grid(x: Tensor, magic: Tensor | float) -> Tensor:
    """Round float64 ``x`` in place to multiples of magic / (1.5 * 2**52), half to even.

    Args:
        x: float64, any shape; overwritten.
        magic: 1.5 * 2**52 * grid, broadcastable to ``x``; 0 keeps ``x`` (an all-zero row).
    """
    return x.add_(magic).sub_(magic)


def settle(
    approximate: Tensor, recompute: Callable[[Tensor], Tensor], *, drop: int, offset: int, slack: int
) -> Tensor:
    """Round non-negative float64 sums to ``52 - drop`` mantissa bits, whatever the order they were taken in.

    ``offset`` units in the last place are added first: half of 2**drop rounds to nearest; 2**52 - f * 2**52
    with drop = 52 gives the power of two that steps up where the mantissa passes 1 + f.

    Proof of order-freedom. Let v be the correctly rounded value and a the approximate one, at most ``slack``
    ulps away. If a lies more than ``slack`` ulps from every tipping point, a and v fall on the same side:
    the result is v's. If not, v itself is computed, without order, and rounded. Either way the result is a
    function of v.

    Args:
        approximate: float64, any shape, >= 0; overwritten with the result.
        recompute: given the bool mask of doubtful elements, their order-free values, float64 [count].
        drop: mantissa bits that are cut, at most 52.
        offset: in ulps, 0 <= offset < 2**drop.
        slack: bound in ulps on |approximate - order-free value|.
    """
    mask = (1 << drop) - 1
    bits = approximate.view(torch.int64).add_(offset + slack)
    low = bits & mask
    if low.numel() and int(low.amin()) <= 2 * slack:
        doubtful = low <= 2 * slack
        bits[doubtful] = recompute(doubtful).view(torch.int64) + offset
        low = bits & mask
    bits.sub_(low)
    return approximate


def _exact_norms(rows: Tensor) -> Tensor:
    """[R, K] float64 -> order-free norms [R]: the correctly rounded sum of squares, then one sqrt."""
    sums = [math.fsum(row) for row in (rows * rows).tolist()]
    return torch.tensor(sums, dtype=torch.float64, device=rows.device).sqrt_()


def _norm(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor], int]:
    """Row norms of float64 ``x`` [..., K] holding float32 or narrower values, as ``settle`` wants them.

    Squares of float32 values are exact in float64 and positive, so a sum of K of them in any order is off by
    less than (K - 1) 2**-53 relative, its square root by half of that plus its own rounding: below K/2 + 2
    ulps.
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm, lambda rows: _exact_norms(x[rows[..., 0]]), x.shape[-1] // 2 + 16


def row_norm(x: Tensor) -> Tensor:
    """Order-free 2-norms of the rows of float64 ``x`` [..., K] -> [..., 1], to a relative 2**-27.

    ``x`` must hold values of float32 or a narrower type: then their squares are exact in float64.
    """
    norm, recompute, slack = _norm(x)
    return settle(norm, recompute, drop=NORM_DROP, offset=1 << (NORM_DROP - 1), slack=slack)


def norm_scale(x: Tensor) -> Tensor:
    """Order-free powers of two s, one per row of float64 ``x`` [..., K], with norm < 1.389 s; 0 for zeros.

    With grid s * 2**-b the rounded row, in units of the grid, has 2-norm below 1.389 * 2**b + sqrt(K) / 2.
    ``x`` must hold values of float32 or a narrower type (``settle``'s slack counts on exact squares), or
    float64 values whose squares are rounded once: the slack of 16 ulps and more covers that.
    """
    norm, recompute, slack = _norm(x)
    return settle(norm, recompute, drop=52, offset=EXPONENT_OFFSET, slack=slack)


def max_scale(x: Tensor) -> Tensor:
    """A power of two s per row of float64 ``x`` [..., K] with max |x| < s -> [..., 1], at least 2**-125.

    A maximum has no order. Rounding a row of float32 values to the grid s * 2**-24 cannot change its largest
    element (float32 has 24 bits), so s is the same before and after: rounding twice is rounding once.
    """
    top = torch.abs(x, out=scratch(2, x.shape, x.device)).amax(-1, keepdim=True)
    top.view(torch.int64).bitwise_and_(EXPONENT_FIELD)  # the power of two at or below the maximum
    return top.mul_(2.0).clamp_(min=2.0**-125)


def power_above_sum(terms: Tensor) -> Tensor:
    """Order-free powers of two s, one per row of float64 ``terms`` >= 0 [..., n], with sum < 1.389 s.

    The sum of n non-negative terms, in any order, is off by less than n ulps.
    """
    sums = terms.sum(-1, keepdim=True)

    def recompute(rows: Tensor) -> Tensor:
        exact = [math.fsum(row) for row in terms[rows[..., 0]].tolist()]
        return torch.tensor(exact, dtype=torch.float64, device=terms.device)

    return settle(sums, recompute, drop=52, offset=EXPONENT_OFFSET, slack=terms.shape[-1] + 16)
