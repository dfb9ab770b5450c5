"""The gradient of attention in native arithmetic: float32 products, by blocks that stay in the cache.

    P = exp(scale q k^T - L)    L: logarithms of the denominators, from the forward
    dV = P^T dO     dS = P (dO V^T - rowsum(dO O))     dQ = scale dS K     dK = scale dS^T Q

The same from run to run: each request and group is worked through in a fixed order, without atomics.

Reference: Dao et al., "FlashAttention" (2022), algorithm 4.
"""

import torch
from torch import Tensor

from rzero.kernels.exact.blocks import cap_scores, query_blocks

__all__ = ["attention_backward"]

SCORES = 1 << 16  # scores handled at a time


def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    log_sums: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query [B, H, Tq, D], key and value [B, G, Tk, D].

    Args:
        grad: Of ``out``, [B, H, Tq, D].
        query: [B, H, Tq, D].
        key: [B, G, Tk, D].
        value: [B, G, Tk, D].
        mask: Bool [B, 1 or H, Tq, Tk], or None for causal.
        out: [B, H, Tq, D].
        log_sums: float32 [B, H, Tq], natural logarithms of the denominators of ``scale`` q k^T.
        scale: Factor of the scores.
    """
    batch, heads, queries, _ = query.shape
    groups, keys = key.shape[1:3]
    blocks = query_blocks(mask, queries=queries, keys=keys)
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)]
    requests = max(1, SCORES // (heads * (blocks[0][0].stop) * keys))
    for start in range(0, batch, requests):
        rows = slice(start, min(batch, start + requests))
        k, v = (x[rows].float().flatten(0, 1) for x in (key, value))
        grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
        delta = (grad[rows].float() * out[rows]).sum(-1, keepdim=True)
        for part, reach in blocks:

            def grouped(x: Tensor, part: slice = part) -> Tensor:
                """[b, H, Tq, n] -> float32 [b G, H/G Tq, n] of these queries."""
                return x[:, :, part].float().unflatten(1, (groups, -1)).flatten(2, 3).flatten(0, 1)

            q, g = grouped(query[rows]).mul(scale), grouped(grad[rows])
            p = torch.bmm(q, k[:, :reach].mT)
            cap_scores(p, None if mask is None else mask[rows], part, reach, groups)
            p.sub_(grouped(log_sums[rows, :, :, None])).exp_()
            grad_v[:, :reach].add_(torch.bmm(p.mT, g))  # baddbmm_ would go through a part one by one
            grad_scores = torch.bmm(g, v[:, :reach].mT).sub_(grouped(delta)).mul_(p)
            grad_k[:, :reach].add_(torch.bmm(grad_scores.mT, q))
            grad_q = torch.bmm(grad_scores, k[:, :reach]).mul_(scale)
            grads[0][rows, :, part] = grad_q.view(-1, heads, part.stop - part.start, grad_q.shape[-1])
        grads[1][rows], grads[2][rows] = grad_k.view_as(key[rows]), grad_v.view_as(value[rows])
    return grads[0], grads[1], grads[2]
