"""silu_mul, element by element, and the gated feed-forward block made of it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rzero.kernels.triton.devices import check_device, check_dtypes, run
from rzero.kernels.triton.language import divide
from rzero.kernels.triton.linear_ops import linear

__all__ = ["gated_mlp", "silu_mul"]

BLOCK = 2048


@triton.jit(do_not_specialize=["count"])
def silu_mul_kernel(gate, up, out, count, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Write g / (1 + exp(-g)) * u."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if ALIGNED:  # so that the compiler knows it, and loads widely
        count = count // 16 * 16
    g = tl.load(gate + i, mask=i < count, other=0.0).to(tl.float32)
    u = tl.load(up + i, mask=i < count, other=0.0).to(tl.float32)
    tl.store(out + i, (divide(g, 1.0 + tl.exp(-g)) * u).to(out.dtype.element_ty), mask=i < count)


@triton.jit(do_not_specialize=["count"])
def silu_mul_backward_kernel(
    grad, gate, up, grad_gate, grad_up, count, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    """With s = 1 / (1 + exp(-g)): dg = d u s (1 + g (1 - s)), du = d g s."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if ALIGNED:  # so that the compiler knows it, and loads widely
        count = count // 16 * 16
    d = tl.load(grad + i, mask=i < count, other=0.0).to(tl.float32)
    g = tl.load(gate + i, mask=i < count, other=0.0).to(tl.float32)
    u = tl.load(up + i, mask=i < count, other=0.0).to(tl.float32)
    s = divide(1.0, 1.0 + tl.exp(-g))
    tl.store(
        grad_gate + i, (d * u * s * (1.0 + g * (1.0 - s))).to(grad_gate.dtype.element_ty), mask=i < count
    )
    tl.store(grad_up + i, (d * g * s).to(grad_up.dtype.element_ty), mask=i < count)


@torch.library.custom_op("rzero::silu_mul", mutates_args=())
def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Contiguous tensors of one shape."""
    out = torch.empty_like(gate)
    if gate.numel():
        run(
            silu_mul_kernel,
            (triton.cdiv(gate.numel(), BLOCK),),
            gate,
            up,
            out,
            gate.numel(),
            ALIGNED=gate.numel() % 16 == 0,
            BLOCK=BLOCK,
        )
    return out


@gated.register_fake
def _(gate, up):
    return torch.empty_like(gate)


@torch.library.custom_op("rzero::silu_mul_backward", mutates_args=())
def gated_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Contiguous tensors of one shape."""
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    if gate.numel():
        run(
            silu_mul_backward_kernel,
            (triton.cdiv(gate.numel(), BLOCK),),
            grad,
            gate,
            up,
            grad_gate,
            grad_up,
            gate.numel(),
            ALIGNED=gate.numel() % 16 == 0,
            BLOCK=BLOCK,
        )
    return grad_gate, grad_up


@gated_backward.register_fake
def _(grad, gate, up):
    return torch.empty_like(gate), torch.empty_like(up)


gated.register_autograd(
    lambda ctx, grad: torch.ops.rzero.silu_mul_backward(grad.contiguous(), *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Gate / (1 + exp(-gate)) * up in float32, rounded once to the dtype of ``gate``.

    Args:
        gate: Any shape, float32, bfloat16 or float16; receives gradient.
        up: The shape and dtype of ``gate``; receives gradient.

    Returns:
        The shape and dtype of ``gate``.

    Raises:
        ValueError: Shapes differ, or the tensors are not on one GPU.
        TypeError: Dtypes differ or are not supported.
    """
    if gate.shape != up.shape:
        raise ValueError(
            f"silu_mul: up must have shape {list(gate.shape)} to match gate, got {list(up.shape)}"
        )
    check_dtypes("silu_mul", gate, up)
    check_device("silu_mul", gate, up)
    return torch.ops.rzero.silu_mul(gate.contiguous(), up.contiguous())


def gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """``linear(silu_mul(linear(x, gate), linear(x, up)), down)``.

    Args:
        x: [..., K] float32, bfloat16 or float16; receives gradient.
        gate: [I, K]; receives gradient.
        up: [I, K]; receives gradient.
        down: [N, I]; receives gradient.

    Returns:
        [..., N], the dtype of ``x``.

    Raises:
        ValueError: Shapes do not fit.
        TypeError: Dtypes differ or are not supported.
    """
    return linear(silu_mul(linear(x, gate), linear(x, up)), down)
