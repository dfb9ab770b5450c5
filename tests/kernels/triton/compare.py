"""Values and gradients of a kernel beside those of the exact backend and of float64."""

import torch
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of values of order one: a few roundings of the dtype, and float32's own for sums of a hundred terms.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.06, torch.float16: 0.008}


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inside_nan(x: Tensor) -> Tensor:
    """``x`` as a view with odd strides into memory that is NaN all around."""
    buffer = torch.full([size + 3 for size in x.shape], float("nan"), dtype=x.dtype)
    view = buffer[tuple(slice(1, size + 1) for size in x.shape)]
    view.copy_(x)
    return view


def values_and_gradients(function, inputs: tuple[Tensor, ...], dtype: torch.dtype | None = None):
    """Outputs of ``function`` and the gradients of a fixed random combination of them, in ``dtype``."""
    leaves = [(x if dtype is None else x.to(dtype)).detach().clone().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    total = sum((y.double() * random(*y.shape, seed=99 + i)).sum() for i, y in enumerate(outputs))
    return [y.detach() for y in outputs], list(torch.autograd.grad(total, leaves))


def assert_close(function, exact, float64, inputs: tuple[Tensor, ...]) -> None:
    """Forward and backward, on poisoned strided inputs, within the tolerance of the dtype."""
    tolerance = TOLERANCE[inputs[0].dtype]
    ours = values_and_gradients(lambda *leaves: function(*map(inside_nan_keeping_grad, leaves)), inputs)
    for reference in (
        values_and_gradients(exact, inputs),
        values_and_gradients(float64, inputs, torch.float64),
    ):
        for got, wanted in zip([*ours[0], *ours[1]], [*reference[0], *reference[1]], strict=True):
            scale = max(1.0, float(wanted.double().abs().max()))
            assert got.shape == wanted.shape
            assert float((got.double() - wanted.double()).abs().max()) <= tolerance * scale


def inside_nan_keeping_grad(x: Tensor) -> Tensor:
    """``inside_nan`` whose gradient reaches ``x``."""
    return _InsideNaN.apply(x)  # type: ignore[return-value]


class _InsideNaN(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return inside_nan(x)

    @staticmethod
    def backward(ctx, grad):
        return grad
