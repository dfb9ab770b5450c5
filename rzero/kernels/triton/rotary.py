"""rope: two products, a sum and a rounding, element by element."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from rzero.kernels.triton.devices import FLOATS, check_device, run

__all__ = ["rope"]


@triton.jit(do_not_specialize=["rows", "positions"])
def rope_kernel(
    x,
    cosines,
    sines,
    out,
    rows,
    positions,
    heads,
    size,
    BACKWARD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write x * cos + partner * sin; the sine of an element, or of its partner in the backward.

    Row r has row r // heads % positions of the tables.
    """
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    n = tl.arange(0, BLOCK)[None, :]
    partner = tl.where(n < size // 2, n + size // 2, n - size // 2)
    here = (r < rows) & (n < size)
    table = r // heads % positions * size
    value = tl.load(x + r * size + n, mask=here, other=0.0).to(tl.float32)
    other = tl.load(x + r * size + partner, mask=here, other=0.0).to(tl.float32)
    cosine = tl.load(cosines + table + n, mask=here, other=0.0)
    sine = tl.load(sines + table + (partner if BACKWARD else n), mask=here, other=0.0)
    tl.store(out + r * size + n, (value * cosine + other * sine).to(out.dtype.element_ty), mask=here)


@torch.library.custom_op("rzero::rope", mutates_args=())
def rotate(x: Tensor, cosines: Tensor, sines: Tensor, heads: int, backward: bool) -> Tensor:
    """[R, D] contiguous and tables [P, D] contiguous, row r with table row r // heads % P."""
    out = torch.empty_like(x)
    if x.numel():
        block = triton.next_power_of_2(x.shape[1])
        height = max(1, 1024 // block)
        run(
            rope_kernel,
            (triton.cdiv(x.shape[0], height),),
            x,
            cosines,
            sines,
            out,
            x.shape[0],
            cosines.shape[0],
            heads,
            x.shape[1],
            BACKWARD=backward,
            ROWS=height,
            BLOCK=block,
        )
    return out


@rotate.register_fake
def _(x, cosines, sines, heads, backward):
    return torch.empty_like(x)


def _save(ctx, inputs, output):
    _, cosines, sines, ctx.heads, ctx.backward_pass = inputs
    ctx.save_for_backward(cosines, sines)


def _rotate_backward(ctx, grad):
    grad = torch.ops.rzero.rope(grad.contiguous(), *ctx.saved_tensors, ctx.heads, not ctx.backward_pass)
    return grad, None, None, None, None


rotate.register_autograd(_rotate_backward, setup_context=_save)


def rope(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate halves, (a, b) -> (a cos - b sin, b cos + a sin), in float32, rounded once to the dtype of x.

    The bits are those of ``rzero.kernels.exact.rope``: IEEE operations, none contracted.

    Args:
        x: [..., D], a the first D/2 and b the others (the layout of Llama and Qwen); receives gradient.
        cosines: float32 [..., D] from ``rope_table``, broadcastable to ``x``.
        sines: float32 [..., D] from ``rope_table``, broadcastable to ``x``.

    Returns:
        The shape and dtype of ``x``.

    Raises:
        ValueError: D is odd, the tables do not fit, or a tensor is not on one GPU with the others.
        TypeError: ``x`` has another dtype, or the tables are not float32.

    Reference: Su et al., "RoFormer" (2021), equation 34, with halves in place of neighbours.
    """
    if x.shape[-1] % 2 or cosines.shape[-1] != x.shape[-1] or sines.shape != cosines.shape:
        raise ValueError(
            f"rope: cosines and sines must have an even last dimension of {x.shape[-1]}, "
            f"got {list(cosines.shape)} and {list(sines.shape)}"
        )
    if x.dtype not in FLOATS or cosines.dtype != torch.float32 or sines.dtype != torch.float32:
        raise TypeError(
            "rope: x must have dtype float32, bfloat16 or float16 and the tables float32, "
            f"got {x.dtype}, {cosines.dtype} and {sines.dtype}"
        )
    check_device("rope", x, cosines, sines)
    cosines, sines, heads = _tables(x, cosines, sines)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return torch.ops.rzero.rope(rows, cosines, sines, heads, False).view(x.shape)


def _tables(x: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor, int]:
    """Tables [P, D] and H, such that row r of ``x`` has table row r // H % P."""
    lead = x.shape[:-1]
    shape = [1] * (len(lead) + 1 - cosines.ndim) + list(cosines.shape[:-1])
    last = max((i for i, size in enumerate(shape) if size > 1), default=-1)
    first = min((i for i, size in enumerate(shape) if size > 1), default=0)
    heads = math.prod(lead[last + 1 :])
    if shape[first : last + 1] != list(lead[first : last + 1]):  # broadcast in the middle too
        cosines, sines, heads = cosines.expand(x.shape), sines.expand(x.shape), 1
    size = x.shape[-1]
    return cosines.reshape(-1, size).contiguous(), sines.reshape(-1, size).contiguous(), heads
