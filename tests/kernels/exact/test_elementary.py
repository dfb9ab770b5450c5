"""exp, log, sin and cos: accuracy over sweeps of all float32, special values, and independence of place."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rzero.kernels.exact.elementary import cos, exp, exp2_, log, sin
from tests.kernels.bits import differing

FUNCTIONS = {
    "exp": (exp, torch.exp),
    "log": (log, torch.log),
    "sin": (sin, torch.sin),
    "cos": (cos, torch.cos),
}


def arguments(step: int) -> torch.Tensor:
    """Every ``step``-th float32 bit pattern, of both signs."""
    bits = torch.arange(0, 0x7F800000, step, dtype=torch.int32)
    positive = bits.view(torch.float32)
    return torch.cat([positive, -positive])


def worst_ulp(name: str, x: torch.Tensor) -> float:
    """The largest error in units of the last place of the float32 nearest the float64 result."""
    ours, reference = FUNCTIONS[name]
    if name == "log":
        x = x[x > 0]
    if name in ("sin", "cos"):
        x = x[x.abs() < 2.0**26]
    worst = 0.0
    for part in x.split(1 << 20):
        exact = reference(part.double())
        finite = exact.abs() < 3.4028234e38
        _, exponent = torch.frexp(exact.abs().clamp(min=2.0**-126))
        ulp = torch.ldexp(torch.ones_like(exact), exponent - 24)
        error = ((ours(part).double() - exact).abs() / ulp)[finite]
        assert not bool(error.isnan().any())
        worst = max(worst, float(error.max()) if error.numel() else 0.0)
    return worst


@pytest.mark.parametrize("name", FUNCTIONS)
def test_error_is_below_one_ulp(name):
    assert worst_ulp(name, arguments(10007)) < 0.55


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_error_is_below_one_ulp_on_a_dense_sweep(name):
    assert worst_ulp(name, arguments(7)) < 0.55


def test_special_values():
    inf, nan, tiny = math.inf, math.nan, 2.0**-149
    x = torch.tensor([0.0, -0.0, inf, -inf, nan, tiny, -tiny])
    assert exp(x).tolist()[:4] == [1.0, 1.0, inf, 0.0] and exp(x)[5:].tolist() == [1.0, 1.0]
    assert log(x).tolist()[:3] == [-inf, -inf, inf]
    assert log(x)[[3, 4, 6]].isnan().all() and math.isclose(
        float(log(x)[5]), -149 * math.log(2), rel_tol=1e-7
    )
    assert sin(x)[2:5].isnan().all() and cos(x)[2:5].isnan().all()
    assert differing(sin(x)[[0, 1, 5, 6]], x[[0, 1, 5, 6]]) == 0
    assert exp(x)[4].isnan()
    # e**-103 = 1.85e-45 lies between one and two steps of 2**-149 and nearer to one; e**-104.5 is below half.
    assert exp(torch.tensor([-103.0, -104.5])).tolist() == [tiny, 0.0]
    assert exp(torch.tensor([88.72, 88.73])).isinf().tolist() == [False, True]


def test_two_to_the_power():
    t = torch.tensor([0.0, -1.0, 10.0, -math.inf, -1e300, 1024.0, 0.5, math.nan], dtype=torch.float64)
    y = exp2_(t.clone())
    assert y[:6].tolist() == [1.0, 0.5, 1024.0, 0.0, 0.0, math.inf]
    assert abs(float(y[6]) - math.sqrt(2)) < 2.0**-28 and bool(y[7].isnan())


@given(st.integers(0, 10**6), st.integers(1, 70), st.integers(0, 9), st.sampled_from(list(FUNCTIONS)))
@settings(max_examples=60, deadline=None)
def test_a_result_does_not_depend_on_the_place_in_a_tensor(seed, length, offset, name):
    """Body and tail of vector loops, alignment and strides."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(offset + length, generator=generator).mul_(
        torch.randint(1, 60, (1,), generator=generator)
    )
    ours = FUNCTIONS[name][0]
    whole = ours(x)
    assert differing(ours(x[offset:]), whole[offset:]) == 0
    assert differing(ours(x.repeat_interleave(3)[::3]), whole) == 0
    assert differing(torch.cat([ours(x[i : i + 1]) for i in range(len(x))]), whole) == 0


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match=r"exp: x must have dtype torch.float32, got torch.float64"):
        exp(torch.zeros(1, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"sin: \|x\| must be below 2\*\*26, got 10000000000.0"):
        sin(torch.tensor([1e10]))
