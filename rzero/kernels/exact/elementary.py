"""exp, log, sin and cos built from IEEE additions, multiplications and divisions in float64 alone.

Vector libraries compute these differently on different hosts, and some differently in the body and in the
tail of one tensor. Separate torch additions, subtractions, multiplications, divisions and integer operations
are correctly rounded element by element on every IEEE machine: no call here lets a compiler fuse a multiply
with an add (no addcmul, no lerp, no ``alpha=``), so a result depends on its own argument alone, bit for bit,
on any host and at any place in a tensor.

Errors, measured over sweeps of all float32 arguments (tests/kernels/exact/test_elementary.py): below 1 ulp
of float32.
"""

import math

import torch
from torch import Tensor

from rzero.kernels.exact.rounding import MAGIC

__all__ = ["LOG2_E", "cos", "exp", "exp2_", "log", "log64", "sin", "sin_cos64"]

LOG2_E = 1.4426950408889634
# Minimax polynomial of 2**r on |r| <= 1/2, relative error below 2**-28.5 (Remez exchange in 40 digits),
# lowest degree first, the constant held at 1 so that 2**0 is 1.
EXP2_POLY = (
    1.0,
    0.69314721501124105,
    0.24022652785505594,
    0.055503104669800576,
    0.0096176926093138665,
    0.0013406674482575919,
    0.00015594757625758491,
)
# Added to |t| < 2**51 it rounds t to an integer k and leaves k + 1023 in the low bits: shifted by 52 they
# are 2**k. For k = -1023 that is 0.0, for k = 1024 inf.
EXPONENT_MAGIC = MAGIC + 1023
# Three parts of pi/2 of 26 bits each: k times a part is exact in float64 for |k| < 2**26.
HALF_PI_PARTS = (1.5707963407039642, -1.3909067675399456e-08, 6.123233932053594e-17)
MAX_ANGLE = 2.0**26


def exp2_(t: Tensor, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """2**t of float64 ``t``, which is destroyed -> float64, relative error below 2**-28.

    2**-1022 and less may become 0 (-inf does), 2**1023 and more inf; NaN stays NaN. t - round(t) is exact,
    so the polynomial sees the true argument; its own roundings are float64's. ``out`` and ``scratch``, of
    the shape of ``t``, spare two allocations.
    """
    t.clamp_(min=-1023.0, max=1024.0)
    shifted = torch.add(t, EXPONENT_MAGIC, out=scratch)
    y = torch.sub(shifted, EXPONENT_MAGIC, out=out)
    t.sub_(y)
    torch.mul(t, EXP2_POLY[-1], out=y)
    for coefficient in EXP2_POLY[-2:0:-1]:
        y.add_(coefficient).mul_(t)
    y.add_(EXP2_POLY[0])
    shifted.view(torch.int64).bitwise_left_shift_(52)
    return y.mul_(shifted)


def exp(x: Tensor) -> Tensor:
    """e**x of float32 ``x``, any shape -> float32: special values as IEEE wants; error < 1 ulp.

    Example:
        >>> exp(torch.tensor([0.0, -200.0, 1000.0]))
        tensor([1., 0., inf])
    """
    _require_float32("exp", x)
    return exp2_(x.double().mul_(LOG2_E)).to(torch.float32)


def log64(x: Tensor) -> Tensor:
    """Logarithm of positive, normal float64 ``x`` -> float64, error below 2**-45; inf and NaN give NaN.

    x = m 2**e with m in [sqrt(1/2), sqrt(2)); ln m = 2 artanh(s), s = (m - 1) / (m + 1), as an odd series.
    """
    bits = x.view(torch.int64)
    # (2 - sqrt(2)) 2**52 carries into the exponent exactly where the mantissa is sqrt(2) or more.
    exponent = ((bits + 0x95F619980C433) >> 52) - 1023
    mantissa = (bits - (exponent << 52)).view(torch.float64)
    s = (mantissa - 1.0).div_(mantissa + 1.0)
    square = s * s
    series = torch.full_like(s, 2 / 17)
    for n in range(15, 0, -2):
        series.mul_(square).add_(2 / n)
    return series.mul_(s).add_(exponent.to(torch.float64).mul_(math.log(2))).add_(x * 0.0)


def log(x: Tensor) -> Tensor:
    """Logarithm of float32 ``x``, any shape -> float32: special values as IEEE wants; error < 1 ulp.

    Example:
        >>> log(torch.tensor([1.0, 0.0, torch.inf]))
        tensor([0., -inf, inf])
    """
    _require_float32("log", x)
    y = log64(x.double()).to(torch.float32)
    y = torch.where((x > 0) & (x < math.inf), y, torch.where(x == math.inf, math.inf, math.nan))
    return torch.where(x == 0, -math.inf, y)


def sin_cos64(x: Tensor) -> tuple[Tensor, Tensor]:
    """Sine and cosine of float64 ``x``, |x| < 2**26, that holds float32 values; float64, error below 2**-44.

    x = k pi/2 + r with |r| <= pi/4; k times each part of pi/2 is exact, so r keeps its relative accuracy
    near zero.
    """
    turn = (x * (2 / math.pi)).add_(MAGIC).sub_(MAGIC)
    r = x - turn * HALF_PI_PARTS[0]
    for part in HALF_PI_PARTS[1:]:
        r.sub_(turn * part)
    square = r * r
    sine = torch.full_like(r, -1 / math.factorial(15))
    cosine = torch.full_like(r, 1 / math.factorial(16))
    for n in range(13, 0, -2):
        sine.mul_(square).add_((-1) ** (n // 2) / math.factorial(n))
    for n in range(14, -1, -2):
        cosine.mul_(square).add_((-1) ** (n // 2) / math.factorial(n))
    sine.mul_(r)
    quadrant = turn.nan_to_num(0.0).to(torch.int64) & 3
    odd = (quadrant & 1).bool()
    sign_sine = 1.0 - (quadrant & 2).to(torch.float64)
    sign_cosine = 1.0 - ((quadrant + 1) & 2).to(torch.float64)
    result = torch.where(odd, cosine, sine).mul_(sign_sine)
    return torch.where(x == 0, x, result), torch.where(odd, sine, cosine).mul_(sign_cosine)


def sin(x: Tensor) -> Tensor:
    """Sine of float32 ``x`` in radians, |x| < 2**26 -> float32; inf and NaN give NaN; error < 1 ulp.

    Raises:
        TypeError: ``x`` is not float32.
        ValueError: a finite |x| is 2**26 or more.

    Example:
        >>> sin(torch.tensor([0.0]))
        tensor([0.])
    """
    return sin_cos64(_angle("sin", x))[0].to(torch.float32)


def cos(x: Tensor) -> Tensor:
    """Cosine; otherwise as ``sin``.

    Example:
        >>> cos(torch.tensor([0.0]))
        tensor([1.])
    """
    return sin_cos64(_angle("cos", x))[1].to(torch.float32)


def _angle(function: str, x: Tensor) -> Tensor:
    _require_float32(function, x)
    if bool((x.isfinite() & (x.abs() >= MAX_ANGLE)).any()):
        raise ValueError(f"{function}: |x| must be below 2**26, got {float(x[x.isfinite()].abs().max())}")
    return x.double()


def _require_float32(function: str, x: Tensor) -> None:
    if x.dtype != torch.float32:
        raise TypeError(f"{function}: x must have dtype torch.float32, got {x.dtype}")
