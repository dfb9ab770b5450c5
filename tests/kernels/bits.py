"""Comparing tensors as integers, and rows that make order-dependence show."""

import torch
from torch import Tensor

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def differing(a: Tensor, b: Tensor) -> int:
    """How many elements differ in any bit; -0 differs from 0, a NaN equals any NaN."""
    assert a.shape == b.shape and a.dtype == b.dtype
    a, b = a.detach().contiguous(), b.detach().contiguous()
    integer = INTEGERS[a.element_size()]
    same = (a.view(integer) == b.view(integer)) | (a.isnan() & b.isnan())
    return int((~same).sum())


def wide_rows(rows: int, columns: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Signed rows of wide exponents, some with outliers, denormals, exact powers of two, or zeros alone."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    kind = torch.randint(0, 7, (rows, 1), generator=generator)
    spread = torch.exp2(torch.randint(-20, 20, (rows, columns), generator=generator).float())
    x = torch.where(kind == 1, x * spread, x)
    x = torch.where((kind == 2) & (torch.arange(columns) == 0), x * 1000.0, x)
    x = torch.where(kind == 3, x * 2.0**-140, x)
    x = torch.where(kind == 4, x.sign() * 2.0, x)
    x = torch.where(kind == 5, x * 2.0**60, x)
    x = torch.where(kind == 6, torch.zeros_like(x) * x.sign(), x)
    return x.to(dtype)
