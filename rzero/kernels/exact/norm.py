"""rms_norm over rows, with an order-free norm."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rzero.kernels.exact.products import CHUNK, FLOATS
from rzero.kernels.exact.rounding import row_norm
from rzero.kernels.exact.scratch import scratch

__all__ = ["rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """W * dtype(x / sqrt(mean(x^2) + eps)), the order of casts of Hugging Face's Llama and Qwen norms.

    Invariance. The row's 2-norm is ``row_norm``: the correctly rounded root of the exact sum of squares, to
    26 bits, whatever order it was computed in. All other steps are IEEE additions, multiplications,
    divisions and square roots, element by element.

    Rounding points: 1 / sqrt(...) in float64, to float32; times x in float32; to the dtype of ``x``; times w.

    Args:
        x: [..., K] float32, bfloat16 or float16; receives gradient.
        weight: [K]; receives gradient.
        eps: added to the mean square.

    Returns:
        [..., K], the dtype of ``x`` times ``weight``.

    Raises:
        ValueError: ``weight`` does not fit ``x``.
        TypeError: ``x`` has another dtype.

    Reference: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4, with eps in the
        root.

    Example:
        >>> rms_norm(torch.tensor([[3.0, 4.0, 0.0, 0.0]]), torch.ones(4), eps=0.0)
        tensor([[1.2000, 1.6000, 0.0000, 0.0000]])
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: weight must have shape {list(x.shape[-1:])} to match x, got {list(weight.shape)}"
        )
    if x.dtype not in FLOATS:
        raise TypeError(f"rms_norm: x must have dtype float32, bfloat16 or float16, got {x.dtype}")
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x, weight, eps)  # type: ignore[return-value]
    return _forward(x, weight, eps)[0]


def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    columns = x.shape[-1]
    flat = x.reshape(-1, columns)
    block = max(1, CHUNK // columns)
    norms = [row_norm(scratch(0, rows.shape, rows.device).copy_(rows)) for rows in flat.split(block)]
    norm = norms[0] if len(norms) == 1 else torch.cat(norms)
    # The root and the division are IEEE's; torch.rsqrt need not be.
    inverse = norm.mul_(norm).mul_(1.0 / columns).add_(eps).sqrt_().reciprocal_().to(torch.float32)
    inverse = inverse.view(*x.shape[:-1], 1)
    y = (x * inverse).to(x.dtype)
    return y.mul_(weight) if weight.dtype == y.dtype else y * weight, inverse


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        y, inverse = _forward(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """With n = x / rms: dx = (w g - n mean(w g n)) / rms, dw = sum g n, in float32."""
        x, weight, inverse = ctx.saved_tensors
        normal = x * inverse
        grad_x = grad_w = None
        if ctx.needs_input_grad[1]:
            grad_w = (grad * normal).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            scaled = grad * weight
            mean = (scaled * normal).float().mean(-1, keepdim=True)
            grad_x = scaled.sub(normal.mul_(mean)).mul_(inverse).to(x.dtype)
        return grad_x, grad_w, None
