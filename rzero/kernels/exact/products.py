"""linear, linear_joined and matmul: float64 products of rounded rows, exact in any order, rounded once."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rzero.kernels.exact.scratch import scratch
from rzero.kernels.exact.weights import round_by_norm_, rounded_weight

__all__ = [
    "CHUNK",
    "FLOATS",
    "check_linear",
    "exact_product",
    "linear",
    "linear_joined",
    "matmul",
    "row_block",
]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Rows of which no product has fewer at a time, unless there are fewer: reading the weights must pay. Beyond
# them as many as keep CHUNK float64 elements of input and output in the cache; a product of more than
# PRODUCT is cut by columns.
ROWS = 128
CHUNK = 1 << 17
PRODUCT = 1 << 19


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x W^T + b, each output row a function of its input row and the weights alone.

    Invariance. Input row x is rounded to the grid s_x 2**-26 and weight row w to s_w 2**-26, with 2-norms
    below 1.389 s, each s a function of its row alone (``norm_scale``). In units of the product of the grids
    every partial sum of x_k w_k, over any subset of k, is an integer of magnitude at most ||x|| ||w|| <=
    (1.389 * 2**26 + sqrt(K)/2)**2 < 2**53 for K < 2**40, by Cauchy and Schwarz: float64 holds them all, no
    addition rounds, the order is immaterial. Adding +0 fixes the sign of a zero, which alone could tell
    orders apart. Then one rounding to float32, the bias added in float32, and one rounding to the dtype of
    x. No other row takes part, nor does the number of rows.

    Accuracy. The grid moves x_k by at most 2**-27 s_x, which puts y off by about 2**-27 ||x|| ||w||:
    float32's own error of a dot product, no worse for rows with outliers. Inf or NaN in a row gives NaN in
    all its outputs.

    The gradients are torch's own products in the native dtype: as fast as ever, the same from run to run,
    but not invariant. Rounding to a grid counts as the identity.

    Args:
        x: [..., K] float32, bfloat16 or float16; receives gradient.
        weight: [N, K], the dtype of ``x``; receives gradient. Its rounded copy is cached (exact.weights).
        bias: [N] or None, the dtype of ``x``; receives gradient.

    Returns:
        [..., N], the dtype of ``x``.

    Raises:
        ValueError: Shapes do not fit.
        TypeError: Dtypes differ or are not supported.

    Example:
        >>> x, weight = torch.randn(7, 5), torch.randn(3, 5)
        >>> torch.equal(linear(x, weight)[2:3], linear(x[2:3], weight))
        True
    """
    return linear_joined(x, (weight,), (bias,))


