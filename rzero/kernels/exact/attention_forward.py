"""The forward arithmetic of attention, which exact.causal_attention states and proves invariant."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rzero.kernels.exact.blocks import cap_scores, query_blocks
from rzero.kernels.exact.elementary import LOG2_E, exp2_
from rzero.kernels.exact.rounding import MAGIC, max_scale, norm_scale, power_above_sum, round_to_grid
from rzero.kernels.exact.scratch import scratch

__all__ = ["DENOMINATOR_BITS", "KEY_BITS", "VALUE_BITS", "WEIGHT_BITS", "attend"]

# A float32 has 24 bits, so the largest element of a row stays as it is, and rounding twice is rounding once.
KEY_BITS = 24
VALUE_BITS = 24
WEIGHT_BITS = 28
DENOMINATOR_BITS = 33
# How many float64 scores, keys, and keys of single queries are handled at a time, to stay in the cache.
SCORES = 1 << 16
KEYS = 1 << 16
DECODE_KEYS = 1 << 19


def attend(
    query: Tensor,
    fetch: Callable[[slice], tuple[Tensor, Tensor]],
    mask: Tensor | None,
    *,
    scale: float,
    groups: int,
    keys: int,
    rounded_kv: bool,
    log_sums: Tensor | None = None,
) -> Tensor:
    """The forward pass, in blocks of requests and queries that stay in the cache.

    Args:
        query: [B, H, Tq, D].
        fetch: Keys and values [b, G, Tk, D] of a slice of requests.
        mask: Bool [B, 1 or H, Tq, Tk] or None for causal.
        scale: Factor of the scores.
        groups: G.
        keys: Tk.
        rounded_kv: Keys and values are on their grids already.
        log_sums: Where to leave the natural logarithms of the denominators, float32 [B, H, Tq], or None.
    """
    batch, heads, queries, size = query.shape
    query_grid = MAGIC * 2.0 ** -math.floor(28.5 - math.log2(size) / 2)
    out = query.new_empty(batch, queries, heads, size).transpose(1, 2)
    blocks = query_blocks(mask, queries=queries, keys=keys)
    by_scores = SCORES // (heads * blocks[0][0].stop * keys)
    by_keys = (KEYS if queries > 1 else DECODE_KEYS) // (groups * keys * size)
    chunks = -(-batch // max(1, min(batch, by_scores, by_keys)))
    requests = -(-batch // chunks)
    for start in range(0, batch, requests):
        rows = slice(start, min(batch, start + requests))
        cache = _load(*fetch(rows), rounded=rounded_kv, transpose=queries > 1)
        q = scratch("query", query[rows].shape, query.device).copy_(query[rows]).mul_(scale * LOG2_E)
        q = round_to_grid(q, norm_scale(q).mul_(query_grid)).view(-1, heads // groups, queries, size)
        for part, reach in blocks:
            block = _Block(mask, rows, part, reach, groups)
            result, top, total = _attend_block(q[:, :, part], cache, block)
            if cache.bad is None and math.isnan(float(result.sum())) and (scrubbed := _scrub(cache)):
                cache = scrubbed  # a key or value held inf or NaN: once more without it
                result, top, total = _attend_block(q[:, :, part], cache, block)
            out[rows, :, part] = result
            if log_sums is not None:
                log_sum = top.clamp_(min=-1e30).add_(torch.log2(total)).mul_(math.log(2))
                log_sums[rows, :, part] = log_sum.view(-1, heads, part.stop - part.start)
    return out


class _Block(NamedTuple):
    """Some queries of some requests, and the first ``reach`` keys."""

    mask: Tensor | None
    rows: slice
    part: slice
    reach: int
    groups: int


class _Cache(NamedTuple):
    """Keys and values of some requests on their grids: float64, requests and groups in one dimension b."""

    key: Tensor  # [b, Tk, D]
    value: Tensor  # [b, Tk, D]
    power: Tensor  # [b, Tk, 1]: a power of two above each value row
    bad: Tensor | None  # bool [b, Tk]: rows that held inf or NaN and are zero here


def _load(key: Tensor, value: Tensor, *, rounded: bool, transpose: bool) -> _Cache:
    k, v = (
        scratch(name, x.shape, x.device).copy_(x).flatten(0, 1)
        for name, x in (("key", key), ("value", value))
    )
    power = max_scale(v)
    if not rounded:
        round_to_grid(k, max_scale(k).mul_(MAGIC * 2.0**-KEY_BITS))
        round_to_grid(v, power * (MAGIC * 2.0**-VALUE_BITS))
    if transpose:  # with many queries their product reads transposed values faster; the bits are the same
        v = scratch("value^T", v.mT.shape, v.device).copy_(v.mT).mT
    return _Cache(k, v, power, None)


def _scrub(cache: _Cache) -> _Cache | None:
    """With the rows that hold inf or NaN in either set to zero and noted as bad; None if there are none."""
    bad = ~(cache.key.isfinite().all(-1) & cache.value.isfinite().all(-1))
    if not bool(bad.any()):
        return None
    for x in (cache.key, cache.value):
        x.masked_fill_(bad[..., None], 0)
    return cache._replace(power=cache.power.masked_fill(bad[..., None], 1.0), bad=bad)


def _attend_block(query: Tensor, cache: _Cache, block: _Block) -> tuple[Tensor, Tensor, Tensor]:
    """Steps 1 to 5 for queries [b G, H/G, Tq, D].

    Returns:
        float64 [b, H, Tq, D], and the maxima and the denominators, float64 [b G, H/G Tq, 1].
    """
    per_group, queries = query.shape[1:3]
    shape = (query.shape[0], per_group * queries, block.reach)
    scores, weights, spare = (scratch(name, shape, query.device) for name in ("scores", "weights", "spare"))
    key, value, power = (x[:, : block.reach] for x in cache[:3])
    torch.bmm(query.flatten(1, 2), key.mT, out=scores)
    seen = cap_scores(scores, *block)
    top = scores.amax(-1, keepdim=True).clamp_(min=-1e300)  # a query that sees nothing: 2**(-inf + 1e300) = 0
    exp2_(scores.sub_(top), weights, spare)
    grid = MAGIC * 2.0**-DENOMINATOR_BITS
    total = torch.add(weights, grid, out=scores).sub_(grid).sum(-1, keepdim=True)
    total.clamp_(min=1.0)  # the largest term is 1, unless nothing is seen
    # Rounding w_j = p_j s_j to a grid g is rounding p_j to g / s_j: all powers of two.
    bound = power_above_sum(torch.mul(weights, power.mT, out=scores)).mul_(MAGIC * 2.0**-WEIGHT_BITS)
    round_to_grid(weights, torch.mul(bound, power.reciprocal().mT, out=scores))
    out = torch.bmm(weights, value) if queries == 1 else torch.bmm(value.mT, weights.mT).mT
    out = out.div_(total).add_(0.0).unflatten(0, (-1, block.groups)).unflatten(2, (per_group, queries))
    if cache.bad is not None:
        bad = cache.bad[:, : block.reach].unflatten(0, (-1, block.groups))[:, :, None, None]
        out.masked_fill_((bad if seen is None else bad & seen).any(-1, keepdim=True), math.nan)
    return out.flatten(1, 2), top, total
