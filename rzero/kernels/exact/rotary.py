"""Rotary position embedding and its owned table of cosines and sines."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rzero.kernels.exact.elementary import sin_cos64

__all__ = ["rope", "rope_table"]


def rope_table(inverse_frequencies: Tensor, *, length: int, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines for positions 0 .. length - 1, as ``rope`` takes them.

    Invariance. The angle is float32(position * inverse frequency), its sine and cosine are owned
    (exact.elementary): a position's row is the same whatever the length of the table, on any host.

    Args:
        inverse_frequencies: float32 [D/2].
        length: Number of positions.
        scaling: Factor on both, as some long-context embeddings have.

    Returns:
        Two float32 [length, D]: (cos, cos) and (-sin, sin), each half D/2 wide.

    Example:
        >>> cosines, sines = rope_table(torch.tensor([1.0]), length=2)
        >>> cosines[0], sines[0].abs(), sines[1]
        (tensor([1., 1.]), tensor([0., 0.]), tensor([-0.8415,  0.8415]))
    """
    positions = torch.arange(length, dtype=torch.float32, device=inverse_frequencies.device)
    angles = positions[:, None] * inverse_frequencies.to(torch.float32)
    sines, cosines = (x.mul_(scaling).to(torch.float32) for x in sin_cos64(angles.double()))
    return torch.cat([cosines, cosines], 1), torch.cat([-sines, sines], 1)


def rope(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate halves, (a, b) -> (a cos - b sin, b cos + a sin), in float32, rounded once to the dtype of x.

    Invariance. Two products, one sum and one rounding, each IEEE and element by element.

    Args:
        x: [..., D], a the first D/2 and b the others (the layout of Llama and Qwen); receives gradient.
        cosines: float32 [..., D] from ``rope_table``, broadcastable to ``x``.
        sines: float32 [..., D] from ``rope_table``, broadcastable to ``x``.

    Returns:
        The shape and dtype of ``x``.

    Raises:
        ValueError: D is odd or the tables do not fit.

    Reference: Su et al., "RoFormer" (2021), equation 34, with halves in place of neighbours.

    Example:
        >>> rope(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0]), torch.tensor([-1.0, 1.0]))
        tensor([-2.,  1.])
    """
    if x.shape[-1] % 2 or cosines.shape[-1] != x.shape[-1] or sines.shape != cosines.shape:
        raise ValueError(
            f"rope: cosines and sines must have an even last dimension of {x.shape[-1]}, "
            f"got {list(cosines.shape)} and {list(sines.shape)}"
        )
    if torch.is_grad_enabled() and x.requires_grad:
        return _Rope.apply(x, cosines, sines)  # type: ignore[return-value]
    return _rotate(x, cosines, sines)


def _rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    return (x * cosines).add_(torch.roll(x, x.shape[-1] // 2, -1) * sines).to(x.dtype)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cosines, sines):
        ctx.save_for_backward(cosines, sines)
        return _rotate(x, cosines, sines)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        cosines, sines = ctx.saved_tensors
        turned = torch.roll(grad * sines, grad.shape[-1] // 2, -1)
        return (grad * cosines).add_(turned).to(grad.dtype), None, None
