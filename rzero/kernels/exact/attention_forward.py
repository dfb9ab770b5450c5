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
    out = query.new_empty(batch, queries, heads, size).transpose(1, 2)
    blocks = query_blocks(mask, queries=queries, keys=keys)
    by_scores = SCORES // (heads * blocks[0][0].stop * keys)
    by_keys = (KEYS if queries > 1 else DECODE_KEYS) // (groups * keys * size)
    chunks = -(-batch // max(1, min(batch, by_scores, by_keys)))
    requests = -(-batch // chunks)
    for start in range(0, batch, requests):
        rows = slice(start, min(batch, start + requests))
        key, value = fetch(rows)
        task = _Task(
            query[rows],
            None if mask is None else mask[rows],
            out[rows],
            None if log_sums is None else log_sums[rows],
            blocks,
            scale,
            rounded_kv,
        )
        _attend_rows(key, value, None, task)
        if math.isnan(float(task.out.sum())):  # perhaps of keys or values that not all queries may see
            bad = ~(key.isfinite().all(-1) & value.isfinite().all(-1))
            if bool(bad.any()):
                clean = [x.masked_fill(bad[..., None], 0) for x in (key, value)]
                _attend_rows(clean[0], clean[1], bad, task)
    return out


class _Task(NamedTuple):
    """What to do for some requests b, and where to leave it."""

    query: Tensor  # [b, H, Tq, D]
    mask: Tensor | None  # bool [b, 1 or H, Tq, Tk]
    out: Tensor  # [b, H, Tq, D]
    log_sums: Tensor | None  # [b, H, Tq]
    blocks: list[tuple[slice, int]]
    scale: float
    rounded_kv: bool


def _attend_rows(key: Tensor, value: Tensor, bad: Tensor | None, task: _Task) -> None:
    """Steps 1 to 5, requests and groups in one dimension b G; who sees a ``bad`` key [b, G, Tk] gets NaN."""
    groups, (_, heads, queries, size) = key.shape[1], task.query.shape
    query = _rounded_query(task.query, task.scale).view(-1, heads // groups, queries, size)
    key = _rounded_key(key, task.rounded_kv)
    kept = _rounded_value(value, task.rounded_kv, 1) if queries > 1 else None
    for part, reach in task.blocks:
        q = query[:, :, part].flatten(1, 2)
        scores, weights = (scratch(i, (*q.shape[:2], reach), q.device) for i in (4, 5))
        torch.bmm(q, key[:, :reach].mT, out=scores)
        seen = cap_scores(scores, task.mask, part, reach, groups)
        top, total = _exponentials(scores, weights)
        v, power = kept or _rounded_value(value, task.rounded_kv, 0)  # a single query needs no keys any more
        v, power = v[:, :reach], power[:, :reach]
        # Rounding w_j = p_j s_j to a grid g is rounding p_j to g / s_j: all powers of two.
        bound = power_above_sum(torch.mul(weights, power.mT, out=scores)).mul_(MAGIC * 2.0**-WEIGHT_BITS)
        round_to_grid(weights, torch.mul(bound, power.reciprocal().mT, out=scores))
        out = torch.bmm(weights, v) if queries == 1 else torch.bmm(v.mT, weights.mT).mT
        out = out.div_(total).add_(0.0).reshape(-1, groups, heads // groups, part.stop - part.start, size)
        if bad is not None:
            poison = bad[:, :, None, None, :reach]
            out.masked_fill_((poison if seen is None else poison & seen).any(-1, keepdim=True), math.nan)
        task.out[:, :, part] = out.flatten(1, 2)
        if task.log_sums is not None:
            log_sum = top.clamp_(min=-1e30).add_(torch.log2(total)).mul_(math.log(2))
            task.log_sums[:, :, part] = log_sum.view(-1, heads, part.stop - part.start)


def _rounded_query(query: Tensor, scale: float) -> Tensor:
    q = scratch(3, query.shape, query.device).copy_(query).mul_(scale * LOG2_E)
    bits = math.floor(28.5 - math.log2(query.shape[-1]) / 2)
    return round_to_grid(q, norm_scale(q).mul_(MAGIC * 2.0**-bits))


def _rounded_key(key: Tensor, rounded: bool) -> Tensor:
    k = scratch(0, key.shape, key.device).copy_(key).flatten(0, 1)
    return k if rounded else round_to_grid(k, max_scale(k).mul_(MAGIC * 2.0**-KEY_BITS))


def _rounded_value(value: Tensor, rounded: bool, buffer: int) -> tuple[Tensor, Tensor]:
    """[b G, Tk, D] and a power of two above each row, [b G, Tk, 1]."""
    v = scratch(buffer, value.shape, value.device).copy_(value).flatten(0, 1)
    power = max_scale(v)
    if not rounded:
        round_to_grid(v, power * (MAGIC * 2.0**-VALUE_BITS))
    if buffer:  # with many queries their product reads transposed values faster; the bits are the same
        v = scratch(2, v.mT.shape, v.device).copy_(v.mT).mT
    return v, power


def _exponentials(scores: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """2**(score - top) into ``weights``; the tops and the exact sums of what was rounded of it, [.., 1]."""
    top = scores.amax(-1, keepdim=True).clamp_(min=-1e300)  # a query that sees nothing: 2**(-inf + 1e300) = 0
    exp2_(scores.sub_(top), weights, scratch(6, scores.shape, scores.device))
    grid = MAGIC * 2.0**-DENOMINATOR_BITS
    total = torch.add(weights, grid, out=scores).sub_(grid).sum(-1, keepdim=True)
    return top, total.clamp_(min=1.0)  # the largest term is 1, unless nothing is seen