def linear_joined(
    x: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...] | None = None
) -> Tensor:
    """Several ``linear`` of one input side by side, each with the bits it has alone, in one product.

    Invariance. That of ``linear``: a column knows its own weight row only, so its neighbours do not show.

    Args:
        x: [..., K]; receives gradient.
        weights: Each [N_i, K]; receive gradient.
        biases: Each [N_i] or None; receive gradient.

    Returns:
        [..., sum N_i], the dtype of ``x``.

    Raises:
        ValueError: Shapes do not fit.
        TypeError: Dtypes differ or are not supported.
    """
    biases = biases or (None,) * len(weights)
    check_linear(x, weights, biases)
    if torch.is_grad_enabled():
        return _Linear.apply(x, len(weights), *weights, *biases)  # type: ignore[return-value]
    return _forward(x, weights, biases)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Compute a @ b, each element a function of its row of ``a`` and its column of ``b`` alone.

    Invariance and accuracy as in ``linear``, with the columns of ``b`` for the rows of its weight. Nothing is
    cached.

    Args:
        a: [..., M, K] float32, bfloat16 or float16; receives gradient.
        b: [..., K, N], the dtype of ``a``; receives gradient. Leading dimensions broadcast.

    Returns:
        [..., M, N], the dtype of ``a``.

    Raises:
        ValueError: Shapes do not fit.
        TypeError: Dtypes differ or are not supported.

    Example:
        >>> a, b = torch.randn(4, 3), torch.randn(3, 2)
        >>> torch.equal(matmul(a, b)[:1], matmul(a[:1], b))
        True
    """
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
        raise ValueError(
            "matmul: a and b must have shapes [..., M, K] and [..., K, N], "
            f"got {list(a.shape)} and {list(b.shape)}"
        )
    _check_dtypes("matmul", a, b)
    return _Matmul.apply(a, b)  # type: ignore[return-value]


def exact_product(x: Tensor, weight: Tensor, *outs: Tensor) -> None:
    """Write x W^T, rounded to float32 and on to the dtype of ``outs``, into these, columns in turn.

    Args:
        x: [M, K], any float dtype.
        weight: float64 [N, K] from ``rounded_weight``.
        outs: Each [M, N_i]; the N_i sum to N.
    """
    count = x.shape[0]
    block = row_block(*weight.shape)
    for start in range(0, count, block):
        part = slice(start, min(count, start + block))
        rows = x[part] if count > block else x
        rows = round_by_norm_(scratch(0, rows.shape, x.device).copy_(rows))
        if rows.shape[0] * weight.shape[0] <= PRODUCT:
            _write_product(rows, weight, [out[part] for out in outs] if count > block else outs)
            continue
        step, first = max(1, PRODUCT // rows.shape[0]), 0
        for out in outs:
            for left in range(0, out.shape[1], step):
                target = out[part, left : left + step]
                _write_product(rows, weight[first : first + target.shape[1]], (target,))
                first += target.shape[1]


def row_block(*sizes: int) -> int:
    """How many rows to take at a time, given how long they are."""
    return max(ROWS, CHUNK // max(sizes))


def _write_product(rows: Tensor, weight: Tensor, outs: Sequence[Tensor]) -> None:
    product = scratch(1, (rows.shape[0], weight.shape[0]), rows.device)
    torch.mm(rows, weight.t(), out=product)
    parts = (product,) if len(outs) == 1 else product.split([out.shape[1] for out in outs], 1)
    for out, part in zip(outs, parts, strict=True):
        out.copy_(part if out.dtype == torch.float32 else part.to(torch.float32)).add_(0.0)


def _forward(x: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...]) -> Tensor:
    flat = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    rounded = rounded_weight(*weights, rows=flat.shape[0])
    out = torch.empty(*x.shape[:-1], rounded.shape[0], dtype=torch.float32, device=x.device)
    exact_product(flat, rounded, out.view(flat.shape[0], rounded.shape[0]))
    if any(bias is not None for bias in biases):
        for part, bias in zip(out.split([weight.shape[0] for weight in weights], -1), biases, strict=True):
            if bias is not None:
                part.add_(bias)
    return out.to(x.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, count, *parameters):
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(x, *weights)
        ctx.has_bias = [bias is not None for bias in biases]
        return _forward(x, weights, biases)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, *weights = ctx.saved_tensors
        flat, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        needs_x, _, *needs = ctx.needs_input_grad
        grads = grad.split([weight.shape[0] for weight in weights], 1)
        grad_x = None
        if needs_x:
            grad_x = grads[0] @ weights[0]
            for part, weight in zip(grads[1:], weights[1:], strict=True):
                grad_x.addmm_(part, weight)
            grad_x = grad_x.view(x.shape)
        count = len(weights)
        grad_weights = [g.t() @ flat if need else None for g, need in zip(grads, needs[:count], strict=True)]
        grad_biases = [
            g.sum(0) if has and need else None
            for g, has, need in zip(grads, ctx.has_bias, needs[count:], strict=True)
        ]
        return grad_x, None, *grad_weights, *grad_biases


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        rows = round_by_norm_(a.to(torch.float64, copy=True))
        columns = round_by_norm_(b.mT.to(torch.float64, copy=True))
        return torch.matmul(rows, columns.mT).to(torch.float32).add_(0.0).to(a.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return (grad @ b.mT).sum_to_size(a.shape), (a.mT @ grad).sum_to_size(b.shape)


def check_linear(x: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...]) -> None:
    """Refuse shapes that do not fit and dtypes that differ."""
    for weight, bias in zip(weights, biases, strict=True):
        if weight.ndim != 2 or x.ndim < 1 or weight.shape[1] != x.shape[-1]:
            raise ValueError(
                f"linear: weight must have shape [N, {x.shape[-1]}] to match x, got {list(weight.shape)}"
            )
        _check_dtypes("linear", x, weight)
        if bias is not None:
            _check_dtypes("linear", x, bias)
            if bias.shape != weight.shape[:1]:
                raise ValueError(
                    f"linear: bias must have shape {list(weight.shape[:1])}, got {list(bias.shape)}"
                )


def _check_dtypes(function: str, x: Tensor, other: Tensor) -> None:
    if x.dtype not in FLOATS:
        raise TypeError(f"{function}: input must have dtype float32, bfloat16 or float16, got {x.dtype}")
    if other.dtype != x.dtype:
        raise TypeError(f"{function}: all tensors must have dtype {x.dtype}, got {other.dtype}")
