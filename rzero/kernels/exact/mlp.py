"""silu_mul and the gated feed-forward block made of it."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rzero.kernels.exact.elementary import LOG2_E, exp2_
from rzero.kernels.exact.products import FLOATS, check_linear, exact_product, row_block
from rzero.kernels.exact.scratch import scratch
from rzero.kernels.exact.weights import rounded_weight

__all__ = ["gated_mlp", "silu_mul"]

BLOCK = 1 << 16  # elements of the activation at a time: four float64 buffers of them stay in the cache


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Gate / (1 + exp(-gate)) * up in float64, rounded once to float32 and from there to a narrower dtype.

    Invariance. IEEE float64 operations, element by element, with an owned exponential (exact.elementary).

    Args:
        gate: any shape, float32, bfloat16 or float16; receives gradient.
        up: the shape and dtype of ``gate``; receives gradient.

    Returns:
        The shape and dtype of ``gate``.

    Raises:
        ValueError: shapes differ.
        TypeError: dtypes differ or are not supported.

    Example:
        >>> silu_mul(torch.tensor([0.0, 100.0]), torch.tensor([1.0, 2.0]))
        tensor([  0., 200.])
    """
    if gate.shape != up.shape:
        raise ValueError(
            f"silu_mul: up must have shape {list(gate.shape)} to match gate, got {list(up.shape)}"
        )
    if gate.dtype not in FLOATS or up.dtype != gate.dtype:
        raise TypeError(
            f"silu_mul: gate and up must have one dtype of {FLOATS}, got {gate.dtype} and {up.dtype}"
        )
    if torch.is_grad_enabled():
        return _SiluMul.apply(gate, up)  # type: ignore[return-value]
    return _silu_mul(gate, up)


def gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """``linear(silu_mul(linear(x, gate), linear(x, up)), down)``, the same bits in fewer steps.

    Invariance. The rows are worked through in blocks that stay in the cache; they share nothing, so the
    blocks do not show, and each step is that of ``linear`` or ``silu_mul``.

    Args:
        x: [..., K] float32, bfloat16 or float16; receives gradient.
        gate: [I, K]; receives gradient.
        up: [I, K]; receives gradient.
        down: [N, I]; receives gradient.

    Returns:
        [..., N], the dtype of ``x``.

    Raises:
        ValueError: shapes do not fit.
        TypeError: dtypes differ or are not supported.
    """
    check_linear(x, (gate, up), (None, None))
    if down.ndim != 2 or down.shape[1] != gate.shape[0] or up.shape != gate.shape:
        raise ValueError(
            "gated_mlp: gate, up and down must have shapes [I, K], [I, K] and [N, I], got "
            f"{list(gate.shape)}, {list(up.shape)} and {list(down.shape)}"
        )
    check_linear(x.new_empty(0, down.shape[1]), (down,), (None,))
    if torch.is_grad_enabled():
        return _GatedMLP.apply(x, gate, up, down)  # type: ignore[return-value]
    return _gated_mlp(x, gate, up, down, kept=None)


def _silu_mul_into(gate: Tensor, up: Tensor, out: Tensor) -> None:
    """[R, I] each, in blocks of rows."""
    block = max(1, BLOCK // gate.shape[1])
    for start in range(0, gate.shape[0], block):
        gate_rows, up_rows, out_rows = (x[start : start + block] for x in (gate, up, out))
        shape, device = gate_rows.shape, gate.device
        g, t, e, spare = (scratch(i, shape, device) for i in range(4))
        exp2_(torch.mul(g.copy_(gate_rows), -LOG2_E, out=t), e, spare)
        g.div_(e.add_(1.0)).mul_(t.copy_(up_rows))
        out_rows.copy_(g if out.dtype == torch.float32 else g.to(torch.float32))


def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    columns = max(1, gate.shape[-1] if gate.ndim else 1)
    _silu_mul_into(*(x.reshape(-1, columns) for x in (gate, up, out)))
    return out


def _gated_mlp(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *, kept: tuple[Tensor, ...] | None
) -> Tensor:
    """The block on [..., K]; ``kept`` takes gate, up and their product, [rows, I] each, for the backward."""
    flat = x.reshape(-1, x.shape[-1])
    rows, inner = flat.shape[0], gate.shape[0]
    rounded_in, rounded_out = rounded_weight(gate, up, rows=rows), rounded_weight(down, rows=rows)
    y = flat.new_empty(*x.shape[:-1], down.shape[0])
    flat_y = y.view(rows, down.shape[0])
    block = row_block(*rounded_in.shape, *down.shape)
    for start in range(0, rows, block):
        part = slice(start, min(rows, start + block))
        if kept is None:
            g, u, h = flat.new_empty(3, part.stop - start, inner).unbind()
        else:
            g, u, h = (tensor[part] for tensor in kept)
        exact_product(flat[part], rounded_in, g, u)
        _silu_mul_into(g, u, h)
        exact_product(h, rounded_out, flat_y[part])
    return y


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return _silu_mul(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _silu_mul_backward(grad, *ctx.saved_tensors)


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, up, down):
        rows, inner = x.numel() // x.shape[-1], gate.shape[0]
        kept = tuple(x.new_empty(rows, inner) for _ in range(3))
        y = _gated_mlp(x, gate, up, down, kept=kept)
        ctx.save_for_backward(x, gate, up, down, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, gate, up, down, g, u, h = ctx.saved_tensors
        flat, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        needs_x, needs_gate, needs_up, needs_down = ctx.needs_input_grad
        grad_down = grad.t() @ h if needs_down else None
        grad_g, grad_u = _silu_mul_backward(grad @ down, g, u)
        grad_x = (grad_g @ gate).addmm_(grad_u, up).view(x.shape) if needs_x else None
        grad_gate = grad_g.t() @ flat if needs_gate else None
        return grad_x, grad_gate, grad_u.t() @ flat if needs_up else None, grad_down


def _silu_mul_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten.silu_backward(grad * up, gate), torch.nn.functional.silu(gate).mul_(grad)
