"""A histogram of signed log ratios with fixed bins: quantiles that can be merged by adding.

Exact quantiles of a batch cannot be combined over micro-batches and ranks; bin counts can. Bins are spaced
evenly in log10 |x|, 100 to the decade from 1e-10 to 1e3 on either side of zero, and zero has a bin of its
own, so a quantile read from the counts is within 1.2% of the true one, and exact agreement reads exactly 0.
"""

import math
from functools import cache

import torch
from torch import Tensor

__all__ = ["NUM_BINS", "bin_index", "bin_values", "quantile"]

_PER_DECADE = 100
_LOWEST, _HIGHEST = -10, 3
_PER_SIDE = (_HIGHEST - _LOWEST) * _PER_DECADE

NUM_BINS = 2 * _PER_SIDE + 1


def bin_index(values: Tensor) -> Tensor:
    """The bin of each finite value, int64 in [0, NUM_BINS); ordered like the values, zero in the middle."""
    position = (values.abs().float().log10() - _LOWEST) * _PER_DECADE
    from_zero = position.clamp_(0, _PER_SIDE - 1).long() + 1
    return _PER_SIDE + from_zero * values.sign().long()


@cache
def bin_values(device: torch.device | None = None) -> Tensor:
    """[NUM_BINS] float64: the geometric centre of each bin, ascending; one tensor for all callers."""
    step = torch.arange(_PER_SIDE, dtype=torch.float64, device=device) + 0.5
    positive = 10.0 ** (_LOWEST + step / _PER_DECADE)
    return torch.cat([-positive.flip(0), positive.new_zeros(1), positive])


def quantile(counts: Tensor, q: float, *, absolute: bool = False) -> float:
    """The smallest bin value that at least a share ``q`` of the counted values does not exceed.

    Args:
        counts: [NUM_BINS] how many values fell into each bin.
        q: share in (0, 1].
        absolute: of |x| instead of x.

    Returns:
        The bin's centre, NaN when nothing was counted.
    """
    values = bin_values(counts.device)
    if absolute:
        values = values[_PER_SIDE:]
        counts = counts[_PER_SIDE:] + torch.cat([counts.new_zeros(1), counts[:_PER_SIDE].flip(0)])
    total = float(counts.sum())
    if total == 0:
        return math.nan
    return float(values[int((counts.cumsum(0) < math.ceil(q * total)).sum())])
