"""linear, linear_joined and matmul as torch operators with gradients."""

import math

import torch
from torch import Tensor

from rzero.kernels.triton.contract import segments
from rzero.kernels.triton.devices import architecture, check_device, check_dtypes, family
from rzero.kernels.triton.products import launch_column_sum, launch_product
from rzero.kernels.triton.vendor import is_certified

__all__ = ["linear", "linear_joined", "matmul"]


@torch.library.custom_op("rzero::product", mutates_args=())
def product(a: Tensor, b: Tensor, bias: Tensor | None, contract: bool) -> Tensor:
    """[Z, M, K] @ [Z, K, N] + [N]; ``contract`` False: one ascending chain over all of K."""
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    if not out.numel():
        return out
    if not a.shape[2]:
        return out.zero_() if bias is None else out.copy_(bias.expand_as(out))
    if contract and b.shape[0] == 1 and is_certified(b[0].mT, bias=bias is not None):
        return torch.nn.functional.linear(a[0], b[0].mT, bias).unsqueeze(0)
    depth, columns = b.shape[1:]
    count = segments(columns, depth, a.dtype, family(architecture(a.device))) if contract else 1
    launch_product(a, b, bias, out, segments=count)
    return out


@product.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None, contract: bool) -> Tensor:
    return a.new_empty(a.shape[0], a.shape[1], b.shape[2])


@torch.library.custom_op("rzero::column_sum", mutates_args=())
def column_sum(x: Tensor) -> Tensor:
    """[M, N] -> [N], the dtype of ``x``, summed in float32."""
    out = x.new_zeros(x.shape[1])
    if x.numel():
        launch_column_sum(x.contiguous(), out)
    return out


@column_sum.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[1])


def _save(ctx, inputs, output):
    a, b, bias, _ = inputs
    ctx.save_for_backward(a, b)
    ctx.has_bias = bias is not None


def _product_backward(ctx, grad):
    """The gradient of rows keeps the contract, that of weights and bias is the same from run to run."""
    a, b = ctx.saved_tensors
    needs_a, needs_b, needs_bias, _ = ctx.needs_input_grad
    grad_a = torch.ops.rzero.product(grad, b.mT, None, True) if needs_a else None
    # Written as [N, K], the layout of a weight, of which b is the transpose.
    grad_b = torch.ops.rzero.product(grad.mT, a, None, False).mT if needs_b else None
    grad_bias = torch.ops.rzero.column_sum(grad.flatten(0, 1)) if ctx.has_bias and needs_bias else None
    return grad_a, grad_b, grad_bias, None


product.register_autograd(_product_backward, setup_context=_save)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x W^T + b, each output row a function of its input row and the weights alone.

    K is cut into segments, by (N, K, dtype, architecture) alone; each is one ascending chain of matrix
    instructions from zero in float32, and a binary tree adds them. Few rows run the segments side by side,
    many rows one after the other: the same additions. Then the bias in float32, and one rounding.

    The gradient of ``x`` keeps the same contract. Those of weight and bias sum over rows in a fixed order:
    the same from run to run, but a function of all rows.

    Args:
        x: [..., K] float32, bfloat16 or float16, any strides; receives gradient.
        weight: [N, K], the dtype of ``x``; receives gradient.
        bias: [N] or None, the dtype of ``x``; receives gradient.

    Returns:
        [..., N], the dtype of ``x``.

    Raises:
        ValueError: Shapes do not fit, or a tensor is not on one GPU with the others.
        TypeError: Dtypes differ or are not supported.
    """
    _check_linear(x, weight, bias)
    flat = x.reshape(1, math.prod(x.shape[:-1]), x.shape[-1])
    bias = None if bias is None else bias.contiguous()
    out = torch.ops.rzero.product(flat, weight.mT.unsqueeze(0), bias, True)
    return out.view(*x.shape[:-1], weight.shape[0])


def linear_joined(
    x: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...] | None = None
) -> Tensor:
    """Several ``linear`` of one input side by side, each with the bits it has alone.

    Args:
        x: [..., K]; receives gradient.
        weights: Each [N_i, K]; receive gradient.
        biases: Each [N_i] or None; receive gradient.

    Returns:
        [..., sum N_i], the dtype of ``x``.

    Raises:
        ValueError: Shapes do not fit, or a tensor is not on one GPU with the others.
        TypeError: Dtypes differ or are not supported.
    """
    biases = biases or (None,) * len(weights)
    return torch.cat([linear(x, w, b) for w, b in zip(weights, biases, strict=True)], -1)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Compute a @ b, each element a function of its row of ``a`` and its column of ``b`` alone.

    Args:
        a: [..., M, K] float32, bfloat16 or float16; receives gradient.
        b: [..., K, N], the dtype of ``a``; receives gradient. Leading dimensions broadcast.

    Returns:
        [..., M, N], the dtype of ``a``.

    Raises:
        ValueError: Shapes do not fit, or a tensor is not on one GPU with the other.
        TypeError: Dtypes differ or are not supported.
    """
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
        raise ValueError(
            "matmul: a and b must have shapes [..., M, K] and [..., K, N], "
            f"got {list(a.shape)} and {list(b.shape)}"
        )
    check_dtypes("matmul", a, b)
    check_device("matmul", a, b)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    flat_a = a.expand(*batch, *a.shape[-2:]).reshape(-1, *a.shape[-2:])
    flat_b = b.expand(*batch, *b.shape[-2:]).reshape(-1, *b.shape[-2:])
    out = torch.ops.rzero.product(flat_a, flat_b, None, True)
    return out.view(*batch, a.shape[-2], b.shape[-1])


def _check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if weight.ndim != 2 or x.ndim < 1 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"linear: weight must have shape [N, {x.shape[-1] if x.ndim else 'K'}] to match x, "
            f"got {list(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear: bias must have shape {list(weight.shape[:1])}, got {list(bias.shape)}")
    check_dtypes("linear", x, weight, bias)
    check_device("linear", x, weight, bias)
