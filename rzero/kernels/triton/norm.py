"""rms_norm and add_rms_norm: a row per program, sums by halving, rounding points as Hugging Face has them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rzero.kernels.triton.devices import FLOATS, check_device, run
from rzero.kernels.triton.language import divide, row_sum
from rzero.kernels.triton.products import launch_column_sum

__all__ = ["add_rms_norm", "rms_norm"]

MAX_COLUMNS = 1 << 15


@triton.jit
def rms_norm_kernel(
    x, residual, weight, out, total, inverse, columns, eps, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr
):
    """Write w * dtype(x / sqrt(mean(x^2) + eps)); ``RESIDUAL``: of x + residual, rounded and kept."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    here = n < columns
    value = tl.load(x + row * columns + n, mask=here, other=0.0)
    if RESIDUAL:
        other = tl.load(residual + row * columns + n, mask=here, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(total + row * columns + n, value, mask=here)
    wide = value.to(tl.float32)
    mean = divide(row_sum((wide * wide)[None, :]), tl.full([1], 0.0, tl.float32) + columns)
    root = divide(1.0, tl.math.sqrt_rn(mean + eps))
    tl.store(inverse + row + tl.arange(0, 1), root)
    normal = (wide * root).to(x.dtype.element_ty).to(tl.float32)
    scaled = normal * tl.load(weight + n, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * columns + n, scaled.to(out.dtype.element_ty), mask=here)


@triton.jit
def rms_norm_backward_kernel(grad, x, weight, inverse, grad_x, columns, BLOCK: tl.constexpr):
    """With n = x / rms: (w g - n mean(w g n)) / rms."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    here = n < columns
    root = tl.load(inverse + row)
    scaled = tl.load(grad + row * columns + n, mask=here, other=0.0).to(tl.float32)
    scaled *= tl.load(weight + n, mask=here, other=0.0).to(tl.float32)
    normal = tl.load(x + row * columns + n, mask=here, other=0.0).to(tl.float32) * root
    mean = divide(row_sum((scaled * normal)[None, :]), tl.full([1], 0.0, tl.float32) + columns)
    result = (scaled - normal * mean) * root
    tl.store(grad_x + row * columns + n, result.to(grad_x.dtype.element_ty), mask=here)


def _sizes(columns: int) -> dict[str, int]:
    block = triton.next_power_of_2(columns)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}


@torch.library.custom_op("rzero::rms_norm", mutates_args=())
def norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Normed rows, x + residual (empty if there is none), and 1 / rms of each row."""
    rows, columns = x.shape
    out = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))
    total = x.new_empty(0) if residual is None else torch.empty_like(x)
    inverse = x.new_empty(rows, dtype=torch.float32)
    if x.numel():
        run(
            rms_norm_kernel,
            (rows,),
            x,
            residual,
            weight,
            out,
            total,
            inverse,
            columns,
            eps,
            RESIDUAL=residual is not None,
            **_sizes(columns),
        )
    return out, total, inverse


@norm.register_fake
def _(x, residual, weight, eps):
    out = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))
    total = x.new_empty(0) if residual is None else torch.empty_like(x)
    return out, total, x.new_empty(x.shape[0], dtype=torch.float32)


@torch.library.custom_op("rzero::rms_norm_backward", mutates_args=())
def norm_backward(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of rows and of the weight."""
    grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight)
    if x.numel():
        run(
            rms_norm_backward_kernel,
            (x.shape[0],),
            grad,
            x,
            weight,
            inverse,
            grad_x,
            x.shape[1],
            **_sizes(x.shape[1]),
        )
        launch_column_sum(grad, grad_weight, weight=(x, inverse))
    return grad_x, grad_weight


@norm_backward.register_fake
def _(grad, x, weight, inverse):
    return torch.empty_like(x), torch.empty_like(weight)


def _save(ctx, inputs, output):
    x, residual, weight, _ = inputs
    _, total, inverse = output
    ctx.save_for_backward(x if residual is None else total, weight, inverse)
    ctx.has_residual = residual is not None
    ctx.mark_non_differentiable(inverse)
    ctx.set_materialize_grads(False)


def _norm_backward(ctx, grad, grad_total, _):
    x, weight, inverse = ctx.saved_tensors
    grad_x, grad_weight = None, None
    if grad is not None:
        grad_x, grad_weight = torch.ops.rzero.rms_norm_backward(grad.contiguous(), x, weight, inverse)
    if ctx.has_residual and grad_total is not None:
        grad_x = grad_total if grad_x is None else grad_x + grad_total
    return grad_x, grad_x if ctx.has_residual else None, grad_weight, None


norm.register_autograd(_norm_backward, setup_context=_save)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """W * dtype(x / sqrt(mean(x^2) + eps)), the order of casts of Hugging Face's Llama and Qwen norms.

    Squares are summed by halving the row; root and quotients are IEEE's.

    Rounding points: 1 / sqrt(...) in float32; times x in float32; to the dtype of ``x``; times w.

    Args:
        x: [..., K] float32, bfloat16 or float16, K <= 32,768; receives gradient.
        weight: [K]; receives gradient.
        eps: Added to the mean square.

    Returns:
        [..., K], the dtype of ``x`` times ``weight``.

    Raises:
        ValueError: ``weight`` does not fit ``x``, or a tensor is not on one GPU with the other.
        TypeError: ``x`` has another dtype.

    Reference: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4, with eps in the
        root.
    """
    _check("rms_norm", x, weight)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return torch.ops.rzero.rms_norm(rows, None, weight.contiguous(), eps)[0].view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """``total = x + residual`` and ``rms_norm(total, weight, eps=eps)``, the same bits in one pass.

    Args:
        x: [..., K]; receives gradient.
        residual: The shape and dtype of ``x``; receives gradient.
        weight: [K]; receives gradient.
        eps: Added to the mean square.

    Returns:
        Normed rows and ``total``, rounded to the dtype of ``x``; both differentiable.

    Raises:
        ValueError: Shapes do not fit, or a tensor is not on one GPU with the others.
        TypeError: Another dtype, or ``residual`` has another than ``x``.
    """
    _check("add_rms_norm", x, weight)
    if residual.shape != x.shape:
        raise ValueError(
            f"add_rms_norm: residual must have shape {list(x.shape)}, got {list(residual.shape)}"
        )
    if residual.dtype != x.dtype:
        raise TypeError(f"add_rms_norm: residual must have dtype {x.dtype}, got {residual.dtype}")
    check_device("add_rms_norm", x, residual)
    rows, others = (t.reshape(-1, x.shape[-1]).contiguous() for t in (x, residual))
    out, total, _ = torch.ops.rzero.rms_norm(rows, others, weight.contiguous(), eps)
    return out.view(x.shape), total.view(x.shape)


def _check(function: str, x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:] or not 0 < weight.shape[0] <= MAX_COLUMNS:
        raise ValueError(
            f"{function}: weight must have shape {list(x.shape[-1:])} to match x, of 1 to {MAX_COLUMNS} "
            f"elements, got {list(weight.shape)}"
        )
    if x.dtype not in FLOATS or weight.dtype not in FLOATS:
        raise TypeError(
            f"{function}: x and weight must have dtype float32, bfloat16 or float16, "
            f"got {x.dtype} and {weight.dtype}"
        )
    check_device(function, x, weight)
