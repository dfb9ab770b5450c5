"""Causal grouped-query attention of padded batches, with its gradient."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rzero.kernels.exact.attention_backward import attention_backward
from rzero.kernels.exact.attention_forward import KEY_BITS, attend
from rzero.kernels.exact.products import FLOATS
from rzero.kernels.exact.rounding import MAGIC, max_scale, round_to_grid

__all__ = ["attention", "round_kv"]

MAX_KEYS = 1 << 20


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    rounded_kv: bool = False,
) -> Tensor:
    """Softmax(scale * query key^T) value over the visible keys, for padded batches.

    Invariance. An output depends on its own query and on the keys and values that it may see; with D the
    head size:

    1. Keys: each key row on the grid s_k 2**-24, |k| < s_k, by its maximum. Queries: the row query * scale *
       log2 e, each an IEEE product, on the grid s_q 2**-b, norm < 1.389 s_q, b = floor(28.5 - log2(D)/2). In
       units of the grids' product every partial sum of q_d k_d is an integer below 1.389 * 2**b * sqrt(D) *
       2**24 < 2**53: scores are exact in any order.
    2. The maximum over visible keys has no order; p = 2**(score - maximum) is elementwise and owned; p of a
       key that may not be seen is 0.
    3. Denominator: p rounded to multiples of 2**-33. At most 2**20 terms of at most 1: exact in any order.
    4. Values: each value row on the grid s_j 2**-24, |v_j| < s_j, by its maximum. A power of two s with
       sum_j p_j s_j < 1.389 s is found without order (``settle``). p_j is rounded to the grid (s / s_j)
       2**-28. Then every p_j v_j is a multiple of s 2**-52 and sum_j |p_j v_j| < s (1.389 + n 2**-29), below
       2**53 units for n < 2**28 keys: exact in any order. The bound is on the sum of the weights and does
       not know n.
    5. One float64 division by the denominator, +0 for the sign of zero, one rounding to float32, one to the
       dtype.

    Keys that a query may not see add exact zeros, so padding, packing, paging, chunks, the length of the
    cache and decode against prefill cannot show. Inf or NaN in a key or value row gives NaN in exactly the
    outputs that may see it; in places that nobody may see it has no effect.

    Gradients are native float32 arithmetic (exact.attention_backward), the same from run to run, but not
    invariant. Rounding to a grid counts as the identity.

    Args:
        query: [B, H, Tq, D] float32, bfloat16 or float16; receives gradient.
        key: [B, G, Tk, D], the dtype of ``query``, H a multiple of G; receives gradient.
        value: [B, G, Tk, D]; receives gradient.
        scale: factor of the scores, usually D**-0.5.
        mask: bool, broadcastable to [B, H, Tq, Tk], True where the query may see the key. None is causal,
            the last query and the last key at one position. A query that sees nothing gives zeros.
        rounded_kv: ``key`` and ``value`` come from ``round_kv``: skips rounding them again. Same bits.

    Returns:
        [B, H, Tq, D], the dtype of ``query``.

    Raises:
        ValueError: shapes do not fit, or Tk > 2**20.
        TypeError: dtypes differ or are not supported.

    Example:
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> whole = attention(q, k, v, scale=8**-0.5)
        >>> torch.equal(whole[:, :, 2:3], attention(q[:, :, 2:3], k[:, :, :3], v[:, :, :3], scale=8**-0.5))
        True
    """
    _check(query, key, value, mask)
    if mask is not None:
        mask = mask.expand(query.shape[0], -1, query.shape[2], key.shape[2])
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return _Attention.apply(query, key, value, mask, scale, rounded_kv)  # type: ignore[return-value]
    return attend(
        query,
        lambda rows: (key[rows], value[rows]),
        mask,
        scale=scale,
        groups=key.shape[1],
        keys=key.shape[2],
        rounded_kv=rounded_kv,
    )


def round_kv(x: Tensor) -> Tensor:
    """Keys or values on their grids, as ``attention`` rounds them: round once before they are cached.

    Invariance. A row's grid is a power of two above its own maximum, which has no order; the rounding is two
    IEEE additions, element by element. The largest element stays, so rounding again changes nothing.

    Args:
        x: [..., D] float32, bfloat16 or float16; the gradient passes through.

    Returns:
        The shape and dtype of ``x``: a float32 row moves by at most 2**-24 of its largest element.

    Example:
        >>> x = torch.tensor([1.0, 2.0**-30])
        >>> round_kv(x), torch.equal(round_kv(round_kv(x)), round_kv(x))
        (tensor([1., 0.]), True)
    """
    if x.dtype not in FLOATS:
        raise TypeError(f"round_kv: x must have dtype float32, bfloat16 or float16, got {x.dtype}")
    return _RoundKV.apply(x)  # type: ignore[return-value]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, mask, scale, rounded_kv):
        log_sums = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        out = attend(
            query,
            lambda rows: (key[rows], value[rows]),
            mask,
            scale=scale,
            groups=key.shape[1],
            keys=key.shape[2],
            rounded_kv=rounded_kv,
            log_sums=log_sums,
        )
        ctx.save_for_backward(query, key, value, mask, out, log_sums)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return *attention_backward(grad, *ctx.saved_tensors, scale=ctx.scale), None, None, None


class _RoundKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        rounded = x.to(torch.float64, copy=True)
        return round_to_grid(rounded, max_scale(rounded).mul_(MAGIC * 2.0**-KEY_BITS)).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad


def _check(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    batch, heads, queries, size = query.shape if query.ndim == 4 else (0, 0, 0, 0)
    fits = query.ndim == 4 and key.ndim == 4 and key.shape == value.shape
    if not fits or key.shape[0] != batch or key.shape[3] != size or heads % key.shape[1]:
        raise ValueError(
            "attention: query, key and value must have shapes [B, H, Tq, D] and twice [B, G, Tk, D] with "
            f"H a multiple of G, got {list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
        )
    if key.shape[2] > MAX_KEYS:
        raise ValueError(f"attention: key must have at most {MAX_KEYS} positions, got {key.shape[2]}")
    if mask is None and queries > key.shape[2]:
        raise ValueError(f"attention: causal queries must be at most the {key.shape[2]} keys, got {queries}")
    if query.dtype not in FLOATS or key.dtype != query.dtype or value.dtype != query.dtype:
        raise TypeError(
            "attention: query, key and value must have one dtype of float32, bfloat16 or float16, got "
            f"{query.dtype}, {key.dtype} and {value.dtype}"
        )
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"attention: mask must have dtype torch.bool, got {mask.dtype}")
